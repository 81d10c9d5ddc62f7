"""The example of reinforcement learning: a run whose trainer and workers are killed goes on, bit for bit."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

import ckpt

EXAMPLE = Path(__file__).parents[2] / "examples" / "rl"
STEPS, KILLED_WORKER, KILLED_TRAINER = 22, 4, 9


PROGRAMS = Path(__file__).parents[1] / "jobs" / "forked_programs.py"
IMPORTED = (
    "torch._dynamo",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.utils",
    "ckpt_training",
)


class Programs:
    """Programs of the example, each a fork of a process that has imported torch and transformers once."""

    def __init__(self) -> None:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, str(PROGRAMS), *IMPORTED]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, env=environment, text=True, **pipes)
        self._running: dict[str, int] = {}

    def start(self, name: str, script: str, *arguments: object) -> None:
        self._running[name] = self._ask([str(EXAMPLE / script), *map(str, arguments)])

    def is_running(self, name: str) -> bool:
        return Path(f"/proc/{self._running[name]}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    def kill(self, name: str) -> None:
        os.kill(self._running[name], signal.SIGKILL)
        assert self.wait(name) == -signal.SIGKILL

    def wait(self, name: str) -> int:
        """Its exit status. A program that does not end stays among those that `close` kills."""
        status = self._ask(self._running[name])
        del self._running[name]
        return status

    def close(self) -> None:
        for pid in self._running.values():
            with suppress(ProcessLookupError):  # its end was waited for when the test was interrupted
                os.kill(pid, signal.SIGKILL)
        self._process.communicate()

    def _ask(self, order: Any) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{json.dumps(order)}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_step(run: Path, step: int, programs: Programs) -> None:
    while not any(line["step"] >= step for line in lines(run / "trainer.jsonl")):
        assert programs.is_running("trainer")
        time.sleep(0.01)


@pytest.mark.engines
@pytest.mark.timeout(500)
def test_killed_trainer_and_worker_go_on_with_equal_weights_and_rising_rewards(tmp_path: Path) -> None:
    run = tmp_path / "run"
    programs = Programs()
    try:
        for name in ("one", "two"):
            programs.start(name, "worker.py", run, name)
        programs.start("trainer", "trainer.py", run, STEPS)
        wait_for_step(run, KILLED_WORKER, programs)
        programs.kill("one")
        programs.start("one", "worker.py", run, "one")
        wait_for_step(run, KILLED_TRAINER, programs)
        programs.kill("trainer")
        programs.start("trainer", "trainer.py", run, STEPS)
        assert [programs.wait(name) for name in ("one", "two", "trainer")] == [0, 0, 0]
    finally:
        programs.close()
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
