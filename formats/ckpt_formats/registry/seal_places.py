"""Where the seal files of a checkpoint lie: found without reading any, since few checkpoints have one."""

from collections.abc import Set
from pathlib import Path

from ckpt_formats.core.folders import SEAL_SUFFIX, entries_of, has_stale_sidecars
from ckpt_formats.core.store_path import is_remote

IN_FOLDER = f"checkpoint{SEAL_SUFFIX}"
"""The seal file of a folder. That of a file has the file's name with the suffix, and lies next to it."""


def place_of(path: Path) -> Path:
    """Where the seal file of a checkpoint is, or would be. `path`: a file or a folder."""
    return place_of_file(path) if path.is_file() else path / IN_FOLDER


def place_of_file(file: Path) -> Path:
    """Where the seal file of a single file is, or would be, whether the file is there or not."""
    return file.with_name(file.name + SEAL_SUFFIX)


def seal_files_of(own: Set[Path], path: Path) -> list[Path]:
    """The seal files that exist for a checkpoint at `path`, whose files are `own`."""
    if not path.is_dir():
        return places_of_file(path)
    # Folders are listed: asking for the seal file of each file would take as many calls as there are ranks.
    folders = dict.fromkeys((path, *(file.parent for file in own if file != path)))
    listed = sorted(one for folder in folders for one in _seal_files_in(folder))
    whole = path / IN_FOLDER
    sealed = {one: one.with_name(one.name.removesuffix(SEAL_SUFFIX)) for one in listed if one != whole}
    of_files = [one for one, file in sealed.items() if file in own and not has_stale_sidecars(file)]
    return [whole, *of_files] if whole in listed else of_files


def places_of_file(path: Path) -> list[Path]:
    """The seal files that exist for a single file: that of its folder, and its own."""
    places = (path.parent / IN_FOLDER, place_of_file(path))
    if is_remote(path):
        # The listing is needed in any case, to find other parts. Without the right to it, objects are requested.
        names = {entry.name for entry in entries_of(path.parent)} if path.parent.key else set[str]()
        if names - {path.name}:
            return [place for place in places if place.name in names]
    return [place for place in places if place.is_file() and not (place == places[1] and has_stale_sidecars(path))]


def _seal_files_in(folder: Path) -> list[Path]:
    try:
        entries = [one for one in entries_of(folder) if one.name.endswith(SEAL_SUFFIX) and one.is_file()]
    except OSError:
        return []
    return [folder / one.name for one in entries]
