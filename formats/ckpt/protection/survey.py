"""Say of the checkpoints in a folder whether they have parity, and whether it fits their files and survives a disk.

Names, lengths and times are compared, and of files that came or changed after the manifest one block, so that a
checkpoint that was saved again under its name is noticed; `ckpt verify` compares all blocks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckpt.protection.chain_parts import has_ended, parts_of_chain
from ckpt.protection.damage import all_files, wrong_copies
from ckpt.protection.members import is_of_members, states_written_anew
from ckpt.protection.work_files import is_protected
from ckpt_formats.core.arguments import Checked, Count
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.folders import below, file_nbytes
from ckpt_formats.parity.blocks import (
    BlockAddress,
    ProtectedFolder,
    find_parity,
    has_parity,
    read_block,
)
from ckpt_formats.parity.copies import manifest_copies
from ckpt_formats.parity.manifest import BLOCK_NBYTES
from ckpt_formats.registry.location import checkpoints_in, is_checkpoint
from ckpt_formats.stores.location import is_url
from ckpt_formats.universal.chain import chain_file

MAX_FOLDERS = 1000
"""Folders that are looked at: the newest by name."""
MAX_BLOCKS = 64
"""Blocks that are compared in all: at most 64 MiB are read."""
_CHAIN = "chain.json"


@dataclass(frozen=True)
class SurveyedFolder(Checked):
    """The folder of a checkpoint, or its only file, and what there is of parity for it."""

    path: Path
    losses: Count
    """How many domains of a group may be lost; 0 without parity."""
    domains: Count
    by: str | None
    """What a domain is: `file`, `folder`, `node:N` or `table`; `part` of a single file, `state` of a chain."""
    elsewhere: tuple[str, ...] = ()
    """The folders and URLs that have the parities in turn, if they are not with the checkpoint."""
    unprotected: tuple[str, ...] = ()
    """Files that parity does not know: they are newer than it."""
    changed: tuple[str, ...] = ()
    """Files that are missing, or have another length or another content than was protected."""
    damaged_parity: tuple[Path, ...] = ()
    """Files of parity that are missing or have another length, and damaged copies of the manifest.

    Of parity elsewhere, nothing is known."""
    is_on_one_disk: bool = False
    """Whether all files and all parity are in one file system."""
    problem: str | None = None
    """Why its parity cannot be read."""

    @property
    def has_parity(self) -> bool:
        return self.losses > 0 or self.problem is not None

    @property
    def fits(self) -> bool:
        """Whether parity is whole and is that of these files, as far as it was compared."""
        return self.losses > 0 and not (self.unprotected or self.changed or self.damaged_parity or self.problem)


def survey(folder: Path) -> tuple[SurveyedFolder, ...]:
    """The checkpoints at a path: it is one, a chain, or the folder of a run. None are there: an empty tuple.

    At most `MAX_FOLDERS` are looked at. Raises nothing for what cannot be read: `problem` says so.
    """
    return tuple(_surveyed(list(_roots(folder))[-MAX_FOLDERS:]))


def _roots(folder: Path) -> Iterator[Path]:
    """The folders and files that have parity of their own, or could have it."""
    if has_parity(folder):
        yield folder
        if (folder / _CHAIN).is_file():
            yield from sorted(one for one in folder.iterdir() if one.is_dir() and has_parity(one))
        return
    try:
        if (folder / _CHAIN).is_file():
            logs = _ended_logs(folder)
            yield from sorted(one for one in folder.iterdir() if one.is_dir() and (one in logs or is_checkpoint(one)))
        elif is_checkpoint(folder):
            files = sorted(one for one in folder.iterdir() if one.is_file() and not one.name.startswith("."))
            by_file = any(has_parity(one) for one in files)
            yield from [one for one in files if is_checkpoint(one)] if by_file else [folder]
        else:
            yield from checkpoints_in(folder)
    except (CkptError, OSError):
        return


def _ended_logs(chain: Path) -> frozenset[Path]:
    """The folders of the segments of a chain that do not change any more; none if its list is damaged."""
    try:
        segments = chain_file.read(chain).segments
    except CkptError:
        return frozenset()
    return frozenset(chain / one.folder for one in segments if has_ended(chain, one))


def _surveyed(roots: Sequence[Path]) -> Iterator[SurveyedFolder]:
    left = MAX_BLOCKS
    for root in reversed(roots):  # the newest first, which count most
        try:
            parity = find_parity(root)
        except (CkptError, OSError) as error:
            problem = str(error).splitlines()[0] if has_parity(root) else None
            yield SurveyedFolder(root, 0, 0, None, problem=problem)
            continue
        try:
            one, blocks = _compared(root, parity, left)
        except (CkptError, OSError) as error:
            yield SurveyedFolder(root, 0, 0, None, problem=str(error).splitlines()[0])
            continue
        left -= blocks
        yield one


def _compared(path: Path, parity: ProtectedFolder, most: int) -> tuple[SurveyedFolder, int]:
    """What is known of a protected folder or file, and how many blocks were read for it."""
    manifest, known = parity.manifest, parity.manifest.lengths
    files = [(path.name, path)] if parity.file is not None else below(path)
    is_of_states = (path / _CHAIN).is_file() and is_of_members(manifest)
    parts = _parts(path) if is_of_states else None
    there = {
        name: file.stat()
        for name, file in files
        if file.is_file() and is_protected(name) and (parts is None or name in known or name.partition("/")[0] in parts)
    }
    anew = states_written_anew(parity) if is_of_states else frozenset()
    known = {name: nbytes for name, nbytes in known.items() if name.partition("/")[0] not in anew}
    changed = [name for name, nbytes in known.items() if name not in there or there[name].st_size != nbytes]
    # The oldest copy: a repair may have written another one later. The time of a change of the file's entry, because
    # copies and archives set the time of its content.
    written = min((path.stat().st_ctime_ns for path in manifest_copies([parity.base]) if path.is_file()), default=0)
    newer = {
        name for name, nbytes in known.items() if nbytes and name not in changed and there[name].st_ctime_ns > written
    }
    places = [(at, name) for at, name in _middle_blocks(parity) if name in newer][:most]
    changed += _of_another_content(parity, places)
    wrong = [path for path, nbytes, is_parity in all_files(parity) if is_parity and file_nbytes(path) != nbytes]
    wrong += wrong_copies(parity)
    local = [Path(one) for one in parity.unnamed if not is_url(one)]
    disks = {one.st_dev for one in there.values()} | {_device(place) for place in (*parity.places, *local)}
    return (
        SurveyedFolder(
            path=path,
            losses=manifest.parities,
            domains=sum(bool(domain.files) for group in manifest.groups for domain in group.domains),
            by="state" if is_of_states else manifest.by,
            elsewhere=manifest.elsewhere,
            unprotected=tuple(sorted(there.keys() - known.keys())),
            changed=tuple(sorted(changed)),
            damaged_parity=tuple(wrong),
            is_on_one_disk=len(disks - {None}) == 1 and len(local) == len(parity.unnamed),
        ),
        len(places),
    )


def _parts(chain: Path) -> frozenset[str]:
    """The folders of a chain that could be in groups: not its list, a log that grows, and what has its own parity.

    None if its list is damaged.
    """
    try:
        kinds = parts_of_chain(chain, chain_file.read(chain))
    except CkptError:
        return frozenset()
    return frozenset(part.name for kind in kinds for part in kind if not part.has_own_parity(chain))


def _middle_blocks(parity: ProtectedFolder) -> Iterator[tuple[BlockAddress, str]]:
    """A block in the middle of each file, or of its first part, with the file's name: its start may be a header."""
    seen = set[str]()
    for number, group in enumerate(parity.manifest.groups):
        for column, domain in enumerate(group.domains):
            stripe = 0
            for file in domain.files:
                if file.block_count and file.name not in seen:
                    seen.add(file.name)
                    yield BlockAddress(number, column, stripe + file.block_count // 2), file.name
                stripe += file.block_count


def _of_another_content(parity: ProtectedFolder, places: Iterable[tuple[BlockAddress, str]]) -> Iterator[str]:
    buffer = np.empty(BLOCK_NBYTES, np.uint8)
    with Reader(check=False) as reader:
        for at, name in places:
            place = parity.place(at)
            if read_block(reader, place, buffer[: place.nbytes]) != parity.hash(at):
                yield name


def _device(path: Path) -> int | None:
    try:
        return path.stat().st_dev
    except OSError:
        return None
