"""`.metadata`: which tensors and objects a checkpoint has, and where each block of them lies.

It is a pickle of `torch.distributed.checkpoint.metadata.Metadata`:

    state_dict_metadata  {FQN: TensorStorageMetadata(properties, size, chunks) | BytesStorageMetadata()}
    planner_data         {FQN: path of the value in the state dict}, or None
    storage_data         {MetadataIndex(fqn, offset): _StorageInfo(relative_path, offset, length)}
    storage_meta, version                                 absent before PyTorch 2.3 and 2.9

A block is found by its FQN and its offsets; the index that is saved beside them
is only a hint. Chunks come in any order. Shards that are empty are listed too.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path, PurePosixPath

from ckpt_formats.containers.torchfile import CompactRecord, RecordForm, load_pickle
from ckpt_formats.containers.torchfile.storages import MAX_AXES, MAX_ELEMENTS
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import Corrupt, Unsafe, Unsupported
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Record, Value

MODULE = "torch.distributed.checkpoint.metadata"
STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"
MOST_BYTES = 512 << 20

_CHUNK = RecordForm(MODULE, "ChunkStorageMetadata", (("offsets", "size"), ("sizes", "size")))
_INDEX = RecordForm(MODULE, "MetadataIndex", (("fqn", "text"), ("index", "int")), last=("offset", "size"))
_PLACE = RecordForm(STORAGE_MODULE, "_StorageInfo", (("relative_path", "text"), ("offset", "int"), ("length", "int")))

FORMS = (_CHUNK, _INDEX, _PLACE)
"""Objects that there is one of, or two, for each block."""

Steps = tuple[str | int, ...]
"""A path in a state dict: texts are keys of dicts, numbers places in lists."""
Key = tuple[str, Shape | None]
"""FQN and offsets of a block; None for objects that are no tensors."""


# As for storages of `torchfile`: there are as many as a checkpoint has blocks, and freezing takes time.
@dataclass(slots=True)
class ItemRange:
    """Where one saved object lies: bytes `offset` to `offset + nbytes` of a file in the checkpoint's folder."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()
    """Names of the transformations of the stream, in the order in which a reader undoes them."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor: its blocks that hold something, each with its item, if any file has it."""

    dtype: DType
    shape: Shape
    blocks: tuple[tuple[Box, ItemRange | None], ...]


@dataclass(frozen=True, slots=True)
class Metadata:
    """What `.metadata` says, checked: names are names, boxes are boxes, paths stay inside."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, ItemRange]
    paths: Mapping[str, Steps]
    files: tuple[str, ...]
    """All that it names, also those with nothing but empty shards."""
    items: Collection[ItemRange]
    notices: tuple[Notice, ...] = ()
    nesting: tuple[Notice, ...] = ()
    """Of how paths were found, for whoever needs them."""


def read_metadata(path: Path) -> Metadata:
    """Read a `.metadata`. Raises `Corrupt`, `Unsafe`, `Unsupported`."""
    root = load_pickle(read_whole(path, MOST_BYTES), str(path), FORMS)
    return _MetadataReader(path).metadata(root)


_VERSION = "1.0.0"
_MOST_COUNTED = 1 << 24
_TAKEN_APART = (
    "the metadata do not say how the state dict was nested: its names are taken apart behind those of the model and "
    "the optimizer"
)
_OPTIMIZER = re.compile(r"(optim(?:izer)?(?:_state)?(?:_dict)?)\.state\..+")


def _apart(names: Sequence[str], tensors: Collection[str]) -> dict[str, Steps]:
    """The path of each name, where nothing tells: a flat state dict, but for an optimizer's own dict in it."""
    heads = {match[1] for name in names if (match := _OPTIMIZER.fullmatch(name))}
    if heads and {name.partition(".")[0] for name in tensors} <= {*heads, "model"}:
        heads.add("model")
    parts = {name: name.partition(".") for name in names}
    return {name: (head, rest) if head in heads and rest else (name,) for name, (head, _, rest) in parts.items()}


class _MetadataReader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, str] = {}
        self._unlisted: set[Key] = set()
        """Blocks and objects that have a place, until they are met among those that are listed."""

    def metadata(self, root: Value) -> Metadata:
        if type(root) is not Record or root.cls.name != "Metadata" or not isinstance(root.state, dict):
            raise self._corrupt("it is not the metadata of a distributed checkpoint")
        entries, placed = root.get("state_dict_metadata"), root.get("storage_data")
        if not isinstance(entries, dict) or not all(type(name) is str for name in entries):
            raise self._corrupt("it lists no tensors and objects")
        if not isinstance(placed, dict):
            raise self._corrupt("it does not say where anything is stored")
        if "planner_data" not in root.state:
            raise self._corrupt("it does not say how names are made, not even that they are not")
        items = self._items(placed)
        self._unlisted = set(items) if len(items) < _MOST_COUNTED else set()
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, ItemRange] = {}
        for name, entry in entries.items():
            kind = entry.cls.name if type(entry) is Record else ""
            if kind == "TensorStorageMetadata":
                tensors[name] = self._tensor(name, entry, items)
            elif kind == "BytesStorageMetadata":
                item = items.get((name, None))
                if item is None:
                    raise self._corrupt(f"it does not say where `{printable(name)}` is stored")
                objects[name] = item
                self._unlisted.discard((name, None))
            else:
                raise self._corrupt(f"`{printable(name)}` is neither a tensor nor an object")
        if self._unlisted:
            fqn, at = min(self._unlisted, key=str)
            raise self._corrupt(
                f"it says where a block of `{printable(fqn)}` at {'no place' if at is None else list(at)} is stored, "
                "but lists no such block"
            )
        paths, nesting = self._paths(root.get("planner_data"), entries, tensors)
        notices: tuple[Notice, ...] = ()
        version = root.get("version")
        if version not in (None, _VERSION):
            text = f"the metadata are of version {printable(str(version))[:20]}, which is not known: read as {_VERSION}"
            notices = (Notice(text, weight=Weight.UNSURE),)
        return Metadata(tensors, objects, paths, tuple(self._files), items.values(), notices, nesting)

    def _items(self, placed: Mapping[Value, Value]) -> dict[Key, ItemRange]:
        found: dict[Key, ItemRange] = {}
        for index, place in placed.items():
            if type(index) is CompactRecord and index[0] == "MetadataIndex":
                fqn, offset = index[1], index[3]
            else:
                fqn, offset = self._fields(index, "MetadataIndex", "fqn", "offset")
            if type(place) is CompactRecord and place[0] == "_StorageInfo":
                file, start, nbytes, transforms = place[1], place[2], place[3], None
            else:
                file, start, nbytes, transforms = self._fields(
                    place, "_StorageInfo", "relative_path", "offset", "length", "transform_descriptors"
                )
            key = (fqn, offset)
            if key in found:
                raise self._corrupt(f"it says twice where a block of `{printable(str(fqn))}` is stored")
            if type(start) is not int or type(nbytes) is not int or start < 0 or nbytes < 0:
                raise self._corrupt(f"an item of `{printable(str(fqn))}` is at an impossible place")
            known = self._files.get(file) if type(file) is str else None
            item = found[key] = ItemRange(known or self._file(file), start, nbytes)
            if transforms:
                item.transforms = self._transforms(transforms)
        return found

    def _tensor(self, name: str, entry: Record, items: Mapping[Key, ItemRange]) -> StoredTensor:
        dtype = self._dtype(name, entry.get("properties"))
        shape, chunks = entry.get("size"), entry.get("chunks")
        if not _is_shape(shape) or type(chunks) is not list:
            raise self._corrupt(f"tensor `{printable(name)}` has an impossible shape")
        blocks = []
        for chunk in chunks:
            if type(chunk) is CompactRecord and chunk[0] == "ChunkStorageMetadata":
                offsets, sizes = chunk[1], chunk[2]
            else:
                offsets, sizes = self._fields(chunk, "ChunkStorageMetadata", "offsets", "sizes")
                if not _is_shape(offsets) or not _is_shape(sizes):
                    raise self._corrupt(f"a block of tensor `{printable(name)}` has an impossible shape")
            if len(offsets) != len(shape) or len(sizes) != len(shape):
                raise self._corrupt(f"a block of tensor `{printable(name)}` has {len(offsets)} axes, not {len(shape)}")
            start = tuple(offsets)
            self._unlisted.discard((name, start))
            if 0 not in sizes:
                blocks.append((Box(start, tuple(map(add, start, sizes))), items.get((name, start))))
        return StoredTensor(dtype, tuple(shape), tuple(blocks))

    def _dtype(self, name: str, properties: Value) -> DType:
        state = properties.state if type(properties) is Record else None
        if isinstance(state, dict):
            state = (state.get("dtype"),)
        found = state[0] if isinstance(state, tuple) and state else None
        if type(found) is not Global or found.module != "torch":
            raise self._corrupt(f"tensor `{printable(name)}` has no element type")
        if found.name not in DTYPES:
            raise Unsupported(
                f"tensor `{printable(name)}` has elements of type {printable(str(found))}", where=self._path
            )
        return DTYPES[found.name]

    def _paths(
        self, said: Value, names: Iterable[str], tensors: Collection[str]
    ) -> tuple[dict[str, Steps], tuple[Notice, ...]]:
        """Each name's path in the state dict. Names are never taken apart: they have dots of their own."""
        if not said or not isinstance(said, dict):
            unknown = Notice("the planner's data are of an unknown kind: names stay flat", weight=Weight.UNSURE)
            paths = _apart(tuple(names), tensors)
            apart = Notice(_TAKEN_APART, weight=Weight.UNSURE)
            notices = (*((unknown,) if said else ()), *((apart,) if any(len(p) > 1 for p in paths.values()) else ()))
            return paths, notices
        paths = {}
        for name in names:
            path = said.get(name)
            if type(path) not in (tuple, list) or not path or not all(type(key) in (str, int) for key in path):
                raise self._corrupt(f"`{printable(name)}` has an impossible path in the state dict")
            if ".".join(map(str, path)) != name:
                raise self._corrupt(
                    f"`{printable(name)}` has another path in the state dict: {printable(str(list(path))):.200}"
                )
            paths[name] = tuple(path)
        return paths, ()

    def _transforms(self, said: Value) -> tuple[str, ...]:
        if type(said) not in (list, tuple) or not all(type(name) is str for name in said):
            raise self._corrupt("an item's transformations are no list of names")
        return tuple(said)

    def _file(self, said: Value) -> str:
        """A relative path as it is written, if it leads to a file inside the folder."""
        if type(said) is not str:
            raise self._corrupt("an item is in a file without a name")
        path = PurePosixPath(said)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in said or "\\" in said:
            raise Unsafe(f"it names {printable(said)!r:.200}, which is not a file inside its folder", where=self._path)
        self._files[said] = said
        return said

    def _fields(self, value: Value, name: str, *fields: str) -> tuple[Value, ...]:
        """The attributes of an object that was not spelled in the usual way."""
        if type(value) is not Record or value.cls.name != name or not isinstance(value.state, dict):
            if type(value) is Record and name == "_StorageInfo":
                raise Unsupported(f"items are kept in the way of {printable(str(value.cls))}", where=self._path)
            raise self._corrupt(f"something is not a {name}")
        found = tuple(value.state.get(field) for field in fields)
        if name == "MetadataIndex":
            fqn, offset = found
            if type(fqn) is not str or not (offset is None or _is_shape(offset)):
                raise self._corrupt("a block has an impossible name")
            return fqn, None if offset is None else tuple(offset)
        return found

    def _corrupt(self, what: str) -> Corrupt:
        return Corrupt(what, where=self._path)


def _is_shape(value: Value) -> bool:
    if not isinstance(value, tuple) or len(value) > MAX_AXES:
        return False
    return all(type(n) is int and 0 <= n < MAX_ELEMENTS for n in value)
