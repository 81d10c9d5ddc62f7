"""Tensor names of models in the libraries that train them, and translation between these.

Tables are data, in this folder. Atoms are the matrices and vectors of models (`atoms.toml`); dialects say how a library
names and packs them (`dialects/`); hyperparameters are the numbers and options of models (`hyperparameters.toml`);
families say which values and names are those of one kind of model (`families/`).

expressions      the language of shapes and conditions; packings: trees that only move elements, as views
tables           reads the tables
hyperparameters  of a model, from what a library states, and back
config           those in a config.json; arguments: those in the arguments of Megatron
model            the stored tensors of a model in a dialect
describe         the model in a checkpoint: its configuration and arguments, checked against each other
renames          a checkpoint under other names; legacy: names from before Megatron core
nemo             models of NeMo, whose YAML file states the arguments
native           names of libraries whose checkpoints state no model: TorchTitan's, Meta's
translate        the whole translation: `to_hf`, `to_megatron`; the shapes must fit
"""
