"""`ckpt diff --into`: one more state at the end of a chain."""

from dataclasses import dataclass
from pathlib import Path

from ckpt.chains.write import AppendResult, DeltaPolicy, write_base, write_delta
from ckpt.pipeline import Resources, check_complete, check_not_suspicious
from ckpt_cli import notes
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.notices import Weight
from ckpt_formats.core.text import printable
from ckpt_formats.universal.chain import folder
from ckpt_formats.universal.chain.file import ChainIndex, Kind
from ckpt_formats.universal.chain.members import open_member


@dataclass(frozen=True)
class BasePolicy:
    """Which states stand alone."""

    every: int | None = None
    """So many members from one to the next; None: only the first."""
    coded: bool = False
    """By the codec of the deltas too, which may lose what it may lose."""

    def due(self, chain: ChainIndex | None) -> bool:
        """Is the next member to stand alone?"""
        if chain is None or not chain.members:
            return True
        since = next(i for i, member in enumerate(reversed(chain.members), 1) if member.kind == "base")
        return self.every is not None and since >= self.every


def append(
    run: Path, source: Checkpoint, step: int | None, manner: DeltaPolicy, anchors: BasePolicy, effort: Resources
) -> AppendResult:
    """Write a state into a chain, which then has it or is as it was. The first one begins the chain."""
    check_complete(source)
    check_not_suspicious(source)
    with folder.locked(run, create=True, locks=effort.locks) as chain:
        step = _step(source, step, chain, run)
        name = folder_name(step)
        remove_leftovers(run, chain, name)
        if chain is None or anchors.due(chain):
            written = write_base(source, run / name, step, anchors.coded, manner, effort)
        else:
            last = chain.members[-1]
            earlier = open_member(run, chain, last)
            written = write_delta(source, run / name, step, earlier, run / last.folder, manner, effort)
            if written.member.kind == "base":
                notes.note(f"nothing is less as a delta on step {last.step}: the state stands alone")
        before = chain or ChainIndex(())
        longer = ChainIndex((*before.members, written.member), before.segments)
        open_member(run, longer, written.member)  # what cannot be opened is not named
        folder.replace(run, longer)
    return written


def plan_append(
    run: Path, source: Checkpoint, step: int | None, anchors: BasePolicy
) -> tuple[int, Kind, Checkpoint | None]:
    """The step that would be appended, how, and against which state. Raises what `append` would, before it writes."""
    check_complete(source)
    check_not_suspicious(source)
    chain = folder.peek(run)
    step = _step(source, step, chain, run)
    if chain is None or anchors.due(chain):
        return step, "base", None
    return step, "delta", open_member(run, chain, chain.members[-1])


def remove_leftovers(run: Path, chain: ChainIndex | None, going_on: str | None = None) -> None:
    """Remove what interrupted runs left behind, and say so."""
    found = folder.leftovers(run, chain, going_on)
    folder.remove(found)
    for path in found:
        notes.note(f"removed {printable(path.name)}, which an interrupted run left behind")


def folder_name(step: int) -> str:
    return f"step-{step:010d}"


def _step(source: Checkpoint, told: int | None, chain: ChainIndex | None, run: Path) -> int:
    step = source.origin.step if told is None else told
    if step is None:
        raise Unsupported("the checkpoint does not say its step", where=source.path, hint="Say it: --step N.")
    if source.origin.step not in (None, step):
        notes.note(
            f"the checkpoint says that its step is {source.origin.step}; in the chain it is {step}",
            weight=Weight.UNSURE,
        )
    last = chain.members[-1].step if chain is not None and chain.members else None
    if last is not None and step <= last:
        what = f"step {step} is there already" if step == last else f"step {step} comes before {last}, the chain's last"
        raise Unsupported(
            what, where=run, hint="A chain grows by later steps only. If the run began anew, begin another chain."
        )
    return step
