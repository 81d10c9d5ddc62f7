"""Trees of state dicts, as training scripts save them: read into a checkpoint's parts, and written again.

keys          how a tree is keyed: nested or flat, in one dict or two
leaves        tensors at the leaves of a tree, and names for them
optimizer_form  what an optimizer's state dict looks like, wherever it lies in a tree
numbered      optimizers that number their parameters, told to tensors by shapes and order
optimizer     optimizers' states and groups, told to the model's tensors
model         where in a tree the model is
objects       pickled modules, optimizers and tensors of parts, as the dicts they stand for: modules,
              pickled_optimizer, tensor_parts; inside
not_weights   what lies among the model's tensors and is none
steps, part   what a tree states of its step, and of being a part of a model
read          a tree, sorted into model, optimizer and the rest: `sorted_state`
write         a checkpoint as the tree that a script loads
saved_form    the tree as it was in its file, to write it so again; storages: which of its tensors share memory
record        what we know beyond such a tree, as one entry of it
"""
