"""The checksums of what lies in packs, compared in columns: each pack is read once, front to back.

Nothing is made for a range whose bytes fit. Ranges are numbered as `read_states.seals` gives them: those of the states
of a parameter, then that of its delta, parameter by parameter.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ckpt_formats.core.distinct import distinct
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import Array
from ckpt_formats.universal.entry import DIGEST
from ckpt_formats.universal.index import CODED, DERIVED, Index
from ckpt_formats.universal.manifest import PackFiles

_READ_NBYTES = 4 << 20
"""Bytes that are read at once, if no chunk is longer."""
_PART_NBYTES = 64 << 20
"""About as many bytes a part has."""


@dataclass(frozen=True, eq=False)
class PackPart:
    """Neighbouring chunks of a pack."""

    path: Path
    offsets: Array
    """Where each chunk begins: (chunks,) int64."""
    lengths: Array
    """(chunks,) int64."""
    is_coded: Array
    """Whether a chunk has the XXH3-64 of its coded bytes, else the XXH3-128 of its values: (chunks,) bool."""
    expected: Array
    """The checksums as the index has them: (chunks, 16) uint8. An XXH3-64 has the first 8 bytes; zeros follow."""
    seals: Array
    """The number of the seal of each chunk: (chunks,) int64."""

    @property
    def nbytes(self) -> int:
        return int(self.lengths.sum())

    def unequal(self, reader: Reader) -> list[int]:
        wrong = np.zeros(len(self.lengths), np.bool_)
        begins, ends = self.offsets, self.offsets + self.lengths
        at, buffer = 0, bytearray(max(_READ_NBYTES, int(self.lengths.max(initial=0))))
        while at < len(begins):
            stop = max(int(np.searchsorted(ends, begins[at] + _READ_NBYTES, "right")), at + 1)
            wrong[at:stop] = self._wrong(at, stop, memoryview(buffer), reader)
            at = stop
        numbers: list[int] = distinct(self.seals[wrong]).tolist()
        return numbers

    def _wrong(self, at: int, stop: int, buffer: memoryview, reader: Reader) -> Array | bool:
        """Which of some chunks do not fit: (chunks,) bool."""
        start = int(self.offsets[at])
        data = buffer[: int(self.offsets[stop - 1] + self.lengths[stop - 1]) - start]
        try:
            reader.read_into(self.path, start, data)
        except CkptError:
            return True
        begins = (self.offsets[at:stop] - start).tolist()
        ends = (self.offsets[at:stop] + self.lengths[at:stop] - start).tolist()
        coded, whole = xxhash.xxh3_64_digest, xxhash.xxh3_128_digest
        if not self.is_coded[at:stop].any():
            actual = [whole(data[a:b]) for a, b in zip(begins, ends, strict=True)]
        else:
            kinds, filling = self.is_coded[at:stop].tolist(), bytes(DIGEST - 8)
            both = zip(begins, ends, kinds, strict=True)
            actual = [coded(data[a:b]) + filling if kind else whole(data[a:b]) for a, b, kind in both]
        digests = np.frombuffer(b"".join(actual), np.uint8).reshape(-1, DIGEST)
        unequal: Array = (digests != self.expected[at:stop]).any(axis=1)
        return unequal


def stored_count(index: Index) -> int:
    """How many ranges there are."""
    return int((index.columns["state.storage"] < DERIVED).sum()) + len(index.columns["delta.pack"])


def seal_of(files: PackFiles, index: Index, number: int) -> tuple[Seal, str]:
    """The seal of a range by its number, and its parameter."""
    owners = _owners(index)
    parameter = int(owners[number])
    entry = index[parameter]
    before = int(np.searchsorted(owners, parameter))
    from ckpt_formats.universal.read_states import seals  # only what is damaged is named by its seal

    return list(seals(files, entry))[number - before], entry.name


def pack_parts(files: PackFiles, index: Index, first: int) -> Iterator[PackPart]:
    """All chunks in all packs, in parts. The numbers of seals begin with `first`."""
    columns = index.columns
    rows, deltas = np.flatnonzero(columns["state.storage"] < DERIVED), len(columns["delta.pack"])
    pack, offset = (
        np.concatenate([columns[f"state.{key}"][rows], columns[f"delta.{key}"]]).astype(np.int64)
        for key in ("pack", "offset")
    )
    coded = np.concatenate([columns["state.storage"][rows] == CODED, np.ones(deltas, np.bool_)])
    nbytes = np.concatenate([columns["state.nbytes"][rows], columns["delta.nbytes"]]).astype(np.int64)
    counts = np.concatenate([index.chunk_counts[rows], index.delta_counts])
    numbers = np.empty(len(pack), np.int64)
    # Ranges are numbered by parameter; a delta comes after the states that are stored alone.
    by_parameter = np.concatenate([columns["state.parameter"][rows], columns["delta.parameter"]])
    numbers[np.argsort(by_parameter, kind="stable")] = np.arange(len(pack))

    itemsizes = np.array([DTYPES[name].itemsize for name in index.tables.dtypes] or [1], np.int64)
    full = np.zeros(len(pack), np.int64)
    full[: len(rows)] = index.chunk_sizes[0][rows] * itemsizes[columns["state.dtype"][rows]]
    begins = np.cumsum(counts) - counts
    range_of = np.repeat(np.arange(len(pack)), counts)
    place = np.arange(len(range_of)) - begins[range_of]
    is_coded, is_last = coded[range_of], place + 1 == counts[range_of]

    lengths = full[range_of]
    lengths[is_coded] = columns["coded.nbytes"]  # in this order: of states, then of deltas
    starts = np.cumsum(lengths) - lengths
    starts -= starts[np.minimum(begins, max(len(starts) - 1, 0))][range_of] if len(starts) else 0
    lengths = np.where(is_last, nbytes[range_of] - starts, lengths)

    expected = np.zeros((len(range_of), DIGEST), np.uint8)
    expected[is_coded, :8] = columns["coded.stored"].astype(">u8").view(np.uint8).reshape(-1, 8)
    is_plain = np.zeros(len(columns["state.storage"]), np.bool_)
    is_plain[rows] = ~coded[: len(rows)]
    expected[~is_coded] = columns["chunk.values"][np.repeat(is_plain, index.chunk_counts)]

    offsets, packs = offset[range_of] + starts, pack[range_of]
    order = np.lexsort((offsets, packs))
    before = np.cumsum(lengths[order]) - lengths[order]
    cuts = np.flatnonzero(np.diff(packs[order]) | np.diff(before // _PART_NBYTES)) + 1
    for part in np.split(order, cuts) if len(order) else ():
        path, own = files.path(int(packs[part[0]])), first + numbers[range_of[part]]
        yield PackPart(path, offsets[part], lengths[part], is_coded[part], expected[part], own)


def _owners(index: Index) -> Array:
    """The number of the parameter of each range: (ranges,) uint32."""
    columns = index.columns
    stored = columns["state.parameter"][columns["state.storage"] < DERIVED]
    owners: Array = np.sort(np.concatenate([stored, columns["delta.parameter"]]), kind="stable")
    return owners
