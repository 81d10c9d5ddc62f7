"""Which parameters may have NaN or infinity, seen in the bytes that `verify` reads for their checksums.

Values that lie side by side are one run, so a file of many small tensors takes one look at a block, not one at each
tensor. Only where a look finds something, the tensors of the block are looked at one by one.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from ckpt.findings.not_finite import Pattern, can_have, count_not_finite, pattern_of
from ckpt_codecs.native.lossless import count_masked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.state_table import TabulatedParameters
from ckpt_formats.core.tensor import Array

_MAX_GAP = 64
"""Bytes between two tensors of one run: files align tensors. A look at them costs less than a run more."""
_MAX_END = 1 << 62
"""No file is as long."""


class FloatScan:
    """The parameters of a checkpoint with NaN or infinity in what was read of its files. Several threads may use it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._runs: dict[Path, list[_Runs]] = {}
        self.names: set[str] = set()
        """The parameters. Of values that lie at strides, what lies between counts, too."""
        for path, runs in _runs_of(checkpoint):
            self._runs.setdefault(path, []).append(runs)

    def note(self, path: Path, offset: int, data: memoryview) -> None:
        """Look at bytes of a file, from `offset` on. data: (nbytes,) uint8."""
        for runs in self._runs.get(path, ()):
            self.names.update(runs.seen(offset, data))

    def note_values(self, name: str, values: Array) -> None:
        """Look at decoded values of a parameter: of any shape and dtype."""
        if name not in self.names and can_have(values.dtype) and any(count_not_finite(np.ascontiguousarray(values))):
            self.names.add(name)


@dataclass(eq=False)
class _Runs:
    """The values of one type in a file. All values of a run lie a whole number of values from its beginning."""

    pattern: Pattern
    starts: Array
    """Where each tensor begins in the file, in ascending order: (tensors,) int64."""
    stops: Array
    """(tensors,) int64."""
    name_of: Callable[[int], str]
    """The parameter of a tensor."""
    first: list[int] = field(init=False)
    """The first tensor of each run, and the number of all tensors."""
    begins: list[int] = field(init=False)
    ends: list[int] = field(init=False)
    """Where each run or one before it ends: views of one storage overlap."""
    split: dict[int, dict[int, bytes]] = field(init=False, default_factory=dict)
    """Values of which only some bytes were in a block: by where the value begins, the bytes by where they begin."""

    def __post_init__(self) -> None:
        reach = np.maximum.accumulate(self.stops)
        is_apart = self.starts[1:] - reach[:-1] > _MAX_GAP
        is_apart |= np.diff(self.starts) % self.pattern.width != 0
        first = np.concatenate([[0], np.flatnonzero(is_apart) + 1])
        self.first = [*first.tolist(), len(self.starts)]
        self.begins = self.starts[first].tolist()
        self.ends = reach[np.append(first[1:], len(self.starts)) - 1].tolist()

    def seen(self, offset: int, data: memoryview) -> Iterator[str]:
        """The parameters with NaN or infinity in bytes of the file, from `offset` on. data: (nbytes,) uint8."""
        stop, width = offset + len(data), self.pattern.width
        for run in range(bisect_right(self.ends, offset), len(self.begins)):
            begin = self.begins[run]
            if begin >= stop:
                return
            low, high = max(begin, offset), min(self.ends[run], stop)
            a, b = low + (begin - low) % width, high - (high - begin) % width
            if a < b and self._count(data[a - offset : b - offset]):
                yield from self._tensors(run, a, b, data[a - offset : b - offset])
            if low < min(a, high):
                yield from self._part(run, a - width, low, data[low - offset : min(a, high) - offset])
            if a <= b < high:
                yield from self._part(run, b, b, data[b - offset : high - offset])

    def _count(self, data: memoryview) -> int:
        return count_masked(np.frombuffer(data, self.pattern.words), self.pattern.mask, self.pattern.value)

    def _tensors(self, run: int, low: int, high: int, data: memoryview) -> Iterator[str]:
        """The parameters with NaN or infinity in the values from `low` to `high`, which are `data`."""
        own = slice(self.first[run], self.first[run + 1])
        inside = np.flatnonzero((self.starts[own] < high) & (self.stops[own] > low)) + own.start
        for number in inside.tolist():
            a, b = max(int(self.starts[number]), low), min(int(self.stops[number]), high)
            b -= (b - a) % self.pattern.width
            if self._count(data[a - low : b - low]):
                yield self.name_of(number)

    def _part(self, run: int, value: int, at: int, data: memoryview) -> Iterator[str]:
        """Look at the value that begins at byte `value` of the file, once all its bytes were read."""
        parts = self.split.setdefault(value, {})
        parts[at] = bytes(data)
        whole = b"".join(part for _, part in sorted(parts.items()))
        if len(whole) == self.pattern.width:
            del self.split[value]
            if self._count(memoryview(whole)):
                yield from self._tensors(run, value, value + len(whole), memoryview(whole))


def _runs_of(checkpoint: Checkpoint) -> Iterator[tuple[Path, _Runs]]:
    """The plain values of a checkpoint by file and type."""
    parameters = checkpoint.parameters
    if isinstance(parameters, TabulatedParameters):
        yield from _runs_of_table(parameters)
        return
    places: dict[tuple[Path, Pattern], list[tuple[int, int, str]]] = {}
    for parameter, _, tensor in checkpoint.tensors():
        for blob in tensor.sources():
            stop = blob.offset + blob.span
            if can_have(blob.dtype) and blob.offset < stop <= _MAX_END:
                place = blob.offset, stop, parameter.name
                places.setdefault((blob.path, pattern_of(blob.dtype)), []).append(place)
    for (path, pattern), own in places.items():
        own.sort()
        starts, stops, names = zip(*own, strict=True)
        yield path, _Runs(pattern, np.array(starts, np.int64), np.array(stops, np.int64), names.__getitem__)


def _runs_of_table(parameters: TabulatedParameters) -> Iterator[tuple[Path, _Runs]]:
    table, places = parameters.table, parameters.places()
    patterns = [pattern_of(dtype) if can_have(dtype) else None for dtype in table.dtypes]
    for pattern in dict.fromkeys(one for one in patterns if one is not None):
        is_own = np.array([one == pattern for one in patterns])[table.dtype]
        rows = np.flatnonzero(is_own & (places.file >= 0) & (table.nbytes > 0))
        rows = rows[np.lexsort((places.offset[rows], places.file[rows]))]
        cuts = np.flatnonzero(np.diff(places.file[rows])) + 1
        for own in np.split(rows, cuts) if len(rows) else ():
            starts = places.offset[own].astype(np.int64)
            stops = starts + table.nbytes[own].astype(np.int64)
            name_of = partial(_owner, table.names, table.owner[own])
            yield places.files[int(places.file[own[0]])], _Runs(pattern, starts, stops, name_of)


def _owner(names: Sequence[str], owners: Array, number: int) -> str:
    return names[int(owners[number])]
