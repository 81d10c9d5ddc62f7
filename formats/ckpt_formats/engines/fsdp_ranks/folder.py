"""List the files of a job in a folder by rank. Only names are read; no file is opened.

verl            {model,optim,extra_state}_world_size_<W>_rank_<R>.pt
Accelerate      pytorch_model_fsdp[_<I>]_rank<R>.bin, optimizer[_<I>]_rank<R>.bin, random_states_<R>.pkl

scripts         any name with `rank<R>` in it, such as checkpoint_rank0.pt: see `script_names`

<I> is the number of a model of the run; the second and later ones are not read, only reported.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import unreadable
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable

MAX_RANKS = 1 << 16

_VERL = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt")
_ACCELERATE = re.compile(r"(pytorch_model_fsdp|optimizer)(?:_(\d{1,9}))?_rank(\d{1,9})\.bin")
_ACCELERATE_RANDOM = re.compile(r"random_states_(\d{1,9})\.pkl")
_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
_SCRIPT = re.compile(r"(.*?)(?<![a-z])ranks?[_-]?(\d{1,6})((?:[._-]\w+)?\.(?:pt|pth|bin|ckpt))", re.IGNORECASE)
_SCRIPT_WORLD = re.compile(r"[_-]of[_-]?(\d{1,6})\.")
_RANK = re.compile(r"((?:ranks?|states)[_-]?)(\d{1,9})(?!.*rank)", re.IGNORECASE)
_OPTIMIZER = re.compile(r"optim", re.IGNORECASE)
_EXTRA = re.compile(r"rng|random|sched|loader|sampler|extra|scaler|seed|log|metric|profil|trace|memory", re.IGNORECASE)
_OTHER_FILES = (".metadata", "config.json", "common.pt", "manifest.json", "latest", "model_index.json")
_OTHER_ENDINGS = (".distcp", ".safetensors", "_model_states.pt", ".metadata")
"""Names in checkpoints of other formats. In their folders, files with a rank in their names are no checkpoint."""
_ORDER = ("model", "optimizer", "extra")
_ROLES = {"optim": "optimizer", "extra_state": "extra", "pytorch_model_fsdp": "model"}
_MAX_NAMED = 5
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


def script_names(names: Iterable[str]) -> dict[str, dict[tuple[str, str], dict[int, str]]]:
    """Files that a script named by rank: by role, by the text (before, after) the rank in the name, then by rank."""
    result: dict[str, dict[tuple[str, str], dict[int, str]]] = {}
    for name in names:
        if match := _SCRIPT.fullmatch(name):
            rest = f"{match[1]}{match[3]}"
            role = "optimizer" if _OPTIMIZER.search(rest) else "extra" if _EXTRA.search(rest) else "model"
            result.setdefault(role, {}).setdefault((match[1], match[3]), {})[int(match[2])] = name
    return result


def has_script_names(names: Collection[str]) -> bool:
    """Do these names contain a model only as a script's files by rank?"""
    if any(name in _OTHER_FILES or name.endswith(_OTHER_ENDINGS) for name in names):
        return False
    models = script_names(names).get("model", {})
    other_models = [name for name in names if name.endswith(_ENDINGS) and not _SCRIPT.fullmatch(name)]
    return any(0 in ranks and (len(ranks) > 1 or not other_models) for ranks in models.values())


def _name_at(name: str, rank: int) -> str:
    """The name of another rank's file, derived from the name of one rank's file."""
    return _RANK.sub(lambda match: match[1] + str(rank).zfill(len(match[2]) if match[2][0] == "0" else 0), name)


def is_rank_file(name: str) -> bool:
    """Is it the name of one rank's file of a model or its optimizer?"""
    return any(kind.fullmatch(name) for kind in (_VERL, _ACCELERATE))


def list_folder(path: Path) -> Folder:
    """The files by role and rank.

    Raises `IncompleteError` if a rank's file is missing, `CorruptError` if files of several
    world sizes or of several ways of saving are mixed.
    """
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except CkptError:
        raise
    except OSError as error:
        raise unreadable(error, path) from error
    sized = {name: match for name in names if (match := _VERL.fullmatch(name))}
    counted = {name: match for name in names if (match := _ACCELERATE.fullmatch(name))}
    if sized and counted:
        raise CorruptError(
            f"{printable(next(iter(sized)))} and {printable(next(iter(counted)))} come from two ways of saving",
            where=path,
            hint="Two runs were saved into one folder: separate them.",
        )
    if sized:
        return _verl_folder(path, sized)
    if not counted:
        return _checked(_script_folder(path, script_names(names)))
    return _accelerate_folder(
        path, counted, {name: match for name in names if (match := _ACCELERATE_RANDOM.fullmatch(name))}
    )


def _script_folder(path: Path, names: Mapping[str, Mapping[tuple[str, str], Mapping[int, str]]]) -> Folder:
    """The files that a script named by rank. Raises `UnsupportedError` if they are of several checkpoints."""
    if len(models := names.get("model", {})) > 1:
        firsts = ", ".join(printable(next(iter(ranks.values()))) for ranks in list(models.values())[:_MAX_NAMED])
        raise UnsupportedError(
            f"files of ranks have several different names: {firsts}",
            where=path,
            hint="Move the files of one step, whose names differ only in the rank, into a folder of their own.",
        )
    files = {
        role: {rank: path / name for rank, name in next(iter(sets.values())).items()}
        for role, sets in names.items()
        if len(sets) == 1
    }
    stated = {int(match[1]) for _, tail in models if (match := _SCRIPT_WORLD.match(tail))}
    counted = 1 + max((rank for role, ranks in files.items() if role != "extra" for rank in ranks), default=0)
    return Folder(path, max(stated, default=counted), files)


def _verl_folder(path: Path, names: Mapping[str, re.Match[str]]) -> Folder:
    worlds: dict[int, list[str]] = {}
    for name, match in names.items():
        worlds.setdefault(int(match[2]), []).append(name)
    if len(worlds) > 1:
        counts = "; ".join(
            f"{len(files_of_world)} of {world} ranks" for world, files_of_world in sorted(worlds.items())
        )
        raise CorruptError(
            f"files of several world sizes are in one folder: {counts}",
            where=path,
            hint="A job of another size saved into the same folder: keep the files of one of them.",
        )
    files: dict[str, dict[int, Path]] = {}
    for name, match in names.items():
        _put(files, _ROLES.get(match[1], match[1]), int(match[3]), path / name)
    (world,) = worlds
    return _checked(Folder(path, world, files))


def _accelerate_folder(path: Path, names: Mapping[str, re.Match[str]], random: Mapping[str, re.Match[str]]) -> Folder:
    files: dict[str, dict[int, Path]] = {}
    further: set[int] = set()
    for name, match in names.items():
        if int(match[2] or 0):
            further.add(int(match[2]))
        else:
            _put(files, _ROLES.get(match[1], match[1]), int(match[3]), path / name)
    if not files:
        raise UnsupportedError(
            "only files of a second model are here",
            where=path,
            hint="The names of files of the first model end in _rank<R>.bin, without a number before it.",
        )
    for name, match in random.items():
        _put(files, "extra", int(match[1]), path / name)
    world = 1 + max(rank for role, ranks in files.items() if role != "extra" for rank in ranks)
    files["extra"] = {rank: file for rank, file in files.get("extra", {}).items() if rank < world}
    notices = tuple(
        Notice(f"files of model {number} are also here; they are not read", weight=Weight.LOST)
        for number in sorted(further)
    )
    return _checked(Folder(path, world, {role: ranks for role, ranks in files.items() if ranks}, notices))


def _put(files: dict[str, dict[int, Path]], role: str, rank: int, file: Path) -> None:
    ranks = files.setdefault(role, {})
    if rank in ranks:
        raise CorruptError(
            f"{ranks[rank].name} and {file.name} are both of rank {rank}", where=file.parent, hint="Keep one of them."
        )
    ranks[rank] = file


def _checked(folder: Folder) -> Folder:
    """The folder, if no rank is missing. Numbers in file names may be huge: no table of all ranks is built."""
    if not 0 < folder.world <= MAX_RANKS:
        raise UnsafeError(f"the names of the files state {folder.world:,} ranks", where=folder.path)
    for role, ranks in folder.files.items():
        if (highest := max(ranks)) >= folder.world:
            raise CorruptError(
                f"{ranks[highest].name} is of rank {highest}, but there are {folder.world} ranks",
                where=folder.path,
                hint=_COPY,
            )
        if len(ranks) < folder.world:
            absent = next(rank for rank in range(folder.world) if rank not in ranks)
            name = _name_at(next(iter(ranks.values())).name, absent)
            raise IncompleteError(
                f"the {role} file of rank {absent}, {printable(name)}, is missing ({len(ranks)} of {folder.world} "
                "are here)",
                where=folder.path,
                hint=_COPY,
            )
    if "model" not in folder.files:
        raise IncompleteError("the model's files are missing", where=folder.path, hint=_COPY)
    ordered = {role: dict(sorted(folder.files[role].items())) for role in _ORDER if role in folder.files}
    return Folder(folder.path, folder.world, ordered, folder.notices)
