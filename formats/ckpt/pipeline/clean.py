"""Remove what an interrupted job left of a target. A complete target stays as it is."""

from dataclasses import dataclass
from pathlib import Path

from ckpt.pipeline.folder_staging import FolderStaging, locked_folder, staging_folder
from ckpt_formats.core.store_path import StorePath


@dataclass(frozen=True)
class Removed:
    """What was removed."""

    files: int
    nbytes: int
    uploads: int | None = 0
    """Uploads in parts that were not complete; None if there may be such parts, and ckpt cannot remove them."""


def clean(target: Path) -> Removed:
    """Remove what interrupted jobs left of a target. Raises `Locked` while a job writes it, and `OutputError`."""
    if isinstance(target, StorePath):
        return _clean_store(target)
    folder = staging_folder(target)
    if not folder.is_dir():
        return Removed(0, 0)
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    with locked_folder(folder, target):
        FolderStaging(target, folder).discard()
    return Removed(len(sizes), sum(sizes))


def _clean_store(target: StorePath) -> Removed:
    from ckpt.pipeline.store_staging import open_store
    from ckpt_formats.stores.uploads import abort_uploads

    files = nbytes = 0
    for single_file in (False, True):
        with open_store(target, None, locks=True, single_file=single_file) as stage:
            removed = stage.remove()
        files += len(removed)
        nbytes += sum(one.nbytes for one in removed.values())
    return Removed(files, nbytes, abort_uploads(target.store.url, target.key, target.key))
