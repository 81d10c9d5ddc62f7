"""Processes beside a trainer that are forked from it: half a second of a processor each, for Python and its modules.

Only for runs of which each of many has several such processes. That they start as they do for users, without torch and
in an interpreter of their own, is tested where runs are few: in test_recorder.py, test_saver.py and the examples.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ckpt_recorder import prover
from ckpt_training.writing import link


def fork_writers() -> None:
    """Fork from now on what this process and its forks would start beside their training."""
    link.start_process = _start  # type: ignore[assignment]
    prover.start_process = _start  # type: ignore[attr-defined]


def _start(module: str, *arguments: object, files: Sequence[int], stdin: int) -> subprocess.Popen[bytes]:
    if threading.current_thread() is not threading.main_thread():  # what the main thread has locked would stay so
        return _started(module, *arguments, files=files, stdin=stdin)
    import_module(module)
    return _Fork([module, *map(str, arguments), str(os.getpid())], stdin=stdin, bufsize=0, pass_fds=files)


_started = link.start_process


class _Fork(subprocess.Popen):  # type: ignore[type-arg]
    """A fork that runs `main` of a module, with the descriptors and the session of a process of its own."""

    def _execute_child(self, *given: Any) -> None:
        """`given`: command, executable, preexec_fn, close_fds, pass_fds, ..., the ends of the pipe to its input, ..."""
        arguments, files, pipes = given[0], given[4], given[10:16]
        self.pid = os.fork()
        self._child_created = True
        if self.pid:
            self._close_pipe_fds(*pipes)
            return
        code = 1
        try:
            os.setsid()
            os.dup2(pipes[0], 0)
            _close_all_but(files)
            gc.freeze()
            sys.argv = arguments
            sys.modules[arguments[0]].main()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)


def _close_all_but(files: Sequence[int]) -> None:
    """Close all descriptors but these and the standard ones: others would wait for sockets that a rank has closed."""
    before = 2
    for file in [*sorted(files), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(before + 1, file)
        before = file
