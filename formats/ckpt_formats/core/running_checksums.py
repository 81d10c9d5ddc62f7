"""The checksums of sealed ranges, computed from their bytes as these are read."""

from collections import deque
from typing import Any

import numpy as np
import xxhash

from ckpt_formats.core.coverage import Piece
from ckpt_formats.core.files import Seal, crc32

_MAX_RANGES = 4096
"""Ranges of one seal of which the CRC-32 is noted; further ranges are read again."""
_MAX_CHUNK_RUNS = 64
"""Runs of whole chunks of one seal that are noted; chunks of further runs are read again."""

_Array = np.ndarray[Any, np.dtype[Any]]


class _RunningLeaves:
    """The hashes of the whole chunks of a range that were read front to back, in one run or in several."""

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._runs: list[_ChunkRun] = []

    def note(self, start: int, data: memoryview) -> None:
        for run in reversed(self._runs):
            if run.stop == start:
                break
        else:
            skipped = -start % self._seal.chunk_nbytes
            if skipped >= len(data) or len(self._runs) >= _MAX_CHUNK_RUNS:
                return
            run, data = _ChunkRun(self._seal, start + skipped), data[skipped:]
            self._runs.append(run)
        run.extend(data)

    def pieces(self) -> list[Piece]:
        # A piece of no bytes says that the range was read, and so must be verified.
        return [run.piece() for run in self._runs] or [Piece(0, 0, int(xxhash.xxh3_128_intdigest(b"")))]


class _ChunkRun:
    """The hashes of whole chunks that follow one another."""

    def __init__(self, seal: Seal, start: int) -> None:
        self._seal = seal
        self._start, self.stop = start, start
        self._state: xxhash.xxh3_128 | None = None
        """Of the chunk of which only the beginning was read."""
        self._leaves = bytearray()

    def extend(self, data: memoryview) -> None:
        seal, at = self._seal, 0
        while at < len(data):
            rest = min(seal.chunk_nbytes - self.stop % seal.chunk_nbytes, seal.nbytes - self.stop)
            if not rest:
                return  # beyond the range
            part = data[at : at + rest]
            at += len(part)
            self.stop += len(part)
            if self._state is None and len(part) == rest:
                self._leaves += xxhash.xxh3_128_digest(part)
                continue
            self._state = self._state or xxhash.xxh3_128()
            self._state.update(part)
            if len(part) == rest:
                self._leaves += self._state.digest()
                self._state = None

    def piece(self) -> Piece:
        whole = min(self._start + len(self._leaves) // 16 * self._seal.chunk_nbytes, self._seal.nbytes)
        return Piece(self._start, whole, int(xxhash.xxh3_128_intdigest(bytes(self._leaves))))


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


class _RunningUneven:
    """The hashes of chunks of several lengths, as far as the range was read front to back."""

    def __init__(self, seal: Seal, lengths: _Array) -> None:
        self._seal, self._lengths = seal, deque[int](lengths.tolist())
        self._hash = xxhash.xxh3_128 if seal.kind == "xxh3-128" else xxhash.xxh3_64
        self._state, self._left = self._hash(), self._lengths.popleft() if self._lengths else 0
        self._digests, self._stop = bytearray(), 0

    def note(self, start: int, data: memoryview) -> None:
        if start != self._stop:
            return
        self._stop += len(data)
        while data:
            part, data = data[: self._left], data[self._left :]
            self._state.update(part)
            self._left -= len(part)
            if self._left:
                return
            self._digests += self._state.digest()
            if not self._lengths:
                return
            self._state, self._left = self._hash(), self._lengths.popleft()

    def pieces(self) -> list[Piece]:
        is_whole = self._stop == self._seal.nbytes and not self._lengths and not self._left
        digests = bytes(self._digests) if is_whole else b""  # of a part: a piece of no bytes, as above
        return [Piece(0, self._stop if is_whole else 0, int(xxhash.xxh3_128_intdigest(digests)))]


RunningChecksum = _RunningCrc | _RunningHash | _RunningLeaves | _RunningUneven


def running_checksum(seal: Seal) -> RunningChecksum:
    """The checksum of a sealed range of which nothing was read yet."""
    if seal.kind == "crc32":
        return _RunningCrc()
    if seal.leaves is not None and not seal.chunk_nbytes:
        return _RunningUneven(seal, seal.leaves.nbytes)
    return _RunningLeaves(seal) if seal.chunk_nbytes else _RunningHash()
