"""A job: a source, a target and a format. A job continues where an equal, interrupted job stopped."""

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ckpt import pipeline
from ckpt.pipeline import CountBytes, Execution, Resources, Result
from ckpt.pipeline.planned_reads import StoreReads, estimate_reads
from ckpt.pipeline.shard import COMMIT, Shard
from ckpt.pipeline.shared_plan import SharedPlan
from ckpt.pipeline.target import StagedTarget
from ckpt.pipeline.targets import is_published
from ckpt.pipeline.write import Replay
from ckpt.rename import prepare
from ckpt_codecs.native import library
from ckpt_formats.core.arguments import Checked, StrPath, checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import InvalidArgumentError, OutputError
from ckpt_formats.core.format import Plan, WritableFormat
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.publish import FlushError
from ckpt_formats.registry import writable
from ckpt_formats.registry.encoded import uses_codecs
from ckpt_formats.registry.endings import format_of_ending
from ckpt_formats.stores.location import target_path

if TYPE_CHECKING:
    from ckpt.pipeline.cluster.distribute import ClusterStatus


@runtime_checkable
class Progress(Protocol):
    """Shows how far a piece of work is. A function of two numbers, as `__call__`, is enough for `progress=`.

    Calls come from any thread, one at a time. An exception stops the work.
    """

    def __call__(self, done: int, total: int, /) -> None:
        """Show that so many bytes are done, of how many."""

    def show_status(self, status: "ClusterStatus", /) -> None:
        """Show how far a cluster is that writes the files: called about every half minute."""


AnyProgress = Progress | Callable[[int, int], None]
"""What `progress=` takes."""


@dataclass(frozen=True, init=False)
class Job(Checked):
    """Writes a checkpoint once: `plan` returns what will be written, `run` writes it."""

    source: Checkpoint
    target: StrPath
    format: WritableFormat
    overwrite: bool = False

    @checked
    def __init__(
        self,
        source: Checkpoint,
        target: StrPath,
        format: WritableFormat | str | None = None,
        overwrite: bool = False,
    ) -> None:
        """`format`: a format, the name of one, or None for the one that the target's ending says: see `save`.

        `overwrite`: replace a checkpoint at the target. It goes when the new one is whole.
        """
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "target", target)
        object.__setattr__(self, "format", format_for(format, target))
        object.__setattr__(self, "overwrite", overwrite)
        self.__post_init__()

    def __getstate__(self) -> dict[str, Any]:
        """Without the plan: another process makes the same one."""
        return {one.name: self.__dict__[one.name] for one in fields(self)}

    @property
    def id(self) -> str:
        """The id of the job: an interrupted run is continued by a job with the same id.

        It covers the history of the source, the identities of all files that are read, and all options of the format.
        """
        return pipeline.job_id(self._source, pipeline.identities_of(self._source, self._format), self._format)

    def plan(self) -> Plan:
        """The files that will be written. No tensor is read. Raises `CkptError` if the job cannot succeed."""
        return self._plan

    @checked
    def store_reads(self, *, resources: Resources | None = None) -> StoreReads | None:
        """What writing requests from stores: bytes, and about how many requests. None if all files are local."""
        own = resources or Resources.of_machine()
        return estimate_reads(self._plan.files, pipeline.identities_of(self._source, self._format), own)

    @checked
    def run(
        self,
        *,
        resources: Resources | None = None,
        executor: str | None = None,
        locks: bool = True,
        read_back: bool = False,
        progress: AnyProgress | None = None,
    ) -> Result:
        """Write the target, which appears when it is complete.

        `executor`: `dask://HOST:PORT` or `ray://HOST:PORT`, a cluster whose workers write the files, each with one
        thread and the memory of `resources` for itself; None: threads of this process. `locks` False: you guarantee
        that nothing else writes the target. `read_back`: read back all that is written into a store.

        After an interrupt or a full disk, an equal job continues where this one stopped. Raises `CkptError`; after
        Ctrl-C, `KeyboardInterrupt`, between two slabs.
        """
        execution = Execution.of(resources, executor=executor, locks=locks, read_back=read_back)
        return self._execute(execution, progress)

    @checked
    def run_shard(
        self,
        number: int,
        count: int,
        *,
        resources: Resources | None = None,
        locks: bool = True,
        read_back: bool = False,
        progress: AnyProgress | None = None,
    ) -> Result:
        """Write the share `number` of `count` of the files, counted from 0, as one process of a job array.

        All processes of an array write one target together. The last one publishes it; for the others, `status` of the
        result is "pending", and `missing` has the files that the others have yet to write. Raises as `run`, and
        `InvalidArgumentError` for a share that does not exist.
        """
        if count == 0:
            raise InvalidArgumentError("a job has at least one shard", hint="Shards are counted from 0 to N-1.")
        shard = Shard(number, count)
        return self._execute(Execution.of(resources, shard=shard, locks=locks, read_back=read_back), progress)

    @checked
    def commit(
        self,
        *,
        resources: Resources | None = None,
        locks: bool = True,
        read_back: bool = False,
        progress: AnyProgress | None = None,
    ) -> Result:
        """Publish what all shards of this job have written, if the last of them did not.

        Writes no file of tensors. Raises `IncompleteError` if files are missing; else as `run`.
        """
        return self._execute(Execution.of(resources, shard=COMMIT, locks=locks, read_back=read_back), progress)

    def _execute(self, resources: Execution, progress: AnyProgress | None) -> Result:
        if self._is_replacing:
            return self._replace(resources, progress)
        if self.needs_kernels:
            load_kernels()
        replay = None if self.replay_notice is None or resources.shard is not None else self._replay(resources)
        try:
            count_bytes = count_to(self._plan.nbytes, progress)
            show_status = progress.show_status if isinstance(progress, Progress) else None
            return pipeline.write(
                self._plan, self._source, self.path, self._format, resources, count_bytes, show_status, replay
            )
        except OutputError as error:
            # Another run of this shard may have published the target meanwhile, which is then in the way.
            is_lost = isinstance(error.__cause__, FlushError)
            if resources.shard is None or is_lost or not self.is_published():
                raise
            return pipeline.complete_before(self.path)

    def _replace(self, resources: Execution, progress: AnyProgress | None) -> Result:
        """Write a checkpoint beside the target, then let it take the target's name."""
        if resources.shard is not None:
            raise InvalidArgumentError(
                "shards write a target together, and cannot replace one",
                where=self.path,
                hint="Remove it first, or write all in one process.",
            )
        from ckpt.job.replacing import replacing  # few jobs replace anything

        self._check_replaceable()
        with replacing(self.path, resources.locks) as new:
            result = Job(self.source, new, self.format)._execute(resources, progress)
        return replace(result, target=self.path)

    def _check_replaceable(self) -> None:
        from ckpt.job.replacing import check_replaceable

        edits = (path for edit in self._source.history for path in edit.inputs())
        read = pipeline.identities_of(self._source, self._format)
        check_replaceable(self.path, (self._source.path, *read, *edits))

    @cached_property
    def _is_replacing(self) -> bool:
        return self.overwrite and self.path.exists()

    def _replay(self, resources: Execution) -> Replay:
        """What replays the source once, before a format that would replay each delta several times writes it."""
        from ckpt.job.replay_first import replayed  # few sources are states of chains

        def write(state: Checkpoint, folder: Path, format: WritableFormat) -> Result:
            return Job(state, folder, format).run(resources=resources)

        def replay(stage: StagedTarget) -> tuple[Checkpoint, Plan]:
            state = replayed(self.source, stage, pipeline.space_needed(self._plan.files), write)
            job = Job(state, self.path, self.format)
            return job._source, job._plan

        return replay

    def is_published(self) -> bool:
        """Whether shards of an equal job have written the target, today or yesterday."""
        return is_published(self.path, self.id)

    @cached_property
    def replay_notice(self) -> Notice | None:
        """What the user should know if the source is a state of a chain that is replayed before it is written."""
        if not uses_codecs(self.source):
            return None
        from ckpt.job.replay_first import is_replayed_first, replay_notice  # few sources are states of chains

        return replay_notice(self.source) if is_replayed_first(self.source, self.format) else None

    @property
    def needs_kernels(self) -> bool:
        """Is anything encoded or decoded?"""
        return getattr(self.format, "codec", None) is not None or uses_codecs(self.source)

    @cached_property
    def path(self) -> Path:
        """The target as a path; that of a store shows what was there when it was first listed."""
        return target_path(self.target)

    @cached_property
    def _format(self) -> WritableFormat:
        return self.format.for_target(self.path)

    @cached_property
    def _source(self) -> Checkpoint:
        return prepare(self.source, self.format)

    @cached_property
    def _plan(self) -> Plan:
        target = self.path
        if self._is_replacing:
            from ckpt.pipeline.removal import replacement_path

            self._check_replaceable()
            while os.path.lexists(target):  # a job that was killed may have left one beside it, too
                target = replacement_path(target)
        plan = pipeline.plan(self._source, target, self._format)
        renaming = tuple(notice for notice in self._source.notices if notice not in self.source.notices)
        return replace(plan, notes=(*renaming, *plan.notes))


@checked
def save(
    source: Checkpoint,
    target: StrPath,
    format: WritableFormat | str | None = None,
    *,
    overwrite: bool = False,
    resources: Resources | None = None,
    locks: bool = True,
    read_back: bool = False,
    progress: AnyProgress | None = None,
) -> Result:
    """Write a checkpoint. `Job` does the same, and can return the plan before.

    `format` is a format with its options, or the name of a format, such as "hf". Without it, the target's ending
    determines it: `.safetensors`, `.pt`, `.pth`, `.bin`, `.ckpt`, `.ucp`, `.msgpack`, `.gguf`; a name without an ending
    is a folder in the universal format.
    `overwrite`: replace a checkpoint at the target, which goes when the new one is complete. `resources` None: those of
    `Resources.of_machine()`. `locks` and `read_back`: as in `Job.run`.

    Raises `CkptError` of the kind that fits; the target is then unchanged.
    """
    return Job(source, target, format, overwrite).run(
        resources=resources, locks=locks, read_back=read_back, progress=progress
    )


def shared_plan(job: Job) -> SharedPlan:
    """What other processes need to write the files of a job. Raises `CkptError` if the job cannot succeed."""
    return SharedPlan.of(job._plan, job._source, job._format)


def format_for(format: WritableFormat | str | None, target: StrPath) -> WritableFormat:
    """The format of this name, of ckpt or of an installed package; None: of the target's ending, else universal.

    Raises `InvalidArgumentError` for a name that no format has, `UnsupportedError` for one that is only read, or whose
    package is broken.
    """
    if format is None and isinstance(target, (str, os.PathLike)):
        format = format_of_ending(Path(target)) or "universal"
    return writable(format) if isinstance(format, str) else format


def count_to(total: int, progress: AnyProgress | None) -> CountBytes:
    """A function that is called with numbers of bytes, and calls `progress` with their sum and the total."""
    if progress is None:
        return lambda nbytes: None
    counter = _Counter(total, progress)
    return counter.add


@dataclass
class _Counter:
    total: int
    progress: AnyProgress
    done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, nbytes: int) -> None:
        with self.lock:
            self.done += nbytes
            self.progress(self.done, self.total)


def load_kernels() -> None:
    """Load the compiled kernels before any work begins. Raises `LibraryError` if they are missing."""
    library.load()
    library.level()
