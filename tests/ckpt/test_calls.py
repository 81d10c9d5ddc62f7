"""No command opens, asks for or flushes a file for each parameter: calls of the system, counted by strace.

The acceptance of the format: of ten times as many parameters of the same bytes, fewer than 100 calls more, beside
reads and writes. Not counted either are calls that are about memory and threads.
"""

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from ckpt_formats.containers.torchfile import write_file
from ckpt_formats.core.tensor import ArrayBlob, Tensor

STRACE = shutil.which("strace")
FEW, MANY, ELEMENTS = 50, 500, 1_280_000
"""Parameters, and the elements of all of them: so many that the states of both are encoded."""
READS = ("read", "readv", "pread64", "preadv", "preadv2", "mmap", "munmap", "mprotect", "brk", "madvise", "mremap")
WRITES = ("write", "writev", "pwrite64", "pwritev", "pwritev2", "copy_file_range", "futex", "sched_yield")
COMMANDS = {
    "convert": ("convert", "S.pt", "U"),
    "convert to one file": ("convert", "S.pt", "U.ucp"),
    "convert of universal": ("convert", "U", "V"),
    "inspect": ("inspect", "U"),
    "verify": ("verify", "U"),
    "verify of torch": ("verify", "S.pt"),
    "diff": ("diff", "U", "U.ucp"),
    "diff of torch": ("diff", "S.pt", "U"),
    "compress": ("compress", "U", "C"),
    "verify of encoded states": ("verify", "C"),
    "diff of encoded states": ("diff", "C", "U"),
    "decompress": ("decompress", "C", "D.pt"),
    "append a base": ("append", "run", "U", "--step", "1"),
    "append a delta": ("append", "run", "T.pt", "--step", "2"),
    "append another": ("append", "run", "U", "--step", "3"),
    "verify of a chain": ("verify", "run"),
    "restore": ("restore", "run", "R"),
    "compact": ("compact", "run", "--keep", "2,3"),
}
RUN = """
import json, os, sys
from damage import ckpt
for name, arguments in json.loads(sys.argv[1]).items():
    os.access("mark " + name, os.F_OK)
    done = ckpt(*arguments)
    assert done.code in (0, 1), (arguments, done)
"""


def model(path: Path, parameters: int, drift: float = 0.0) -> None:
    values = np.random.default_rng(1).standard_normal(ELEMENTS).astype(np.float32) + np.float32(drift)
    held = {f"layers.{i}.weight": Tensor.of(ArrayBlob(one)) for i, one in enumerate(np.split(values, parameters))}
    write_file(path, held, lambda tensor: [memoryview(tensor.fragments[0].blob.array.tobytes())])


def counted(folder: Path, parameters: int) -> dict[str, Counter[str]]:
    """The calls of each command by name, done one after another in a folder by one process."""

    folder.mkdir()
    model(folder / "S.pt", parameters)
    model(folder / "T.pt", parameters, drift=1e-4)
    within = {
        name: [str(folder / word) if _is_path(word) else word for word in words] for name, words in COMMANDS.items()
    }
    uncounted = ",".join((*READS, *WRITES))
    options = [
        "-f",
        "-qq",
        "--seccomp-bpf",
        "-o",
        str(folder / "log"),
        "-e",
        f"trace=!{uncounted}",
        "-e",
        "signal=none",
    ]
    assert STRACE is not None
    done = subprocess.run(
        [STRACE, *options, sys.executable, "-c", RUN, json.dumps(within)],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
    )
    if "ptrace" in done.stderr:
        pytest.skip(f"strace cannot trace here: {done.stderr[-200:]}")
    assert done.returncode == 0, done.stderr
    calls: dict[str, Counter[str]] = {}
    for line in (folder / "log").read_text(errors="replace").splitlines():
        mark = re.search(r'access\("mark ([^"]*)"', line)
        if mark:
            calls[mark[1]] = Counter()
        elif calls and (call := re.match(r"\d+ +(\w+)\(", line)):
            calls[next(reversed(calls))][call[1]] += 1
    return calls


def _is_path(word: str) -> bool:
    return word == "run" or word[:1].isupper()


@pytest.mark.slow
@pytest.mark.skipif(STRACE is None, reason="strace is not installed")
def test_calls_of_the_system_do_not_depend_on_the_number_of_parameters(tmp_path: Path) -> None:
    few, many = counted(tmp_path / "few", FEW), counted(tmp_path / "many", MANY)
    assert list(few) == list(many) == list(COMMANDS)
    more = {name: many[name] - few[name] for name in COMMANDS}
    assert {name: calls for name, calls in more.items() if calls.total() >= 100} == {}
    assert all(calls["openat"] > 3 for calls in many.values())
