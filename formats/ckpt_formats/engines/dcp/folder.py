"""Which files are a checkpoint: the one of a folder, the newest of several, or a pair.

    .metadata                       written last, by a rename: with it, a save is complete
    __0.metadata, __1.metadata      one for each rank, if it was saved without collectives
    __<rank>_<number>.distcp        what the metadata name; others are leftovers
    .metadata.tmp                   a save that was broken off

Torch overwrites a checkpoint in place: it leaves the old `.metadata` until the
new one is written. So both beside each other mean old metadata of new data.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import Incomplete, NotFound
from ckpt_formats.core.files import unreadable
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable

METADATA = ".metadata"
DRAFT = ".metadata.tmp"
_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")
_DRAFT_OF_RANK = re.compile(r"__\d{1,9}\.metadata\.tmp")
_DATA = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp")
_STEP = re.compile(r"(.*?)(\d{1,15})")

ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
"""Folders of one checkpoint of Accelerate: the model's, the optimizer's."""
_STEPS_INSIDE = ("", "checkpoint")
"""Where folders of steps are: TorchTitan keeps them one level down."""


@dataclass(frozen=True)
class MetadataFolder:
    """One folder with metadata: `.metadata`, or one file for each rank."""

    folder: Path
    metadata: tuple[Path, ...]
    stale_files: tuple[str, ...] = ()
    """Names of metadata that do not count."""


@dataclass(frozen=True)
class FoundFolders:
    """The folders that together are a checkpoint, and what to tell the user about how they were chosen."""

    members: tuple[MetadataFolder, ...]
    notices: tuple[Notice, ...] = ()
    step: int | None = None
    """In the folder's name."""


def looks(path: Path) -> bool:
    """Is there a checkpoint here, whole or not, or one for each of several steps?"""
    try:
        return _is_one_file(path) or _has_traces(path) or _is_pair(path) or bool(_steps(path))
    except OSError:
        return False


def find(path: Path) -> FoundFolders:
    """The checkpoint at a path. Raises `Incomplete` if the save was broken off, `NotFound` if there are several."""
    try:
        if _is_one_file(path):
            raise NotFound(
                "one file of a distributed checkpoint, which is a folder",
                where=path,
                hint=f"Name the folder: {printable(str(path.parent))}",
            )
        if _has_traces(path):
            return FoundFolders((_member(path),), (), _number(path.name))
        if _is_pair(path):
            return FoundFolders(
                tuple(_member(path / name) for name in ACCELERATE if (path / name).is_dir()), (), _number(path.name)
            )
        return _newest(path)
    except OSError as error:
        raise unreadable(error, path) from error


def rank_of(file: str) -> int | None:
    """The rank that wrote a file of data, by its name."""
    match = _DATA.fullmatch(file)
    return int(match[1]) if match else None


def _is_one_file(path: Path) -> bool:
    """Is it a file that means nothing alone? Torch saves its data as archives, so others would take it for theirs."""
    named = path.name == METADATA or bool(_OF_RANK.fullmatch(path.name) or _DATA.fullmatch(path.name))
    return named and path.is_file()


def _has_traces(path: Path) -> bool:
    if not path.is_dir():
        return False
    return (path / METADATA).is_file() or any(
        entry.name == DRAFT or _OF_RANK.fullmatch(entry.name) or _DATA.fullmatch(entry.name) for entry in path.iterdir()
    )


def _is_pair(path: Path) -> bool:
    return path.is_dir() and any(_has_traces(path / name) for name in ACCELERATE)


def _member(folder: Path) -> MetadataFolder:
    names = sorted(entry.name for entry in folder.iterdir())
    by_rank = {int(match[1]): name for name in names if (match := _OF_RANK.fullmatch(name))}
    drafts = [name for name in names if name == DRAFT or _DRAFT_OF_RANK.fullmatch(name)]
    if METADATA in names:
        if DRAFT in drafts:
            raise Incomplete(
                f"a later save was broken off: {DRAFT} is beside {METADATA}, and the data may be newer than what "
                f"{METADATA} says of them",
                where=folder,
                hint=f"If you know that no save came after it, remove {DRAFT}.",
            )
        return MetadataFolder(folder, (folder / METADATA,), tuple(by_rank.values()))
    if drafts:
        raise Incomplete(
            f"the save was broken off: there is {printable(drafts[0])}, which torch renames when all is written",
            where=folder,
            hint="Take an earlier checkpoint.",
        )
    if not by_rank:
        raise Incomplete(
            f"the save was broken off: there are data, but no {METADATA}, which torch writes last",
            where=folder,
            hint="Take an earlier checkpoint, or copy the file if it was forgotten: its name begins with a dot.",
        )
    if lacking := next((rank for rank in range(max(by_rank)) if rank not in by_rank), None):
        raise Incomplete(f"__{lacking}.metadata is missing", where=folder, hint="Copy the files of all ranks.")
    return MetadataFolder(folder, tuple(folder / by_rank[rank] for rank in sorted(by_rank)))


def _newest(path: Path) -> FoundFolders:
    """The newest complete one of the folders of steps, all of which must be called alike."""
    steps = _steps(path)
    if not steps:
        raise NotFound("there is no distributed checkpoint here", where=path)
    if len({prefix for prefix, _, _ in steps}) > 1:
        names = ", ".join(printable(folder.name) for _, _, folder in steps[:5])
        raise NotFound(f"there are several checkpoints here: {names}", where=path, hint="Name one of them.")
    later: list[str] = []
    for _, number, folder in sorted(steps, key=lambda step: -step[1]):
        if (folder / METADATA).is_file() or (folder / "__0.metadata").is_file() or _is_pair(folder):
            newest = Notice(f"of {len(steps)} checkpoints here, {printable(folder.name)} is read, the newest")
            broken = (Notice("newer, but the save was broken off", tuple(later), Weight.UNSURE),) if later else ()
            found = find(folder)
            return FoundFolders(
                found.members, (*((newest,) if len(steps) > 1 else ()), *broken, *found.notices), number
            )
        later.append(printable(folder.name))
    raise Incomplete(f"the save was broken off: no {METADATA} in {', '.join(later)}", where=path)


def _steps(path: Path) -> list[tuple[str, int, Path]]:
    """Folders of checkpoints that end in a number: what precedes it, the number, the folder."""
    found: list[tuple[str, int, Path]] = []
    for inside in _STEPS_INSIDE:
        folder = path / inside
        if not found and folder.is_dir():
            entries = sorted(folder.iterdir())
            found = [
                (match[1], int(match[2]), entry)
                for entry in entries
                if (match := _STEP.fullmatch(entry.name)) and (_has_traces(entry) or _is_pair(entry))
            ]
    return found


def _number(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[2]) if match else None


def stale_files(folder: Path, named: Collection[str]) -> Iterator[str]:
    """Files of data that the metadata do not name: those of a former save by more ranks, say."""
    for entry in sorted(folder.iterdir()):
        # A rank that has nothing to save leaves an empty file.
        if entry.suffix == ".distcp" and entry.name not in named and entry.is_file() and entry.stat().st_size:
            yield entry.name
