"""Targets in a store: each object at its final key, and the one by which formats know a checkpoint last.

    PREFIX/FILE                     data, created on the condition that it does not exist
    PREFIX/.ckpt/                   notes (`target`)
    PREFIX/.ckpt/committed          the names and sizes of the files that make the folder a checkpoint, before they are
                                    put
    .NAME.shards.ckpt-partial/ID    beside the target: shards have done this job. Until `ckpt clean` removes it, shards
                                    that are repeated, or that had nothing to write, know it

While there is a `job` without `published`, ckpt reads no checkpoint at this prefix, unless its files prove that it is
whole (`registry.published`): a request that a store carries out late hides nothing, and `clean` removes no file of it.
From the moment when the last file is there and compared, the target is published: what cannot be removed then is a
note. Every object is created, never overwritten, so a process that was taken for dead changes nothing. A target of a
single file appears by one request; its notes are in the folder `.NAME.ckpt-partial` beside it.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from ckpt.pipeline import target as life
from ckpt.pipeline.folder_target import SHARDS, no_shards
from ckpt.pipeline.job_note import JobNote
from ckpt.pipeline.lease import check_conditions, hold
from ckpt.pipeline.resources import Execution
from ckpt.pipeline.scratch import scratch_folder
from ckpt.pipeline.target import JOB, JOURNAL, LEASE, PUBLISHED, Attempt, Sink, StagedTarget, exists, inside
from ckpt_formats.core.errors import CkptError, IncompleteError, LockedError, OutputError
from ckpt_formats.core.format import Receipt, WritableFormat
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.place import ObjectEntry, Place
from ckpt_formats.core.store_path import StorePath, is_remote
from ckpt_formats.core.text import PARTIAL, STAGED, printable
from ckpt_formats.registry.listed import is_mark
from ckpt_formats.registry.published import SKEW, is_proven_whole, stated_files
from ckpt_formats.stores.location import listed_again, place_at

_COMMITTED = "committed"
_REQUESTS = 16
"""Small objects that are put at once; parts of a large file that is the whole target."""

Entries = Mapping[str, ObjectEntry]


@dataclass(frozen=True)
class _ToBePut:
    """The sink of a target of one file, which is put when it is published."""

    data: Path
    parallel: ClassVar[int] = 1

    def flushes(self, file: str) -> bool:
        return False

    def persist(self, receipt: Receipt) -> Receipt:
        return receipt


@dataclass(eq=False)
class BucketTarget(StagedTarget):
    """A target in a store."""

    path: StorePath
    _written: dict[str, Receipt] = field(default_factory=dict)
    """What the objects must be when the target is published."""

    @property
    def disk(self) -> Path:
        return self.workspace

    @property
    def clean_command(self) -> str:
        return f"`ckpt clean {self.path}`"

    def begin(self, job: JobNote) -> None:
        self.job = job
        if self.is_shared:
            self._join(job)
            return
        self._make_folders()
        files, notes = self._look()
        if self._is_complete(files, notes):
            self._tidy(notes)
            raise exists(self.path)
        if JOB not in notes:
            if files:
                self._tidy(notes)  # a killed process may have left something there, too
                raise exists(self.path)
        elif _fields(self.notes, JOB).get("id") != job.id:
            removed = self._remove(files, notes)
            files, notes = {name: one for name, one in files.items() if name not in removed}, {}
        if JOB not in notes:
            self.notes.create(JOB, job.to_json())
        self._refuse_others(files, notes)

    def _make_folders(self) -> None:
        """Make the folders of the files in the workspace: `commit` of a format may write beside other files."""
        if self.product is None:
            for folder in {(self.workspace / file).parent for file in self.job.files}:
                folder.mkdir(parents=True, exist_ok=True)

    def _join(self, job: JobNote) -> None:
        """Note the job, if no shard has done so. Raises `OutputError` if there is another one, or a checkpoint."""
        if self.resources.locks:
            # With an object of its own: others may be removed meanwhile, as another shard publishes.
            probe = f"probe-{uuid4().hex}"
            version = self.notes.create(probe, b"")
            why = "Shards need a store with conditional requests."
            check_conditions(self.notes, probe, self.path, why, version)
            with suppress(OSError):  # without the right to delete, it stays until `ckpt clean` may remove it
                self.notes.delete([probe])
        for _ in range(3):
            there = self.notes.read(JOB)
            if there is not None:
                other = JobNote.from_json(there[0], f"{self.path}/.ckpt/job")
                if other.id != job.id:
                    raise other.refused(self.path, f"run {self.clean_command}")
                assert self.resources.shard is not None
                other.check_array(self.resources.shard)
            files, notes = self._look()
            if there is not None:
                noted = notes.get(JOB)
                if noted is None or not any(one.modified < noted.modified - SKEW for one in files.values()):
                    self._make_folders()
                    return
                # It was put too late, by a shard that had seen nothing here: the target was published meanwhile.
                self.notes.delete([JOB])
            elif files or PUBLISHED in notes:
                raise exists(self.path)
            else:
                with suppress(FileExistsError):  # another shard was faster
                    self.notes.create(JOB, job.to_json())
        raise exists(self.path)

    def receipts(self, format: WritableFormat) -> dict[str, Receipt]:
        files, notes = self._look()
        complete: dict[str, Receipt] = {}
        start = f"{JOURNAL}/"
        for receipt in self.journal.read(name[len(start) :] for name in notes if name.startswith(start)):
            if is_stored(receipt, files.get(receipt.file)):
                complete.setdefault(receipt.file, receipt)
        self._written.update(complete)
        if not self.is_shared:
            # An object without a receipt is written again: an attempt that was killed may have put it.
            self._delete_data(self._own(files, notes) - complete.keys())
            self.notes.delete({_COMMITTED} & notes.keys())
        return complete

    def attempt(self) -> AbstractContextManager[Sink]:
        if self.product is not None:
            return nullcontext(_ToBePut(self.workspace))
        return nullcontext(Attempt(self.workspace, self.data, self._check))

    def _check(self) -> None:
        if self.right is not None:
            self.right.check()

    def note(self, receipt: Receipt) -> None:
        if self.product is None:
            self._written[receipt.file] = receipt
            super().note(receipt)

    def is_published(self) -> bool:
        return self.is_shared and _is_marked(self.path, self.job.id)

    def publish(self, receipts: Sequence[Receipt], commit: Callable[[Path], None]) -> None:
        """Create the last objects: the file `product`, or what `commit` wrote, marks of the format at the very end.

        Raises `OutputError` if the store does not have them then as it has acknowledged them.
        """
        if self.is_shared:
            self._check_shards(receipts)
        commit(self.workspace)
        self._check()
        if self.product is not None:
            life.reached("before rename")
            self._put(self.path.name, self.workspace / self.product, _REQUESTS)
            life.reached("renamed")
            files, notes = self._look()
            self._check_written(files)
            self._tidy(notes)
            return
        if self.is_shared:
            self._mark_done()
        self.flush()
        files, notes = self._look()
        self._check_written(files)
        self._refuse_others(files, notes)
        sizes = {
            path.relative_to(self.workspace).as_posix(): path.stat().st_size
            for path in sorted(self.workspace.rglob("*"))
            if path.is_file()
        }
        marks = sorted(filter(is_mark, sizes), key=lambda file: -file.count("/"))
        committed = {"files": list(sizes), "nbytes": list(sizes.values())}
        self.notes.create(_COMMITTED, json.dumps(committed).encode())
        with ThreadPoolExecutor(_REQUESTS, "ckpt-requests") as pool:
            list(pool.map(self._put_file, [file for file in sizes if file not in marks]))
        life.reached("before rename")
        for file in marks:
            self._put_file(file)
        life.reached("renamed")
        self._check()
        files, notes = self._look()
        self._check_written(files)
        with suppress(OSError):  # its files say so, too
            self.notes.create(PUBLISHED, b"")
        self._tidy({*notes, PUBLISHED})

    def _check_shards(self, receipts: Sequence[Receipt]) -> None:
        """Under the lease, look again at what the shards have written. Raises `IncompleteError`, `OutputError`."""
        files, notes = self._look()
        if self._is_complete(files, notes):
            self._tidy(notes)
            raise exists(self.path)
        if JOB not in notes:
            self.notes.create(JOB, self.job.to_json())
        self._refuse_others(files, notes)
        self._written = {one.file: one for one in receipts if is_stored(one, files.get(one.file))}
        if missing := [file for file in self.job.files if file not in self._written]:
            raise IncompleteError(
                f"{len(missing)} files were removed since the shards have written them",
                where=self.path / missing[0],
                hint="Run the shards again.",
            )
        self._delete_data(self._own(files, notes) - self._written.keys())
        self.notes.delete({_COMMITTED} & notes.keys())

    def _mark_done(self) -> None:
        """Note beside the target that its shards have done their job."""
        done = done_place(self.path)
        try:
            done.create(self.job.id, b"")
        except FileExistsError:  # of a run of this job whose target was removed since: its time is too early
            done.delete([self.job.id])
            done.create(self.job.id, b"")

    def discard(self) -> None:
        self.remove()

    def remove(self) -> tuple[int, int]:
        """Remove what a job has left: its objects as well, unless the target is complete. Returns files and bytes."""
        self._check()
        files, notes = self._look()
        if self._is_complete(files, notes):
            self._remove_notes(notes)  # an error is one here: nothing else was requested
            removed = dict[str, ObjectEntry]()
        else:
            removed = self._remove(files, notes)
        sizes = [one.nbytes for one in removed.values()] + [one.nbytes for name, one in notes.items() if name != LEASE]
        return len(sizes), sum(sizes)

    def remove_notes(self) -> None:
        """Remove what is known of jobs. The target must be complete."""
        self._check()
        self._remove_notes(self._look()[1])

    def _is_complete(self, files: Entries, notes: Entries) -> bool:
        """Whether a job has published the target, whatever it has left of its notes, or comes late."""
        if self.product is not None:
            return self.path.name in files
        if PUBLISHED in notes:
            return True
        return JOB in notes and is_proven_whole(listed_again(self.path))

    def _check_written(self, files: Entries) -> None:
        """Raise `OutputError` if an object that was written is not there as it was acknowledged."""
        for receipt in self._written.values():
            if is_stored(receipt, files.get(receipt.file)) or is_stored(receipt, self.data.head(receipt.file)):
                continue
            raise OutputError(
                "the store does not have this object as it has acknowledged it; or somebody else has changed it since",
                where=self.data.where(receipt.file),
                hint="Run the same command again when nobody else writes at this place, "
                f"or {self.clean_command} to give up.",
            )

    def _put_file(self, name: str) -> None:
        self._put(name, self.workspace / name)

    def _put(self, name: str, file: Path, parts_at_once: int = 4) -> None:
        """Create one of the last objects, which the listing at the end is compared with."""
        self._check()
        e_tag: str | None
        try:
            e_tag = self.data.create_from(name, file, self._check, parts_at_once)
        except FileExistsError:  # put by this process, perhaps, when the answer to the end of an upload was lost
            e_tag = self.data.tag_if_equal(name, file)
        if e_tag is None:
            raise OutputError(
                "another process has created this object",
                where=self.data.where(name),
                hint="Run the same command again when nobody else writes at this place.",
            )
        self._written[name] = Receipt(name, file.stat().st_size, (), {}, e_tag=e_tag)

    def _refuse_others(self, files: Entries, notes: Entries) -> None:
        """Raise `OutputError` if something at the target is not of this job."""
        others = sorted(files.keys() - self._own(files, notes))
        if others:
            raise OutputError(
                f"there are objects that this job did not write, such as `{printable(others[0])}`",
                where=self.path,
                hint="Choose another target, or remove them first.",
            )

    def _own(self, files: Entries, notes: Entries) -> set[str]:
        """The names of objects that this job has put, or an earlier run of it."""
        return (set(self.job.files) | self._committed(notes)) & files.keys()

    def _committed(self, notes: Entries) -> set[str]:
        return set(stated_files(_fields(self.notes, _COMMITTED))) if _COMMITTED in notes else set()

    def _remove(self, files: Entries, notes: Entries) -> dict[str, ObjectEntry]:
        """Remove what the job in the store has put, and what is known of it. Returns the files that were removed."""
        job = _fields(self.notes, JOB) if JOB in notes else {}
        own = {name: one for name, one in files.items() if name in {*stated_files(job), *self._committed(notes)}}
        lists = {JOB, _COMMITTED}
        self._delete_data(own.keys())
        self.notes.delete(notes.keys() - lists - {LEASE})
        self.notes.delete(notes.keys() & lists)  # last: they name the rest
        self.journal.forget()
        self._written.clear()
        return own

    def _remove_notes(self, notes: Iterable[str]) -> None:
        """Remove what is known of a job whose target is complete. `published` says so until `job` is away."""
        self.notes.delete(set(notes) - {PUBLISHED, LEASE})
        self.notes.delete(set(notes) & {PUBLISHED})

    def _tidy(self, notes: Iterable[str]) -> None:
        """Remove what is known of a job whose target is complete. What cannot be removed is a note."""
        try:
            self._remove_notes(notes)
        except OSError as error:
            why = error.strerror or error
            text = f"the target is complete, but notes of the job stay in {self.notes.where()}, which could not be "
            self.notices = (Notice(f"{text}removed: {why}"),)

    def _delete_data(self, names: Set[str]) -> None:
        """Delete objects of a target, unless another process has it now, and may have published it."""
        if names:
            assert self.right is not None
            self.right.confirm()
            self.data.delete(names)

    def _look(self) -> tuple[Entries, Entries]:
        """The files and the notes that are there now."""
        if self.product is None:
            return _split(self.data.list())
        there = self.data.head(self.path.name)
        return {} if there is None else {self.path.name: there}, self.notes.list()


@contextmanager
def open_target(path: StorePath, resources: Execution, single_file: str | None) -> Iterator[BucketTarget]:
    """A target in a store, whose lease this process has unless shards write it. Raises `LockedError`, `OutputError`.

    Files lie in `resources.scratch` until they are uploaded. Without `resources.locks`, a store that ignores conditions
    is accepted.
    """
    data, notes = _places(path, single_file is not None, resources.read_back)
    with scratch_folder(resources.scratch) as workspace:
        if resources.shard is not None:
            stage = BucketTarget(path, data, notes, resources, workspace, None)
            try:
                yield stage
            finally:
                stage.flush()
            return
        with hold(notes, LEASE, path, resources.locks) as right:
            stage = BucketTarget(path, data, notes, resources, workspace, right, single_file)
            try:
                yield stage
            finally:
                with suppress(OSError, LockedError):  # then the files are written again
                    stage.flush()


def _places(path: StorePath, single_file: bool, read_back: bool = False) -> tuple[Place, Place]:
    """Where the data and the notes of a target are."""
    if single_file:
        hidden = path.parent / f".{path.name}{PARTIAL}"
        return place_at(path.parent, read_back), place_at(hidden, read_back)
    return place_at(path, read_back), place_at(path / STAGED, read_back)


def check_target(target: StorePath, source: Path) -> None:
    """Refuse a target that exists, or that lies inside the source or around it. Raises `OutputError`."""
    if not target.key:
        raise OutputError("is a bucket", where=target, hint=f"Name a target in it, such as {target}/step1000.")
    staged = target.parent / f".{target.name}{PARTIAL}" if target.is_file() else target / STAGED
    if target.exists() and not staged.is_dir():  # else there may be notes of a killed job to be removed first
        raise exists(target)
    if is_remote(source) and (target.is_relative_to(source) or source.is_relative_to(target)):
        raise inside(target)


def remove(target: StorePath) -> tuple[int, int, int | None]:
    """As `folder_target.remove`; uploads: None if ckpt cannot remove some that are not complete."""
    from ckpt_formats.stores.uploads import abort_uploads

    files = nbytes = 0
    try:
        for single_file in (None, target.name):
            with open_target(target, Execution(), single_file) as stage:
                more, bytes_more = stage.remove()
            files, nbytes = files + more, nbytes + bytes_more
        done = done_place(target)
        marks = done.list()
        done.delete(marks)
    except OSError as error:
        raise unwritable(error, target) from error
    return files + len(marks), nbytes, abort_uploads(target.store.url, target.key, target.key)


def unfinished_job(target: StorePath) -> JobNote | None:
    """The job whose shards write a target; None if the target is complete.

    Raises `NotFoundError` if nothing is there.
    """
    data, notes = _places(target, False)
    read = notes.read(JOB)
    if read is not None:
        return JobNote.from_json(read[0], target)
    if not _split(data.list())[0]:
        raise no_shards(target)
    _remove_late_notes(target, lambda: notes.head(JOB) is None)
    return None


def is_published(target: StorePath, job_id: str) -> bool:
    """Whether shards of a job have published its target. Removes the notes of one that died then, or came late."""
    done = _is_marked(target, job_id)
    if done:
        _remove_late_notes(target, lambda: _is_marked(target, job_id))
    return done


def _is_marked(target: StorePath, job_id: str) -> bool:
    """Whether shards of a job have published its target."""
    # From a listing, as the others: some stores give whole seconds in the answer to a HEAD.
    mark = done_place(target).list().get(job_id)
    if mark is None:
        return False
    files, notes = _split(_places(target, False)[0].list())
    if not any(one.modified <= mark.modified + SKEW for one in files.values()):
        return False  # all data are younger: this target was removed, and another job has written there since
    job = notes.get(JOB)
    return PUBLISHED in notes or job is None or job.modified > mark.modified + SKEW  # such a job came too late


def _remove_late_notes(target: StorePath, is_complete: Callable[[], bool]) -> None:
    """Remove what a process has left below a complete target that was killed at its end, or came late. Never raises.

    `is_complete` is called when no other process can write there.
    """
    with suppress(CkptError, OSError):
        if _places(target, False)[1].list():
            with open_target(target, Execution(locks=False), None) as stage:
                if is_complete():
                    stage.remove_notes()


def done_place(target: StorePath) -> Place:
    """The place of objects that say which jobs of shards are done: each has the job's id as its name."""
    return place_at(target.parent / f".{target.name}{SHARDS}")


def is_stored(receipt: Receipt, there: ObjectEntry | None) -> bool:
    """Whether an object is the one of a receipt."""
    if there is None or there.nbytes != receipt.nbytes:
        return False
    return there.e_tag.strip('"') == receipt.e_tag.strip('"')  # Azure quotes it in answers, and not in listings


def _split(objects: Entries) -> tuple[Entries, Entries]:
    """The files of a target, and its notes, by the names that they have there."""
    start = f"{STAGED}/"
    files = {name: one for name, one in objects.items() if not name.startswith(start)}
    return files, {name[len(start) :]: one for name, one in objects.items() if name.startswith(start)}


def _fields(notes: Place, name: str) -> dict[str, Any]:
    """The fields of a note; none if it is not there, or is of another program."""
    read = notes.read(name)
    try:
        fields = {} if read is None else json.loads(read[0])
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}
