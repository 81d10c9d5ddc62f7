"""Files in the folder of a checkpoint that its reader did not read: one rule for all formats."""

import os
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.folders import entries_of, is_harmless
from ckpt_formats.core.notices import Notice, Weight

UNREAD = "in the folder of the checkpoint, and not read"
OTHER_CHECKPOINTS = "other checkpoints of the folder, which are not read"

_NUMBER = re.compile(r"\d+")
_MAX_ENTRIES = 500_000
"""Limit of the entries of folders that are read."""
_MAX_UNREAD = 10_000
"""Limit of the names in notices."""


def unread(path: Path, files: Iterable[Path], named: Collection[str] = ()) -> Iterator[Notice]:
    """Notices that name what is in the folder `path` but not in `files`, the files that the reader read.

    A folder without any of these files is named, but not opened. Names in `named`, with or without
    their folders, are left out, because the user knows them already.
    """
    read = {_parts(path, file) for file in files}
    around = {parts[:depth] for parts in read for depth in range(len(parts))}
    known = {name.rstrip("/") for name in named}
    other_checkpoints: list[str] = []
    unread_names: list[str] = []
    for parts, is_folder in _entries(path, around):
        if parts in read or parts in around or is_harmless(parts[-1]):
            continue
        if parts[-1] in known or "/".join(parts) in known or _is_empty(path.joinpath(*parts)):
            continue
        if len(other_checkpoints) + len(unread_names) == _MAX_UNREAD:
            break
        name = "/".join(parts) + ("/" if is_folder else "")
        (other_checkpoints if is_folder and _is_other_checkpoint(parts, around) else unread_names).append(name)
    if unread_names:
        yield Notice(UNREAD, tuple(unread_names), Weight.LOST)
    if other_checkpoints:
        yield Notice(OTHER_CHECKPOINTS, tuple(other_checkpoints))


def _is_empty(path: Path) -> bool:
    """Whether it is an empty file. Ranks that have nothing to save write such files."""
    try:
        return path.is_file() and not path.stat().st_size
    except OSError:
        return False


def _parts(path: Path, file: Path) -> tuple[str, ...]:
    """The names from a folder to a file in it; empty for a file outside the folder."""
    relative = os.path.relpath(str(file), str(path))
    return () if relative.startswith("..") else Path(relative).parts


def _entries(path: Path, around: Collection[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """The entries of a folder and of those folders in it that are in `around`: path, and whether it is a folder."""
    pending: list[tuple[str, ...]] = [()]
    seen = 0
    while pending:
        parts = pending.pop()
        try:
            entries = zip(entries_of(path.joinpath(*parts)), range(_MAX_ENTRIES - seen), strict=False)
            here = sorted((entry.name, entry.is_dir()) for entry, _ in entries)
        except CkptError:
            raise
        except OSError:
            continue  # the reader could read what it needs
        seen += len(here)
        for name, is_folder in here:
            yield (*parts, name), is_folder
            if is_folder and (*parts, name) in around:
                pending.append((*parts, name))


def _is_other_checkpoint(parts: tuple[str, ...], around: Collection[tuple[str, ...]]) -> bool:
    """Whether a folder's name differs from one that was read only by numbers, as `step_10` from `step_20`."""
    if not _NUMBER.search(parts[-1]):
        return False
    pattern = _NUMBER.sub("0", parts[-1])
    siblings = (other for other in around if other and other[:-1] == parts[:-1])
    return any(_NUMBER.sub("0", other[-1]) == pattern for other in siblings)
