"""Remove what an interrupted job left of a target. A complete target stays as it is."""

import os
import shutil
from dataclasses import dataclass

from ckpt.pipeline import folder_staging
from ckpt.pipeline.folder_staging import FolderStaging, locked_folder, staging_folder
from ckpt.pipeline.shards import folder as shards_folder
from ckpt.pipeline.shards.folder import folders_of
from ckpt_formats.core.arguments import StrPath, checked
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.own_folder import check_own
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores.location import target_path


@dataclass(frozen=True)
class Removed:
    """What was removed."""

    files: int
    nbytes: int
    uploads: int | None = 0
    """Uploads in parts that were not complete; None if there may be such parts, and ckpt cannot remove them."""


@checked
def clean(target: StrPath) -> Removed:
    """Remove what interrupted jobs left of a target. Raises `LockedError` while a job writes it, and `OutputError`."""
    target = target_path(target)
    if isinstance(target, StorePath):
        try:
            return _clean_store(target)
        except OSError as error:
            raise unwritable(error, target) from error
    folder = staging_folder(target)
    shards = folders_of(target) if target.parent.is_dir() else []
    staged = [one for one in (folder, *shards) if os.path.lexists(one)]
    for one in staged:
        check_own(one, *(folder_staging.OWN if one == folder else shards_folder.OWN))
    sizes = [path.stat().st_size for one in staged for path in one.rglob("*") if path.is_file()]
    if folder in staged:
        with locked_folder(folder, target):
            FolderStaging(target, folder).discard()
    for one in shards:
        shutil.rmtree(one, ignore_errors=True)
    return Removed(len(sizes), sum(sizes))


def _clean_store(target: StorePath) -> Removed:
    from ckpt.pipeline.shards.objects import done_folder
    from ckpt.pipeline.store_staging import open_store
    from ckpt_formats.stores.bucket import Bucket
    from ckpt_formats.stores.uploads import abort_uploads

    files = nbytes = 0
    for single_file in (False, True):
        with open_store(target, None, locks=True, single_file=single_file) as stage:
            removed = stage.remove()
        files += len(removed)
        nbytes += sum(one.nbytes for one in removed.values())
    bucket = Bucket(target.store.url)
    done = bucket.list(done_folder(target))
    bucket.delete(done)
    files += len(done)
    return Removed(files, nbytes, abort_uploads(target.store.url, target.key, target.key))
