"""A small file system of its own, which may run full or become read-only."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size, such as `4m`, at a folder that does not exist. Skips the test if none may."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.getuid() != 0 or shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    try:
        yield folder
    finally:
        # A process that a test killed may still end.
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(disk: Path, options: str) -> None:
    """Change a mounted file system: `ro`, `size=32m`, `nr_inodes=2`."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(disk)], check=True)
