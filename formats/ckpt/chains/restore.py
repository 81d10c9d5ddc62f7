"""`ckpt restore`: the whole state of a step, in any format."""

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ckpt import pipeline
from ckpt.pipeline import Resources, Result
from ckpt.staging import check_target, staging_folder
from ckpt_cli import notes, work
from ckpt_cli.views import report
from ckpt_cli.views.report import size
from ckpt_formats.core.checkpoint import Checkpoint, Goal, ReadOptions, WritableFormat
from ckpt_formats.core.errors import CkptError, NoSpace, NotFound, OutputError
from ckpt_formats.registry import open_checkpoint
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chain import address, members, states
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.chain.file import ChainIndex, Member
from ckpt_formats.universal.write_replayed import stored_delta_of


@dataclass(frozen=True)
class ChainState:
    """What is to be restored; `member` and `chain` only where it is of one."""

    checkpoint: Checkpoint
    run: Path
    chain: ChainIndex | None = None
    member: Member | None = None


def open_step(path: Path, step: int | None, options: ReadOptions) -> ChainState:
    """The state of a step of a chain; or any checkpoint, where there is but one step to take."""
    named = address.parse(path)
    if named is not None:
        if step not in (None, named.step):
            raise NotFound(f"the path names another step than --step {step}", where=path, hint="Name one of them.")
        path, step = named.run, states.step_of(index.load(named.run / index.NAME), named)
    if not (path / index.NAME).is_file():
        with work.reading_headers(path):
            checkpoint = open_checkpoint(path, options)
        if step is not None and checkpoint.origin.step != step:
            raise NotFound(f"not a chain, and its step is {checkpoint.origin.step}, not {step}", where=path)
        return ChainState(checkpoint, path)
    chain = index.load(path / index.NAME)
    if chain.segments:
        with work.reading_headers(path):
            step = states.last_step(path, chain) if step is None else step
            if all(member.step != step for member in chain.members):
                return ChainState(states.open_state(path, chain, step), path)
    member = members.member_at(path, chain, step)
    with work.reading_headers(path):
        return ChainState(members.open_member(path, chain, member), path, chain, member)


def write(
    state: ChainState, format: WritableFormat, goal: Goal, choices: object, effort: Resources
) -> tuple[Result, float]:
    """Write the state. An error names the last good step where there is one."""
    check_target(goal.target, state.run)
    try:
        return _write(state.checkpoint, format, goal, choices, effort)
    except CkptError as error:
        if state.chain is not None and state.member is not None:
            members.add_hint(state.run, state.chain, state.member, error)
        raise


def _write(
    source: Checkpoint, format: WritableFormat, goal: Goal, choices: object, effort: Resources
) -> tuple[Result, float]:
    """What other formats would read state after state is replayed once, into a folder that goes with the staged one."""
    if isinstance(format, Universal):
        return work.write(source, _again(source), goal, choices, effort, "restoring")
    if not any(_replays(source)):
        return work.write(source, format, goal, choices, effort, "restoring")
    parts = pipeline.plan(source, format, goal)  # refuses what cannot be done, before anything is done
    whole = _replayed(source, goal.target, pipeline.space_needed(parts), choices, effort)
    try:
        return work.write(whole, format, goal, choices, effort, "restoring")
    except CkptError as error:
        if not isinstance(error, OutputError):  # else there is something to go on with
            shutil.rmtree(staging_folder(goal.target), ignore_errors=True)
        raise


def _replayed(source: Checkpoint, target: Path, more: int, choices: object, effort: Resources) -> Checkpoint:
    """The state, whole, in the folder where the target is to grow, so that both go together. Goes on where it is begun.

    Raises `NoSpace` unless there is room for it, and for `more` bytes that the target takes.
    """
    stage = staging_folder(target)
    folder = stage / f"replayed-{_name_of(source)}"
    if not folder.is_dir():
        _check_room(target, stage, _whole_nbytes(source) + more)
        try:
            stage.mkdir(exist_ok=True)
            work.write(source, _again(source), Goal(folder), choices, effort, "replaying")
        except OSError as error:
            raise OutputError(f"cannot be written: {error.strerror or error}", where=stage) from error
        except CkptError:
            with suppress(OSError):
                stage.rmdir()  # unless there is something to go on with
            raise
    return Universal().read(folder, ReadOptions())


def _name_of(source: Checkpoint) -> str:
    """Tells a state from others of its run: by its content, or by the step of the log that it follows from."""
    named = source.path / manifest.NAME
    if named.is_file():
        return manifest.load(named).content.removeprefix("blake2b-256:")[:16]
    return f"step-{source.origin.step}"


def note_detour(source: Checkpoint, format: WritableFormat) -> None:
    """How much room is needed for a while, beside what the target takes."""
    if not isinstance(format, Universal) and any(_replays(source)):
        notes.note(f"the state is replayed beside the target first, into {size(_whole_nbytes(source))} more")


def _whole_nbytes(source: Checkpoint) -> int:
    return pipeline.space_needed(Universal().plan(source, Goal(source.path)))


def _check_room(target: Path, stage: Path, needed: int) -> None:
    """Of what an interrupted run has written, nothing is written again."""
    written = sum(path.stat().st_size for path in stage.rglob("*") if path.is_file())
    free = shutil.disk_usage(target.parent).free
    if needed > free + written:
        raise NoSpace(
            f"restoring takes {size(needed)}: the state is replayed beside the target first; {size(free)} are free",
            where=target,
            hint="Free some; or restore it as universal, which takes no more than the state.",
        )


def say_exactness(source: Checkpoint) -> None:
    """Whether every bit is as it was saved. (What is approximate is among the notices.)"""
    if not source.errors:
        report.say("exact: every bit is as it was saved")


def _again(source: Checkpoint) -> Universal:
    """The universal format, which is to come to the same content id where the source has one."""
    named = source.path / manifest.NAME
    return Universal.again(manifest.load(named).content) if named.is_file() else Universal()


def _replays(source: Checkpoint) -> list[bool]:
    found = (stored_delta_of(parameter) for parameter in source.parameters.values())
    return [True for replay in found if replay is not None and replay.count > 1]
