"""Processes forked from one that has imported what they need, so that no time goes into starting Python.

`set_forkserver_preload` alone does nothing in a test: the fork server gets no `sys.path`, which pytest extends, and
says nothing of a module that it cannot import; and one server serves a whole process, with the modules that its first
user named.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext

_LIGHT = {"ckpt", "ckpt_cli", "ckpt_codecs", "ckpt_formats"}
_HEAVY = "ckpt.pipeline.cluster."
"""These modules import Ray or Dask."""


def forking(*modules: str) -> ForkServerContext:
    """Return a context whose processes are forked from a new one, which has imported `modules`, and what of ckpt this
    process has imported until now: what commands import late, if they were tried here.

    No process of an earlier context may be running.

    Raises:
        ImportError: There is no such module.
    """
    server = forkserver._forkserver  # type: ignore[attr-defined]
    server._stop()
    late = [name for name in sys.modules if name.partition(".")[0] in _LIGHT and not name.startswith(_HEAVY)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*modules, *late])
    with _path_for_children():
        server.ensure_running()
    probe = context.Process(target=_has_imported, args=(modules,))
    probe.start()
    probe.join()
    if probe.exitcode:
        raise ImportError(f"the fork server lacks one of {', '.join(modules)}")
    return context


def _has_imported(modules: tuple[str, ...]) -> None:
    sys.exit(any(name not in sys.modules for name in modules))


@contextmanager
def _path_for_children() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
