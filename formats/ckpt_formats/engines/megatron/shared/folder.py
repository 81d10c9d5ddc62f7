"""The files of a Megatron checkpoint, by their names.

    RUN/latest_checkpointed_iteration.txt      `1000`, or `release`
    RUN/iter_0001000/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt [, distrib_optim.pt]     legacy `torch`
    RUN/iter_0001000/.metadata, common.pt, metadata.json, __0_0.distcp, ...             `torch_dist`

PPP is in the name only if there are several pipeline stages, EEE only if there are several expert-parallel ranks. So
only the arguments tell what a single number after TT means.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.claims import MAX_POINTER
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, NotFoundError
from ckpt_formats.core.files import open_regular, unreadable
from ckpt_formats.core.identity import unrecorded
from ckpt_formats.core.text import printable

POINTER = "latest_checkpointed_iteration.txt"
MODEL_FILE = "model_optim_rng.pt"
OPTIMIZER_FILE = "distrib_optim.pt"
METADATA = ".metadata"
COMMON_FILE = "common.pt"
CONTAINER_FILE = "metadata.json"
ITERATION_FOLDER = re.compile(r"iter_(\d{1,18})")
_RANK = re.compile(r"mp_rank_(\d+)(?:_(\d+))?(?:_(\d+))?")


@dataclass(frozen=True)
class RankFolder:
    """The folder of one rank, and the numbers in its name."""

    path: Path
    numbers: tuple[int, ...]

    @property
    def model(self) -> Path:
        return self.path / MODEL_FILE

    @property
    def optimizer(self) -> Path | None:
        file = self.path / OPTIMIZER_FILE
        return file if file.is_file() else None


def is_legacy(path: Path) -> bool:
    """True if this folder has a folder for each rank. Never raises."""
    try:
        return path.is_dir() and any(
            _RANK.fullmatch(entry.name) and (entry / MODEL_FILE).is_file() for entry in path.iterdir()
        )
    except OSError:
        return False


def is_dist(path: Path) -> bool:
    """True if this folder is a distributed checkpoint that includes Megatron's own files. Never raises."""
    try:
        return all((path / name).is_file() for name in (METADATA, COMMON_FILE, CONTAINER_FILE))
    except OSError:
        return False


def missing_dist_files(path: Path) -> list[str]:
    """The files that a distributed checkpoint of Megatron lacks; [] if it has none of Megatron's own files."""
    present = {name for name in (METADATA, COMMON_FILE, CONTAINER_FILE) if (path / name).is_file()}
    missing = sorted({METADATA, COMMON_FILE, CONTAINER_FILE} - present)
    return missing if present - {METADATA} else []


def is_iteration(path: Path) -> bool:
    """True if this folder is the checkpoint of one iteration."""
    return is_legacy(path) or is_dist(path)


def is_of_kind(path: Path, kind: Callable[[Path], bool]) -> bool:
    """True if the folder, or the iteration that its pointer names, satisfies `kind`. Never raises."""
    try:
        return kind(path) or ((path / POINTER).is_file() and kind(path / _latest(path)))
    except Exception:  # detection never raises
        return False


def is_broken_run(path: Path) -> bool:
    """True if the run's pointer names a distributed checkpoint without some of Megatron's own files. Never raises."""
    try:
        return (path / POINTER).is_file() and bool(missing_dist_files(path / _latest(path)))
    except Exception:  # detection never raises
        return False


def iteration_of(path: Path) -> Path:
    """The folder of one iteration: the path itself, or the folder that the run's pointer names.

    Raises: IncompleteError if files of Megatron's are missing, NotFoundError if the pointer names no checkpoint.
    """
    if is_iteration(path):
        return path
    folder = path / _latest(path)
    if not is_iteration(folder) and (missing := missing_dist_files(folder)):
        raise IncompleteError(
            f"an incomplete checkpoint of Megatron core: {' and '.join(missing)} missing",
            where=folder,
            hint="Copy all files of the iteration's folder, including those whose names begin with a dot.",
        )
    if not is_iteration(folder):
        raise NotFoundError(f"`{POINTER}` names {folder.name!r}, which is not a checkpoint", where=path / POINTER)
    return folder


def rank_folders(path: Path) -> list[RankFolder]:
    """The ranks' folders, sorted by their numbers. Raises `CorruptError` if two folders have the same numbers."""
    folders: dict[tuple[int, ...], RankFolder] = {}
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except CkptError:
        raise
    except OSError as error:
        raise unreadable(error, path) from error
    for name in names:
        if (match := _RANK.fullmatch(name)) and (path / name).is_dir():
            numbers = tuple(int(part) for part in match.groups() if part is not None)
            if numbers in folders:
                raise CorruptError(f"{folders[numbers].path.name} and {name} are of the same rank", where=path)
            folders[numbers] = RankFolder(path / name, numbers)
    return [folders[numbers] for numbers in sorted(folders)]


def _latest(path: Path) -> str:
    """The name of the folder that the run's pointer names."""
    pointer = path / POINTER
    try:
        with unrecorded(), open_regular(pointer) as file:
            text = file.read(MAX_POINTER + 1).decode("utf-8", "replace").strip()
    except CkptError:
        raise
    except OSError as error:
        raise unreadable(error, pointer) from error
    if text == "release":
        return text
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise CorruptError(
            f"`{POINTER}` contains {printable(text[:60])!r}, which is not the number of an iteration", where=pointer
        )
    return f"iter_{int(text):07d}"


def folder_of(iteration: int | None) -> str:
    """The name of the folder of an iteration; `release` for None."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def point_to(run: Path, folder: str) -> None:
    """Write the run's pointer. It is written last, because it makes the run's folder a complete checkpoint."""
    draft = run / f"{POINTER}.tmp"
    draft.write_text(folder if folder == "release" else str(int(folder.removeprefix("iter_"))))
    os.replace(draft, run / POINTER)
