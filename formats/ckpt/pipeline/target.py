"""What there is of a target before it is complete: one life of a target, wherever it is.

Every write is a shared write to a `Place`: of data, whose names are those of the target's files, and of notes.

    job              what the job is
    journal/         receipts of finished files
    run-TOKEN        there while workers on other machines may write
    lease            who writes, or, of shards that write together, who publishes
    published        everything is there: the notes are to be removed

A process joins or continues the job (`begin`), writes files (`attempt`), notes their receipts, and publishes the target
when all are there (`publishing`, `publish`). How a target appears differs: a folder is renamed (`folder_target`); in a
store, the files by which formats know a checkpoint are put last (`bucket_target`).
"""

import os
import shutil
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import ClassVar, Literal, Protocol
from uuid import uuid4

from ckpt.pipeline.job_note import JobNote
from ckpt.pipeline.journal import Journal
from ckpt.pipeline.lease import Busy, Right, acquire
from ckpt.pipeline.resources import Execution
from ckpt.pipeline.scratch import scratch_folder
from ckpt_formats.core.errors import OutputError
from ckpt_formats.core.format import Receipt, WritableFormat
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.own_folder import check_own
from ckpt_formats.core.place import Place
from ckpt_formats.stores.e_tags import TAG

Point = Literal["written", "journalled", "settled", "committed", "before rename", "renamed"]
"""The moments of a run at which tests inject crashes, and changes by other processes."""


def _nothing(point: Point) -> None:
    pass


reached: Callable[[Point], None] = _nothing
"""Called at each point, also by several threads at once. It does nothing; tests replace it to inject faults."""

JOB, JOURNAL, LEASE, PUBLISHED, ATTEMPTS = "job", "journal", "lease", "published", "attempts"
_RUN = "run-"
_NUMBERS = count()


class Sink(Protocol):
    """Where files are written, and what happens to one that is finished."""

    @property
    def data(self) -> Path:
        """A folder of the file system, in which formats write files."""

    @property
    def parallel(self) -> int:
        """How many files may be persisted at once."""

    def flushes(self, file: str) -> bool:
        """Whether `persist` flushes this file if it is large: the disk may begin with it while it is written."""

    def persist(self, receipt: Receipt) -> Receipt:
        """Bring a finished file to where a crash of this process does not reach it. From any thread."""


@dataclass(frozen=True)
class Attempt:
    """A sink of files that other processes may write too: each appears complete, under its final name.

    A file may be written twice, anywhere and at once. Who comes second finds it there: if it has the same bytes, all is
    well; otherwise a process of another job has put it, and that is an error.
    """

    data: Path
    place: Place
    check: Callable[[], None]
    """Raises if this process may no longer write."""
    parallel: ClassVar[int] = 4

    def flushes(self, file: str) -> bool:
        return False

    def persist(self, receipt: Receipt) -> Receipt:
        """Give the file to the place, and remove it here. Raises `OutputError` if another job has put it."""
        file, tag = self.data / receipt.file, receipt.entry.get(TAG)
        e_tag: str | None
        try:
            e_tag = self.place.create_from(receipt.file, file, self.check, tag=tag if isinstance(tag, str) else None)
        except FileExistsError:
            e_tag = self.place.tag_if_equal(receipt.file, file)
        if e_tag is None:
            raise OutputError(
                "a process of another job has created this object",
                where=self.place.where(receipt.file),
                hint="Run the same command again when nobody else writes at this place.",
            )
        file.unlink(missing_ok=True)
        return replace(receipt, e_tag=e_tag)


@dataclass(frozen=True)
class SharedTarget:
    """What a process elsewhere needs to write files of a target: plain data, to be sent; no credentials are in it."""

    data: Place
    notes: Place
    token: str | None = None
    """The note `run-TOKEN` exists while the run goes on. Its name is new for each run, so no cache of a network file
    system can have an older one. None: processes share the job, and none of them runs it."""
    scratch: Path | None = None
    """Where scratch folders are created; None: where the system has temporary files."""

    @property
    def check_every(self) -> float:
        """Seconds between two calls of `is_open`, by each worker: it costs a request."""
        return 4 * self.notes.look_seconds

    def is_open(self) -> bool:
        """Whether the run goes on: if not, the files are no longer needed."""
        return self.token is None or self.notes.head(f"{_RUN}{self.token}") is not None

    def check(self) -> None:
        """Raise `OutputError` if the run has ended."""
        if not self.is_open():
            raise run_has_ended(self.notes.where())

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """A sink for some files. Raises `OutputError` if the target cannot be written from here, or the run has ended.

        In a folder, a process that was thought dead can do no harm: it has the folder of data open, and if that was
        removed or replaced meanwhile, its rename fails.
        """
        try:
            if self.notes.local is not None:
                check_own(self.notes.local)
            # In this order: who begins another job removes the mark first, then the files.
            with self.data.opened() as data, self._scratch() as folder:
                self.check()
                yield Attempt(folder, data, self.check)
        except FileNotFoundError:
            if self.is_open():
                raise
            raise OutputError(
                f"the worker on {socket.gethostname()} does not see the folder in which the target is written",
                where=self.notes.where(),
                hint="All workers must see source and target under the same paths: on a shared file system, "
                "or in an object store.",
            ) from None
        finally:
            self._tidy()

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        """A folder for files that are not finished: on the file system of the target, if it is in one."""
        if self.notes.local is None:
            with scratch_folder(self.scratch) as folder:
                yield folder
            return
        folder = _new_folder(self.notes.local / ATTEMPTS)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _tidy(self) -> None:
        """Remove the folders that this attempt has created again after the run had ended, and removed them."""
        if self.data.local is not None and self.notes.local is not None and not self.data.local.exists():
            with suppress(OSError):
                (self.notes.local / ATTEMPTS).rmdir()
                self.notes.local.rmdir()


@dataclass(eq=False)
class StagedTarget(ABC):
    """What there is of a target before it is complete."""

    path: Path
    data: Place
    notes: Place
    resources: Execution
    workspace: Path
    """A folder of the file system for what is needed while the target is written."""
    right: Right | None
    """The right to write the target, or, of shards, to publish it; None while a shard does not have it."""
    product: str | None = None
    """The name of the file in the folder of data, if the target is one file."""
    notices: tuple[Notice, ...] = ()
    """What the user should know of a target that is published."""
    job: JobNote = field(init=False)
    """Set by `begin`."""

    @cached_property
    def journal(self) -> Journal:
        """The receipts of all processes. Used only after `begin`, which knows where the notes of shards are."""
        return Journal(self.notes.within(JOURNAL))

    @property
    def is_shared(self) -> bool:
        """Whether shards write the target together; else this process alone has the right to write it."""
        return self.resources.shard is not None

    @property
    @abstractmethod
    def disk(self) -> Path:
        """Whose file system must have space for what is written."""

    @property
    @abstractmethod
    def clean_command(self) -> str:
        """The command that removes what an interrupted run left, in quotes."""

    @abstractmethod
    def begin(self, job: JobNote) -> None:
        """Continue this job, if it is noted here. Else remove what another job wrote and note this one.

        Shards join their job. Raises `OutputError` if shards of another one write here, or if the target exists.
        """

    @abstractmethod
    def receipts(self, format: WritableFormat) -> dict[str, Receipt]:
        """Receipts of files that are there as they were written, by name, from all processes."""

    @abstractmethod
    def attempt(self) -> AbstractContextManager[Sink]:
        """A sink for the files of this process."""

    def note(self, receipt: Receipt) -> None:
        """Add the receipt of a file that is persisted to the journal."""
        if self.journal.add(receipt):
            self.flush()

    def flush(self) -> None:
        """Write the receipts that are not in the journal yet."""
        if self.journal.waiting and self.right is not None:
            self.right.check()  # the notes of another process may be at this place now
        self.journal.flush()

    @contextmanager
    def shared(self) -> Iterator[SharedTarget]:
        """Let processes elsewhere write files of the target. Attempts of earlier runs are removed."""
        self.end_runs()
        if self.notes.local is not None:
            shutil.rmtree(self.notes.local / ATTEMPTS, ignore_errors=True)
            (self.notes.local / ATTEMPTS).mkdir(exist_ok=True)
        token = uuid4().hex[:16]
        mark = f"{_RUN}{token}"
        self.notes.create(mark, b"")
        try:
            yield SharedTarget(self.data.absolute(), self.notes.absolute(), token, self.resources.scratch)
        finally:
            self.notes.delete([mark])

    def end_runs(self) -> None:
        """Tell processes of earlier runs elsewhere that their files are no longer needed."""
        self.notes.delete([name for name in self.notes.list() if name.startswith(_RUN)])

    @contextmanager
    def publishing(self, wait: bool, stop: threading.Event) -> Iterator[str | None]:
        """Hold the right to publish. Yields None if this process has it, else a description of the holder.

        With `wait`, waits until another holder has ended or died. Yields None as well if the target is published.
        """
        if not self.is_shared:
            yield None
            return
        while isinstance(taken := acquire(self.notes, LEASE), Busy):
            if self.is_published() or not wait or stop.wait(self.notes.look_seconds):
                break
        if isinstance(taken, Busy):
            yield None if self.is_published() else str(taken)
            return
        self.right = taken
        try:
            yield None
        finally:
            self.right = None
            taken.release()

    def is_published(self) -> bool:
        """Whether shards of this job have published the target."""
        return False

    @abstractmethod
    def publish(self, receipts: Sequence[Receipt], commit: Callable[[Path], None]) -> None:
        """Call `commit` with the folder in which it writes what makes a checkpoint of the files; then publish all.

        The target appears; what is there of another job is never replaced. Raises `OutputError`.
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove everything that was written."""


def exists(target: Path) -> OutputError:
    hint = "Choose another name, or replace what is there: `overwrite` (--overwrite)."
    return OutputError("the target exists already", where=target, hint=hint)


def inside(target: Path) -> OutputError:
    what = "the target is inside the source, or the source inside the target"
    return OutputError(what, where=target, hint="Choose another target.")


def run_has_ended(where: object = None) -> OutputError:
    return OutputError("the run has ended: this file is no longer needed", where=None if where is None else str(where))


def process_name() -> str:
    """This process's machine and number, as in names of files."""
    host = "".join(c if c.isalnum() or c in "-_." else "_" for c in socket.gethostname())
    return f"{host}-{os.getpid()}"


def _new_folder(place: Path) -> Path:
    """A new folder for an attempt. Also where two processes have the same name, as in containers."""
    while True:
        path = place / f"{process_name()}-{next(_NUMBERS)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
