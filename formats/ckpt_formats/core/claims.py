"""What a file may claim: the bounds of all sizes, numbers and names that readers believe, in one place.

The rule: a claim is checked before anything is made of it.

- What takes memory or time for each unit that a file claims is believed only as far as the bytes of this file pay for
  it (`check_paid`): a claim of 2^50 elements costs its writer a few characters.
- What is read as a whole before it can be checked has a bound in bytes.
- What costs nothing by itself, such as a shape, has a bound that keeps the arithmetic exact.

The bounds are far above what training writes. What a format states as its own limit is in docs/format.md, too.
"""

from pathlib import Path

from ckpt_formats.core.errors import CorruptError

MAX_AXES = 64
"""Axes of a tensor. torch stores no more."""
MAX_NUMPY_AXES = 32
"""Axes of an array of NumPy. NumPy 1 has no more."""
MAX_GGML_AXES = 4
"""Axes of a tensor of ggml, in files of GGUF."""
MAX_ELEMENTS = 1 << 62
"""Elements of a tensor, and elements or bytes of one that is sliced: they fit int64."""
MAX_STEPPED_ELEMENTS = 1 << 50
"""Elements of a tensor that an optimizer steps, in logs and in what a shadow describes."""
MAX_RANKS = 1 << 20
"""Ranks in a log, and in what a checkpoint states of its origin."""
MAX_NUMBER = 1 << 20
"""Layers, experts, shards, entries of a list: a number of which as many things are made."""
MAX_PACKS = 1 << 32
"""More than the numbers of packs that a row of the universal index can have."""

MAX_NAME = 1 << 16
"""Characters of a tensor's name."""
MAX_NEW_NAME = 1 << 14
"""Characters of a name that `--rename` makes."""
MAX_PATH = 4096
"""Characters of a path."""
MAX_FILE_NAME = 255
"""Bytes of a file's name."""
MAX_NAMES = 500_000
"""Names in one state dict of torch."""
MAX_EXPECTED_NAMES = 1_000_000
"""Names of a model of which a `config.json` states how many layers and experts it has."""
MAX_VALUES = 4_000_000
"""Values in one file that are no tensors: each takes memory, also where it takes one byte of the file."""
MAX_DIGITS = 1 << 20
"""Characters of an integer in typed JSON."""

MAX_DEPTH = 150
"""Containers in each other, in typed JSON and in extras."""
MAX_TREE_DEPTH = 100
"""Containers in each other, in the trees of MessagePack, DCP and state dicts."""
MAX_STATE_DEPTH = 50
"""Containers in each other above the tensors of a state dict."""

MAX_POINTER = 4096
"""Bytes of a file that names the newest checkpoint."""
MAX_YAML = 1 << 20
"""Characters of the YAML file of a model."""
MAX_SMALL_JSON = 1 << 20
"""Bytes of a JSON file beside tensors, such as `config.json`."""
MAX_RANDOM = 1 << 24
"""Bytes of the states of random number generators in a record of a log."""
MAX_LIST = 1 << 28
"""Bytes of the list of a chain, of a note of a job, and of the text of a record of a log."""
MAX_INDEX = 1 << 30
"""Bytes of an index of shards, and of the layout of a log."""
MAX_MANIFEST = 4 << 30
"""Bytes of the manifest of a universal checkpoint."""
MAX_HEADER = 100_000_000
"""Bytes of a header of safetensors: the limit of the reference implementation."""
MAX_NUMPY_HEADER = 10_000
"""Bytes of a header of `.npy`: NumPy reads no longer ones either."""
MAX_PICKLE = 512 << 20
"""Bytes of one pickle."""


def check_paid(what: str, count: int, unit_nbytes: int, nbytes: int, where: Path) -> None:
    """Raise `CorruptError` if a file claims more units of something than its bytes can describe.

    Args:
        what: The units, in the plural: "chunks".
        count: How many the file claims.
        unit_nbytes: The least bytes that one unit takes in the file.
        nbytes: The bytes that the file has for them.
        where: The file.
    """
    if count * unit_nbytes > nbytes:
        raise CorruptError(f"it claims {count:,} {what}, and its {nbytes:,} bytes cannot describe as many", where=where)
