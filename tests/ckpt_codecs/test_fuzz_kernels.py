"""No kernel reads or writes out of bounds, or does what C leaves undefined, whatever bytes it is given.

A sample of `run.py fuzz_kernels` in tests/campaigns, which takes many more.
"""

from pathlib import Path

import pytest

import fuzz_kernels
from effort import TIMES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

READS = 100_000
"""About 6 s of a processor, and the same reads each time."""


def test_no_kernel_is_harmed_by_hostile_bytes(tmp_path: Path) -> None:
    compiler, finds = fuzz_kernels.find_compiler()
    print(finds)
    programs = fuzz_kernels.build_levels(tmp_path, compiler, "-O0" if TIMES == 1 else "-O1")
    reads = fuzz_kernels.fuzz(programs, READS * TIMES, jobs=2, slice=2000)
    assert reads >= READS * TIMES
