"""Locate a checkpoint of Orbax: the folder of a tree, of a step with several items, or of a run with several steps.

_METADATA, manifest.ocdbt, d/            a tree of arrays, in one database
_METADATA, params.kernel/.zarray, 0.0    a tree of arrays, each in a folder of its own
_CHECKPOINT_METADATA                     a step; its items are folders beside the file, or the step is the tree
checkpoint                               a tree in MessagePack, of old versions; its arrays inside or in folders beside
42/, step_42/                            the steps of a run
tensorstore_index.json                   a step of EasyDeL, whose arrays are in nested folders
node-0/process_metadata, node-1/...      what each process of one step wrote, if it wrote to a disk of its own
42.orbax-checkpoint-tmp-1700000000       a save that did not finish
commit_success.txt                       in buckets, where nothing can be renamed: the save is complete
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_formats.containers.ocdbt import MANIFEST
from ckpt_formats.containers.zarr import METADATA
from ckpt_formats.core.errors import CkptError, IncompleteError, NotFoundError
from ckpt_formats.core.files import unreadable
from ckpt_formats.core.folders import entries_of, names_in
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import printable
from ckpt_formats.engines.orbax.aggregate import has_aggregate
from ckpt_formats.engines.orbax.indexed import INDEX, has_index
from ckpt_formats.engines.orbax.metadata import COMMITTED, OF_PROCESS, PROCESSES, STEP, TREE, read_step

UNFINISHED = ".orbax-checkpoint-tmp"
_STEP_NAME = re.compile(r"(?:[A-Za-z][\w-]*?[_-])?(\d{1,15})")


@dataclass(frozen=True)
class StepFolder:
    """The checkpoint of one step: its folder, and those of its items by name. An item without a name is the folder."""

    folder: Path
    items: dict[str, Path]
    handlers: dict[str, str]
    step: int | None = None
    shards: tuple[Path, ...] = ()
    """The folders of the processes, if each wrote its part of the step into one of its own; `folder` has them."""
    notices: tuple[Notice, ...] = ()


def is_checkpoint(path: Path) -> bool:
    """Is there a checkpoint of Orbax, complete or not, or are there several steps of one run? Never raises."""
    try:
        return path.is_dir() and (_is_step(path) or bool(_steps(path)) or bool(_shards(path)))
    except CkptError:
        raise
    except OSError:
        return False


def is_run(path: Path) -> bool:
    """Whether a folder has the steps of a run, and is none itself."""
    return not _is_step(path) and not _shards(path) and bool(_steps(path))


def find(path: Path) -> StepFolder:
    """The checkpoint at a path; of several steps, the newest complete one.

    Raises `IncompleteError` if the save did not finish, `NotFoundError` if there is none.
    """
    try:
        if _is_step(path):
            return _step_at(path)
        return _gathered(path, shards) if (shards := _shards(path)) else _newest(path)
    except CkptError:
        raise
    except OSError as error:
        raise unreadable(error, path) from error


def is_tree(folder: Path) -> bool:
    """Whether a folder has the arrays of a tree."""
    return any((folder / name).is_file() for name in (TREE, MANIFEST)) or has_aggregate(folder) or _has_arrays(folder)


def _has_arrays(folder: Path) -> bool:
    """Whether folders in it are arrays of zarr. The names tell where there are many."""
    inside = (entry.name for entry in entries_of(folder) if entry.is_dir())
    return any((folder / name / metadata).is_file() for name in inside for metadata in METADATA)


def _is_step(path: Path) -> bool:
    return (path / STEP).is_file() or has_index(path) or is_tree(path)


def _step_at(path: Path) -> StepFolder:
    match = _STEP_NAME.fullmatch(path.name)
    number = int(match[1]) if match else None
    if has_index(path):
        return StepFolder(path, {"": path}, {}, number)
    metadata = read_step(path)
    if UNFINISHED in path.name:
        raise _unfinished(path, f"Orbax removes `{UNFINISHED}` from the name when it is done")
    if metadata is not None and not metadata.is_committed:
        raise _unfinished(path, f"{STEP} has no time of a commit")
    if is_remote(path) and not (path / COMMITTED).is_file():
        raise _unfinished(path, f"there is no {COMMITTED}, which Orbax writes last")
    handlers = metadata.items if metadata is not None else {}
    items = {"": path} if is_tree(path) else dict(_items(path))
    if missing := [name for name in handlers if name and name not in items and not is_tree(path)]:
        text = f"the item `{printable(missing[0])}`, which {STEP} names, is missing"
        raise IncompleteError(text, where=path, hint="Copy all folders of the step.")
    items = {name: folder for name, folder in items.items() if name != PROCESSES} or items
    return StepFolder(path, items, handlers, number)


def _shards(path: Path) -> list[Path]:
    """The folders in a folder that have parts of one step, each of other processes; none if they are not that.

    Steps of one process have the same process's database.
    """
    folders = [path / name for name in sorted(names_in(path)) if (path / name / PROCESSES).is_dir()]
    owners: set[str] = set()
    for folder in folders:
        inside = (name for item in names_in(folder) if item != PROCESSES for name in names_in(folder / item))
        own = {name for name in inside if name.startswith(OF_PROCESS)}
        if not own or own & owners:
            return []
        owners |= own
    return folders if len(folders) > 1 else []


def _gathered(path: Path, shards: list[Path]) -> StepFolder:
    """The step whose parts several processes wrote. The items of the first one are those of all."""
    steps = [_step_at(shard) for shard in shards]
    items = steps[0].items
    if any(items.keys() != step.items.keys() for step in steps):
        raise IncompleteError("the folders of the processes have different items", where=path)
    match = _STEP_NAME.fullmatch(path.name)
    return StepFolder(path, items, steps[0].handlers, int(match[1]) if match else None, tuple(shards))


def _items(path: Path) -> Iterator[tuple[str, Path]]:
    for entry in sorted(entries_of(path), key=lambda entry: entry.name):
        if entry.is_dir():
            if UNFINISHED in entry.name:
                raise _unfinished(path / entry.name, "an item was not finished")
            yield entry.name, path / entry.name


def _steps(path: Path) -> list[tuple[int, Path]]:
    """Folders that are steps by their names and content, by their numbers, also those that were not finished."""
    steps = []
    for name in names_in(path):
        match = _STEP_NAME.fullmatch(name.partition(UNFINISHED)[0])
        if match is not None and _is_step_of_run(path / name):
            steps.append((int(match[1]), path / name))
    return sorted(steps)


def _is_step_of_run(path: Path) -> bool:
    """Whether it is a step, or has an item by a usual name: old versions wrote no metadata of steps."""
    if not path.is_dir():
        return False
    items = (f"{item}/{TREE}" for item in ("default", "state", "items", "params", "pytree"))
    is_named = any((path / name).is_file() for name in (STEP, TREE, MANIFEST, INDEX, *items))
    return UNFINISHED in path.name or is_named or has_aggregate(path)


def _newest(path: Path) -> StepFolder:
    steps = _steps(path)
    later: list[str] = []
    for _, folder in reversed(steps):
        try:
            step = _step_at(folder)
        except IncompleteError:
            later.append(printable(folder.name))
            continue
        notices = []
        if len(steps) > 1:
            notices.append(Notice(f"{printable(folder.name)} is read, the newest of {len(steps)} checkpoints here"))
        if later:
            notices.append(Notice("newer, but the save was broken off", tuple(later), Weight.UNSURE))
        return replace(step, notices=tuple(notices))
    if later:
        raise IncompleteError(f"the save was broken off: none of {', '.join(later)} is complete", where=path)
    raise NotFoundError("there is no checkpoint of Orbax here", where=path)


def _unfinished(path: Path, why: str) -> IncompleteError:
    return IncompleteError(f"the save was broken off: {why}", where=path, hint="Take an earlier checkpoint.")
