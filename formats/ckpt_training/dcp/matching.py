"""Which values of a checkpoint the keys of a state dict get, as all ranks agree on it. No tensor data is read."""

from collections.abc import Callable, Iterable, Iterator, KeysView, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias, get_args

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

import ckpt
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint
from ckpt_formats.core.errors import CkptError, IncompleteError, InvalidArgumentError, UnsupportedError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.engines.dcp.nesting import flattened
from ckpt_formats.state_dicts.keys import NESTED
from ckpt_formats.state_dicts.record import KEY
from ckpt_formats.state_dicts.write import state_tree
from ckpt_training import ranks
from ckpt_training.dcp.entries import GroupOption, ModelWeight, OptimizerState, StoredEntries
from ckpt_training.loading import Names
from ckpt_training.mismatches import listed

Renaming: TypeAlias = Names | Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, eq=False)
class AllKeys(Mapping[str, TensorStorageMetadata | BytesStorageMetadata]):
    """The metadata of any key: torch looks up those of the state dict, and never shows which these are."""

    source: Callable[[], "NamedSource"]

    def __getitem__(self, key: str) -> TensorStorageMetadata | BytesStorageMetadata:
        return self.source().metadata_of(key)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str)

    def keys(self) -> KeysView[str]:
        # The planner takes a checkpoint for one of before torch 2.4 if it has a key that the state dict of this rank
        # lacks, which FSDP1 has for parameters of which a rank has no elements.
        return dict[str, Any]().keys()

    def __iter__(self) -> Iterator[str]:
        return iter(self.source().paths)

    def __len__(self) -> int:
        return len(self.source().paths)


@dataclass(frozen=True, eq=False)
class KeyPaths(Mapping[str, tuple[str | int, ...]]):
    """The paths in a state dict of the keys over which `AllKeys` iterates."""

    source: Callable[[], "NamedSource"]

    def __getitem__(self, key: str) -> tuple[str | int, ...]:
        return self.source().paths[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.source().paths)

    def __len__(self) -> int:
        return len(self.source().paths)


@dataclass(frozen=True)
class KeyAgreement:
    """What the coordinator tells every rank: plain data, the same for all."""

    ranks: int
    """How many load together."""
    naming: str | None
    """How the checkpoint's tensors are renamed; None: as they are stored, or as the caller has said."""
    missing: tuple[str, ...]
    """The keys that the checkpoint lacks, of all ranks."""
    unexpected: tuple[str, ...]
    """The tensors of the checkpoint that no rank has a key for, a state in parentheses."""

    def check(self, missing: Sequence[str], strict: bool, source: Checkpoint) -> None:
        """Raise an error for keys that are missing, and unless strict is False for tensors that are unexpected."""
        unexpected = self.unexpected if strict and not source.is_partial else ()
        if not missing and not unexpected:
            return
        lists = ("missing", missing), ("unexpected", unexpected)
        what = "; ".join(f"{kind}: {listed(names)}" for kind, names in lists if names)
        error = IncompleteError if missing else InvalidArgumentError
        raise error(
            f"the checkpoint does not fit the state dict: {what}", where=source.path, hint=_hint(missing, unexpected)
        )

    def together(self) -> AbstractContextManager[None]:
        """Within, an error of one rank is raised on all that load."""
        return ranks.together() if self.ranks > 1 else nullcontext()


@dataclass(frozen=True, eq=False)
class NamedSource:
    """A checkpoint under the names that a state dict may have."""

    checkpoint: Checkpoint
    renaming: Renaming | None
    _named: dict[str | None, StoredEntries | None] = field(default_factory=dict)

    def entries(self, naming: str | None = None) -> StoredEntries | None:
        """The entries under a naming; None: the caller's, or as stored. The result is None if it has no such names."""
        if naming not in self._named:
            self._named[naming] = self._renamed(naming)
        return self._named[naming]

    @property
    def own(self) -> StoredEntries:
        """The entries under the caller's names, or as stored."""
        entries = self.entries()
        assert entries is not None
        return entries

    @property
    def namings(self) -> tuple[str | None, ...]:
        """The namings to try in this order."""
        return (None,) if self.renaming is not None else (None, *get_args(Names))

    @cached_property
    def paths(self) -> dict[str, tuple[str | int, ...]]:
        """One form of the keys, with their paths in a state dict: what the metadata have as a mapping."""
        tree = {key: value for key, value in state_tree(self.own.source, NESTED).items() if key != KEY}
        return {name: path for name, path, _ in flattened(tree) if self.own.find(name) is not None}

    def metadata_of(self, key: str) -> TensorStorageMetadata | BytesStorageMetadata:
        """What torch is told about a key."""
        for naming in self.namings:
            entries = self.entries(naming)
            entry = None if entries is None else entries.find(key)
            if entries is not None and entry is not None:
                value = None if isinstance(entry, GroupOption) else entries.value(entry)
                return _tensor_metadata(value, key) if isinstance(value, Tensor) else BytesStorageMetadata()
        return BytesStorageMetadata()

    def agreement(self, keys: Iterable[str], count: int) -> KeyAgreement:
        """The naming with the fewest missing keys, and what is missing and unexpected then. `count`: of ranks.

        Raises `InvalidArgumentError` for weights whose keys have different prefixes.
        """
        keys = list(keys)
        best: tuple[str | None, tuple[str, ...]] | None = None
        for naming in self.namings:
            entries = self.entries(naming)
            if entries is None:
                continue
            missing = tuple(key for key in keys if entries.find(key) is None)
            if best is None or len(missing) < len(best[1]):
                best = naming, missing
            if not missing:
                break
        assert best is not None
        naming, missing = best
        chosen = self.entries(naming)
        assert chosen is not None
        return KeyAgreement(count, naming, missing, tuple(_unexpected(keys, chosen, bool(missing))))

    def _renamed(self, naming: str | None) -> StoredEntries | None:
        renaming = self.renaming if naming is None else naming
        if renaming is None:
            return StoredEntries(self.checkpoint)
        if not isinstance(renaming, str):
            return StoredEntries(self.checkpoint.rename(renaming))
        try:
            return StoredEntries(ckpt.use_names(self.checkpoint, renaming))  # type: ignore[arg-type]
        except CkptError:
            if naming is None:
                raise
            return None


def _tensor_metadata(tensor: Tensor, key: str) -> TensorStorageMetadata:
    """A tensor in one chunk, for torch. Raises `UnsupportedError` if torch lacks its dtype."""
    dtype = getattr(torch, tensor.dtype.name, None)
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"torch has no dtype for `{printable(key)}`: {tensor.dtype.name}")
    size = torch.Size(tensor.shape)
    chunk = ChunkStorageMetadata(torch.Size((0,) * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])


def _unexpected(keys: Iterable[str], entries: StoredEntries, some_missing: bool) -> Iterator[str]:
    """The weights that no key has, if one has a weight; and so for states. Raises for prefixes that differ.

    With `some_missing`, a key that has no meaning may be that of a weight.
    """
    prefixes: dict[str, str] = {}
    weights, states = set[str](), set[tuple[str, str]]()
    for key in keys:
        entry = entries.find(key)
        if isinstance(entry, ModelWeight):
            prefixes.setdefault(entry.prefix, key)
            weights.add(entry.name)
        if isinstance(entry, OptimizerState):
            states.add((entry.name, entry.state))
    if len(prefixes) > 1:
        shown = listed([*prefixes.values()])
        raise InvalidArgumentError(
            f"the state dict has weights under {len(prefixes)} prefixes, such as {shown}",
            where=entries.source.path,
            hint="Load one model at a time.",
        )
    for name, parameter in entries.source.parameters.items():
        if (weights or (some_missing and not states)) and parameter.role != "extra" and name not in weights:
            yield name
        own = (*(one for one in parameter.states if one not in (MASTER, MODEL)), *parameter.values)
        if states and parameter.role != "extra":
            yield from (f"{name} ({one})" for one in own if (name, one) not in states)


def _hint(missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What would make the keys fit: another prefix of names, if that is all."""
    names = set(unexpected)
    parts = missing[0].split(".") if missing else []
    for start in range(len(parts)):
        own, rest = "".join(f"{part}." for part in parts[:start]), ".".join(parts[start:])
        for prefix in sorted(name.removesuffix(rest) for name in names if name.endswith(f".{rest}")):
            if all(key.startswith(own) and prefix + key.removeprefix(own) in names for key in missing):
                return f"Pass names=lambda name: name.removeprefix({prefix!r})."
    if missing:
        return "Pass names= to rename tensors, or leave these keys out of the state dict."
    return "Pass names= to rename tensors, or strict=False to load without these."
