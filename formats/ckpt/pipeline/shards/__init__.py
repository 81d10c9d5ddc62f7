"""Processes of a job array that write one target together, without a scheduler and without messages.

Each plans the same files, because planning is pure, and writes its share of them. Whoever finds that all files are
there verifies the checksums, commits and publishes the target. A process may be killed, repeated, or run twice at once.
"""

import heapq
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from ckpt import pipeline
from ckpt.pipeline import staging
from ckpt.pipeline.groups import Group, in_step, nbytes
from ckpt.pipeline.interrupts import deferred_interrupts, raise_if_interrupted
from ckpt.pipeline.resources import Resources
from ckpt.pipeline.shard import Shard
from ckpt.pipeline.shards.folder import ShardFolder, open_shards
from ckpt.pipeline.write_files import CountBytes, write_files
from ckpt.pipeline.writers import check_scales_out
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import Incomplete
from ckpt_formats.core.format import FilePlan, Plan, Receipt, WritableFormat
from ckpt_formats.core.identity import Identities, check_unchanged
from ckpt_formats.core.text import printable

_MAX_GROUP = 64
_GROUPS = 4
"""Groups of files for each shard. Files are written in step only where there are as many."""
_NAMED = 8
"""So many shards, at most, are named in a message."""


def write_shard(
    plan: Plan,
    source: Checkpoint,
    target: Path,
    format: WritableFormat,
    resources: Resources,
    shard: Shard,
    count_bytes: CountBytes,
) -> "pipeline.Result":
    """Write a share of the planned files, and publish the target if all others are there. Else the result is `pending`.

    With `COMMIT` as shard, only publish. Raises `Incomplete` then if files are missing.
    """
    check_scales_out(plan, format)
    started, identities = time.monotonic(), pipeline.identities_of(source, format)
    stage = open_shards(target, pipeline.job_id(source, identities, format), source.path, format.name, shard)
    with deferred_interrupts() as stop:
        try:
            before = stage.receipts()
            own = [part for group in deal(plan.files, shard) for part in group]
            resumed = sum(part.file in before for part in own)
            count_bytes(sum(part.nbytes for part in plan.files if part.file in before or part not in own))
            fresh = _write(stage, plan, before, format, resources, shard, identities, stop, count_bytes)
            receipts = {**before, **{receipt.file: receipt for receipt in fresh}, **stage.receipts()}
            missing = [part for part in plan.files if part.file not in receipts]
            if missing:
                pending = _missing(missing, plan.files, shard, stage)
                nbytes = sum(receipt.nbytes for receipt in fresh)
                return pipeline.Result(
                    target, len(fresh), nbytes, resumed, 0, time.monotonic() - started, pending=pending
                )
            in_order = [receipts[part.file] for part in plan.files]
            checksums, pending = 0, ""
            with stage.lease(wait=not fresh, stop=stop) as holder:
                if holder is not None:
                    pending = f"all files are written; {holder} publishes the target"
                elif not stage.is_published():
                    checksums = pipeline.verify_receipts(in_order, identities)
                    staging.reached("settled")
                    raise_if_interrupted(stop)
                    _commit(stage, source, format, in_order, identities)
        except OSError as error:
            raise pipeline.system_error(error, stage, identities) from error
    total = sum(receipt.nbytes for receipt in in_order)
    seconds = time.monotonic() - started
    return pipeline.Result(target, len(in_order), total, len(before), checksums, seconds, pending=pending)


def deal(files: Sequence[FilePlan], shard: Shard) -> list[Group]:
    """The groups of files that a shard writes: the largest first, each to the shard with the fewest bytes so far.

    It depends on the plan and the number of shards alone, so all processes deal alike.
    """
    if shard.only_commits:
        return []
    groups = in_step(files, max(1, min(_MAX_GROUP, len(files) // (_GROUPS * shard.count))))
    return [group for group, number in _dealt(groups, shard.count) if number == shard.number]


def _dealt(groups: Iterable[Group], count: int) -> Iterable[tuple[Group, int]]:
    loads = [(0, number) for number in range(count)]
    for group in sorted(groups, key=lambda group: (-nbytes(group), group[0].file)):
        load, number = loads[0]
        heapq.heapreplace(loads, (load + nbytes(group) + 1, number))
        yield group, number


def _write(
    stage: ShardFolder,
    plan: Plan,
    written: "dict[str, Receipt]",
    format: WritableFormat,
    resources: Resources,
    shard: Shard,
    identities: Identities,
    stop: threading.Event,
    count_bytes: CountBytes,
) -> list[Receipt]:
    """Write the files of this shard that nobody has written yet. Gives their receipts."""
    groups = (tuple(part for part in group if part.file not in written) for group in deal(plan.files, shard))
    todo = [group for group in groups if group]
    fresh: list[Receipt] = []
    if todo:
        with stage.attempt() as sink:
            for receipt in write_files(sink, format, todo, resources, identities, stop, count_bytes):
                stage.note(receipt)
                fresh.append(receipt)
                staging.reached("journalled")
                raise_if_interrupted(stop)
    return fresh


def _commit(
    stage: ShardFolder,
    source: Checkpoint,
    format: WritableFormat,
    receipts: Sequence[Receipt],
    identities: Identities,
) -> None:
    folder = stage.take_over(receipts)
    format.commit(folder, source, receipts)
    staging.reached("committed")
    check_unchanged(identities)
    stage.publish(folder)


def _missing(missing: Sequence[FilePlan], files: Sequence[FilePlan], shard: Shard, stage: ShardFolder) -> str:
    """Which files are missing, as a part of a sentence. Raises `Incomplete` if nobody else would write them."""
    text = f"{len(missing)} of {len(files)} files are not written yet"
    if shard.only_commits:
        raise Incomplete(
            f"{text}; the first is {printable(missing[0].file)}",
            where=stage.target,
            hint="Run the shards again that have not ended well; those that have ended write nothing again.",
        )
    names = {part.file for part in missing}
    groups = in_step(files, max(1, min(_MAX_GROUP, len(files) // (_GROUPS * shard.count))))
    numbers = sorted(
        {number for group, number in _dealt(groups, shard.count) if any(one.file in names for one in group)}
    )
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    return f"{text}: those of shards {', '.join(map(str, numbers[:_NAMED]))}{more}"
