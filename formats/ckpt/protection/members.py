"""Parity for the states of a chain and the segments of its log: a large one has its own, small ones share it in groups.

A state never changes, but most have one large file, so that parity of its files alone would be larger than it is. In a
group, a state is a domain: parity is as large as the largest state of the group, for up to 16 of them. A state that is
appended is added to the parities of its group, which are sums; what is in the group already is not read again.
Segments that have ended are like states, and so are packs of removed states in which states of others lie.
"""

import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ckpt.job import AnyProgress
from ckpt.pipeline import Resources
from ckpt.protection.chain_parts import is_of_run, parts_of_chain, problem_of_segment, unfinished
from ckpt.protection.parity_folders import remove_parity
from ckpt.protection.protect import run_protect
from ckpt.protection.protect_plan import EarlierGroups, Protection, ProtectPlan, check_no_link, plan_protect
from ckpt.protection.work_files import locked
from ckpt_formats.core.errors import CkptError, CorruptError, OutputError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.identity import Identity
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import PARTIAL, printable
from ckpt_formats.parity.blocks import (
    ProtectedFolder,
    find_parity,
    has_parity,
    parity_folder,
    places_of,
    read_block,
)
from ckpt_formats.parity.copies import manifest_copies
from ckpt_formats.parity.manifest import (
    BLOCK_NBYTES,
    BlockHashes,
    Domain,
    DomainGroup,
    ParityManifest,
)
from ckpt_formats.stores.location import listed_again
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import LoggedSteps
from ckpt_formats.universal.gradients import layout as layouts

GROUP = 16
"""States of a group, at most: with M parities, a full group of equal states takes M / 16 more space."""
_OWN_SHARE = 4
"""A state has parity of its own if that takes at most this part of it."""
_GROWTH = 4
"""A state joins a group if it is at most so many times as large as the largest one there."""
_EMPTY = Domain("", ())


@dataclass(frozen=True)
class MembersPlan:
    """The parity that will be written for states of a chain."""

    base: Path
    """The folder of the groups."""
    lose: int
    states: tuple[ProtectPlan, ...]
    """States and segments that get parity of their own."""
    groups: ProtectPlan | None
    """The groups of the others; None if they stay as they are."""
    is_empty: bool
    """Whether the parity that is there has no state any more."""
    segments: tuple[LoggedSteps, ...] = ()
    """The segments that get parity, and are compared with their own checksums before."""
    unfinished: tuple[str, ...] = ()
    """The folders of segments that may still grow, and have no parity yet."""

    @property
    def summary(self) -> Protection:
        """What is written in all; of groups that change, all of them count."""
        all_of = [one.summary for one in (*self.states, self.groups) if one is not None]
        sums = {
            name: sum(getattr(one, name) for one in all_of)
            for name in ("files", "nbytes", "parity_nbytes", "manifest_nbytes", "domains", "groups")
        }
        return Protection(parity=self.base, lose=self.lose, **sums)


def plan_members(
    run: Path,
    lose: int,
    folders: Sequence[str] | None = None,
    *,
    without: Collection[str] = (),
    anew: bool = False,
) -> MembersPlan:
    """What `protect_members` would do. Raises as it does."""
    chain = chain_file.read(run)
    check_no_link(parity_folder(run))
    states, removed, segments = (
        [one for one in some if one.name not in without] for some in parts_of_chain(run, chain)
    )
    parts = {one.name: one for one in (*states, *removed, *segments)}
    earlier = None if anew else _earlier(run, lose)
    replaced = frozenset() if earlier is None else states_written_anew(earlier, only_newer=True)
    replaced |= {one.name for one in _domains(earlier) if one.name in parts and not parts[one.name].is_domain(one)}
    grouped = {domain.name for domain in _domains(earlier)} - replaced
    wanted = set(parts if folders is None else folders)
    if earlier is not None:
        wanted.update(one.name for one in removed)
    # And those after the last one in a group, which a run that was killed has left.
    for kind in (states, segments):
        wanted.update(_after_last([part.name for part in kind], grouped))
    own, joining, added = list[ProtectPlan](), list[Domain](), list[LoggedSteps]()
    for name, part in parts.items():
        if name not in wanted | replaced or name in grouped or part.has_own_parity(run):
            continue
        domain = part.domain(run)
        if part.logged is not None:
            added.append(part.logged)
        if not part.packs and lose * _OWN_SHARE * max((one.nbytes for one in domain.files), default=0) <= _nbytes(
            domain
        ):
            own.append(plan_protect(run / name, lose))
        else:
            joining.append(domain)
    plan = _plan(run, lose, earlier, set(parts), replaced, joining)
    if plan is not None:
        plan = replace(plan, overwrite=has_parity(run))
    is_empty = plan is None and has_parity(run) and not grouped & set(parts)
    growing = tuple(unfinished(run, chain))
    return MembersPlan(parity_folder(run), lose, tuple(own), plan, is_empty, tuple(added), growing)


def _after_last(names: Sequence[str], grouped: Collection[str]) -> Sequence[str]:
    """The names after the last one in a group; none if none is in one."""
    return names[max((number + 1 for number, name in enumerate(names) if name in grouped), default=len(names)) :]


def protect_members(
    run: Path,
    lose: int,
    folders: Sequence[str] | None = None,
    *,
    without: Collection[str] = (),
    anew: bool = False,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> Protection:
    """Write parity for states and segments of a chain that have none, and drop that of those that it has no longer.

    Args:
        run: The folder of the chain, or its path in a store.
        lose: How many files of a state may be lost, or how many states of a group.
        folders: The folders of the states and segments; None: of all. Those after the last one in a group count, too.
        without: The folders that will be removed or cut: their parity is dropped as long as they can be read.
        anew: Replace parity of any kind that the chain has.

    Raises:
        CorruptError: A state that has parity is not what was protected, or a segment does not fit its own checksums; in
            the second case, all others have parity.
        OutputError: The chain has parity of another kind.
        LockedError: Another process writes parity of the chain, or repairs it.
    """
    with locked(parity_folder(run)):
        run = listed_again(run)
        plan = plan_members(run, lose, folders, without=without, anew=anew)
        damaged = _damaged_segments(run, plan.segments)
        if damaged:
            plan = plan_members(run, lose, folders, without={*without, *damaged}, anew=anew)
        for one in plan.states:
            run_protect(one, resources=resources, progress=progress)
        if plan.groups is not None:
            run_protect(plan.groups, resources=resources, progress=progress, is_locked=True)
        elif has_parity(run):
            # A run that was killed after it had published may have left the groups before.
            if not is_remote(run):
                shutil.rmtree(plan.base.with_name(plan.base.name + PARTIAL), ignore_errors=True)
            if plan.is_empty:
                remove_parity(plan.base)
        for name in without:
            # The files of a removed state go with its parity; those of a segment may be cut.
            if chain_file.SEGMENT_FOLDER.fullmatch(name) and has_parity(run / name):
                remove_parity(parity_folder(run / name))
    for error in damaged.values():
        raise error  # all others have parity
    return plan.summary


def _damaged_segments(run: Path, segments: Sequence[LoggedSteps]) -> dict[str, CkptError]:
    """Compare segments with their own checksums. Returns the folders of damaged ones, and what is wrong."""
    damaged = dict[str, CkptError]()
    for logged in segments:
        error = problem_of_segment(run, logged)
        if error is not None:
            damaged[logged.folder] = error
    return damaged


def states_written_anew(parity: ProtectedFolder, only_newer: bool = False) -> frozenset[str]:
    """The folders of states and segments that a chain has now under the names of those that were protected.

    What is there is not damaged: its manifest has a checksum, and is the one that the chain names. `only_newer`: do not
    read those that are older than the parity and as long as they were.
    """
    root, lengths = parity.root, parity.manifest.lengths
    try:
        chain = chain_file.read(root)
    except CkptError:
        return frozenset()
    written = min((one.stat().st_ctime_ns for one in manifest_copies([parity.base]) if one.is_file()), default=0)

    def is_another(name: str) -> bool:
        """Whether a file of the chain is there and not the one that was protected."""
        if name not in lengths or not (root / name).is_file():
            return False
        status = (root / name).stat()
        if only_newer and status.st_size == lengths[name] and status.st_ctime_ns < written:
            return False
        return not is_as_protected(parity, name)

    result = set[str]()
    for member in chain.members:
        name = f"{member.folder}/{manifest.NAME}"
        if is_another(name) and manifest.stated_content(root / name) == member.content:
            result.add(member.folder)
    for logged in chain.segments:
        if is_another(f"{logged.folder}/{layouts.NAME}") and is_of_run(root, logged):
            result.add(logged.folder)
    return frozenset(result)


def check_not_newer(parity: ProtectedFolder) -> None:
    """Raise `CorruptError` if ckpt itself has changed a chain since it was protected: a repair would set it back.

    It may also be a chain below the folder. What its list does not name is removed when it is changed next.
    """
    root = parity.root
    if parity.file is not None:
        return
    lists = [name for name in parity.manifest.lengths if name.rpartition("/")[2] == chain_file.NAME]
    changed = [name for name in lists if _is_list(root / name) and not is_as_protected(parity, name)]
    if changed:
        where, what = (root / changed[0]).parent, "the chain was changed since it was protected, and is not damaged"
    elif _is_list(root / chain_file.NAME) and (written := states_written_anew(parity)):
        where, what = root, f"{min(written)} was written anew since it was protected, and is not damaged"
    else:
        return
    place, by = printable(str(root)), "--by state" if is_of_members(parity.manifest) else "--overwrite"
    hint = f"Protect what is there now: ckpt protect {place} --lose {parity.manifest.parities} {by}"
    raise CorruptError(what, where=where, hint=hint)


def _is_list(path: Path) -> bool:
    """Whether a file is there and is the list of a chain, not damaged."""
    try:
        chain_file.read(path.parent)
    except UnsupportedError:
        return True  # of a later version
    except CkptError:
        return False
    return True


def is_as_protected(parity: ProtectedFolder, name: str) -> bool:
    """Whether a file has the bytes that were protected."""
    path, buffer = parity.root / name, np.empty(BLOCK_NBYTES, np.uint8)
    if not path.is_file() or path.stat().st_size != parity.manifest.lengths[name]:
        return False
    with Reader(check=False) as reader:
        places = ((at, parity.place(at)) for at in parity.blocks_of_file(name))
        return all(read_block(reader, place, buffer[: place.nbytes]) == parity.hash(at) for at, place in places)


def losses_of_groups(run: Path) -> int | None:
    """How many states of each group may be lost, if states of a chain have parity in groups; else None."""
    if not parity_folder(run).is_dir() or not (run / chain_file.NAME).is_file():
        return None
    parity = find_parity(run)
    return parity.manifest.parities if is_of_members(parity.manifest) else None


def is_of_members(parity: ParityManifest) -> bool:
    """Whether parity is that of states of a chain: each domain has the files of one folder."""
    domains = (domain for group in parity.groups for domain in group.domains)
    return parity.by == "folder" and all(
        file.name.startswith(f"{domain.name}/") for domain in domains for file in domain.files
    )


def _earlier(run: Path, lose: int) -> ProtectedFolder | None:
    """The groups that are there. Raises `OutputError` for parity of another kind."""
    if not has_parity(run):
        return None
    there = find_parity(run)
    if not is_of_members(there.manifest) or there.unnamed or there.manifest.parities != lose:
        raise OutputError(
            f"has parity of another kind, not groups that may lose {lose} states each",
            where=there.base,
            hint=f"Write it anew: ckpt protect {printable(str(run))} --by state --lose {lose} --overwrite",
        )
    return there


def _domains(folder: ProtectedFolder | None) -> Iterator[Domain]:
    if folder is not None:
        yield from (domain for group in folder.manifest.groups for domain in group.domains if domain.files)


def _plan(
    run: Path,
    lose: int,
    earlier: ProtectedFolder | None,
    names: set[str],
    replaced: frozenset[str],
    joining: Sequence[Domain],
) -> ProtectPlan | None:
    """The groups as they will be; None if they stay as they are."""
    groups, numbers = list[list[Domain]](), list[int | None]()
    for number, group in enumerate(earlier.manifest.groups if earlier is not None else ()):
        own = [domain if domain.name in names - replaced else _EMPTY for domain in group.domains]
        if any(domain.files for domain in own):
            groups.append(own)
            numbers.append(number)
    for domain in joining:
        own = next((one for one in groups if _takes(one, domain)), [])
        if not own:
            own.extend([_EMPTY] * GROUP)
            groups.append(own)
            numbers.append(None)
        own[own.index(_EMPTY)] = domain
    parity = ParityManifest(tuple(DomainGroup(tuple(own), lose) for own in groups), lose, "folder")
    if not groups or (earlier is not None and parity == earlier.manifest and not replaced):
        return None
    identities = dict[Path, Identity]()
    for name, nbytes in parity.lengths.items():
        path = run / name
        status = path.stat() if path.is_file() else None
        if status is None or status.st_size != nbytes:
            what = "is missing" if status is None else "has another length than was protected"
            raise CorruptError(what, where=path, hint=f"Repair it first: ckpt repair {printable(str(run))}")
        identities[path] = Identity.of(status)
    base = parity_folder(run)
    folder = ProtectedFolder(run, places_of(base, (), lose), BlockHashes.empty(parity))
    there = None if earlier is None else EarlierGroups(earlier, tuple(numbers), replaced)
    return ProtectPlan(folder, (), identities, earlier=there)


def _takes(group: Sequence[Domain], domain: Domain) -> bool:
    largest = max(_nbytes(one) for one in group)
    return _EMPTY in group and _nbytes(domain) <= _GROWTH * largest


def _nbytes(domain: Domain) -> int:
    return sum(file.nbytes for file in domain.files)
