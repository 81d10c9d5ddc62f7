"""The stable names for formats of one's own: docs/adding-a-format.md. They change in major versions only.

A class derived from `Format` (read) or `WritableFormat` (read and written) is known to the library and to the commands
once an installed package names it in the group `ckpt.formats` of its entry points.
"""

from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.containers.safetensors_shards import lost_states
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Group, Origin, Parameter, SourceFile
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.files import Reader, open_regular, read_whole, unreadable, write_sealed
from ckpt_formats.core.format import FileLayouts, FilePlan, Format, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.layout import Layout, Rule
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import ArrayBlob, FileBlob, Fragment, Tensor
from ckpt_formats.core.text import file_stem, printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.state_dicts.extras import names_for_tensors

__all__ = [
    "DTYPES",
    "MASTER",
    "MODEL",
    "ArrayBlob",
    "Box",
    "Checkpoint",
    "FileBlob",
    "FileLayouts",
    "FilePlan",
    "Format",
    "Fragment",
    "Group",
    "Layout",
    "Notice",
    "Origin",
    "Parameter",
    "Plan",
    "ReadOptions",
    "Reader",
    "Receipt",
    "Rule",
    "Seal",
    "SourceFile",
    "Tensor",
    "Transfer",
    "Weight",
    "WritableFormat",
    "file_stem",
    "lost_states",
    "names_for_tensors",
    "open_regular",
    "parse_json_object",
    "printable",
    "read_whole",
    "unreadable",
    "write_sealed",
]
