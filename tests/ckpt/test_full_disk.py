"""Disks that are full or failing: the right exit code, no target, and a second run that goes on."""

import json
import os
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpt_formats.containers.torchfile import write_file
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from damage import SAMPLES, ckpt
from small_disk import mounted, remount

CKPT = [sys.executable, "-m", "ckpt_cli"]
ZERO1 = next(SAMPLES.glob("deepspeed-*-zero1-bf16-dp2"))
FORMS = ["universal", "torch", "safetensors"]


def content(target: Path) -> dict[str, bytes]:
    return {str(p.relative_to(target)): p.read_bytes() for p in (target, *target.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of torch of 6 MB, its smaller half in 60 tensors."""
    path = tmp_path_factory.mktemp("source") / "model.pt"
    rng = np.random.default_rng(1)
    sizes = [12_500] * 60 + [250_000] * 3
    held = {
        f"layers.{i}.weight": Tensor.of(ArrayBlob(rng.standard_normal(size).astype(DTYPES["float32"])))
        for i, size in enumerate(sizes)
    }
    write_file(path, held, lambda tensor: [memoryview(tensor.fragments[0].blob.array.tobytes())])
    return path


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with mounted(tmp_path / "disk", "4m") as disk:
        yield disk


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_is_said_and_leaves_no_target(form: str, source: Path, small_disk: Path, tmp_path: Path) -> None:
    to: tuple[object, ...] = ("--to", form)
    if form == "universal":
        to += ("--pack-size", "500K")  # so that some files are complete when the disk is full
    assert ckpt("convert", source, tmp_path / "good", *to).code == 0
    target = small_disk / "out"
    done = ckpt("convert", source, target, *to)
    assert done.code == 28
    assert "no space left" in done.err
    assert str(target) in done.err
    assert "Run the same command again" in done.err
    assert "Traceback" not in done.err
    assert os.listdir(small_disk) == [".out.ckpt-partial"]
    remount(small_disk, "size=32m")
    done = ckpt("convert", source, target, *to, "--json")
    assert done.code == 0, done.err
    assert content(target) == content(tmp_path / "good")
    if form == "universal":
        assert json.loads(done.out)["resumed_files"] > 0


def test_a_disk_without_room_for_the_first_folder_is_full_too(source: Path, small_disk: Path) -> None:
    remount(small_disk, "nr_inodes=2")
    (small_disk / "last").touch()
    done = ckpt("convert", source, small_disk / "out")
    assert done.code == 28
    assert "No space left" in done.err
    assert os.listdir(small_disk) == ["last"]


def test_a_disk_that_is_read_only_is_said(source: Path, small_disk: Path) -> None:
    remount(small_disk, "ro")
    done = ckpt("convert", source, small_disk / "out")
    assert done.code == 30
    assert str(small_disk) in done.err
    assert "no permission" in done.err or "Read-only" in done.err
    assert os.listdir(small_disk) == []


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_a_limit_of_file_sizes_is_said_and_leaves_no_target(form: str, source: Path, tmp_path: Path) -> None:
    target = tmp_path / "out"
    command = [*CKPT, "convert", str(source), str(target), "--to", form]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=60)
    assert done.returncode == 30
    assert "File too large" in done.stderr
    assert str(target) in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == [".out.ckpt-partial"]
    again = ckpt("convert", source, target, "--to", form, "--json")
    assert again.code == 0, again.err
    assert ckpt("verify", target).code == 0


@pytest.mark.slow
def test_few_open_files_are_enough(tmp_path: Path) -> None:
    zero3 = next(SAMPLES.glob("deepspeed-*-zero3-*"))

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))

    command = [*CKPT, "convert", str(zero3), str(tmp_path / "out"), "--workers", "8"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_little_memory_is_enough_for_an_index(tmp_path: Path) -> None:
    """What a header or manifest may be at most is not what is allocated for it."""
    assert ckpt("convert", ZERO1, tmp_path / "universal").code == 0
    assert ckpt("convert", ZERO1, tmp_path / "hf", "--to", "safetensors", "--shard-size", "20K").code == 0

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    env = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    for path in (ZERO1, tmp_path / "universal", tmp_path / "hf"):
        command = [*CKPT, "inspect", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, env=env, timeout=60)
        assert done.returncode == 0, done.stderr


# Any system call may fail

Calls = dict[tuple[str, str], list[int]]
STRACE = shutil.which("strace")
POINTS = 3
"""Of each system call, this many places in a run."""
CASES = [
    (call, fault) for call in ("write", "pwrite64", "fsync", "rename", "mkdir", "openat") for fault in ("ENOSPC", "EIO")
] + [(call, "EIO") for call in ("preadv", "pread64", "getdents64")]


def traced(target: Path, form: str, *options: str) -> "subprocess.CompletedProcess[str]":
    assert STRACE is not None
    trace = [STRACE, "-f", "-qq", "--seccomp-bpf", *options]  # calls that are not traced take no longer
    command = [*trace, *CKPT, "convert", str(ZERO1), str(target), "--to", form, "--workers", "2"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    folder = tmp_path_factory.mktemp("good")
    for form in FORMS:
        assert ckpt("convert", ZERO1, folder / form, "--to", form).code == 0
    return {form: content(folder / form) for form in FORMS}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """Which of the calls of each kind, counted from 1, are about the source or the target."""
    if STRACE is None:
        pytest.skip("strace is not installed")
    folder = tmp_path_factory.mktemp("counts")
    calls_by_form: Calls = {}
    for form in FORMS:
        log = folder / f"{form}.log"
        done = traced(folder / form, form, "-y", "-o", str(log), "-e", f"trace={','.join({call for call, _ in CASES})}")
        if done.returncode:
            pytest.skip(f"strace cannot trace here: {done.stderr[-200:]}")
        seen: Counter[str] = Counter()
        for call, arguments in re.findall(r"^\d+ +(\w+)\((.*)", log.read_text(), re.MULTILINE):
            seen[call] += 1
            if str(ZERO1) in arguments or str(folder) in arguments:
                calls_by_form.setdefault((form, call), []).append(seen[call])
    return calls_by_form


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("call", "fault", "form"), [(*case, ("universal", "torch")[i % 4 in (1, 2)]) for i, case in enumerate(CASES)]
)
def test_a_system_call_that_fails_is_no_wrong_result(
    call: str,
    fault: str,
    form: str,
    calls: dict[tuple[str, str], list[int]],
    good: dict[str, dict[str, bytes]],
    tmp_path: Path,
) -> None:
    numbers = calls.get((form, call), [])
    if not numbers:
        pytest.skip(f"{call} is never called")
    codes = []
    for n in sorted({numbers[i * (len(numbers) - 1) // (POINTS - 1)] for i in range(POINTS)}):
        target = tmp_path / f"out{n}"
        inject = ["-o", os.devnull, "-e", f"trace={call}", "-e", f"inject={call}:error={fault}:when={n}"]
        done = traced(target, form, *inject)
        codes.append(done.returncode)
        assert done.returncode in {0, 10, 20, 28, 30}, f"{call} {n} of {len(numbers)}: {done.stderr}"
        assert "Traceback" not in done.stderr
        assert "fault of ckpt" not in done.stderr
        if done.returncode == 28:
            assert fault == "ENOSPC"
            assert "space left" in done.stderr
        if target.exists():
            assert content(target) == good[form]
            continue
        assert done.returncode in {10, 20, 28, 30}
        again = ckpt("convert", ZERO1, target, "--to", form)
        assert again.code == 0, again.err
        assert content(target) == good[form]
    if call in ("write", "pwrite64", "fsync", "rename"):
        assert (28 if fault == "ENOSPC" else 30) in codes
    if call == "preadv":
        assert 20 in codes
