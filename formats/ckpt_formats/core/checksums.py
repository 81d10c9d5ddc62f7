"""The kinds of checksums that files promise: how each is computed while a range is read, put together, and verified.

Readers read a range in parts, in any order. Of each part there is a piece with a checksum. CRC-32s of neighbours
combine into that of both, and chunks that have checksums are valid one by one, so only the gaps are read again. For a
hash of the whole range, only what was read front to back counts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from ckpt_formats.core.coverage import Piece, steps_over, union
from ckpt_formats.core.seals import Seal, crc32, crc32_combine, crc32_without

if TYPE_CHECKING:
    from ckpt_formats.core.files import Reader

_BLOCK = 1 << 22
_MAX_RANGES = 4096
"""Ranges of one seal of which the CRC-32 is noted; further ranges are read again."""
_MAX_CHUNK_RUNS = 64
"""Runs of whole chunks of one seal that are noted; chunks of further runs are read again."""
_MASK = (1 << 64) - 1

_Array = np.ndarray[Any, np.dtype[Any]]


def digest_of(checksum: int) -> int:
    """What evidence has of a checksum: a CRC-32 as it is, of an XXH3-128 the lower 64 bits."""
    return checksum & _MASK


class RunningChecksum(Protocol):
    """The checksum of a range, computed from its bytes as these are read."""

    def note(self, start: int, data: memoryview) -> None:
        """Add bytes from byte `start` of the range on. data: (nbytes,) uint8."""

    def pieces(self) -> list[Piece]:
        """What was read. A piece of no bytes says that the range was read, and so must be verified."""


class Checksum(ABC):
    """The checksum of one sealed range."""

    def __init__(self, seal: Seal) -> None:
        self.seal = seal

    @abstractmethod
    def running(self) -> RunningChecksum:
        """The checksum of a range of which nothing was read yet."""

    @abstractmethod
    def is_valid(self, pieces: Sequence[Piece], reader: Reader) -> bool:
        """Whether the range fits: by pieces of it, none of which is the whole, and by what is read besides."""

    def damaged_chunks(self, reader: Reader) -> list[int]:
        """The numbers of the chunks that do not match their checksums; none if the file states none of chunks."""
        return []

    def checked(self, part: Piece) -> Piece | None:
        """A part of the range, if it says something about the whole; `checksum` is what evidence has of it.

        Raises `MismatchError` if its bytes cannot be those of the range.
        """
        return None

    def joined(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """The pieces, neighbours combined."""
        return union(pieces)

    def stated(self, part: Piece) -> int:
        """What evidence has as the checksum of a part that `checked` or `joined` returned: the inverse of `checked`."""
        return part.checksum

    def is_right(self, whole: int) -> bool:
        """Whether the range fits of which `joined` made one piece with this checksum."""
        return whole == self.seal.digest


class MismatchError(Exception):
    """A part of a range does not have the bytes that were sealed."""


class Crc32(Checksum):
    """A CRC-32 of the range."""

    def running(self) -> RunningChecksum:
        return _RunningCrc()

    def is_valid(self, pieces: Sequence[Piece], reader: Reader) -> bool:
        """Add up the CRC-32 of the first `n` bytes, for n from 0 to the end.

        Several readers may have read the same bytes, so a step may also go back.
        """
        total = 0
        for step in steps_over(self.seal.nbytes, pieces):
            low, high = sorted((step.start, step.stop))
            crc = step.checksum
            if crc is None:
                crc = 0
                for block in _blocks(self.seal, low, high, reader):
                    crc = crc32(block, crc)
            total = (crc32_combine if step.start == low else crc32_without)(total, crc, high - low)
        return total == self.seal.digest

    def checked(self, part: Piece) -> Piece:
        return part

    def joined(self, pieces: Sequence[Piece]) -> list[Piece]:
        result, ends = list[Piece](), dict[int, int]()
        for piece in sorted(set(pieces), key=lambda one: (one.start, one.stop)):
            before = ends.pop(piece.start, None)
            if before is None or piece.start == piece.stop:
                before = len(result)
                result.append(piece)
            else:
                crc = crc32_combine(result[before].checksum, piece.checksum, piece.stop - piece.start)
                result[before] = Piece(result[before].start, piece.stop, crc)
            ends[piece.stop] = before
        return result


class _RunningCrc:
    """The CRC-32s of the ranges that were read. A range that begins where the last one ended extends it."""

    def __init__(self) -> None:
        self._ranges: list[list[int]] = []
        """Of each: start, stop, CRC-32."""

    def note(self, start: int, data: memoryview) -> None:
        last = self._ranges[-1] if self._ranges else None
        if last is not None and last[1] == start:
            last[1], last[2] = start + len(data), crc32(data, last[2])
        elif len(self._ranges) < _MAX_RANGES:
            self._ranges.append([start, start + len(data), crc32(data)])

    def pieces(self) -> list[Piece]:
        return [Piece(*one) for one in self._ranges]


class Hash(Checksum):
    """An XXH3-128 of the range."""

    def running(self) -> RunningChecksum:
        return _RunningHash()

    def is_valid(self, pieces: Sequence[Piece], reader: Reader) -> bool:
        state = xxhash.xxh3_128()
        for block in _blocks(self.seal, 0, self.seal.nbytes, reader):
            state.update(block)
        return state.intdigest() == self.seal.digest


class _RunningHash:
    """The hash of the range, as far as it was read front to back."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()
        self._stop = 0

    def note(self, start: int, data: memoryview) -> None:
        if start == self._stop:
            self._state.update(data)
            self._stop += len(data)

    def pieces(self) -> list[Piece]:
        return [Piece(0, self._stop, int(self._state.intdigest()))]


class HashOfChunks(Checksum):
    """An XXH3-128 of the checksums of the chunks of the range: XXH3-128 or XXH3-64, which the file may state, too."""

    def __init__(self, seal: Seal) -> None:
        super().__init__(seal)
        self.hash = xxhash.xxh3_128 if seal.kind == "xxh3-128" else xxhash.xxh3_64
        self.starts: Sequence[int] = range(0, seal.nbytes, seal.chunk_nbytes or 1)
        """Where each chunk begins."""
        self._stop = seal.nbytes
        if not seal.chunk_nbytes and seal.leaves is not None:
            ends = np.cumsum(seal.leaves.nbytes).tolist()
            self.starts, self._stop = [0, *ends][: len(ends)], sum(ends[-1:])

    def end(self, number: int) -> int:
        """Where a chunk ends."""
        return self.starts[number + 1] if number + 1 < len(self.starts) else self._stop

    def running(self) -> RunningChecksum:
        return _RunningChunks(self)

    def is_valid(self, pieces: Sequence[Piece], reader: Reader) -> bool:
        """If the file states the checksums of the chunks, only those of no piece are read: the pieces are valid."""
        if self.seal.leaves is None:
            digests = b"".join(self._digests(range(len(self.starts)), reader))
            return xxhash.xxh3_128_intdigest(digests) == self.seal.digest
        if not self.is_right(0):
            return False
        known = {number for one in pieces for number in self._numbers(one)}
        missing = [number for number in range(len(self.starts)) if number not in known]
        actual = zip(missing, self._digests(missing, reader), strict=True)
        return all(digest == self._stated(number, number + 1) for number, digest in actual)

    def damaged_chunks(self, reader: Reader) -> list[int]:
        numbers = range(len(self.starts) if self.seal.leaves else 0)
        actual = zip(numbers, self._digests(numbers, reader), strict=True)
        return [number for number, digest in actual if digest != self._stated(number, number + 1)]

    def checked(self, part: Piece) -> Piece | None:
        numbers = self._numbers(part)
        if self.seal.leaves is None or not numbers:
            return None
        if (part.start, part.stop) != (self.starts[numbers.start], self.end(numbers.stop - 1)):
            return None
        if digest_of(xxhash.xxh3_128_intdigest(self._stated(numbers.start, numbers.stop))) != part.checksum:
            raise MismatchError
        return Piece(part.start, part.stop, 0)

    def stated(self, part: Piece) -> int:
        numbers = self._numbers(part)
        return digest_of(xxhash.xxh3_128_intdigest(self._stated(numbers.start, numbers.stop) if numbers else b""))

    def is_right(self, whole: int) -> bool:
        """Whether the checksums of the chunks that the file states fit: those of `joined` pieces are valid."""
        leaves = self.seal.leaves
        return leaves is not None and xxhash.xxh3_128_intdigest(leaves.digests) == self.seal.digest

    def _numbers(self, part: Piece) -> range:
        """The numbers of the chunks that lie in a part, empty ones at its ends, too."""
        is_last = part.stop >= self._stop
        stop = len(self.starts) if is_last else bisect_right(self.starts, part.stop) - 1
        return range(bisect_left(self.starts, part.start), stop)

    def _stated(self, first: int, stop: int) -> bytes:
        """The checksums of chunks that the file states, one after another."""
        assert self.seal.leaves is not None
        width = self.hash().digest_size
        return self.seal.leaves.digests[first * width : stop * width]

    def _digests(self, numbers: Iterable[int], reader: Reader) -> Iterator[bytes]:
        """The actual checksums of chunks. Neighbours are read at once, up to `_BLOCK` bytes."""
        for group in self._neighbours(numbers):
            begin = self.starts[group[0]]
            buffer = np.empty(self.end(group[-1]) - begin, np.uint8).data
            reader.read_into(self.seal.path, self.seal.offset + begin, buffer)
            for number in group:
                yield self.hash(buffer[self.starts[number] - begin : self.end(number) - begin]).digest()

    def _neighbours(self, numbers: Iterable[int]) -> Iterator[list[int]]:
        group = list[int]()
        for number in numbers:
            if group and (number != group[-1] + 1 or self.end(number) - self.starts[group[0]] > _BLOCK):
                yield group
                group = []
            group.append(number)
        if group:
            yield group


class _RunningChunks:
    """The hashes of the whole chunks that were read front to back, in one run or in several."""

    def __init__(self, checksum: HashOfChunks) -> None:
        self._checksum = checksum
        self._runs: list[_ChunkRun] = []

    def note(self, start: int, data: memoryview) -> None:
        for run in reversed(self._runs):
            if run.stop == start:
                break
        else:
            starts = self._checksum.starts
            first = bisect_left(starts, start)
            if first == len(starts) or starts[first] - start >= len(data) or len(self._runs) >= _MAX_CHUNK_RUNS:
                return
            run, data = _ChunkRun(self._checksum, first), data[starts[first] - start :]
            self._runs.append(run)
        run.extend(data)

    def pieces(self) -> list[Piece]:
        return [run.piece() for run in self._runs] or [Piece(0, 0, xxhash.xxh3_128_intdigest(b""))]


class _ChunkRun:
    """The hashes of whole chunks that follow one another."""

    def __init__(self, checksum: HashOfChunks, first: int) -> None:
        self._checksum = checksum
        self._start = self._whole = self.stop = checksum.starts[first]
        """Where the run begins, where its whole chunks end, and where it ends."""
        self._number = first
        """Of the chunk that is read next, or was read in part."""
        self._state = checksum.hash()
        self._digests = bytearray()

    def extend(self, data: memoryview) -> None:
        at, count = 0, len(self._checksum.starts)
        while at < len(data) and self._number < count:  # else beyond the range
            part = data[at : at + self._checksum.end(self._number) - self.stop]
            at += len(part)
            self.stop += len(part)
            self._state.update(part)
            while self._number < count and self.stop == self._checksum.end(self._number):  # some chunks are empty
                self._digests += self._state.digest()
                self._state.reset()
                self._whole = self.stop
                self._number += 1

    def piece(self) -> Piece:
        return Piece(self._start, self._whole, xxhash.xxh3_128_intdigest(bytes(self._digests)))


def checksum_of(seal: Seal) -> Checksum:
    """The checksum of a sealed range, by its kind."""
    if seal.kind == "crc32":
        return Crc32(seal)
    return HashOfChunks(seal) if seal.chunk_nbytes or seal.leaves is not None else Hash(seal)


def _blocks(seal: Seal, start: int, stop: int, reader: Reader) -> Iterator[memoryview]:
    buffer = np.empty(min(_BLOCK, max(stop - start, 0)), np.uint8).data
    for at in range(start, stop, _BLOCK):
        view = buffer[: min(_BLOCK, stop - at)]
        reader.read_into(seal.path, seal.offset + at, view)
        yield view
