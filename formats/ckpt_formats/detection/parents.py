"""The checkpoint that is meant by a folder which is none itself, and holds one or several.

The one in it; of several, the one that a pointer names (`latest`, `latest_checkpointed_iteration.txt`), or the
newest of Hugging Face's Trainer. Of others nobody knows which is meant.
"""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt_formats.core.errors import Incomplete, NotFound
from ckpt_formats.core.files import open_regular
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable

POINTERS = (
    "latest",
    "latest_universal",
    "latest_checkpointed_iteration.txt",
    "last_checkpoint",
    "latest_checkpoint.txt",
)
_MAX_FOLDERS = 2_000
_MAX_NAMED = 8
_MAX_POINTER = 4096
_OF_TRAINER = re.compile(r"checkpoint-(\d{1,15})")
_NUMBERS = re.compile(r"\d{1,15}")


def find_inside(path: Path, is_checkpoint: Callable[[Path], bool]) -> tuple[Path, Notice] | None:
    """The checkpoint that is meant, and what to tell of the choice; None if the folder holds none.

    Raises `NotFound` if there are several and nothing says which, or a pointer is no file;
    `Incomplete` if a pointer names none of them.
    """
    folders = _folders(path)
    names = {folder.name for folder in folders}
    links = {one.name for one in folders if one.is_symlink() and Path(os.path.realpath(one)).name in names - {one.name}}
    inside = [folder for folder in folders if folder.name not in links and is_checkpoint(folder)]
    if not inside:
        return None
    named = _named_by_pointer(path)
    if named is not None:
        pointer, name = named
        chosen = next((folder for folder in inside if _is_called(folder.name, name)), None)
        if chosen is None:
            raise Incomplete(
                f"`{pointer}` names {printable(name)!r}, which is not among the checkpoints here: {_listed(inside)}",
                where=printable(str(path)),
                hint="Name one of them.",
            )
        return chosen, Notice(
            f"of {len(inside)} checkpoints here, {printable(chosen.name)} is read, as `{pointer}` says"
        )
    if len(inside) == 1:
        text = f"{printable(inside[0].name)} is read, the one checkpoint in the folder"
        return inside[0], Notice(text, weight=Weight.UNSURE)
    inside.sort(key=lambda folder: _age(folder))
    if all(_OF_TRAINER.fullmatch(folder.name) for folder in inside):
        newest = inside[-1]
        text = f"of {len(inside)} checkpoints here, {printable(newest.name)} is read, the newest"
        return newest, Notice(text, weight=Weight.UNSURE)
    raise NotFound(
        f"holds {len(inside)} checkpoints: {_listed(inside)}", where=printable(str(path)), hint="Name one of them."
    )


def _folders(path: Path) -> list[Path]:
    try:
        with os.scandir(path) as entries:
            found = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
    except OSError:
        return []
    return [path / name for name in sorted(found)[:_MAX_FOLDERS]]


def _named_by_pointer(path: Path) -> tuple[str, str] | None:
    for pointer in POINTERS:
        if (path / pointer).is_symlink() and (path / pointer).is_dir():
            return pointer, Path(os.path.realpath(path / pointer)).name
        if not (path / pointer).exists():
            continue
        with open_regular(path / pointer) as file:
            name = file.read(_MAX_POINTER).decode("utf-8", "replace").strip()
        return pointer, Path(name).name
    return None


def _is_called(folder: str, name: str) -> bool:
    """Is this the folder that a pointer names, in full or by the number of the step?"""
    if folder == name:
        return True
    numbers = _NUMBERS.findall(folder)
    return name.isascii() and name.isdecimal() and len(name) < 16 and len(numbers) == 1 and int(numbers[0]) == int(name)


def _age(folder: Path) -> tuple[list[int], float, str]:
    """What sorts the newest last: the numbers in the name, then the time."""
    return [int(number) for number in _NUMBERS.findall(folder.name)], folder.stat().st_mtime, folder.name


def _listed(folders: Sequence[Path]) -> str:
    names = [printable(folder.name) for folder in sorted(folders, key=_age)]
    more = f"{len(names) - _MAX_NAMED:,} others, " if len(names) > _MAX_NAMED else ""
    return more + ", ".join(names[-_MAX_NAMED:])
