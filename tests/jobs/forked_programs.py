"""Programs that are forked from a process which has imported what they import: `forked_programs.py MODULE...`.

Reads a line of JSON for each, its path and its arguments, and answers with its process id. After a line that is an id,
waits until that process has ended, and answers with its exit status.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from importlib import import_module
from pathlib import Path

import numpy as np


def main() -> None:
    for name in sys.argv[1:]:
        import_module(name)
    while line := sys.stdin.readline():
        order = json.loads(line)
        if isinstance(order, int):
            print(os.waitstatus_to_exitcode(os.waitpid(order, 0)[1]), flush=True)
            continue
        pid = os.fork()
        if pid == 0:
            _run(*order)
        print(pid, flush=True)


def _run(script: str, *arguments: str) -> None:
    """Run a script as `python SCRIPT ARGUMENTS` would; never returns."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)  # where answers go
        np.random.seed()  # or all programs would draw the same numbers
        sys.argv, sys.path[0] = [script, *arguments], str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
