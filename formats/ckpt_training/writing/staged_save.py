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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ckpt.pipeline.folder_target import LOCK, make_staging, remove_staging, staging_folder
from ckpt.pipeline.lease import hold
from ckpt.pipeline.target import PUBLISHED
from ckpt_formats.core.errors import IncompleteError, OutputError
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.publish import flush, rename_new
from ckpt_training.writing.save_orders import SaveSettings, path_of_step

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


@dataclass(eq=False)
class StagedSave:
    """The part of one rank in a save. `close` ends it."""

    settings: SaveSettings
    step: int
    seconds: Callable[[], float]
    """Returns how long to wait for another rank that makes no progress."""
    _stack: ExitStack = field(default_factory=ExitStack)

    def __post_init__(self) -> None:
        self.target = path_of_step(self.settings.path, self.step)
        self.folder = staging_folder(self.target)
        self.data = self.folder / f"data-{self.settings.token}"
        self._place = FolderPlace(self.folder, is_own=True)

    def begin(self) -> None:
        """Make the folder, and lock this rank's file. Rank 0 also takes the right to write the target.

        Raises `OutputError`, `LockedError`, `OSError`.
        """
        if os.path.lexists(self.target):
            raise _exists(self.step, self.target)
        self._make()
        if self.settings.rank == 0:
            self._stack.enter_context(hold(FolderPlace(self.folder), LOCK, self.target))
            self._remove_others()
        file = os.open(self._own("writing", self.settings.rank), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._stack.callback(os.close, file)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(file, b"\n")
        (self.data / "packs").mkdir(parents=True, exist_ok=True)

    def _make(self) -> None:
        make_staging(self.folder, self.target)
        os.close(os.open(self.folder / LOCK, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600))

    def hand_over(self, receipt: bytes) -> None:
        """Give rank 0 the receipt of this rank. Raises `OSError`, `OutputError`."""
        self._make()
        self._place.create(self._name("receipt", self.settings.rank), receipt)

    def receipts(self) -> list[bytes]:
        """Wait for the receipts of all ranks. Raises `IncompleteError` if the process of a rank has ended or hangs."""
        return [self._await(self._name("receipt", rank), rank) for rank in range(self.settings.ranks)]

    def state(self, outcome: SaveOutcome) -> None:
        """State to all ranks how the save ended. Raises `OSError`, `OutputError`."""
        self._make()
        with suppress(FileExistsError):
            self._place.create(self._outcome, json.dumps(vars(outcome)).encode())

    def outcome(self) -> SaveOutcome:
        """Wait until rank 0 states how the save ended. Raises `IncompleteError` if its process has ended or hangs."""
        outcome = SaveOutcome(**json.loads(self._await(self._outcome, 0)))
        with suppress(OSError):
            self._place.create(self._name("seen", self.settings.rank), b"")
        return outcome

    def publish(self, target: Path) -> None:
        """Rename the data to the target, which appears whole. Raises `OutputError` if it exists."""
        with suppress(FileExistsError):
            self._place.create(PUBLISHED, b"")
        try:
            rename_new(self.data, target)
        except FileExistsError:
            raise _exists(self.step, target) from None
        flush(target.parent)

    def was_seen(self) -> bool:
        """Return whether all other ranks have read the outcome."""
        return all(self._own("seen", rank).exists() for rank in range(1, self.settings.ranks))

    def close(self, *, remove: bool = False) -> None:
        """End the part of this rank. With `remove`, remove the folder."""
        if remove:
            remove_staging(self.folder)
        self._stack.close()

    @property
    def _outcome(self) -> str:
        return f"outcome-{self.settings.token}"

    def _await(self, name: str, writer: int) -> bytes:
        """Wait for a file that the process of the rank `writer` creates."""
        begin, pause = time.monotonic(), _FIRST_PAUSE
        while (there := self._place.read(name)) is None:
            if _was_left(self._own("writing", writer)):
                if (there := self._place.read(name)) is not None:
                    break
                raise IncompleteError(f"the process that writes the saves of rank {writer} has given up, or has ended")
            if not self.folder.is_dir():
                raise IncompleteError("the folder in which ranks write the save was removed", where=self.folder)
            if time.monotonic() - begin > self.seconds():
                raise IncompleteError(
                    f"rank {writer} has not written its part of step {self.step} within {self.seconds():g} s",
                    hint="Call save() on every rank, with the same step.",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return there[0]

    def _remove_others(self) -> None:
        """Remove what killed runs have left in the folder: nobody will publish it."""
        for path in self.folder.iterdir():
            if self.settings.token not in path.name and path.name != LOCK:
                shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def _name(self, what: str, rank: int) -> str:
        return f"{what}-{self.settings.token}-{rank:05d}"

    def _own(self, what: str, rank: int) -> Path:
        return self.folder / self._name(what, rank)


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
