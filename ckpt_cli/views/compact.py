"""Show the plan and the result of `compact`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ckpt.chains.compact import CompactResult, Retention, compact, later_records, plan
from ckpt.chains.kept import CompactPlan, KeptMember
from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Execution
from ckpt_cli import notes
from ckpt_cli.progress import progress_bar
from ckpt_cli.views import report
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.text import format_nbytes
from ckpt_formats.parity.blocks import find_parity, has_parity, protected_folders
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps, Member

_FATES = {
    "as it is": "stays as it is",
    "base": "is written again, as a base",
    "delta": "is written again, as a delta against the last one that stays",
    "from log": "is written as a base, from the log of gradients",
    "removed": "is removed",
}


def run(chain: Path, retention: Retention, policy: DeltaPolicy, resources: Execution, as_json: bool) -> None:
    """Compact a chain with a bar, and show what was done."""
    again = _drop_parity(chain, retention, policy, resources)
    with progress_bar("compacting") as progress:
        result = compact(chain, retention, policy, resources, progress)
    if again is not None:
        from ckpt_cli.views.protect import protect_states

        protect_states(chain, again.lose, again.folders, resources)
    notes.note(*result.notes)
    show_result(chain, result, as_json)


@dataclass(frozen=True)
class _ParityAgain:
    """The parity that is written when a chain is compacted."""

    lose: int | None
    """How many states of a group may be lost; None if the chain was protected as a whole."""
    folders: tuple[str, ...] | None
    """None: of all states and segments that have none."""


def _drop_parity(chain: Path, retention: Retention, policy: DeltaPolicy, resources: Execution) -> _ParityAgain | None:
    """Drop the parity of what will be removed or cut, as long as it can be read: it is a sum with that of others.

    Without them, damage of others in their groups could not be repaired. Returns what to write afterwards.
    """
    from ckpt.protection.members import losses_of_groups

    if not protected_folders(chain):
        return None
    lose, index = losses_of_groups(chain), chain_file.read(chain)
    if lose is None and has_parity(chain):
        return _ParityAgain(None, None)
    planned = plan(chain, index, retention, policy)
    stay = {one.member.folder for one in planned.states if one.how == "as it is" and one.member}
    stay |= {one.folder for one in planned.segments if one in index.segments and not _is_cut(chain, one)}
    going = ({one.folder for one in index.members} | {one.folder for one in index.segments}) - stay
    cut = tuple(one.folder for one in planned.segments if one.folder in going and has_parity(chain / one.folder))
    in_groups = lose is not None
    lose = find_parity(chain / cut[0]).manifest.parities if lose is None and cut else lose
    if lose is None:
        return None
    if going:
        from ckpt_cli.views.protect import protect_states

        # What is left of states that were removed before may be needed by fewer others then.
        protect_states(chain, lose, (), resources, going | index.shared_packs().keys() - stay)
    return _ParityAgain(lose, None if in_groups else cut)


def _is_cut(chain: Path, logged: LoggedSteps) -> bool:
    """Whether files of a segment will be truncated, although it stays as it is."""
    try:
        return any(later_records(chain, logged))
    except CkptError:
        return False  # damaged


def show_plan(run: Path, chain: ChainIndex, plan: CompactPlan, as_json: bool) -> None:
    """Show what will happen to each state, and to each segment of the log."""
    if chain.is_family:
        _show_family_plan(run, chain, plan, as_json)
        return
    how = {one.step: one.how for one in plan.states}
    fates = {step: how.get(step, "removed") for step in sorted({*how, *(member.step for member in chain.members)})}
    ends = {one.folder: one.step for one in plan.segments}
    if as_json:
        segments = [
            {"first": one.first, "becomes": _fate(one, ends), "last": ends.get(one.folder)} for one in chain.segments
        ]
        states = [{"step": step, "becomes": fate} for step, fate in fates.items()]
        report.data({"chain": str(run), "steps": states, **({"segments": segments} if segments else {})})
        return
    for step, fate in fates.items():
        click.echo(f"{step:>12}  {_FATES[fate]}")
    for one in chain.segments:
        fate = _SEGMENT_FATES[_fate(one, ends)].format(ends.get(one.folder))
        click.echo(f"{f'from {one.first}':>12}  gradients: {fate}")
    report.conclude(f"{len(plan.states)} of {len(fates)} states would stay; nothing was written")


def _show_family_plan(run: Path, chain: ChainIndex, plan: CompactPlan, as_json: bool) -> None:
    """Show what will happen to each model."""
    states = {one.step: one for one in plan.states}
    if as_json:
        fates = [_fate_of_model(member, states.get(member.step)) for member in chain.members]
        report.data({"chain": str(run), "steps": fates})
        return
    width = max(len(member.name or "") for member in chain.members)
    for member in chain.members:
        one = states.get(member.step)
        against = "" if one is None or one.against is None else f", as a delta of {one.against.name}"
        fate = _FATES["removed"] if one is None else "is written again" if against else _FATES[one.how]
        click.echo(f"{member.name or '':<{width}}  {fate}{against}")
    report.conclude(f"{len(states)} of {len(chain.members)} models would stay; nothing was written")


def _fate_of_model(member: Member, state: KeptMember | None) -> dict[str, Any]:
    against = None if state is None or state.against is None else state.against.name
    how = "removed" if state is None else state.how
    return {"step": member.step, "name": member.name, "becomes": how, "against": against}


_SEGMENT_FATES = {"removed": "are removed", "cut": "stay up to step {}", "as it is": "stay as they are"}


def _fate(logged: LoggedSteps, ends: Mapping[str, int | None]) -> str:
    if logged.folder not in ends:
        return "removed"
    return "as it is" if ends[logged.folder] == logged.step else "cut"


def show_result(chain: Path, result: CompactResult, as_json: bool) -> None:
    """Show what was changed."""
    before, after = ({member.step for member in chain.members} for chain in (result.before, result.after))
    removed, added = len(before - after), len(after - before)
    if as_json:
        steps = [member.step for member in result.after.members]
        segments = [{"first": one.first, "last": one.step} for one in result.after.segments]
        logged = {"added": added, "segments": segments} if result.before.segments else {}
        packs = {"packs_nbytes": result.packs_nbytes[1]} if result.packs_nbytes[1] else {}
        facts = {"chain": str(chain), "steps": steps, "removed": removed, "freed_nbytes": result.freed}
        if result.after.is_family:
            facts["models"] = [member.name for member in result.after.members]
        report.data({**facts, **packs, **logged})
        return
    freed = (
        f"{format_nbytes(result.freed)} freed"
        if result.freed >= 0
        else f"{format_nbytes(-result.freed)} more, for fewer deltas to replay"
    )
    from_log = f", {added} written from the log" if added else ""
    what = "models" if result.after.is_family else "states"
    report.conclude(f"{len(result.after.members)} {what} stay{from_log}, {removed} removed, {freed}")
    if result.packs_nbytes[1]:
        report.conclude(
            f"{format_nbytes(result.packs_nbytes[1])} of removed states stay, because states that stay use their packs"
        )
