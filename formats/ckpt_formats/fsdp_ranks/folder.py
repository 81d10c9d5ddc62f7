"""Which files a job left in a folder, by rank. Names only; nothing is opened.

verl            {model,optim,extra_state}_world_size_<W>_rank_<R>.pt
Accelerate      pytorch_model_fsdp[_<I>]_rank<R>.bin, optimizer[_<I>]_rank<R>.bin, random_states_<R>.pkl

<I> numbers the models of one run; the second and later ones are told, not read.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_formats.errors import Corrupt, Incomplete, Unsafe, Unsupported
from ckpt_formats.files import unreadable
from ckpt_formats.naming import show
from ckpt_formats.notices import Notice, Weight

MOST_RANKS = 1 << 16

_SIZED = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt")
_COUNTED = re.compile(r"(pytorch_model_fsdp|optimizer)(?:_(\d{1,9}))?_rank(\d{1,9})\.bin")
_RANDOM = re.compile(r"random_states_(\d{1,9})\.pkl")
_ORDER = ("model", "optimizer", "extra")
_ROLES = {"optim": "optimizer", "extra_state": "extra", "pytorch_model_fsdp": "model"}
_MOST_NAMED = 5
_COPY = "Copy the files of all ranks of one step into one folder."


@dataclass(frozen=True)
class Folder:
    """The files of one step: by role (`model`, `optimizer`, `extra`), then by rank."""

    path: Path
    world: int
    files: Mapping[str, Mapping[int, Path]] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()

    @property
    def paths(self) -> Iterator[tuple[str, int, Path]]:
        """Role, rank and path of every file."""
        for role, ranks in self.files.items():
            for rank, path in ranks.items():
                yield role, rank, path


def is_rank_file(name: str) -> bool:
    """Is a file of this name what one rank holds of a model or its optimizer?"""
    return any(kind.fullmatch(name) for kind in (_SIZED, _COUNTED))


def list_folder(path: Path) -> Folder:
    """Sort the files by rank.

    Raises `Incomplete` if a rank's file is missing, `Corrupt` if files of several
    world sizes or of several ways of saving are mixed.
    """
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise unreadable(error, path) from error
    sized = {name: match for name in names if (match := _SIZED.fullmatch(name))}
    counted = {name: match for name in names if (match := _COUNTED.fullmatch(name))}
    if sized and counted:
        raise Corrupt(
            f"{show(next(iter(sized)))} and {show(next(iter(counted)))} are of two ways of saving",
            where=path,
            hint="Two runs were saved into one folder: separate them.",
        )
    if sized:
        return _sized(path, sized)
    return _counted(path, counted, {name: match for name in names if (match := _RANDOM.fullmatch(name))})


def _sized(path: Path, names: Mapping[str, re.Match[str]]) -> Folder:
    worlds: dict[int, list[str]] = {}
    for name, match in names.items():
        worlds.setdefault(int(match[2]), []).append(name)
    if len(worlds) > 1:
        said = "; ".join(f"{len(found)} of {world} ranks" for world, found in sorted(worlds.items()))
        raise Corrupt(
            f"files of several world sizes lie in one folder: {said}",
            where=path,
            hint="A job of another size saved into the same folder: keep the files of one of them.",
        )
    files: dict[str, dict[int, Path]] = {}
    for name, match in names.items():
        _put(files, _ROLES.get(match[1], match[1]), int(match[3]), path / name)
    (world,) = worlds
    return _checked(Folder(path, world, files))


def _counted(path: Path, names: Mapping[str, re.Match[str]], random: Mapping[str, re.Match[str]]) -> Folder:
    files: dict[str, dict[int, Path]] = {}
    further: set[int] = set()
    for name, match in names.items():
        if int(match[2] or 0):
            further.add(int(match[2]))
        else:
            _put(files, _ROLES.get(match[1], match[1]), int(match[3]), path / name)
    if not files:
        raise Unsupported(
            "only files of a second model are here", where=path, hint="Those of the first end in _rank<R>."
        )
    for name, match in random.items():
        _put(files, "extra", int(match[1]), path / name)
    world = 1 + max(rank for role, ranks in files.items() if role != "extra" for rank in ranks)
    files["extra"] = {rank: file for rank, file in files.get("extra", {}).items() if rank < world}
    notices = tuple(
        Notice(f"files of model {number} are here too, and not read", weight=Weight.LOST) for number in sorted(further)
    )
    return _checked(Folder(path, world, {role: ranks for role, ranks in files.items() if ranks}, notices))


def _put(files: dict[str, dict[int, Path]], role: str, rank: int, file: Path) -> None:
    ranks = files.setdefault(role, {})
    if rank in ranks:
        raise Corrupt(
            f"{ranks[rank].name} and {file.name} are both of rank {rank}", where=file.parent, hint="Keep one of them."
        )
    ranks[rank] = file


def _checked(folder: Folder) -> Folder:
    """Counts and looks: a number in a file name may be absurd, so nothing of its size is built before."""
    if not 0 < folder.world <= MOST_RANKS:
        raise Unsafe(f"the files speak of {folder.world:,} ranks", where=folder.path)
    for role, ranks in folder.files.items():
        if (most := max(ranks)) >= folder.world:
            raise Corrupt(
                f"{ranks[most].name} is of rank {most}, but there are {folder.world} ranks",
                where=folder.path,
                hint=_COPY,
            )
        if len(ranks) < folder.world:
            absent = next(rank for rank in range(folder.world) if rank not in ranks)
            raise Incomplete(
                f"the {role} file of rank {absent} is missing ({len(ranks)} of {folder.world} are here)",
                where=folder.path,
                hint=_COPY,
            )
    if "model" not in folder.files:
        raise Incomplete("the model's files are missing", where=folder.path, hint=_COPY)
    ordered = {role: dict(sorted(folder.files[role].items())) for role in _ORDER if role in folder.files}
    return Folder(folder.path, folder.world, ordered, folder.notices)
