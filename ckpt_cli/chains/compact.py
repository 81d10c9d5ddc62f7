"""`ckpt compact`: fewer members, and deltas folded into bases, without losing a state that is kept."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import click

from ckpt_cli import report
from ckpt_cli.chains.append import Anchors, folder_name, sweep
from ckpt_cli.chains.writing import Manner, write_base, write_delta
from ckpt_cli.pipeline import Effort
from ckpt_cli.report import size
from ckpt_formats.chain import folder
from ckpt_formats.chain.index import Chain, Member
from ckpt_formats.chain.members import member_at, open_member

_FATES = {
    "as it is": "stays as it is",
    "base": "is written again, as a base",
    "delta": "is written again, as a delta against the last that stays",
    "removed": "is removed",
}


@dataclass(frozen=True)
class Kept:
    """A member that stays, and what becomes of it."""

    member: Member
    how: str
    """`as it is`, `base` or `delta`."""


@dataclass(frozen=True)
class Compacted:
    """What was done."""

    before: Chain
    after: Chain

    @property
    def freed(self) -> int:
        """Bytes; negative, if bases take more than the deltas that they replace."""
        stored = [sum(member.stored_nbytes for member in chain.members) for chain in (self.before, self.after)]
        return stored[0] - stored[1]


def plan(run: Path, chain: Chain, keep: tuple[str, ...], anchors: Anchors) -> list[Kept]:
    """Which members stay, and how. The last one always does."""
    steps = {chain.members[-1].step}.union(*(_steps(run, chain, one) for one in keep))
    kept: list[Kept] = []
    since = 0
    for before, member in zip((None, *chain.members), chain.members, strict=False):
        if member.step not in steps:
            continue
        last = kept[-1].member if kept else None
        if member.kind == "base":
            how = "as it is"
        elif last is None or (anchors.every is not None and since >= anchors.every):
            how = "base"
        else:
            how = "as it is" if last is before else "delta"
        since = 1 if how == "base" or member.kind == "base" else since + 1
        kept.append(Kept(member, how))
    return kept


def compact(run: Path, keep: tuple[str, ...], anchors: Anchors, manner: Manner, effort: Effort) -> Compacted:
    """Write anew what would lose its parent, then replace the list, then remove what it no longer names."""
    with folder.locked(run, locks=effort.locks) as chain:
        assert chain is not None  # it was to be there
        sweep(run, chain)
        members: list[Member] = []
        for kept in plan(run, chain, keep, anchors):
            member = kept.member if kept.how == "as it is" else _rewritten(run, chain, kept, members, manner, effort)
            members.append(member)
        after = Chain(tuple(members))
        if after != chain:
            folder.replace(run, after)
            folder.remove(folder.leftovers(run, after))
    return Compacted(chain, after)


def say_plan(chain: Chain, kept: list[Kept], as_json: bool) -> None:
    """What would become of each member."""
    how = {one.member.step: one.how for one in kept}
    fates = {member.step: how.get(member.step, "removed") for member in chain.members}
    if as_json:
        report.data({"steps": [{"step": step, "becomes": fate} for step, fate in fates.items()]})
        return
    for step, fate in fates.items():
        click.echo(f"{step:>12}  {_FATES[fate]}")
    report.say(f"{len(kept)} of {len(fates)} states would stay; nothing was written")


def say(done: Compacted, as_json: bool) -> None:
    """What was done."""
    removed = len(done.before.members) - len(done.after.members)
    if as_json:
        steps = [member.step for member in done.after.members]
        report.data({"steps": steps, "removed": removed, "freed_nbytes": done.freed})
        return
    freed = f"{size(done.freed)} freed" if done.freed >= 0 else f"{size(-done.freed)} more, for fewer deltas to replay"
    report.say(f"{len(done.after.members)} states stay, {removed} removed, {freed}")


def _rewritten(run: Path, chain: Chain, kept: Kept, before: list[Member], manner: Manner, effort: Effort) -> Member:
    """The same state, bit for bit, in a folder of its own: as a base, or against the last that is kept."""
    member = kept.member
    source, target = open_member(run, chain, member), _free(run, member.step)
    if kept.how == "base":
        written = write_base(source, target, member.step, False, manner, effort, member.content)
    else:
        last = before[-1]
        earlier = open_member(run, chain, member_at(run, chain, last.step))
        written = write_delta(source, target, member.step, earlier, run / last.folder, manner, effort, member.content)
    return replace(written.member, time=member.time, losses=member.losses)


def _free(run: Path, step: int) -> Path:
    number = 0
    while (run / (name := folder_name(step) + (f".{number}" if number else ""))).exists():
        number += 1
    return run / name


def _steps(run: Path, chain: Chain, keep: str) -> set[int]:
    steps = [member.step for member in chain.members]
    if keep == "all":
        return set(steps)
    if match := re.fullmatch(r"(last|every):([1-9]\d{0,17})", keep):
        number = int(match[2])
        return set(steps[-number:]) if match[1] == "last" else {step for step in steps if step % number == 0}
    if not re.fullmatch(r"\d{1,18}(,\d{1,18})*", keep):
        raise click.UsageError(f"--keep {keep!r:.60} is no policy: write last:N, every:N, all, or steps with commas.")
    return {member_at(run, chain, int(step)).step for step in keep.split(",")}
