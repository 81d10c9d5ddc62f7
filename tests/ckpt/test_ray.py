"""A job on a real cluster of Ray, which the command starts on this machine: the same bytes, also if a worker dies."""

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest

from ckpt_formats.containers.torchfile import write_file
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from clusters import environment, files
from damage import ckpt

pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")]


def test_a_worker_that_is_killed_does_not_show_in_the_bytes(tmp_path: Path) -> None:
    rng, model = np.random.default_rng(1), tmp_path / "model.pt"
    tensors = {f"w{i}": Tensor.of(ArrayBlob(rng.standard_normal(16_000).astype(np.float32))) for i in range(300)}
    write_file(model, {"model": tensors}, lambda tensor: [memoryview(tensor.fragments[0].blob.array.tobytes())])
    (folder := tmp_path / "made").mkdir()
    assert ckpt("convert", model, tmp_path / "local", "--pack-size", "1").code == 0
    command = [sys.executable, "-m", "ckpt_cli", "convert", str(model), str(folder / "out"), "--pack-size", "1"]
    log = (tmp_path / "log").open("wb")
    quiet = environment(RAY_USAGE_STATS_ENABLED="0", RAY_DISABLE_MEMORY_MONITOR="1")
    with log, subprocess.Popen([*command, "--executor", "ray://"], env=quiet, stdout=log, stderr=log) as running:
        journal, killed = folder / ".out.ckpt-partial" / "journal", 0
        while running.poll() is None and not killed:
            if journal.exists() and sum(path.read_bytes().count(b"\n") for path in journal.iterdir()) > 75:
                for process in psutil.Process(running.pid).children(recursive=True):
                    if not killed and process.name().startswith("ray::_run"):
                        process.kill()
                        killed += 1
            time.sleep(0.002)
        assert running.wait(120) == 0, (tmp_path / "log").read_text()
    assert killed
    assert files(folder / "out") == files(tmp_path / "local")
    assert os.listdir(folder) == ["out"]
