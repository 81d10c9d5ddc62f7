"""Put the evidence of all readers together as it arrives, and compare it with the checksums that files promise.

Only what nobody has read is read here, so bytes are read once, not twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np
import xxhash

from ckpt_formats.core.coverage import Piece, steps_over, union
from ckpt_formats.core.evidence import NUMBER, Evidence, Numbers, digest_of, joined_crcs, seal_number
from ckpt_formats.core.files import LazySeals, Reader, Seal, crc32, crc32_combine, crc32_without

_BLOCK = 1 << 22
_MANY = 64
"""Pieces of one seal above which neighbours are combined."""
_FEW_NUMBERS = 1 << 16


class SealChecks:
    """What is known of all seals of which there was evidence. It has intervals, not every piece that somebody read.

    The CRC-32s of two neighbouring ranges combine into the CRC-32 of both, and chunks that have checksums are valid one
    by one, so only the gaps are read here. For others, only evidence of the whole range is used.
    """

    def __init__(self, listed: Mapping[int, Seal] = MappingProxyType({})) -> None:
        """`listed`: the seals that evidence may name by their numbers alone."""
        self._listed = listed
        self._matched = _NumberSet()
        self._damaged: dict[int, Seal] = {}
        self._partly: dict[int, _PartlyRead] = {}

    def __len__(self) -> int:
        """How many seals there was evidence of."""
        return len(self._matched) + len(self._damaged) + len(self._partly)

    @property
    def intervals(self) -> int:
        """How many intervals it keeps, of seals that need more evidence."""
        return sum(len(one.crcs) for one in self._partly.values())

    def knows(self, evidence: Evidence) -> bool:
        """Whether all seals of the evidence are known: in it, or listed."""
        own = {seal_number(seal) for seal in evidence.seals}
        return all(number in own or number in self._listed for number in _distinct(evidence))

    def add(self, evidence: Evidence) -> None:
        """Add evidence of one or several readers. Raises `KeyError` if it does not know one of its seals."""
        numbers = evidence.numbers.tolist()
        self._matched.update(numbers)
        for number in numbers if self._partly else ():
            self._partly.pop(number, None)
        own = {seal_number(seal): seal for seal in evidence.seals}
        for number, start, stop, digest in evidence.table.tolist():
            if number in self._damaged:
                continue
            seal = own[number] if number in own else self._listed[number]
            is_whole = (start, stop) == (0, seal.nbytes)
            if number in self._matched and (not is_whole or digest == digest_of(seal.digest)):
                continue
            state = self._partly.get(number)
            if state is None:
                state = self._partly[number] = _PartlyRead(seal)
            state.add(start, stop, digest)
            if state.fits is not None:
                del self._partly[number]
                if state.fits:
                    self._matched.update((number,))
                else:
                    self._damaged[number] = seal
                    self._matched.discard(number)

    def damaged(self, reader: Reader | None = None) -> Iterator[Seal]:
        """Yield the seals that are not valid. What nobody has read of the others is read. Raises as `Reader` does."""
        yield from self._damaged.values()
        with reader or Reader(check=False) as reader:
            for state in self._partly.values():
                if not _is_valid(state.seal, state.pieces, reader):
                    yield state.seal


def verify_seals(evidence: Iterable[Evidence], reader: Reader | None = None) -> Iterator[Seal]:
    """Yield the seals that are not valid, among those of which there is evidence."""
    checks = SealChecks()
    for one in evidence:
        checks.add(one)
    yield from checks.damaged(reader)


def seal_is_valid(seal: Seal, reader: Reader) -> bool:
    """Read the whole range, and compare its checksum."""
    return _is_valid(seal, [], reader)


def damaged_chunks(seal: Seal, reader: Reader) -> list[int]:
    """The numbers of the chunks of a range that do not match their checksums; none if the range has no chunks."""
    if seal.leaves is None:
        return []
    width = _WIDTHS[seal.kind]
    actual, expected = b"".join(_leaves(seal, reader)), seal.leaves.digests
    numbers = range(len(expected) // width)
    return [i for i in numbers if actual[i * width : (i + 1) * width] != expected[i * width : (i + 1) * width]]


def _is_valid(seal: Seal, pieces: Sequence[Piece], reader: Reader) -> bool:
    """Whether a range fits its checksum: by the pieces, none of which is the whole, and by what is read besides.

    Those of a range in chunks have no checksums: they are valid.
    """
    if seal.chunk_nbytes and seal.leaves is not None:
        return _chunks_are_valid(seal, seal.leaves.digests, pieces, reader)
    return _digest(seal, pieces, reader) == seal.digest


def _chunks_are_valid(seal: Seal, expected: bytes, valid: Iterable[Piece], reader: Reader) -> bool:
    """Whether all chunks match their checksums, (chunks x 16) bytes: those of `valid` do, the others are read."""
    if xxhash.xxh3_128_intdigest(expected) != seal.digest:
        return False
    chunk = seal.chunk_nbytes
    is_known = np.zeros(-(-seal.nbytes // chunk), bool)
    for one in valid:
        is_known[one.start // chunk : -(-one.stop // chunk)] = True
    most = max(1, _BLOCK // chunk)
    missing = np.flatnonzero(~is_known)
    for run in np.split(missing, np.flatnonzero(np.diff(missing) != 1) + 1):
        for i in range(0, len(run), most):
            first, last = int(run[i]), int(run[min(i + most, len(run)) - 1]) + 1
            buffer = np.empty(min(last * chunk, seal.nbytes) - first * chunk, np.uint8).data
            reader.read_into(seal.path, seal.offset + first * chunk, buffer)
            actual = b"".join(xxhash.xxh3_128_digest(buffer[at : at + chunk]) for at in range(0, len(buffer), chunk))
            if actual != expected[16 * first : 16 * last]:
                return False
    return True


def _digest(seal: Seal, pieces: Sequence[Piece], reader: Reader) -> int:
    """The actual digest of a sealed range: from the pieces, and from what must be read besides."""
    if seal.kind == "crc32":
        return _crc(seal, pieces, reader)
    if seal.chunk_nbytes or seal.leaves is not None:
        return int(xxhash.xxh3_128_intdigest(b"".join(_leaves(seal, reader))))
    state = xxhash.xxh3_128()
    for block in _blocks(seal, 0, seal.nbytes, reader):
        state.update(block)
    return int(state.intdigest())


def _crc(seal: Seal, pieces: Sequence[Piece], reader: Reader) -> int:
    """The CRC-32 of a sealed range: that of its first `n` bytes, for n from 0 to the end.

    Several readers may have read the same bytes, so a step may also go back.
    """
    total = 0
    for step in steps_over(seal.nbytes, pieces):
        low, high = sorted((step.start, step.stop))
        crc = step.checksum
        if crc is None:
            crc = 0
            for block in _blocks(seal, low, high, reader):
                crc = crc32(block, crc)
        total = (crc32_combine if step.start == low else crc32_without)(total, crc, high - low)
    return total


def _blocks(seal: Seal, start: int, stop: int, reader: Reader) -> Iterator[memoryview]:
    buffer = np.empty(min(_BLOCK, max(stop - start, 0)), np.uint8).data
    for at in range(start, stop, _BLOCK):
        view = buffer[: min(_BLOCK, stop - at)]
        reader.read_into(seal.path, seal.offset + at, view)
        yield view


_WIDTHS = {"xxh3-128": 16, "xxh3-64": 8}
"""Bytes of a checksum of a chunk."""


def _leaves(seal: Seal, reader: Reader) -> Iterator[bytes]:
    """The actual checksums of the chunks of a range."""
    digest = xxhash.xxh3_128_digest if seal.kind == "xxh3-128" else xxhash.xxh3_64_digest
    for block in _chunks_together(seal):
        buffer = np.empty(sum(block[1]), np.uint8).data
        reader.read_into(seal.path, seal.offset + block[0], buffer)
        at = 0
        for nbytes in block[1]:
            yield digest(buffer[at : at + nbytes])
            at += nbytes


def _chunks_together(seal: Seal) -> Iterator[tuple[int, list[int]]]:
    """The chunks of a range, several at once: where they begin, and their lengths."""
    if seal.leaves is not None:
        lengths = seal.leaves.nbytes.tolist()
    else:
        lengths = [seal.chunk_nbytes] * (seal.nbytes // seal.chunk_nbytes)
        lengths += [seal.nbytes % seal.chunk_nbytes] if seal.nbytes % seal.chunk_nbytes else []
    begin, block, total = 0, list[int](), 0
    for nbytes in lengths:
        if block and total + nbytes > _BLOCK:
            yield begin, block
            begin, block, total = begin + total, [], 0
        block.append(nbytes)
        total += nbytes
    if block:
        yield begin, block


class ListedSeals(Mapping[int, Seal]):
    """The seals of several checkpoints that are known without reading anything, by their numbers.

    They are the same in every process that opens these checkpoints. None is looked at before one is looked up.
    """

    def __init__(self, every: Iterable[Sequence[Seal]]) -> None:
        self._every = tuple(every)

    @cached_property
    def _by_number(self) -> dict[int, Seal]:
        sequences = (seals.listed() if isinstance(seals, LazySeals) else seals for seals in self._every)
        return {seal_number(seal): seal for seals in sequences for seal in seals}

    def __getitem__(self, number: int) -> Seal:
        return self._by_number[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_number)

    def __len__(self) -> int:
        return len(self._by_number)


@dataclass(slots=True)
class _PartlyRead:
    """A sealed range of which parts were read."""

    seal: Seal
    fits: bool | None = None
    """Whether the range fits its checksum, once that is known."""
    crcs: dict[tuple[int, int], int] = field(default_factory=dict)
    """By start and stop. Of a range in chunks: parts of which all chunks are valid, with 0."""
    covered: int = 0
    """Bytes of all parts; those that overlap count twice."""
    twice: int = 0
    """Of these, the bytes that were counted more than once when neighbours were last combined."""
    most: int = _MANY
    """Parts above which neighbours are combined."""

    @property
    def pieces(self) -> list[Piece]:
        return [Piece(start, stop, crc) for (start, stop), crc in self.crcs.items()]

    def add(self, start: int, stop: int, digest: int) -> None:
        """Add a part, with the checksum that evidence has of it."""
        seal = self.seal
        if (start, stop) == (0, seal.nbytes):
            self.fits = digest == digest_of(seal.digest)
        elif start < stop:
            if seal.kind == "crc32":
                self._note(start, stop, digest)
            elif seal.chunk_nbytes and seal.leaves is not None:
                self._add_chunks(start, stop, digest, seal.leaves.digests)

    def _add_chunks(self, start: int, stop: int, digest: int, expected: bytes) -> None:
        chunk = self.seal.chunk_nbytes
        if start % chunk or (stop % chunk and stop != self.seal.nbytes):
            return
        own = expected[16 * (start // chunk) : 16 * -(-stop // chunk)]
        if digest_of(xxhash.xxh3_128_intdigest(own)) == digest:
            self._note(start, stop, 0)
        else:
            self.fits = False

    def _note(self, start: int, stop: int, crc: int) -> None:
        if self.crcs.setdefault((start, stop), crc) != crc:
            self.fits = False  # two readers got different bytes
            return
        self.covered += stop - start
        may_be_whole = self.covered >= self.seal.nbytes + self.twice
        if not may_be_whole and len(self.crcs) <= self.most:
            return
        pieces = _joined(self.seal, self.pieces)
        whole = [one for one in pieces if (one.start, one.stop) == (0, self.seal.nbytes)]
        if whole:
            self.fits = _whole_fits(self.seal, whole[0].checksum)
        if len(self.crcs) > self.most:
            self.crcs = {(one.start, one.stop): one.checksum for one in pieces}
            self.covered = sum(one.stop - one.start for one in pieces)
            self.most = max(_MANY, 2 * len(pieces))
        self.twice = self.covered - sum(one.stop - one.start for one in union(pieces))


def _joined(seal: Seal, pieces: Sequence[Piece]) -> Sequence[Piece]:
    """The parts of a range, neighbours combined."""
    return joined_crcs(pieces) if seal.kind == "crc32" else union(pieces)


def _whole_fits(seal: Seal, crc: int) -> bool:
    """Whether a range fits whose CRC-32 this is, or whose chunks are all valid."""
    if seal.kind == "crc32":
        return crc == seal.digest
    return seal.leaves is not None and xxhash.xxh3_128_intdigest(seal.leaves.digests) == seal.digest


def _distinct(evidence: Evidence) -> list[int]:
    """The numbers of the seals of the ranges."""
    numbers: list[int] = np.unique(evidence.table["seal"]).tolist()
    return numbers


class _NumberSet:
    """A set of numbers of 64 bits, which takes 8 bytes for each."""

    def __init__(self) -> None:
        self._sorted: Numbers = np.empty(0, NUMBER)
        self._recent = set[int]()

    def __contains__(self, number: int) -> bool:
        if number in self._recent:
            return True
        at = int(np.searchsorted(self._sorted, np.uint64(number)))
        return at < len(self._sorted) and int(self._sorted[at]) == number

    def __len__(self) -> int:
        self._sort()
        return len(self._sorted)

    def update(self, numbers: Iterable[int]) -> None:
        self._recent.update(numbers)
        if len(self._recent) > _FEW_NUMBERS:
            self._sort()

    def discard(self, number: int) -> None:
        self._sort()
        self._sorted = self._sorted[self._sorted != np.uint64(number)]

    def _sort(self) -> None:
        recent = np.fromiter(self._recent, NUMBER, len(self._recent))
        self._sorted, self._recent = np.union1d(self._sorted, recent), set()
