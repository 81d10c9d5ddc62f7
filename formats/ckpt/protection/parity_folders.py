"""Give folders with parity that have been written their names, put them into a store, or remove them.

In a file system, a folder appears at once, also in the place of another one. In a store, its manifest comes last.
"""

import os
import shutil
from pathlib import Path

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.place import ObjectEntry, Place
from ckpt_formats.core.publish import RenameError, exchange, flush, rename_new
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import PARTIAL
from ckpt_formats.parity.blocks import ProtectedFolder, parity_file
from ckpt_formats.parity.manifest import NAME
from ckpt_formats.stores.location import place_at


def give_name(folder: Path, base: Path, is_replaced: bool) -> None:
    """Give a folder that has grown its name, at once, also if it replaces another one.

    Where a file system cannot exchange names, the other one is moved away before: for a moment there is no parity.
    """
    if is_replaced:
        try:
            exchange(folder, base)
        except RenameError:
            aside = base.with_name(f"{base.name}.old{PARTIAL}")
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(base, aside)
            rename_new(folder, base)
            folder = aside
        shutil.rmtree(folder)
    else:
        rename_new(folder, base)
    flush(base.parent)


def upload(folder: Path, base: Path) -> None:
    """Put a folder that has grown into a store: first a copy of the manifest, which says whose all is; last its own.

    What was there before is removed, its manifest first: no store exchanges several objects at once.
    """
    remove_parity(base)
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path == folder / NAME, path.name != NAME, path)):
        _put(place_at(base), path.relative_to(folder).as_posix(), path, None)


def upload_changed(folder: Path, new: ProtectedFolder) -> None:
    """Put groups that have changed into a store, then the manifest, its own copy last.

    Until the manifest is there, the parities of these groups do not fit the earlier one; the next run computes them.
    """
    place = place_at(new.base)
    there = place.list()
    files = [path for path in folder.rglob("*") if path.is_file()]
    for path in sorted(files, key=lambda path: (path.name == NAME, path == folder / NAME, path)):
        key = path.relative_to(folder).as_posix()
        _put(place, key, path, there.get(key))
    needed = {
        *new.copies,
        *(parity_file(one, group) for one in new.places for group in range(len(new.manifest.groups))),
    }
    place.delete(there.keys() - {path.relative_to(new.base).as_posix() for path in needed})


def _put(place: Place, key: str, path: Path, there: ObjectEntry | None) -> None:
    """Put a file into a store, in the place of what a listing shows there. Raises `CorruptError`."""
    try:
        place.replace_from(key, path, there)
    except FileExistsError:
        hint = "Run the command again when no other process writes there."
        raise CorruptError("was written by another process", where=place.where(key), hint=hint) from None


def remove_parity(base: Path) -> None:
    """Remove a folder with parity, so that it is there as a whole or not at all."""
    if is_remote(base):
        place = place_at(base)
        place.delete([NAME])
        place.delete(list(place.list()))
        return
    aside = base.with_name(base.name + PARTIAL)
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(base, aside)
    shutil.rmtree(aside)


def write_whole(path: Path, data: bytes) -> None:
    """Write a file that appears whole."""
    draft = path.with_name(f"{path.name}.new")
    draft.write_bytes(data)
    flush(draft)
    os.replace(draft, path)
