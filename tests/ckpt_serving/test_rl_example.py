"""The example of reinforcement learning: a run whose trainer and workers are killed goes on, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import ckpt

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl"
STEPS, KILLED_WORKER, KILLED_TRAINER = 22, 4, 9


def start(script: str, *arguments: object) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen([sys.executable, EXAMPLE / script, *map(str, arguments)], env=environment)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(run: Path, step: int, trainer: subprocess.Popen[bytes]) -> None:
    while not any(line["step"] >= step for line in lines(run / "trainer.jsonl")):
        assert trainer.poll() is None
        time.sleep(0.01)


@pytest.mark.engines
@pytest.mark.timeout(500)
def test_killed_trainer_and_worker_go_on_with_equal_weights_and_rising_rewards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    programs = {name: start("worker.py", run, name) for name in ("one", "two")}
    programs["trainer"] = start("trainer.py", run, STEPS)
    try:
        wait_for_step(run, KILLED_WORKER, programs["trainer"])
        programs["one"].send_signal(signal.SIGKILL)
        programs["one"].wait()
        programs["one"] = start("worker.py", run, "one")
        wait_for_step(run, KILLED_TRAINER, programs["trainer"])
        programs["trainer"].send_signal(signal.SIGKILL)
        programs["trainer"].wait()
        programs["trainer"] = start("trainer.py", run, STEPS)
        assert [program.wait(300) for program in programs.values()] == [0, 0, 0]
    finally:
        for program in programs.values():
            program.kill()
            program.wait()
    trained = lines(run / "trainer.jsonl")
    digests = {(line["epoch"], line["step"]): line["digest"] for line in trained}
    for name in ("one", "two"):
        followed = lines(run / f"{name}.jsonl")
        assert len(followed) > 5, name
        assert {line["epoch"] for line in followed} == {1, 2}, name
        assert [line for line in followed if line["digest"] != digests[line["epoch"], line["step"]]] == [], name
    rewards = [line["reward"] for line in trained if "reward" in line]
    assert mean(rewards[-5:]) > mean(rewards[:5]) + 0.2
    assert len(rewards) > STEPS
    assert ckpt.Chain(run / "policy.chain").verify().findings == ()
