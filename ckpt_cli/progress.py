"""Progress on stderr: what a command does, how fast, and how long it will take.

A terminal shows it after half a second. Elsewhere, as in the log of a job, a command prints a line each half minute.
With `--quiet`, nothing is shown.
"""

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from rich.progress import Progress

_SILENCE = 0.5
"""Seconds after which a terminal shows what a command does."""
_REDRAW = 0.1
"""Seconds between two pictures of a bar."""
_LINE_EVERY = 30.0
"""Seconds between two lines where stderr is no terminal."""
_NARROW = 60
"""Columns below which a terminal has no place for the bar and the bytes: no number is cut."""


_is_shown = True


def show(is_shown: bool) -> None:
    """Show progress, or nothing of it, until this is called again."""
    global _is_shown
    _is_shown = is_shown


class Bar:
    """Shows the progress of a command. Called from any thread, with the bytes copied so far and the total.

    A thread of its own draws it, so that those who copy do not wait for a terminal.
    """

    def __init__(self, label: str, after: float = _SILENCE) -> None:
        self._label, self._after = label, after
        self._done, self._total = 0, -1
        """A total below zero: nothing has been copied yet, so nobody knows how much there is."""
        self._jobs = 0
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if _is_shown and sys.stderr is not None:
            work = self._draw if on_terminal() else self._tell
            self._thread = threading.Thread(target=work, name="ckpt-progress", daemon=True)
            self._thread.start()

    def __call__(self, done: int, total: int) -> None:
        if total != self._total or done < self._done:  # another job starts
            self._jobs += 1
        self._done, self._total = done, total

    def show_status(self, status: object) -> None:
        """Print a line about the cluster that works; it moves a bar down."""
        click.echo(f"{self._label}: {status}", err=True)

    def close(self) -> None:
        """Remove the bar."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _tell(self) -> None:
        """Print a line from time to time, for a log."""
        began = time.monotonic()
        with suppress(OSError):
            while not self._closed.wait(_LINE_EVERY):
                click.echo(f"{self._label}: {self._line(time.monotonic() - began)}", err=True)

    def _line(self, seconds: float) -> str:
        from ckpt_formats.core.text import format_nbytes

        done, total = self._done, self._total
        if total <= 0:
            return f"{seconds:.0f} s"
        rate = f"{format_nbytes(done / seconds)}/s, {seconds:.0f} s"
        left = f", about {seconds * (total - done) / done:.0f} s left" if done else ""
        return f"{format_nbytes(done)} of {format_nbytes(total)}, {done / total:.0%}, {rate}{left}"

    def _draw(self) -> None:
        if self._closed.wait(self._after):
            return
        with suppress(OSError):  # the terminal may be gone
            self._redraw()

    def _redraw(self) -> None:
        if not _moves_cursor():
            click.echo(f"{self._label} ...", err=True)
            return
        with _progress() as progress:
            task, job = progress.add_task(self._label, total=None), 0
            while True:
                if job != self._jobs:
                    job = self._jobs
                    progress.reset(task, total=max(self._total, 0), completed=self._done)
                elif self._total >= 0:
                    progress.update(task, completed=self._done)
                progress.refresh()
                if self._closed.wait(_REDRAW):
                    return


@contextmanager
def progress_bar(label: str) -> Iterator[Bar]:
    """A callback for the library's functions that shows a bar on a terminal."""
    bar = Bar(label)
    try:
        yield bar
    finally:
        bar.close()


def _progress() -> "Progress":
    """A bar with the bytes, the rate and the time left. It is as wide as the terminal, and removed at the end."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
    from rich.text import Text

    from ckpt_formats.core.text import format_nbytes

    class Bytes(ProgressColumn):
        def render(self, task: Task) -> Text:
            if task.total is None:
                return Text("")
            return Text(f"{format_nbytes(task.completed)} of {format_nbytes(task.total)}", no_wrap=True)

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text("" if task.speed is None else f"{format_nbytes(task.speed)}/s", no_wrap=True)

    console = Console(stderr=True)
    what, left = TextColumn("{task.description}"), TimeRemainingColumn(elapsed_when_finished=True)
    columns = (what, BarColumn(None), Bytes(), Rate(), left) if console.width >= _NARROW else (what, Rate(), left)
    return Progress(
        *columns,
        console=console,
        transient=True,
        auto_refresh=False,
        expand=True,
        redirect_stdout=False,  # results are no part of the picture; lines on stderr are printed above the bar
    )


def on_terminal() -> bool:
    """Is stderr a terminal that shows progress?"""
    return _is_shown and sys.stderr is not None and sys.stderr.isatty()


def _moves_cursor() -> bool:
    """Can the terminal draw a line again?"""
    return os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


def doing(what: str) -> AbstractContextManager[None]:
    """Within the context, a terminal shows what the command does after half a second, a log after half a minute."""
    if not _is_shown or sys.stderr is None:
        return nullcontext()
    return announced(f"{what} ...", _SILENCE if on_terminal() else _LINE_EVERY)


@contextmanager
def announced(text: str, after: float) -> Iterator[None]:
    """Within the context, print a line on stderr, once, after so many seconds."""
    done = threading.Event()

    def wait() -> None:
        if not done.wait(after):
            click.echo(text, err=True)

    threading.Thread(target=wait, name="ckpt-announced", daemon=True).start()
    try:
        yield
    finally:
        done.set()
