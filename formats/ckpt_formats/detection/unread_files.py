"""What lies in the folder of a checkpoint, and its reader did not read: one rule for the folders of all formats."""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from ckpt_formats.core.notices import Notice, Weight

BESIDE = "in the folder of the checkpoint, and not read"
OTHERS = "other checkpoints of the folder, which are not read"

_HARMLESS = re.compile(
    r"\..*|(readme|licen[cs]e|notice|copying)(\..*)?|.*\.(md|rst|log|lock|html|png|jpe?g|svg|gif|tmp~)"
    r"|events\.out\.tfevents\..*|__pycache__"
    r"|latest|latest_universal|latest_checkpointed_iteration\.txt|zero_to_(fp32|torch)\.py",
    re.IGNORECASE,
)
"""Texts, pictures, logs, locks, hidden files, and what points to a checkpoint: nothing is lost with them."""
_NUMBER = re.compile(r"\d+")
_MAX_ENTRIES = 500_000
"""Entries of folders that are looked at."""
_MAX_UNREAD = 10_000
"""Names that are remembered."""


def is_harmless(name: str) -> bool:
    """Is it, by its name, a file or a folder with which nothing of a checkpoint is lost?"""
    return _HARMLESS.fullmatch(name) is not None


def unread(path: Path, files: Iterable[Path], named: Collection[str] = ()) -> Iterator[Notice]:
    """What lies in the folder `path` and is not among `files`, those that the reader read.

    A folder that holds none of them is named and not opened. Names that are in
    `named`, with or without the folders around them, are known to the user already.
    """
    read = {_parts(path, file) for file in files}
    around = {parts[:depth] for parts in read for depth in range(len(parts))}
    known = {name.rstrip("/") for name in named}
    others: list[str] = []
    beside: list[str] = []
    for parts, is_folder in _entries(path, around):
        if parts in read or parts in around or is_harmless(parts[-1]):
            continue
        if parts[-1] in known or "/".join(parts) in known or _is_empty(path.joinpath(*parts)):
            continue
        if len(others) + len(beside) == _MAX_UNREAD:
            break
        name = "/".join(parts) + ("/" if is_folder else "")
        (others if is_folder and _is_another(parts, around) else beside).append(name)
    if beside:
        yield Notice(BESIDE, tuple(beside), Weight.LOST)
    if others:
        yield Notice(OTHERS, tuple(others))


def _is_empty(path: Path) -> bool:
    """Is it a file without a byte? Ranks that have nothing to save leave such files."""
    try:
        return path.is_file() and not path.stat().st_size
    except OSError:
        return False


def _parts(path: Path, file: Path) -> tuple[str, ...]:
    """The names on the way from a folder to a file in it; nothing of it that is elsewhere."""
    relative = os.path.relpath(file, path)
    return () if relative.startswith("..") else Path(relative).parts


def _entries(path: Path, around: Collection[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The entries of a folder, and of those in it that are `around` something, sorted; each with: is it a folder?"""
    waiting: list[tuple[str, ...]] = [()]
    seen = 0
    while waiting:
        parts = waiting.pop()
        try:
            with os.scandir(path.joinpath(*parts)) as entries:
                here = sorted(
                    (entry.name, entry.is_dir()) for entry, _ in zip(entries, range(_MAX_ENTRIES - seen), strict=False)
                )
        except OSError:
            continue  # the reader read what it needs
        seen += len(here)
        for name, is_folder in here:
            yield (*parts, name), is_folder
            if is_folder and (*parts, name) in around:
                waiting.append((*parts, name))


def _is_another(parts: tuple[str, ...], around: Collection[tuple[str, ...]]) -> bool:
    """Is a folder called as one that was read, but for a number: `step_10` beside `step_20`?"""
    if not _NUMBER.search(parts[-1]):
        return False
    form = _NUMBER.sub("0", parts[-1])
    beside = (one for one in around if one and one[:-1] == parts[:-1])
    return any(_NUMBER.sub("0", one[-1]) == form for one in beside)
