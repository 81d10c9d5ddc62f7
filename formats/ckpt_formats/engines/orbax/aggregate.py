"""Trees in MessagePack: the file `checkpoint` of old versions of Orbax, and the files of `flax.training.checkpoints`.

Such a file has the whole tree. A leaf is a value, or a text that says that its array is stored elsewhere.

    PLACEHOLDER://params.kernel      Orbax: the array of this name, beside the file
    //GDAPlaceholder:params/kernel   Flax: the array in this folder, below FILE_gda

Sources: orbax.checkpoint (aggregate_handlers, utils), 0.12; flax.training.checkpoints, 0.12.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.containers.msgpack import begins_as_dict, read_tree
from ckpt_formats.core.claims import MAX_NAMES
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.orbax.metadata import ARRAY, DICT, EMPTY, SEQUENCE, Leaf

AGGREGATE = "checkpoint"
"""The file of the tree. Versions of Orbax before 0.5 wrote it; newer ones read it."""
PLACEHOLDERS = ("PLACEHOLDER://", "//GDAPlaceholder:")


@dataclass(frozen=True)
class AggregatedLeaf:
    """A leaf of the file: a value, or the name of an array that is stored elsewhere."""

    leaf: Leaf
    value: Value = None
    stored: str | None = None


def has_aggregate(folder: Path) -> bool:
    """Whether a folder has the file of a tree; other tools call other things `checkpoint`. Never raises."""
    return (folder / AGGREGATE).is_file() and begins_as_dict(folder / AGGREGATE)


def read_aggregate(folder: Path) -> tuple[list[AggregatedLeaf], int]:
    """The leaves of the tree in a folder's file, and the bytes of the file. Raises what `read_tree` raises."""
    root, nbytes = read_tree(folder / AGGREGATE)
    return leaves_of(root, folder / AGGREGATE), nbytes


def is_placeholder(value: Value) -> bool:
    """Whether a value says that its array is stored elsewhere."""
    return isinstance(value, str) and value.startswith(PLACEHOLDERS)


def leaves_of(root: Value, path: Path) -> list[AggregatedLeaf]:
    """The leaves of a tree that was read from a file.

    Raises `CorruptError` if the root is no dict, `UnsafeError` for too many leaves, `UnsupportedError` if two have
    the same name.
    """
    if not isinstance(root, dict) or not root:
        raise CorruptError("holds no nested dicts of arrays", where=path)
    leaves = list(_leaves(root, (), ()))
    if len(leaves) > MAX_NAMES:
        raise UnsafeError(f"the tree has more than {MAX_NAMES:,} leaves", where=path)
    if len({one.leaf.name for one in leaves}) < len(leaves):
        raise UnsupportedError("two leaves of the tree have the same name: keys contain dots", where=path)
    if other := next((one for one in leaves if not one.leaf.value), None):
        text = f"`{printable(other.leaf.name)}` is {type(other.value).__name__}, which trees of JAX do not have"
        raise UnsupportedError(text, where=path)
    return leaves


def _leaves(value: Value, path: tuple[str, ...], kinds: tuple[int, ...]) -> Iterator[AggregatedLeaf]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, (*path, key), (*kinds, DICT))
    elif isinstance(value, (list, tuple)) and value:
        for i, item in enumerate(value):
            yield from _leaves(item, (*path, str(i)), (*kinds, SEQUENCE))
    elif isinstance(value, str) and (start := next((start for start in PLACEHOLDERS if value.startswith(start)), "")):
        yield AggregatedLeaf(Leaf(path, kinds, ARRAY), stored=value.removeprefix(start))
    else:
        yield AggregatedLeaf(Leaf(path, kinds, _kind(value)), value)


def _kind(value: Value) -> str:
    """What Orbax calls the kind of a value; empty if it has no such kind."""
    if isinstance(value, Tensor):
        return ARRAY
    if isinstance(value, str):
        return "string"
    if isinstance(value, (bool, int, float)):
        return "scalar"
    return next((kind for kind, empty in EMPTY.items() if type(empty) is type(value) and empty == value), "")
