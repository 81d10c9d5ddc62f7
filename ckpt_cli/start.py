"""The start of the `ckpt` command, and what Ctrl-C does from then on."""

import os
import signal
from types import FrameType


def start() -> None:
    """Import the command line, and run it."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else the parent process ignores it
        signal.signal(signal.SIGINT, interrupt)
    from ckpt_cli.main import run  # an import: `interrupt` ends it in silence

    run()


def interrupt(number: int, frame: FrameType | None) -> None:
    """End what runs, with KeyboardInterrupt. While a module is imported, end the process at once, and print nothing.

    NumPy and ml_dtypes make an ImportError of what ends their import, and print a traceback. What writes defers
    signals (`ckpt.pipeline.interrupts`), so that this breaks off no more than a kill.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt(number)
