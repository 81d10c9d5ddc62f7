"""Read `.metadata`: the tensors and objects of a checkpoint, and the file and offset of each block.

It is a pickle of `torch.distributed.checkpoint.metadata.Metadata`:

    state_dict_metadata  {FQN: TensorStorageMetadata(properties, size, chunks) | BytesStorageMetadata()}
    planner_data         {FQN: path of the value in the state dict}, or None
    storage_data         {MetadataIndex(fqn, offset): _StorageInfo(relative_path, offset, length)}
    storage_meta, version                                 absent before PyTorch 2.3 and 2.9

A block is identified by its FQN (name) and its offsets; the index that is saved with them
is only a hint. Chunks have no particular order. Empty shards are also listed.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import add
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from ckpt_formats.containers.torchfile import CompactRecord, RecordForm, StateForm, load_pickle
from ckpt_formats.core.claims import MAX_AXES, MAX_ELEMENTS, MAX_PICKLE
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Global, Record, Value

MODULE = "torch.distributed.checkpoint.metadata"
STORAGE_MODULE = "torch.distributed.checkpoint.filesystem"

_CHUNK = RecordForm(MODULE, "ChunkStorageMetadata", (("offsets", "size"), ("sizes", "size")))
_INDEX = RecordForm(MODULE, "MetadataIndex", (("fqn", "text"), ("index", "int")), last=("offset", "size"))
_PLACE = RecordForm(STORAGE_MODULE, "_StorageInfo", (("relative_path", "text"), ("offset", "int"), ("length", "int")))

_TENSOR = RecordForm(
    MODULE,
    "TensorStorageMetadata",
    (("properties", StateForm(MODULE, "TensorProperties")), ("size", "size"), ("chunks", _CHUNK)),
    alike=True,
)
"""A tensor in one block. Those of the same type and shape have the same opcodes."""

FORMS = (_CHUNK, _INDEX, _PLACE, _TENSOR)
"""Records of which there are one or two for each block."""

Steps = tuple[str | int, ...]
"""A path in a state dict: strings are keys of dicts, numbers are indices of lists."""
Key = tuple[str, Shape | None]
"""FQN and offsets of a block; None for objects that are no tensors."""


# Neither `ItemRange` nor `StoredTensor` is frozen, like storages of `torchfile`: there is one for each block, and
# frozen dataclasses take longer to make.
@dataclass(slots=True)
class ItemRange:
    """The place of one saved item: bytes `offset` to `offset + nbytes` of a file in the checkpoint's folder."""

    file: str
    offset: int
    nbytes: int
    transforms: tuple[str, ...] = ()
    """Names of the stream's transformations, in the order in which a reader reverses them."""


@dataclass(slots=True)
class StoredTensor:
    """A tensor: its non-empty blocks, each with its item, or None if no file contains it."""

    dtype: DType
    shape: Shape
    blocks: tuple[tuple[Box, ItemRange | None], ...]


@dataclass(frozen=True, slots=True)
class EmptyBlock:
    """A block without elements, which has an item all the same: some ranks have no rows of a tensor."""

    name: str
    start: Shape
    shape: Shape
    item: ItemRange


@dataclass(frozen=True, slots=True)
class Metadata:
    """The checked content of `.metadata`. All files are inside of the checkpoint's folder."""

    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, ItemRange]
    paths: Mapping[str, Steps]
    files: tuple[str, ...]
    """All files that it names, also files with only empty shards."""
    items: Collection[ItemRange]
    empty: Sequence[EmptyBlock] = ()
    notices: tuple[Notice, ...] = ()
    nesting: tuple[Notice, ...] = ()
    """Notices on how paths were derived. Only readers that use the paths report them."""


def read_metadata(path: Path) -> Metadata:
    """Read a `.metadata`. Raises `CorruptError`, `UnsafeError` or `UnsupportedError`."""
    root = load_pickle(read_whole(path, MAX_PICKLE), str(path), FORMS)
    return MetadataReader(path).metadata(root)


_VERSION = "1.0.0"
_STEP_TYPES = frozenset((str, int))
_MAX_CHECKED = 1 << 24
_NAMES_SPLIT = (
    "the metadata do not state how the state dict was nested: its names are split after those of the model and the "
    "optimizer"
)
_OPTIMIZER = re.compile(r"(optim(?:izer)?(?:_state)?(?:_dict)?)\.state\..+")


def _split_names(names: Sequence[str], tensors: Collection[str]) -> dict[str, Steps]:
    """The path of each name, if it is not stored: a flat state dict that may contain an optimizer's dict."""
    heads = {match[1] for name in names if (match := _OPTIMIZER.fullmatch(name))}
    if heads and {name.partition(".")[0] for name in tensors} <= {*heads, "model"}:
        heads.add("model")
    parts = {name: name.partition(".") for name in names}
    return {name: (head, rest) if head in heads and rest else (name,) for name, (head, _, rest) in parts.items()}


_Blocks: TypeAlias = tuple[DType, Shape, list[tuple[Shape, Shape, Box | None]]]
"""Type and shape of a tensor; of each block the offsets, the lengths, and the box unless it is empty."""


class MetadataReader:
    """Turns the unpickled `.metadata` of one checkpoint into tables of items and chunks, and checks each part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, str] = {}
        self._checked: dict[int, _Blocks] = {}
        """By the ids of entries."""
        self._empty: list[EmptyBlock] = []
        self._unlisted: set[Key] = set()
        """Blocks and objects that have an item, but were not yet seen in the lists of tensors and objects."""

    def metadata(self, root: Value) -> Metadata:
        """The checked content of an unpickled `.metadata`."""
        if type(root) is not Record or root.cls.name != "Metadata" or not isinstance(root.state, dict):
            raise self._corrupt("it is not the metadata of a distributed checkpoint")
        entries, storage = root.get("state_dict_metadata"), root.get("storage_data")
        if not isinstance(entries, dict) or not all(type(name) is str for name in entries):
            raise self._corrupt("it lists no tensors and objects")
        if not isinstance(storage, dict):
            raise self._corrupt("it does not state where items are stored")
        if "planner_data" not in root.state:
            raise self._corrupt("it has no entry `planner_data`, which states the paths of names or is empty")
        items = self._items(storage)
        self._unlisted = set(items) if len(items) < _MAX_CHECKED else set()
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, ItemRange] = {}
        for name, entry in entries.items():
            kind = entry.cls.name if type(entry) is Record else entry[0] if type(entry) is CompactRecord else ""
            if kind == "TensorStorageMetadata":
                tensors[name] = self._tensor(name, entry, items)
            elif kind == "BytesStorageMetadata":
                item = items.get((name, None))
                if item is None:
                    raise self._corrupt(f"it does not state where `{printable(name)}` is stored")
                objects[name] = item
                self._unlisted.discard((name, None))
            else:
                raise self._corrupt(f"`{printable(name)}` is neither a tensor nor an object")
        if self._unlisted:
            fqn, at = min(self._unlisted, key=str)
            raise self._corrupt(
                f"it states where a block of `{printable(fqn)}` at {'no place' if at is None else list(at)} is stored, "
                "but lists no such block"
            )
        paths, nesting = self._paths(root.get("planner_data"), entries, tensors)
        notices: tuple[Notice, ...] = ()
        version = root.get("version")
        if version not in (None, _VERSION):
            text = f"the metadata have the unknown version {printable(str(version))[:20]}: read as {_VERSION}"
            notices = (Notice(text, weight=Weight.UNSURE),)
        files, empty = tuple(self._files), tuple(self._empty)
        return Metadata(tensors, objects, paths, files, items.values(), empty, notices, nesting)

    def _items(self, storage: Mapping[Value, Value]) -> dict[Key, ItemRange]:
        items: dict[Key, ItemRange] = {}
        for index, place in storage.items():
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
            if key in items:
                raise self._corrupt(f"it states twice where a block of `{printable(str(fqn))}` is stored")
            if type(start) is not int or type(nbytes) is not int or start < 0 or nbytes < 0:
                raise self._corrupt(f"an item of `{printable(str(fqn))}` is at an impossible place")
            known = self._files.get(file) if type(file) is str else None
            item = items[key] = ItemRange(known or self._file(file), start, nbytes)
            if transforms:
                item.transforms = self._transforms(transforms)
        return items

    def _tensor(self, name: str, entry: Record | CompactRecord, items: Mapping[Key, ItemRange]) -> StoredTensor:
        """A tensor. Compact records of tensors that are alike are one object, which is checked once."""
        checked = self._checked.get(id(entry))
        if checked is None:
            checked = self._blocks(name, entry)
            if type(entry) is CompactRecord:
                self._checked[id(entry)] = checked
        dtype, shape, boxes = checked
        blocks = []
        for start, lengths, box in boxes:
            key = name, start
            self._unlisted.discard(key)
            if box is not None:
                blocks.append((box, items.get(key)))
            elif (item := items.get(key)) is not None:
                self._empty.append(EmptyBlock(name, start, lengths, item))
        return StoredTensor(dtype, shape, tuple(blocks))

    def _blocks(self, name: str, entry: Record | CompactRecord) -> _Blocks:
        if type(entry) is CompactRecord:
            _, properties, shape, chunks = entry
        else:
            assert type(entry) is Record
            properties, shape, chunks = entry.get("properties"), entry.get("size"), entry.get("chunks")
        dtype = self._dtype(name, properties)
        if not _is_shape(shape) or type(chunks) is not (tuple if type(entry) is CompactRecord else list):
            raise self._corrupt(f"tensor `{printable(name)}` has an impossible shape")
        boxes: list[tuple[Shape, Shape, Box | None]] = []
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
            boxes.append((start, sizes, None if 0 in sizes else Box(start, tuple(map(add, start, sizes)))))
        return dtype, tuple(shape), boxes

    def _dtype(self, name: str, properties: Value) -> DType:
        state = properties.state if type(properties) is Record else None
        if isinstance(state, dict):
            state = (state.get("dtype"),)
        dtype = state[0] if isinstance(state, tuple) and state else None
        if type(dtype) is not Global or dtype.module != "torch":
            raise self._corrupt(f"tensor `{printable(name)}` has no element type")
        if dtype.name not in DTYPES:
            raise UnsupportedError(
                f"tensor `{printable(name)}` has elements of type {printable(str(dtype))}", where=self._path
            )
        return DTYPES[dtype.name]

    def _paths(
        self, planner_data: Value, names: Iterable[str], tensors: Collection[str]
    ) -> tuple[dict[str, Steps], tuple[Notice, ...]]:
        """Each name's path in the state dict, and notices. Stored paths are used, because names contain dots."""
        if not planner_data or not isinstance(planner_data, dict):
            unknown = Notice("the planner's data have an unknown form: names stay flat", weight=Weight.UNSURE)
            paths = _split_names(tuple(names), tensors)
            split_names = Notice(_NAMES_SPLIT, weight=Weight.UNSURE)
            notices = (
                *((unknown,) if planner_data else ()),
                *((split_names,) if any(len(p) > 1 for p in paths.values()) else ()),
            )
            return paths, notices
        paths = {}
        for name in names:
            path = planner_data.get(name)
            if type(path) not in (tuple, list) or not path or not _STEP_TYPES.issuperset(map(type, path)):
                raise self._corrupt(f"`{printable(name)}` has an impossible path in the state dict")
            if ".".join(map(str, path)) != name:
                raise self._corrupt(
                    f"`{printable(name)}` has another path in the state dict: {printable(str(list(path))):.200}"
                )
            paths[name] = tuple(path)
        return paths, ()

    def _transforms(self, names: Value) -> tuple[str, ...]:
        if type(names) not in (list, tuple) or not all(type(name) is str for name in names):
            raise self._corrupt("an item's transformations are not a list of names")
        return tuple(names)

    def _file(self, name: Value) -> str:
        """The relative path of a file, unchanged. Raises `UnsafeError` if it leads out of the folder."""
        if type(name) is not str:
            raise self._corrupt("an item is in a file without a name")
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or "\\" in name:
            raise UnsafeError(
                f"it names {printable(name)!r:.200}, which is not a file inside its folder", where=self._path
            )
        self._files[name] = name
        return name

    def _fields(self, value: Value, name: str, *fields: str) -> tuple[Value, ...]:
        """The attributes of an object whose pickle is not of the usual form."""
        if type(value) is not Record or value.cls.name != name or not isinstance(value.state, dict):
            if type(value) is Record and name == "_StorageInfo":
                raise UnsupportedError(
                    f"items are stored by {printable(str(value.cls))}, which is unknown", where=self._path
                )
            raise self._corrupt(f"something is not a {name}")
        values = tuple(value.state.get(field) for field in fields)
        if name == "MetadataIndex":
            fqn, offset = values
            if type(fqn) is not str or not (offset is None or _is_shape(offset)):
                raise self._corrupt("a block has an impossible name")
            return fqn, None if offset is None else tuple(offset)
        return values

    def _corrupt(self, message: str) -> CorruptError:
        return CorruptError(message, where=self._path)


def _is_shape(value: Value) -> bool:
    if not isinstance(value, tuple) or len(value) > MAX_AXES:
        return False
    return all(type(n) is int and 0 <= n < MAX_ELEMENTS for n in value)
