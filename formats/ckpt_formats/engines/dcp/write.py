"""Write a checkpoint: a file of items for each rank, and at the end the metadata, which make it a checkpoint."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from uuid import UUID

from ckpt_formats.containers.torchfile import Template, emit
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.format import FilePlan, Receipt
from ckpt_formats.core.gc_pause import gc_paused
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Global, Record, Size, Value
from ckpt_formats.engines.dcp.entries import Entry, EntryLayouts, ItemsContent
from ckpt_formats.engines.dcp.folder import DRAFT, METADATA
from ckpt_formats.engines.dcp.metadata import MODULE, STORAGE_MODULE, Steps

VERSION = "1.0.0"
"""The version of the metadata, as PyTorch 2.9 and later write it."""
_SMALL, _MAX_JOINED = 1 << 14, 1 << 18


def write_part(folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
    """Write one file sequentially. The receipt contains the entries of its items for the metadata."""
    (folder / part.file).parent.mkdir(exist_ok=True)
    content = part.laid_out().content
    assert isinstance(content, ItemsContent)
    return write_items(folder, part.file, content.entries, transfer)


def write_items(folder: Path, file: str, entries: Sequence[Entry], transfer: Transfer) -> Receipt:
    """Write a file of these items. Its receipt is one of `write_metadata`."""
    layouts, items, at = EntryLayouts(), [], 0
    for entry in entries:
        nbytes = layouts.of(entry).nbytes
        items.append(_item_json(entry, at, nbytes))
        at += nbytes
    stream = (data for entry in entries for data in layouts.stream(entry, transfer))
    seal = transfer.write_sealed(folder, file, _join_small(stream))
    return Receipt(file, seal.nbytes, (seal,), {"items": items}, transfer.reader.evidence())


def _join_small(stream: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """The same bytes in fewer pieces: an archive has about twenty small ones around its values."""
    buffer = bytearray()
    for data in stream:
        if len(data) < _SMALL:
            buffer += data
        if len(data) >= _SMALL or len(buffer) >= _MAX_JOINED:
            if buffer:
                yield bytes(buffer)
                buffer.clear()
            if len(data) >= _SMALL:
                yield data
    yield bytes(buffer)


def _item_json(entry: Entry, at: int, nbytes: int) -> "Item":
    """An item of a file, at an offset."""
    item = [entry.number, entry.name, list(entry.path), at, nbytes]
    if entry.box is None:
        return item
    return [*item, *block_json(entry.value.dtype.name, entry.value.shape, entry.chunk, entry.box)]


def block_json(dtype: str, shape: Shape, chunk: int, box: Box) -> list[Any]:
    """The JSON of a block of a tensor, which follows that of an item: type, shape, chunk, offsets and sizes."""
    return [dtype, list(shape), chunk, list(box.start), list(box.shape)]


def write_metadata(folder: Path, receipts: Sequence[Receipt], *, named: bool = True) -> None:
    """Write `.metadata` into each folder that has files of data.

    With `named`, names are paths in a state dict, and the paths are saved as the planner's data.
    Not all planners save such data.
    """
    folders: dict[Path, list[tuple[str, Item]]] = {}
    for receipt in receipts:
        file = folder / receipt.file
        folders.setdefault(file.parent, []).extend((file.name, item) for item in receipt.entry["items"])
    for one, items in folders.items():
        data = metadata_bytes(items, named=named)
        with (one / DRAFT).open("wb") as draft:
            draft.write(data)
            draft.flush()
            os.fsync(draft.fileno())
        os.replace(one / DRAFT, one / METADATA)


Item = list[Any]
"""An item as JSON: number, name, path, offset, length; for tensors also type, shape, chunk, offsets and sizes."""


def metadata_bytes(
    items: Iterable[tuple[str, Item]],
    *,
    named: bool = True,
    empty: Iterable[tuple[str, Steps, str, Shape]] = (),
    transforms: Mapping[tuple[str, int], Sequence[str]] = MappingProxyType({}),
    save_id: str | None = None,
) -> bytes:
    """The `.metadata` of items in files.

    Args:
        items: The file of each item, and the item.
        named: As in `write_metadata`.
        empty: Tensors without elements, which may have no items: names, paths, types and shapes.
        transforms: By file and offset, what a reader reverses of an item's bytes, such as a compression.
        save_id: What identifies the save; else it follows from the items.
    """
    with gc_paused():
        return emit(_metadata(items, named, empty, transforms, save_id), protocol=4)


def _metadata(
    unsorted: Iterable[tuple[str, Item]],
    named: bool,
    empty: Iterable[tuple[str, Steps, str, Shape]],
    transforms: Mapping[tuple[str, int], Sequence[str]],
    save_id: str | None,
) -> Record:
    items = sorted(unsorted, key=lambda item: (item[1][0], item[1][7:8]))
    entries: dict[str, Value] = {}
    chunks: dict[str, list[Value]] = {}
    paths: dict[str, Value] = {}
    places: dict[Value, Value] = {}
    for name, steps, dtype, shape in empty:
        paths[name], chunks[name] = tuple(steps), []
        entries[name] = _TENSORS[dtype].fill(Size(shape), chunks[name])
    for file, (_, name, path, at, nbytes, *tensor) in items:
        paths[name] = tuple(path)
        if tensor:
            dtype, shape, chunk, offsets, sizes = tensor
            if name not in entries:
                chunks[name] = []
                entries[name] = _TENSORS[dtype].fill(Size(shape), chunks[name])
            chunks[name].append(_CHUNK.fill(Size(offsets), Size(sizes)))
            index = _CHUNK_INDEX.fill(name, chunk, Size(offsets))
        else:
            entries[name] = _object("BytesStorageMetadata", {})
            index = _OBJECT_INDEX.fill(name)
        transformed = transforms.get((file, at))
        places[index] = (
            _PLACE.fill(file, at, nbytes) if transformed is None else _transformed(file, at, nbytes, transformed)
        )
    meta: dict[str, Value] = {
        "checkpoint_id": None,
        "save_id": save_id or _id(items),
        "load_id": None,
        "modules": [],
    }
    return _object(
        "Metadata",
        {
            "state_dict_metadata": entries,
            "planner_data": paths if named else None,
            "storage_data": places,
            "storage_meta": _object("StorageMeta", meta),
            "version": VERSION,
        },
    )


def _transformed(file: str, at: int, nbytes: int, transforms: Sequence[str]) -> Record:
    """The place of an item whose bytes were transformed."""
    place = {"relative_path": file, "offset": at, "length": nbytes, "transform_descriptors": list(transforms)}
    return _object("_StorageInfo", place, STORAGE_MODULE)


def _object(name: str, state: Value, module: str = MODULE) -> Record:
    return Record(Global(module, name), state=state, new=True)


def _tensor(dtype: str) -> Template:
    def build(shape: Value, chunks: Value) -> Record:
        properties = _object("TensorProperties", (Global("torch", dtype), _STRIDED, False, _CONTIGUOUS, False))
        return _object("TensorStorageMetadata", {"properties": properties, "size": shape, "chunks": chunks})

    return Template(build)


_STRIDED = Record(Global("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Record(Global(MODULE, "_MEM_FORMAT_ENCODING"), (0,))
_TENSORS = {dtype: _tensor(dtype) for dtype in DTYPES}
_CHUNK = Template(lambda offsets, sizes: _object("ChunkStorageMetadata", {"offsets": offsets, "sizes": sizes}))
_CHUNK_INDEX = Template(
    lambda name, chunk, offset: _object("MetadataIndex", {"fqn": name, "index": chunk, "offset": offset})
)
_OBJECT_INDEX = Template(lambda name: _object("MetadataIndex", {"fqn": name, "index": None}))
_PLACE = Template(
    lambda file, at, nbytes: _object(
        "_StorageInfo", {"relative_path": file, "offset": at, "length": nbytes}, STORAGE_MODULE
    )
)


def _id(items: Sequence[tuple[str, Item]]) -> str:
    """An identifier of the save. PyTorch's is random; that of ckpt is the same for the same checkpoint."""
    digest = hashlib.blake2b(json.dumps(items).encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return str(UUID(bytes=digest, version=4))
