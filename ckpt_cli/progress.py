"""Progress on stderr: a bar on a terminal, else a line every half minute."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import click

_EVERY = 30.0


class Bar:
    """Shows the progress of a command. Called from any thread, with the bytes copied so far and the total."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._stack = ExitStack()
        self._show: Callable[[int], None] | None = None
        self._total, self._done = -1, 0

    def __call__(self, done: int, total: int) -> None:
        if self._show is None or total != self._total or done < self._done:  # another job starts
            self._stack.close()
            self._total, self._done = total, 0
            self._show = self._stack.enter_context(_counter(self._label, total))
        self._show(done - self._done)
        self._done = done

    def show_status(self, status: object) -> None:
        """Print a line about the cluster that works; it moves a bar down."""
        click.echo(f"{self._label}: {status}", err=True)

    def close(self) -> None:
        """Remove the bar."""
        self._stack.close()


@contextmanager
def progress_bar(label: str) -> Iterator[Bar]:
    """A callback for the library's functions that shows a bar on a terminal, lines elsewhere."""
    bar = Bar(label)
    try:
        yield bar
    finally:
        bar.close()


@contextmanager
def _counter(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that counts bytes, up to `total`. It may be called from any thread."""
    if sys.stderr is None:  # closed by the parent process
        yield lambda nbytes: None
        return
    if not on_terminal():
        yield _Lines(label, total)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


def on_terminal() -> bool:
    """Is stderr a terminal?"""
    return sys.stderr is not None and sys.stderr.isatty()


@contextmanager
def announced(text: str, after: float, when: Callable[[], bool]) -> Iterator[None]:
    """Within the context, print a line on stderr, once, after so many seconds, as soon as `when` returns True."""
    done = threading.Event()

    def wait() -> None:
        while not done.wait(after):
            if when():
                click.echo(text, err=True)
                return

    threading.Thread(target=wait, name="ckpt-announced", daemon=True).start()
    try:
        yield
    finally:
        done.set()


class _Lines:
    """Progress for logs: a line every half minute, none for short work."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._started = self._printed = time.monotonic()
        self._lock = threading.Lock()

    def __call__(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            now = time.monotonic()
            if now - self._printed < _EVERY:
                return
            self._printed = now
            rate = self._done / (now - self._started)
        left = max(self._total - self._done, 0) / max(rate, 1)
        share = 100 * self._done // max(self._total, 1)
        print(f"{self._label}: {share} %, {rate / 2**20:.0f} MiB/s, {left:.0f} s left", file=sys.stderr, flush=True)
