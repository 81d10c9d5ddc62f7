"""Compact a chain: remove members, and replace deltas by bases. A state that stays does not change."""

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from ckpt.chains.append import last_base
from ckpt.chains.carried import CarriedState, carry
from ckpt.chains.change import ChainChange, change, check_appendable
from ckpt.chains.compact_family import plan_family, write_family
from ckpt.chains.kept import CompactPlan, KeptMember, unused_folder
from ckpt.chains.write import DeltaPolicy, write_base, write_delta
from ckpt.job import AnyProgress, load_kernels
from ckpt.pipeline import Execution
from ckpt_formats.core.arguments import Admits, Checked, Count
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, InvalidArgumentError, UnsupportedError
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.universal import manifest
from ckpt_formats.universal.boxes.whole import WholeParameters
from ckpt_formats.universal.chain import folder
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps, Member
from ckpt_formats.universal.chain.members import OpenedMembers, add_hint, open_member, open_members, open_one
from ckpt_formats.universal.chain.states import last_step, open_state, open_steps
from ckpt_formats.universal.unchanged import EarlierMember

KeepPolicy = Annotated[
    str,
    Admits(
        "last:N, every:N, all, or steps with commas",
        re.compile(r"all|(last|every):[1-9][0-9]{0,17}|[0-9]{1,18}(,[0-9]{1,18})*").fullmatch,
    ),
]
"""Which states stay, as a text."""


@dataclass(frozen=True)
class Retention(Checked):
    """Which states and segments stay in a chain."""

    keep: tuple[KeepPolicy, ...] = ("all",)
    """Policies of states: `all`, `last:N`, `every:N`, or steps with commas."""
    gradients: Count | None = None
    """How many segments of the log, the last ones; None: all."""
    upto: Count | None = None
    """The last step that stays; None: all stay."""
    remove: tuple[str, ...] = ()
    """Of a family: the names of models that do not stay. The other fields are about the steps of a run."""


@dataclass(frozen=True)
class CompactResult:
    """The chain before and after."""

    before: ChainIndex
    after: ChainIndex
    notes: tuple[Notice, ...] = ()
    packs_nbytes: tuple[int, int] = (0, 0)
    """Before and after, the bytes of packs of removed members that stay, because states of others lie in them."""

    __repr__ = short_repr

    @property
    def freed(self) -> int:
        """Freed bytes, without those of the log; negative if bases take more than the deltas that they replace."""
        before, after = (sum(member.stored_nbytes for member in chain.members) for chain in (self.before, self.after))
        return before + self.packs_nbytes[0] - after - self.packs_nbytes[1]


def plan(run: Path, chain: ChainIndex, retention: Retention, policy: DeltaPolicy) -> CompactPlan:
    """Which states and segments stay, and how. The last state always does.

    Raises `NotFoundError` for a step that is not there, `UnsupportedError` for a published chain, and `LockedError` if
    steps would go that a run is recording.
    """
    check_appendable(run, chain)
    if chain.is_family:
        _check_about_models(run, retention, policy)
        return CompactPlan(plan_family(run, chain, retention.remove), ())
    if retention.remove:
        raise UnsupportedError(
            "the chain has states of one run, and no models with names",
            where=run,
            hint="State with `keep` (--keep) which steps stay.",
        )
    recorded, chain = chain.segments, _cut(run, chain, retention.upto)
    segments = chain.segments if retention.gradients is None else _last(chain.segments, retention.gradients)
    folder.check_not_growing(
        (run / one.folder for one in recorded if one not in segments),
        "all its further steps would be lost",
        "remove only other states: `keep` (--keep)",
    )
    last = last_step(run, chain)
    steps = set().union(*(_steps(run, chain, one) for one in retention.keep))
    if not any(_reaches(run, one, last) for one in segments):
        steps.add(last)
    if chain.members:
        steps.add(chain.members[-1].step)
    steps |= {one.first for one in segments if one.parent is not None}  # they are replayed from these
    members = {member.step: member for member in chain.members}
    stays: list[KeptMember] = []
    since = 0
    for step in sorted(steps):
        member = members.get(step)
        if member is None:
            how = "from log"
        elif member.kind == "base":
            how = "as it is"
        elif not stays or (policy.base_every is not None and since >= policy.base_every):
            how = "base"
        else:
            above = stays[-1]
            same = above.member is not None and above.member.content == member.parent
            if same and above.how != "as it is":  # of boxes, whole tensors are written, which have another content id
                same = not _has_boxes(run, above.member)
            how = "as it is" if same else "delta"
        if how in ("base", "delta") and any(one.first == step and one.parent is not None for one in segments):
            _check_parent(run, member)
        since = since + 1 if how == "delta" or (how == "as it is" and member and member.kind == "delta") else 1
        stays.append(KeptMember(step, member, how))
    return CompactPlan(tuple(stays), segments)


def compact(
    run: Path, retention: Retention, policy: DeltaPolicy, resources: Execution, progress: AnyProgress | None = None
) -> CompactResult:
    """Write members again that lose their parent, replace the list, then remove folders that it no longer names."""
    with change(run, resources, families=True) as place:
        chain = place.chain
        assert chain is not None  # `changed` raises if there is none
        notes = place.remove_leftovers()
        planned = plan(place.look(), chain, retention, policy)
        write = write_family if chain.is_family else _written
        members = write(place, chain, planned, policy, progress)
        after, packs_before = chain.with_members(tuple(members), planned.segments), folder.kept_nbytes(place.run, chain)
        if after != chain:
            place.replace(after)
            notes += place.remove_unneeded(place.leftovers(after))
            _drop_later_records(place, after)
        packs_after = folder.kept_nbytes(place.look(), after)
    return CompactResult(chain, after, notes, (packs_before, packs_after))


def _check_about_models(run: Path, retention: Retention, policy: DeltaPolicy) -> None:
    """Raise `UnsupportedError` for options that are about the steps of a run."""
    about_steps = retention.keep != ("all",) or (retention.gradients, retention.upto, policy.base_every) != (None,) * 3
    if about_steps:
        raise UnsupportedError(
            "the chain is a family of models, which has no steps",
            where=run,
            hint="Name the models that go with `remove` (--remove NAME).",
        )


def _drop_later_records(place: ChainChange, chain: ChainIndex) -> None:
    """Truncate files after the end of a segment. The list states already that these records do not count."""
    for one in chain.segments:
        for path, nbytes in later_records(place.run, one):
            place.truncate(path, nbytes)


def later_records(run: Path, logged: LoggedSteps) -> Iterator[tuple[Path, int]]:
    """The files of a segment with records after its end, each with the bytes that count: `compact` truncates them.

    None if records before its end are damaged: parity may repair them, and what follows them counts then.
    """
    if logged.step is not None and (segment := open_steps(run, logged)).damage is None:
        for rank, log in enumerate(segment.logs):
            nbytes = segment.nbytes_upto(rank, logged.step)
            if nbytes < log.path.stat().st_size:
                yield log.path, nbytes


def _cut(run: Path, chain: ChainIndex, upto: int | None) -> ChainIndex:
    """The chain without the members and logged steps after a step. Raises `NotFoundError` if it has no such step."""
    if upto is None:
        return chain
    open_state(run, chain, upto)
    members = tuple(member for member in chain.members if member.step <= upto)
    stored = any(member.step == upto for member in members)
    segments: list[LoggedSteps] = []
    for one in chain.segments:
        reached = stored or any(_reaches(run, before, upto) for before in segments)
        if one.first < upto or (one.first == upto and not reached):
            end = open_steps(run, one).last
            segments.append(replace(one, step=min(end, upto)) if end >= upto or one.step is None else one)
    return ChainIndex(members, tuple(segments))


def _reaches(run: Path, logged: LoggedSteps, step: int) -> bool:
    """Does a segment have this step, logged or as the state that it starts from?"""
    return logged.first <= step <= (open_steps(run, logged).last if logged.step is None else logged.step)


def _last(segments: tuple[LoggedSteps, ...], count: int) -> tuple[LoggedSteps, ...]:
    return segments[len(segments) - count :] if count < len(segments) else segments


def _written(
    place: ChainChange, chain: ChainIndex, planned: CompactPlan, policy: DeltaPolicy, progress: AnyProgress | None
) -> list[Member]:
    """The members that the chain has afterwards, of which those are written that are not there.

    They are written in the order of their steps. If several are, each is replayed from the one before.
    """
    states, members = planned.states, list[Member]()
    # Those that are written again, and those that they are stored against.
    needed = {
        one.step
        for state, before in zip(states, (None, *states), strict=False)
        if state.member is not None and state.how in ("base", "delta")
        for one in (state, before if state.how == "delta" else None)
        if one is not None and one.member is not None
    }
    run, values = place.run, place.temporary
    opened = open_members(run, chain) if needed else None
    is_carried = len(needed) > 1 and _has_room(values, states)
    last: CarriedState | None = None
    if is_carried:
        load_kernels()
    earlier: Checkpoint | None = None
    try:
        for number, state in enumerate(states):
            source, before = None, last
            if opened is not None and state.member is not None and state.step in needed:
                source = _open(run, chain, opened, state.member)
                if is_carried:
                    path = values / folder.REPLAYED.format(number)
                    last = carry(source, before, path, place.resources)
                    source = last.checkpoint
            if state.how == "as it is" and state.member is not None:
                members.append(state.member)
            else:
                members.append(_rewritten(place, chain, state, source, earlier, members, policy, progress))
            if before is not None and before is not last:
                before.path.unlink()
            earlier = source
    finally:
        for number in range(len(states)):
            (values / folder.REPLAYED.format(number)).unlink(missing_ok=True)
    return members


def _has_room(values: Path, states: Sequence[KeptMember]) -> bool:
    """Is there space for the values of two states besides what is written? Else each state is replayed from its base.

    Then no file of theirs is needed, and deltas are decoded once for each state that stands on them.
    """
    most = max(state.member.raw_nbytes for state in states if state.member is not None)
    return shutil.disk_usage(values).free > (2 + len(states)) * most


def _open(run: Path, chain: ChainIndex, opened: OpenedMembers, member: Member) -> Checkpoint:
    try:
        return opened.open(member)
    except CkptError as error:
        add_hint(run, chain, member, error)
        raise


def _rewritten(
    place: ChainChange,
    chain: ChainIndex,
    state: KeptMember,
    source: Checkpoint | None,
    earlier: Checkpoint | None,
    before: list[Member],
    policy: DeltaPolicy,
    progress: AnyProgress | None,
) -> Member:
    """Write the same state, bit for bit, to a new folder: as a base, or as a delta against the last one that stays.

    `source`: the state, None for one of the log. `earlier`: the last one that stays, None for one of the log.
    """
    run, resources, member = place.look(), place.resources, state.member
    target = unused_folder(run, state.step, member)
    unchanged = _unchanged(run, state, before)
    if member is None or source is None:
        source = open_state(run, chain, state.step)
        return write_base(source, target, state.step, policy, resources, progress, unchanged=unchanged).member
    content = None if isinstance(source.parameters, WholeParameters) else member.content
    if state.how == "base":
        written = write_base(source, target, member.step, policy, resources, progress, content, unchanged)
    else:
        last = before[-1]
        earlier = open_member(run, chain, last) if earlier is None else earlier
        parent = run / last.folder
        written = write_delta(
            source,
            target,
            member.step,
            earlier,
            parent,
            policy,
            resources,
            progress,
            content,
            unchanged=unchanged,
        )
    return replace(written.member, time=member.time, errors=member.errors)


def _unchanged(run: Path, state: KeptMember, before: list[Member]) -> EarlierMember | None:
    """The member with which a state that is written again may share packs: itself, if it shares those of others.

    So these stay where they are, once for all members. Else it is the last base that stays.
    """
    if state.member is not None and state.member.shared:
        return EarlierMember(open_one(run, state.member), only_shared=True)
    if state.how == "delta" and before[-1].kind == "delta" and not before[-1].shared:
        return None
    return last_base(run, before)[0]


def _has_boxes(run: Path, member: Member | None) -> bool:
    return member is not None and manifest.load(run / member.folder / manifest.NAME).boxes is not None


def _check_parent(run: Path, member: Member | None) -> None:
    """Raise `UnsupportedError` for a member that would get another content id, and that a log of gradients names."""
    if _has_boxes(run, member):
        raise UnsupportedError(
            f"step {member.step if member else 0} has boxes, and a log of gradients continues it",
            where=run,
            hint="Keep the steps before it, up to its base.",
        )


def _steps(run: Path, chain: ChainIndex, keep: str) -> set[int]:
    steps = [member.step for member in chain.members]
    if keep == "all":
        return set(steps)
    if match := re.fullmatch(r"(last|every):([1-9]\d{0,17})", keep):
        number = int(match[2])
        return set(steps[-number:]) if match[1] == "last" else {step for step in steps if step % number == 0}
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})*", keep):
        raise InvalidArgumentError(
            f"{keep!r:.60} does not state which states to keep",
            hint="Retention.keep and --keep take last:N, every:N, all, or steps with commas.",
        )
    wanted = {int(step) for step in keep.split(",")}
    for step in wanted.difference(steps):
        open_state(run, chain, step)  # raises `NotFoundError`, which lists the steps
    return wanted
