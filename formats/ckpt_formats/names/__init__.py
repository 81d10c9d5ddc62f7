"""What the tensors of well-known models are called, in Hugging Face's libraries and in Megatron-core.

The tables are data, a TOML file for each family beside this one.

table         what a table is; shipped: those that there are
transforms    the changes of shape that they speak of, as views
architecture  what a model is; config, arguments, made_arguments: as transformers and Megatron say it
family        which table has the tensors of a checkpoint; shapes: how long they must be
described     what model a checkpoint holds, all that is said of it held against each other
change        a checkpoint under other names; legacy: those from before Megatron core
translate     all of it together: `to_hf`, `to_megatron`, `to_core`, `to_legacy`
"""

from ckpt_formats.names.table import ExpertStack, NamePattern, NameRow, Table, Tie
from ckpt_formats.names.tables import table_for, tables
from ckpt_formats.names.translate import Naming, naming_of, to_core, to_hf, to_legacy, to_megatron

__all__ = [
    "ExpertStack",
    "NamePattern",
    "NameRow",
    "Naming",
    "Table",
    "Tie",
    "naming_of",
    "table_for",
    "tables",
    "to_core",
    "to_hf",
    "to_legacy",
    "to_megatron",
]
