"""What the tensors of well-known models are called, in Hugging Face's libraries and in Megatron-core.

The tables are data, a TOML file for each family beside this one: `table` reads
them, `transforms` has the changes of shape that they speak of.
"""

from ckpt_formats.names.table import Row, Stack, Table, Tie, table_for, tables

__all__ = ["Row", "Stack", "Table", "Tie", "table_for", "tables"]
