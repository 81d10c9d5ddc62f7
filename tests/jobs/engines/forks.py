"""A process that has imported torch, and forks one for each script that it is to run.

What all scripts of engines import takes 4 s of a processor, and is paid once for each process of pytest.

Reads a line of JSON for each script: its path, its arguments, its environment and the file of its output.
Answers with a line that has the script's process, and with its exit status when it has ended.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401 -- like those above


def main() -> None:
    gc.freeze()
    while line := sys.stdin.readline():
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run(**job)
            return
        _answer(pid)
        _answer(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _run(script: str, arguments: list[str], environment: dict[str, str], output: str) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` would; its `SystemExit` ends this process."""
    os.setsid()
    nothing, out = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for file, number in ((nothing, 0), (out, 1), (out, 2)):
        os.dup2(file, number)
    os.environ.clear()
    os.environ.update(environment)
    np.random.seed()  # or all scripts would draw the same numbers, which hides what depends on them
    tempfile.tempdir = None  # torch asked for it with another environment
    sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def _answer(value: Any) -> None:
    print(value, flush=True)


if __name__ == "__main__":
    main()
