"""Ranges of two files, read together and compared byte by byte: many small ones take few reads."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt.pipeline import CountBytes
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.tensor import Array

_BLOCK = 1 << 20
"""Bytes of each file that are read at once."""
_GAP = 1 << 12
"""Bytes between two ranges that are rather read than skipped."""
_RUN = 64 << 20
"""About as many bytes a run has."""


@dataclass(frozen=True, eq=False)
class Run:
    """Ranges that lie in two files at the same distances from one another."""

    files: tuple[int, int]
    offsets: tuple[int, int]
    """Where the first range begins in each file."""
    starts: Array
    """Where each range begins, counted from the first: (ranges,) int64."""
    nbytes: Array
    numbers: Array
    """Of the ranges: (ranges,) int64."""


def read_together(file: Array, offset: Array, other_file: Array, other_offset: Array, nbytes: Array) -> Iterator[Run]:
    """All ranges in runs. Each argument is (ranges,) int64: the number of the file, the place in it, the length."""
    order = np.lexsort((nbytes, offset, file))  # an empty range comes before the one at the same place
    file, offset, other_file, other_offset = (column[order] for column in (file, offset, other_file, other_offset))
    ends = offset + nbytes[order]
    breaks = (np.diff(file) != 0) | (np.diff(other_file) != 0) | (np.diff(other_offset) != np.diff(offset))
    # The same range may be needed twice, under two names.
    breaks |= (offset[1:] - ends[:-1] > _GAP) | (offset[1:] < ends[:-1])
    breaks |= np.diff(offset // _RUN) != 0
    for part in np.split(np.arange(len(order)), np.flatnonzero(breaks) + 1) if len(order) else ():
        at = int(part[0])
        files, offsets = (int(file[at]), int(other_file[at])), (int(offset[at]), int(other_offset[at]))
        yield Run(files, offsets, offset[part] - offset[at], nbytes[order[part]], order[part])


def differing(files: Sequence[Path], others: Sequence[Path], run: Run, count_bytes: CountBytes) -> Array:
    """The numbers of the ranges of a run that are not equal, or cannot be read: (n,) int64."""
    paths = files[run.files[0]], others[run.files[1]]
    total, unequal = int(run.starts[-1] + run.nbytes[-1]), np.zeros(len(run.starts), np.bool_)
    buffers = [np.empty(min(_BLOCK, total), np.uint8) for _ in paths]
    with Reader(check=False) as reader:
        for at in range(0, total, _BLOCK):
            length = min(_BLOCK, total - at)
            try:
                for path, offset, buffer in zip(paths, run.offsets, buffers, strict=True):
                    reader.read_into(path, offset + at, buffer[:length].data)
            except CkptError:
                unequal[:] = True
                break
            a, b = (buffer[:length] for buffer in buffers)
            if not np.array_equal(a, b):
                places = at + np.flatnonzero(a != b)
                own = np.searchsorted(run.starts, places, "right") - 1
                unequal[own[places < run.starts[own] + run.nbytes[own]]] = True
            count_bytes(0)
    count_bytes(2 * int(run.nbytes[~unequal].sum()))
    return run.numbers[unequal]
