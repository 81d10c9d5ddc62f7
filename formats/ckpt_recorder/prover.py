"""The prover of a rank: a process that replays the rank's log beside the run, and compares it with the run's hashes.

`python -m ckpt_recorder.prover FOLDER RANK STATUS TRAINER` starts it, with a descriptor and a process id. It holds the
states of the rank. It sends lines to the trainer: `proved STEP` after each fingerprint that the replay has, and
`differs REASON` after the first that it has not; then it ends. It needs torch only if the method of an optimizer
does. It ends when the log ends, or with its trainer.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ckpt_formats.core.errors import CkptError, CorruptError
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.members import member_at, open_member
from ckpt_formats.universal.gradients.held import HeldState
from ckpt_formats.universal.gradients.layout import load
from ckpt_formats.universal.gradients.state import Base
from ckpt_training.writing.link import start_process

_STEPS = 16
"""The number of steps that are replayed between two looks at the trainer."""
_SLEEP_SECONDS = (0.02, 0.5)
"""The shortest and the longest time between two looks at a file that does not grow."""
_NICENESS = 10


class ProverLink:
    """The prover of this rank, seen from the trainer. A prover that fails never stops the recording."""

    def __init__(self, folder: Path, rank: int) -> None:
        """Start the process.

        Attributes:
            proved: The last step of which the replay had the run's hashes; None: there was none yet.
            difference: What the replay had otherwise, in words; None: nothing.
        """
        self.proved: int | None = None
        self.difference: str | None = None
        self.has_ended = False
        self._text = b""
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        try:
            self._process = start_process(__name__, folder, rank, status, files=(status,), stdin=subprocess.DEVNULL)
        finally:
            os.close(status)

    def poll(self) -> None:
        """Read what it has sent."""
        try:
            while not self.has_ended:
                data = os.read(self._status, 1 << 16)
                self.has_ended = not data
                *lines, self._text = (self._text + data).split(b"\n")
                for line in lines:
                    word, _, rest = line.decode("utf-8", "replace").partition(" ")
                    if word == "proved":
                        self.proved = int(rest)
                    else:
                        self.difference = self.difference or rest
        except BlockingIOError:
            pass

    def wait_for(self, step: int, seconds: float) -> None:
        """Wait until it has compared a step, at most for so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.poll()
            if self.has_ended or self.difference is not None or (self.proved is not None and self.proved >= step):
                return
            time.sleep(0.005)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        os.close(self._status)


class SegmentProof:
    """What is proved of the steps of a segment: in the trainer, and by the prover, once there is one."""

    def __init__(self, first: int) -> None:
        """`first`: the step at which the segment begins."""
        self._proved = first
        self._link: ProverLink | None = None

    @property
    def has_process(self) -> bool:
        """Is there a prover?"""
        return self._link is not None

    @property
    def difference(self) -> str | None:
        """How a replay of the log differs from the run, in words; None if no difference is known."""
        if self._link is not None:
            self._link.poll()
        return None if self._link is None else self._link.difference

    def start(self, folder: Path, rank: int) -> None:
        """Start the prover. Raises `OSError`."""
        self._link = ProverLink(folder, rank)

    def count(self, step: int) -> None:
        """A step is proved in the trainer."""
        if self._proved == step - 1:
            self._proved = step

    def so_far(self) -> dict[str, Any]:
        """What is known, as fields of a record: up to which step all are proved, and a difference."""
        difference = self.difference
        if self._link is not None:
            self._proved = max(self._proved, self._link.proved or 0)
        return {"proved": self._proved} | ({} if difference is None else {"differs": difference})

    def wait_for(self, step: int, seconds: float) -> None:
        """Wait until the prover has compared a step, at most for so long."""
        if self._link is not None:
            self._link.wait_for(step, seconds)

    def close(self) -> None:
        """End the prover."""
        link, self._link = self._link, None
        if link is not None:
            link.close()


def prove(folder: Path, rank: int, report: Callable[[str], None], is_over: Callable[[], bool]) -> None:
    """Replay the log of a rank for as long as it grows. Raises `CkptError` if it cannot be replayed."""
    replica = HeldState(folder, _base_of(folder), rank=rank)
    pauses = 0
    while not replica.is_loaded:
        if replica.find_start(_STEPS):
            replica.load(1)
        elif is_over():
            return
        else:
            time.sleep(_SLEEP_SECONDS[0])
    verified = replica.verified
    while True:
        before = replica.step
        try:
            replica.advance(min(replica.tail.poll(_STEPS), before + _STEPS), 1)
        except CorruptError as error:
            report(f"differs {' '.join(error.what.split())}")
            return
        if replica.verified != verified:
            verified = replica.verified
            report(f"proved {verified}")
        if replica.step > before:
            pauses = 0
            continue
        if replica.tail.has_ended or is_over():
            return
        time.sleep(min(_SLEEP_SECONDS[0] * 2**pauses, _SLEEP_SECONDS[1]))
        pauses = min(pauses + 1, 10)


def _base_of(folder: Path) -> Base | None:
    """The chain's state from which a segment goes on; None if the segment has its own."""
    layout = load(folder / "layout.json")
    if layout.parent is None:
        return None
    chain = chain_file.read(folder.parent)
    member = member_at(folder.parent, chain, layout.first)
    return Base(member.step, open_member(folder.parent, chain, member))


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICENESS)
    folder, rank, status, trainer = sys.argv[1:5]

    def report(line: str) -> None:
        with suppress(BrokenPipeError):
            os.write(int(status), line.encode() + b"\n")

    with suppress(CkptError):  # what cannot be replayed now is said by those who restore it
        prove(Path(folder), int(rank), report, lambda: os.getppid() != int(trainer))


if __name__ == "__main__":
    main()
