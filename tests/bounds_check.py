"""Run a fuzzing script in a process where Numba checks every index, those of loads of whole words included."""

import os
import subprocess
import sys
from pathlib import Path

PATIENCE = 800
"""Seconds: all kernels are compiled anew."""


def assert_within_bounds(script: str, cache: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(script)), *arguments],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "NUMBA_BOUNDSCHECK": "1",
            "NUMBA_CACHE_DIR": str(cache),
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stderr[-3000:]
