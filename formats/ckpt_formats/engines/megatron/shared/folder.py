"""Which files a Megatron checkpoint has. Names only; nothing is opened.

    RUN/latest_checkpointed_iteration.txt      `1000`, or `release`
    RUN/iter_0001000/mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt [, distrib_optim.pt]     legacy `torch`
    RUN/iter_0001000/.metadata, common.pt, metadata.json, __0_0.distcp, ...             `torch_dist`

PPP is there only with more than one pipeline stage, EEE only with more than one
expert-parallel rank, so what a single number after TT means only the arguments tell.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import Corrupt, Incomplete, NotFound
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
_MAX_POINTER_BYTES = 4096


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
    """Does this folder hold one folder for each rank?"""
    try:
        return path.is_dir() and any(
            _RANK.fullmatch(entry.name) and (entry / MODEL_FILE).is_file() for entry in path.iterdir()
        )
    except OSError:
        return False


def is_dist(path: Path) -> bool:
    """Is this folder a distributed checkpoint with Megatron's own files beside?"""
    try:
        return all((path / name).is_file() for name in (METADATA, COMMON_FILE, CONTAINER_FILE))
    except OSError:
        return False


def missing_dist_files(path: Path) -> list[str]:
    """The files that a distributed checkpoint of Megatron's lacks, if others of its own show that it is one."""
    present = {name for name in (METADATA, COMMON_FILE, CONTAINER_FILE) if (path / name).is_file()}
    missing = sorted({METADATA, COMMON_FILE, CONTAINER_FILE} - present)
    return missing if present - {METADATA} else []


def is_iteration(path: Path) -> bool:
    return is_legacy(path) or is_dist(path)


def is_of_kind(path: Path, kind: Callable[[Path], bool]) -> bool:
    """Is this an iteration of this kind, or a folder of several, the latest of which is?"""
    try:
        return kind(path) or ((path / POINTER).is_file() and kind(path / _latest(path)))
    except Exception:  # detection never raises
        return False


def is_broken_run(path: Path) -> bool:
    """Does the run's pointer name a distributed checkpoint that lacks some of Megatron's own files?"""
    try:
        return (path / POINTER).is_file() and bool(missing_dist_files(path / _latest(path)))
    except Exception:  # detection never raises
        return False


def iteration_of(path: Path) -> Path:
    """The folder of one iteration: the path itself, or the one that the run's pointer names."""
    if is_iteration(path):
        return path
    folder = path / _latest(path)
    if not is_iteration(folder) and (missing := missing_dist_files(folder)):
        raise Incomplete(
            f"an incomplete checkpoint of Megatron core: {' and '.join(missing)} missing",
            where=folder,
            hint="Copy all files of the iteration's folder, also those whose names begin with a dot.",
        )
    if not is_iteration(folder):
        raise NotFound(f"`{POINTER}` names {folder.name!r}, which is no checkpoint", where=path / POINTER)
    return folder


def rank_folders(path: Path) -> list[RankFolder]:
    """The ranks' folders, sorted by their numbers. Raises `Corrupt` if two claim the same ones."""
    folders: dict[tuple[int, ...], RankFolder] = {}
    try:
        names = sorted(entry.name for entry in path.iterdir())
    except OSError as error:
        raise unreadable(error, path) from error
    for name in names:
        if (match := _RANK.fullmatch(name)) and (path / name).is_dir():
            numbers = tuple(int(part) for part in match.groups() if part is not None)
            if numbers in folders:
                raise Corrupt(f"{folders[numbers].path.name} and {name} are both of one rank", where=path)
            folders[numbers] = RankFolder(path / name, numbers)
    return [folders[numbers] for numbers in sorted(folders)]


def _latest(path: Path) -> str:
    """The name of the folder that the run's pointer names."""
    pointer = path / POINTER
    try:
        with unrecorded(), open_regular(pointer) as file:
            text = file.read(_MAX_POINTER_BYTES + 1).decode("utf-8", "replace").strip()
    except OSError as error:
        raise unreadable(error, pointer) from error
    if text == "release":
        return text
    if not text.isascii() or not text.isdecimal() or len(text) > 18:
        raise Corrupt(f"`{POINTER}` holds {printable(text[:60])!r}, not the number of an iteration", where=pointer)
    return f"iter_{int(text):07d}"


def folder_of(iteration: int | None) -> str:
    """The name of an iteration's folder; without a number it is a release."""
    return "release" if iteration is None else f"iter_{iteration:07d}"


def point_to(run: Path, folder: str) -> None:
    """Write the run's pointer, which makes its folder a checkpoint."""
    draft = run / f"{POINTER}.tmp"
    draft.write_text(folder if folder == "release" else str(int(folder.removeprefix("iter_"))))
    os.replace(draft, run / POINTER)
