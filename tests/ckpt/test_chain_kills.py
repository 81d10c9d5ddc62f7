"""Killed at any point, a chain is whole, at its old state or at the new one."""

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import chain_file
from damage import ckpt
from held import contents
from killing import killed, points, spread
from training import save_run

POINTS = 8
KILLS = 1
"""By the clock, in a process of its own, of each command."""
COMMANDS = {
    "into": (("append", "RUN", "NEXT"), [1, 2, 3, 4, 5]),
    "tip": (("append", "RUN", "NEXT", "--tip"), [1, 2, 3, 4, 5]),
    "compact": (("compact", "RUN", "--keep", "2,4"), [2, 4]),
}
EACH = pytest.mark.parametrize("name", ["into", *(pytest.param(n, marks=pytest.mark.slow) for n in ("tip", "compact"))])
TIP = "tip-0000000004"
"""The tip before the command."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of five states, `step1` to `step5`, and a chain of the first four."""
    at = tmp_path_factory.mktemp("whole")
    for path in save_run(at, 5)[:4]:
        assert ckpt("append", at / "run", path, "--tip").code == 0
    assert (at / "run" / TIP).is_dir()
    return at


def steps(run: Path) -> list[int]:
    return [member.step for member in chain_file.read(run).members]


def assert_whole(run: Path, whole: Path) -> None:
    """Every step that the chain names can be restored: the one that changed, and what it stands on, to the last bit."""
    assert ckpt("verify", run).code == 0
    assert contents(open_checkpoint(run)) == contents(open_checkpoint(whole / f"step{steps(run)[-1]}"))


class Killed:
    """A command that changes a chain, killed and run again; what was seen of the chain in between."""

    def __init__(self, name: str, whole: Path, folder: Path) -> None:
        command, self.after = COMMANDS[name]
        self.run, self.whole, self.before = folder / "run", whole, steps(whole / "run")
        places = {"RUN": str(self.run), "NEXT": str(whole / "step5")}
        self.command = [*(places.get(word, word) for word in command), "--json"]
        self.appends, self.adds_tip = name != "compact", name == "tip"
        self.old = self.left = 0

    def renew(self) -> None:
        shutil.rmtree(self.run, ignore_errors=True)
        shutil.copytree(self.whole / "run", self.run)

    def work(self) -> None:
        assert ckpt(*self.command).code == 0

    def kill_and_look(self, kill: Callable[[], object], thorough: bool) -> None:
        self.renew()
        kill()
        listed = steps(self.run)
        assert listed in (self.before, self.after)
        self.old += listed == self.before
        self.left += len(list(self.run.iterdir())) > 2 + len(listed) + (chain_file.read(self.run).tip is not None)
        if thorough or listed == self.after:
            assert_whole(self.run, self.whole)
        if listed == self.before:
            done = ckpt(*self.command)
            assert done.code == 0, done.err
            assert json.loads(done.out)
            if thorough:
                assert_whole(self.run, self.whole)
        assert steps(self.run) == self.after
        names = {"chain.json", "chain.lock", *(member.folder for member in chain_file.read(self.run).members)}
        tip = chain_file.read(self.run).tip
        names |= set() if tip is None else {tip.folder}
        assert self.appends is False or (tip is not None) == self.adds_tip
        if self.appends or listed == self.before:
            there = {path.name for path in self.run.iterdir()}
            assert there == names or (listed == self.after and there - {TIP} == names)  # killed before it was removed


@pytest.mark.slow
@EACH
def test_killed_at_any_point_the_chain_is_the_old_or_the_new(name: str, whole: Path, tmp_path: Path) -> None:
    one = Killed(name, whole, tmp_path)
    one.renew()
    many = points(one.work, tmp_path)
    for number, point in enumerate(spread(many, POINTS)):
        one.kill_and_look(lambda point=point: killed(one.work, tmp_path, point), number % 5 == 0)
    assert one.old > POINTS // 2
    assert one.left > 0


@pytest.mark.slow
@EACH
def test_killed_by_the_clock_as_well(name: str, whole: Path, tmp_path: Path) -> None:
    one, generator = Killed(name, whole, tmp_path), random.Random(name)
    command = [sys.executable, "-m", "ckpt_cli", *one.command]
    one.renew()
    began = time.monotonic()
    assert subprocess.run(command, capture_output=True, timeout=120).returncode == 0
    seconds = time.monotonic() - began

    def kill(number: int) -> None:
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        # Most of the time goes into starting up: nothing can break there.
        time.sleep(seconds * (0.4 + 0.6 * (number + generator.random()) / KILLS))
        running.kill()
        running.wait()

    for number in range(KILLS):
        one.kill_and_look(lambda number=number: kill(number), True)
