"""What a process that protects or repairs has beside the files of a checkpoint: a lock, drafts, and scratch space."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from ckpt.pipeline import Resources
from ckpt.pipeline.folder_target import locked_staging, staging_folder
from ckpt.pipeline.lease import hold
from ckpt.pipeline.scratch import scratch_folder
from ckpt_formats.core.folders import PARITY
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.stores.location import place_at

REPAIRED = ".ckpt-repaired"
"""The ending of a file that will replace a damaged one."""
_LOCK = ".lock"
"""The ending of the file beside the folder with parity while a process writes or repairs."""


def is_protected(name: str) -> bool:
    """Whether a file below a folder is one of the checkpoint's, not of its parity or of a repair."""
    parts = name.split("/")
    return not any(part.endswith(PARITY) for part in parts) and not parts[-1].endswith((PARITY + _LOCK, REPAIRED))


@contextmanager
def locked(base: Path, file: Path | None = None) -> Iterator[None]:
    """Within, no other process writes this parity, or repairs by it. Raises `LockedError`.

    `file`: the single file that it is of, which no job replaces meanwhile: the parity of the old one would be put
    beside the new one, and a repair would set that back.
    """
    place, key = place_at(base.parent), base.name + _LOCK
    as_target = locked_staging(file, locks=False) if file is not None and _is_replaceable(file) else nullcontext()
    with as_target, hold(place, key, base.parent, conditions=False, purpose="writing parity or repairing here"):
        try:
            yield
        finally:
            if place.local is not None:
                place.delete([key])


def _is_replaceable(file: Path) -> bool:
    """Whether a job can replace a file: not an object, nor one with too long a name for what grows beside it."""
    if is_remote(file):
        return False
    return len(os.fsencode(staging_folder(file).name)) <= os.pathconf(file.parent, "PC_NAME_MAX")


@contextmanager
def scratch_for(path: Path, resources: Resources) -> Iterator[Path | None]:
    """A folder for files on their way to a path, if that is in a store."""
    if not is_remote(path):
        yield None
        return
    with scratch_folder(None if resources.scratch is None else Path(resources.scratch)) as folder:
        yield folder
