"""Restore the full state of a step, in any format."""

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from ckpt.chains import tip
from ckpt.job import AnyProgress, Job
from ckpt.job.replay_first import with_content
from ckpt.pipeline import Execution, Result
from ckpt.pipeline.targets import check_target
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, NotFoundError, UnsupportedError
from ckpt_formats.core.format import Plan, ReadOptions, WritableFormat
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.text import format_nbytes
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from ckpt_formats.universal.chain import address, chain_file, members, states
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member
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
        path, step = named.run, states.step_of(chain_file.load(named.run / chain_file.NAME), named)
    if not (path / chain_file.NAME).is_file():
        checkpoint = open_checkpoint(path, options)
        if step is not None and checkpoint.origin.step != step:
            raise NotFoundError(f"not a chain, and its step is {checkpoint.origin.step}, not {step}", where=path)
        return ChainState(checkpoint, path)
    chain = chain_file.load(path / chain_file.NAME)
    if chain.is_family and step is None:
        step = states.step_of(chain, address.Address(path, None))  # raises: the path names none of the models
    if chain.segments or chain.is_published:
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


def plan(
    state: ChainState, target: Path, format: WritableFormat, resources: Execution, overwrite: bool = False
) -> Plan:
    """The files that `restore` writes, with notes about the deltas to replay and the temporary space that it needs."""
    job, work = Job(state.checkpoint, target, format, overwrite), replay_work(state.checkpoint)
    planned, replay = job.plan(), () if job.replay_notice is None else (job.replay_notice,)
    deltas = (_replay_note(work, resources),) if work.deltas else ()
    return replace(planned, notes=(*planned.notes, *replay, *deltas))


def _replay_note(work: ReplayWork, resources: Execution) -> Notice:
    seconds, workers = work.seconds(resources.workers), resources.workers
    return Notice(
        f"{work.deltas} delta{'s' * (work.deltas != 1)} to replay: {format_nbytes(work.nbytes)} of values from "
        f"{format_nbytes(work.stored_nbytes)}, about {max(0.1, seconds):.1f} s with {workers} "
        f"worker{'s' * (workers != 1)} at {format_nbytes(REPLAY_RATE)}/s each"
    )


def _job(source: Checkpoint, target: Path, format: WritableFormat, overwrite: bool) -> Job:
    """The job that writes a state of a chain: in the universal format, with the content id that the chain states."""
    return Job(source, target, with_content(source, format) if isinstance(format, Universal) else format, overwrite)


def restore(
    state: ChainState,
    target: Path,
    format: WritableFormat,
    resources: Execution,
    progress: AnyProgress | None = None,
    overwrite: bool = False,
) -> Result:
    """Write the state. The hint of an error names the last earlier step that can be restored, if there is one."""
    if not overwrite:
        check_target(target, state.run)
    job = _job(state.checkpoint, target, format, overwrite)
    if resources.shard is not None and job.replay_notice is not None:
        raise UnsupportedError(
            f"the state is replayed before it is written as {format.name}, which shards cannot share",
            hint="Restore it to the universal format with --shard (--to universal), then convert that.",
        )
    try:
        return job.run(resources=resources, progress=progress)
    except CkptError as error:
        if state.chain is not None and state.member is not None:
            members.add_hint(state.run, state.chain, state.member, error)
            tip.add_hint(state.run, state.chain, error)
        raise
