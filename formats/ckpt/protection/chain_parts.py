"""The folders of a chain that never change: states, packs of removed states that others need, and ended segments."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt.protection.work_files import is_protected
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.folders import below
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import printable
from ckpt_formats.parity.blocks import has_parity
from ckpt_formats.parity.manifest import Domain, ProtectedFile
from ckpt_formats.stores.location import place_at
from ckpt_formats.universal.chain import folder
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps, SharedPacks
from ckpt_formats.universal.gradients import layout as layouts


@dataclass(frozen=True)
class ChainPart:
    """A folder of a chain whose files never change."""

    name: str
    packs: tuple[SharedPacks, ...] = ()
    """Of a state that was removed: its packs in which states of others lie. Its other files do not count."""
    logged: LoggedSteps | None = None
    """Of a segment of the log: what the list says of it."""

    def has_own_parity(self, run: Path) -> bool:
        """Whether its folder has parity. What a removed state had is a leftover, which the next compact removes."""
        return not self.packs and has_parity(run / self.name)

    def domain(self, run: Path) -> Domain:
        """Its files that are protected, as they are now."""
        files = [
            ProtectedFile(name, path.stat().st_size)
            for name, path in below(run / self.name, f"{self.name}/")
            if is_protected(name) and self._has(name)
        ]
        return Domain(self.name, tuple(files))

    def is_domain(self, domain: Domain) -> bool:
        """Whether a domain of this name has the files that a removed state is left with; True for other parts."""
        names = [file.name for file in domain.files]
        return not self.packs or (all(map(self._has, names)) and len(names) == self._pack_count)

    @property
    def _pack_count(self) -> int:
        """How many packs others need."""
        count, end = 0, 0
        for first, run in sorted(run for shared in self.packs for run in shared.packs):
            count += max(first + run - max(first, end), 0)
            end = max(end, first + run)
        return count

    def _has(self, name: str) -> bool:
        if not self.packs:
            return True
        above, _, pack = name.rpartition("/")
        return above == f"{self.name}/{folder.PACKS}" and folder.is_shared(pack, self.packs)


def parts_of_chain(run: Path, chain: ChainIndex) -> tuple[list[ChainPart], list[ChainPart], list[ChainPart]]:
    """Return the states of a chain, what is left of removed ones, and the segments of its log that have ended."""
    states = [ChainPart(member.folder) for member in chain.members]
    names = {one.name for one in states}
    removed = [
        ChainPart(name, tuple(shared))
        for name, shared in sorted(chain.shared_packs().items())
        if name not in names and (run / name).is_dir()
    ]
    segments = [ChainPart(one.folder, logged=one) for one in chain.segments if has_ended(run, one)]
    return states, removed, segments


def has_ended(run: Path, logged: LoggedSteps) -> bool:
    """Whether no run writes a segment any more: the list says so, or each rank has closed its log.

    A copy in a store that follows a run has its files in parts, which are objects that come and go.
    """
    if is_remote(run) and any(".part-" in key for key in place_at(run / logged.folder).list()):
        return False
    if logged.step is not None:
        return True
    from ckpt_formats.universal.chain.states import open_steps  # most chains have no log

    try:
        if folder.is_growing(run / logged.folder):
            return False
        segment = open_steps(run, logged)
        return segment.has_ended or segment.damage is not None
    except CkptError:
        return False  # no rank has closed it, as far as it can be read


def problem_of_segment(run: Path, logged: LoggedSteps) -> CkptError | None:
    """Compare a segment that has ended with its own checksums. Returns what is wrong with it; None if it is whole."""
    from ckpt_formats.universal.chain.states import open_steps  # most chains have no log

    try:
        segment = open_steps(run, logged, check_from=0)
    except CkptError as error:
        return error
    damage = segment.damage
    if damage is None and logged.step is None and not segment.has_ended:
        damage = segment.lacks(segment.last + 1, segment.last + 1)
    if damage is not None:
        damage.hint = f"To go on without them: `ckpt compact {printable(str(run))} --upto {segment.last}`."
    return damage


def is_of_run(run: Path, logged: LoggedSteps) -> bool:
    """Whether the layout of a segment is whole and the one that the list names."""
    try:
        return layouts.load(run / logged.folder / layouts.NAME).run == logged.run
    except CkptError:
        return False


def unfinished(run: Path, chain: ChainIndex) -> Iterator[str]:
    """The folders of segments that may still grow."""
    return (one.folder for one in chain.segments if not has_ended(run, one))
