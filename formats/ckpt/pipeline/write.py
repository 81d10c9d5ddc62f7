"""Write a target: alone, with the workers of a cluster, or as one shard of a job array. The steps are the same.

Each process plans the same files, because planning is pure, and writes its share of them: all of them, if it is alone.
Whoever finds that all files are there verifies the checksums, commits and publishes the target. A process may be
killed, repeated, or run twice at once.
"""

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.pipeline import target as life
from ckpt.pipeline.checks import identities_of, job_id, listed_seals, raise_if_damaged
from ckpt.pipeline.evidence_text import at_paths
from ckpt.pipeline.groups import missing_by_shard, share_of
from ckpt.pipeline.interrupts import KeptFiles, deferred_interrupts, raise_if_interrupted
from ckpt.pipeline.job_note import JobNote
from ckpt.pipeline.resources import Execution
from ckpt.pipeline.result import Result, complete_before
from ckpt.pipeline.target import StagedTarget
from ckpt.pipeline.targets import open_target
from ckpt.pipeline.write_files import CountBytes
from ckpt.pipeline.writers import FileWork, check_absolute, check_scales_out, connected, write_missing
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, IncompleteError, NoSpaceError, OutputError
from ckpt_formats.core.evidence import Evidence
from ckpt_formats.core.files import unreadable
from ckpt_formats.core.format import Plan, Receipt, WritableFormat
from ckpt_formats.core.identity import Identities, check_unchanged
from ckpt_formats.core.locking import FULL
from ckpt_formats.core.publish import FlushError, RenameError
from ckpt_formats.core.seal_checks import SealChecks
from ckpt_formats.core.store_path import StoreError, is_remote
from ckpt_formats.core.text import printable
from ckpt_formats.core.value_changes import check_allowed, totals
from ckpt_formats.core.zero_values import zero_notices
from ckpt_formats.registry.plugins import blamed_on_package
from ckpt_formats.stores.location import listed_again

if TYPE_CHECKING:
    from ckpt.pipeline.cluster import Cluster
    from ckpt.pipeline.cluster.distribute import ClusterStatus

Replay = Callable[[StagedTarget], "tuple[Checkpoint, Plan]"]
"""Replays a state of a chain into the workspace of a target; returns it without deltas, and its plan."""


def write(
    plan: Plan,
    source: Checkpoint,
    target: Path,
    format: WritableFormat,
    resources: Execution,
    count_bytes: CountBytes,
    show_status: "Callable[[ClusterStatus], None] | None" = None,
    replay: Replay | None = None,
) -> Result:
    """Write the planned files. The target appears when it is complete. `show_status`: called if a cluster writes them.

    Files that an interrupted run of the same job wrote are checked and used; those of another job are removed. A shard
    writes its share, and publishes the target if all other files are there; else the result is pending. With `COMMIT`
    as shard, it only publishes, and raises `IncompleteError` if files are missing.
    """
    started = time.monotonic()
    if resources.shard is not None or resources.executor is not None:
        check_scales_out(plan, format)
    identities: Identities = {}
    with (
        connected(resources) as cluster,
        open_target(target, resources, plan.single_file) as stage,
        deferred_interrupts() as stop,
    ):
        writing = None
        try:
            if replay is not None:
                source, plan = replay(stage)
            identities = identities_of(source, format)
            if resources.executor is not None:
                check_absolute(identities)
            work = FileWork(source, format, plan, resources, identities, listed_seals(source, format))
            writing = _Writing(work, stage, stop)
            result = writing.run(cluster, count_bytes, show_status)
        except KeyboardInterrupt as error:
            nbytes = 0 if writing is None else writing.nbytes_kept()
            where = stage.path if is_remote(stage.path) else stage.workspace
            KeptFiles(nbytes, str(where), stage.clean_command).attach(error)
            raise
        except CkptError as error:
            if isinstance(error, OutputError) or stage.is_shared:
                raise
            stage.discard()
            check_unchanged(identities)  # the error then states the cause
            raise
        except OSError as error:
            raise _system_error(error, stage, identities) from error
    return replace(result, seconds=time.monotonic() - started)


class _Writing:
    """One run of a job at its target."""

    def __init__(self, work: FileWork, stage: StagedTarget, stop: threading.Event) -> None:
        self._work, self._stage, self._stop = work, stage, stop
        self._checks = SealChecks(work.listed)
        self._done = dict[str, Receipt]()
        """The receipts of all files that are there, by name, without evidence."""

    def run(
        self,
        cluster: "Cluster | None",
        count_bytes: CountBytes,
        show_status: "Callable[[ClusterStatus], None] | None",
    ) -> Result:
        work, stage, files = self._work, self._stage, self._work.plan.files
        shard = work.resources.shard
        names = [part.file for part in files]
        own_id = job_id(work.source, work.identities, work.format)
        stage.begin(JobNote.of(own_id, work.source.path, stage.path, work.format.name, names, shard))
        self._take(stage.receipts(work.format).values())
        before = set(self._done)
        own = files if shard is None else share_of(files, shard)
        resumed = before if shard is None else before & {part.file for part in own}
        elsewhere = {part.file for part in files} - {part.file for part in own}
        count_bytes(sum(part.nbytes for part in files if part.file in before or part.file in elsewhere))
        fresh = list[Receipt]()
        for receipt in write_missing(cluster, stage, work, before, self._stop, count_bytes, show_status):
            stage.note(receipt)
            self._take([receipt])
            fresh.append(self._done[receipt.file])
            life.reached("journalled")
            raise_if_interrupted(self._stop)
        if stage.is_shared:
            stage.flush()
            check_allowed(totals(change for receipt in fresh for change in receipt.changes))
            self._take(stage.receipts(work.format).values())
        if missing := [part for part in files if part.file not in self._done]:
            if stage.is_published():
                return complete_before(stage.path)  # and what the shards know of each other was removed
            return self._pending(fresh, resumed, missing_by_shard(missing, files, self._shards()))
        return self._finish(fresh, before)

    def _finish(self, fresh: list[Receipt], resumed: Collection[str]) -> Result:
        """Verify, commit and publish, if no other shard does so."""
        work, stage = self._work, self._stage
        receipts = [self._done[part.file] for part in work.plan.files]
        changed = totals(change for receipt in receipts for change in receipt.changes)
        zeros = tuple(zero_notices(work.source, (run for receipt in receipts for run in receipt.zeros)))
        with stage.publishing(wait=not fresh, stop=self._stop) as publisher:
            if publisher is not None:
                nbytes = sum(receipt.written for receipt in receipts)
                pending = self._pending(fresh, resumed, {})
                return replace(
                    pending, files=len(receipts), nbytes=nbytes, publisher=publisher, changed=changed, zeros=zeros
                )
            if stage.is_published():
                return complete_before(stage.path)
            raise_if_damaged(self._checks, work.identities)
            check_allowed(changed)
            life.reached("settled")
            raise_if_interrupted(self._stop)

            def commit(folder: Path) -> None:
                with blamed_on_package(work.format, OSError):
                    work.format.commit(folder, work.source, receipts)
                life.reached("committed")
                check_unchanged(work.identities)

            stage.publish(receipts, commit)
        return Result(
            listed_again(stage.path),
            1 if work.plan.single_file else len(receipts),
            sum(receipt.written for receipt in receipts),
            len(resumed),
            len(self._checks),
            0.0,
            changed=changed,
            left=stage.notices,
            resumed_nbytes=self._nbytes(resumed),
            chunks=sum(receipt.chunks for receipt in receipts),
            zeros=zeros,
        )

    def nbytes_kept(self) -> int:
        """The bytes of all files that are there: an interrupted run leaves them to the next one."""
        return self._nbytes(self._done)

    def _nbytes(self, files: Iterable[str]) -> int:
        return sum(self._done[file].written for file in files)

    def _pending(self, fresh: list[Receipt], resumed: Collection[str], missing: dict[int, tuple[str, ...]]) -> Result:
        """The result of a shard while the target is not published."""
        nbytes = sum(receipt.written for receipt in fresh)
        changed = totals(change for receipt in fresh for change in receipt.changes)
        return Result(
            self._stage.path,
            len(fresh),
            nbytes,
            len(resumed),
            0,
            0.0,
            "pending",
            missing,
            changed=changed,
            resumed_nbytes=self._nbytes(resumed),
        )

    def _shards(self) -> int:
        """The number of shards. Raises `IncompleteError` if this process only publishes."""
        shard, files = self._work.resources.shard, self._work.plan.files
        assert shard is not None, "a process that writes alone has written all files"
        if shard.only_commits:
            missing = [part.file for part in files if part.file not in self._done]
            raise IncompleteError(
                f"{len(missing)} of {len(files)} files are not written yet; the first is {printable(missing[0])}",
                where=self._stage.path,
                hint="Run the shards that failed again. The others write nothing twice.",
            )
        return shard.count

    def _take(self, receipts: Iterable[Receipt]) -> None:
        """Add what receipts prove, of files that are not known yet, if it is about checksums of this source.

        Workers and shards may have other paths: the evidence is brought to those of this process.
        """
        for receipt in receipts:
            evidence = at_paths(receipt.evidence, self._work.identities)
            if receipt.file not in self._done and self._checks.knows(evidence):
                self._checks.add(evidence)
                self._done[receipt.file] = replace(receipt, evidence=Evidence())


def _system_error(error: OSError, stage: StagedTarget, identities: Identities) -> CkptError:
    """The error for an error of the system, about a file of the source or about the target."""
    path = None if error.filename is None else Path(os.fsdecode(error.filename))
    return unreadable(error, path) if path is not None and path in identities else _output_error(error, stage)


def _output_error(error: OSError, stage: StagedTarget) -> OutputError:
    resume = f"Run the same command again to continue, or {stage.clean_command} to give up."
    if error.errno in FULL:
        return NoSpaceError("no space left on the disk", where=stage.disk, hint=f"Free space. {resume}")
    if isinstance(error, FlushError):
        return OutputError(
            f"the disk did not take what was written: {error.strerror}",
            where=error.filename,
            hint=f"Check the disk. {resume} What the disk did not take is written again.",
        )
    hint = f"{error.hint} {resume}" if isinstance(error, (StoreError, RenameError)) and error.hint else resume
    return OutputError(f"cannot be written: {error.strerror or error}", where=error.filename or stage.path, hint=hint)
