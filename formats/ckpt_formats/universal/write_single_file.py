"""Put the packs of a checkpoint together in one file."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from ckpt_formats.containers.safetensors import TensorSlot, header_bytes
from ckpt_formats.containers.sealed_json import hash_text
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import write_all
from ckpt_formats.core.tensor import Array
from ckpt_formats.universal.check_index import Pack
from ckpt_formats.universal.entry import ALIGNMENT, Extent
from ckpt_formats.universal.index import CODED, Index
from ckpt_formats.universal.pack import PAGE, header_nbytes, placed_states, stored_slots
from ckpt_formats.universal.single_file import FileRange

_ORIGINAL, _INDEX, _MANIFEST = "ckpt.original", "ckpt.index", "ckpt.manifest"
_BLOCK = 1 << 22
_LAST_SLOTS = 1024
"""The last entries and the metadata need fewer bytes of the header."""


@dataclass(frozen=True)
class PlacedRanges:
    """Where states lie in the file whose lengths are known before they are written; those of all packs, in turn.

    They have a number of their own in the index, that after the packs' numbers, until the packs are put together.
    """

    header_nbytes: int
    """The space for the header. Without such states, its length is computed when all others are."""
    extents: tuple[Extent, ...]
    """The range of each pack."""

    @property
    def end(self) -> int:
        return self.extents[-1].offset + self.extents[-1].nbytes if self.extents else self.header_nbytes

    @staticmethod
    def of(packs: Sequence[Sequence[Parameter]]) -> "PlacedRanges":
        """The places for packs of these parameters, none of whose states is encoded."""
        room = header_nbytes([parameter for pack in packs for parameter in pack], None, {}) + _LAST_SLOTS
        room, extents = -(-room // PAGE) * PAGE, list[Extent]()
        at = room
        for pack in packs:
            nbytes = sum(parameter.states[state].nbytes for parameter in pack for state in placed_states(parameter))
            extents.append(Extent(len(packs), at, nbytes))
            at += nbytes
        return PlacedRanges(room, tuple(extents))


@dataclass(frozen=True)
class Draft:
    """The file as far as it is known before its index and its manifest are."""

    index: Index
    """With the offsets in the file."""
    header_nbytes: int
    data_nbytes: int
    slots: tuple[TensorSlot, ...]
    pieces: tuple[FileRange, ...]
    """The ranges of the packs that are not in the file yet, in the order in which they will be."""

    @property
    def begin(self) -> int:
        """Where the states end, and the last entries begin."""
        return self.header_nbytes + self.data_nbytes

    def header(self, lengths: Mapping[str, int]) -> bytes:
        """The header for last entries of these lengths, by name and in their order."""
        slots, places, at = list(self.slots), {}, self.data_nbytes
        for name, nbytes in lengths.items():
            slots.append(TensorSlot(name, np.dtype(np.uint8), (nbytes,), at))
            places[name.partition(".")[2]] = f"{self.header_nbytes + at} {nbytes}"
            at += nbytes
        metadata = {"ckpt": "universal 1"} | {
            name: places[name] for name in ("index", "manifest", "original") if name in places
        }
        return header_bytes(slots, metadata, self.header_nbytes)

    def pack(self, header: bytes) -> Pack:
        """What the manifest states of the file as a pack."""
        return Pack(self.begin, self.header_nbytes, hash_text(xxhash.xxh3_128_intdigest(header)))


def draft(index: Index, packs: Sequence[tuple[Path, Pack]], placed: PlacedRanges | None) -> Draft:
    """Put packs together: the aligned states of all, then all others, so that the former stay aligned.

    With a `placed`, these follow the states that are in the file.
    """
    tails = _tails(index, [pack for _, pack in packs])
    bodies = [
        FileRange(path, pack.header_nbytes, tail - pack.header_nbytes)
        for (path, pack), tail in zip(packs, tails, strict=True)
    ]
    rests = [FileRange(path, tail, pack.nbytes - tail) for (path, pack), tail in zip(packs, tails, strict=True)]
    pieces = (*bodies, *rests)
    ends = np.cumsum([0, *(piece.nbytes for piece in pieces)])
    begins, rest_nbytes = ends[:-1], int(ends[-1])
    if placed is not None:
        moved = _moved(index, tails, [pack for _, pack in packs], begins + placed.end)
        header_nbytes = placed.header_nbytes
        slots = tuple(stored_slots(moved, header_nbytes))
        return Draft(moved, header_nbytes, placed.end - header_nbytes + rest_nbytes, slots, pieces)
    relative = _moved(index, tails, [pack for _, pack in packs], begins)
    slots = tuple(stored_slots(relative, 0))
    longest = dict.fromkeys((_ORIGINAL, _INDEX, _MANIFEST), 1 << 62)
    header_nbytes = -(-len(Draft(relative, 0, rest_nbytes, slots, pieces).header(longest)) // PAGE) * PAGE
    moved = _moved(index, tails, [pack for _, pack in packs], begins + header_nbytes)
    return Draft(moved, header_nbytes, rest_nbytes, slots, pieces)


def lengths(index: int, manifest: int, original: int | None) -> dict[str, int]:
    """The lengths of the last entries by name, in their order."""
    return ({} if original is None else {_ORIGINAL: original}) | {_INDEX: index, _MANIFEST: manifest}


def write(path: Path, header: bytes, begin: int, pieces: Sequence[FileRange], last: Sequence[bytes]) -> None:
    """Write what is missing: the header, and everything from byte `begin` on."""
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b", buffering=0) as out:
        out.truncate(begin)  # an interrupted run may have written more
        write_all(out, header)
        out.seek(begin)
        for piece in pieces:
            _copy(piece, out)
        for data in last:
            write_all(out, data)


def _tails(index: Index, packs: Sequence[Pack]) -> list[int]:
    """Where the states begin in each pack that are not aligned."""
    tails = [pack.nbytes for pack in packs]
    for numbers, offsets, lengths in _extents(index):
        odd = lengths % ALIGNMENT != 0
        for number in range(len(packs)):
            rows = odd & (numbers == number)
            if rows.any():
                tails[number] = min(tails[number], int(offsets[rows].min()))
    return tails


def _extents(index: Index) -> Iterator[tuple[Array, Array, Array]]:
    """The packs, offsets and lengths of what is stored."""
    stored = index.columns["state.storage"] <= CODED
    for table, rows in (("state", stored), ("delta", slice(None))):
        yield tuple(index.columns[f"{table}.{key}"][rows] for key in ("pack", "offset", "nbytes"))  # type: ignore[misc]


def _moved(index: Index, tails: Sequence[int], packs: Sequence[Pack], begins: Array) -> Index:
    """The index with all states in pack 0. `begins`: where each piece begins in it, (2 x packs,) int64."""
    columns = dict(index.columns)
    headers = np.array([pack.header_nbytes for pack in packs], np.int64)
    tail, count = np.array(tails, np.int64), len(packs)
    stored = columns["state.storage"] <= CODED
    stored &= columns["state.pack"] < count  # others are in the file already
    for table, rows in (("state", np.flatnonzero(stored)), ("delta", np.arange(len(columns["delta.pack"])))):
        numbers, offsets = columns[f"{table}.pack"][rows], columns[f"{table}.offset"][rows].astype(np.int64)
        is_tail = offsets >= tail[numbers]
        moved = np.where(
            is_tail, offsets - tail[numbers] + begins[count + numbers], offsets - headers[numbers] + begins[numbers]
        )
        new = columns[f"{table}.offset"].copy()
        new[rows] = moved
        columns[f"{table}.offset"] = new
        columns[f"{table}.pack"] = np.zeros_like(columns[f"{table}.pack"])
    return Index(columns, index.tables)


def _copy(piece: FileRange, out: BinaryIO) -> None:
    """Copy a range to the end of a file, within the kernel where it can."""
    with piece.path.open("rb", buffering=0) as source:
        at, end = piece.offset, piece.end
        while at < end:
            try:
                done = os.copy_file_range(source.fileno(), out.fileno(), min(_BLOCK, end - at), at)
            except (OSError, AttributeError):
                data = os.pread(source.fileno(), min(_BLOCK, end - at), at)
                write_all(out, data)  # raises the error again if the disk is full
                done = len(data)
            if not done:
                raise CorruptError("the file ends too early", where=piece.path)
            at += done
