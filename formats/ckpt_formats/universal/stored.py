"""What a universal checkpoint holds, as mappings over its index: nothing is made until somebody asks for it."""

from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_formats.containers.sealed_json import hash_number
from ckpt_formats.core.checkpoint import ErrorFigures, Parameter
from ckpt_formats.core.files import Seal
from ckpt_formats.universal import original
from ckpt_formats.universal.index import CODED, DERIVED, IN_DELTA, Index
from ckpt_formats.universal.manifest import Manifest, pack_path
from ckpt_formats.universal.read_states import read_parameter, seals

StateKey = tuple[str, str]
"""The name of a parameter, and of one of its states."""


@dataclass(frozen=True, eq=False)
class StoredParameters(Mapping[str, Parameter]):
    """The parameters in a folder by name, in the model's order. Each is created once, when it is asked for."""

    folder: Path
    index: Index
    names: Collection[str]
    """Those that there are: of an ancestor only what is needed."""
    parent: Mapping[str, Parameter]
    """The parameters of the parent checkpoint."""
    _created: dict[str, Parameter] = field(default_factory=dict, repr=False)

    def __getitem__(self, name: str) -> Parameter:
        known = self._created.get(name)
        if known is not None:
            return known
        if name not in self.names:
            raise KeyError(name)
        entry = self.index[self.index.numbers[name]]
        needs_parent = entry.delta is not None and entry.delta.parent_states
        parent = self.parent.get(name) if needs_parent else None
        return self._created.setdefault(name, read_parameter(self.folder, entry, parent))

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.index.names if name in self.names)

    def __len__(self) -> int:
        return len(self.names)


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
class StoredSeals(Sequence[Seal]):
    """The checksums of all bytes of several checkpoints: of the headers of packs, and of what is stored."""

    checkpoints: tuple[tuple[Path, Manifest], ...]
    """Folders and their manifests: ancestors, then the checkpoint itself."""

    def __len__(self) -> int:
        return len(self._form()) + sum(
            len(stated.packs)
            + int((stated.entries.columns["state.storage"] < DERIVED).sum())
            + len(stated.entries.columns["delta.pack"])
            for _, stated in self.checkpoints
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


def _seals_of(folder: Path, stated: Manifest) -> Iterator[Seal]:
    """The checksums of all packs in a folder."""
    for number, pack in enumerate(stated.packs):
        path, digest = pack_path(folder, number), hash_number(pack.header)
        yield Seal(path, 0, pack.header_nbytes, "xxh3-128", digest, f"header of pack {number}")
    for entry in stated.entries:
        yield from seals(folder, entry)


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
