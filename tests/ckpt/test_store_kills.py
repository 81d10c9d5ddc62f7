"""A sample of `run.py store_kills` in tests/campaigns: kills at requests of a store, and two writers at once."""

from pathlib import Path

import pytest

import store_kills
from run import run


@pytest.mark.slow
def test_kills_leave_targets_and_chains_in_a_store_whole(tmp_path: Path) -> None:
    report = run(store_kills.rounds(tmp_path, 7), 24)
    assert not report.failures
    assert report.rounds == 24
