"""The staging of a target, by what the target is in."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.pipeline import folder_staging
from ckpt.pipeline.resources import Execution
from ckpt.pipeline.staging import Staging
from ckpt_formats.core.store_path import StorePath


@contextmanager
def open_staging(target: Path, resources: Execution, single_file: bool) -> Iterator[Staging]:
    """The staging of a target, which no other process uses meanwhile. Raises `LockedError`, `OutputError`."""
    if isinstance(target, StorePath):
        from ckpt.pipeline.store_staging import open_store

        with open_store(target, resources.scratch, resources.locks, single_file, resources.read_back) as staged:
            yield staged
        return
    with folder_staging.open_folder(target, resources.locks) as stage:
        yield stage


def check_target(target: Path, source: Path) -> None:
    """Refuse a target that exists, or that lies inside the source or around it. Raises `OutputError`."""
    if isinstance(target, StorePath):
        from ckpt.pipeline import store_staging

        store_staging.check_target(target, source)
    else:
        folder_staging.check_target(target, source)
