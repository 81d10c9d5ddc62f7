"""From a delta to the base that it stands on: which folders, and what of each is needed."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import CkptError, Corrupt, Incomplete
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.entry import ParameterEntry
from ckpt_formats.universal.manifest import Manifest, Parent

_HINT = "A delta cannot be read without its parent: put the folder back, or restore an earlier step."
_REMOVED = (
    "The chain there has no such state any more, since `ckpt compact` removed it: take the chain from a copy, "
    "or write the delta again with `ckpt diff CHAIN CHECKPOINT -o DELTA`. `ckpt compact --keep STEP` keeps a state."
)


@dataclass(frozen=True)
class Ancestor:
    """A folder, and those of its entries that what is read stands on."""

    folder: Path
    said: Manifest
    entries: tuple[ParameterEntry, ...]


def lineage(folder: Path) -> tuple[Ancestor, ...]:
    """The checkpoint in a folder and all that it stands on, the base first.

    Raises `Incomplete` if a parent is missing, `Corrupt` if another checkpoint is in its place.
    """
    said = manifest.load(folder / manifest.NAME)
    found = [Ancestor(folder, said, said.entries)]
    seen, places = {folder.resolve()}, _FolderIndex({})
    while needed := _needed(found[-1].entries):
        child = found[-1]
        assert child.said.parent is not None  # the manifest saw to it
        above, said = _parent(child.folder, child.said.parent, places)
        if above.resolve() in seen:
            raise Corrupt("it is its own ancestor", where=above)
        seen.add(above.resolve())
        found.append(Ancestor(above, said, tuple(entry for entry in said.entries if entry.name in needed)))
    return tuple(found[::-1])


def _needed(entries: Iterable[ParameterEntry]) -> set[str]:
    """Names of the parameters that are needed of the parent."""
    return {entry.name for entry in entries if entry.delta is not None and entry.delta.before}


@dataclass(frozen=True)
class _FolderIndex:
    """Where chains have what, each chain asked once."""

    known: dict[Path, Mapping[str, Path]]

    def find(self, run: Path, content: str) -> Path | None:
        return self._of(run).get(content)

    def any(self, run: Path) -> bool:
        """Is this a chain?"""
        return bool(self._of(run))

    def _of(self, run: Path) -> Mapping[str, Path]:
        if run not in self.known:
            self.known[run] = index.folders_by_content(run)
        return self.known[run]


def _parent(folder: Path, parent: Parent, places: _FolderIndex) -> tuple[Path, Manifest]:
    """Where the parent is now, and its manifest. In a chain, its own or the parent's, the chain says where it is."""
    named = folder / parent.path
    runs = (folder.parent, named.parent)
    above = next((found for run in runs if (found := places.find(run, parent.content)) is not None), named)
    try:
        said = manifest.load(above / manifest.NAME)
    except CkptError as error:
        if (above / manifest.NAME).is_file():
            raise
        raise Incomplete(
            f"the parent of {folder.name}, {parent.content[:24]}…, is missing",
            where=above,
            hint=_REMOVED if folder.parent != named.parent and places.any(named.parent) else _HINT,
        ) from error
    if said.content != parent.content:
        raise Corrupt(
            f"the wrong parent: {folder.name} stands on {parent.content[:24]}…, and this is {said.content[:24]}…",
            where=above,
            hint=_HINT,
        )
    return above, said
