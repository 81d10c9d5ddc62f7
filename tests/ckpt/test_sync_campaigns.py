"""Samples of `run.py sync_damage`, `sync_kills` and `sync_steps` in tests/campaigns."""

from pathlib import Path

import pytest

import sync_damage
import sync_kills
from campaigning import campaign
from effort import TIMES
from run import run


@pytest.mark.slow
def test_damaged_chains_give_the_right_weights_or_an_error(tmp_path: Path) -> None:
    count = 40 * TIMES
    report = run(sync_damage.rounds(tmp_path, 3), count)
    assert not report.failures
    right = sum(number for what, number in report.seen.items() if what.endswith(": right"))
    assert 0 < right < 2 * count  # some damage was found


@pytest.mark.slow
def test_kills_of_publishers_and_followers_show_only_states_of_the_trainer(tmp_path: Path) -> None:
    report = run(sync_kills.rounds(tmp_path, 5), 7 * TIMES)
    assert not report.failures
    assert sum(number for what, number in report.seen.items() if ": killed" in what) >= 2 * TIMES


@pytest.mark.slow
def test_followers_have_all_bits_after_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # no run is recorded there
    seen = campaign("sync_steps", 1, tmp_path)
    assert seen["network: steps"] + seen["network: bases"] == 13
