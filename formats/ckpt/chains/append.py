"""Append one more state to a chain."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ckpt.chains.change import change
from ckpt.chains.state_before import appended_from, states_before
from ckpt.chains.tip import open_state, write_tip
from ckpt.chains.write import AppendResult, DeltaPolicy, write_base, write_delta
from ckpt.job import AnyProgress
from ckpt.pipeline import Execution, check_complete, check_not_suspicious
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.universal.chain import folder
from ckpt_formats.universal.chain.chain_file import ChainIndex, Kind, Member
from ckpt_formats.universal.chain.members import open_member, open_one
from ckpt_formats.universal.unchanged import EarlierMember


def append(
    run: Path,
    source: Checkpoint,
    step: int | None,
    policy: DeltaPolicy,
    resources: Execution,
    progress: AnyProgress | None = None,
    parent: Checkpoint | None = None,
) -> AppendResult:
    """Append a state to a chain. The first state creates the chain. If this fails, the chain is unchanged.

    A delta is stored against the last state, which is read from `parent`: a checkpoint that has the same values, such
    as the one that was appended last. Raises `StateDiffers` at the first chunk with other values. Without `parent`,
    it is read from where the last state was appended from, as long as that is there, and else replayed.
    """
    check_complete(source)
    check_not_suspicious(source)
    with change(run, resources, create=True) as place:
        run, chain, resources = place.run, place.chain, place.resources
        step, notes = _step(source, step, chain, run)
        name = folder_name(step)
        notes += place.remove_leftovers(name)
        run = place.run
        if chain is None or policy.needs_base(chain, _raw_nbytes(source)):
            unchanged, unopened = last_base(run, () if chain is None else chain.members)
            written = write_base(source, run / name, step, policy, resources, progress, unchanged=unchanged)
            earlier, notes = None, (*notes, *unopened)
        else:
            last = chain.members[-1]
            if policy.partial is not None:
                from ckpt.partial.changes import apply_changes  # few deltas are partial
                from ckpt.partial.recovery import is_mixed

                source = apply_changes(open_state(run, chain, last), source, policy.partial)
                notes += source.notices[-1:] if is_mixed(source) else ()
            written, earlier = _write_delta(source, run / name, step, run, chain, policy, resources, progress, parent)
            if written.member.kind == "base":
                notes += (
                    Notice(f"a delta against step {last.step} would not be smaller: the state is stored as a base"),
                )
        before = chain or ChainIndex(())
        member, tip = written.member, None
        if member.kind == "delta" and earlier is not None and (policy.tip or not member.exact):
            tip = write_tip(run, member, source, earlier, resources)
        source_path = appended_from(run, source, member)
        place.replace(ChainIndex((*before.members, member), before.segments, source_path, tip))
        if before.tip is not None:
            notes += place.remove_unneeded([run / before.tip.folder])
    return replace(written, notes=(*notes, *written.notes))


def _write_delta(
    source: Checkpoint,
    target: Path,
    step: int,
    run: Path,
    chain: ChainIndex,
    policy: DeltaPolicy,
    resources: Execution,
    progress: AnyProgress | None,
    parent: Checkpoint | None,
) -> tuple[AppendResult, Checkpoint]:
    """Write a delta against the last state, read in the cheapest way that works. Returns also that state.

    Parameters that did not change since the base share its packs, as long as any did not: after a delta that shares
    nothing, none looks there again, so that an append to a long chain opens no more members.
    """
    last, notes = chain.members[-1], tuple[Notice, ...]()
    unchanged, unopened = last_base(run, chain.members) if last.kind == "base" or last.shared else (None, ())
    notes += unopened
    for before in states_before(run, chain, source, parent):
        earlier, against = before.checkpoint, run / last.folder
        try:
            written = write_delta(
                source,
                target,
                step,
                earlier,
                against,
                policy,
                resources,
                progress,
                parent_content=last.content,
                unchanged=unchanged,
            )
        except CkptError as error:
            if not before.allows_other(error):
                raise
            notes += (Notice(f"the last state is read in another way: {error}"),)
            continue
        return replace(written, notes=(*notes, *before.notes, *written.notes)), earlier
    raise AssertionError("the last way is a replay, after which there is no other")


def last_base(run: Path, members: Sequence[Member]) -> tuple[EarlierMember | None, tuple[Notice, ...]]:
    """The last base of some members of a chain, as the one that a later member may share packs with.

    None if there is none, or, with a note, if it cannot be opened: then the later member shares nothing.
    """
    base = next((member for member in reversed(members) if member.kind == "base"), None)
    if base is None:
        return None, ()
    try:
        return EarlierMember(open_one(run, base)), ()
    except CkptError as error:
        return None, (Notice(f"no states are shared with step {base.step}, which cannot be opened: {error}"),)


def plan_append(
    run: Path, source: Checkpoint, step: int | None, policy: DeltaPolicy, parent: Checkpoint | None = None
) -> tuple[int, Kind, Checkpoint | None, tuple[Notice, ...]]:
    """The step that would be appended, its kind, the state that it is stored against, and notes.

    Raises the errors that `append` raises before it writes.
    """
    check_complete(source)
    check_not_suspicious(source)
    chain = folder.peek(run)
    step, notes = _step(source, step, chain, run)
    if chain is None or policy.needs_base(chain, _raw_nbytes(source)):
        return step, "base", None, notes
    if parent is not None:
        before = next(states_before(run, chain, source, parent))
        return step, "delta", before.checkpoint, (*notes, *before.notes)
    return step, "delta", open_member(run, chain, chain.members[-1]), notes


def folder_name(step: int) -> str:
    """The name of a member's folder."""
    return f"step-{step:010d}"


def _raw_nbytes(source: Checkpoint) -> int:
    return sum(parameter.nbytes for parameter in source.parameters.values())


def _step(
    source: Checkpoint, chosen: int | None, chain: ChainIndex | None, run: Path
) -> tuple[int, tuple[Notice, ...]]:
    step = source.origin.step if chosen is None else chosen
    if step is None:
        raise UnsupportedError(
            "the checkpoint does not state its step", where=source.path, hint="State it with `step` (--step N)."
        )
    notes: tuple[Notice, ...] = ()
    if source.origin.step not in (None, step):
        text = f"the checkpoint states that its step is {source.origin.step}; in the chain it is {step}"
        notes = (Notice(text, weight=Weight.UNSURE),)
    last = chain.members[-1].step if chain is not None and chain.members else None
    if last is not None and step <= last:
        message = (
            f"step {step} exists already" if step == last else f"step {step} is before {last}, the chain's last step"
        )
        raise UnsupportedError(
            message, where=run, hint="Only later steps can be appended. If the run started again, start another chain."
        )
    return step, notes
