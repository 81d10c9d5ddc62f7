"""The staging of a target, by what the target is in."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt.pipeline import folder_staging
from ckpt.pipeline.staging import Staging


@contextmanager
def open_staging(target: Path, locks: bool = True) -> Iterator[Staging]:
    """The staging of a target, which no other process uses meanwhile. Raises `Locked`, `OutputError`."""
    with folder_staging.open_folder(target, locks) as stage:
        yield stage


def check_target(target: Path, source: Path) -> None:
    """Refuse a target that exists, or that lies inside the source or around it. Raises `OutputError`."""
    folder_staging.check_target(target, source)
