"""The folder in which the shards of one job write. Its name has the job's id, so no other job can write into it.

.NAME.ID.shards.ckpt-partial/
    job.json        what the job is, and the command by which `ckpt commit` ends it
    journals/       a journal of receipts for each process
    attempts/       a folder for each process, with the files that it is writing
    data/           complete files; who publishes renames it to commit-HOST-PID-N first
    lease           who publishes
    published       written before the last rename; with job.json it stays for a day, for shards that are repeated
"""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from ckpt.pipeline import receipts as journal_lines
from ckpt.pipeline import staging
from ckpt.pipeline.attempts import ATTEMPTS, Attempt, attempt_in, process_name
from ckpt.pipeline.shard import Shard
from ckpt.pipeline.shards.job import ShardJob
from ckpt.pipeline.shards.lease import FileLease
from ckpt.pipeline.shards.shard_staging import ShardStaging
from ckpt.pipeline.staging import UNFLUSHED, exists
from ckpt_formats.core.errors import CkptError, NotFoundError, OutputError
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.own_folder import check_own, is_own, make_own, open_own
from ckpt_formats.core.publish import FlushError, flush, flush_all, rename_new
from ckpt_formats.core.text import PARTIAL

SHARDS = f".shards{PARTIAL}"
"""The suffix of the folder's name."""
JOB = "job.json"
_DATA = "data"
_JOURNALS = "journals"
OWN = (JOB, _JOURNALS, ATTEMPTS)
"""One of these is in every folder of shards that is not empty."""
_PUBLISHED = "published"
_COMMIT = "commit-"
_LEASE = "lease"
_ID = 16
"""Characters of the job's id that are in the folder's name."""
_KEPT = 24 * 3600.0
"""Seconds for which it is remembered that a job is done."""
_NUMBERS = count()


@dataclass(eq=False)
class ShardFolder(ShardStaging):
    """What there is of a target in a file system that shards write."""

    target: Path
    folder: Path
    shard: Shard
    _journals: list[Path] = field(default_factory=list, compare=False)

    @property
    def disk(self) -> Path:
        return self.target

    @property
    def how_to_give_up(self) -> str:
        return f"remove {self.folder} to give up"

    def receipts(self) -> dict[str, Receipt]:
        complete: dict[str, Receipt] = {}
        places = self._places()
        for path in sorted((self.folder / _JOURNALS).iterdir()):
            with open_own(path) as file:
                lines = file.read().splitlines()
            for receipt in journal_lines.from_lines(lines):
                if receipt.file not in complete and any(_is_there(place, receipt) for place in places):
                    complete[receipt.file] = receipt
        return complete

    def attempt(self) -> AbstractContextManager[Attempt]:
        return attempt_in(self.folder, self.folder / _DATA, keep=True)

    def note(self, receipt: Receipt) -> None:
        if not self._journals:
            self._journals.append(_new_file(self.folder / _JOURNALS, f"{self.shard.number}-{process_name()}"))
        with open_own(self._journals[0], "a") as file:
            file.write(journal_lines.to_line(receipt))

    @contextmanager
    def lease(self, wait: bool, stop: threading.Event) -> Iterator[str | None]:
        lease = FileLease(self.folder / _LEASE)
        while (holder := lease.acquire()) is not None:
            if self.is_published() or not wait or stop.wait(0.5):
                break
        try:
            yield None if self.is_published() else holder
        finally:
            if holder is None:
                lease.release()

    def is_published(self) -> bool:
        return (self.folder / _PUBLISHED).exists() and os.path.lexists(self.target)

    def publish(self, receipts: Sequence[Receipt], commit: Callable[[Path], None]) -> None:
        """Commit, flush everything to the disk, and rename it to the target. Raises `OutputError` if that exists."""
        data = self._take_over(receipts)
        commit(data)
        try:
            is_flushed = flush_all(data)
        except FlushError:
            os.rename(data, self.folder / _DATA)  # where shards write what is missing now
            raise
        with open_own(self.folder / _PUBLISHED, "a"):
            pass
        staging.reached("before rename")
        try:
            rename_new(data, self.target)
        except FileExistsError:
            (self.folder / _PUBLISHED).unlink(missing_ok=True)
            raise exists(self.target) from None
        staging.reached("renamed")
        if not (flush(self.target.parent) and is_flushed):
            self.notes = (UNFLUSHED,)
        self.remove_all_but_the_mark()

    def begin(self, job: ShardJob) -> None:
        """Make the folder, if no shard has done so."""
        try:
            make_own(self.folder, *OWN)
        except OSError as error:
            raise unwritable(error, self.target.parent) from error
        if not os.path.lexists(self.target):
            for name in (_JOURNALS, ATTEMPTS):
                (self.folder / name).mkdir(exist_ok=True)
            if not self._places():  # new, or the user removed the target that these shards had written
                (self.folder / _PUBLISHED).unlink(missing_ok=True)
                (self.folder / _DATA).mkdir(exist_ok=True)
        if not (self.folder / JOB).exists():
            draft = _new_file(self.folder, f"job-{process_name()}")
            draft.write_bytes(job.to_json())
            os.replace(draft, self.folder / JOB)

    def _take_over(self, receipts: Sequence[Receipt]) -> Path:
        """The folder of the complete files, under a name of this process's own: one that was thought dead loses it."""
        for place in self._places():
            if all(_is_there(place, receipt) for receipt in receipts):
                own = self.folder / f"{_COMMIT}{process_name()}-{next(_NUMBERS)}"
                os.rename(place, own)
                return own
        raise OutputError("the files that the shards have written are gone", where=self.folder)

    def _places(self) -> list[Path]:
        """Where complete files may be: in `data`, unless somebody publishes, or died while he did."""
        return [*sorted(self.folder.glob(f"{_COMMIT}*")), *(p for p in (self.folder / _DATA,) if p.is_dir())]

    def remove_all_but_the_mark(self) -> None:
        """Remove all but what says that the job is done."""
        for path in self.folder.iterdir():
            if path.name in (JOB, _PUBLISHED):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)


def open_folder(target: Path, job: ShardJob, shard: Shard) -> ShardFolder:
    """The folder of the shards of a job. Raises `OutputError` if shards of another job write this target."""
    sweep(target.parent)
    stage = ShardFolder(target, folder_of(target, job.id), shard)
    stage.begin(job)
    _job_in(stage.folder).check_array(shard)
    for folder in folders_of(target):
        if folder == stage.folder:
            continue
        check_own(folder, *OWN)
        if not (folder / _PUBLISHED).exists():
            raise _job_in(folder).refused(target, f"remove {folder}")
    return stage


def folder_of(target: Path, job_id: str) -> Path:
    """The folder in which the shards of a job write a target."""
    return target.parent / f".{target.name}.{job_id[:_ID]}{SHARDS}"


def folders_of(target: Path) -> list[Path]:
    """The folders of all jobs whose shards write a target, or have written it."""
    start, end = f".{target.name}.", SHARDS
    names = sorted(name for name in os.listdir(target.parent) if name.startswith(start) and name.endswith(end))
    return [target.parent / name for name in names if len(name) == len(start) + _ID + len(end)]


def unfinished_job(target: Path) -> ShardJob | None:
    """The job whose shards write a target; None if the target is complete. Raises as that of the package."""
    if os.path.lexists(target):
        return None
    folders = folders_of(target) if target.parent.is_dir() else []
    if not folders:
        raise no_shards(target)
    # A job whose target was published, and removed since, is done.
    for folder in folders:
        check_own(folder, *OWN)
    unfinished = [folder for folder in folders if not (folder / _PUBLISHED).exists()] or folders[:1]
    if len(unfinished) > 1:
        raise _job_in(unfinished[1]).refused(target, f"remove {unfinished[1]}")
    return _job_in(unfinished[0])


def no_shards(target: Path) -> NotFoundError:
    """The error for a target that is not there, and that no shards write."""
    hint = "Name the target of a command that was run with --shard."
    return NotFoundError("no shards have written this target", where=target, hint=hint)


def is_published(target: Path, job_id: str) -> bool:
    """Whether shards of a job have published its target, not long ago. Removes what one that died then has left."""
    stage = ShardFolder(target, folder_of(target, job_id), Shard(0, 0))
    done = stage.is_published()
    if done:
        check_own(stage.folder, *OWN)
        stage.remove_all_but_the_mark()
    return done


def sweep(place: Path) -> None:
    """Remove what is left of shards that published their targets more than a day ago."""
    for folder in place.glob(f".*{SHARDS}"):
        with suppress(OSError):
            if time.time() - (folder / _PUBLISHED).stat().st_mtime > _KEPT and is_own(folder, *OWN):
                shutil.rmtree(folder, ignore_errors=True)


def _job_in(folder: Path) -> ShardJob:
    """The job whose shards write in a folder. Raises `CorruptError`."""
    path = folder / JOB
    try:
        with open_own(path) as file:
            return ShardJob.from_json(file.read().encode(), path)
    except CkptError:
        raise
    except OSError:
        return ShardJob.from_json(b"", path)


def _is_there(place: Path, receipt: Receipt) -> bool:
    path = place / receipt.file
    try:
        return path.is_file() and path.stat().st_size == receipt.nbytes
    except OSError:
        return False


def _new_file(place: Path, name: str) -> Path:
    """A new, empty file, whose name begins so: no other process has it."""
    while True:
        path = place / f"{name}-{next(_NUMBERS)}.jsonl"
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        except FileExistsError:
            continue
        return path
