"""What a store would be asked for: ranges that are read of a universal checkpoint, and files that are written.

Counted on files with holes, so that nothing of that size is written. Today's reader takes at most 1 or 4 MiB at
once. A reader of a store gets blocks of 8 MiB, and keeps a few: then the order of our reads decides how many it gets.
"""

import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.files import Reader
from ckpt_formats.core.tensor import Tensor, ZeroBlob, read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from ckpt_formats.universal.pack_file import PackFile
from held import checkpoint, parameter

EFFORT = Execution(2)
NBYTES = 10**9 // 4
BLOCK, KEPT = 8 << 20, 4
"""Bytes of a block, and the blocks that a worker keeps."""
MOST = 160 // 4
"""GETs for so many bytes: 160 for 1 GB."""


@dataclass
class Reads:
    """What was read meanwhile."""

    ranges: int = 0
    blocks: int = 0
    """GETs, if a worker asks for whole blocks."""
    opened: int = 0
    """Files, or parts of them, that are read in one go when a checkpoint is opened."""
    held: dict[int, OrderedDict[tuple[int, int], None]] = field(default_factory=dict)
    """The blocks that each thread keeps."""

    def note(self, file: int, offset: int, nbytes: int) -> None:
        self.ranges += 1
        own = self.held.setdefault(threading.get_ident(), OrderedDict())
        for number in range(offset // BLOCK, (offset + max(nbytes, 1) - 1) // BLOCK + 1):
            key = os.fstat(file).st_ino, number
            self.blocks += key not in own
            own[key] = None
            own.move_to_end(key)
            if len(own) > KEPT:
                own.popitem(last=False)


@contextmanager
def counted(patch: pytest.MonkeyPatch) -> Iterator[Reads]:
    reads, lock, preadv, fdopen = Reads(), threading.Lock(), os.preadv, os.fdopen

    def noted(file: int, buffers: Any, offset: int) -> int:
        got = preadv(file, buffers, offset)
        with lock:
            reads.note(file, offset, got)
        return got

    def opened(*given: Any, **more: Any) -> Any:
        reads.opened += 1
        return fdopen(*given, **more)

    with patch.context() as patched:
        patched.setattr(os, "preadv", noted)
        patched.setattr(os, "fdopen", opened)
        yield reads


class Sparse:
    """A file in which zeros are holes. Nothing but zeros is written to it."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> None:
        self._file.seek(len(data), os.SEEK_CUR)

    def close(self) -> None:
        self._file.truncate(self._file.tell())
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.fixture
def sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = PackFile.__init__

    def begun(self: PackFile, *given: Any) -> None:
        begin(self, *given)
        vars(self)["_out"] = Sparse(vars(self)["_out"])

    monkeypatch.setattr(PackFile, "__init__", begun)


def zeros(parameters: int) -> Checkpoint:
    """A quarter of a gigabyte of states, and copies that are not stored."""

    def state(dtype: str) -> Tensor:
        return Tensor.of(ZeroBlob((NBYTES // parameters // 8,), DTYPES[dtype]))

    states = {"master": state("float32"), "model": state("bfloat16"), "exp_avg": state("float32")}
    return checkpoint([Parameter(f"layers.{i}", "parameter", states, {}) for i in range(parameters)])


@pytest.mark.slow
def test_a_full_read_is_few_blocks_however_many_parameters_there_are(
    sparse: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: dict[str, list[Reads]] = {"verify": [], "convert": []}
    for parameters in (20, 2000):
        save(zeros(parameters), source := tmp_path / str(parameters), Universal(), resources=EFFORT)
        assert sum(path.stat().st_blocks * 512 for path in source.rglob("*")) < NBYTES // 100
        with counted(monkeypatch) as of_verify:
            assert find_problems(open_checkpoint(source), EFFORT) == []
        with counted(monkeypatch) as of_convert:
            save(open_checkpoint(source), tmp_path / f"{parameters}.ucp", Universal(), resources=EFFORT)
        reads["verify"].append(of_verify)
        reads["convert"].append(of_convert)
        packs = len(list(source.glob("packs/*")))
    assert max(one.blocks + one.opened for one in reads["convert"]) <= MOST
    assert max(one.blocks + one.opened for one in reads["verify"]) <= MOST + 2 * packs  # and headers
    few, many = reads["verify"]
    assert many.ranges <= few.ranges + MOST // 10


@pytest.mark.parametrize("target", ["out", "out.ucp"])
def test_reading_a_state_takes_three_reads(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest, the index, and the state; in a single file the first bytes, manifest with index, and the state."""
    values = np.arange(700_000, dtype=np.float32)
    parameters = [parameter(f"w{i}", {"model": values + i}) for i in range(3)]
    save(checkpoint(parameters), tmp_path / target, Universal(), resources=EFFORT)
    with counted(monkeypatch) as reads:
        one = Universal().read(tmp_path / target, None).parameters["w1"].states["model"]  # type: ignore[arg-type]
        with Reader(check=False) as reader:
            assert np.array_equal(read(one, reader), values + 1)
    assert reads.opened + reads.ranges <= 3


WRITE = """
import json, os, sys
files, folder = set(), os.path.dirname(sys.argv[2])
def hook(event, given):
    if event == "open" and isinstance(given[0], str) and given[2] & (os.O_WRONLY | os.O_RDWR):
        files.add(given[0])
from ckpt_cli.main import run
sys.argv = ["ckpt", "convert", sys.argv[1], sys.argv[2], "--pack-size", "1M"]
sys.addaudithook(hook)
try:
    run()
except SystemExit as end:
    assert not end.code, end.code
print(json.dumps(sorted(file for file in files if file.startswith(folder))))
"""


def test_write_opens_a_file_for_each_pack_and_six_more(tmp_path: Path) -> None:
    values = np.arange(50_000, dtype=np.float32)
    save(
        checkpoint(parameter(f"w{i}", {"model": values + i}) for i in range(60)),
        tmp_path / "in",
        Universal(),
        resources=EFFORT,
    )
    command = [sys.executable, "-c", WRITE, str(tmp_path / "in"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout.splitlines()[-1])
    packs = list((tmp_path / "out").glob("packs/*"))
    assert len(packs) == 12
    assert len(packs) < len(written) <= len(packs) + 6, written
