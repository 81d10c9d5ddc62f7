"""Run `append` for a family of models, and show its results: which model is the parent, and why."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ckpt.chains import family
from ckpt.chains.family import PlannedModel
from ckpt.chains.nearest import Candidate
from ckpt.pipeline import Execution
from ckpt_cli import notes
from ckpt_cli.options.delta import AppendOptions
from ckpt_cli.progress import doing, progress_bar
from ckpt_cli.views import columns, report
from ckpt_cli.views.append import estimate, note_warnings, protect_member, show, with_trials
from ckpt_cli.views.chain_log import times
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.stores.location import listed_again
from ckpt_formats.universal.chain import chain_file, folder


def run(
    chain: Path, sources: Sequence[Checkpoint], options: AppendOptions, resources: Execution, as_json: bool
) -> None:
    """Append one model or several, or show what would be appended. Raises `UsageError` for options of one model."""
    for source in sources:
        note_warnings(options.policy, source)
    if options.step is not None:
        raise click.UsageError("--step is about the steps of a run: models of a family have names (--name).")
    if len(sources) > 1 and (options.dry_run or options.name is not None):
        raise click.UsageError("--dry-run and --name are about one model: append the models one by one.")
    if options.dry_run:
        show_plan(chain, sources[0], options, resources, as_json)
    elif len(sources) == 1:
        append(chain, sources[0], options, resources, as_json)
    else:
        with report.gathered() as objects:
            for source in sources:
                append(chain, source, options, resources, as_json)
        if as_json:
            report.data({"target": str(chain), "appended": objects})


def append(chain: Path, source: Checkpoint, options: AppendOptions, resources: Execution, as_json: bool) -> None:
    """Append a model to a family, or begin one, with a progress bar; show what was written."""
    notes.flush()
    parent = options.parent or family.AUTO
    with progress_bar("appending") as progress:
        policy = with_trials(options.policy)
        result = family.append_model(chain, source, options.name, parent, policy, resources, progress)
    protect_member(chain, result, options, resources)
    listed = chain_file.read(listed_again(chain)).parent_of(result.member)
    show(result, chain, as_json, None if listed is None else listed.name)


def show_plan(chain: Path, source: Checkpoint, options: AppendOptions, resources: Execution, as_json: bool) -> None:
    """Show against which model this one would be stored, why, and about how many bytes it would take."""
    with doing(f"comparing with the models of {printable(str(chain))}"):
        index = family.listed(chain, folder.peek(chain))
        planned = family.plan_model(
            chain, index, source, options.name, options.parent or family.AUTO, options.policy, resources
        )
    notes.note(*planned.notes)
    costs = estimate(options.policy, source, planned.earlier, False, resources)
    parent = None if planned.parent is None else planned.parent.name
    if as_json:
        report.data({"chain": str(chain), "name": planned.name, "parent": parent, **costs, **_nearest_json(planned)})
        return
    kind = "in full" if parent is None else f"delta of {parent}"
    raw, stored = costs["raw_nbytes"], costs["stored_nbytes"]
    sizes = f"about {format_nbytes(stored)} for {format_nbytes(raw)}, {times(raw, stored)}"
    click.echo(printable(f"{chain}: {planned.name}, {kind}, {sizes}"))
    if planned.nearest is not None and planned.nearest.candidates:
        rows = [_row(one) for one in planned.nearest.candidates]
        rows.append(("(in full)", "", "", "", format_nbytes(planned.nearest.alone_nbytes)))
        columns.show(columns.table(("parent", "in common", "bits differ", "deltas", "about"), rows, right=(1, 2, 3, 4)))
    report.conclude("estimated from some chunks; nothing was written")


def _row(one: Candidate) -> tuple[str, str, str, str, str]:
    estimated = "" if one.stored_nbytes is None else format_nbytes(one.stored_nbytes)
    return one.member.name or "", f"{100 * one.share:.0f} %", f"{100 * one.bits:.1f} %", str(one.depth), estimated


def _nearest_json(planned: PlannedModel) -> dict[str, Any]:
    if planned.nearest is None:
        return {}
    candidates = [
        {
            "name": one.member.name,
            "deltas": one.depth,
            "share": round(one.share, 6),
            "bits": round(one.bits, 6),
            "stored_nbytes": one.stored_nbytes,
        }
        for one in planned.nearest.candidates
    ]
    nearest = planned.nearest
    return {"reason": nearest.reason, "alone_nbytes": nearest.alone_nbytes, "candidates": candidates}
