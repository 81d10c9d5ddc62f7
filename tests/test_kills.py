"""Killed at random moments: the target is absent or whole, and a second run goes on where the first one was."""

import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckpt_formats.dtypes import DTYPES
from ckpt_formats.errors import NotFound
from ckpt_formats.registry import detect
from ckpt_formats.tensor import Held, Tensor
from ckpt_formats.torchfile import write_file
from damage import ckpt

pytestmark = pytest.mark.slow

TENSORS, ELEMENTS = 500, 16_000
KILLS = {"universal": 50, "torch": 15, "safetensors": 15}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of torch of 32 MB."""
    path = tmp_path_factory.mktemp("source") / "model.pt"
    rng = np.random.default_rng(1)
    held = {
        f"layers.{i}.weight": Tensor.of(Held(rng.standard_normal(ELEMENTS).astype(DTYPES["float32"])))
        for i in range(TENSORS)
    }
    write_file(path, {"model": held, "step": 7}, lambda tensor: [memoryview(tensor.fragments[0].blob.array.tobytes())])
    return path


class Work:
    """One conversion, begun and ended as often as need be."""

    def __init__(self, source: Path, folder: Path, form: str) -> None:
        self.target = folder / ("out.safetensors" if form == "safetensors" else "out")
        self.stage = folder / f".{self.target.name}.ckpt-partial"
        told = ["convert", source, self.target, "--to", form, "--workers", "2", "--json"]
        self._command = [sys.executable, "-m", "ckpt_cli", *map(str, told)]

    def begin(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self) -> int:
        """Run to the end; the number of files that an earlier run had written."""
        done = subprocess.run(self._command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert not self.stage.exists()
        return int(json.loads(done.stdout)["resumed_files"])

    def content(self) -> dict[str, str]:
        files = [self.target] if self.target.is_file() else [p for p in self.target.rglob("*") if p.is_file()]
        return {str(p.relative_to(self.target)): hashlib.blake2b(p.read_bytes()).hexdigest() for p in files}

    def remove(self) -> None:
        for path in (self.target, self.stage):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)

    def lines(self) -> int:
        """How many files the journal lists."""
        journal = self.stage / "journal.jsonl"
        return journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0

    def begin_until(self, moment: Callable[[], bool]) -> "subprocess.Popen[str]":
        """A run that has come to a moment; on a busy machine it may be over before we look, and is begun again."""
        for _ in range(20):
            running, until = self.begin(), time.monotonic() + 60
            while running.poll() is None and time.monotonic() < until:
                if moment():
                    return running
                time.sleep(0.001)
            running.kill()
            running.communicate()
            self.remove()
        raise AssertionError("every run ended before its moment came")


def assert_absent_or_whole(work: Work, good: dict[str, str]) -> bool:
    """Is the target whole? What is half-written is no checkpoint to anybody."""
    whole = work.target.exists()
    if whole:
        assert work.content() == good
        assert ckpt("verify", work.target).code == 0
    for path in (work.stage, work.stage / "data", *work.stage.glob("data/*")):
        if path.exists():
            with pytest.raises(NotFound):
                detect(path)
    return whole


@pytest.mark.timeout(900)
@pytest.mark.parametrize("form", KILLS)
def test_killed_at_any_moment_the_target_is_absent_or_whole(form: str, source: Path, tmp_path: Path) -> None:
    rng, work = random.Random(form), Work(source, tmp_path, form)
    began = time.monotonic()
    assert work.finish() == 0
    seconds = time.monotonic() - began
    good = work.content()
    resumed, unfinished = [], 0
    for i in range(KILLS[form]):
        work.remove()
        for _ in range(1 + i % 2):  # every other run is killed twice
            running, began = work.begin(), time.monotonic()
            time.sleep(seconds * (i + rng.random()) / KILLS[form])
            running.kill()
            running.communicate()
            if assert_absent_or_whole(work, good):
                seconds = min(seconds, time.monotonic() - began)  # the machine is faster than it was at first
                break
            unfinished += 1
        else:
            resumed.append(work.finish())
            assert work.content() == good
    assert unfinished > KILLS[form] // 2
    if form == "universal":
        assert sum(count > 0 for count in resumed) > 10
        assert max(resumed) > TENSORS // 2


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
def test_an_interrupt_leaves_nothing_that_looks_whole(
    sent: signal.Signals, share: float, source: Path, tmp_path: Path
) -> None:
    work = Work(source, tmp_path, "universal")
    running = work.begin_until(lambda: work.lines() > share * TENSORS)
    running.send_signal(sent)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 130
    assert out == ""
    assert "interrupted" in err
    assert "run the same command again" in err
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == [work.stage.name]
    kept = work.lines()
    assert not assert_absent_or_whole(work, {})
    assert work.finish() >= kept > share * TENSORS
    assert ckpt("verify", work.target).code == 0


def test_an_impatient_interrupt_is_heeded_too(source: Path, tmp_path: Path) -> None:
    work = Work(source, tmp_path, "universal")
    running = work.begin_until(lambda: work.lines() > 10)
    for _ in range(3):
        running.send_signal(signal.SIGINT)
        time.sleep(0.002)
    running.communicate(timeout=120)
    assert running.returncode in (130, -signal.SIGINT, 1)
    assert not work.target.exists()
    assert work.finish() > 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_at_random_moments_the_target_is_absent_or_whole(
    sent: signal.Signals, source: Path, tmp_path: Path
) -> None:
    rng, work = random.Random(int(sent)), Work(source, tmp_path, "universal")
    began = time.monotonic()
    assert work.finish() == 0
    seconds, good = time.monotonic() - began, work.content()
    codes = []
    for i in range(12):
        work.remove()
        running = work.begin_until(work.stage.exists)
        time.sleep(seconds * 0.8 * (i + rng.random()) / 12)
        running.send_signal(sent)
        _, err = running.communicate(timeout=120)
        codes.append(running.returncode)
        assert "Traceback" not in err
        if not assert_absent_or_whole(work, good):
            assert running.returncode == 130
            work.finish()
            assert work.content() == good
    assert 130 in codes


def test_a_changed_source_is_not_mixed_with_what_was_written(source: Path, tmp_path: Path) -> None:
    own = tmp_path / "model.pt"
    shutil.copyfile(source, own)
    work = Work(own, tmp_path, "universal")
    running = work.begin_until(lambda: work.lines() > TENSORS // 3)
    running.kill()
    running.communicate()
    assert not work.target.exists()
    shutil.copyfile(source, own)  # the same bytes at another time: it could have been others
    assert work.finish() == 0


def test_another_request_does_not_go_on_with_this_one(source: Path, tmp_path: Path) -> None:
    work = Work(source, tmp_path, "universal")
    running = work.begin_until(lambda: work.lines() > TENSORS // 3)
    running.kill()
    running.communicate()
    done = ckpt("convert", source, work.target, "--dtype", "bf16", "--json")
    assert done.code == 0
    assert json.loads(done.out)["resumed_files"] == 0
    assert not work.stage.exists()
