"""`ckpt restore`: the whole state of a step, in any format."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from ckpt_cli import pipeline, report, work
from ckpt_cli.pipeline import Effort, Outcome
from ckpt_cli.staging import check_target
from ckpt_formats.base import Checkpoint, Goal, Options, WritableFormat
from ckpt_formats.chain import index, members
from ckpt_formats.chain.index import Chain, Member
from ckpt_formats.errors import CkptError, NotFound
from ckpt_formats.naming import PARTIAL
from ckpt_formats.registry import open_checkpoint
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.joint import replay_of


@dataclass(frozen=True)
class State:
    """What is to be restored; `member` and `chain` only where it is of one."""

    checkpoint: Checkpoint
    run: Path
    chain: Chain | None = None
    member: Member | None = None


def open_step(path: Path, step: int | None, options: Options) -> State:
    """The state of a step of a chain; or any checkpoint, where there is but one step to take."""
    if not (path / index.NAME).is_file():
        checkpoint = open_checkpoint(path, options)
        if step is not None and checkpoint.origin.step != step:
            raise NotFound(f"not a chain, and its step is {checkpoint.origin.step}, not {step}", where=path)
        return State(checkpoint, path)
    chain = index.load(path / index.NAME)
    member = members.member_at(path, chain, step)
    return State(members.open_member(path, chain, member), path, chain, member)


def write(state: State, format: WritableFormat, goal: Goal, choices: str, effort: Effort) -> tuple[Outcome, float]:
    """Write the state. An error names the last good step where there is one."""
    check_target(goal.target, state.run)
    try:
        return _write(state.checkpoint, format, goal, choices, effort)
    except CkptError as error:
        if state.chain is not None and state.member is not None:
            members.advise(state.run, state.chain, state.member, error)
        raise


def _write(
    source: Checkpoint, format: WritableFormat, goal: Goal, choices: str, effort: Effort
) -> tuple[Outcome, float]:
    """What other formats would read state after state is replayed once, into a folder beside the target."""
    if isinstance(format, Universal):
        return work.write(source, _again(source), goal, choices, effort, "restoring")
    if not any(_replays(source)):
        return work.write(source, format, goal, choices, effort, "restoring")
    pipeline.plan(source, format, goal)  # refuses what cannot be done, before anything is done
    beside = goal.target.parent / f".{goal.target.name}.replayed{PARTIAL}"
    content = manifest.load(source.path / manifest.NAME).content
    if not _is(beside, content):
        shutil.rmtree(beside, ignore_errors=True)
        work.write(source, _again(source), Goal(beside), choices, effort, "replaying")
    try:
        whole = Universal().read(beside, Options())
        outcome = work.write(whole, format, goal, choices, effort, "restoring")
    except CkptError:
        shutil.rmtree(beside, ignore_errors=True)
        raise
    shutil.rmtree(beside, ignore_errors=True)
    return outcome


def say_exactness(source: Checkpoint) -> None:
    """Whether every bit is as it was saved. (What is approximate is among the notices.)"""
    if not source.losses:
        report.say("exact: every bit is as it was saved")


def _again(source: Checkpoint) -> Universal:
    """The universal format, which is to come to the same content id where the source has one."""
    named = source.path / manifest.NAME
    return Universal.again(manifest.load(named).content) if named.is_file() else Universal()


def _replays(source: Checkpoint) -> list[bool]:
    found = (replay_of(parameter) for parameter in source.parameters.values())
    return [True for replay in found if replay is not None and replay.count > 1]


def _is(folder: Path, content: str) -> bool:
    try:
        return manifest.load(folder / manifest.NAME).content == content
    except CkptError:
        return False
