"""Where files have nothing but zeros, found in the bytes that are read for another purpose.

A crash, or a download that was not finished, leaves zeros in a file, and a format without checksums does not notice.
`Reader` looks at the ends of each block that it reads; only where these are zero, it looks further. `zero_values` tells
which of the zeros mean something.
"""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ckpt_formats.core.store_path import is_remote

LONG = 1 << 20
"""Bytes of zeros that are worth a notice."""
_EDGE = 64
"""Zeros at an end of a block that are noted; fewer are an accident of values."""
_PIECE = 1 << 16
_LOOK = 8
"""Of each piece of a block that is longer than `LONG`, so many bytes are looked at first."""
_MAX_RUNS = 1 << 16
"""Runs that one reader notes. Of more, only long ones."""

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class ZeroRun(NamedTuple):
    """A range of a file in which every byte is zero: plain data, which another process may send back."""

    file: str
    start: int
    stop: int


class ZeroRuns:
    """The zeros in what one reader has read."""

    def __init__(self) -> None:
        self._runs: list[ZeroRun] = []

    def note(self, path: Path, offset: int, data: memoryview) -> None:
        """Note the zeros in bytes of a file, from `offset` on. data: (nbytes,) uint8."""
        if not data or (data[0] and data[-1] and len(data) <= LONG):
            return
        for start, stop in _zeros_in(np.frombuffer(data, np.uint8)):
            if len(self._runs) < _MAX_RUNS or stop - start >= LONG:
                self._runs.append(ZeroRun(str(path), offset + start, offset + stop))

    def runs(self) -> tuple[ZeroRun, ...]:
        """All runs, neighbours joined."""
        return tuple(joined_runs(self._runs))


def joined_runs(runs: Iterable[ZeroRun]) -> list[ZeroRun]:
    """The runs by file and place. Those that touch or overlap are one."""
    result: list[ZeroRun] = []
    for run in sorted(set(runs)):
        last = result[-1] if result else None
        if last is not None and last.file == run.file and run.start <= last.stop:
            result[-1] = last._replace(stop=max(last.stop, run.stop))
        else:
            result.append(run)
    return result


def holes(path: Path) -> Iterator[ZeroRun]:
    """The long ranges of a file that were never written, as the file system states them. Nothing is read.

    In a store there are none.
    """
    if is_remote(path):
        return
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    except OSError:
        return  # whoever reads the file reports it
    try:
        end, at = os.fstat(descriptor).st_size, 0
        while at < end:
            start = os.lseek(descriptor, at, os.SEEK_HOLE)
            at = _next_data(descriptor, start, end)
            if at - start >= LONG:
                yield ZeroRun(str(path), start, at)
    except OSError:
        return  # this file system does not tell
    finally:
        os.close(descriptor)


def _next_data(descriptor: int, start: int, end: int) -> int:
    try:
        return os.lseek(descriptor, start, os.SEEK_DATA)
    except OSError:  # none: the file ends in a hole
        return end


def _zeros_in(data: _Bytes) -> Iterator[tuple[int, int]]:
    """The runs of zeros in a block: (start, stop). Within it, only long ones."""
    size = len(data)
    head = _leading_zeros(data)
    if head == size:
        yield 0, size
        return
    if head >= _EDGE:
        yield 0, head
    if (tail := _leading_zeros(data[::-1])) >= _EDGE:
        yield size - tail, size
    if size > LONG:
        yield from _long_zeros(data)


def _leading_zeros(data: _Bytes) -> int:
    at, step = 0, _EDGE
    while at < len(data):
        part = data[at : at + step]
        if part.any():
            return at + int((part != 0).argmax())
        at, step = at + step, min(4 * step, LONG)
    return len(data)


def _long_zeros(data: _Bytes) -> Iterator[tuple[int, int]]:
    """The long runs, found by a few bytes of each piece."""
    pieces = data[: len(data) // _PIECE * _PIECE].reshape(-1, _PIECE)[:, :_LOOK]
    is_zero = np.concatenate(([False], ~pieces.any(axis=1), [False]))
    changes = np.flatnonzero(is_zero[1:] != is_zero[:-1]).reshape(-1, 2)
    for first, last in changes.tolist():
        if (last - first + 1) * _PIECE < LONG:
            continue
        low, high = max(0, (first - 1) * _PIECE), min(len(data), (last + 1) * _PIECE)
        others = np.flatnonzero(data[low:high]) + low
        ends = np.concatenate(([low - 1], others, [high]))
        for at in np.flatnonzero(np.diff(ends) > LONG).tolist():
            yield int(ends[at]) + 1, int(ends[at + 1])
