"""Where a target grows until it is complete, whatever the target is in."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal, Protocol

from ckpt_formats.core.errors import LockedError, OutputError, UnsupportedError
from ckpt_formats.core.format import Receipt, WritableFormat
from ckpt_formats.core.notices import Notice, Weight

Point = Literal["written", "journalled", "settled", "committed", "before rename", "renamed"]
"""The moments of a run at which tests inject crashes, and changes by other processes."""


def _nothing(point: Point) -> None:
    pass


reached: Callable[[Point], None] = _nothing
"""Called at each point, also by several threads at once. It does nothing; tests replace it to inject faults."""


class Sink(Protocol):
    """Where files are written, and what happens to one that is finished."""

    @property
    def data(self) -> Path:
        """A folder of the file system, in which formats write files."""

    @property
    def parallel(self) -> int:
        """How many files may be persisted at once."""

    def persist(self, receipt: Receipt) -> Receipt:
        """Bring a finished file to where a crash of this process does not reach it. From any thread."""


UNFLUSHED = Notice(
    "the file system cannot flush folders to the disk: if the machine fails soon, files of the target may be missing",
    weight=Weight.UNSURE,
)


class SharedTarget(Protocol):
    """What a process elsewhere needs to write files of a target: plain data, to be sent."""

    @property
    def check_every(self) -> float:
        """Seconds between two calls of `is_open`, by each worker: it costs a request."""

    def attempt(self) -> AbstractContextManager[Sink]:
        """A sink for some files. Raises `OutputError` if the target cannot be written from here."""

    def is_open(self) -> bool:
        """Whether the run goes on: if not, nobody waits for the files any more."""


class Staging(ABC):
    """What is there of a target before it is complete. It is also the sink of its files."""

    target: Path
    notes: tuple[Notice, ...] = ()
    """What the user should know of a target that is published."""

    @property
    @abstractmethod
    def data(self) -> Path:
        """As of `Sink`; `commit` of a format writes there, too."""

    @property
    @abstractmethod
    def disk(self) -> Path:
        """Whose file system must have space for what is written."""

    @property
    @abstractmethod
    def parallel(self) -> int:
        """As of `Sink`."""

    @property
    @abstractmethod
    def how_to_give_up(self) -> str:
        """How the user removes what an interrupted run left: part of a sentence."""

    @abstractmethod
    def begin(self, job_id: str, files: Sequence[str]) -> None:
        """Continue what a job of this id has started, or remove what another job wrote. `files`: those of the plan."""

    @abstractmethod
    def receipts(self, format: WritableFormat) -> Iterable[Receipt]:
        """Receipts of an earlier run whose files are still as they were written."""

    @abstractmethod
    def persist(self, receipt: Receipt) -> Receipt:
        """As of `Sink`."""

    @abstractmethod
    def note(self, receipt: Receipt) -> None:
        """Add the receipt of a file that is persisted to the journal."""

    def shared(self) -> AbstractContextManager[SharedTarget]:
        """Within, processes elsewhere can write files of the target."""
        raise UnsupportedError("only one machine can write this target", where=self.target)

    @abstractmethod
    def publish(self, product: str | None) -> None:
        """Make the target appear: the file `product`, or the folder. What is there of another job is never replaced."""

    @abstractmethod
    def discard(self) -> None:
        """Remove everything that was written."""


def exists(target: Path) -> OutputError:
    return OutputError("the target exists already", where=target, hint="Choose another name, or remove it first.")


def inside(target: Path) -> OutputError:
    what = "the target is inside the source, or the source inside the target"
    return OutputError(what, where=target, hint="Choose another target.")


def locked(target: Path) -> LockedError:
    return LockedError("another process is writing this target", where=target, hint="Wait for it to end.")
