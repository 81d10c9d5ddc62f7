"""All states of a chain by step: the stored ones, and those that the log of gradients gives."""

from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, CorruptError, NotFoundError
from ckpt_formats.core.format import identified
from ckpt_formats.core.text import counted, list_names, printable
from ckpt_formats.universal.chain import members
from ckpt_formats.universal.chain.address import Address
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps, Member
from ckpt_formats.universal.gradients.segment import Segment, open_segment
from ckpt_formats.universal.gradients.state import Base, checkpoint_at
from ckpt_formats.universal.published.records import Head
from ckpt_formats.universal.published.steps import find_step, published_steps, read_head


def last_step(run: Path, chain: ChainIndex) -> int:
    """The last step that can be restored, also while the run continues.

    Raises as `open_segment`, and `CorruptError` if there was a later one, whose records are damaged.
    """
    if chain.is_published:
        return _head(run).record.name.step
    steps = [member.step for member in chain.members[-1:]]
    if chain.segments:
        segment = open_steps(run, chain.segments[-1])
        steps.append(segment.last)
        if segment.last_recorded > max(steps) and (damage := segment.damage):
            raise damage
    return max(steps)


def step_ranges(run: Path, chain: ChainIndex) -> list[range]:
    """All steps that can be restored: of members, and of segments of the log. In order; ranges may overlap."""
    if chain.is_published:
        head = read_head(run)
        return [range(step, step + 1) for step in (sorted(published_steps(run, head)) if head is not None else ())]
    ranges = [range(member.step, member.step + 1) for member in chain.members]
    ranges += [range(logged.first, open_steps(run, logged).last + 1) for logged in chain.segments]
    return sorted(ranges, key=lambda steps: (steps.start, steps.stop))


def all_steps(run: Path, chain: ChainIndex) -> list[int]:
    """All steps that can be restored, in order, each once."""
    return sorted({step for steps in step_ranges(run, chain) for step in steps})


def step_of(chain: ChainIndex, address: Address) -> int:
    """The step of an address. Raises as `last_step`, and `NotFoundError` before the first step of all.

    In a family of models, the number of the model of this name; raises `NotFoundError` if it has none.
    """
    if chain.is_family:
        return _named(chain, address).step
    if address.name is not None:
        raise NotFoundError(
            f"the chain has steps, and no model called {address.name}",
            where=address.run,
            hint=f"Name a step, or @last. It has {steps_text(address.run, chain)}; `ckpt log` lists all.",
        )
    if address.step is not None:
        return address.step
    last = last_step(address.run, chain)
    if address.back > last:
        raise NotFoundError(
            f"the chain has no step {address.back} before its last, which is {last}",
            where=address.run,
            hint=f"It has {steps_text(address.run, chain)}; `ckpt log` lists all.",
        )
    return last - address.back


def _named(chain: ChainIndex, address: Address) -> Member:
    """The model of a family that an address names, also by its number. Raises `NotFoundError`."""
    for member in chain.members:
        if member.name == address.name if address.name is not None else member.step == address.step:
            return member
    names = [member.name or "" for member in chain.members]
    if address.name is None and address.step is None:
        raise NotFoundError(
            f"a family of {counted(len(names), 'model')}, and the path names none of them",
            where=address.run,
            hint=f"Name one: {printable(address.run.name)}@{names[0]}. It has {list_names(names)}.",
        )
    raise NotFoundError(
        f"no model {address.name or address.step} in this family of {len(names)}",
        where=address.run,
        hint=f"It has {list_names(names)}; `ckpt log` lists all.",
    )


def open_steps(run: Path, logged: LoggedSteps, check_from: int | None = None) -> Segment:
    """Open a segment of the log. `check_from`: as in `open_segment`.

    Raises `CorruptError` if another is in its place, and as `open_segment`.
    """
    segment = open_segment(run / logged.folder, check_from, logged.step)
    known = (segment.layout.run, segment.first, segment.layout.parent)
    if known != (logged.run, logged.first, logged.parent):
        raise CorruptError("another log is in the place of this one", where=segment.folder)
    return segment


def open_state(run: Path, chain: ChainIndex, step: int) -> Checkpoint:
    """The state at a step. Raises `NotFoundError`, and its hint names the steps of the chain."""
    if chain.is_published:
        from ckpt_formats.universal.published.state import open_step  # most chains are not

        head = _head(run)
        name = find_step(run, head, step)
        if name is None:
            raise _no_step(run, chain, step)
        return identified(lambda: open_step(run, head, name))
    stored = next((member for member in chain.members if member.step == step), None)
    if stored is not None:
        return members.open_member(run, chain, stored)
    logged = _segment_of(chain, step)
    if logged is None:
        raise _no_step(run, chain, step)
    segment = open_steps(run, logged)
    if step > segment.last and segment.torn:
        raise segment.lacks(step, step)
    if step > segment.last:
        raise _no_step(run, chain, step)
    member = nearest_base(chain, logged, step)
    base = None if member is None else Base(member.step, members.open_member(run, chain, member))
    return identified(lambda: checkpoint_at(segment, step, base))


def _head(run: Path) -> Head:
    head = read_head(run)
    if head is None:
        raise NotFoundError("no step is published yet", where=run)
    return head


def _segment_of(chain: ChainIndex, step: int) -> LoggedSteps | None:
    """The segment that has a step. One that recorded the step comes before one that only begins with it."""
    did = (one for one in chain.segments if one.step is not None and one.first < step <= one.step)
    begins = (one for one in reversed(chain.segments) if one.first <= step)
    return next(did, None) or next(begins, None)


def nearest_base(chain: ChainIndex, logged: LoggedSteps, step: int) -> Member | None:
    """The last stored state of a segment's run up to a step; None: the state in the segment itself is nearer."""
    stored = [one for one in chain.members if logged.first <= one.step <= step]
    exact = [one for one in stored if one.exact or one.content == logged.parent]
    return exact[-1] if exact else None


def steps_text(run: Path, chain: ChainIndex) -> str:
    """The steps that a chain has, for people."""
    numbers = [member.step for member in chain.members]
    if chain.is_published:
        numbers = [steps.start for steps in step_ranges(run, chain)]
    parts = list(map(str, numbers))
    shown = [", ".join(parts if len(parts) <= 5 else [*parts[:2], "…", *parts[-2:]])] if parts else []
    for logged in chain.segments:
        try:
            last = open_steps(run, logged).last if logged.step is None else logged.step
        except CkptError:
            continue
        shown.append(f"{logged.first} to {last} by the log of gradients")
    return "; ".join(shown)


def _no_step(run: Path, chain: ChainIndex, step: int) -> NotFoundError:
    return NotFoundError(
        f"no step {step} in this chain", where=run, hint=f"It has {steps_text(run, chain)}; `ckpt log` lists all."
    )
