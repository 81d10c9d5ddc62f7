"""The ancestors of a delta up to its base: their folders, and the parameters that are needed of each."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import CkptError, Corrupt, Incomplete
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.manifest import Manifest, Parent

_HINT = "A delta cannot be read without its parent: put the folder back, or restore an earlier step."
_REMOVED = (
    "The chain there does not have this state any more, because `ckpt compact` removed it: take the chain from a copy, "
    "or write the delta again with `ckpt diff CHAIN CHECKPOINT -o DELTA`. `ckpt compact --keep STEP` keeps a state."
)


@dataclass(frozen=True)
class Ancestor:
    """A folder, its manifest, and the names of the parameters that are needed of it."""

    folder: Path
    manifest: Manifest
    names: Collection[str]


def lineage(folder: Path) -> tuple[Ancestor, ...]:
    """The checkpoint in a folder and all its ancestors, the base first.

    Raises `Incomplete` if a parent is missing, `Corrupt` if another checkpoint is in its place.
    """
    stated = manifest.load(manifest.manifest_path(folder))
    ancestors = [Ancestor(folder, stated, stated.entries.numbers.keys())]
    seen, folders = {folder.resolve()}, _FolderIndex({})
    while needed := _needed(ancestors[-1]):
        child = ancestors[-1]
        assert child.manifest.parent is not None  # `manifest.load` checks it
        above, stated = _parent(child.folder, child.manifest.parent, folders)
        if above.resolve() in seen:
            raise Corrupt("it is its own ancestor", where=above)
        seen.add(above.resolve())
        ancestors.append(Ancestor(above, stated, needed & stated.entries.numbers.keys()))
    return tuple(ancestors[::-1])


def _needed(ancestor: Ancestor) -> set[str]:
    """Names of the parameters that are needed of the parent."""
    return {name for name in ancestor.manifest.entries.with_deltas() if name in ancestor.names}


@dataclass(frozen=True)
class _FolderIndex:
    """The folders of chains by content id. Each `chain.json` is read once."""

    known: dict[Path, Mapping[str, Path]]

    def find(self, run: Path, content: str) -> Path | None:
        """The folder of a chain that has this content."""
        return self._of(run).get(content)

    def is_chain(self, run: Path) -> bool:
        return bool(self._of(run))

    def _of(self, run: Path) -> Mapping[str, Path]:
        if run not in self.known:
            self.known[run] = index.folders_by_content(run)
        return self.known[run]


def _parent(folder: Path, parent: Parent, folders: _FolderIndex) -> tuple[Path, Manifest]:
    """The folder of the parent now, and its manifest.

    It is looked for in the chain around `folder`, then in the chain around the stated path, then at that path.
    """
    stated_path = folder / parent.path
    runs = (folder.parent, stated_path.parent)
    matches = (folders.find(run, parent.content) for run in runs)
    above = next((match for match in matches if match is not None), stated_path)
    try:
        stated = manifest.load(above / manifest.NAME)
    except CkptError as error:
        if (above / manifest.NAME).is_file():
            raise
        is_removed = folder.parent != stated_path.parent and folders.is_chain(stated_path.parent)
        raise Incomplete(
            f"the parent of {folder.name}, {parent.content[:24]}…, is missing",
            where=above,
            hint=_REMOVED if is_removed else _HINT,
        ) from error
    if stated.content != parent.content:
        raise Corrupt(
            f"the wrong parent: {folder.name} is stored against {parent.content[:24]}…, and this is "
            f"{stated.content[:24]}…",
            where=above,
            hint=_HINT,
        )
    return above, stated
