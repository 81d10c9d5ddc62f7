"""Remove a checkpoint so that a crash at any moment leaves it whole, or a remainder that nothing takes for one.

In a folder it is renamed to `.NAME.ckpt-removed` first, then deleted. In a store, a note like that of a job that has
not published its target is put below it first: from the first deletion on, no reader opens what is left. `ckpt clean
NAME` and the next removal in the same folder finish both.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from ckpt.pipeline.folder_target import locked_staging
from ckpt.pipeline.job_note import JobNote
from ckpt.pipeline.target import JOB, LEASE, PUBLISHED
from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import LockedError, OutputError
from ckpt_formats.core.folders import entries_of, has_stale_sidecars, parity_of_file, replaced_file
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.place import Place
from ckpt_formats.core.publish import exchange, flush, rename_new
from ckpt_formats.core.store_path import StorePath, is_remote
from ckpt_formats.core.text import NEW, REMOVED, STAGED
from ckpt_formats.registry.listed import is_mark
from ckpt_formats.registry.published import SKEW
from ckpt_formats.registry.seal_places import place_of_file
from ckpt_formats.stores.location import place_at

_JOB, _PUBLISHED, _LEASE = (f"{STAGED}/{name}" for name in (JOB, PUBLISHED, LEASE))
_REMOVAL = f"{STAGED}/removal"
_NO_JOB = "removal"


def remove_checkpoint(path: Path) -> None:
    """Remove the file or folder at a path, which must exist. Raises `OutputError`."""
    try:
        if is_remote(path):
            _remove_from_store(path)
        else:
            aside = set_aside_path(path)
            delete(aside)
            _finish_replacement(path)
            delete_beside(path)  # first: after a kill, another file of this name may be there before it is finished
            rename_new(path, aside)
            flush(path.parent)
            delete(aside)
    except OSError as error:
        raise unwritable(error, path) from error


def is_removable(path: Path) -> bool:
    """Has a checkpoint a name to which the suffix of its removal can be added?"""
    if is_remote(path):
        return True
    return len(os.fsencode(set_aside_path(path).name)) <= os.pathconf(path.parent, "PC_NAME_MAX")


def set_aside_path(path: Path) -> Path:
    """Where a checkpoint is while it is removed."""
    return path.with_name(f".{path.name}{REMOVED}")


def replacement_path(target: Path) -> Path:
    """Where the checkpoint is written that will replace a target. It has the target's ending."""
    return target.with_name(f"{NEW}{target.name}")


def finish_removals(folder: Path) -> list[str]:
    """Finish the removals that were interrupted in a folder. Returns the names of the checkpoints.

    What a removal left of a checkpoint that a job writes now stays.
    """
    finished = list[str]()
    for name in list(_interrupted(folder)):
        with suppress(LockedError):
            finish_removal(folder / name)
            finished.append(name)
    return finished


def finish_removal(path: Path) -> tuple[int, int]:
    """Delete what an interrupted removal or replacement left. Returns the numbers of files and bytes.

    Raises `LockedError` while a job writes the target, and `OutputError`.
    """
    try:
        if is_remote(path):
            return _finish_in_store(path)
        aside, new = set_aside_path(path), replacement_path(path)
        if not any(map(os.path.lexists, (replaced_file(path), new))):
            return _counted_removal(aside)  # nobody gives it a name again
        with locked_staging(path, locks=False):  # or what another process is about to give the name would go
            _finish_replacement(path)
            counts = [_counted_removal(left) for left in (aside, new)]
        files, nbytes = (sum(numbers) for numbers in zip(*counts, strict=True))
        return files, nbytes
    except OSError as error:
        raise unwritable(error, path) from error


def _counted_removal(left: Path) -> tuple[int, int]:
    """Delete a file or folder, if it is there. Returns the numbers of files and bytes."""
    own = [left] if left.is_file() else [one for one in left.rglob("*") if one.is_file()]
    nbytes = sum(one.lstat().st_size for one in own)
    delete(left)
    return len(own), nbytes


def _interrupted(folder: Path) -> Iterator[str]:
    for entry in entries_of(folder):
        if is_remote(folder):
            if entry.is_dir() and (folder / entry.name / _REMOVAL).is_file():
                yield entry.name
        elif entry.name.startswith(".") and entry.name.endswith(REMOVED) and len(entry.name) > len(REMOVED) + 1:
            yield entry.name[1 : -len(REMOVED)]


def delete(path: Path) -> None:
    """Delete a file or a folder, if it exists. Links are not followed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def delete_beside(path: Path) -> None:
    """Delete what lies beside a single file and is of its bytes alone: its seal file and its parity, if there are any.

    Another file of this name would be called damaged because of them, and a repair would set it back.
    """
    for own in _sidecars(path):
        delete(own)


def replace_file_or_folder(new: Path, path: Path) -> None:
    """Exchange a checkpoint with a new one, and delete it, with what lies beside it if it is a single file.

    The old file keeps that until the new one has its name. In between, a second name of the old one, which is no longer
    that at `path`, tells everybody that what lies beside the new one is not of it (`has_stale_sidecars`).

    Raises `OSError`.
    """
    _finish_replacement(path)
    old = replaced_file(path)
    if any(map(os.path.lexists, _sidecars(path))):
        try:
            os.link(path, old, follow_symlinks=False)
        except OSError:
            delete_beside(path)  # without links: a kill leaves the old file alone
        flush(path.parent)
    exchange(new, path)
    flush(path.parent)
    _finish_replacement(path)
    delete(new)


def _finish_replacement(path: Path) -> None:
    """Finish the replacement of a file, if one was interrupted."""
    if has_stale_sidecars(path):
        delete_beside(path)
        flush(path.parent)
    delete(replaced_file(path))


def _sidecars(path: Path) -> tuple[Path, Path]:
    return place_of_file(path), parity_of_file(path)


def _remove_from_store(path: StorePath) -> None:
    place = place_at(path)
    if path.is_file():
        folder, parity = place_at(path.parent), place_at(parity_of_file(path))
        folder.delete([place_of_file(path).name])
        parity.delete(parity.list())
        folder.delete([path.name])
        return
    there = place.list()
    objects = {name: one.e_tag for name, one in there.items() if not name.startswith(f"{STAGED}/")}
    note = JobNote.of(_NO_JOB, path, path, _NO_JOB, list(objects), None)
    removal = json.dumps(objects).encode()
    if max(len(removal), len(note.to_json())) > MAX_LIST:
        raise OutputError("has too many objects to be removed", where=path, hint="Remove it with the store's tools.")
    with suppress(FileExistsError):
        place.create(_REMOVAL, removal)
    with suppress(FileExistsError):
        place.create(_JOB, note.to_json())
    _delete_objects(place, objects, there)


def _finish_in_store(path: StorePath) -> tuple[int, int]:
    """Delete the objects that are still those that were there when the removal began, then its notes.

    An e_tag may be that of the bytes alone: what was put since, with the same bytes, stays.
    """
    place = place_at(path)
    read, there = place.read(_REMOVAL), place.list()
    if read is None or _REMOVAL not in there:
        return 0, 0
    try:
        stated = json.loads(read[0])
        assert isinstance(stated, dict)
    except (ValueError, RecursionError, AssertionError):
        raise OutputError("is not the note of a removal", where=place.where(_REMOVAL), hint="Remove it.") from None
    began = there[_REMOVAL].modified + SKEW
    left = {name: one for name, one in there.items() if stated.get(name) == one.e_tag and one.modified <= began}
    _delete_objects(place, left, there)
    return len(left), sum(one.nbytes for one in left.values())


def _delete_objects(place: Place, names: Mapping[str, object], there: Collection[str]) -> None:
    """Delete objects, those by which formats know a checkpoint first, and the notes of the removal last.

    `there`: the names of all that is at the place. The notes go, too, of the job that has written the checkpoint, if
    it could not remove them: before all else the one that says that what is there is whole.
    """
    marks = set(filter(is_mark, names))
    place.delete({_PUBLISHED} & set(there))
    place.delete(marks)
    place.delete(names.keys() - marks)
    place.delete([one for one in there if one.startswith(f"{STAGED}/") and one not in (_JOB, _REMOVAL, _LEASE)])
    place.delete([_JOB])
    place.delete([_REMOVAL])
