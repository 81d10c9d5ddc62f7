"""What is shown while a command works: on a terminal after a while, in a log now and then, and no number is cut."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORK = """
import time
from ckpt_cli.progress import Bar
bar = Bar("converting", after=0.05)
time.sleep(0.2)
for done in range(1, 11):
    bar(done << 20, 10 << 20)
    time.sleep(0.05)
bar.close()
"""


# Each step waits until two pictures are whole: the second one began after the step, however busy the machine is.
DRAWN = """
import threading
from rich.progress import Progress
from ckpt_cli.progress import Bar
drawn, refresh = threading.Event(), Progress.refresh
def refreshed(progress):
    refresh(progress)
    drawn.set()
Progress.refresh = refreshed
def look():
    for _ in range(2):
        drawn.clear()
        assert drawn.wait(300), "nothing is drawn"
bar = Bar("converting", after=0.05)
look()
for done in range(2, 11, 2):
    bar(done << 20, 10 << 20)
    look()
bar.close()
"""


def on_a_terminal(columns: int, work: str, **env: str) -> str:
    """What a child process that does some work writes to a terminal of so many columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}
    child = subprocess.Popen(
        [sys.executable, "-c", work], cwd=ROOT, stdout=theirs, stderr=theirs, env={**environment, **env}
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            read = os.read(ours, 1 << 16)
        except OSError:  # Linux's way of saying that the other end is closed
            break
        if not read:
            break
        shown += read
    os.close(ours)
    assert child.wait(300) == 0, shown
    return shown.decode()


@pytest.mark.parametrize("columns", [100, 40])
def test_a_terminal_shows_the_rate_and_the_time_left(columns: int) -> None:
    shown = on_a_terminal(columns, DRAWN, TERM="xterm", NO_COLOR="1")
    last = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", shown).split("\rconverting")[-1]
    assert re.search(r"[\d.]+ [KM]iB/s +\d:\d\d:\d\d", last), last
    assert ("of 10.0 MiB" in last) == (columns == 100)
    assert "…" not in shown
    assert "\x1b[3" not in shown  # no colour
    assert shown.endswith("\x1b[2K")  # and nothing stays


def test_a_terminal_that_cannot_redraw_gets_one_line() -> None:
    assert on_a_terminal(80, WORK, TERM="dumb") == "converting ...\r\n"


def without_terminal(first: str) -> str:
    """What a child process writes into a pipe; `first` is a line of its script."""
    script = f"from ckpt_cli import progress\n{first}\n{WORK}"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "")
    return done.stderr


def test_a_log_gets_a_line_from_time_to_time() -> None:
    assert without_terminal("assert progress._LINE_EVERY == 30.0") == ""  # the work takes less
    began = time.monotonic()
    lines = without_terminal("progress._LINE_EVERY = 0.15").splitlines()
    assert 2 <= len(lines) <= (time.monotonic() - began) / 0.15
    pattern = r"converting: \d.*MiB of 10\.0 MiB, \d+%, [\d.]+ [KM]iB/s, \d+ s, about \d+ s left"
    assert re.fullmatch(pattern, lines[-1]), lines


def test_quiet_shows_no_progress() -> None:
    assert without_terminal("progress._LINE_EVERY = 0.15; progress.show(False)") == ""
