"""Locate a checkpoint: the one of a folder, the newest of several, or a pair of folders.

    .metadata                       written last, by a rename: with it, a save is complete
    __0.metadata, __1.metadata      one for each rank, if it was saved without collectives
    rank_0/.metadata, ...           one for each rank, if each saved its own part into a folder (`no_dist=True`)
    __<rank>_<number>.distcp        data; files that the metadata do not name are of another save
    .metadata.tmp                   a save that did not finish

Torch overwrites a checkpoint in place: the old `.metadata` stays until the new one
is written. So if both files are there, the old metadata may describe new data.

`ckpt index` adds the `.metadata` to files of each rank. ckpt still reads those of the ranks, which name all bytes.
"""

import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

from ckpt_formats.core.claims import MAX_PICKLE
from ckpt_formats.core.errors import CkptError, IncompleteError, NotFoundError
from ckpt_formats.core.files import read_whole, unreadable
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable

METADATA = ".metadata"
DRAFT = ".metadata.tmp"
_OF_RANK = re.compile(r"__(\d{1,9})\.metadata")
_DRAFT_OF_RANK = re.compile(r"__\d{1,9}\.metadata\.tmp")
_DATA = re.compile(r"__(\d{1,9})_\d{1,9}\.distcp")
_RANK_FOLDER = re.compile(r"(?:.*[._-])?rank[._-]?(\d{1,9})", re.IGNORECASE)
_STEP = re.compile(r"(.*?)(\d{1,15})")
_NAMED_STEP = re.compile(
    r"(?:.*[._=-])?(?:(?:global[_-]?)?(?:steps?|iter|iteration)|checkpoint|ckpt|save|epoch)[_=-]?|", re.IGNORECASE
)
"""What is before the number of a step in a folder's name; nothing if the name is a number. `qwen3` is no step."""

ACCELERATE = ("pytorch_model_fsdp_0", "optimizer_0")
"""The two folders of one checkpoint of Accelerate: that of the model and that of the optimizer."""
_OF_MEGATRON = "common.pt"
"""A file in the folders of steps that Megatron core saves. A pointer of its own says which of them is the last."""
_STEPS_INSIDE = ("", "checkpoint")
"""The subfolders that may contain folders of steps: TorchTitan writes them one level down."""


@dataclass(frozen=True)
class MetadataFolder:
    """One folder with metadata: `.metadata`, or one file for each rank."""

    folder: Path
    metadata: tuple[Path, ...]
    stale_files: tuple[str, ...] = ()
    """Names of metadata files that are ignored."""
    index: Path | None = None
    """The `.metadata` that joins those of the ranks, for torch."""

    @property
    def is_by_rank(self) -> bool:
        """Whether each rank saved metadata of its own."""
        return self.metadata != (self.folder / METADATA,)


@dataclass(frozen=True)
class FoundFolders:
    """The folders that together are a checkpoint, and notices on how they were chosen."""

    members: tuple[MetadataFolder, ...]
    notices: tuple[Notice, ...] = ()
    step: int | None = None
    """The step in the folder's name."""
    chosen: Path | None = None
    """The folder that was chosen of several steps; None if there was no choice."""


def is_checkpoint(path: Path) -> bool:
    """Is there a checkpoint at this path, complete or not, or are there checkpoints of several steps of one run?"""
    try:
        if _is_one_file(path) or _has_traces(path) or _is_pair(path) or rank_folders(path):
            return True
        steps = _steps(path)
        return bool(steps) and (len({prefix for prefix, _, _ in steps}) == 1 or steps[0][2].parent != path)
    except CkptError:
        raise
    except OSError:
        return False


def find(path: Path, incomplete: Collection[Path] = ()) -> FoundFolders:
    """The checkpoint at a path; of several steps, the newest that is not among the `incomplete` ones.

    Raises `IncompleteError` if the save did not finish, `NotFoundError` if there are several.
    """
    try:
        if _is_one_file(path):
            raise NotFoundError(
                "is one file of a distributed checkpoint, which is a folder",
                where=path,
                hint=f"Name the folder: {printable(str(path.parent))}",
            )
        if _has_traces(path) or rank_folders(path):
            return FoundFolders((_member(path),), (), _number(path.name))
        if _is_pair(path):
            return FoundFolders(
                tuple(_member(path / name) for name in ACCELERATE if (path / name).is_dir()), (), _number(path.name)
            )
        return _newest(path, incomplete)
    except CkptError:
        raise
    except OSError as error:
        raise unreadable(error, path) from error


def rank_folders(path: Path) -> dict[int, Path]:
    """The folders into which ranks saved their parts, each as if it were alone, by rank; none if it is no such folder.

    Folders of ranks have the word in their names (`rank0`, `rank_1`), and are all that is saved here.
    """
    if not path.is_dir():
        return {}
    entries = sorted(path.iterdir())
    folders = {int(m[1]): one for one in entries if (m := _RANK_FOLDER.fullmatch(one.name)) and _has_traces(one)}
    return folders if len(folders) > 1 else {}


def index_id(metadata: Sequence[Path]) -> str:
    """The identifier of the `.metadata` that joins these files of ranks: a UUID of their bytes. It is its `save_id`."""
    digest = hashlib.blake2b(digest_size=16)
    for path in metadata:
        digest.update(hashlib.blake2b(read_whole(path, MAX_PICKLE)).digest())
    return str(UUID(bytes=digest.digest(), version=4))


def not_joined(metadata: Iterable[Path]) -> list[Path]:
    """The folders of these metadata in which each rank saved its own, and no `.metadata` joins them."""
    files = set(metadata)
    folders = {path.parent for path in files if _OF_RANK.fullmatch(path.name)}
    own = [path.parent for path in files if path.name == METADATA and _RANK_FOLDER.fullmatch(path.parent.name)]
    folders |= {folder.parent for folder in own if len(own) > 1}
    return sorted(folder for folder in folders if folder / METADATA not in files)


def rank_of(file: str) -> int | None:
    """The rank that wrote a data file, from the file's name; None for other names."""
    match = _DATA.fullmatch(file)
    return int(match[1]) if match else None


def _is_one_file(path: Path) -> bool:
    """Is it a single file of a checkpoint? Its data are archives of torch.save, so other formats would accept it."""
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
    by_rank = {int(match[1]): folder / name for name in names if (match := _OF_RANK.fullmatch(name))}
    by_rank = by_rank or {rank: one / METADATA for rank, one in rank_folders(folder).items()}
    drafts = [name for name in names if name == DRAFT or _DRAFT_OF_RANK.fullmatch(name)]
    whole = folder / METADATA
    if METADATA in names:
        if DRAFT in drafts:
            raise IncompleteError(
                f"a later save was broken off: {DRAFT} is next to {METADATA}, and the data may be newer than "
                f"{METADATA}",
                where=folder,
                hint=f"If you know that there was no later save, remove {DRAFT}.",
            )
        ranks = tuple(by_rank[rank] for rank in sorted(by_rank))
        if not ranks or not _joins(whole, ranks):
            return MetadataFolder(folder, (whole,), tuple(one.name for one in ranks if one.parent == folder))
        return MetadataFolder(folder, ranks, index=whole)
    if drafts:
        raise IncompleteError(
            f"the save was broken off: there is {printable(drafts[0])}, which torch renames after the last write",
            where=folder,
            hint="Take an earlier checkpoint.",
        )
    if not by_rank:
        raise IncompleteError(
            f"the save was broken off: there are data, but no {METADATA}, which torch writes last",
            where=folder,
            hint="Take an earlier checkpoint, or copy the file if it was forgotten: its name begins with a dot.",
        )
    missing = next((rank for rank in range(max(by_rank)) if rank not in by_rank), None)
    if missing is not None:
        name = by_rank[max(by_rank)].relative_to(folder).as_posix().replace(str(max(by_rank)), str(missing), 1)
        raise IncompleteError(f"{printable(name)} is missing", where=folder, hint="Copy the files of all ranks.")
    ranks = tuple(by_rank[rank] for rank in sorted(by_rank))
    absent = next((one for one in ranks if not one.is_file()), None)
    if absent is not None:
        what = f"{printable(absent.relative_to(folder).as_posix())} is missing: this rank's save was broken off"
        raise IncompleteError(what, where=folder, hint="Take an earlier checkpoint.")
    return MetadataFolder(folder, ranks)


def _joins(whole: Path, ranks: Sequence[Path]) -> bool:
    """Whether a `.metadata` is the one that `ckpt index` wrote of these files of ranks."""
    if not all(one.is_file() for one in ranks):
        return False
    return index_id(ranks).encode() in read_whole(whole, MAX_PICKLE)


def _newest(path: Path, incomplete: Collection[Path]) -> FoundFolders:
    """The newest complete checkpoint of several steps. Their folders' names may differ only in the number."""
    steps = _steps(path)
    if not steps:
        raise NotFoundError("there is no distributed checkpoint here", where=path)
    if len({prefix for prefix, _, _ in steps}) > 1 or (len(steps) > 1 and _number(steps[0][2].name) is None):
        names = ", ".join(printable(folder.name) for _, _, folder in steps[:5])
        raise NotFoundError(f"there are several checkpoints here: {names}", where=path, hint="Name one of them.")
    later: list[str] = []
    lacking: list[str] = []
    for _, _, folder in sorted(steps, key=lambda step: -step[1]):
        if folder in incomplete:
            lacking.append(printable(folder.name))
            continue
        saved = (folder / METADATA).is_file() or (folder / "__0.metadata").is_file()
        if saved or _is_pair(folder) or rank_folders(folder):
            newest = Notice(f"{printable(folder.name)} is read, the newest of {len(steps)} checkpoints here")
            texts = (("newer, but the save was broken off", later), ("newer, but not complete", lacking))
            broken = (Notice(text, tuple(names), Weight.UNSURE) for text, names in texts if names)
            folders = find(folder)
            return FoundFolders(
                folders.members,
                (*((newest,) if len(steps) > 1 else ()), *broken, *folders.notices),
                _number(folder.name),
                folder if len(steps) > 1 else None,
            )
        later.append(printable(folder.name))
    raise IncompleteError(f"the save was broken off: no {METADATA} in {', '.join(later)}", where=path)


def _steps(path: Path) -> list[tuple[str, int, Path]]:
    """Folders of checkpoints whose names end in a number, as (text before it, number, folder)."""
    steps: list[tuple[str, int, Path]] = []
    for inside in _STEPS_INSIDE:
        folder = path / inside
        if not steps and folder.is_dir():
            entries = sorted(folder.iterdir())
            steps = [
                (match[1], int(match[2]), entry)
                for entry in entries
                if (match := _STEP.fullmatch(entry.name))
                if _has_traces(entry) or _is_pair(entry) or rank_folders(entry)
                if not (entry / _OF_MEGATRON).is_file()
            ]
    return steps


def _number(name: str) -> int | None:
    match = _STEP.fullmatch(name)
    return int(match[2]) if match and _NAMED_STEP.fullmatch(match[1]) else None


def stale_files(folder: Path, named: Collection[str]) -> Iterator[str]:
    """Data files that the metadata (`named`) do not name, for example those of an earlier save by more ranks."""
    for entry in sorted(folder.iterdir()):
        # A rank that has nothing to save leaves an empty file.
        if entry.suffix == ".distcp" and entry.name not in named and entry.is_file() and entry.stat().st_size:
            yield entry.name
