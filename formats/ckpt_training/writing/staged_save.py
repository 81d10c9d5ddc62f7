"""A save while its ranks write it: a folder beside its target, in which processes see how far the others are.

    lock              held by the process of rank 0
    writing-…-RANK    locked while the process of a rank takes part
    data-…/           the checkpoint, which is renamed to publish it
    receipt-…-RANK    what a rank has written, or why it has not
    outcome-…         whether the save was published, and its content id
    seen-…-RANK       a rank has read the outcome
    published         the save was complete, if the target exists

All names but the first and the last have the token of the Saver, so that nothing of a killed run counts.
A folder of a killed run is a leftover, as that of an interrupted job: `ckpt clean` removes it.
"""

import fcntl
import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from ckpt.pipeline.folder_target import LOCK, make_staging, remove_staging, staging_folder
from ckpt.pipeline.lease import hold
from ckpt.pipeline.target import PUBLISHED
from ckpt_formats.core.errors import IncompleteError, OutputError
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.place import Place
from ckpt_formats.core.publish import flush, rename_new
from ckpt_training.writing.save_formats import SaveFormat
from ckpt_training.writing.save_orders import SaveSettings, path_of_step

A = TypeVar("A")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.2


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended, as rank 0 states it to all ranks."""

    content: str | None = None
    """The content id of the checkpoint that was published."""
    kind: str = ""
    """`base` or `delta`."""
    error: str | None = None
    """Why nothing was published."""
    sent_at: int | None = None
    """When a save was published that all ranks send to the memory of peers, in nanoseconds since 1970; None: none."""


@dataclass(eq=False)
class StagedSave(ABC):
    """The part of one rank in a save. `close` ends it."""

    settings: SaveSettings
    format: SaveFormat[Any]
    step: int
    seconds: Callable[[], float]
    """Returns how long to wait for another rank that makes no progress."""
    scratch: Path
    """A folder of this process."""
    target: Path = field(init=False)
    data: Path = field(init=False)
    """The folder in which this rank writes its file."""
    stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.target = path_of_step(self.settings.path, self.step)

    @property
    @abstractmethod
    def place(self) -> Place:
        """Where processes see how far the others are."""

    @abstractmethod
    def begin(self) -> None:
        """Take part in the save. Rank 0 also takes the right to write the target.

        Raises `OutputError`, `LockedError`, `OSError`.
        """

    @abstractmethod
    def deliver(self, file: str) -> str:
        """Let the file of this rank be where the checkpoint has it. Returns its e_tag; empty in a file system."""

    @abstractmethod
    def assemble(self, files: Sequence[Receipt], write: Callable[[Path], A]) -> A:
        """Write what makes a checkpoint of the files of all ranks. `write` gets the folder into which it writes."""

    @abstractmethod
    def publish(self) -> None:
        """Let the checkpoint appear, whole. Raises `OutputError`."""

    @abstractmethod
    def close(self, *, remove: bool = False) -> None:
        """End the part of this rank. With `remove`, remove what is known of the save, and what was not published."""

    def hand_over(self, receipt: bytes) -> None:
        """Give rank 0 the receipt of this rank. Raises `OSError`, `OutputError`."""
        self.place.create(self.name("receipt", self.settings.rank), receipt)

    def receipts(self) -> list[bytes]:
        """Wait for the receipts of all ranks. Raises `IncompleteError` if the process of a rank has ended or hangs."""
        return [self.wait_for(self.name("receipt", rank), rank) for rank in range(self.settings.ranks)]

    def state(self, outcome: SaveOutcome) -> None:
        """State to all ranks how the save ended. Raises `OSError`, `OutputError`."""
        with suppress(FileExistsError):
            self.place.create(self._outcome, json.dumps(vars(outcome)).encode())

    def outcome(self) -> SaveOutcome:
        """Wait until rank 0 states how the save ended. Raises `IncompleteError` if its process has ended or hangs."""
        outcome = SaveOutcome(**json.loads(self.wait_for(self._outcome, 0)))
        with suppress(OSError):
            self.place.create(self.name("seen", self.settings.rank), b"")
        return outcome

    def was_seen(self) -> bool:
        """Return whether all other ranks have read the outcome."""
        return all(self.place.head(self.name("seen", rank)) is not None for rank in range(1, self.settings.ranks))

    def name(self, what: str, rank: int) -> str:
        return f"{what}-{self.settings.token}-{rank:05d}"

    def wait_for(self, name: str, writer: int) -> bytes:
        """Wait for a note that the process of the rank `writer` creates. Raises as `receipts`."""
        begin, pause = time.monotonic(), _FIRST_PAUSE
        while (there := self.place.read(name)) is None:
            problem = self.problem_of(writer)
            if problem is not None:
                if (there := self.place.read(name)) is not None:
                    break
                raise IncompleteError(problem, where=self.target)
            if time.monotonic() - begin > self.seconds():
                raise IncompleteError(
                    f"rank {writer} has not written its part of step {self.step} within {self.seconds():g} s",
                    hint="Call save() on every rank, with the same step.",
                )
            time.sleep(pause)
            pause = min(2 * pause, max(_LONGEST_PAUSE, self.place.look_seconds / 5))
        return there[0]

    def problem_of(self, writer: int) -> str | None:
        """Why nothing more will come from the process of a rank; None if that is not known."""
        return None

    @property
    def _outcome(self) -> str:
        return f"outcome-{self.settings.token}"


class FolderSave(StagedSave):
    """A save into a file system."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.folder = staging_folder(self.target)
        self.data = self.folder / f"data-{self.settings.token}"

    @property
    def place(self) -> FolderPlace:
        return FolderPlace(self.folder, is_own=True)

    def begin(self) -> None:
        if os.path.lexists(self.target):
            raise _exists(self.step, self.target)
        self._make()
        if self.settings.rank == 0:
            self.stack.enter_context(hold(FolderPlace(self.folder), LOCK, self.target))
            self._remove_others()
        file = os.open(self._own("writing", self.settings.rank), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self.stack.callback(os.close, file)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(file, b"\n")
        self.data.mkdir(parents=True, exist_ok=True)

    def deliver(self, file: str) -> str:
        return ""

    def assemble(self, files: Sequence[Receipt], write: Callable[[Path], A]) -> A:
        return write(self.data)

    def publish(self) -> None:
        """Rename the data to the target."""
        with suppress(FileExistsError):
            self.place.create(PUBLISHED, b"")
        try:
            rename_new(self.data, self.target)
        except FileExistsError:
            raise _exists(self.step, self.target) from None
        flush(self.target.parent)

    def close(self, *, remove: bool = False) -> None:
        if remove:
            remove_staging(self.folder)
        self.stack.close()

    def hand_over(self, receipt: bytes) -> None:
        self._make()
        super().hand_over(receipt)

    def state(self, outcome: SaveOutcome) -> None:
        self._make()
        super().state(outcome)

    def problem_of(self, writer: int) -> str | None:
        if _was_left(self._own("writing", writer)):
            return f"the process that writes the saves of rank {writer} has given up, or has ended"
        return None if self.folder.is_dir() else "the folder in which ranks write the save was removed"

    def _make(self) -> None:
        make_staging(self.folder, self.target)
        os.close(os.open(self.folder / LOCK, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def _remove_others(self) -> None:
        """Remove what killed runs have left in the folder: nobody will publish it."""
        for path in self.folder.iterdir():
            if self.settings.token not in path.name and path.name != LOCK:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _own(self, what: str, rank: int) -> Path:
        return self.folder / self.name(what, rank)


def _was_left(path: Path) -> bool:
    """Return whether a rank had begun to write, and its process has ended since."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        with suppress(BlockingIOError, OSError):
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return os.fstat(file).st_size > 0  # an empty file is not locked yet
        return False
    finally:
        os.close(file)


def _exists(step: int, target: Path) -> OutputError:
    return OutputError(f"step {step} was saved already", where=target, hint="Choose another target, or a later step.")
