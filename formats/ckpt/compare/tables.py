"""Tensors of checkpoints that have tables of their states: they are paired, and found equal, in columns."""

from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from ckpt.pipeline import CountBytes, Resources
from ckpt.pipeline.executors import run_tasks
from ckpt_formats.core.checkpoint import MASTER, MODEL
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.state_table import TabulatedParameters
from ckpt_formats.core.tensor import Array, Tensor

_BLOCK = 1 << 20
"""Bytes of each file that are read at once."""
_GAP = 1 << 12
"""Bytes between two ranges that are rather read than skipped."""
_RUN = 64 << 20
"""About as many bytes a run has."""
Key = tuple[str, str]
"""A parameter and a state."""


@dataclass(frozen=True, eq=False)
class TableTensors(Mapping[Key, Tensor]):
    """Tensors by parameter and state. Each is made when it is looked up."""

    parameters: TabulatedParameters
    rows: Mapping[Key, int]
    """The row of each in the table."""

    @classmethod
    def of(
        cls, parameters: TabulatedParameters, aliases: Mapping[str, str], mastered: Set[str] = frozenset()
    ) -> "TableTensors":
        """All tensors but counters, tied ones by each name.

        `mastered`: the names for which the tensor that the optimizer updates is called the master, else the model.
        """
        table, rows = parameters.table, dict[Key, int]()
        master, copy = table.rows_named(MASTER), table.rows_named(MODEL)
        weights = np.where(master >= 0, master, table.weight).tolist()
        copies = np.where(master >= 0, copy, -1).tolist()
        hidden = [name in (MASTER, MODEL) for name in table.states]
        counters = [name == "step" for name in table.states]
        states, ranks, first = table.state.tolist(), table.rank.tolist(), table.first.tolist()
        for number, name in enumerate(table.names):
            rows[name, MASTER if name in mastered else MODEL] = weights[number]
            if copies[number] >= 0:
                rows[name, MODEL] = copies[number]
            for row in range(first[number], first[number + 1]):
                state = states[row]
                if not hidden[state] and not (counters[state] and ranks[row] == 0):
                    rows[name, table.states[state]] = row
        if aliases:
            numbers = {name: number for number, name in enumerate(table.names)}
            rows |= {
                (alias, MASTER if alias in mastered else MODEL): weights[numbers[name]]
                for alias, name in aliases.items()
                if name in numbers
            }
        return cls(parameters, rows)

    def of_states(self, states: Sequence[str]) -> "TableTensors":
        """Those of some states."""
        return TableTensors(self.parameters, {key: row for key, row in self.rows.items() if key[1] in states})

    def __getitem__(self, key: Key) -> Tensor:
        table, row = self.parameters.table, self.rows[key]
        name = table.names[int(np.searchsorted(table.first, row, "right")) - 1]
        return self.parameters[name].states[table.states[int(table.state[row])]]

    def __contains__(self, key: object) -> bool:
        return key in self.rows

    def __iter__(self) -> Iterator[Key]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, eq=False)
class TablePairs:
    """The tensors that two checkpoints both have, of equal shapes."""

    first: TabulatedParameters
    second: TabulatedParameters
    keys: Sequence[Key]
    first_rows: Array
    """Of each pair: (pairs,) int64."""
    second_rows: Array

    @classmethod
    def of(cls, first: TableTensors, second: TableTensors) -> "TablePairs":
        a, b = first.parameters.table, second.parameters.table
        keys = [key for key in first.rows if key in second.rows]
        x = np.array([first.rows[key] for key in keys], np.int64)
        y = np.array([second.rows[key] for key in keys], np.int64)
        same = a.rank[x] == b.rank[y]
        begins, others = a.dim_ends[x], b.dim_ends[y]
        for axis in range(int(a.rank.max(initial=0))):
            rows = np.flatnonzero(same & (a.rank[x] > axis))
            same[rows] = a.dims[begins[rows] + axis] == b.dims[others[rows] + axis]
        chosen = np.flatnonzero(same)
        chosen_keys = [keys[number] for number in chosen.tolist()]
        return cls(first.parameters, second.parameters, chosen_keys, x[chosen], y[chosen])

    @property
    def nbytes(self) -> int:
        """Bytes of both sides."""
        a, b = self.first.table.nbytes[self.first_rows], self.second.table.nbytes[self.second_rows]
        return int(a.sum()) + int(b.sum())

    def equal(self, resources: Resources, count_bytes: CountBytes) -> dict[Key, int]:
        """The pairs with equal bytes, and the elements of each. Not found are pairs of which one is stored encoded.

        Checksums say which pairs differ. Of all others the bytes are read and compared, because a file may be damaged.
        """
        one, other = self.first.places(), self.second.places()
        x, y, table = self.first_rows, self.second_rows, self.first.table
        numbers = {dtype: number for number, dtype in enumerate(table.dtypes)}
        types = np.array([numbers.get(dtype, -1) for dtype in self.second.table.dtypes] or [-1], np.int64)
        plain = (one.file[x] >= 0) & (other.file[y] >= 0) & (types[self.second.table.dtype[y]] == table.dtype[x])
        rows = np.flatnonzero(plain)
        rows = rows[_same_digests(one.chunks, one.digests, x[rows], other.chunks, other.digests, y[rows])]
        nbytes = table.nbytes[x[rows]]
        runs = _runs(one.file[x[rows]], one.offset[x[rows]], other.file[y[rows]], other.offset[y[rows]], nbytes)

        work = [partial(_differing, one.files, other.files, run, count_bytes) for run in runs]
        with ThreadPoolExecutor(resources.workers, "ckpt") as pool:
            wrong = [n for ns in run_tasks(pool, lambda job: job(), work, 2 * resources.workers) for n in ns.tolist()]
        right = np.ones(len(rows), np.bool_)
        right[wrong] = False
        sizes = table.elements[x[rows[right]]].tolist()
        return {self.keys[number]: size for number, size in zip(rows[right].tolist(), sizes, strict=True)}


def _same_digests(
    counts: Array, digests: Array, rows: Array, other_counts: Array, other_digests: Array, other_rows: Array
) -> Array:
    """Whether all chunks of two states of equal shapes have equal checksums: (rows,) bool."""
    lengths = counts[rows]
    begins, others = (np.cumsum(own) - own for own in (counts, other_counts))
    steps = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    a = digests[np.repeat(begins[rows], lengths) + steps]
    b = other_digests[np.repeat(others[other_rows], lengths) + steps]
    unequal = np.repeat(np.arange(len(rows)), lengths)[(a != b).any(axis=1)]
    same = np.ones(len(rows), np.bool_)
    same[unequal] = False
    return same


@dataclass(frozen=True, eq=False)
class _FileRun:
    """Ranges that lie in two files at the same distances from one another."""

    files: tuple[int, int]
    offsets: tuple[int, int]
    """Where the first range begins in each file."""
    starts: Array
    """Where each range begins, counted from the first: (ranges,) int64."""
    nbytes: Array
    numbers: Array
    """Of the ranges: (ranges,) int64."""


def _runs(file: Array, offset: Array, other_file: Array, other_offset: Array, nbytes: Array) -> Iterator[_FileRun]:
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
        yield _FileRun(files, offsets, offset[part] - offset[at], nbytes[order[part]], order[part])


def _differing(files: Sequence[Path], others: Sequence[Path], run: _FileRun, count_bytes: CountBytes) -> Array:
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
