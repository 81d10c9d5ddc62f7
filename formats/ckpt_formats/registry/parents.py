"""The checkpoint that is meant by a folder which contains one or several checkpoints.

If there is one, that one; of several, the one that a pointer names (`latest`, `latest_checkpointed_iteration.txt`),
or the newest one of Hugging Face's Trainer. All other cases are errors.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt_formats.core.claims import MAX_POINTER
from ckpt_formats.core.errors import CkptError, IncompleteError, NotFoundError
from ckpt_formats.core.files import open_regular
from ckpt_formats.core.folders import MAX_ENTRIES, entries_of
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import printable
from ckpt_formats.registry.endings import SINGLE_UNIVERSAL

POINTERS = (
    "latest",
    "latest_universal",
    "latest_checkpointed_iteration.txt",
    "last_checkpoint",
    "latest_checkpoint.txt",
)
_MAX_FOLDERS = 2_000
_MAX_NAMED = 8
_OF_TRAINER = re.compile(r"checkpoint-(\d{1,15})")
_NUMBERS = re.compile(r"\d{1,15}")


def find_inside(path: Path, is_checkpoint: Callable[[Path], bool]) -> tuple[Path, Notice] | None:
    """The checkpoint that is meant, and a notice about the choice; None if the folder contains none.

    Raises `NotFoundError` if there are several and nothing states which one, or if a pointer is not a file;
    `IncompleteError` if a pointer names none of them.
    """
    inside = all_inside(path, is_checkpoint)
    if not inside:
        return None
    pointed = _read_pointer(path)
    if pointed is not None:
        pointer, name = pointed
        chosen = next((folder for folder in inside if _matches_pointer(folder.name, name)), None)
        if chosen is None:
            raise IncompleteError(
                f"`{pointer}` names {printable(name)!r}, which is none of the checkpoints here: {list_names(inside)}",
                where=printable(str(path)),
                hint="Name one of them.",
            )
        return chosen, Notice(
            f"of {len(inside)} checkpoints here, {printable(chosen.name)} is read, because `{pointer}` names it"
        )
    if len(inside) == 1:
        text = f"{printable(inside[0].name)} is read, the only checkpoint in the folder"
        return inside[0], Notice(text, weight=Weight.UNSURE)
    if all(_OF_TRAINER.fullmatch(folder.name) for folder in inside):
        newest = inside[-1]
        text = f"of {len(inside)} checkpoints here, {printable(newest.name)} is read, the newest"
        return newest, Notice(text, weight=Weight.UNSURE)
    raise NotFoundError(
        f"holds {len(inside)} checkpoints: {list_names(inside)}",
        where=printable(str(path)),
        hint="Name one of them; `ckpt inspect` lists them all.",
    )


def all_inside(path: Path, is_checkpoint: Callable[[Path], bool]) -> list[Path]:
    """All checkpoints directly in a folder, the newest last. A link to one of them is none of its own."""
    inside = [place for place in places_in(path) if is_checkpoint(place)]
    return sort_by_age(inside)


def sort_by_age(paths: Sequence[Path]) -> list[Path]:
    """The paths by the numbers in their names, then by time: the newest last.

    If several have the same numbers, such as `global_step5` and `global_step5_universal`, the one that a file such as
    `latest` names is the newest of them.
    """
    ordered = sorted(paths, key=_age_key)
    if len({tuple(_numbers(path.name)) for path in ordered}) == len(ordered):
        return ordered
    try:
        named = named_by_pointer(ordered[0].parent, ordered)
    except CkptError:  # commands that read what it names say what is wrong with it
        return ordered
    return sorted(ordered, key=lambda path: (_numbers(path.name), path == named))


def has_pointer(path: Path) -> bool:
    """Whether a file in the folder says which of the checkpoints in it is the last."""
    return any((path / pointer).exists() for pointer in POINTERS)


def pointer_in(path: Path) -> str | None:
    """The name of the file or link in a folder that says which checkpoint is the last; None if there is none."""
    pointed = _read_pointer(path)
    return None if pointed is None else pointed[0]


def named_by_pointer(path: Path, inside: Sequence[Path]) -> Path | None:
    """The checkpoint that a file such as `latest` names as the last, whole or not; None if no file names one."""
    pointed = _read_pointer(path)
    return None if pointed is None else next((one for one in inside if _matches_pointer(one.name, pointed[1])), None)


def all_named_by_pointers(path: Path, inside: Sequence[Path]) -> set[Path]:
    """The checkpoints that any file or link in a folder names, as `latest` does."""
    names = {name for pointer in POINTERS if (name := _named_in(path / pointer)) is not None}
    if not is_remote(path):
        names |= {Path(os.path.realpath(one)).name for one in path.iterdir() if one.is_symlink()}
    return {one for one in inside if any(_matches_pointer(one.name, name) for name in names)}


def share_prefix(paths: Sequence[Path]) -> bool:
    """Whether names differ only in the number at their ends, as those of the steps of one run do."""
    prefixes = {re.sub(r"\d+$", "", path.name) for path in paths}
    return len(prefixes) == 1 and all(path.name[-1:].isdigit() for path in paths)


def places_in(path: Path) -> list[Path]:
    """Folders and single files of the universal format in a folder, at most the newest `_MAX_FOLDERS`.

    Hidden ones are left out, and links to one of the others.
    """
    try:
        names = {
            entry.name: entry.is_symlink()
            for entry, _ in zip(entries_of(path), range(MAX_ENTRIES), strict=False)
            if not entry.name.startswith(".") and (entry.is_dir() or entry.name.endswith(SINGLE_UNIVERSAL))
        }
    except OSError:
        return []
    links = {
        name
        for name, is_link in names.items()
        if is_link and Path(os.path.realpath(path / name)).name in names.keys() - {name}
    }
    in_order = sorted(names.keys() - links, key=lambda name: (_numbers(name), name))
    return [path / name for name in in_order[-_MAX_FOLDERS:]]


def number_in(name: str) -> int | None:
    """The last number in a name; None if it has none."""
    numbers = _numbers(name)
    return numbers[-1] if numbers else None


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBERS.findall(name)]


def _read_pointer(path: Path) -> tuple[str, str] | None:
    """The first of the files that name a checkpoint, and the name in it."""
    return next(((one, name) for one in POINTERS if (name := _named_in(path / one)) is not None), None)


def _named_in(pointer: Path) -> str | None:
    """The name of the checkpoint that a file or a link names; None if it is not there."""
    if pointer.is_symlink() and pointer.is_dir():
        return Path(os.path.realpath(pointer)).name
    if not pointer.exists():
        return None
    with open_regular(pointer) as file:
        return Path(file.read(MAX_POINTER).decode("utf-8", "replace").strip()).name


def _matches_pointer(folder: str, name: str) -> bool:
    """Whether a pointer names this folder, by its full name or by the number of the step."""
    if folder == name:
        return True
    return name.isascii() and name.isdecimal() and len(name) < 16 and _numbers(folder) == [int(name)]


def _age_key(folder: Path) -> tuple[list[int], float, str]:
    """A key that sorts the newest folder last: the numbers in the name, then the time."""
    try:
        time = folder.stat().st_mtime
    except FileNotFoundError:  # a link to nothing, or a step that its run has removed since it was listed
        time = 0.0
    return _numbers(folder.name), time, folder.name


def list_names(folders: Sequence[Path]) -> str:
    """The names of checkpoints, the newest last; of many, only the last ones."""
    names = [printable(folder.name) for folder in sorted(folders, key=_age_key)]
    omitted = f"{len(names) - _MAX_NAMED:,} others, " if len(names) > _MAX_NAMED else ""
    return omitted + ", ".join(names[-_MAX_NAMED:])
