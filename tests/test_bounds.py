"""No kernel of Numba reads or writes out of bounds, whatever bytes it is given."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from effort import TIMES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(cache: Path, *command: str) -> list[str]:
    """The lines that a process prints for which Numba checks every index and keeps kernels in a folder of their own."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "NUMBA_BOUNDSCHECK": "1",
            "NUMBA_CACHE_DIR": str(cache),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_no_kernel_reads_or_writes_out_of_bounds(tmp_path: Path) -> None:
    fuzzed = run(tmp_path, str(Path(__file__).with_name("bounds_check.py")), "3", str(TIMES))
    assert len(fuzzed) == 2
