"""Targets by what they are in: a folder of the file system, or a store."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt.pipeline import folder_target
from ckpt.pipeline.job_note import JobNote
from ckpt.pipeline.removal import finish_removal, replacement_path
from ckpt.pipeline.resources import Execution
from ckpt.pipeline.target import StagedTarget
from ckpt_formats.core.arguments import StrPath, checked
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.stores.location import target_path


def _module(target: Path) -> Any:
    if is_remote(target):
        from ckpt.pipeline import bucket_target  # only if there is a store

        return bucket_target
    return folder_target


@contextmanager
def open_target(target: Path, resources: Execution, single_file: str | None) -> Iterator[StagedTarget]:
    """What there is of a target, which no other process uses meanwhile, unless shards write it together.

    `single_file`: the name of the file that is the target, if it is one. Raises `LockedError`, `OutputError`.
    """
    with _module(target).open_target(target, resources, single_file) as stage:
        yield stage


def check_target(target: Path, source: Path) -> None:
    """Refuse a target that exists, or that lies inside the source or around it. Raises `OutputError`."""
    _module(target).check_target(target, source)


def is_published(target: Path, job_id: str) -> bool:
    """Whether shards of a job have published its target, not long ago. Removes what one that died then has left."""
    return bool(_module(target).is_published(target, job_id))


def unfinished_job(target: Path) -> JobNote | None:
    """The job whose shards write a target; None if the target is complete.

    Raises `NotFoundError` if no shards write it, `OutputError` if those of several jobs do, `CorruptError`.
    """
    job: JobNote | None = _module(target).unfinished_job(target)
    return job


@dataclass(frozen=True)
class Removed:
    """What was removed."""

    files: int
    nbytes: int
    uploads: int | None = 0
    """Uploads in parts that were not complete; None if there may be such parts, and ckpt cannot remove them."""


@checked
def clean(target: StrPath) -> Removed:
    """Remove what interrupted jobs left of a target, and what an interrupted `ckpt.runs.prune` left of a checkpoint.

    Raises `LockedError` while a job writes the target, and `OutputError`.
    """
    path = target_path(target)
    if is_remote(path):
        counts = [finish_removal(path)]
        removed = Removed(*_module(path).remove(path))
    else:
        removed = Removed(*folder_target.remove(path))  # first: it raises while a job writes what the others remove
        counts = [finish_removal(path), folder_target.remove(replacement_path(path))[:2]]
    files, nbytes = (sum(numbers) for numbers in zip(*counts, strict=True))
    return replace(removed, files=removed.files + files, nbytes=removed.nbytes + nbytes)
