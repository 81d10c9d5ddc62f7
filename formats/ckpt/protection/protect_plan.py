"""What will be protected, and where its parity will be. No file is read."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.protection.domains import domains_of, groups_of, parts_of
from ckpt.protection.work_files import is_protected
from ckpt_formats.core.arguments import Checked, Count, StrPath
from ckpt_formats.core.errors import (
    InvalidArgumentError,
    NotFoundError,
    OutputError,
    UnsupportedError,
)
from ckpt_formats.core.folders import below, check_no_stale_sidecars
from ckpt_formats.core.identity import LOG, Identity
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.parity.blocks import ProtectedFolder, parity_folder, places_of
from ckpt_formats.parity.code import MAX_BLOCKS
from ckpt_formats.parity.manifest import (
    NAME,
    BlockHashes,
    DomainGroup,
    ParityManifest,
    ProtectedFile,
    check_names,
)
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.chain.folder import check_not_growing

_PARTS = 16
"""For each part of a single file that may be lost, it has so many."""


@dataclass(frozen=True)
class Protection(Checked):
    """What `protect` wrote, or would write."""

    parity: Path
    """The folder with the parity, or with the manifest that says where it is."""
    files: Count
    """Files that are protected."""
    nbytes: Count
    """Their bytes."""
    parity_nbytes: Count
    """The bytes of all parity."""
    manifest_nbytes: Count
    """The bytes of all copies of the manifest."""
    domains: Count
    groups: Count
    lose: Count
    """How many domains of each group may be lost."""


@dataclass(frozen=True)
class EarlierGroups:
    """Parity that is there for some of the groups of a plan, or for some of their domains."""

    folder: ProtectedFolder
    numbers: tuple[int | None, ...]
    """The number of each group of the plan in the earlier parity: domains of both have the same columns."""
    replaced: frozenset[str] = frozenset()
    """The domains that were written anew since: the earlier parity has nothing of them."""

    def columns(self, group: int, own: DomainGroup) -> tuple[int, ...]:
        """The columns of a group of the plan in which both have the same domain."""
        number = self.numbers[group]
        there = () if number is None else self.folder.manifest.groups[number].domains
        both = enumerate(zip(own.domains, there, strict=False))
        return tuple(column for column, (one, other) in both if one == other and one.name not in self.replaced)


@dataclass(frozen=True)
class ProtectPlan:
    """What will be protected, and where its parity will be."""

    folder: ProtectedFolder
    """The files, and the folders of the parities once they are published."""
    elsewhere: tuple[Path, ...]
    identities: dict[Path, Identity] = field(repr=False)
    overwrite: bool = False
    earlier: EarlierGroups | None = None
    """Groups of parity that is there, and is used again."""

    @property
    def summary(self) -> Protection:
        """What `protect` will return."""
        manifest = self.folder.manifest
        copies = 1 + manifest.parities
        return Protection(
            parity=self.folder.base,
            files=len(manifest.lengths),
            nbytes=manifest.nbytes,
            parity_nbytes=manifest.parity_nbytes,
            manifest_nbytes=copies * len(self.folder.hashes.to_bytes()),
            domains=sum(bool(domain.files) for group in manifest.groups for domain in group.domains),
            groups=len(manifest.groups),
            lose=manifest.parities,
        )

    @property
    def bases(self) -> tuple[Path, ...]:
        """The folders that are published: those elsewhere first, last the one in the folder, which says where."""
        return (*dict.fromkeys(self.elsewhere), self.folder.base)


def plan_protect(
    path: StrPath,
    lose: int = 2,
    *,
    by: str = "file",
    domains: Path | None = None,
    jump: int = 1,
    into: Sequence[StrPath] = (),
    overwrite: bool = False,
) -> ProtectPlan:
    """What `protect` would do. No file is read. Raises as `protect`."""
    given = target_path(path)
    if is_remote(given) and given.is_file():
        hint = "Protect the folder with it, or a copy in the file system."
        raise UnsupportedError("is a single object: in a store, folders have parity", where=given, hint=hint)
    root = given.parent if given.is_file() else given
    if not root.is_dir():
        raise NotFoundError("is not a folder" if root.exists() else "there is nothing here", where=root)
    there = [(given.name, given)] if given.is_file() else [one for one in below(root) if is_protected(one[0])]
    check_names([name for name, _ in there], root)
    check_not_growing(
        dict.fromkeys(file.parent for _, file in there if file.suffix == LOG),
        "parity would be of its beginning, to which a repair would cut it off",
        "give what has ended parity in the chain: `ckpt protect CHAIN --by state`",
    )
    identities = {file: Identity.of(file.stat()) for _, file in there}
    files = [ProtectedFile(name, identities[file].nbytes) for name, file in there]
    if not any(file.nbytes for file in files):
        raise NotFoundError("holds no file with content", where=given)
    elsewhere = _elsewhere(given, into)
    check_no_stale_sidecars(given)
    base = parity_folder(given)
    check_no_link(base)
    if not overwrite and ((base / NAME).exists() if is_remote(base) else os.path.lexists(base)):
        raise OutputError(
            "has parity already",
            where=base,
            hint="`ckpt repair --dry-run` compares it. Give --overwrite to write it anew.",
        )
    if given.is_file():
        if by != "file" or domains is not None or jump != 1:
            hint = "Leave out --by, --domains and --jump."
            raise InvalidArgumentError("a single file is divided into parts of its own", where=given, hint=hint)
        count = min(_PARTS * lose, MAX_BLOCKS - lose)
        groups: tuple[DomainGroup, ...] = (DomainGroup(parts_of(files[0], count), lose),)
        kind = "part"
    else:
        groups = groups_of(domains_of(files, by, domains), lose, jump)
        kind = "table" if domains is not None else by
    manifest = ParityManifest(groups, lose, kind, tuple(map(str, elsewhere)))
    name = given.name if given.is_file() else None
    folder = ProtectedFolder(root, places_of(base, elsewhere, lose), BlockHashes.empty(manifest), name)
    return ProtectPlan(folder, elsewhere, identities, overwrite)


def check_no_link(base: Path) -> None:
    """Raise `OutputError` if the folder for parity is a link: it would be replaced, and not what it leads to."""
    if not is_remote(base) and base.is_symlink():
        hint = "Remove the link, and name the folder that should have the parity: --into FOLDER."
        raise OutputError("is a link, through which no parity is written", where=base, hint=hint)


def _elsewhere(given: Path, into: Sequence[StrPath]) -> tuple[Path, ...]:
    """The folders that get parity instead of the one at the checkpoint. Raises as `protect`."""
    elsewhere = tuple(target_path(one).absolute() for one in into)
    if any(given.resolve() in (one.resolve(), *one.resolve().parents) for one in elsewhere):
        raise InvalidArgumentError(
            "parity cannot be kept in the folder that it protects", where=given, hint="Leave out --into."
        )
    return elsewhere
