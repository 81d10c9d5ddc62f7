"""Parity for the states of a chain: a large one has its own, and small ones share it in groups.

A state never changes, but most have one large file, so that parity of its files alone would be larger than it is. In a
group, a state is a domain: parity is as large as the largest state of the group, for up to 16 of them. A state that is
appended is added to the parities of its group, which are sums; what is in the group already is not read again.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt.job import AnyProgress
from ckpt.pipeline import Resources
from ckpt.protection.protect import (
    EarlierGroups,
    Protection,
    ProtectPlan,
    is_protected,
    locked,
    plan_protect,
    run_protect,
)
from ckpt_formats.core.errors import CorruptError, OutputError
from ckpt_formats.core.folders import below
from ckpt_formats.core.identity import Identity
from ckpt_formats.core.text import PARTIAL, printable
from ckpt_formats.parity.blocks import ProtectedFolder, find_parity, has_parity, parity_folder, places_of
from ckpt_formats.parity.manifest import BlockHashes, Domain, DomainGroup, ParityManifest, ProtectedFile
from ckpt_formats.universal.chain import chain_file

GROUP = 16
"""States of a group, at most: with M parities, a full group of equal states takes M / 16 more space."""
_OWN_SHARE = 4
"""A state has parity of its own if that takes at most this part of it."""
_GROWTH = 4
"""A state joins a group if it is at most so many times as large as the largest one there."""
_EMPTY = Domain("", ())


def protect_members(
    run: Path,
    lose: int,
    folders: Sequence[str] | None = None,
    *,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> tuple[Protection, ...]:
    """Write parity for states of a chain that have none, and drop that of states which are no longer in the chain.

    Args:
        run: The folder of the chain.
        lose: How many files of a state may be lost, or how many states of a group.
        folders: The folders of the states; None: of all.

    Returns what was written: parity of single states, then that of all groups.

    Raises:
        CorruptError: A state that has parity is not what was protected.
        OutputError: The chain has parity of another kind.
    """
    chain = chain_file.read(run)
    names = [member.folder for member in chain.members]
    wanted = set(names if folders is None else folders)
    earlier = _earlier(run, lose)
    grouped = {domain.name for domain in _domains(earlier)}
    done = list[Protection]()
    joining = list[Domain]()
    for name in names:
        if name not in wanted or name in grouped or has_parity(run / name):
            continue
        domain = Domain(name, tuple(ProtectedFile(one, path.stat().st_size) for one, path in _files(run, name)))
        if lose * _OWN_SHARE * max(file.nbytes for file in domain.files) <= _nbytes(domain):
            done.append(run_protect(plan_protect(run / name, lose), resources=resources, progress=progress))
        else:
            joining.append(domain)
    plan = _plan(run, lose, earlier, set(names), joining)
    if plan is None and earlier is not None:
        with locked(earlier.base):
            # A run that was killed after it had published may have left the groups before.
            shutil.rmtree(earlier.base.with_name(earlier.base.name + PARTIAL), ignore_errors=True)
            if not grouped & set(names):
                shutil.rmtree(earlier.base)
    if plan is not None:
        done.append(run_protect(plan, resources=resources, progress=progress))
    return tuple(done)


def losses_of_groups(run: Path) -> int | None:
    """How many states of each group may be lost, if states of a chain have parity in groups; else None."""
    if not parity_folder(run).is_dir() or not (run / chain_file.NAME).is_file():
        return None
    parity = find_parity(run)
    return parity.manifest.parities if is_of_members(parity.manifest) else None


def is_of_members(manifest: ParityManifest) -> bool:
    """Whether parity is that of states of a chain: each domain has the files of one folder."""
    domains = (domain for group in manifest.groups for domain in group.domains)
    return manifest.by == "folder" and all(
        file.name.startswith(f"{domain.name}/") for domain in domains for file in domain.files
    )


def _earlier(run: Path, lose: int) -> ProtectedFolder | None:
    """The groups that are there. Raises `OutputError` for parity of another kind."""
    if not has_parity(run):
        return None
    there = find_parity(run)
    if not is_of_members(there.manifest) or there.unnamed or there.manifest.parities != lose:
        raise OutputError(
            f"has parity of another kind, and not groups of states of which {lose} may be lost",
            where=there.base,
            hint="Remove this folder, or protect the chain anew: ckpt protect CHAIN --overwrite.",
        )
    return there


def _domains(folder: ProtectedFolder | None) -> Iterator[Domain]:
    if folder is not None:
        yield from (domain for group in folder.manifest.groups for domain in group.domains if domain.files)


def _plan(
    run: Path, lose: int, earlier: ProtectedFolder | None, names: set[str], joining: Sequence[Domain]
) -> ProtectPlan | None:
    """The groups as they will be; None if they stay as they are."""
    groups, numbers = list[list[Domain]](), list[int | None]()
    for number, group in enumerate(earlier.manifest.groups if earlier is not None else ()):
        own = [domain if domain.name in names else _EMPTY for domain in group.domains]
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
    manifest = ParityManifest(tuple(DomainGroup(tuple(own), lose) for own in groups), lose, "folder")
    if not groups or (earlier is not None and manifest == earlier.manifest):
        return None
    identities = dict[Path, Identity]()
    for name, nbytes in manifest.lengths.items():
        path = run / name
        status = path.stat() if path.is_file() else None
        if status is None or status.st_size != nbytes:
            what = "is missing" if status is None else "has another length than was protected"
            raise CorruptError(what, where=path, hint=f"Repair it first: ckpt repair {printable(str(run))}")
        identities[path] = Identity.of(status)
    base = parity_folder(run)
    folder = ProtectedFolder(run, places_of(base, (), lose), BlockHashes.empty(manifest))
    plan = ProtectPlan(folder, (), identities, overwrite=earlier is not None)
    return plan if earlier is None else replace(plan, earlier=EarlierGroups(earlier, tuple(numbers)))


def _takes(group: Sequence[Domain], domain: Domain) -> bool:
    largest = max(_nbytes(one) for one in group)
    return _EMPTY in group and _nbytes(domain) <= _GROWTH * largest


def _nbytes(domain: Domain) -> int:
    return sum(file.nbytes for file in domain.files)


def _files(run: Path, name: str) -> Iterator[tuple[str, Path]]:
    return ((one, path) for one, path in below(run / name, f"{name}/") if is_protected(one))
