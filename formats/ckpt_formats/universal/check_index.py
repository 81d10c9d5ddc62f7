"""Check the columns of an index before they are used: it may be hostile.

Everything is checked in columns, so that a million states take about a second. Raises `CorruptError`, which names the
first row that is wrong.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ckpt_formats.core.claims import MAX_AXES, MAX_ELEMENTS
from ckpt_formats.core.distinct import distinct
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.text import printable
from ckpt_formats.universal.entry import ALIGNMENT, DIGEST
from ckpt_formats.universal.index import CODED, DERIVED, IN_DELTA, PLAIN, ROLES, Index

OVERHEAD = 1024
"""Bytes by which an encoded chunk may be longer than its values."""
MAX_DELTA_CHUNK_NBYTES = 64 << 20
"""Limit of the bytes that one chunk of a delta has when it is decoded: the sum over all its states."""


@dataclass(frozen=True)
class Pack:
    """What the manifest states of the file of a pack."""

    nbytes: int
    header_nbytes: int
    header: str
    """The XXH3-128 of the header."""
    owner: "Owner | None" = None
    """The earlier member of the chain that the pack is of; None for a pack of the checkpoint itself."""


@dataclass(frozen=True, order=True)
class Owner:
    """A pack of an earlier member of the same chain."""

    folder: str
    """The name of the member's folder, which is next to that of the checkpoint."""
    number: int
    """The number of the pack there."""


def check(index: Index, packs: Sequence[Pack], path: Path) -> None:
    """Raise `CorruptError` unless all columns fit each other, the tables, and the packs."""
    _Check(index, packs, path).run()


@dataclass(frozen=True)
class _Check:
    index: Index
    packs: Sequence[Pack]
    path: Path

    def run(self) -> None:
        self._lengths()
        self._names()
        self._numbers()
        sizes = self._sizes()
        self._chunks(sizes)
        self._bases()
        self._deltas(sizes)
        self._extents()

    def _true(self, right: bool, message: str) -> None:
        if not right:
            raise CorruptError(f"the index is not valid: {message}", where=self.path)

    def _all(self, right: Array, message: str, table: str = "state") -> None:
        """Raise `CorruptError` unless all rows are right; the message names the parameter of the first that is not."""
        if not right.all():
            row = int(np.flatnonzero(~right)[0])
            number = int(self.index.columns[f"{table}.parameter"][row]) if table != "parameter" else row
            name = self.index.names[number]
            state = f" {self.index.tables.states[int(self._column('state.name')[row])]}" if table == "state" else ""
            raise CorruptError(f"the index is not valid: `{printable(name)}`{state}: {message}", where=self.path)

    def _column(self, name: str) -> Array:
        return self.index.columns[name]

    def _lengths(self) -> None:
        columns, rows = self.index.columns, {"parameter": "ends", "state": "parameter", "delta": "parameter"}
        free = {"parameter.names", "state.dims"}
        for name, column in columns.items():
            table = name.partition(".")[0]
            self._true(column.ndim == (2 if name == "chunk.values" else 1), f"the shape of column {name}")
            if table in rows and name not in free:
                self._true(len(column) == len(columns[f"{table}.{rows[table]}"]), f"the length of column {name}")
        self._true(self._column("chunk.values").shape[1] == DIGEST, "the width of column chunk.values")
        self._true(len(columns["coded.nbytes"]) == len(columns["coded.stored"]), "the length of column coded.stored")
        ranks = columns["state.rank"]
        self._true(int(ranks.max(initial=0)) <= MAX_AXES, f"a tensor of more than {MAX_AXES} dimensions")
        self._true(int(ranks.sum(dtype=np.int64)) == len(columns["state.dims"]), "the length of column state.dims")

    def _names(self) -> None:
        ends, blob = self._column("parameter.ends"), self._column("parameter.names")
        rising = len(ends) == 0 or bool((ends[1:] >= ends[:-1]).all())
        self._true(rising and int(ends[-1] if len(ends) else 0) == len(blob), "the ends of names")
        try:
            count = len(self.index.names)
        except UnicodeDecodeError:
            raise CorruptError("the index is not valid: a name is not UTF-8", where=self.path) from None
        self._true(len(self.index.numbers) == count, "a parameter's name twice")

    def _numbers(self) -> None:
        tables, index = self.index.tables, self.index
        limits = {
            "parameter.role": len(ROLES),
            "parameter.values": len(tables.values),
            "state.parameter": len(index),
            "state.name": len(tables.states),
            "state.dtype": len(tables.dtypes),
            "state.storage": IN_DELTA + 1,
            "state.codec": len(tables.codecs),
            "state.error": len(tables.errors),
            "delta.parameter": len(index),
            "delta.codec": len(tables.deltas),
        }
        for name, limit in limits.items():
            self._true(int(self._column(name).max(initial=0)) < max(limit, 1), f"a number in column {name}")
            self._true(limit > 0 or not len(self._column(name)), f"column {name} refers to an empty table")
        owners, deltas = self._column("state.parameter"), self._column("delta.parameter")
        self._true(bool((owners[1:] >= owners[:-1]).all()), "states are not in the order of their parameters")
        self._true(bool((deltas[1:] > deltas[:-1]).all()), "deltas are not in the order of their parameters")
        has_states = np.bincount(owners, minlength=len(index)) > 0 if len(index) else np.zeros(0, np.bool_)
        self._all(has_states, "it has no state", "parameter")
        keys = np.sort(self._keys())
        self._true(bool((keys[1:] != keys[:-1]).all()), "a state of a parameter twice")

    def _keys(self) -> Array:
        """One number for each pair of parameter and state."""
        count = max(len(self.index.tables.states), 1)
        return self._column("state.parameter").astype(np.int64) * count + self._column("state.name")

    def _sizes(self) -> Array:
        """Elements of each state: (states,) int64."""
        ranks, dims = self._column("state.rank"), self._column("state.dims")
        begins = np.cumsum(ranks, dtype=np.int64) - ranks
        sizes, bound = np.ones(len(ranks), np.int64), np.ones(len(ranks))
        for axis in range(int(ranks.max(initial=0))):
            rows = np.flatnonzero(ranks > axis)
            axis_sizes = dims[begins[rows] + axis]
            # A size of zero must not hide the sizes beside it.
            bound[rows] *= np.maximum(axis_sizes.astype(np.float64), 1.0)
            self._all(bound < MAX_ELEMENTS, "its shape is too large")
            sizes[rows] *= axis_sizes.astype(np.int64)
        return sizes

    def _chunks(self, sizes: Array) -> None:
        index, storage = self.index, self._column("state.storage")
        self._all(sizes * self._itemsizes.astype(np.float64) < MAX_ELEMENTS, "its shape is too large")
        elements, counts = index.chunk_sizes
        total = float(counts.sum(dtype=np.float64))  # a sum of integers could begin again at zero
        self._true(total == len(self._column("chunk.values")), "the length of column chunk.values")
        self._true(index.coded_count == len(self._column("coded.nbytes")), "the length of column coded.nbytes")
        raw = sizes * self._itemsizes
        plain, coded = storage == PLAIN, storage == CODED
        self._all(~plain | (raw == self._column("state.nbytes")), "its bytes do not fit its shape")
        nbytes = self._column("coded.nbytes").astype(np.int64)
        limits = np.minimum(elements, sizes) * self._itemsizes + OVERHEAD
        self._coded(nbytes, counts, coded, limits, self._column("state.nbytes"), "state")

    @cached_property
    def _itemsizes(self) -> Array:
        """Bytes of an element of each state: (states,) int64."""
        of_types = np.array([DTYPES[dtype].itemsize for dtype in self.index.tables.dtypes] or [1], np.int64)
        return of_types[self._column("state.dtype")]

    def _coded(self, nbytes: Array, counts: Array, coded: Array, limits: Array, stored: Array, table: str) -> None:
        """Check the lengths of encoded chunks. `limits`: the largest for each row."""
        rows = np.flatnonzero(coded)
        ends = np.cumsum(counts[rows])
        total = np.concatenate([[0], np.cumsum(nbytes)])
        begins = ends - counts[rows]
        lengths = total[ends] - total[begins]
        right = np.ones(len(coded), np.bool_)
        right[rows] = lengths + -lengths % ALIGNMENT == stored[rows].astype(np.int64)
        self._all(right, "its bytes do not fit its chunks", table)
        largest = np.repeat(limits[rows], counts[rows])
        self._true(bool((nbytes[: len(largest)] <= largest).all()), "an encoded chunk is too long")

    def _bases(self) -> None:
        """States that are decoded with another state of their parameter."""
        tables, storage = self.index.tables, self._column("state.storage")
        codec = self._column("state.codec")
        self._all((storage == PLAIN) | (storage == IN_DELTA) | (codec != 0), "a codec is missing")
        self._all((storage == CODED) | (storage == DERIVED) | (codec == 0), "a codec without use")
        extent = self._column("state.nbytes") | self._column("state.offset") | self._column("state.pack")
        self._all((storage == PLAIN) | (storage == CODED) | (extent == 0), "bytes without use")
        names = {name: number for number, name in enumerate(tables.states)}
        bases = np.array([-1 if i.base is None else names.get(i.base, -2) for i in tables.codecs], np.int64)[codec]
        self._all((storage != DERIVED) | (bases >= 0), "a derived state without a base")
        self._all(bases != -2, "its base does not exist")
        rows = np.flatnonzero(bases >= 0)
        if not len(rows):
            return
        keys = self._keys()
        order = np.argsort(keys, kind="stable")
        wanted = self._column("state.parameter")[rows].astype(np.int64) * max(len(tables.states), 1) + bases[rows]
        at = np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)
        base = order[at]
        right = np.ones(len(keys), np.bool_)
        right[rows] = (keys[base] == wanted) & (bases[base] < 0)
        # A state that is stored alone is read without the delta. Only a derived state may have a base in the delta.
        right[rows] &= (storage[rows] == DERIVED) | (storage[base] != IN_DELTA)
        self._all(right, "its base is not a state that it can be decoded with")
        right[rows] = self._same_shape(rows, base)
        self._all(right, "its base has another shape")

    def _same_shape(self, first: Array, second: Array) -> Array:
        ranks, dims = self._column("state.rank").astype(np.int64), self._column("state.dims")
        begins = np.cumsum(ranks) - ranks
        same: Array = ranks[first] == ranks[second]
        for axis in range(int(ranks.max(initial=0))):
            rows = np.flatnonzero(same & (ranks[first] > axis))
            same[rows] = dims[begins[first[rows]] + axis] == dims[begins[second[rows]] + axis]
        return same

    def _deltas(self, sizes: Array) -> None:
        """Each delta has exactly the states of its item, of one shape, and its chunks are not too large."""
        index, tables, owners = self.index, self.index.tables, self._column("delta.parameter")
        items = [tables.deltas[number] for number in self._column("delta.codec").tolist()]
        lengths = np.array([len(item.states) for item in items], np.int64)
        in_delta = np.flatnonzero(self._column("state.storage") == IN_DELTA)
        counts, expected = (
            np.bincount(self._column("state.parameter")[in_delta], minlength=len(index)),
            np.zeros(len(index)),
        )
        expected[owners] = lengths
        self._all(counts == expected, "its delta has other states", "parameter")
        if not len(in_delta):
            return
        # So the rows of a delta's states follow one another, in the order of the deltas.
        first = np.cumsum(lengths) - lengths
        names = self._column("state.name")[in_delta].tolist()
        own = ({tables.states[n] for n in names[at : at + k]} for at, k in zip(first, lengths, strict=True))
        equal = [states == set(item.states) for states, item in zip(own, items, strict=True)]
        self._all(np.array(equal), "its delta has other states", "delta")
        heads, right = in_delta[first], np.ones(len(self._column("state.name")), np.bool_)
        right[in_delta] = self._same_shape(np.repeat(heads, lengths), in_delta)
        self._all(right, "the states of its delta differ in shape")
        itemsizes = np.add.reduceat(self._itemsizes[in_delta], first)
        elements, counts = index.chunk_sizes[0][heads], index.delta_counts
        self._all(elements * itemsizes <= MAX_DELTA_CHUNK_NBYTES, "a chunk of its delta is too large", "delta")
        nbytes = self._column("coded.nbytes").astype(np.int64)[index.coded_count - int(counts.sum()) :]
        every, limits = np.ones(len(counts), np.bool_), np.minimum(elements, sizes[heads]) * itemsizes + OVERHEAD
        self._coded(nbytes, counts, every, limits, self._column("delta.nbytes"), "delta")

    def _extents(self) -> None:
        """The ranges of each own pack follow one another from its header to its end.

        Those of a pack of another member do not overlap, and lie behind its header. So no byte is claimed twice.
        """
        stored = np.flatnonzero(self._column("state.storage") <= CODED)
        columns = {
            key: np.concatenate([self._column(f"state.{key}")[stored], self._column(f"delta.{key}")]).astype(np.uint64)
            for key in ("pack", "offset", "nbytes")
        }
        self._true(not len(columns["pack"]) or int(columns["pack"].max()) < len(self.packs), "the number of a pack")
        own = sum(one.owner is None for one in self.packs)
        deltas = self._column("delta.pack")
        self._true(not len(deltas) or int(deltas.max()) < own, "a delta in a pack of another member")
        order = np.lexsort((columns["nbytes"], columns["offset"], columns["pack"]))
        pack, offset, nbytes = (columns[key][order] for key in ("pack", "offset", "nbytes"))
        # No sum passes 2^63: each length fits chunks whose checksums are in the index.
        first = np.searchsorted(pack, np.arange(len(self.packs) + 1, dtype=np.uint64))
        headers = np.array([one.header_nbytes for one in self.packs], np.uint64)
        ends = np.concatenate([np.zeros(1, np.uint64), np.cumsum(nbytes, dtype=np.uint64)])
        self._shared(pack[first[own] :], offset[first[own] :], nbytes[first[own] :])
        pack, offset = pack[: first[own]], offset[: first[own]]
        number = pack.astype(np.int64)
        expected = headers[number] + ends[: len(pack)] - ends[first[number]] if len(pack) else offset
        wrong = np.flatnonzero(offset != expected)
        if len(wrong):
            row = int(wrong[0])
            where = f"pack {int(pack[row])} do not follow one another at byte {int(offset[row])}"
            self._true(False, f"the ranges of {where}")
        for number_of, one in enumerate(self.packs[:own]):
            end = one.header_nbytes + int(ends[first[number_of + 1]] - ends[first[number_of]])
            self._true(end == one.nbytes, f"the ranges of pack {number_of} do not reach its end")

    def _shared(self, pack: Array, offset: Array, nbytes: Array) -> None:
        """Check the ranges in packs of other members, sorted by pack and offset: each (ranges,) uint64."""
        named = [number for number, one in enumerate(self.packs) if one.owner is not None]
        actual: list[int] = distinct(pack).tolist()
        self._true(actual == named, "a pack of another member that no state lies in")
        headers = np.array([one.header_nbytes for one in self.packs], np.uint64)
        ends = np.array([one.nbytes for one in self.packs], np.uint64)
        number = pack.astype(np.int64)
        # The length of a range fits its chunks, so it is below 2^62; and so is an offset that is not beyond the file.
        inside = (offset <= ends[number]) & (offset >= headers[number])
        inside &= nbytes <= ends[number] - np.minimum(offset, ends[number])
        if inside.all() and len(pack):
            same = pack[1:] == pack[:-1]
            inside[1:] &= ~same | (offset[1:] >= offset[:-1] + nbytes[:-1])
        if not inside.all():
            row = int(np.flatnonzero(~inside)[0])
            owner = self.packs[int(pack[row])].owner
            assert owner is not None
            where = f"pack {owner.number} of {owner.folder} at byte {int(offset[row])}"
            self._true(False, f"a range in {where} overlaps another one, or is not within the pack")
