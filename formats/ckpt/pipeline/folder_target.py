"""Targets in a file system: a hidden folder next to the target, which one rename publishes.

    .NAME.ckpt-partial/              of a job that one process runs
        lock                         locked while the process writes
        job, journal/, run-TOKEN     notes (`target`)
        data/                        what will be renamed to the target, last of all
        attempts/                    what processes elsewhere are writing
        replayed-ID                  a state of a chain that is replayed before it is written
        published                    written before the rename: if it and the target exist, the folder can be removed
    .NAME.ID.shards.ckpt-partial/    of shards; it has the job's id, so no other job can write into it
        data/                        who publishes renames it to commit-HOST-PID-N first
        lease                        who publishes
        job, published               stay for a day, for shards that are repeated

After a crash at any moment, the target is absent or complete. Files that the journal lists, and that still match
their checksums, are not written again.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import ClassVar

from ckpt.pipeline import target as life
from ckpt.pipeline.job_note import JobNote
from ckpt.pipeline.lease import hold
from ckpt.pipeline.resources import Execution
from ckpt.pipeline.target import (
    ATTEMPTS,
    JOB,
    JOURNAL,
    PUBLISHED,
    SharedTarget,
    Sink,
    StagedTarget,
    exists,
    inside,
    process_name,
)
from ckpt_formats.core.errors import CkptError, LockedError, NotFoundError, OutputError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.format import Receipt, WritableFormat
from ckpt_formats.core.locking import check_folder_of, unwritable
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.own_folder import check_own, is_own, make_own
from ckpt_formats.core.publish import FlushError, flush, flush_all, flush_or_remove, rename_new
from ckpt_formats.core.text import NEW, PARTIAL

SHARDS = f".shards{PARTIAL}"
"""The suffix of the name of a folder of shards."""
REPLAYED = "replayed-"
"""The beginning of the names of states that a job replays before it writes its target."""
LOCK = "lock"
OWN = (LOCK, JOB, JOURNAL, ATTEMPTS, REPLAYED, f".{REPLAYED}")
"""The beginnings of names of which one is in every staging folder that is not empty."""
UNFLUSHED = Notice(
    "the file system cannot flush folders to the disk: if the machine fails soon, files of the target may be missing",
    weight=Weight.UNSURE,
)
_DATA = "data"
_COMMIT = "commit-"
_ID = 16
"""Characters of the job's id that are in the name of a folder of shards."""
_REMEMBERED = 24 * 3600.0
"""Seconds for which it is remembered that shards have done their job."""
_LARGE = 8 << 20
"""Files of at least so many bytes are flushed as soon as they are written."""
_PAUSES = (0.005, 0.02, 0.1)
"""Seconds until a process tries again to lock a folder that another one may be about to remove."""
_NUMBERS = count()


@dataclass(frozen=True)
class _Direct:
    """The sink of a process that writes a target alone: files are written where they stay."""

    data: Path
    product: str | None
    """The single file that is the target, if it is one."""
    parallel: ClassVar[int] = 4

    def flushes(self, file: str) -> bool:
        return self.product in (None, file)

    def persist(self, receipt: Receipt) -> Receipt:
        """Flush to the disk what stays. Small files are flushed at the end, where one commit covers many.

        What is copied into a single file at the end is not flushed: after a crash, its checksums say what is intact.
        """
        if self.flushes(receipt.file) and receipt.nbytes >= _LARGE:
            flush_or_remove(self.data / receipt.file)
        if self.product is not None and receipt.placed >= _LARGE:
            flush_or_remove(self.data / self.product)
        return receipt


@dataclass(eq=False)
class FolderTarget(StagedTarget):
    """A target in a file system."""

    @property
    def folder(self) -> Path:
        """The staging folder."""
        return self.workspace

    @property
    def disk(self) -> Path:
        return self.path

    @property
    def clean_command(self) -> str:
        name = self.path.name.removeprefix(NEW)  # of a target that will replace another one
        return f"`ckpt clean {self.path.with_name(name)}`"

    def begin(self, job: JobNote) -> None:
        self.job = job
        if self.is_shared:
            self._join(job)
            return
        if _noted_id(self.folder) != job.id:
            self.end_runs()
            self.notes.delete([JOB])
            for name in (_DATA, JOURNAL):
                if os.path.lexists(self.folder / name):
                    shutil.rmtree(self.folder / name)  # files that stay would be published
            self.notes.create(JOB, job.to_json())
        for name in (_DATA, JOURNAL):
            (self.folder / name).mkdir(exist_ok=True)

    def _join(self, job: JobNote) -> None:
        """Make the folder of the shards, if none of them has done so."""
        sweep(self.path.parent)
        self.workspace = folder_of(self.path, job.id)
        self.notes = FolderPlace(self.folder, is_own=True)
        self.data = self.notes.within(_DATA)
        self._refuse_other_shards()  # before anything is there in which this job, too, would be one of several
        try:
            make_own(self.folder, *OWN)
        except OSError as error:
            raise unwritable(error, self.path.parent) from error
        if not os.path.lexists(self.path):
            for name in (JOURNAL, ATTEMPTS):
                (self.folder / name).mkdir(exist_ok=True)
            if not self._places():  # new, or the user removed the target that these shards had written
                self.notes.delete([PUBLISHED])
                (self.folder / _DATA).mkdir(exist_ok=True)
        with suppress(FileExistsError):
            self.notes.create(JOB, job.to_json())
        assert self.resources.shard is not None
        _job_in(self.folder).check_array(self.resources.shard)
        self._refuse_other_shards()  # of a job that has begun at the same time

    def _refuse_other_shards(self) -> None:
        """Raise `OutputError` if shards of another job write the target."""
        for folder in folders_of(self.path):
            if folder == self.folder:
                continue
            check_own(folder, *OWN)
            if not (folder / PUBLISHED).exists():
                raise _job_in(folder).refused(self.path, f"run {self.clean_command}")

    def receipts(self, format: WritableFormat) -> dict[str, Receipt]:
        complete, places = dict[str, Receipt](), self._places()
        with Reader(check=False) as reader:
            for receipt in self.journal.read():
                if receipt.file in complete or not any(_is_there(place, receipt) for place in places):
                    continue
                # Small files of a process that writes alone may not have reached the disk before a crash.
                if self.is_shared or format.is_intact(self.folder / _DATA, receipt, reader):
                    complete[receipt.file] = receipt
        if not self.is_shared:
            placed = {self.product} if any(receipt.placed for receipt in complete.values()) else set()
            self.data.delete(self.data.list().keys() - complete.keys() - placed)
        return complete

    def attempt(self) -> AbstractContextManager[Sink]:
        if not self.is_shared:
            return nullcontext(_Direct(self.folder / _DATA, self.product))
        return SharedTarget(self.data, self.notes).attempt()

    def is_published(self) -> bool:
        return self.is_shared and (self.folder / PUBLISHED).exists() and os.path.lexists(self.path)

    def publish(self, receipts: Sequence[Receipt], commit: Callable[[Path], None]) -> None:
        """Commit, flush everything to the disk, then rename it."""
        data = self._take_over(receipts) if self.is_shared else self.folder / _DATA
        commit(data)
        try:
            is_flushed = flush_all(data) if self.product is None else flush_or_remove(data / self.product)
        except FlushError:
            if self.is_shared:
                os.rename(data, self.folder / _DATA)  # where shards write what is missing now
            raise
        with suppress(FileExistsError):
            self.notes.create(PUBLISHED, b"")
        life.reached("before rename")
        try:
            rename_new(data if self.product is None else data / self.product, self.path)
        except OSError as error:
            self.notes.delete([PUBLISHED])  # with it, what was written would be removed as what is left over
            if isinstance(error, FileExistsError):
                raise exists(self.path) from None
            raise
        life.reached("renamed")
        if not (flush(self.path.parent) and is_flushed):
            self.notices = (UNFLUSHED,)
        _remove_all_but_the_mark(self.folder) if self.is_shared else self.discard()

    def discard(self) -> None:
        remove_staging(self.folder)

    def _take_over(self, receipts: Sequence[Receipt]) -> Path:
        """The folder of the complete files, under a name of this process's own: one that was thought dead loses it."""
        for place in self._places():
            if all(_is_there(place, receipt) for receipt in receipts):
                own = self.folder / f"{_COMMIT}{process_name()}-{next(_NUMBERS)}"
                os.rename(place, own)
                return own
        raise OutputError("the files that the shards have written are gone", where=self.folder)

    def _places(self) -> list[Path]:
        """Where complete files may be: in `data`, unless a shard publishes, or died while it did."""
        return [*sorted(self.folder.glob(f"{_COMMIT}*")), *(p for p in (self.folder / _DATA,) if p.is_dir())]


@contextmanager
def open_target(path: Path, resources: Execution, single_file: str | None) -> Iterator[FolderTarget]:
    """The staging folder of a target, locked unless shards write it. Raises `LockedError`, `OutputError`."""
    sweep(path.parent)
    folder = staging_folder(path)
    place = FolderPlace(folder, is_own=True)
    if resources.shard is not None:
        yield FolderTarget(path, place.within(_DATA), place, resources, folder, None)
        return
    make_staging(folder, path)
    with hold(place, LOCK, path, resources.locks) as right:
        stage = FolderTarget(path, place.within(_DATA), place, resources, folder, right, single_file)
        try:
            yield stage
        finally:
            with suppress(OSError):  # then the files are written again
                stage.flush()
            _remove_unused(folder)


def staging_folder(target: Path) -> Path:
    """The staging folder of a target that one process writes."""
    return target.parent / f".{target.name}{PARTIAL}"


@contextmanager
def locked_folder(folder: Path, target: Path, locks: bool = True) -> Iterator[None]:
    """A folder, created if necessary, that no other process uses meanwhile. Raises `LockedError`, which names the
    target, and `UnsafeError` if other users can write it.

    Without `locks`, a file system that cannot lock files is accepted.
    """
    make_staging(folder, target)
    with hold(FolderPlace(folder), LOCK, target, locks):
        yield


@contextmanager
def locked_staging(target: Path, locks: bool) -> Iterator[None]:
    """Within, no other process writes a target, or has its staging folder. Raises as `locked_folder`.

    If the target is there, a process that sweeps may take the folder for one that is left over until it is locked.
    """
    folder = staging_folder(target)
    with ExitStack() as stack:
        for pause in (*_PAUSES, None):
            try:
                stack.enter_context(locked_folder(folder, target, locks))
                break
            except OutputError as error:
                if pause is None or not (isinstance(error, LockedError) or _is_missing(error)):
                    raise
                time.sleep(pause)
        try:
            yield
        finally:
            _remove_unused(folder)


def _is_missing(error: CkptError) -> bool:
    """Whether it is the system's error for something that is gone."""
    return isinstance(error.__cause__, FileNotFoundError)


def _remove_unused(folder: Path) -> None:
    """Remove a staging folder in which nothing was written."""
    with suppress(OSError):
        if os.listdir(folder) == [LOCK]:
            remove_staging(folder)


def make_staging(folder: Path, target: Path) -> None:
    """Make a staging folder, or check that what is there is one. Raises `UnsafeError`, `OutputError`."""
    try:
        make_own(folder, *OWN)
    except OSError as error:
        raise unwritable(error, target.parent) from error


def sweep(place: Path) -> None:
    """Remove the staging folders in a folder whose runs were killed after they had published their targets.

    A folder that another process has locked, or that cannot be removed, stays. What remembers that shards have done
    their job goes after a day.
    """
    for folder in place.glob(f".?*{PARTIAL}"):
        if folder.name.endswith(SHARDS):
            with suppress(OSError):
                if time.time() - (folder / PUBLISHED).stat().st_mtime > _REMEMBERED and is_own(folder, *OWN):
                    shutil.rmtree(folder, ignore_errors=True)
            continue
        target = place / folder.name[1 : -len(PARTIAL)]
        if _is_left_over(folder, target) and is_own(folder, *OWN):
            with suppress(CkptError), hold(FolderPlace(folder), LOCK, target):
                if _is_left_over(folder, target):
                    remove_staging(folder)


def _is_left_over(folder: Path, target: Path) -> bool:
    """Was a run killed after it had published the target?"""
    if not os.path.lexists(target) or folder.is_symlink() or not folder.is_dir():
        return False
    try:
        is_removed = {path.name for path in folder.iterdir()} <= {LOCK}  # but for what goes last
    except FileNotFoundError:
        return False  # all of it, by its owner
    return is_removed or (folder / PUBLISHED).exists()


def check_target(target: Path, source: Path) -> None:
    """Refuse a target that exists, or that lies inside the source or around it. Raises `OutputError`."""
    if os.path.lexists(target):
        sweep(target.parent)
        raise exists(target)
    here, there = target.resolve(), source.resolve()
    if here == there or there in here.parents or here in there.parents:
        raise inside(target)
    check_folder_of(target, "target")


def remove(target: Path) -> tuple[int, int, int]:
    """Remove what interrupted jobs left of a target. Returns the numbers of files, bytes and, here always 0, uploads.

    Raises `LockedError` while a job writes it.
    """
    folder = staging_folder(target)
    shards = folders_of(target) if target.parent.is_dir() else []
    staged = [one for one in (folder, *shards) if os.path.lexists(one)]
    for one in staged:
        check_own(one, *OWN)
    sizes = [path.stat().st_size for one in staged for path in one.rglob("*") if path.is_file()]
    if folder in staged:
        with locked_folder(folder, target):
            remove_staging(folder)
    for one in shards:
        shutil.rmtree(one, ignore_errors=True)
    return len(sizes), sum(sizes), 0


def folder_of(target: Path, job_id: str) -> Path:
    """The folder in which the shards of a job write a target."""
    return target.parent / f".{target.name}.{job_id[:_ID]}{SHARDS}"


def folders_of(target: Path) -> list[Path]:
    """The folders of all jobs whose shards write a target, or have written it."""
    start, end = f".{target.name}.", SHARDS
    names = sorted(name for name in os.listdir(target.parent) if name.startswith(start) and name.endswith(end))
    return [target.parent / name for name in names if len(name) == len(start) + _ID + len(end)]


def unfinished_job(target: Path) -> JobNote | None:
    """The job whose shards write a target; None if the target is complete.

    Raises `NotFoundError` if no shards write it, `OutputError` if those of several jobs do, `CorruptError`.
    """
    if os.path.lexists(target):
        return None
    folders = folders_of(target) if target.parent.is_dir() else []
    if not folders:
        raise no_shards(target)
    # A job whose target was published, and removed since, is done.
    for folder in folders:
        check_own(folder, *OWN)
    unfinished = [folder for folder in folders if not (folder / PUBLISHED).exists()] or folders[:1]
    if len(unfinished) > 1:
        raise _job_in(unfinished[1]).refused(target, f"remove {unfinished[1]}")
    return _job_in(unfinished[0])


def no_shards(target: Path) -> NotFoundError:
    """The error for a target that is not there, and that no shards write."""
    hint = "Name the target of a command that was run with --shard."
    return NotFoundError("no shards have written this target", where=target, hint=hint)


def is_published(target: Path, job_id: str) -> bool:
    """Whether shards of a job have published its target, not long ago. Removes what one that died then has left."""
    folder = folder_of(target, job_id)
    done = (folder / PUBLISHED).exists() and os.path.lexists(target)
    if done:
        check_own(folder, *OWN)
        _remove_all_but_the_mark(folder)
    return done


def _noted_id(folder: Path) -> str | None:
    """The id of the job that is noted in a folder; None if no readable note is there."""
    try:
        return _job_in(folder).id
    except CkptError:
        return None


def _job_in(folder: Path) -> JobNote:
    """The job that is noted in a folder. Raises `CorruptError`."""
    try:
        read = FolderPlace(folder, is_own=True).read(JOB)
    except OSError:
        read = None
    return JobNote.from_json(b"" if read is None else read[0], folder / JOB)


def _is_there(place: Path, receipt: Receipt) -> bool:
    path = place / receipt.file
    try:
        return path.is_file() and path.stat().st_size == receipt.nbytes
    except OSError:
        return False


def remove_staging(folder: Path) -> None:
    """Remove a staging folder; its marker `published` last but one, and last its lock, which shows the owner."""
    with suppress(OSError):
        for path in sorted(folder.iterdir(), key=lambda path: (path.name == LOCK, path.name == PUBLISHED)):
            _remove_path(path)
        folder.rmdir()


def _remove_all_but_the_mark(folder: Path) -> None:
    """Remove all but what says that the job of the shards is done."""
    for path in folder.iterdir():
        if path.name not in (JOB, PUBLISHED):
            _remove_path(path)


def _remove_path(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
