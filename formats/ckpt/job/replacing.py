"""A target that replaces a checkpoint: the old one goes when the new one is whole.

The new one is written beside it, as `.ckpt-new.NAME`. When it is whole, both exchange their names at once, and the old
one is deleted. A kill at any moment leaves the old or the new checkpoint under the name, and beside it a remainder
that the next job with this target, or `ckpt clean`, removes.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.pipeline.folder_target import locked_staging
from ckpt.pipeline.removal import delete, replace_file_or_folder, replacement_path
from ckpt.pipeline.target import inside
from ckpt_formats.core.errors import CkptError, OutputError, UnsupportedError
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.registry.location import checkpoints_in, detect


def check_replaceable(target: Path, inputs: Iterable[Path]) -> None:
    """Raise `OutputError` unless there is one checkpoint at the target, from which the job does not read.

    Raises `UnsupportedError` for a store.
    """
    if is_remote(target):
        raise UnsupportedError(
            "a checkpoint in a store cannot be replaced at once",
            where=target,
            hint="Write it under another name, then remove the old one with the tools of the store.",
        )
    real = Path(os.path.realpath(target))
    local = (path for one in inputs if (path := _local(one)) is not None)
    if any(real in (one, *one.parents) for one in map(Path, map(os.path.realpath, local))):
        raise inside(target)
    if target.is_symlink():
        raise OutputError(
            "is a link, and ckpt does not replace what a link names", where=target, hint="Remove the link first."
        )
    if target.is_dir() and not any(target.iterdir()):
        return
    try:
        detect(target)
        is_one = not checkpoints_in(target)
    except CkptError:
        is_one = False
    if not is_one:
        what = "exists, and is not one checkpoint, so it is not replaced"
        raise OutputError(what, where=target, hint="Choose another name, or remove it first.")


def _local(path: Path) -> Path | None:
    """The path in the file system where this is read, also through parity; None of what is in a store."""
    if not is_remote(path):
        return path
    through = str(path).removeprefix("parity://")
    return Path(through) if through.startswith("/") else None


@contextmanager
def replacing(target: Path, locks: bool) -> Iterator[Path]:
    """Within, a checkpoint is written to the path that this gives; it takes the target's name at the end.

    What had the name before is deleted then. `locks`: as in `Job.run`. Raises `LockedError` if another process does so,
    and `OutputError`.
    """
    new = replacement_path(target)
    with locked_staging(target, locks):
        try:
            delete(new)  # of a job that was killed
            yield new
            replace_file_or_folder(new, target)
        except CkptError:
            raise  # of the job
        except OSError as error:
            raise unwritable(error, target) from error
