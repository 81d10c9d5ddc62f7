"""Files that several machines write into one folder: each in a folder of its own, then by one rename.

    attempts/HOST-PID-N/FILE     while it is written
    data/FILE                    when it is complete and on the disk

So a file may be written twice, anywhere and at once: what is at its final name is always complete, and the same bytes.
A process that was thought dead can do no harm: it has `data` open, and if that folder was removed or replaced
meanwhile, its rename fails.
"""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path, PurePath
from typing import ClassVar

from ckpt_formats.core.errors import OutputError
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.own_folder import check_own, create_own
from ckpt_formats.core.publish import flush_or_remove

ATTEMPTS = "attempts"
_PARALLEL = 4
_NUMBERS = count()


@dataclass(frozen=True)
class Attempt:
    """The sink of one attempt to write some files."""

    data: Path
    """The folder of the attempt, in which formats write."""
    final: int
    """The folder of complete files, open."""
    keep: bool = False
    """Whether a file that another attempt has completed stays; else it is replaced. Both have the same bytes."""
    is_wanted: Callable[[], bool] = lambda: True
    """Whether somebody waits for the files."""

    @property
    def parallel(self) -> int:
        return _PARALLEL

    def persist(self, receipt: Receipt) -> Receipt:
        """Flush the file to the disk and give it its final name. Raises `OSError` if the job was given up."""
        path = self.data / receipt.file
        flush_or_remove(path)
        if not self.is_wanted():
            raise OutputError("the run has ended, and nobody waits for this file", where=path)
        if self.keep and self._has(receipt):
            return receipt
        for folder in reversed(PurePath(receipt.file).parents[:-1]):
            with suppress(FileExistsError):
                os.mkdir(folder, dir_fd=self.final)
        os.replace(path, receipt.file, dst_dir_fd=self.final)
        return receipt

    def _has(self, receipt: Receipt) -> bool:
        """Whether another attempt has completed the file."""
        try:
            return os.stat(receipt.file, dir_fd=self.final, follow_symlinks=False).st_size == receipt.nbytes
        except OSError:
            return False


@contextmanager
def attempt_in(
    folder: Path, data: Path, keep: bool = False, is_wanted: Callable[[], bool] = lambda: True
) -> Iterator[Attempt]:
    """A new attempt in the staging folder `folder`, whose complete files are in `data`; removed at the end."""
    final = os.open(data, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        own = _new_folder(folder / ATTEMPTS)
        try:
            yield Attempt(own, final, keep, is_wanted)
        finally:
            shutil.rmtree(own, ignore_errors=True)
    finally:
        os.close(final)


@dataclass(frozen=True)
class SharedFolder:
    """The staging folder of a target, as a process elsewhere uses it. Plain data, to be sent.

    The file `run-TOKEN` exists while the run goes on. Its name is new for each run, so no cache of a network file
    system can have an older one.
    """

    folder: Path
    token: str
    check_every: ClassVar[float] = 1.0

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """A sink for some files. Raises `OutputError` if the folder cannot be seen from here, or the run has ended."""
        try:
            check_own(self.folder)
            # In this order: who begins another job removes the mark first, then the files.
            with attempt_in(self.folder, self.folder / "data", is_wanted=self.is_open) as attempt:
                if not self.is_open():
                    raise FileNotFoundError
                yield attempt
        except FileNotFoundError:
            if self.is_open():
                raise
            raise OutputError(
                f"the worker on {socket.gethostname()} does not see the folder in which the target is written",
                where=self.folder,
                hint="All workers must see source and target under the same paths: on a shared file system, "
                "or in an object store.",
            ) from None
        finally:
            self._tidy()

    def is_open(self) -> bool:
        """Whether the run goes on."""
        return (self.folder / f"run-{self.token}").exists()

    def _tidy(self) -> None:
        """Remove the folders that this attempt has made again after the run had ended, and removed them."""
        if not (self.folder / "data").exists():
            with suppress(OSError):
                (self.folder / ATTEMPTS).rmdir()
                self.folder.rmdir()


@contextmanager
def shared(folder: Path) -> Iterator[SharedFolder]:
    """Within, processes elsewhere can write into the staging folder. Attempts of earlier runs are removed."""
    end_runs(folder)
    shutil.rmtree(folder / ATTEMPTS, ignore_errors=True)
    (folder / ATTEMPTS).mkdir(exist_ok=True)
    share = SharedFolder(folder.absolute(), os.urandom(8).hex())
    os.close(create_own(folder / f"run-{share.token}"))
    try:
        yield share
    finally:
        end_runs(folder)


def end_runs(folder: Path) -> None:
    """Tell processes elsewhere that nobody waits for their files any more."""
    for mark in folder.glob("run-*"):
        mark.unlink(missing_ok=True)


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
