"""Shards that write into a store. What they know of each other is what a single process would have put there, too.

    PREFIX/.ckpt/job           the job, and the files of its plan
    PREFIX/.ckpt/journal/N     receipts of finished files: each object is written once
    PREFIX/FILE                data, created on the condition that it does not exist
    PREFIX/.ckpt/lease         who publishes
    .NAME.shards.ckpt-partial/ID    beside the target: this job is done. Until `ckpt clean` removes it, shards that are
                                    repeated, or that had nothing to write, know it

So whoever has the lease verifies and publishes as `StoreStaging` does.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from uuid import uuid4

from ckpt.pipeline.lease import check_conditions
from ckpt.pipeline.object_journal import ObjectJournal
from ckpt.pipeline.resources import Execution
from ckpt.pipeline.shard import Shard
from ckpt.pipeline.shards.folder import SHARDS, no_shards
from ckpt.pipeline.shards.job import ShardJob
from ckpt.pipeline.shards.shard_staging import ShardStaging
from ckpt.pipeline.staging import exists
from ckpt.pipeline.store_attempts import SharedPrefix, StoreAttempt
from ckpt.pipeline.store_staging import StoreStaging, is_stored, open_store, staged_folder
from ckpt_formats.core.errors import CkptError, IncompleteError, LockedError
from ckpt_formats.core.format import Receipt, WritableFormat
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores.bucket import Bucket
from ckpt_formats.stores.listed_store import StoredObject

_POLL = 5.0
"""Seconds between two looks whether the lease is free."""
_SKEW = 1.0
"""Seconds by which times of objects may differ that were put at the same time: the servers of a store have clocks."""


@dataclass
class ShardObjects(ShardStaging):
    """What there is of a target in a store that shards write."""

    target: StorePath
    job: ShardJob
    shard: Shard
    format: WritableFormat
    resources: Execution
    _stage: StoreStaging | None = None

    def __post_init__(self) -> None:
        self._journal = ObjectJournal(self.bucket, self._staged("journal"))

    @property
    def disk(self) -> Path:
        return self.resources.scratch or Path()

    @property
    def how_to_give_up(self) -> str:
        return f"`ckpt clean {self.target}` gives up"

    @cached_property
    def bucket(self) -> Bucket:
        return Bucket(self.target.store.url, self.resources.read_back)

    def begin(self) -> None:
        """Put the job, if no shard has done so. Raises `OutputError` if there is another one, or a checkpoint."""
        data, key = self.job.to_json(), self._staged("job")
        for _ in range(3):
            there = self.bucket.read(key)
            if there is not None:
                other = ShardJob.from_json(there[0], f"{self.target}/.ckpt/job")
                if other.id != self.job.id:
                    raise other.refused(self.target, f"run `ckpt clean {self.target}`")
                other.check_array(self.shard)
            objects = self.bucket.list(self.target.key)
            if there is not None:
                job = objects.get(key)
                if job is None or not any(one.modified < job.modified - _SKEW for one in _data(self.target, objects)):
                    return
                # It was put too late, by a shard that had seen nothing here: the target was published meanwhile.
                self.bucket.delete([key])
            elif any(_data(self.target, objects)) or self._staged("published") in objects:
                raise exists(self.target)
            else:
                with suppress(FileExistsError):  # another shard was faster
                    self.bucket.create(key, data)
        raise exists(self.target)

    def receipts(self) -> Mapping[str, Receipt]:
        objects = self.bucket.list(self.target.key)
        complete: dict[str, Receipt] = {}
        for receipt in self._journal.read(objects):
            if is_stored(receipt, objects.get(f"{self.target.key}/{receipt.file}")):
                complete.setdefault(receipt.file, receipt)
        return complete

    @contextmanager
    def attempt(self) -> Iterator[StoreAttempt]:
        place = SharedPrefix(self.bucket, self.target.key, self._staged("lease"), None, self.resources.scratch)
        with place.attempt() as attempt:
            try:
                yield attempt
            finally:
                self._journal.flush()

    def note(self, receipt: Receipt) -> None:
        if self._journal.add(receipt):
            self._journal.flush()

    @contextmanager
    def lease(self, wait: bool, stop: threading.Event) -> Iterator[str | None]:
        with ExitStack() as stack:
            holder: str | None = None
            while True:
                try:
                    staged = open_store(
                        self.target,
                        self.resources.scratch,
                        self.resources.locks,
                        single_file=False,
                        read_back=self.resources.read_back,
                    )
                    self._stage, holder = stack.enter_context(staged), None
                    break
                except LockedError as error:
                    holder = error.what
                if not wait or stop.wait(_POLL) or self.is_published():
                    break
            done = self.is_published()
            if done and holder is None and self._stage is not None:
                self._stage.remove_notes()  # those of one that was killed at its end, and of this process
            yield None if done else holder

    def is_published(self) -> bool:
        return is_published(self.target, self.job.id)

    def publish(self, receipts: Sequence[Receipt], commit: Callable[[Path], None]) -> None:
        stage = self._stage
        assert stage is not None
        stage.begin(self.job.id, self.job.files)
        written = {receipt.file for receipt in stage.receipts(self.format)}
        if missing := [file for file in self.job.files if file not in written]:
            raise IncompleteError(
                f"{len(missing)} files were removed since the shards have written them",
                where=self.target / missing[0],
                hint="Run the shards again.",
            )
        commit(stage.data)
        stage.lease.check()
        mark = f"{done_folder(self.target)}/{self.job.id}"
        try:
            self.bucket.create(mark, b"")
        except FileExistsError:  # of a run of this job whose target was removed since: its time is too early
            self.bucket.delete([mark])
            self.bucket.create(mark, b"")
        stage.publish(None)

    def _staged(self, name: str) -> str:
        return f"{staged_folder(self.target, single_file=False)}/{name}"


def done_folder(target: StorePath) -> str:
    """The key of the folder of objects that say which jobs of shards are done: each has the job's id as its name."""
    return (target.parent / f".{target.name}{SHARDS}").key


def is_published(target: StorePath, job_id: str) -> bool:
    """Whether shards of a job have published its target."""
    bucket = Bucket(target.store.url)
    # From a listing, as the others: some stores give whole seconds in the answer to a HEAD.
    mark = bucket.list(done_folder(target)).get(f"{done_folder(target)}/{job_id}")
    if mark is None:
        return False
    objects = bucket.list(target.key)
    if not any(one.modified <= mark.modified + _SKEW for one in _data(target, objects)):
        return False  # all data are younger: this target was removed, and another job has written there since
    job, published = (
        objects.get(f"{staged_folder(target, single_file=False)}/{name}") for name in ("job", "published")
    )
    return published is not None or job is None or job.modified > mark.modified + _SKEW  # such a job came too late


def _data(target: StorePath, objects: Mapping[str, StoredObject]) -> Iterator[StoredObject]:
    """What there is at a target but what jobs note."""
    notes = f"{staged_folder(target, single_file=False)}/"
    return (one for key, one in objects.items() if not key.startswith(notes))


def remove_notes(target: StorePath, is_complete: Callable[[], bool]) -> None:
    """Remove what one has left below a complete target that was killed at its end, or came late. Never raises.

    `is_complete` is called when no other process can write there.
    """
    with suppress(CkptError, OSError):
        notes = Bucket(target.store.url).list(staged_folder(target, single_file=False))
        if notes:
            with open_store(target, None, locks=False, single_file=False) as stage:
                if is_complete():
                    stage.remove_notes()


def open_objects(
    target: StorePath, job: ShardJob, shard: Shard, format: WritableFormat, resources: Execution
) -> ShardObjects:
    """What there is of a target in a store. Raises `OutputError` if another job writes it."""
    stage = ShardObjects(target, job, shard, format, resources)
    if resources.locks:
        # With an object of its own: others may be removed meanwhile, as another shard publishes.
        probe = f"{staged_folder(target, single_file=False)}/probe-{uuid4().hex}"
        version = stage.bucket.create(probe, b"")
        check_conditions(stage.bucket, probe, target, "Shards need a store with conditional requests.", version)
        with suppress(OSError):  # without the right to delete, it stays until `ckpt clean` may remove it
            stage.bucket.delete([probe])
    stage.begin()
    return stage


def unfinished_job(target: StorePath) -> ShardJob | None:
    """The job whose shards write a target; None if the target is complete.

    Raises `NotFoundError` if nothing is there.
    """
    bucket, key = Bucket(target.store.url), f"{staged_folder(target, single_file=False)}/job"
    read = bucket.read(key)
    if read is not None:
        return ShardJob.from_json(read[0], target)
    if not any(_data(target, bucket.list(target.key))):
        raise no_shards(target)
    remove_notes(target, lambda: bucket.head(key) is None)
    return None
