"""The ancestors of a delta up to its base: their folders, and the parameters that are needed of each."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from ckpt_formats.core.checkpoint import Parameter, SourceFile
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError
from ckpt_formats.universal import manifest
from ckpt_formats.universal.manifest import Manifest, Parent

T = TypeVar("T")

_HINT = "A delta cannot be read without its parent: put the folder back, or restore an earlier step."
_REMOVED = (
    "The chain there no longer has this state, because `ckpt compact` removed it: take the chain from a copy, "
    "or write the delta again with `ckpt diff CHAIN CKPT -o DELTA`. `ckpt compact --keep STEP` keeps a state."
)


@dataclass(frozen=True)
class Ancestor:
    """A folder, its manifest, and the names of the parameters that are needed of it."""

    folder: Path
    manifest: Manifest
    names: Collection[str]


@dataclass(frozen=True)
class LoadedFiles:
    """What was loaded while several checkpoints are opened: each manifest once, and each list of a chain once."""

    manifests: dict[Path, Manifest | CkptError] = field(default_factory=dict)
    chains: dict[Path, Mapping[str, Path]] = field(default_factory=dict)
    """The folders of the members of chains, by content id."""
    packs: dict[Path, tuple[SourceFile, ...] | CkptError] = field(default_factory=dict)
    parameters: dict[tuple[Path, int], Mapping[str, Parameter]] = field(default_factory=dict)
    """Those of a folder, by the folder and the `id` of the parameters of its parent, which are in here, too."""

    def manifest(self, path: Path) -> Manifest:
        """The manifest in a file. Raises as `manifest.load`, each time."""
        return once(self.manifests, path, lambda: manifest.load(path))

    def members(self, run: Path) -> Mapping[str, Path]:
        """The folders of a chain by content id; empty if there is not a chain."""
        from ckpt_formats.universal.chain import chain_file  # most checkpoints have no parent

        if run not in self.chains:
            self.chains[run] = chain_file.folders_by_content(run)
        return self.chains[run]


def once(known: dict[Path, T | CkptError], key: Path, make: Callable[[], T]) -> T:
    """What `make` returned, or raised, when it was called first for this key."""
    if key not in known:
        try:
            known[key] = make()
        except CkptError as error:
            known[key] = error
    result = known[key]
    if isinstance(result, CkptError):
        raise result
    return result


def lineage(folder: Path, loaded: LoadedFiles | None = None) -> tuple[Ancestor, ...]:
    """The checkpoint in a folder and all its ancestors, the base first.

    Raises `IncompleteError` if a parent is missing, `CorruptError` if another checkpoint is in its place.
    """
    loaded = loaded or LoadedFiles()
    stated = loaded.manifest(manifest.manifest_path(folder))
    ancestors = [Ancestor(folder, stated, stated.numbers.keys())]
    seen = {folder.resolve()}
    while needed := _needed(ancestors[-1]):
        child = ancestors[-1]
        assert child.manifest.parent is not None  # `manifest.load` checks it
        above, stated = _parent(child.folder, child.manifest.parent, loaded)
        if above.resolve() in seen:
            raise CorruptError("it is its own ancestor", where=above)
        seen.add(above.resolve())
        ancestors.append(Ancestor(above, stated, needed & stated.numbers.keys()))
    return tuple(ancestors[::-1])


def lineage_of_parent(child: tuple[Ancestor, ...]) -> tuple[Ancestor, ...] | None:
    """The lineage of the parent of a checkpoint, derived from that of the checkpoint.

    None if it may be another: if the parent's deltas need more of their ancestors than the checkpoint does.
    """
    if len(child) < 2:
        return None
    parent = child[-2]
    whole = Ancestor(parent.folder, parent.manifest, parent.manifest.numbers.keys())
    return (*child[:-2], whole) if _needed(whole) <= set(parent.names) else None


def _needed(ancestor: Ancestor) -> set[str]:
    """Names of the parameters that are needed of the parent."""
    return {name for name in ancestor.manifest.with_deltas() if name in ancestor.names}


def _parent(folder: Path, parent: Parent, loaded: LoadedFiles) -> tuple[Path, Manifest]:
    """The folder of the parent now, and its manifest.

    It is looked for in the chain around `folder`, then in the chain around the stated path, then at that path.
    """
    stated_path = folder / parent.path
    runs = (folder.parent, stated_path.parent)
    matches = (loaded.members(run).get(parent.content) for run in runs)
    above = next((match for match in matches if match is not None), stated_path)
    try:
        stated = loaded.manifest(above / manifest.NAME)
    except CkptError as error:
        if (above / manifest.NAME).is_file():
            raise
        is_removed = folder.parent != stated_path.parent and bool(loaded.members(stated_path.parent))
        raise IncompleteError(
            f"the parent of {folder.name}, {parent.content[:24]}…, is missing",
            where=above,
            hint=_REMOVED if is_removed else _HINT,
        ) from error
    if stated.content != parent.content:
        raise CorruptError(
            f"the wrong parent: {folder.name} is stored against {parent.content[:24]}…, and this is "
            f"{stated.content[:24]}…",
            where=above,
            hint=_HINT,
        )
    return above, stated
