"""Targets in a file system: a hidden folder next to the target, which one rename publishes.

    .NAME.ckpt-partial/
        lock            locked while a process writes
        journal.jsonl   the job's id, then the checksum and receipt of every finished file
        data/           what will be renamed to the target, last of all
        attempts/       what workers on other machines are writing (`attempts`)
        run-TOKEN       there while such workers may write
        published       written before the rename: if it and the target exist, the folder can be removed

After a crash at any moment, the target is absent or complete. Files that the journal lists, and that still match
their checksums, are not written again.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt.pipeline import attempts, receipts, staging
from ckpt.pipeline.attempts import SharedFolder
from ckpt.pipeline.staging import UNFLUSHED, Staging, exists, inside, locked
from ckpt_formats.core.errors import CkptError, OutputError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import Receipt, WritableFormat
from ckpt_formats.core.locking import lock, unwritable
from ckpt_formats.core.own_folder import is_own, make_own, open_own
from ckpt_formats.core.publish import flush, flush_all, flush_or_remove, rename_new
from ckpt_formats.core.text import PARTIAL

_LOCK = "lock"
_PUBLISHED = "published"
REPLAYED = "replayed-"
"""The beginning of the names of states that `restore` replays into the staging folder of its target."""
OWN = (_LOCK, REPLAYED, f".{REPLAYED}")
"""The beginnings of names of which one is in every staging folder that is not empty."""
_LARGE = 8 << 20
"""Files of at least so many bytes are flushed as soon as they are written."""


@dataclass(eq=False)
class FolderStaging(Staging):
    """The folder in which one target is written."""

    target: Path
    folder: Path

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def disk(self) -> Path:
        return self.target

    @property
    def parallel(self) -> int:
        return 4

    @property
    def how_to_give_up(self) -> str:
        return f"remove {self.folder} to give up"

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    def begin(self, job_id: str, files: Sequence[str]) -> None:
        if self._job_id() != job_id:
            attempts.end_runs(self.folder)
            if os.path.lexists(self.data):
                shutil.rmtree(self.data)  # files that stay would be published
            with open_own(self.journal, "w") as file:
                file.write(json.dumps({"plan": job_id}))
        with open_own(self.journal, "a") as file:
            file.write("\n")  # ends a line that a full disk cut short
        self.data.mkdir(exist_ok=True)

    def receipts(self, format: WritableFormat) -> Iterator[Receipt]:
        with open_own(self.journal) as file:
            lines = file.read().splitlines()[1:]
        with Reader(check=False) as reader:
            for receipt in receipts.from_lines(lines):
                path = self.data / receipt.file
                is_whole = path.is_file() and path.stat().st_size == receipt.nbytes
                if is_whole and format.is_intact(self.data, receipt, reader):
                    yield receipt

    def persist(self, receipt: Receipt) -> Receipt:
        """Flush the file to the disk. Small files are flushed at the end, where one commit covers many."""
        if receipt.nbytes >= _LARGE:
            flush_or_remove(self.data / receipt.file)
        return receipt

    def note(self, receipt: Receipt) -> None:
        with open_own(self.journal, "a") as file:
            file.write(receipts.to_line(receipt))

    def shared(self) -> AbstractContextManager[SharedFolder]:
        return attempts.shared(self.folder)

    def publish(self, product: str | None) -> None:
        """Flush everything to the disk, then rename it."""
        is_flushed = flush_all(self.data)
        complete = self.data if product is None else self.data / product
        with open_own(self._published, "a"):
            pass
        staging.reached("before rename")
        try:
            rename_new(complete, self.target)
        except FileExistsError:
            raise exists(self.target) from None
        staging.reached("renamed")
        if not (flush(self.target.parent) and is_flushed):
            self.notes = (UNFLUSHED,)
        self.discard()

    def discard(self) -> None:
        _remove(self.folder)

    @property
    def left_over(self) -> bool:
        """Was a run killed after it had published the target?"""
        if not os.path.lexists(self.target) or self.folder.is_symlink() or not self.folder.is_dir():
            return False
        is_removed = {path.name for path in self.folder.iterdir()} <= {_LOCK}  # but for what goes last
        return is_removed or self._published.exists()

    @property
    def _published(self) -> Path:
        return self.folder / _PUBLISHED

    def _job_id(self) -> str | None:
        try:
            with open_own(self.journal) as file:
                first: dict[str, str] = json.loads(file.readline())
                return first["plan"]
        except (OSError, ValueError, KeyError, TypeError):
            return None


@contextmanager
def open_folder(target: Path, locks: bool = True) -> Iterator[FolderStaging]:
    """The staging folder of a target, locked. Raises `LockedError`, `OutputError`."""
    sweep(target.parent)
    folder = staging_folder(target)
    with locked_folder(folder, target, locks):
        yield FolderStaging(target, folder)


def staging_folder(target: Path) -> Path:
    """The staging folder of a target."""
    return target.parent / f".{target.name}{PARTIAL}"


@contextmanager
def locked_folder(folder: Path, target: Path, locks: bool = True) -> Iterator[None]:
    """A folder, created if necessary, that no other process uses meanwhile. Raises `LockedError`, which names the
    target, and `UnsafeError` if other users can write it.

    Without `locks`, a file system that cannot lock files is accepted.
    """
    make_staging(folder, target)
    with lock(folder / _LOCK, locked(target), locks):
        yield


def make_staging(folder: Path, target: Path) -> None:
    """Make a staging folder, or check that what is there is one. Raises `UnsafeError`, `OutputError`."""
    try:
        make_own(folder, *OWN)
    except OSError as error:
        raise unwritable(error, target.parent) from error


def sweep(place: Path) -> None:
    """Remove the staging folders in a folder whose runs were killed after they had published their targets.

    A folder that another process has locked, or that cannot be removed, stays.
    """
    for folder in place.glob(f".?*{PARTIAL}"):
        stage = FolderStaging(place / folder.name[1 : -len(PARTIAL)], folder)
        if stage.left_over and is_own(folder, *OWN):
            with suppress(CkptError), locked_folder(folder, stage.target):
                if stage.left_over:
                    stage.discard()


def check_target(target: Path, source: Path) -> None:
    """Refuse a target that exists, or that lies inside the source or around it. Raises `OutputError`."""
    if os.path.lexists(target):
        sweep(target.parent)
        raise exists(target)
    here, there = target.resolve(), source.resolve()
    if here == there or there in here.parents or here in there.parents:
        raise inside(target)
    if not target.parent.is_dir():
        raise OutputError(
            "the folder that should hold the target does not exist", where=target.parent, hint="Create it first."
        )
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise OutputError("no permission to write here", where=target.parent, hint="Choose another target.")


def _remove(folder: Path) -> None:
    """Remove a staging folder; its marker `published` last but one, and last its lock, which shows the owner."""
    with suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda path: (path.name == _LOCK, path.name == _PUBLISHED)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        folder.rmdir()
