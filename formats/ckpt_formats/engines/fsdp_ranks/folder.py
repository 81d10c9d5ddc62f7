"""Which files a job left in a folder, by rank. Names only; nothing is opened.

verl            {model,optim,extra_state}_world_size_<W>_rank_<R>.pt
Accelerate      pytorch_model_fsdp[_<I>]_rank<R>.bin, optimizer[_<I>]_rank<R>.bin, random_states_<R>.pkl

scripts         anything with `rank<R>` in its name, such as checkpoint_rank0.pt: see `own_names`

<I> numbers the models of one run; the second and later ones are told, not read.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_formats.core.errors import Corrupt, Incomplete, Unsafe, Unsupported
from ckpt_formats.core.files import unreadable
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable

MOST_RANKS = 1 << 16

_SIZED = re.compile(r"(model|optim|extra_state)_world_size_(\d{1,9})_rank_(\d{1,9})\.pt")
_COUNTED = re.compile(r"(pytorch_model_fsdp|optimizer)(?:_(\d{1,9}))?_rank(\d{1,9})\.bin")
_RANDOM = re.compile(r"random_states_(\d{1,9})\.pkl")
_ENDINGS = (".pt", ".pth", ".bin", ".ckpt")
_OF_SCRIPT = re.compile(r"(.*?)(?<![a-z])ranks?[_-]?(\d{1,6})((?:[._-]\w+)?\.(?:pt|pth|bin|ckpt))", re.IGNORECASE)
_OF_WORLD = re.compile(r"[_-]of[_-]?(\d{1,6})\.")
_RANK = re.compile(r"((?:ranks?|states)[_-]?)(\d{1,9})(?!.*rank)", re.IGNORECASE)
_OPTIMIZER = re.compile(r"optim", re.IGNORECASE)
_EXTRA = re.compile(r"rng|random|sched|loader|sampler|extra|scaler|seed|log|metric|profil|trace|memory", re.IGNORECASE)
_MARKS = (".metadata", "config.json", "common.pt", "manifest.json", "latest", "model_index.json")
_MARKED = (".distcp", ".safetensors", "_model_states.pt", ".metadata")
"""What others' checkpoints have, in whose folders a rank's file is something beside."""
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


def own_names(names: Iterable[str]) -> dict[str, dict[tuple[str, str], dict[int, str]]]:
    """Files that a script named by rank: by role, by what is before and behind the rank in the name, then by rank."""
    found: dict[str, dict[tuple[str, str], dict[int, str]]] = {}
    for name in names:
        if match := _OF_SCRIPT.fullmatch(name):
            said = f"{match[1]}{match[3]}"
            role = "optimizer" if _OPTIMIZER.search(said) else "extra" if _EXTRA.search(said) else "model"
            found.setdefault(role, {}).setdefault((match[1], match[3]), {})[int(match[2])] = name
    return found


def holds_own_names(names: Collection[str]) -> bool:
    """Are a script's files of ranks all that there is of a model among these names?"""
    if any(name in _MARKS or name.endswith(_MARKED) for name in names):
        return False
    models = own_names(names).get("model", {})
    others = [name for name in names if name.endswith(_ENDINGS) and not _OF_SCRIPT.fullmatch(name)]
    return any(0 in ranks and (len(ranks) > 1 or not others) for ranks in models.values())


def _name_at(name: str, rank: int) -> str:
    """What the file of another rank is called, by the name of one rank's."""
    return _RANK.sub(lambda match: match[1] + str(rank).zfill(len(match[2]) if match[2][0] == "0" else 0), name)


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
            f"{printable(next(iter(sized)))} and {printable(next(iter(counted)))} are of two ways of saving",
            where=path,
            hint="Two runs were saved into one folder: separate them.",
        )
    if sized:
        return _sized(path, sized)
    if not counted:
        return _checked(_of_script(path, own_names(names)))
    return _counted(path, counted, {name: match for name in names if (match := _RANDOM.fullmatch(name))})


def _of_script(path: Path, found: Mapping[str, Mapping[tuple[str, str], Mapping[int, str]]]) -> Folder:
    """The files of a script's own naming. Raises `Unsupported` if they are of several checkpoints."""
    if len(models := found.get("model", {})) > 1:
        firsts = ", ".join(printable(next(iter(ranks.values()))) for ranks in list(models.values())[:_MOST_NAMED])
        raise Unsupported(
            f"files of ranks are here under several names: {firsts}",
            where=path,
            hint="Put those of one step, with the same name but for the rank, into a folder of their own.",
        )
    files = {
        role: {rank: path / name for rank, name in next(iter(sets.values())).items()}
        for role, sets in found.items()
        if len(sets) == 1
    }
    stated = {int(match[1]) for _, tail in models if (match := _OF_WORLD.match(tail))}
    counted = 1 + max((rank for role, ranks in files.items() if role != "extra" for rank in ranks), default=0)
    return Folder(path, max(stated, default=counted), files)


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
            name = _name_at(next(iter(ranks.values())).name, absent)
            raise Incomplete(
                f"the {role} file of rank {absent}, {printable(name)}, is missing ({len(ranks)} of {folder.world} "
                "are here)",
                where=folder.path,
                hint=_COPY,
            )
    if "model" not in folder.files:
        raise Incomplete("the model's files are missing", where=folder.path, hint=_COPY)
    ordered = {role: dict(sorted(folder.files[role].items())) for role in _ORDER if role in folder.files}
    return Folder(folder.path, folder.world, ordered, folder.notices)
