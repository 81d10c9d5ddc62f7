"""Defer Ctrl-C to a safe place.

Python raises KeyboardInterrupt wherever the main thread is, even if it holds a lock that a worker waits for; then both
would wait for ever. So while workers run, a signal only sets an event, which they check between two slabs.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

_KEPT = "ckpt_kept_files"


class Interrupt(threading.Event):
    """Whether a signal has come, and which one."""

    number: int = signal.SIGINT


@dataclass(frozen=True)
class KeptFiles:
    """What an interrupted job leaves, so that it can be continued."""

    nbytes: int
    where: str
    clean_command: str
    """The command that removes them, in quotes."""

    def attach(self, error: KeyboardInterrupt) -> None:
        """Let the error state it. One of another class would not end Python as an interrupt does."""
        vars(error)[_KEPT] = self

    @staticmethod
    def of(error: BaseException | None) -> "KeptFiles | None":
        """What was attached to an error; None if nothing was."""
        return getattr(error, _KEPT, None)


@contextmanager
def deferred_interrupts() -> Iterator[threading.Event]:
    """Within the context, SIGINT or SIGTERM only sets the event. A second signal ends the process, like a crash."""
    interrupted = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted  # signals come to the main thread only
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        interrupted.number = number
        interrupted.set()

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def raise_if_interrupted(interrupted: threading.Event) -> None:
    """Raise KeyboardInterrupt if the event is set; its argument is the number of the signal, if one came."""
    if interrupted.is_set():
        raise KeyboardInterrupt(*((interrupted.number,) if isinstance(interrupted, Interrupt) else ()))


@contextmanager
def interruptible(count_bytes: Callable[[int], None]) -> Iterator[Callable[[int], None]]:
    """Within the context, interrupts are deferred. Its function calls `count_bytes`, and raises if one came."""
    with deferred_interrupts() as interrupted:

        def count(nbytes: int) -> None:
            raise_if_interrupted(interrupted)
            count_bytes(nbytes)

        yield count
