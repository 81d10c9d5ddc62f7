"""Killed at any point: the target is absent or whole, and a second run goes on where the first one was."""

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

from ckpt_formats.containers.torchfile import write_file
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import NotFoundError
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.core.text import format_nbytes
from ckpt_formats.registry.location import detect
from damage import ckpt
from killing import killed, points, spread

TENSORS, SMALLER, ELEMENTS = 500, 40, 16_000
POINTS = {"universal": 18, "torch": 8, "safetensors": 8}
KILLS, MOMENTS = 3, 2
"""Kills and interrupts by the clock, in a process of its own."""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of torch of 32 MB."""
    return model(tmp_path_factory.mktemp("source") / "model.pt", TENSORS)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with fewer tensors."""
    return model(tmp_path_factory.mktemp("smaller") / "model.pt", SMALLER)


def model(path: Path, tensors: int) -> Path:
    rng = np.random.default_rng(1)
    held = {
        f"layers.{i}.weight": Tensor.of(ArrayBlob(rng.standard_normal(ELEMENTS).astype(DTYPES["float32"])))
        for i in range(tensors)
    }
    write_file(path, {"model": held, "step": 7}, lambda tensor: [memoryview(tensor.fragments[0].blob.array.tobytes())])
    return path


class Work:
    """One conversion, begun and ended as often as need be."""

    def __init__(self, source: Path, folder: Path, form: str) -> None:
        self.target = folder / ("out.safetensors" if form == "safetensors" else "out")
        self.stage = folder / f".{self.target.name}.ckpt-partial"
        # A pack for each parameter: with larger ones all would be one file, and nothing to go on with.
        packs = ["--pack-size", "1"] if form == "universal" else []
        self._arguments = ["convert", str(source), str(self.target), "--to", form, "--workers", "2", "--json", *packs]
        self._command = [sys.executable, "-m", "ckpt_cli", *self._arguments]

    def do(self) -> None:
        """In this process."""
        assert ckpt(*self._arguments).code == 0

    def begin(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def finish(self) -> int:
        """Run to the end; the number of files that an earlier run had written."""
        done = ckpt(*self._arguments)
        assert done.code == 0, done.err
        assert not self.stage.exists()
        self.report = json.loads(done.out)
        return int(self.report["resumed_files"])

    def content(self) -> dict[str, str]:
        files = [self.target] if self.target.is_file() else [p for p in self.target.rglob("*") if p.is_file()]
        return {str(p.relative_to(self.target)): hashlib.blake2b(p.read_bytes()).hexdigest() for p in files}

    def remove(self) -> None:
        for path in (self.target, self.stage):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)

    def lines(self) -> int:
        """How many files the journal lists."""
        journal = self.stage / "journal"
        return sum(path.read_bytes().count(b"\n") for path in journal.iterdir()) if journal.exists() else 0

    def begin_until(self, moment: Callable[[], bool]) -> "subprocess.Popen[str]":
        """A run that has come to a moment; on a busy machine it may be over before we look, and is begun again."""
        for _ in range(20):
            running, until = self.begin(), time.monotonic() + 300
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
            with pytest.raises(NotFoundError):
                detect(path)
    return whole


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=pytest.mark.slow) if form == "universal" else form for form in POINTS]
)
def test_killed_at_any_point_the_target_is_absent_or_whole(form: str, smaller: Path, tmp_path: Path) -> None:
    work = Work(smaller, tmp_path, form)
    count = points(work.do, tmp_path)
    good, resumed, unfinished = work.content(), [], 0
    for number, point in enumerate(spread(count, POINTS[form])):
        work.remove()
        for again in range(1 + number % 2):  # every other run is killed twice
            if not work.target.exists():
                killed(work.do, tmp_path, point // (1 + again))
                unfinished += not assert_absent_or_whole(work, good)
        if not work.target.exists():
            resumed.append(work.finish())
        assert work.content() == good
    assert unfinished > POINTS[form] // 2
    if form == "universal":
        assert sum(count > 0 for count in resumed) > POINTS[form] // 3
        assert max(resumed) > SMALLER // 2


@pytest.mark.slow
def test_killed_by_the_clock_as_well(source: Path, tmp_path: Path) -> None:
    work, rng = Work(source, tmp_path, "universal"), random.Random(1)
    began = time.monotonic()
    assert work.finish() == 0
    seconds, good = time.monotonic() - began, work.content()
    for number in range(KILLS):
        work.remove()
        running = work.begin_until(work.stage.exists)
        time.sleep(seconds * 0.6 * (number + rng.random()) / KILLS)
        running.kill()
        running.communicate()
        if not assert_absent_or_whole(work, good):
            work.finish()
            assert work.content() == good


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "share"), [(signal.SIGINT, 0.0), (signal.SIGTERM, 0.3), (signal.SIGINT, 0.7), (signal.SIGTERM, 0.7)]
)
def test_an_interrupt_leaves_nothing_that_looks_whole(
    sent: signal.Signals, share: float, source: Path, tmp_path: Path
) -> None:
    work = Work(source, tmp_path, "universal")
    running = work.begin_until(lambda: work.lines() > share * TENSORS)
    running.send_signal(sent)
    out, err = running.communicate(timeout=120)
    assert running.returncode == 128 + sent
    error = json.loads(out)["error"]
    assert error["code"] == 128 + sent
    assert "interrupted" in err
    assert "run the same command again" in err
    assert "Traceback" not in err
    assert os.listdir(tmp_path) == [work.stage.name]
    kept = work.lines()
    assert not assert_absent_or_whole(work, {})
    assert work.finish() >= kept > share * TENSORS
    assert f"{format_nbytes(work.report['resumed_nbytes'])} are kept in {work.stage}" in error["what"]
    assert f"ckpt clean {work.target}" in error["what"]
    assert ckpt("verify", work.target).code == 0


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_at_random_moments_the_target_is_absent_or_whole(
    sent: signal.Signals, source: Path, tmp_path: Path
) -> None:
    rng, work = random.Random(int(sent)), Work(source, tmp_path, "universal")
    began = time.monotonic()
    assert work.finish() == 0
    seconds, good = time.monotonic() - began, work.content()
    codes = []
    for i in range(MOMENTS):
        work.remove()
        running = work.begin_until(work.stage.exists)
        time.sleep(seconds * 0.6 * (i + rng.random()) / MOMENTS)
        running.send_signal(sent)
        _, err = running.communicate(timeout=120)
        codes.append(running.returncode)
        assert "Traceback" not in err
        if not assert_absent_or_whole(work, good):
            assert running.returncode == 128 + sent
            work.finish()
            assert work.content() == good
    assert 128 + sent in codes


def test_a_changed_source_is_not_mixed_with_what_was_written(smaller: Path, tmp_path: Path) -> None:
    own = tmp_path / "model.pt"
    shutil.copyfile(smaller, own)
    work = half_done(Work(own, tmp_path, "universal"))
    shutil.copyfile(smaller, own)  # the same bytes at another time: it could have been others
    assert work.finish() == 0


def test_another_request_does_not_go_on_with_this_one(smaller: Path, tmp_path: Path) -> None:
    work = half_done(Work(smaller, tmp_path, "universal"))
    done = ckpt("convert", smaller, work.target, "--dtype", "bf16", "--json")
    assert done.code == 0
    assert json.loads(done.out)["resumed_files"] == 0
    assert not work.stage.exists()


def half_done(work: Work) -> Work:
    """Killed when a part of the files is written."""
    count = points(work.do, work.target.parent)
    work.remove()
    assert killed(work.do, work.target.parent, count * 2 // 3)
    assert work.lines() > 0
    assert not work.target.exists()
    return work
