"""The index of a universal checkpoint: columns of numbers, one row for each parameter, state, delta and chunk.

Rows that are alike share an item of a table: names of states, element types, codecs, values. The tables are in the
manifest. An entry is made of the columns when somebody asks for it. See docs/format.md.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, get_args

import numpy as np

from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import Role
from ckpt_formats.core.chunking import chunk_sizes
from ckpt_formats.core.tensor import Array
from ckpt_formats.universal import columns as container
from ckpt_formats.universal.entry import DIGEST, CodedChunks, DeltaEntry, Extent, ParameterEntry, StateEntry
from ckpt_formats.universal.tables import CodecItem, DeltaItem, Tables

ROLES: tuple[Role, ...] = get_args(Role)
PLAIN, CODED, DERIVED, IN_DELTA = range(4)
"""How a state is stored: the numbers of the column `state.storage`."""
TYPES = {
    "parameter.names": "u1",
    "parameter.ends": "<u8",
    "parameter.role": "u1",
    "parameter.values": "<u4",
    "state.parameter": "<u4",
    "state.name": "<u2",
    "state.dtype": "u1",
    "state.storage": "u1",
    "state.codec": "<u4",
    "state.error": "<u4",
    "state.pack": "<u4",
    "state.offset": "<u8",
    "state.nbytes": "<u8",
    "state.rank": "u1",
    "state.dims": "<u8",
    "delta.parameter": "<u4",
    "delta.codec": "<u4",
    "delta.pack": "<u4",
    "delta.offset": "<u8",
    "delta.nbytes": "<u8",
    "chunk.values": "u1",
    "coded.nbytes": "<u4",
    "coded.stored": "<u8",
}
"""The columns and the NumPy types of their numbers."""
METADATA = {"ckpt": "universal 1: the index"}


@dataclass(frozen=True, eq=False)
class Index(Sequence[ParameterEntry]):
    """All parameters of a checkpoint, in the model's order. An entry is made when it is looked up."""

    columns: Mapping[str, Array]
    """By the names of `TYPES`. Each is a vector, but `chunk.values` has 16 bytes in each row."""
    tables: Tables

    def __getstate__(self) -> dict[str, Any]:
        """Without what is computed from the columns."""
        return {"columns": self.columns, "tables": self.tables}

    def __len__(self) -> int:
        return len(self.columns["parameter.ends"])

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not 0 <= number < len(self):
            raise IndexError(number)
        return self._entry(number)

    def dump(self) -> bytes:
        """The bytes of `index.safetensors`."""
        return container.dump(self.columns, METADATA)

    @cached_property
    def names(self) -> list[str]:
        """The names of all parameters."""
        blob = self.columns["parameter.names"].tobytes()
        if blob.isascii():
            text, ends = blob.decode("ascii"), self.columns["parameter.ends"].tolist()
            return [text[a:b] for a, b in zip([0, *ends], ends, strict=False)]
        return [name.decode("utf-8", "surrogatepass") for name in self.encoded_names()]

    def encoded_names(self) -> list[bytes]:
        """The names of all parameters, as they are stored."""
        blob, ends = self.columns["parameter.names"].tobytes(), self.columns["parameter.ends"].tolist()
        return [blob[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each parameter by its name."""
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def chunk_sizes(self) -> tuple[Array, Array]:
        """The elements of a full chunk of each state, and how many chunks it has: both (states,) int64."""
        return chunk_sizes(self.columns["state.rank"], self.columns["state.dims"])

    @property
    def chunk_counts(self) -> Array:
        """How many chunks each state has: (states,) int64."""
        return self.chunk_sizes[1]

    def with_deltas(self) -> list[str]:
        """The names of the parameters whose delta needs a parent."""
        needed = np.array([bool(item.parent_states) for item in self.tables.deltas], np.bool_)
        rows = needed[self.columns["delta.codec"]] if len(needed) else np.zeros(0, np.bool_)
        return [self.names[number] for number in self.columns["delta.parameter"][rows].tolist()]

    @cached_property
    def _lists(self) -> dict[str, list[Any]]:
        """The columns of states as lists of Python numbers: quicker to index one by one."""
        names = [name for name in TYPES if name.startswith(("state.", "delta.")) and name != "state.dims"]
        return {name: self.columns[name].tolist() for name in names}

    @cached_property
    def _first(self) -> dict[str, list[int]]:
        """Where the rows of each state and parameter begin in other columns."""
        counts = self.chunk_counts
        coded = np.where(self.columns["state.storage"] == CODED, counts, 0)
        of_deltas = self.delta_counts
        states = np.arange(len(self) + 1)
        return {
            "state": np.searchsorted(self.columns["state.parameter"], states).tolist(),
            "delta": np.searchsorted(self.columns["delta.parameter"], states).tolist(),
            "dims": _ends(self.columns["state.rank"].astype(np.int64)),
            "chunk": _ends(counts),
            "coded": _ends(coded),
            "coded of deltas": [int(coded.sum()) + end for end in _ends(of_deltas)],
        }

    @cached_property
    def delta_counts(self) -> Array:
        """How many chunks each delta has, which is that of each of its states: (deltas,) int64."""
        in_delta = self.columns["state.storage"] == IN_DELTA
        count = np.zeros(len(self), np.int64)
        count[self.columns["state.parameter"][in_delta]] = self.chunk_counts[in_delta]
        return count[self.columns["delta.parameter"]]

    @property
    def coded_count(self) -> int:
        """How many encoded chunks there must be, of states and of deltas."""
        coded = self.columns["state.storage"] == CODED
        return int(self.chunk_counts[coded].sum()) + int(self.delta_counts.sum())

    def _entry(self, number: int) -> ParameterEntry:
        first = self._first
        rows = range(first["state"][number], first["state"][number + 1])
        states = {self.tables.states[self._lists["state.name"][row]]: self._state(row) for row in rows}
        deltas = range(first["delta"][number], first["delta"][number + 1])
        return ParameterEntry(
            self.names[number],
            ROLES[int(self.columns["parameter.role"][number])],
            states,
            self.tables.values[int(self.columns["parameter.values"][number])],
            self._delta(deltas[0]) if deltas else None,
        )

    def _state(self, row: int) -> StateEntry:
        of, first = self._lists, self._first
        storage, item = of["state.storage"][row], self.tables.codecs[of["state.codec"][row]]
        place = Extent(of["state.pack"][row], of["state.offset"][row], of["state.nbytes"][row])
        dims = self.columns["state.dims"][first["dims"][row] : first["dims"][row + 1]].tolist()
        digests = self.columns["chunk.values"][first["chunk"][row] : first["chunk"][row + 1]].tobytes()
        coded = slice(first["coded"][row], first["coded"][row + 1])
        return StateEntry(
            self.tables.dtypes[of["state.dtype"][row]],
            tuple(dims),
            digests,
            place if storage in (PLAIN, CODED) else None,
            item.codec if storage in (CODED, DERIVED) else None,
            item.base if storage in (CODED, DERIVED) else None,
            self._chunks(coded) if storage == CODED else None,
            self.tables.errors[of["state.error"][row]],
        )

    def _delta(self, row: int) -> DeltaEntry:
        of, item = self._lists, self.tables.deltas[self._lists["delta.codec"][row]]
        ends = self._first["coded of deltas"]
        return DeltaEntry(
            item.codec,
            item.states,
            item.parent_states,
            Extent(of["delta.pack"][row], of["delta.offset"][row], of["delta.nbytes"][row]),
            self._chunks(slice(ends[row], ends[row + 1])),
        )

    def _chunks(self, rows: slice) -> CodedChunks:
        return CodedChunks(self.columns["coded.nbytes"][rows], self.columns["coded.stored"][rows])


def index_of(entries: Iterable[ParameterEntry]) -> Index:
    """The index of entries that are in the model's order."""
    builder = _Builder()
    for number, entry in enumerate(entries):
        builder.add(number, entry)
    return builder.index()


def join(indexes: Sequence[Index]) -> Index:
    """One index of the parameters of several, one after another. Numbers of parameters and tables change."""
    tables, renumbered = Tables.merged([index.tables for index in indexes])
    parts: dict[str, list[Array]] = {name: [] for name in TYPES}
    parameters = nbytes = 0
    for index, numbers in zip(indexes, renumbered, strict=True):
        shift = {"parameter.ends": nbytes, "state.parameter": parameters, "delta.parameter": parameters}
        for name, column in index.columns.items():
            changed = numbers[name][column] if name in numbers else column
            parts[name].append(changed.astype(TYPES[name]) + np.array(shift.get(name, 0), TYPES[name]))
        parameters += len(index)
        nbytes += len(index.columns["parameter.names"])
    states = [part[: _coded_of_states(index)] for index, part in zip(indexes, parts["coded.nbytes"], strict=True)]
    joined = {name: np.concatenate(some) if some else _empty(name) for name, some in parts.items()}
    for name in ("coded.nbytes", "coded.stored"):
        # The chunks of states come first, then those of deltas.
        of_states = [part[: len(cut)] for cut, part in zip(states, parts[name], strict=True)]
        of_deltas = [part[len(cut) :] for cut, part in zip(states, parts[name], strict=True)]
        joined[name] = np.concatenate([*of_states, *of_deltas]) if parts[name] else _empty(name)
    return Index(joined, tables)


def reordered(index: Index, order: Array) -> Index:
    """The same parameters in another order. `order`: the number that each has now, (parameters,) int64."""
    columns, parameters = index.columns, len(index)
    states = np.bincount(columns["state.parameter"], minlength=parameters)
    rows, places = item_numbers(states, order), np.empty(parameters, np.int64)
    places[order] = np.arange(parameters)
    deltas = np.argsort(places[columns["delta.parameter"]])
    lengths = np.diff(columns["parameter.ends"], prepend=np.zeros(1, np.uint64)).astype(np.int64)
    coded = np.where(columns["state.storage"] == CODED, index.chunk_counts, 0)
    chunks = [item_numbers(coded, rows), int(coded.sum()) + item_numbers(index.delta_counts, deltas)]
    items = {
        "parameter.names": item_numbers(lengths, order),
        "state.dims": item_numbers(columns["state.rank"].astype(np.int64), rows),
        "chunk.values": item_numbers(index.chunk_counts, rows),
        "coded.nbytes": np.concatenate(chunks),
        "coded.stored": np.concatenate(chunks),
    }
    of_table = {"parameter": order, "state": rows, "delta": deltas}
    result = {
        name: column[items[name] if name in items else of_table[name.partition(".")[0]]]
        for name, column in columns.items()
    }
    result["parameter.ends"] = np.cumsum(lengths[order]).astype(TYPES["parameter.ends"])
    for name in ("state.parameter", "delta.parameter"):
        result[name] = places[result[name]].astype(TYPES[name])
    return Index(result, index.tables)


def item_numbers(counts: Array, rows: Array) -> Array:
    """The numbers of all items of some rows, whose items follow one another: row i has `counts[i]` of them.

    counts: (all rows,) int64. rows: (rows,) int64. The result is (items,) int64.
    """
    begins, lengths = np.cumsum(counts) - counts, counts[rows]
    steps = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    result: Array = np.repeat(begins[rows], lengths) + steps
    return result


def _coded_of_states(index: Index) -> int:
    return int(index.chunk_counts[index.columns["state.storage"] == CODED].sum())


def _empty(name: str) -> Array:
    return np.zeros((0, DIGEST) if name == "chunk.values" else 0, TYPES[name])


def _ends(counts: Array) -> list[int]:
    """Where each of several runs begins, and where the last one ends."""
    return [0, *np.cumsum(counts).tolist()]


@dataclass
class _Builder:
    """Rows that grow."""

    rows: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in TYPES})
    states: dict[str, int] = field(default_factory=dict)
    dtypes: dict[str, int] = field(default_factory=dict)
    codecs: dict[CodecItem, int] = field(default_factory=lambda: {CodecItem.none(): 0})
    deltas: dict[DeltaItem, int] = field(default_factory=dict)
    values: dict[str, int] = field(default_factory=lambda: {Tables.text({}): 0})
    errors: dict[str, int] = field(default_factory=lambda: {Tables.text(None): 0})
    coded: list[CodedChunks] = field(default_factory=list)
    coded_of_deltas: list[CodedChunks] = field(default_factory=list)
    nbytes: int = 0

    def add(self, number: int, entry: ParameterEntry) -> None:
        rows, name = self.rows, entry.name.encode("utf-8", "surrogatepass")
        self.nbytes += len(name)
        rows["parameter.names"].append(name)
        rows["parameter.ends"].append(self.nbytes)
        rows["parameter.role"].append(ROLES.index(entry.role))
        values = Tables.text(encode(dict(entry.values))) if entry.values else "{}"
        rows["parameter.values"].append(_number(self.values, values))
        in_delta = () if entry.delta is None else entry.delta.states
        for state, stored in entry.states.items():
            self._state(number, state, stored, state in in_delta)
        if entry.delta is not None:
            delta = entry.delta
            item = DeltaItem.of(delta.codec, delta.states, delta.parent_states)
            rows["delta.parameter"].append(number)
            rows["delta.codec"].append(_number(self.deltas, item))
            self._extent("delta", delta.extent)
            self.coded_of_deltas.append(delta.chunks)

    def _state(self, number: int, name: str, state: StateEntry, in_delta: bool) -> None:
        rows = self.rows
        if in_delta:
            storage = IN_DELTA
        elif state.codec is None:
            storage = PLAIN
        else:
            storage = DERIVED if state.extent is None else CODED
        codec = 0 if state.codec is None else _number(self.codecs, CodecItem.of(state.codec, state.base))
        error = "null" if state.error is None else Tables.text(encode(dict(state.error)))
        rows["state.parameter"].append(number)
        rows["state.name"].append(_number(self.states, name))
        rows["state.dtype"].append(_number(self.dtypes, state.dtype))
        rows["state.storage"].append(storage)
        rows["state.codec"].append(codec)
        rows["state.error"].append(_number(self.errors, error))
        self._extent("state", state.extent or Extent(0, 0, 0))
        rows["state.rank"].append(len(state.shape))
        rows["state.dims"] += state.shape
        rows["chunk.values"].append(state.digests)
        if state.chunks is not None:
            self.coded.append(state.chunks)

    def _extent(self, table: str, extent: Extent) -> None:
        self.rows[f"{table}.pack"].append(extent.pack)
        self.rows[f"{table}.offset"].append(extent.offset)
        self.rows[f"{table}.nbytes"].append(extent.nbytes)

    def index(self) -> Index:
        coded = [*self.coded, *self.coded_of_deltas]
        columns = {
            name: np.array(rows, TYPES[name])
            for name, rows in self.rows.items()
            if name not in ("parameter.names", "chunk.values", "coded.nbytes", "coded.stored")
        }
        columns["parameter.names"] = np.frombuffer(b"".join(self.rows["parameter.names"]), "u1")
        columns["chunk.values"] = np.frombuffer(b"".join(self.rows["chunk.values"]), "u1").reshape(-1, DIGEST)
        for name, parts in (("coded.nbytes", [c.nbytes for c in coded]), ("coded.stored", [c.stored for c in coded])):
            columns[name] = np.concatenate(parts).astype(TYPES[name]) if parts else _empty(name)
        tables = Tables(
            tuple(self.states),
            tuple(self.dtypes),
            tuple(self.codecs),
            tuple(self.deltas),
            tuple(map(Tables.mapping, self.values)),
            tuple(map(Tables.figures, self.errors)),
        )
        return Index({name: columns[name] for name in TYPES}, tables)


def _number(table: dict[Any, int], item: Any) -> int:
    return table.setdefault(item, len(table))
