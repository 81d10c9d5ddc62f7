"""Files that commands write beside their report: each completely or not at all."""

import os
from collections.abc import Callable
from pathlib import Path

from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.text import PARTIAL


def write_file(content: bytes, target: Path, check: Callable[[], None]) -> None:
    """Write a file, which may replace one. Raises `OutputError`, `NoSpaceError`.

    `check` is called when all bytes are on the disk, and raises if what is at the target then must stay.
    """
    draft = target.with_name(f".{target.name}.{os.getpid()}{PARTIAL}")
    try:
        try:
            with draft.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            check()
            os.replace(draft, target)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(error, target) from error
