"""Trees of state dicts, as training scripts save them: read into a checkpoint, and written again.

keys                 how a tree is keyed: nested or flat, in one dict or two
leaves               tensors at the leaves of a tree, and their names
optimizer_form       detects optimizers' state dicts anywhere in a tree
parameter_order      matches numbered parameters to tensors by shapes, order and values
numbered_optimizers  the same for several optimizers of one model
optimizer            matches optimizers' states and groups to the model's tensors
model                finds the model in a tree
objects              pickled modules, optimizers and composite tensors as dicts; uses modules,
                     pickled_optimizer, tensor_parts, walk
steps                the step that a tree states; statements: values that several places must agree on
read                 a tree, split into model, optimizer and extras: `training_state`; notices of what is
                     only a part of a model, and of what is not read
write                a checkpoint as the tree that a script loads
original_form        how the tree was in its file; storages: which tensors share memory
run_files            files that lie beside a checkpoint, as extras, and written as files again
record               further facts about a checkpoint, as one entry of such a tree
"""
