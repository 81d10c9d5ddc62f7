"""`benchmarks/recovery.py`: a small training is killed once, and each way restores it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "recovery.py"
WAYS = ["base only", "base and log, 1 worker", "base and log, 2 workers", "shadow"]


@pytest.mark.engines
def test_a_killed_training_is_restored_by_each_way_with_the_bits_it_had() -> None:
    small = ("--width", "32", "--layers", "1", "--base-every", "5", "--rounds", "1", "--seed", "4", "--json")
    done = subprocess.run([sys.executable, str(BENCHMARK), *small], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    ways = {one["way"]: one for one in map(json.loads, done.stdout.splitlines())}
    assert list(ways) == WAYS
    assert all(one["exact"] for one in ways.values())
    base = ways["base only"]
    assert base["restore"] == 0
    assert base["again"] in (base["reached"] % 5, -1)  # -1: killed between the file and the line
    # The log may be one step ahead of the trainer; the writer may still have a step or two to write.
    assert all(-1 <= ways[way]["again"] <= 2 for way in WAYS[1:])
    assert all(ways[way]["replayed"] >= base["again"] - 2 for way in WAYS[1:3])
    for one in ways.values():
        assert one["total"] == pytest.approx(one["restore"] + one["load"] + one["again"] * one["step"])
