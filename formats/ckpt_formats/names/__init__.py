"""Tensor names of well-known models in Hugging Face's libraries and in Megatron core, and translation between them.

The tables of names are data: a TOML file for each family in this folder.

table           the form of a table; tables: the tables in this folder
transforms      the changes of shape that tables name, as views
architecture    the sizes and options of a model; config: as a config.json; from_arguments, to_arguments: as Megatron's
family          the table that fits the tensors of a checkpoint
describe        the model in a checkpoint: its configuration and arguments, checked against each other
renames         a checkpoint under other names; legacy: names from before Megatron core
translate       the whole translation: `to_hf`, `to_megatron`, `to_core`, `to_legacy`; the shapes must fit
"""
