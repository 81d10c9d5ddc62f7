"""Work that is killed or interrupted at each of its points: in front of a change to the file system, in a fork.

Nothing is cleaned up and nothing is flushed, as with SIGKILL; but the moments are all of them, not those that a
clock happens to hit, and no time goes into starting Python.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KILLED, FAILED = 99, 98
SECONDS = 120
"""What a child may take; then it is hung."""
CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate"}
REMOVALS = {"os.remove", "os.rmdir"}
WRITES = ("fsync", "write", "pwrite")


def points(work: Callable[[], object], folder: Path) -> int:
    """How many changes the work makes in a folder; it is done in full."""
    counted = _run(work, folder)
    assert counted is not None
    return counted


def killed(work: Callable[[], object], folder: Path, point: int) -> bool:
    """Do the work until its change number `point`, from 0, and no further; False if it made fewer."""
    return _run(work, folder, point, lambda: os._exit(KILLED)) is None


def killed_after(work: Callable[[], object], seconds: float, begun: Path | None = None) -> bool:
    """Do the work, which is sent SIGKILL after a time, wherever it is then; False if it was at its end before.

    `begun`: the time counts from when this exists.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        try:
            work()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(FAILED)
    deadline = time.monotonic() + SECONDS
    while begun is not None and not begun.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)  # it is not reaped before, so the number is no other process's
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), f"the work ended with {code}"
    return code != 0


def interrupted(work: Callable[[], object], folder: Path, point: int) -> None:
    """Do the work, which is sent SIGINT as by Ctrl-C in front of its change number `point`."""
    _run(work, folder, point, lambda: os.kill(os.getpid(), signal.SIGINT))


def spread(count: int, most: int) -> Iterator[int]:
    """So many points of `count`, evenly, with the first and the last."""
    yield from sorted({i * (count - 1) // max(most - 1, 1) for i in range(min(most, count))})


def _run(
    work: Callable[[], object], folder: Path, point: int | None = None, act: Callable[[], None] = lambda: None
) -> int | None:
    """The number of changes; None if the work was killed at its point, in front of which `act` is called."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other threads, which hold nothing that the work needs
        child = os.fork()
    if child == 0:
        _be(work, folder, point, act, writing)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        heard = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, KILLED), f"the work ended with {code}: {heard}"
    return None if code == KILLED else int(heard)


def _be(work: Callable[[], object], folder: Path, point: int | None, act: Callable[[], None], writing: int) -> None:
    """The life of a child; never returns."""
    signal.alarm(SECONDS)
    within, numbers, write = os.fspath(folder), itertools.count(), os.write

    def change() -> None:
        if next(numbers) == point:
            act()

    def hook(event: str, given: tuple[Any, ...]) -> None:
        changes = event in CHANGES or (event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR))
        in_opened = event in REMOVALS and given[1] != -1  # of a folder that is open: shutil.rmtree removes so
        if changes and (in_opened or str(given[0]).startswith(within)):
            change()

    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        def changing(*given: Any) -> Any:
            change()
            return call(*given)

        return changing

    try:
        for name in WRITES:
            setattr(os, name, before(getattr(os, name)))
        sys.addaudithook(hook)
        work()
        write(writing, str(next(numbers)).encode())
        os._exit(0)
    except BaseException:
        write(writing, traceback.format_exc().encode())
        os._exit(FAILED)
