"""What a universal checkpoint holds, as mappings over its index: nothing is made until somebody asks for it."""

from abc import abstractmethod
from collections.abc import Collection, Container, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_formats.containers.sealed_json import hash_number
from ckpt_formats.core.checkpoint import ErrorFigures, Parameter
from ckpt_formats.core.distinct import distinct
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.seals import Contradiction, Seal, SealPart, SealTable
from ckpt_formats.core.state_table import PLAIN as UNCODED
from ckpt_formats.core.state_table import Coding, Places, StateTable, TabulatedParameters
from ckpt_formats.universal import original
from ckpt_formats.universal.index import CODED, DERIVED, IN_DELTA, PLAIN, Index
from ckpt_formats.universal.manifest import Manifest, PackFiles
from ckpt_formats.universal.pack_headers import contradictions
from ckpt_formats.universal.pack_seals import pack_parts, seal_of, stored_count

_STORED_NBYTES = ("state.nbytes", "delta.nbytes")

StateKey = tuple[str, str]
"""The name of a parameter, and of one of its states."""


class ReplayedParameters(Mapping[str, Parameter]):
    """Parameters whose deltas are against those of a parent. Each is created once, when it is looked up."""

    if TYPE_CHECKING:  # fields of subclasses

        @property
        def names(self) -> Collection[str]: ...
        @property
        def created(self) -> dict[str, Parameter]: ...

    @property
    @abstractmethod
    def before(self) -> Mapping[str, Parameter]:
        """The parameters of the parent."""

    @abstractmethod
    def create(self, name: str) -> Parameter:
        """The parameter of this name, whose parent exists."""

    def __getitem__(self, name: str) -> Parameter:
        known = self.created.get(name)
        if known is not None:
            return known
        if name not in self.names:
            raise KeyError(name)
        pending: list[ReplayedParameters] = [self]
        # The base comes first. This is no recursion: a chain may have more members than Python's stack has frames.
        while isinstance(before := pending[-1].before, ReplayedParameters):
            if name not in before.names or name in before.created:
                break
            pending.append(before)
        for one in reversed(pending):
            one.created.setdefault(name, one.create(name))
        return self.created[name]


@dataclass(frozen=True, eq=False)
class StoredParameters(ReplayedParameters, TabulatedParameters):
    """The parameters of a checkpoint by name, in the model's order. Each is created once, when it is looked up."""

    files: PackFiles
    index: Index
    names: Collection[str]
    """Those that there are: of an ancestor only what is needed."""
    parent: Mapping[str, Parameter]
    """The parameters of the parent checkpoint."""
    created: dict[str, Parameter] = field(default_factory=dict, repr=False)

    @property
    def before(self) -> Mapping[str, Parameter]:
        return self.parent

    def create(self, name: str) -> Parameter:
        from ckpt_formats.universal.read_states import read_parameter  # sums and tables of states need none

        entry = self.index[self.index.numbers[name]]
        needs_parent = entry.delta is not None and entry.delta.parent_states
        parent = self.parent.get(name) if needs_parent else None
        return read_parameter(self.files, entry, parent)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what was created, and without names that follow from the index."""
        names = None if len(self.names) == len(self.index) else frozenset(self.names)
        return _stored_parameters, (self.files, self.index, names, self.parent)

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.index.names if name in self.names)

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def table(self) -> StateTable:
        assert len(self.names) == len(self.index)  # of an ancestor, nobody asks for it
        return _table(self.index)

    def places(self) -> Places:
        columns = self.index.columns
        packs = columns["state.pack"].astype(np.int64)
        return Places(
            [self.files.path(number) for number in range(int(packs.max(initial=-1)) + 1)],
            np.where(columns["state.storage"] == PLAIN, packs, -1),
            columns["state.offset"].astype(np.int64),
            self.index.chunk_counts,
            columns["chunk.values"],
        )

    def check(self) -> None:
        names = self.index.names
        for number in _kinds(self.index):
            if names[number] in self.names:
                self[names[number]]


def _stored_parameters(
    files: PackFiles, index: Index, names: Collection[str] | None, parent: Mapping[str, Parameter]
) -> StoredParameters:
    """What was pickled; `names` None: all of the index."""
    return StoredParameters(files, index, index.numbers.keys() if names is None else names, parent)


@dataclass(frozen=True, eq=False)
class StateDigests(Mapping[StateKey, int]):
    """The checksums of the values of states that are encoded, alone or in a delta."""

    index: Index

    def __getitem__(self, key: StateKey) -> int:
        name, state = key
        number = self.index.numbers[name]
        entry = self.index[number].states[state]
        if entry.extent is None and entry.codec is not None:
            raise KeyError(key)
        if entry.extent is not None and entry.chunks is None:
            raise KeyError(key)
        digest: int = entry.digest
        return digest

    def __iter__(self) -> Iterator[StateKey]:
        columns, names = self.index.columns, self.index.names
        storage = columns["state.storage"]
        rows = np.flatnonzero((storage == CODED) | (storage == IN_DELTA))
        owners, states = columns["state.parameter"][rows].tolist(), columns["state.name"][rows].tolist()
        return ((names[a], self.index.tables.states[b]) for a, b in zip(owners, states, strict=True))

    def __len__(self) -> int:
        storage = self.index.columns["state.storage"]
        return int(((storage == CODED) | (storage == IN_DELTA)).sum())


@dataclass(frozen=True, eq=False)
class StoredSeals(SealTable):
    """The checksums of all bytes of several checkpoints: of the headers of packs, and of what is stored."""

    checkpoints: tuple[tuple[Path, Manifest], ...]
    """Folders and their manifests: ancestors, then the checkpoint itself."""

    def __len__(self) -> int:
        return len(self._form()) + sum(
            len(stated.packs) + stored_count(stated.entries) for _, stated in self.checkpoints
        )

    def without(self, folders: Container[Path]) -> tuple[Seal, ...]:
        """The checksums without those of some ancestors. That of the form of the original file always stays."""
        remaining = tuple((folder, stated) for folder, stated in self.checkpoints if folder not in folders)
        return (*self._form(), *(seal for folder, stated in remaining for seal in _seals_of(folder, stated)))

    def _form(self) -> tuple[Seal, ...]:
        """That of the form of the original file. Those of ancestors are not read."""
        form = original.seal(self.checkpoints[-1][1].original)
        return () if form is None else (form,)

    def __iter__(self) -> Iterator[Seal]:
        yield from self._form()
        for folder, stated in self.checkpoints:
            yield from _seals_of(folder, stated)

    def __getitem__(self, number: Any) -> Any:
        return tuple(self)[number]

    @property
    def nbytes(self) -> int:
        columns = [stated.entries.columns[name] for _, stated in self.checkpoints for name in _STORED_NBYTES]
        return sum(seal.nbytes for seal in self.alone()) + sum(int(column.sum()) for column in columns)

    def alone(self) -> Iterator[Seal]:
        yield from self._form()
        for folder, stated in self.checkpoints:
            yield from _headers(folder, stated)

    def digest(self) -> bytes:
        """Of the content ids, too: the checksums of values are columns, of which no seal is made here."""
        return "".join(stated.content for _, stated in self.checkpoints).encode() + super().digest()

    def contradictions(self) -> Iterator[Contradiction]:
        for folder, stated in self.checkpoints:
            yield from contradictions(folder, stated)

    def parts(self) -> list[SealPart]:
        first, parts = 0, list[SealPart]()
        for folder, stated in self.checkpoints:
            parts += pack_parts(stated.files(folder), stated.entries, first)
            first += stored_count(stated.entries)
        return parts

    def of(self, number: int) -> tuple[Seal, str]:
        for folder, stated in self.checkpoints:
            if number < stored_count(stated.entries):
                return seal_of(stated.files(folder), stated.entries, number)
            number -= stored_count(stated.entries)
        raise IndexError(number)


def _headers(folder: Path, stated: Manifest) -> Iterator[Seal]:
    """The checksums of the headers of packs."""
    files = stated.files(folder)
    for number, pack in enumerate(stated.packs):
        own = number if pack.owner is None else pack.owner.number
        digest = hash_number(pack.header)
        yield Seal(files.path(number), 0, pack.header_nbytes, "xxh3-128", digest, f"header of pack {own}")


def _seals_of(folder: Path, stated: Manifest) -> Iterator[Seal]:
    """The checksums of all packs of a checkpoint."""
    from ckpt_formats.universal.read_states import seals  # only what reads values needs them

    yield from _headers(folder, stated)
    files = stated.files(folder)
    for entry in stated.entries:
        yield from seals(files, entry)


def state_errors(index: Index) -> dict[StateKey, ErrorFigures]:
    """The figures of approximate states."""
    columns, names = index.columns, index.names
    rows = np.flatnonzero(columns["state.error"])
    result: dict[StateKey, ErrorFigures] = {}
    for row in rows.tolist():
        figures = index.tables.errors[int(columns["state.error"][row])]
        state = index.tables.states[int(columns["state.name"][row])]
        if figures is not None:
            result[names[int(columns["state.parameter"][row])], state] = figures
    return result


def _table(index: Index) -> StateTable:
    columns, tables = index.columns, index.tables
    return StateTable(
        index.names,
        columns["parameter.role"],
        columns["parameter.values"],
        tables.values,
        np.searchsorted(columns["state.parameter"], np.arange(len(index) + 1)),
        columns["state.name"],
        tables.states,
        columns["state.dtype"],
        tuple(DTYPES[name] for name in tables.dtypes),
        columns["state.rank"],
        columns["state.dims"],
        np.ones(len(columns["state.name"]), np.int64),
        columns["state.storage"] == DERIVED,
        lambda: bool(np.isin(columns["state.storage"], (CODED, IN_DELTA)).any()),
        lambda: _coding(index),
    )


def _coding(index: Index) -> Coding:
    """The bytes and codecs of all states. Of a delta of several, a state has the share of its bytes in their values."""
    columns, tables = index.columns, index.tables
    storage, nbytes = columns["state.storage"], columns["state.nbytes"].astype(np.int64)
    codec = np.where(storage == PLAIN, 0, columns["state.codec"].astype(np.int64))
    names = [UNCODED, *(str(item.codec["name"]) for item in tables.codecs[1:])]
    names += [f"{item.codec['name']} (delta)" for item in tables.deltas]
    rows = np.flatnonzero(storage == IN_DELTA)
    if len(rows):
        itemsizes = np.array([DTYPES[name].itemsize for name in tables.dtypes], np.int64)[columns["state.dtype"][rows]]
        owners = columns["state.parameter"][rows]
        delta = np.searchsorted(columns["delta.parameter"], owners)
        full = np.bincount(owners, itemsizes, len(index))[owners]
        nbytes[rows] = np.rint(columns["delta.nbytes"].astype(np.int64)[delta] * itemsizes / full).astype(np.int64)
        codec[rows] = len(tables.codecs) + columns["delta.codec"].astype(np.int64)[delta]
    return Coding(nbytes, codec, tuple((name,) for name in names))


def _kinds(index: Index) -> list[int]:
    """The numbers of the first parameters of each kind, and of all whose delta needs a parent, in their order.

    Whether a parameter can be made depends on the names, types and codecs of its states, its delta and its parent.
    """
    columns = index.columns
    deltas = dict(zip(columns["delta.parameter"].tolist(), columns["delta.codec"].tolist(), strict=True))
    special = columns["state.storage"] != PLAIN
    numbers: list[int] = distinct(columns["state.parameter"][special]).tolist()
    if not numbers:
        return []
    kinds = [columns[name].astype("<u4") for name in ("state.name", "state.dtype", "state.storage", "state.codec")]
    raw, width = np.stack(kinds, axis=1).tobytes(), 4 * len(kinds)
    first = np.searchsorted(columns["state.parameter"], np.arange(len(index) + 1)).tolist()
    chosen: dict[object, int] = {}
    for number in numbers:
        delta = deltas.get(number)
        alone = delta is None or not index.tables.deltas[delta].parent_states
        kind = delta, raw[width * first[number] : width * first[number + 1]]
        chosen.setdefault(kind if alone else number, number)
    return list(chosen.values())
