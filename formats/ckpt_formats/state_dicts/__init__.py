"""Trees of state dicts, as training scripts save them: read into a checkpoint's parts, and written again.

keys          how a tree is keyed: nested or flat, in one dict or two
leaves        tensors at the leaves of a tree, and names for them
optimizer     an optimizer's states told to their parameters: by name, by number, flat
read          a tree, sorted into model, optimizer and the rest: `sorted_state`
write         a checkpoint as the tree that a script loads
saved_form    the tree as it was in its file, to write it so again; storages: which of its tensors share memory
record        what we know beyond such a tree, as one entry of it
"""
