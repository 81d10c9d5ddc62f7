"""What `ckpt diff` does with -o and --into: a delta on its own, or one more state of a chain."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ckpt.chains.append import append, plan_append
from ckpt.chains.estimate import stored_nbytes
from ckpt.chains.write import AppendResult, DeltaPolicy, write_delta
from ckpt.pipeline import Resources, plan
from ckpt_cli import notes
from ckpt_cli.delta_options import DeltaOptions
from ckpt_cli.views import report
from ckpt_cli.views.chain_log import accuracy, times
from ckpt_cli.views.policy import base_policy, delta_policy
from ckpt_cli.views.report import size
from ckpt_formats.core.checkpoint import Checkpoint, Goal
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.notices import Weight
from ckpt_formats.core.text import printable
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chain import file as index
from ckpt_formats.universal.delta_format import warnings_for


def into(chain: Path, source: Checkpoint, writing: DeltaOptions, effort: Resources, as_json: bool) -> None:
    """Append to a chain, or begin one; and say so."""
    notes.note(*source.notices)
    anchors, manner = base_policy(writing), delta_policy(writing, chain)
    _note_cautions(manner, source)
    if writing.dry_run:
        step, kind, earlier = plan_append(chain, source, writing.step, anchors)
        costs = _costs(manner, source, earlier, anchors.coded, effort)
        _say_plan({"chain": str(chain), "step": step, "kind": kind, **costs}, as_json)
        return
    _say(append(chain, source, writing.step, manner, anchors, effort), chain, as_json)


def against(
    first: Checkpoint, second: Checkpoint, target: Path, writing: DeltaOptions, effort: Resources, as_json: bool
) -> None:
    """Write a delta of the second checkpoint against the first; and say so."""
    notes.note(*second.notices)
    parent = parent_folder(first)
    manner = delta_policy(writing, target)
    _note_cautions(manner, second)
    if writing.dry_run:
        plan(second, Universal(), Goal(target))
        costs = _costs(manner, second, first, False, effort)
        _say_plan({"target": str(target), "parent": str(parent), **costs}, as_json)
        return
    step = second.origin.step if writing.step is None else writing.step
    _say(write_delta(second, target, step or 0, first, parent, manner, effort), target, as_json)


def parent_folder(checkpoint: Checkpoint) -> Path:
    """The folder that a delta can name as its parent. Raises `Unsupported` if the checkpoint has no content id."""
    path = checkpoint.path
    if (path / index.NAME).is_file():
        return path / index.load(path / index.NAME).members[-1].folder
    if not (path / manifest.NAME).is_file():
        raise Unsupported(
            "a delta's parent is a universal checkpoint or a chain, and this is neither",
            where=path,
            hint=f"Write it as one first: `ckpt compress {printable(str(path))} BASE`; or begin a chain: --into CHAIN.",
        )
    return path


def _say(written: AppendResult, target: Path, as_json: bool) -> None:
    member, accepted = written.member, written.accepted
    if as_json:
        report.data(
            {
                "target": str(target),
                "step": member.step,
                "kind": member.kind,
                "folder": member.folder,
                "content": member.content,
                "codecs": list(member.codecs),
                "raw_nbytes": member.raw_nbytes,
                "stored_nbytes": member.stored_nbytes,
                "ratio": round(member.raw_nbytes / member.stored_nbytes, 4),
                "exact": member.exact,
                "losses": {state: dict(loss) for state, loss in member.losses.items()},
                "seconds": round(written.seconds, 3),
                "checksums_verified": written.outcome.checksums,
                **({} if accepted is None else {"evaluation": asdict(accepted)}),
            }
        )
        return
    click.echo(
        f"{printable(str(target))}: step {member.step}, {member.kind}, {size(member.stored_nbytes)} for "
        f"{size(member.raw_nbytes)}, {times(member.raw_nbytes, member.stored_nbytes)}, {accuracy(member)}"
    )
    if accepted is not None:
        report.say(f"evaluated: loss {accepted.loss:.6g}, of the exact state {accepted.exact:.6g}")
    resumed = f", {written.outcome.resumed} files of them by an earlier run" if written.outcome.resumed else ""
    report.say(f"wrote {written.outcome.files} files in {written.seconds:.1f} s{resumed}")


def _say_plan(said: dict[str, Any], as_json: bool) -> None:
    if as_json:
        report.data(said)
        return
    place = said.get("chain") or said["target"]
    what = f"step {said['step']}, {said['kind']}" if "step" in said else f"a delta against {said['parent']}"
    lossy = f", approximate by codec {said['approximate']}" if "approximate" in said else ""
    raw, stored = said["raw_nbytes"], said["stored_nbytes"]
    sizes = f"about {size(stored)} for {size(raw)}, {times(raw, stored)}"
    click.echo(printable(f"{place}: {what}, {sizes}{lossy}"))
    report.say("estimated from some chunks; nothing was written")


def _costs(
    manner: DeltaPolicy, source: Checkpoint, earlier: Checkpoint | None, coded: bool, effort: Resources
) -> dict[str, Any]:
    raw = sum(parameter.nbytes for parameter in source.parameters.values())
    stored = stored_nbytes(source, earlier, coded, manner, effort)
    said = {"estimate": True, "raw_nbytes": raw, "stored_nbytes": stored, "ratio": round(raw / max(stored, 1), 4)}
    lossy = not manner.codec.lossless and (earlier is not None or coded)
    return said | ({"approximate": manner.codec.name} if lossy else {})


def _note_cautions(manner: DeltaPolicy, source: Checkpoint) -> None:
    notes.note(*warnings_for(manner.codec, source), weight=Weight.LOST)
