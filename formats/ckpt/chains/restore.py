"""Restore the full state of a step, in any format."""

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ckpt import pipeline
from ckpt.chains import tip
from ckpt.job import AnyProgress, Job
from ckpt.partial.recovery import is_mixed
from ckpt.pipeline import Resources, Result
from ckpt.pipeline.folder_staging import REPLAYED, make_staging, staging_folder
from ckpt.pipeline.scratch import scratch_folder
from ckpt.pipeline.targets import check_target
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, NoSpaceError, NotFoundError, OutputError, UnsupportedError
from ckpt_formats.core.fingerprint import fingerprint
from ckpt_formats.core.format import Plan, ReadOptions, WritableFormat
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.core.text import format_nbytes
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chain import address, members, states
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain.file import ChainIndex, Member
from ckpt_formats.universal.replay import StoredDelta
from ckpt_formats.universal.write_replayed import stored_delta_of

REPLAY_RATE = 1_000_000_000
"""About how many bytes of values one thread replays in a second: what a server core does with lossless deltas."""


@dataclass(frozen=True)
class ChainState:
    """A state to restore; `chain` and `member` are None if it is not a member of a chain."""

    checkpoint: Checkpoint
    run: Path
    chain: ChainIndex | None = None
    member: Member | None = None


def open_step(path: Path, step: int | None, options: ReadOptions) -> ChainState:
    """The state of a step of a chain. The path may also be that of any checkpoint, which has one step."""
    named = address.parse(path)
    if named is not None:
        if step not in (None, named.step):
            raise NotFoundError(
                f"the path names another step than {step}",
                where=path,
                hint="Name the step in the path or with `step` (--step).",
            )
        path, step = named.run, states.step_of(index.load(named.run / index.NAME), named)
    if not (path / index.NAME).is_file():
        checkpoint = open_checkpoint(path, options)
        if step is not None and checkpoint.origin.step != step:
            raise NotFoundError(f"not a chain, and its step is {checkpoint.origin.step}, not {step}", where=path)
        return ChainState(checkpoint, path)
    chain = index.load(path / index.NAME)
    if chain.segments:
        step = states.last_step(path, chain) if step is None else step
        if all(member.step != step for member in chain.members):
            return ChainState(states.open_state(path, chain, step), path)
    member = members.member_at(path, chain, step)
    return ChainState(tip.open_state(path, chain, member), path, chain, member)


@dataclass(frozen=True)
class ReplayWork:
    """How much is to be replayed before a state can be written."""

    deltas: int
    """Members of which deltas are decoded."""
    stored_nbytes: int
    """Bytes of these deltas, as they are stored."""
    nbytes: int
    """Bytes of values that they give."""

    def seconds(self, workers: int) -> float:
        """About how long it takes, if so many threads decode at `REPLAY_RATE`."""
        return self.nbytes / (REPLAY_RATE * workers)


def replay_work(checkpoint: Checkpoint) -> ReplayWork:
    """What must be decoded for a checkpoint. Deltas that a log of gradients begins with are not counted."""
    folders, stored, decoded = set[Path](), 0, 0
    for parameter in checkpoint.parameters.values():
        delta = stored_delta_of(parameter)
        if isinstance(delta, StoredDelta):
            for one in delta.lineage():
                folders.add(one.stored.path.parent.parent)
                stored += one.stored.nbytes
                decoded += prod(one.shape) * sum(dtype.itemsize for dtype in one.form.values())
    return ReplayWork(len(folders), stored, decoded)


def plan(state: ChainState, target: Path, format: WritableFormat, resources: Resources) -> Plan:
    """The files that `restore` writes, with notes about the deltas to replay and the temporary space that it needs."""
    job = Job(state.checkpoint, target, format)
    planned = job.plan() if isinstance(format, Universal) else _with_note(job.plan(), state.checkpoint)
    work = replay_work(state.checkpoint)
    return replace(planned, notes=(*planned.notes, _replay_note(work, resources))) if work.deltas else planned


def _replay_note(work: ReplayWork, resources: Resources) -> Notice:
    seconds, workers = work.seconds(resources.workers), resources.workers
    return Notice(
        f"{work.deltas} delta{'s' * (work.deltas != 1)} to replay: {format_nbytes(work.nbytes)} of values from "
        f"{format_nbytes(work.stored_nbytes)}, about {max(0.1, seconds):.1f} s with {workers} "
        f"worker{'s' * (workers != 1)} at {format_nbytes(REPLAY_RATE)}/s each"
    )


def restore(
    state: ChainState, target: Path, format: WritableFormat, resources: Resources, progress: AnyProgress | None = None
) -> Result:
    """Write the state. The hint of an error names the last earlier step that can be restored, if there is one."""
    check_target(target, state.run)
    try:
        return _restore(state.checkpoint, target, format, resources, progress)
    except CkptError as error:
        if state.chain is not None and state.member is not None:
            members.add_hint(state.run, state.chain, state.member, error)
            tip.add_hint(state.run, state.chain, error)
        raise


def _restore(
    source: Checkpoint, target: Path, format: WritableFormat, resources: Resources, progress: AnyProgress | None
) -> Result:
    """Write the state; for formats that read one tensor after the other, replay it to a folder first.

    Otherwise each delta would be replayed several times. The folder is in the staging folder of the target, and is
    removed with it.
    """
    if isinstance(format, Universal):
        return Job(source, target, _with_content(source, format)).run(resources=resources, progress=progress)
    job = Job(source, target, format)
    if not _replays(source):
        return job.run(resources=resources, progress=progress)
    if resources.shard is not None:
        raise UnsupportedError(
            f"the state is replayed before it is written as {format.name}, which shards cannot share",
            hint="Restore it to the universal format with --shard (--to universal), then convert that.",
        )
    needed = pipeline.space_needed(job.plan().files)  # raises for jobs that cannot succeed, before anything is written
    if isinstance(target, StorePath):
        with scratch_folder(resources.scratch) as scratch:
            replayed = _replayed(source, scratch, scratch, needed, resources, progress)
            return Job(replayed, target, format).run(resources=resources, progress=progress)
    stage = staging_folder(target)
    replayed = _replayed(source, target, stage, needed, resources, progress)
    try:
        return Job(replayed, target, format).run(resources=resources, progress=progress)
    except CkptError as error:
        if not isinstance(error, OutputError):  # after an OutputError, an equal job can continue
            shutil.rmtree(stage, ignore_errors=True)
        raise


def _replayed(
    source: Checkpoint, place: Path, stage: Path, needed: int, resources: Resources, progress: AnyProgress | None
) -> Checkpoint:
    """The replayed state, in the folder `stage` at `place`. What an interrupted run replayed there is used.

    Raises `NoSpaceError` unless there is space for it, and for `needed` bytes that the target takes.
    """
    folder = stage / f"{REPLAYED}{_name_of(source)}"
    is_beside = stage != place  # else a folder that only this process knows
    if is_beside and os.path.lexists(stage):
        make_staging(stage, place)  # before anything in it is believed
    if not folder.is_dir():
        _check_space(place, stage, _universal_nbytes(source) + needed)
        if is_beside:
            make_staging(stage, place)
        try:
            Job(source, folder, _with_content(source, Universal())).run(resources=resources, progress=progress)
        except CkptError:
            with suppress(OSError):
                stage.rmdir()  # fails if it is not empty: then an equal job can continue
            raise
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror or error}", where=stage) from error
    replayed = Universal().read(folder, ReadOptions())
    return replace(replayed, history=source.history)


def _name_of(source: Checkpoint) -> str:
    """A name that differs from those of the run's other states: from the content id, or from the step of the log."""
    path = source.path / manifest.NAME
    if is_mixed(source):
        return fingerprint(source.history)[:16]
    if path.is_file():
        return manifest.load(path).content.removeprefix("blake2b-256:")[:16]
    return f"step-{source.origin.step}"


def _with_note(plan: Plan, source: Checkpoint) -> Plan:
    if not _replays(source):
        return plan
    text = (
        f"the state is first replayed next to the target, which takes {format_nbytes(_universal_nbytes(source))} more"
    )
    return Plan(plan.files, plan.dropped, (*plan.notes, Notice(text)), plan.single_file)


def _universal_nbytes(source: Checkpoint) -> int:
    return pipeline.space_needed(Universal().plan(source).files)


def _check_space(place: Path, stage: Path, needed: int) -> None:
    """Raise `NoSpaceError` if there is too little space. Bytes that an interrupted run wrote are not written again."""
    written = sum(path.stat().st_size for path in stage.rglob("*") if path.is_file())
    free = shutil.disk_usage(place.parent).free
    if needed > free + written:
        raise NoSpaceError(
            f"restoring takes {format_nbytes(needed)}: the state is first replayed next to the target; "
            f"{format_nbytes(free)} are free",
            where=place,
            hint="Free some; or restore it as universal, which needs no temporary space.",
        )


def _with_content(source: Checkpoint, format: Universal) -> Universal:
    """The format, with the content id of the source if it has one: the result must have the same."""
    path = source.path / manifest.NAME
    if is_mixed(source) or not path.is_file() or type(format) is not Universal or format.codec is not None:
        return format
    return Universal(content=manifest.load(path).content)


def _replays(source: Checkpoint) -> bool:
    """Are chunks replayed several times if one tensor is read after the other?"""
    replays = (stored_delta_of(parameter) for parameter in source.parameters.values())
    return any(replay is not None and replay.chunking.count > 1 for replay in replays)
