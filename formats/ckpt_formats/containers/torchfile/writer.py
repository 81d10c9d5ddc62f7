"""Write a file that `torch.load` reads, from front to back or in parallel. No full tensor is in memory.

`layout_file` computes the position of every byte before any data is read, because
the sizes are known. Then either `FileLayout.stream` yields all bytes in order, or
the caller writes the data of each storage at its offset, in any order and from
several processes, and adds the bytes of `FileLayout.frame`, with their checksums.
"""

import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path

import numpy as np

from ckpt_formats.containers.torchfile.pickle_writer import Persistent, emit
from ckpt_formats.containers.torchfile.storages import STORAGE_CLASSES, Storage, TensorRef
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Shape, slabs
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.seals import Seal, crc32
from ckpt_formats.core.tensor import FileBlob, Tensor, c_strides
from ckpt_formats.core.values import Global, Record, StdDict, Value

ALIGNMENT = 64
_FLAGS = 0x0808  # names in UTF-8; checksums follow the data, so that the data can be streamed
_WIDE = 0xFFFFFFFF
_CRC_IN_DESCRIPTOR, _CRC_IN_ENTRY = 4, 16  # offsets

_CLASS_OF = {dtype: Global("torch", name) for name, (dtype, _) in STORAGE_CLASSES.items() if dtype is not None}
_UNTYPED = Global("torch.storage", "UntypedStorage")

Chunks = Callable[[Tensor], Iterator[memoryview]]
"""Yields the bytes of a tensor in C order. A chunk is valid until the next one is taken."""


@dataclass(frozen=True, slots=True, eq=False)
class StorageView:
    """A tensor to be written as a view of a larger one.

    All views of one `base`, and the `base` itself, share its bytes in the
    file. Invariant: all elements of the view are inside the base.
    """

    base: Tensor
    offset: int
    """In elements, as are the strides."""
    shape: Shape
    strides: Shape | None = None
    """None means C order."""
    requires_grad: bool = False
    is_parameter: bool = False
    attrs: Value = None
    location: str = "cpu"
    """The device of the storage; the first view of a storage decides."""


@dataclass(frozen=True, slots=True, eq=False)
class StorageSlot:
    """The position of the bytes of one storage."""

    key: str
    tensor: Tensor
    """Its values in C order are the bytes of the storage."""
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class _Member:
    name: bytes
    header: int
    start: int
    nbytes: int
    data: bytes | None
    """None for storages."""


@dataclass(frozen=True, eq=False)
class FileLayout:
    """The position of every byte of a file."""

    stem: str
    nbytes: int
    storages: tuple[StorageSlot, ...]
    _members: tuple[_Member, ...] = field(repr=False)
    _directory: int = field(repr=False)

    def stream(self, chunks: Chunks, storage_crcs: list[int] | None = None) -> Iterator[bytes | memoryview]:
        """All bytes of the file, in order. Appends the CRC-32 of each storage to `storage_crcs`."""
        crcs = [] if storage_crcs is None else storage_crcs
        done = len(crcs)
        for i, slot in enumerate(self.storages):
            yield self._gap(i, crcs[-1] if i else 0)
            crc, nbytes = 0, 0
            for chunk in chunks(slot.tensor):
                crc, nbytes = crc32(chunk, crc), nbytes + chunk.nbytes
                yield chunk
            if nbytes != slot.nbytes:
                raise ValueError(f"{nbytes} bytes were given for a storage of {slot.nbytes} bytes")
            crcs.append(crc)
        yield self._end(crcs[done:])

    def frame(self, crcs: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """All bytes that are not tensor data, as (offset, bytes), given the CRC-32 of each storage."""
        after = 0
        for i, slot in enumerate(self.storages):
            yield after, self._gap(i, crcs[i - 1])
            after = slot.offset + slot.nbytes
        yield after, self._end(crcs)

    def seals(self, path: Path, crcs: Sequence[int]) -> tuple[Seal, ...]:
        """The checksums of the storages, as a reader of the file gets them."""
        return tuple(
            Seal(path, slot.offset, slot.nbytes, "crc32", crc, f"{self.stem}/data/{slot.key}")
            for slot, crc in zip(self.storages, crcs, strict=True)
        )

    def _gap(self, i: int, crc: int) -> bytes:
        """The bytes between a storage and the one before it, whose CRC-32 is given."""
        gap = self._frame.gaps[i]
        return _with_crcs(gap, (_CRC_IN_DESCRIPTOR,), (crc,)) if i else gap

    def _end(self, crcs: Sequence[int]) -> bytes:
        """The bytes after the last storage, given the CRC-32 of each storage."""
        frame = self._frame
        # torch hashes the names and concatenates the checksums. Any 40 digits that depend on the content are valid.
        joined = _with_crcs(frame.crcs, [4 * i for i in frame.storages], crcs)
        identifier = b"%020d%020d" % (frame.names, crc32(joined))
        end = bytearray(frame.end)
        end[frame.identifier : frame.identifier + len(identifier)] = identifier
        own = crc32(identifier)
        before = crcs[-1:]  # the descriptor of the last storage is in front of all others
        return _with_crcs(end, (_CRC_IN_DESCRIPTOR,) * len(before) + frame.fields, (*before, *crcs, own, own))

    @cached_property
    def _frame(self) -> "_Frame":
        """Computed once, because archives of equal tensors have equal layouts."""
        gaps, gap, crcs = [], bytearray(), []
        *others, identifier = self._members
        for member in others:
            gap += _local_header(member)
            if member.data is None:
                gaps.append(bytes(gap))
                gap.clear()
            crcs.append(0 if member.data is None else crc32(member.data))
            gap += (member.data or b"") + _descriptor(member, crcs[-1])
        gap += _local_header(identifier)
        at = len(gap)
        gap += bytes(identifier.nbytes) + _descriptor(identifier, 0)
        entries = [_CRC_IN_ENTRY + len(gap)]
        for member in self._members:
            entries.append(entries[-1] + len(_central_entry(member, 0)))
        storages = tuple(i for i, member in enumerate(others) if member.data is None)
        return _Frame(
            gaps=tuple(gaps),
            end=bytes(gap) + _directory(self._members, self._directory, [*crcs, 0]),
            identifier=at,
            fields=(*(entries[i] for i in storages), at + identifier.nbytes + _CRC_IN_DESCRIPTOR, entries[-2]),
            storages=storages,
            crcs=struct.pack(f"<{len(crcs)}I", *crcs),
            names=crc32(b"\n".join(member.name for member in self._members)),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Frame:
    """All bytes of a file that are not tensor data, with zeros where they depend on tensor data."""

    gaps: tuple[bytes, ...]
    """Before each storage, from the end of the one before."""
    end: bytes
    identifier: int
    """The offset in `end` of the 40 digits that identify the content."""
    fields: tuple[int, ...]
    """The offsets in `end` of checksums: of each storage in the directory, then of the identifier, both places."""
    storages: tuple[int, ...]
    """The number of each storage among the members."""
    crcs: bytes
    """The CRC-32 of all members but the identifier, 4 bytes each."""
    names: int
    """The CRC-32 of their names."""


def _with_crcs(data: bytes | bytearray, offsets: Sequence[int], crcs: Sequence[int]) -> bytes:
    out = bytearray(data)
    for offset, crc in zip(offsets, crcs, strict=True):
        out[offset : offset + 4] = crc.to_bytes(4, "little")
    return bytes(out)


def layout_file(root: Value, stem: str) -> FileLayout:
    """The layout of a file that stores a tree of values.

    Leaves may be `Tensor`s, `StorageView`s, and the `TensorRef`s and `Storage`s
    of other files. `stem` is the name of the archive's folder; torch uses the
    stem of the file name. Raises `UnsupportedError` for values that cannot be written.
    """
    storages = _Storages()
    pickled = emit(root, storages.lower)
    members, at = _members(pickled, len(pickled), [(s.key, s.nbytes) for s in storages.by_object.values()], stem)
    starts = (member.start for member in members if member.data is None)
    slots = tuple(
        StorageSlot(storage.key, storage.tensor, start, storage.nbytes)
        for storage, start in zip(storages.by_object.values(), starts, strict=True)
    )
    directory = _directory(members, at, [0] * len(members))
    return FileLayout(stem, at + len(directory), slots, tuple(members), at)


@dataclass(frozen=True)
class FileOutline:
    """What the size of a file depends on."""

    pickle_nbytes: int
    storages: tuple[int, ...]
    """Bytes of each storage, in the order of the file."""

    def nbytes(self, stem: str) -> int:
        """Bytes of the file."""
        sizes = [(str(i), nbytes) for i, nbytes in enumerate(self.storages)]
        members, at = _members(b"", self.pickle_nbytes, sizes, stem)
        return at + len(_directory(members, at, [0] * len(members)))


def outline_file(root: Value) -> FileOutline:
    """The outline of the file that `layout_file` lays out. Of tensors, only types and shapes count."""
    storages = _Storages()
    pickled = emit(root, storages.lower)
    return FileOutline(len(pickled), tuple(storage.nbytes for storage in storages.by_object.values()))


def _members(
    pickled: bytes, pickle_nbytes: int, storages: Sequence[tuple[str, int]], stem: str
) -> tuple[list[_Member], int]:
    """The members of an archive, and the offset of its directory. `storages`: key and bytes of each."""
    parts: list[tuple[str, int, bytes | None]] = [
        ("data.pkl", pickle_nbytes, pickled),
        (".format_version", 1, b"1"),
        (".storage_alignment", 2, str(ALIGNMENT).encode()),
        ("byteorder", 6, b"little"),
        *((f"data/{key}", nbytes, None) for key, nbytes in storages),
        ("version", 2, b"3\n"),
        (".data/serialization_id", 40, b"0" * 40),
    ]
    members, at = [], 0
    for name, nbytes, data in parts:
        encoded = f"{stem}/{name}".encode()
        start = at + 30 + len(encoded) + _extra_length(at, len(encoded), nbytes)
        members.append(_Member(encoded, at, start, nbytes, data))
        at = start + nbytes + (24 if nbytes >= _WIDE else 16)
    return members, at


def write_file(path: Path, root: Value, chunks: Chunks, stem: str | None = None) -> tuple[Seal, ...]:
    """Write a file from front to back; return the seals of its storages.

    The file is not fsynced, and not written under a temporary name: the caller
    does both. Raises `NoSpaceError`, `OutputError` or what `chunks` raises.
    """
    layout = layout_file(root, path.stem if stem is None else stem)
    crcs: list[int] = []
    try:
        with open(path, "wb") as file:
            for part in layout.stream(chunks, crcs):
                file.write(part)
    except CkptError:
        raise
    except OSError as error:
        raise unwritable(error, path) from error
    return layout.seals(path, crcs)


def reading_chunks(reader: Reader, max_nbytes: int = 1 << 24) -> Chunks:
    """A function that yields a tensor in chunks of at most `max_nbytes` bytes, read through `reader`.

    All chunks share one buffer: a chunk is valid until the next one is taken.
    """

    def chunks(tensor: Tensor) -> Iterator[memoryview]:
        buffer = np.empty(0, tensor.dtype)
        for box in slabs(tensor.shape, max(max_nbytes // tensor.dtype.itemsize, 1)):
            if buffer.size < box.size:
                buffer = np.empty(box.size, tensor.dtype)
            part = buffer[: box.size].reshape(box.shape)
            tensor.crop(box).read_into(part, reader)
            yield part.reshape(-1).view(np.uint8).data

    return chunks


@dataclass(frozen=True, slots=True, eq=False)
class _StoredOnce:
    key: str
    cls: Global
    numel: int
    nbytes: int
    location: str
    tensor: Tensor
    source: Tensor | Storage
    """A reference keeps the object alive, because its id identifies it."""

    @property
    def persistent_id(self) -> Persistent:
        return Persistent(("storage", self.cls, self.key, self.location, self.numel))


class _Storages:
    """The storages that a tree of values needs, numbered in the order in which it refers to them."""

    def __init__(self) -> None:
        self.by_object: dict[tuple[object, ...], _StoredOnce] = {}

    def lower(self, value: Value) -> Record | Persistent | None:
        """What to write for a tensor or a storage; None for other values."""
        if isinstance(value, Tensor):
            value = StorageView(value, 0, value.shape)
        if isinstance(value, StorageView):
            return _tensor_record(self._for_tensor(value.base, value.location), value.base.dtype, value)
        if isinstance(value, TensorRef):
            return _tensor_record(self._for_storage(value.storage), value.dtype, value)
        if isinstance(value, Storage):
            return self._for_storage(value).persistent_id
        return None

    def _for_tensor(self, base: Tensor, location: str) -> _StoredOnce:
        key = (id(base),)
        if key not in self.by_object:
            name = base.dtype.name
            if DTYPES.get(name) != base.dtype:
                raise UnsupportedError(f"torch has no tensors of type {base.dtype}")
            cls = _CLASS_OF.get(name, _UNTYPED)
            numel = base.size if cls is not _UNTYPED else base.nbytes
            self.by_object[key] = _StoredOnce(str(len(self.by_object)), cls, numel, base.nbytes, location, base, base)
        return self.by_object[key]

    def _for_storage(self, storage: Storage) -> _StoredOnce:
        key = (storage.path, id(storage.offsets), storage.key)
        if key not in self.by_object:
            raw = FileBlob.packed(storage.path, storage.offset, (storage.nbytes,), DTYPES["uint8"], storage.seal)
            self.by_object[key] = _StoredOnce(
                str(len(self.by_object)),
                storage.cls,
                storage.numel,
                storage.nbytes,
                storage.location,
                Tensor.of(raw),
                storage,
            )
        return self.by_object[key]


def _tensor_record(storage: _StoredOnce, dtype: DType, view: StorageView | TensorRef) -> Record:
    strides = c_strides(view.shape, 1) if view.strides is None else view.strides
    _check_inside(view, strides, storage.nbytes // dtype.itemsize)
    hooks = StdDict()
    args = (
        storage.persistent_id,
        view.offset,
        tuple(view.shape),
        tuple(strides),
        view.requires_grad and not view.is_parameter,
        hooks,
    )
    if _CLASS_OF.get(dtype.name) == storage.cls:
        tensor = Record(Global("torch._utils", "_rebuild_tensor_v2"), args)
    else:
        tensor = Record(Global("torch._utils", "_rebuild_tensor_v3"), (*args, Global("torch", dtype.name)))
    if view.is_parameter and view.attrs:
        return Record(
            Global("torch._utils", "_rebuild_parameter_with_state"), (tensor, view.requires_grad, hooks, view.attrs)
        )
    if view.is_parameter:
        return Record(Global("torch._utils", "_rebuild_parameter"), (tensor, view.requires_grad, hooks))
    if view.attrs:
        call_args = (tensor.cls, Global("torch", "Tensor"), tensor.args, view.attrs)
        return Record(Global("torch._tensor", "_rebuild_from_type_v2"), call_args)
    return tensor


def _check_inside(view: StorageView | TensorRef, strides: Shape, stored: int) -> None:
    last = view.offset + sum((n - 1) * s for n, s in zip(view.shape, strides, strict=True))
    if prod(view.shape) and not 0 <= view.offset <= last < stored:
        raise ValueError(f"a view of shape {list(view.shape)} reaches to element {last} of {stored}")


def _extra_length(header: int, name_length: int, nbytes: int) -> int:
    """Length of the extra field in bytes, so that the data begin at a multiple of `ALIGNMENT`."""
    min_length = (20 if nbytes >= _WIDE else 0) + 4
    return min_length + -(header + 30 + name_length + min_length) % ALIGNMENT


def _local_header(member: _Member) -> bytes:
    wide = member.nbytes >= _WIDE
    extra = struct.pack("<HHQQ", 1, 16, member.nbytes, member.nbytes) if wide else b""
    length = member.start - member.header - 30 - len(member.name)
    padding = length - len(extra) - 4
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    short = _WIDE if wide else 0
    head = struct.pack(
        "<4sHHHHHIIIHH", b"PK\3\4", 45 if wide else 0, _FLAGS, 0, 0, 0, 0, short, short, len(member.name), len(extra)
    )
    return head + member.name + extra


def _descriptor(member: _Member, crc: int) -> bytes:
    sizes = "QQ" if member.nbytes >= _WIDE else "II"
    return struct.pack(f"<4sI{sizes}", b"PK\7\x08", crc, member.nbytes, member.nbytes)


def _central_entry(member: _Member, crc: int) -> bytes:
    wide = [size for size in (member.nbytes, member.nbytes, member.header) if size >= _WIDE]
    extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    nbytes, header, version = min(member.nbytes, _WIDE), min(member.header, _WIDE), 45 if wide else 0
    head = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        b"PK\1\2",
        version,
        version,
        _FLAGS,
        0,
        0,
        0,
        crc,
        nbytes,
        nbytes,
        len(member.name),
        len(extra),
        0,
        0,
        0,
        0,
        header,
    )
    return head + member.name + extra


def _directory(members: Sequence[_Member], at: int, crcs: Sequence[int]) -> bytes:
    """The central directory and its end records. As in torch, always with the 64-bit records."""
    entries = b"".join(map(_central_entry, members, crcs))
    count, nbytes = len(members), len(entries)
    short, small = min(count, 0xFFFF), min(nbytes, _WIDE)
    return b"".join(
        (
            entries,
            struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, nbytes, at),
            struct.pack("<4sIQI", b"PK\6\7", 0, at + nbytes, 1),
            struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, short, short, small, min(at, _WIDE), 0),
        )
    )
