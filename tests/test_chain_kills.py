"""Killed at random moments, a chain is whole, at its old state or at the new one."""

import json
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ckpt_formats.chain import index
from ckpt_formats.registry import open_checkpoint
from damage import ckpt
from held import contents
from training import save_run

pytestmark = pytest.mark.slow

KILLS = 50


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of five states, `step1` to `step5`, and a chain of the first four."""
    at = tmp_path_factory.mktemp("whole")
    for path in save_run(at, 5)[:4]:
        assert ckpt("diff", "--into", at / "run", path).code == 0
    return at


def steps(run: Path) -> list[int]:
    return [member.step for member in index.read(run).members]


def assert_whole(run: Path, whole: Path) -> None:
    """Every step that the chain names can be restored: the one that changed, and what it stands on, to the last bit."""
    assert ckpt("verify", run).code == 0
    assert contents(open_checkpoint(run)) == contents(open_checkpoint(whole / f"step{steps(run)[-1]}"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("command", "after"),
    [
        (("diff", "--into", "RUN", "NEXT"), [1, 2, 3, 4, 5]),
        (("compact", "RUN", "--keep", "2,4"), [2, 4]),
    ],
    ids=["into", "compact"],
)
def test_killed_at_any_moment_the_chain_is_the_old_or_the_new(
    command: tuple[str, ...], after: list[int], whole: Path, tmp_path: Path
) -> None:
    run, generator = tmp_path / "run", random.Random(command[0])
    places = {"RUN": str(run), "NEXT": str(whole / "step5")}
    told = [sys.executable, "-m", "ckpt_cli", *(places.get(word, word) for word in command), "--json"]
    shutil.copytree(whole / "run", run)
    before = steps(run)
    began = time.monotonic()
    assert subprocess.run(told, capture_output=True, timeout=120).returncode == 0
    seconds = time.monotonic() - began
    assert steps(run) == after
    old = left = 0
    for i in range(KILLS):
        shutil.rmtree(run)
        shutil.copytree(whole / "run", run)
        running = subprocess.Popen(told, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        began = time.monotonic()
        # Most of the time goes into starting up: nothing can break there.
        time.sleep(seconds * (0.3 + 0.75 * (i + generator.random()) / KILLS))
        running.kill()
        running.communicate()
        found = steps(run)
        assert found in (before, after)
        old += found == before
        left += len(list(run.iterdir())) > 2 + len(found)
        if i % 5 == 0 or found == after:
            assert_whole(run, whole)
        if found == before:
            done = ckpt(*told[3:])
            assert done.code == 0, done.err
            assert json.loads(done.out)
        assert steps(run) == after
        assert_whole(run, whole)
        names = {"chain.json", "chain.lock", *(member.folder for member in index.read(run).members)}
        if command[0] == "diff" or found == before:
            assert {path.name for path in run.iterdir()} == names
    assert old > KILLS // 4
    assert left > 0
