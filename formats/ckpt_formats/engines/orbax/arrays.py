"""The arrays of one tree as lazy tensors: from a database of OCDBT, or from a folder of zarr for each array."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from operator import sub
from pathlib import Path

import numpy as np

from ckpt_formats.containers.ocdbt import MANIFEST, ValueRange, read_database
from ckpt_formats.containers.zarr import METADATA, ArrayLayout, layout_of
from ckpt_formats.containers.zarr_chunks import ChunkBlob, ChunkReader
from ckpt_formats.core.checkpoint import SourceFile
from ckpt_formats.core.claims import MAX_NUMBER, MAX_SMALL_JSON, MAX_VALUES
from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsafeError
from ckpt_formats.core.files import read_range
from ckpt_formats.core.folders import entries_of, names_in
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import ArrayBlob, Blob, FileBlob, Fragment, Tensor
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.engines.orbax.metadata import OF_PROCESS, PROCESSES

_MAX_NESTED = 64


@dataclass
class StoredArrays:
    """The arrays of one tree by name, and the files that they are in."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    filled: list[str] = field(default_factory=list)
    """Names of arrays of which chunks are not stored, because they have nothing but the fill value."""
    files: tuple[SourceFile, ...] = ()


def read_arrays(
    folder: Path, stores_fill_values: bool, parts: Sequence[str] = ("",), paths: Sequence[str] | None = None
) -> StoredArrays:
    """The arrays of the tree in a folder. Only metadata are read.

    `stores_fill_values`: a chunk that is not stored is missing; else it has the fill value everywhere. `parts`: the
    folders in it that together have the tree, each with a slash at the end. `paths`: the arrays' own folders in it;
    None: those directly in it. Raises subclasses of `CkptError`.
    """
    databases = [f"{part}{inside}" for part in parts for inside in _databases(folder / part)] if paths is None else []
    if databases:
        values: dict[str, ValueRange | bytes] = {}
        for inside in databases:
            own = _moved(read_database(folder / inside), inside)
            if len(parts) > 1:
                _check_same(own, values, folder)
            values |= own
        sizes = _sizes(folder, values)
        sizes |= {f"{inside}{MANIFEST}": (folder / inside / MANIFEST).stat().st_size for inside in databases}
    else:
        arrays_of = _plain(folder) if paths is None else paths
        values = dict(item for path in arrays_of for item in _inside(folder, path, 0))
        sizes = {place.file: place.nbytes for place in values.values() if isinstance(place, ValueRange)}
    layouts: dict[str, ArrayLayout] = {}
    for key, value in values.items():
        name, _, last = key.rpartition("/")
        if last in METADATA:
            layouts[name] = layout_of(last, _json(folder, key, value), folder / key)
    chunks: dict[str, dict[Shape, ValueRange | bytes]] = {name: {} for name in layouts}
    for key, value in values.items():
        name, last = _split(key, layouts)
        if last in METADATA:
            continue
        at = layouts[name].place(last) if name in layouts else None
        if at is None:
            raise CorruptError(f"`{printable(key)}` is not a chunk of an array", where=folder)
        chunks[name][at] = value
    arrays = StoredArrays()
    reader = ChunkReader(folder)
    for name, layout in layouts.items():
        if prod(layout.grid) != len(chunks[name]):
            if stores_fill_values:
                raise _missing(name, layout, chunks[name], folder)
            arrays.filled.append(name)
        arrays.tensors[name] = _tensor(name, layout, chunks[name], reader, not stores_fill_values)
    arrays.files = tuple(SourceFile(folder / file, nbytes, "data") for file, nbytes in sizes.items())
    return arrays


def _databases(folder: Path) -> list[str]:
    """The folders of the databases: that of the tree, or those of all processes if they were not merged; maybe none."""
    if (folder / MANIFEST).is_file():
        return [""]
    inside = [f"{name}/" for name in names_in(folder) if name.startswith(OF_PROCESS)]
    return [name for name in inside if (folder / name / MANIFEST).is_file()]


def _check_same(own: Mapping[str, ValueRange | bytes], others: Mapping[str, ValueRange | bytes], folder: Path) -> None:
    """Raise `CorruptError` if an array is another one in the database of another process."""
    for key, value in own.items():
        is_metadata = key.rpartition("/")[2] in METADATA
        if is_metadata and key in others and _json(folder, key, value) != _json(folder, key, others[key]):
            text = f"the processes have stored `{printable(key)}` differently"
            raise CorruptError(text, where=folder, hint="Take the folders of one step of one run.")


def _moved(values: Mapping[str, ValueRange | bytes], inside: str) -> dict[str, ValueRange | bytes]:
    """The values with paths that begin at the folder of the tree."""
    return {
        key: value._replace(file=inside + value.file) if isinstance(value, ValueRange) and inside else value
        for key, value in values.items()
    }


def _sizes(folder: Path, values: Mapping[str, ValueRange | bytes]) -> dict[str, int]:
    """The size of each file that has values. Raises `IncompleteError` for one that is missing or too short."""
    ends: dict[str, int] = {}
    for value in values.values():
        if isinstance(value, ValueRange):
            ends[value.file] = max(ends.get(value.file, 0), value.offset + value.nbytes)
    sizes: dict[str, int] = {}
    missing = []
    for file, end in ends.items():
        try:
            sizes[file] = (folder / file).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            missing.append(file)
            continue
        if sizes[file] < end:
            text = f"the file ends at byte {sizes[file]:,}, but a chunk reaches to byte {end:,}"
            raise CorruptError(text, where=folder / file, hint="It was truncated: copy it again.")
    if missing:
        text = f"{list_names(missing, printable)} is missing, but is named in the database"
        raise IncompleteError(text, where=folder, hint="Copy all files of the checkpoint.")
    return sizes


def _plain(folder: Path) -> Iterator[str]:
    """The names of the folders of arrays."""
    for entry in sorted(entries_of(folder), key=lambda entry: entry.name):
        if entry.is_dir() and any((folder / entry.name / name).is_file() for name in METADATA):
            yield entry.name


def _inside(folder: Path, path: str, depth: int) -> Iterator[tuple[str, ValueRange]]:
    for number, entry in enumerate(sorted(entries_of(folder / path), key=lambda entry: entry.name)):
        inner = f"{path}/{entry.name}"
        if entry.is_dir() and depth < _MAX_NESTED:
            yield from _inside(folder, inner, depth + 1)
        elif not entry.name.endswith(".__lock"):
            yield inner, ValueRange(inner, 0, (folder / inner).stat().st_size)
        if number > MAX_VALUES:
            raise UnsafeError("an array has too many chunks", where=folder / path)


def _json(folder: Path, key: str, value: ValueRange | bytes) -> object:
    """The metadata of an array."""
    if isinstance(value, ValueRange):
        if value.nbytes > MAX_SMALL_JSON:
            raise UnsafeError(f"{printable(key)} has {value.nbytes:,} bytes", where=folder)
        value = read_range(folder / value.file, value.offset, value.nbytes)
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise CorruptError(f"{printable(key)} is not JSON", where=folder) from None


def _split(key: str, layouts: Mapping[str, ArrayLayout]) -> tuple[str, str]:
    """The name of an array, and the rest of a key: names may contain slashes, and so may the keys of chunks."""
    name, _, last = key.rpartition("/")
    while name and name not in layouts:
        name, _, first = name.rpartition("/")
        last = f"{first}/{last}"
    return name, last


def _missing(name: str, layout: ArrayLayout, chunks: Mapping[Shape, object], folder: Path) -> IncompleteError:
    places = (tuple(map(int, np.unravel_index(i, layout.grid))) for i in range(len(chunks) + 1))
    at = next(at for at in places if at not in chunks)
    what = f"chunk {layout.box(at)} of `{printable(name)}` is missing"
    if (folder.parent / PROCESSES).is_dir():
        text = f"{what}: these are the parts that one of several processes wrote to its own disk"
        hint = "Copy the folders of this step of all processes into one folder, under any names, and name that folder."
        return IncompleteError(text, where=folder.parent, hint=hint)
    return IncompleteError(what, where=folder, hint="The save was broken off, or files were not copied.")


def _tensor(
    name: str, layout: ArrayLayout, chunks: Mapping[Shape, ValueRange | bytes], reader: ChunkReader, fills: bool
) -> Tensor:
    """An array of the chunks that are stored; where none is, of the fill value."""
    fragments = []
    for at, value in chunks.items():
        box = layout.box(at)
        fragments.append(Fragment(box, _chunk(name, layout, at, value, reader, fills, box)))
    if len(chunks) < prod(layout.grid):
        if prod(layout.grid) > MAX_NUMBER:
            raise UnsafeError(f"`{printable(name)}` has {prod(layout.grid):,} chunks", where=reader.folder)
        element = np.frombuffer(layout.fill, layout.dtype)[0]
        for at in np.ndindex(*layout.grid):
            if at not in chunks:
                box = layout.box(at)
                fragments.append(Fragment(box, ArrayBlob(np.broadcast_to(element, box.shape))))
    return Tensor(layout.shape, layout.dtype, tuple(fragments))


def _chunk(
    name: str, layout: ArrayLayout, at: Shape, value: ValueRange | bytes, reader: ChunkReader, fills: bool, box: Box
) -> Blob:
    """The blob of a chunk: a range of a file if it is stored plain."""
    if layout.sharding is None and layout.codec.compression is None and isinstance(value, ValueRange):
        if value.nbytes != layout.chunk_nbytes + 4 * layout.codec.checksum:
            text = f"chunk {box} of `{printable(name)}` has {value.nbytes:,} bytes, but needs {layout.chunk_nbytes:,}"
            raise CorruptError(text, where=reader.folder / value.file)
        if not layout.codec.checksum:
            shape = tuple(map(sub, box.stop, box.start))
            return FileBlob(reader.path(value.file), value.offset, shape, layout.dtype, layout.strides)
    return ChunkBlob(layout, value, reader, f"{name} {list(at)}", fills, Box.whole(box.shape))
