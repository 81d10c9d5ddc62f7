"""Values that the log records as they are: of tensors that no replay gives.

Such are buffers, frozen weights that the run moves, and all states of optimizers whose steps cannot be replayed. A
record has the values of the tensors that changed, in chunks, each as it is or as the difference from the last record of
the same tensor. See docs/format.md.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_codecs.delta import StatePair
from ckpt_codecs.deltas.difference import Difference
from ckpt_codecs.errors import CodecError
from ckpt_codecs.optimizers import WEIGHTS
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.typed_json import decode
from ckpt_formats.core.checkpoint import Role
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, flat_boxes
from ckpt_formats.core.tensor import Array, BlockBlob, Fragment, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.universal.chunked import read_chunks
from ckpt_formats.universal.gradients.record import MAX_CHUNK_OVERHEAD, Kind, LogRecord, hash_values
from ckpt_formats.universal.gradients.segment import Segment

CHUNK_NBYTES = 1 << 20
"""The maximum size of a chunk in bytes, before it is encoded."""
WHOLE, DELTA, GONE = 0, 1, 2
"""How a record has a tensor: as it is; as the difference from the last record; it does not exist any more."""
_RAW = -1
"""As it is and not encoded: in records of the kind `BUFFERS`."""
_ROLES: dict[str, Role] = {"parameter": "parameter", "buffer": "buffer", "frozen": "frozen", "extra": "extra"}
_CODEC = Difference()


def chunk_size(dtype: DType) -> int:
    """The maximum number of elements in a chunk."""
    return CHUNK_NBYTES // dtype.itemsize


def encode_chunk(state: str, values: Array, before: Array | None) -> bytes:
    """Encode a chunk, (n,) of any dtype. `before`: the same chunk of the last record, as the result has to be a
    difference from it."""
    values = _coded(values)
    return _CODEC.encode(StatePair({} if before is None else {state: _coded(before)}, {state: values}))


def decode_chunk(data: bytes, state: str, size: int, dtype: DType, before: Array | None) -> Array:
    """Decode a chunk, (size,) of `dtype`. Raises `CodecError`."""
    coded = np.empty(0, dtype)
    scale = _coded(coded).dtype
    shape = (size * dtype.itemsize // scale.itemsize,)
    states = {} if before is None else {state: _coded(before)}
    return _CODEC.decode(data, states, shape, {state: scale})[state].view(dtype)


def _coded(values: Array) -> Array:
    """The values as a dtype that the codec of differences predicts: complex numbers as their parts."""
    if values.dtype.kind == "c":
        return values.view(f"f{values.itemsize // 2}")
    return values.view(np.uint8) if values.dtype.kind == "b" else values


@dataclass(frozen=True)
class FlatBlock:
    """The part of a tensor that a rank records: the elements `start` to `stop`, in C order, of a block of it."""

    box: Box
    start: int
    stop: int


@dataclass(frozen=True)
class RecordedRow:
    """A tensor that a rank records: a state of a parameter, a buffer, or a tensor inside another value."""

    name: str
    state: str
    """The optimizer's name for it; `param` for the weights."""
    role: Role
    dtype: str
    shape: Shape
    block: FlatBlock | None
    """None: the rank records the full tensor."""

    @classmethod
    def from_json(cls, row: object) -> "RecordedRow":
        """The row of a record. Raises `ValueError` if it is damaged."""
        if isinstance(row, list) and len(row) in (5, 6) and isinstance(row[4], list):
            name, state, role, dtype, shape = row[:5]
            sizes = len(shape) <= 64 and all(is_natural(n) and n < 1 << 50 for n in shape)
            texts = all(isinstance(text, str) for text in row[:4]) and role in _ROLES and dtype in DTYPES
            if texts and sizes and prod(max(n, 1) for n in shape) < 1 << 50:
                block = _block(row[5], tuple(shape)) if len(row) == 6 else None
                return cls(name, state, _ROLES[role], dtype, tuple(shape), block)
        raise ValueError("the row of a tensor is damaged")

    def to_json(self) -> list[Any]:
        """The row of a record that announces it."""
        row: list[Any] = [self.name, self.state, self.role, self.dtype, list(self.shape)]
        if self.block is not None:
            box = self.block.box
            row.append([list(box.start), list(box.stop), self.block.start, self.block.stop])
        return row

    @property
    def size(self) -> int:
        """The number of elements that the rank records."""
        return prod(self.shape) if self.block is None else self.block.stop - self.block.start

    @property
    def chunk_count(self) -> int:
        return -(-self.size // chunk_size(DTYPES[self.dtype]))


def _block(row: object, shape: Shape) -> FlatBlock:
    if isinstance(row, list) and len(row) == 4 and all(map(is_natural, row[2:])):
        low, high, start, stop = row
        corners = all(isinstance(one, list) and len(one) == len(shape) and all(map(is_natural, one)) for one in row[:2])
        if corners and all(a <= b <= n for a, b, n in zip(low, high, shape, strict=True)):
            box = Box(tuple(low), tuple(high))
            if start <= stop <= box.size:
                return FlatBlock(box, start, stop)
    raise ValueError("the block of a tensor is damaged")


@dataclass(frozen=True)
class _Version:
    """A record of a tensor."""

    record: LogRecord
    first_chunk: int
    coding: int


@dataclass(frozen=True)
class _Recorded:
    """A rank's part of a tensor at a step: the last record with its full values, and those after it."""

    path: Path
    row: RecordedRow
    versions: tuple[_Version, ...]

    @cached_property
    def dtype(self) -> DType:
        return DTYPES[self.row.dtype]

    def elements(self, start: int, stop: int, reader: Reader) -> Array:
        """A range of the elements: (stop - start,). Raises `CorruptError`."""
        each = chunk_size(self.dtype)
        parts = []
        for index in range(start // each, -(-stop // each)):
            values = self._chunk(index, reader)
            parts.append(values[max(start - index * each, 0) : stop - index * each])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _chunk(self, index: int, reader: Reader) -> Array:
        last = self.versions[-1]
        key = (self.path, last.record.begin, last.first_chunk + index)
        return reader.cached_or(key, lambda: self._decode(index, reader))

    def _decode(self, index: int, reader: Reader) -> Array:
        each = chunk_size(self.dtype)
        size = min(each, self.row.size - index * each)
        values: Array | None = None
        for version in self.versions:
            limit = size * self.dtype.itemsize + MAX_CHUNK_OVERHEAD
            data, digest = version.record.read_chunk(self.path, version.first_chunk + index, limit, reader)
            try:
                if version.coding == _RAW:
                    if data.size != size * self.dtype.itemsize:
                        raise CodecError("it has another size")
                    values = data.view(self.dtype)
                else:
                    before = values if version.coding == DELTA else None
                    values = decode_chunk(data.tobytes(), self.row.state, size, self.dtype, before)
            except CodecError as error:
                raise self._damaged(version, str(error)) from None
            if hash_values(values) != digest:
                raise self._damaged(version, "its values do not fit their hash")
            reader.chunks += 1
        assert values is not None
        return values

    def _damaged(self, version: _Version, why: str) -> CorruptError:
        state = "" if self.row.state == WEIGHTS else f"{self.row.state!r} of "
        return CorruptError(
            f"step {version.record.step}: {state}`{printable(self.row.name)}` cannot be decoded: {why}", where=self.path
        )


@dataclass(frozen=True)
class _RecordedBlob(BlockBlob):
    """A block of an array whose elements, in C order, are a range of a recorded tensor's."""

    recorded: _Recorded
    full: Shape
    """The shape of the array."""
    start: int
    """The first element of the array."""
    box: Box

    @property
    def dtype(self) -> DType:
        return self.recorded.dtype

    def read_into(self, out: Array, reader: Reader) -> None:
        chunking = Chunking(self.full, (chunk_size(self.dtype),))

        def values(index: int) -> Array:
            start, stop = chunking.range(index)
            return self.recorded.elements(self.start + start, self.start + stop, reader)

        read_chunks(out, self.box, chunking, values)


@dataclass(frozen=True)
class RecordedValues:
    """All tensors that a segment records as they are, at one step."""

    tensors: Mapping[str, Mapping[str, Tensor]]
    """By name and by state, as `RecordedRow` has them."""
    roles: Mapping[str, Role]
    values: Mapping[str, Mapping[str, Value]]
    """By parameter: the states that are no tensors."""
    extras: Mapping[str, Value]
    """Values that belong to no parameter, by name."""


def recorded_values(segment: Segment, step: int) -> RecordedValues:
    """The recorded tensors of a segment at a step. Raises `CorruptError`."""
    fragments: dict[tuple[str, str], list[tuple[RecordedRow, _Recorded]]] = {}
    values: dict[str, Mapping[str, Value]] = {}
    extras: dict[str, Value] = {}
    for rank in range(len(segment.logs)):
        for recorded in _recorded_by(segment, rank, step):
            fragments.setdefault((recorded.row.name, recorded.row.state), []).append((recorded.row, recorded))
        for record in segment.records(rank, Kind.VALUES):
            if record.step <= step and "values" in record.meta:
                values |= _values(record.meta["values"], segment.path(rank))
            if record.step <= step and "extras" in record.meta:
                extras |= _mapping(record.meta["extras"], segment.path(rank))
    tensors: dict[str, dict[str, Tensor]] = {}
    roles: dict[str, Role] = {}
    for (name, state), parts in fragments.items():
        roles[name] = parts[0][0].role
        tensors.setdefault(name, {})[state] = _tensor(parts, segment)
    return RecordedValues(tensors, roles, values, extras)


def _values(content: Any, where: Path) -> dict[str, Mapping[str, Value]]:
    decoded = _mapping(content, where)
    if not all(isinstance(value, dict) for value in decoded.values()):
        raise CorruptError("the values of a record are damaged", where=where)
    return decoded


def _mapping(content: Any, where: Path) -> dict[str, Value]:
    decoded = decode(content, where)
    if not isinstance(decoded, dict):
        raise CorruptError("the values of a record are damaged", where=where)
    return decoded


def _recorded_by(segment: Segment, rank: int, step: int) -> Iterator[_Recorded]:
    """The tensors that a rank has recorded up to a step, without those that do not exist any more.

    A record of the next step may come before one of this step, as where a run notes a step after the next forward
    pass. Then it counts for the numbers of rows and for differences, and not for values.
    """
    path = segment.path(rank)
    records = [one for one in segment.logs[rank].records if one.kind in (Kind.VALUES, Kind.BUFFERS)]
    stop = max((number for number, one in enumerate(records, 1) if one.step <= step), default=0)
    rows: list[RecordedRow] = []
    versions: dict[tuple[str, str], tuple[RecordedRow, list[_Version]]] = {}
    at_step: dict[tuple[str, str], tuple[RecordedRow, list[_Version], int]] = {}
    """Of each tensor its row, and how many of its versions there are up to the step."""
    damaged: dict[tuple[str, str], LogRecord] = {}
    for record in records[:stop]:
        chunk = 0
        for row, coding in _changes(record, rows, path):
            key, counts = (row.name, row.state), record.step <= step
            known = versions.get(key)
            if coding == GONE:
                versions.pop(key, None)
            elif coding != DELTA:
                versions[key] = (row, [_Version(record, chunk, coding)])
            elif known is None or known[0] != row:
                versions.pop(key, None)
            else:
                known[1].append(_Version(record, chunk, coding))
            if counts:
                at_step.pop(key, None)
                damaged.pop(key, None)
                if key in versions:
                    at_step[key] = (*versions[key], len(versions[key][1]))
                elif coding == DELTA:
                    damaged[key] = record  # unless a later record replaces it
            chunk += row.chunk_count if coding != GONE else 0
        if chunk != record.count:
            raise _damaged(record, path)
    for record in damaged.values():
        raise _damaged(record, path)
    for row, of, count in at_step.values():
        yield _Recorded(path, row, tuple(of[:count]))


def _changes(record: LogRecord, rows: list[RecordedRow], path: Path) -> Iterator[tuple[RecordedRow, int]]:
    """The rows of a record in order, and how it has each. `rows`: those that earlier records announced; it grows."""
    announced = record.meta.get("tensors", [])
    if not isinstance(announced, list):
        raise _damaged(record, path)
    is_raw = record.kind is Kind.BUFFERS
    try:
        new = [RecordedRow.from_json([row[0], WEIGHTS, *row[1:]] if is_raw else row) for row in announced]
    except (ValueError, LookupError, TypeError):
        raise _damaged(record, path) from None
    if is_raw:
        yield from ((row, _RAW) for row in new)
        return
    rows += new
    changes = record.meta.get("changes", [])
    if not isinstance(changes, list):
        raise _damaged(record, path)
    for change in changes:
        valid = isinstance(change, list) and len(change) == 2 and all(map(is_natural, change))
        if not valid or change[0] >= len(rows) or change[1] > GONE:
            raise _damaged(record, path)
        yield rows[change[0]], change[1]


def _tensor(parts: list[tuple[RecordedRow, _Recorded]], segment: Segment) -> Tensor:
    row = parts[0][0]
    if any((one.shape, one.dtype, one.role) != (row.shape, row.dtype, row.role) for one, _ in parts):
        raise CorruptError(f"the ranks record different tensors `{printable(row.name)}`", where=segment.folder)
    fragments = []
    for one, recorded in parts:
        if one.block is None:
            fragments.append(Fragment(Box.whole(one.shape), _whole(recorded, one.shape)))
            continue
        at = 0
        for box in flat_boxes(one.block.box.shape, one.block.start, one.block.stop):
            blob = _RecordedBlob(recorded, box.shape, at, Box.whole(box.shape))
            fragments.append(Fragment(box.shift(one.block.box.start), blob))
            at += box.size
    return Tensor(row.shape, DTYPES[row.dtype], tuple(fragments))


def _whole(recorded: _Recorded, shape: Shape) -> _RecordedBlob:
    return _RecordedBlob(recorded, shape, 0, Box.whole(shape))


def _damaged(record: LogRecord, path: Path) -> CorruptError:
    return CorruptError(f"step {record.step}: its record of tensors is damaged", where=path)
