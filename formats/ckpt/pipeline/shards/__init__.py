"""Processes of a job array that write one target together, without a scheduler and without messages.

Each plans the same files, because planning is pure, and writes its share of them. Whoever finds that all files are
there verifies the checksums, commits and publishes the target. A process may be killed, repeated, or run twice at once.
"""

import heapq
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt import pipeline
from ckpt.pipeline import staging
from ckpt.pipeline.evidence_text import at_paths
from ckpt.pipeline.groups import Group, in_step, nbytes
from ckpt.pipeline.interrupts import deferred_interrupts, raise_if_interrupted
from ckpt.pipeline.resources import Execution
from ckpt.pipeline.shard import Shard
from ckpt.pipeline.shards import folder
from ckpt.pipeline.shards.job import ShardJob
from ckpt.pipeline.shards.shard_staging import ShardStaging
from ckpt.pipeline.write_files import CountBytes, write_files
from ckpt.pipeline.writers import FileWork, check_scales_out
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, IncompleteError
from ckpt_formats.core.format import FilePlan, Plan, Receipt, WritableFormat
from ckpt_formats.core.identity import Identities, check_unchanged
from ckpt_formats.core.seal_checks import SealChecks
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.core.text import printable
from ckpt_formats.core.value_changes import check_allowed, totals
from ckpt_formats.core.zero_values import zero_notices
from ckpt_formats.registry.plugins import blamed_on_package
from ckpt_formats.stores.location import listed_again

_MAX_GROUP = 64
_GROUPS = 4
"""Groups of files for each shard. Files are written in step only where there are as many."""


def write_shard(
    plan: Plan,
    source: Checkpoint,
    target: Path,
    format: WritableFormat,
    resources: Execution,
    shard: Shard,
    count_bytes: CountBytes,
) -> "pipeline.Result":
    """Write a share of the planned files, and publish the target if all others are there. Else the result is pending.

    With `COMMIT` as shard, only publish. Raises `IncompleteError` then if files are missing.
    """
    check_scales_out(plan, format)
    started, identities = time.monotonic(), pipeline.identities_of(source, format)
    files = [part.file for part in plan.files]
    job = ShardJob.of(pipeline.job_id(source, identities, format), source.path, target, format.name, files, shard)
    stage = _open(target, job, shard, format, resources)
    listed = pipeline.listed_seals(source, format)
    checks = SealChecks(listed)
    with deferred_interrupts() as stop:
        try:
            before = _usable(stage.receipts(), checks, identities)
            own = [part for group in deal(plan.files, shard) for part in group]
            resumed = sum(part.file in before for part in own)
            count_bytes(sum(part.nbytes for part in plan.files if part.file in before or part not in own))
            work = FileWork(source, format, plan, resources, identities, listed)
            fresh = _write(stage, work, before, shard, stop, count_bytes)
            changed = totals(change for receipt in fresh for change in receipt.changes)
            check_allowed(changed)
            others = _usable(stage.receipts(), checks, identities)
            receipts = {**before, **{receipt.file: receipt for receipt in fresh}, **others}
            missing = [part for part in plan.files if part.file not in receipts]
            if missing and is_published(target, job.id):
                return pipeline.complete_before(target)  # and what the shards know of each other was removed
            if missing:
                by_shard = _by_shard(missing, plan.files, shard, stage)
                nbytes = sum(receipt.nbytes for receipt in fresh)
                return pipeline.Result(
                    target,
                    len(fresh),
                    nbytes,
                    resumed,
                    0,
                    time.monotonic() - started,
                    "pending",
                    by_shard,
                    changed=changed,
                )
            in_order = [receipts[part.file] for part in plan.files]
            checksums, publisher = 0, ""
            changed = totals(change for receipt in in_order for change in receipt.changes)
            check_allowed(changed)
            zeros = tuple(zero_notices(source, (run for receipt in in_order for run in receipt.zeros)))
            with stage.lease(wait=not fresh, stop=stop) as holder:
                if holder is not None:
                    publisher = holder
                elif stage.is_published():
                    return pipeline.complete_before(target)
                else:
                    for receipt in in_order:
                        checks.add(receipt.evidence)
                    pipeline.raise_if_damaged(checks, identities)
                    checksums = len(checks)
                    staging.reached("settled")
                    raise_if_interrupted(stop)

                    def commit(place: Path) -> None:
                        with blamed_on_package(format, OSError):
                            format.commit(place, source, in_order)
                        staging.reached("committed")
                        check_unchanged(identities)

                    stage.publish(in_order, commit)
        except CkptError:
            raise
        except OSError as error:
            raise pipeline.system_error(error, stage, identities) from error
    total = sum(receipt.nbytes for receipt in in_order)
    seconds = time.monotonic() - started
    written = target if publisher else listed_again(target)
    return pipeline.Result(
        written,
        len(in_order),
        total,
        len(before),
        checksums,
        seconds,
        "pending" if publisher else "written",
        publisher=publisher,
        changed=changed,
        left=stage.notes,
        zeros=zeros,
    )


def is_published(target: Path, job_id: str) -> bool:
    """Whether shards of a job have published its target, not long ago. Removes what one that died then has left."""
    if isinstance(target, StorePath):
        from ckpt.pipeline.shards import objects

        done = objects.is_published(target, job_id)
        if done:
            objects.remove_notes(target, lambda: objects.is_published(target, job_id))
        return done
    return folder.is_published(target, job_id)


def unfinished_job(target: Path) -> ShardJob | None:
    """The job whose shards write a target; None if the target is complete.

    Raises `NotFoundError` if no shards write it, `OutputError` if those of several jobs do, `CorruptError`.
    """
    if not isinstance(target, StorePath):
        return folder.unfinished_job(target)
    from ckpt.pipeline.shards import objects

    return objects.unfinished_job(target)


def _open(target: Path, job: ShardJob, shard: Shard, format: WritableFormat, resources: Execution) -> ShardStaging:
    if isinstance(target, StorePath):
        from ckpt.pipeline.shards import objects

        return objects.open_objects(target, job, shard, format, resources)
    return folder.open_folder(target, job, shard)


def deal(files: Sequence[FilePlan], shard: Shard) -> list[Group]:
    """The groups of files that a shard writes: the largest first, each to the shard with the fewest bytes so far.

    It depends on the plan and the number of shards alone, so all processes deal alike.
    """
    if shard.only_commits:
        return []
    return [group for group, number in _dealt(files, shard.count) if number == shard.number]


def _dealt(files: Sequence[FilePlan], count: int) -> Iterator[tuple[Group, int]]:
    """All groups, each with the number of the shard that writes it."""
    groups = in_step(files, max(1, min(_MAX_GROUP, len(files) // (_GROUPS * count))))
    loads = [(0, number) for number in range(count)]
    for group in sorted(groups, key=lambda group: (-nbytes(group), group[0].file)):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + nbytes(group) + 1, number))
        yield group, number


def _write(
    stage: ShardStaging,
    work: FileWork,
    written: Mapping[str, Receipt],
    shard: Shard,
    stop: threading.Event,
    count_bytes: CountBytes,
) -> list[Receipt]:
    """Write the files of this shard that nobody has written yet. Gives their receipts."""
    groups = (tuple(part for part in group if part.file not in written) for group in deal(work.plan.files, shard))
    todo = [group for group in groups if group]
    fresh: list[Receipt] = []
    if todo:
        with stage.attempt() as sink:
            for receipt in write_files(
                sink, work.format, todo, work.resources, work.identities, work.listed, stop, count_bytes
            ):
                stage.note(receipt)
                fresh.append(receipt)
                staging.reached("journalled")
                raise_if_interrupted(stop)
    return fresh


def _usable(receipts: Mapping[str, Receipt], checks: SealChecks, identities: Identities) -> dict[str, Receipt]:
    """Those of which the evidence is about checksums of this source, at the paths of this process."""
    placed = (replace(one, evidence=at_paths(one.evidence, identities)) for one in receipts.values())
    return {one.file: one for one in placed if checks.knows(one.evidence)}


def _by_shard(
    missing: Sequence[FilePlan], files: Sequence[FilePlan], shard: Shard, stage: ShardStaging
) -> dict[int, tuple[str, ...]]:
    """The missing files by the shards that write them. Raises `IncompleteError` if nobody else would write them."""
    if shard.only_commits:
        raise IncompleteError(
            f"{len(missing)} of {len(files)} files are not written yet; the first is {printable(missing[0].file)}",
            where=stage.target,
            hint="Run the shards again that have not ended well; those that have ended write nothing again.",
        )
    names = {part.file for part in missing}
    by_shard: dict[int, list[str]] = {}
    for group, number in _dealt(files, shard.count):
        if own := [part.file for part in group if part.file in names]:
            by_shard.setdefault(number, []).extend(own)
    return {number: tuple(by_shard[number]) for number in sorted(by_shard)}
