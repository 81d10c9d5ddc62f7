"""Whether a target in a store is published: what its objects prove, whatever else lies there.

A job notes what it does in `.ckpt`, and removes that at its end. A store may carry out a request long after it was
sent, so a note may come back when the target is published and in use. Then the files decide.
"""

import json
from pathlib import Path
from typing import Any

from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.text import STAGED
from ckpt_formats.registry.listed import is_mark

SKEW = 1.0
"""Seconds by which times of objects may differ that were put at the same time: the servers of a store have clocks."""


def is_unfinished(target: Path) -> bool:
    """Whether a job has started to write a target in a store, and has not published it."""
    staged = target / STAGED
    if not (staged / "job").is_file() or (staged / "published").is_file():
        return False
    return not is_proven_whole(target)


def is_proven_whole(target: Path) -> bool:
    """Whether the files of a target prove that it is whole, although a job is noted there.

    The last files of a target, its marks, are put after `committed`, which names all of them. So they prove it if all
    that `committed` names is there; or if `committed` is not, which only a published target has lost. In a format
    without marks, the files prove it if they are older than the job: it was put late.
    """
    staged = target / STAGED
    there = {
        path.relative_to(target).as_posix(): path
        for path in target.rglob("*")
        if path != staged and staged not in path.parents and path.is_file()
    }
    planned = stated_files(_note(staged / "job"))
    if (staged / "committed").is_file():
        stated = _note(staged / "committed")
        last, sizes = stated_files(stated), stated.get("nbytes")
        if not last or not all(name in there for name in (*planned, *last)):
            return False
        if not isinstance(sizes, list):  # by an earlier version
            return True
        return [there[name].stat().st_size for name in last] == sizes
    if any(is_mark(name) and name not in planned for name in there):
        return True
    noted = (staged / "job").stat().st_mtime
    return bool(planned) and all(name in there and there[name].stat().st_mtime < noted - SKEW for name in planned)


def _note(path: Path) -> dict[str, Any]:
    """The fields of a note; none if it is not there, or not of ckpt. Raises if the store does not say."""
    if not path.is_file() or path.stat().st_size > MAX_LIST:
        return {}
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def stated_files(fields: dict[str, Any]) -> list[str]:
    """The names of the files that a note states; none if it states no list."""
    files = fields.get("files")
    return [name for name in files if isinstance(name, str)] if isinstance(files, list) else []
