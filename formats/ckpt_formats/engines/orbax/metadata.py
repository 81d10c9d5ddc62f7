"""The JSON files of Orbax: which leaves a tree has, and when a save was finished.

    _METADATA              each leaf of a tree by its path, with the kind of its value
    _CHECKPOINT_METADATA   the items of a step, and the times at which the save began and was committed
    array_metadatas/       of each process: the implementation of random keys

Source: orbax.checkpoint._src.metadata (tree, checkpoint, array_metadata), 0.12.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.core.claims import MAX_INDEX, MAX_NAMES, MAX_TREE_DEPTH
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError, form_of
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, brief

TREE, STEP, SHARDING = "_METADATA", "_CHECKPOINT_METADATA", "_sharding"
ARRAYS = "array_metadatas"
DATA, OF_PROCESS = "d", "ocdbt.process_"
"""Folders of a database: that of its data files, and the databases of single processes, whose files it names."""
PROCESSES = "process_metadata"
"""The folder in a step that has the part of some processes: which devices each of all processes had."""
COMMITTED = "commit_success.txt"
"""Written last where folders cannot be renamed, as in buckets."""
STRINGS = "_strings.json"
SEQUENCE, DICT = 1, 2
"""The kinds of a key: an index of a list or tuple, a key of a dict or the name of a field."""

ARRAY, SHARDED_ARRAY = "np.ndarray", "jax.Array"
"""Kinds of arrays. Orbax restores the second kind only to a sharding, which a file states of one set of devices; the
first kind to any sharding, and without one to the memory of the host."""
EMPTY: dict[str, Value] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": None}
"""Values without arrays, by the names of their kinds."""


@dataclass(frozen=True)
class Leaf:
    """One leaf of a tree: its keys from the root on, the kinds of the keys, and that of the value."""

    path: tuple[str, ...]
    kinds: tuple[int, ...]
    value: str

    @property
    def name(self) -> str:
        """What the leaf's array is called."""
        return ".".join(self.path)


@dataclass(frozen=True)
class TreeMetadata:
    """The leaves of a tree in their order."""

    leaves: tuple[Leaf, ...]
    stores_fill_values: bool
    """Whether chunks of nothing but zeros are stored, too. Then a chunk that is not there is missing."""


def read_tree(folder: Path) -> TreeMetadata | None:
    """The leaves that `_METADATA` lists; None if there is no such file. Raises `CorruptError` for other content."""
    path = folder / TREE
    if not path.is_file():
        return None
    content = parse_json_object(read_whole(path, MAX_INDEX), path)
    with form_of("Orbax", path):
        leaves = tuple(_leaves(content["tree_metadata"], path))
    if len({leaf.name for leaf in leaves}) < len(leaves):
        raise UnsupportedError("two leaves of the tree have the same name: keys contain dots", where=path)
    return TreeMetadata(leaves, content.get("store_array_data_equal_to_fill_value") is True)


def _leaves(tree: Any, path: Path) -> Iterator[Leaf]:
    if len(tree) > MAX_NAMES:
        raise UnsafeError(f"the tree has more than {MAX_NAMES:,} leaves", where=path)
    for leaf in tree.values():
        keys = [(key["key"], key["key_type"]) for key in leaf["key_metadata"]]
        if len(keys) > MAX_TREE_DEPTH or not all(type(key) in (str, int) and type(kind) is int for key, kind in keys):
            raise CorruptError(f"a leaf with the keys {brief(keys)}", where=path)
        value = leaf["value_metadata"]["value_type"]
        if not isinstance(value, str):
            raise CorruptError(f"a value of the kind {brief(value)}", where=path)
        yield Leaf(tuple(str(key) for key, _ in keys), tuple(kind for _, kind in keys), value)


@dataclass(frozen=True)
class StepMetadata:
    """What `_CHECKPOINT_METADATA` says of a step."""

    items: dict[str, str]
    """The class of the handler of each item, by the item's name; that of the folder itself under the empty name."""
    is_committed: bool


def read_step(folder: Path) -> StepMetadata | None:
    """What is known of the step in a folder; None if the file is not there."""
    path = folder / STEP
    if not path.is_file():
        return None
    content = parse_json_object(read_whole(path, MAX_INDEX), path)
    handlers = content.get("item_handlers")
    items = handlers if isinstance(handlers, dict) else {} if handlers is None else {"": handlers}
    if not all(isinstance(name, str) for name in items.values()):
        raise CorruptError("the handlers of items are not texts", where=path)
    first, last = content.get("init_timestamp_nsecs"), content.get("commit_timestamp_nsecs")
    return StepMetadata(items, first is None or last is not None)


def random_keys(folder: Path) -> dict[str, str]:
    """The implementation of each array that is the data of random keys, by the array's name, such as `threefry2x32`."""
    implementations: dict[str, str] = {}
    if not (folder / ARRAYS).is_dir():
        return implementations
    for path in sorted((folder / ARRAYS).iterdir()):
        content = parse_json_object(read_whole(path, MAX_INDEX), path)
        with form_of("Orbax", path):
            for entry in content["array_metadatas"]:
                array = entry["array_metadata"]
                if isinstance(array["ext_metadata"], dict) and "random_key_impl" in array["ext_metadata"]:
                    implementations[str(array["param_name"])] = str(array["ext_metadata"]["random_key_impl"])
    return implementations


def read_strings(folder: Path) -> dict[str, str]:
    """The texts among the leaves, by their names."""
    path = folder / STRINGS
    if not path.is_file():
        return {}
    return {name: str(text) for name, text in parse_json_object(read_whole(path, MAX_INDEX), path).items()}


def tree_json(leaves: list[tuple[Leaf, tuple[int, ...] | None]], zarr3: bool) -> bytes:
    """`_METADATA` of these leaves, each with the shape of its chunks, or None if it has no array."""
    tree = {
        str(leaf.path): {
            "key_metadata": [{"key": key, "key_type": kind} for key, kind in zip(leaf.path, leaf.kinds, strict=True)],
            "value_metadata": {
                "value_type": leaf.value,
                "skip_deserialize": leaf.value in EMPTY,
                **({"write_shape": list(chunk)} if chunk is not None and leaf.value == SHARDED_ARRAY else {}),
            },
        }
        for leaf, chunk in leaves
    }
    content = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": zarr3,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    return json.dumps(content).encode()


def shown(leaf: Leaf) -> str:
    """The path of a leaf, for messages."""
    return printable(leaf.name)
