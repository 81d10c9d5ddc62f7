"""Run `diff`, and print its result as text."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from ckpt.compare import Selection, diff_selected, mastered_names, select_both
from ckpt.compare.result import Diff, TensorDiff, grouped
from ckpt.compare.sums import DiffSums
from ckpt.compare.to_json import facts, totals
from ckpt.pipeline import Resources
from ckpt_cli import notes
from ckpt_cli.options.report import ReportOptions
from ckpt_cli.progress import progress_bar
from ckpt_cli.views import page
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, opened_path
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import format_share, printable

SORTS: dict[str, Callable[[TensorDiff], Any]] = {
    "relative": lambda pair: -(pair.sums.relative or 0.0),
    "max": lambda pair: -pair.sums.largest,
    "rms": lambda pair: -pair.sums.rms,
    "changed": lambda pair: -pair.sums.changed,
    "cosine": lambda pair: 1.0 if pair.sums.cosine is None else pair.sums.cosine,
    "name": lambda pair: (pair.name, pair.state),
}
_HEAD = f"{'changed':>9} {'max':>9} {'rms':>9} {'relative':>9} {'cosine':>10}"
_MAX_VALUES = 20
_PAGE_SCRIPTS = ("listing", "diff", "head", "cells", "map", "histograms", "values", "table", "states", "start")
_PAGE_GROUPS = {
    "cells": ("layer", "role", "state"),
    "layers": ("layer", "state"),
    "roles": ("role", "state"),
    "states": ("state",),
}
"""The groups by their names in the page's script."""


def show(checkpoints: Sequence[Checkpoint], options: ReportOptions, resources: Resources, as_json: bool) -> bool:
    """Compare two with a progress bar, and show what differs. Returns whether both are the same."""
    first, second = checkpoints
    if options.html:
        page.check_place(Path(options.html), "diff")
    if opened_path(first).resolve() == opened_path(second).resolve():
        notes.note("FIRST and SECOND are the same path", weight=Weight.UNSURE)
    a, b = select_both(first, second, Selection(options.only, options.skip, extras=not options.tensors_only))
    with progress_bar("comparing") as progress:
        figures = bool(as_json or options.html or options.by)  # of equal tensors, only these show any
        result = diff_selected(a, b, options.states, options.tensors_only, resources, progress, figures)
    if options.html:
        page.write(page_of(a, b, result), Path(options.html), "diff")
    note_differences(a, b, result)
    if as_json:
        data(facts(a, b, result, options.by))
    else:
        as_text(a, b, result, options.sort, options.by, options.top)
    return result.same


def page_of(first: Checkpoint, second: Checkpoint, diff: Diff) -> str:
    """The page that `--html` writes, of ASCII characters only. Equal differences give equal pages."""
    return page.page("diff", _PAGE_SCRIPTS, _page_facts(first, second, diff))


def _page_facts(first: Checkpoint, second: Checkpoint, diff: Diff) -> dict[str, Any]:
    """The fields of `--json`, and the groups that the page draws, but for histograms of single tensors, and values."""
    fields = facts(first, second, diff)
    for row in fields["tensors"]:
        del row["histogram"]
    fields["values"] = [value["text"] for value in fields["values"]]
    return fields | {name: totals(diff, by) for name, by in _PAGE_GROUPS.items()}


def as_text(first: Checkpoint, second: Checkpoint, result: Diff, sort: str, by: Sequence[str], top: int) -> None:
    """Print sums over states, tensors that are not in both, the most changed tensors, weights first, and a summary."""
    states = grouped(result.compared, ["state"])
    if not result.same and len(states) > 1 and tuple(by) != ("state",):
        _groups(states, "name", ["state"], 0)
        click.echo()
    unpaired = [pair for pair in result.pairs if pair.kind in ("missing", "added", "reshaped")]
    for pair in unpaired[:top] if top else unpaired:
        click.echo(f"{pair.kind:>9}  {printable(pair.name)} {printable(pair.state)}  {printable(pair.what)}")
    if top and len(unpaired) > top:
        click.echo(f"{'':>9}  and {len(unpaired) - top} more that are not on both sides")
    differing = sorted(
        (pair for pair in result.compared if pair.kind != "equal"),
        key=lambda pair: (not pair.sums.not_finite, pair.state not in (MASTER, MODEL), SORTS[sort](pair)),
    )
    if differing:
        click.echo(_HEAD)
    for pair in differing[:top] if top else differing:
        retyped = f"  ({printable(pair.what)})" if pair.what else ""
        click.echo(f"{_row(pair.sums)}  {printable(pair.name)} {printable(pair.state)}{retyped}")
    if top and len(differing) > top:
        click.echo(f"{'':>9} and {len(differing) - top} more (--top 0 shows all)")
    if by and differing:
        click.echo()
        _groups(grouped(result.compared, by), sort, by, top)
    for value in result.values[:_MAX_VALUES]:
        click.echo(printable(str(value)))
    if len(result.values) > _MAX_VALUES:
        click.echo(f"and {len(result.values) - _MAX_VALUES} more values")
    conclude(_summary(first, second, result, unpaired))


def _groups(groups: list[tuple[tuple[str, ...], DiffSums]], sort: str, by: Sequence[str], top: int) -> None:
    click.echo(f"by {' and '.join(by)}\n{_HEAD}")
    groups.sort(
        key=lambda row: (not row[1].not_finite, SORTS[sort](TensorDiff(" ".join(row[0]), "", "changed", "", row[1])))
    )
    for key, total in groups[:top] if top else groups:
        click.echo(f"{_row(total)}  {' '.join(map(printable, key))}")
    if top and len(groups) > top:
        click.echo(f"{'':>9} and {len(groups) - top} more (--top 0 shows all)")


def note_differences(
    first: Checkpoint, second: Checkpoint, result: Diff, names: tuple[str, str] = ("the first", "the second")
) -> None:
    """Note what the user should know of the comparison. `names`: how the two are called."""
    if result.pairs and not result.compared:
        from ckpt.rename import UseNames

        why = "are their names those of different libraries? --names compares them under one name"
        if any(isinstance(edit, UseNames) for edit in (*first.history, *second.history)):
            why = "names that no library of --names has stay as they are"
        notes.note(f"no tensor is in both; {why}", weight=Weight.UNSURE)
    for which, checkpoint in zip(names, (first, second), strict=True):
        if checkpoint.errors:
            notes.note(f"{len(checkpoint.errors)} states of {which} are approximate: they were coded with loss")
    masters = [mastered_names(one) for one in (first, second)]
    compared = {pair.name for pair in result.compared if pair.state == MASTER}
    for number, which in enumerate(names):
        alone = (masters[number] - masters[1 - number]) & compared
        if alone:
            text = (
                f"the masters of {which} are compared with the weights (model) of {names[1 - number]}, without masters"
            )
            notes.note(Notice(text, tuple(sorted(alone))))
    codes = tuple(dict.fromkeys(pair.name for pair in result.compared if pair.sums.codes))
    if codes:
        notes.note(Notice("codes and scales of quantised weights: only their bits are compared", codes))


def _summary(first: Checkpoint, second: Checkpoint, result: Diff, unpaired: Sequence[TensorDiff]) -> str:
    compared = result.compared
    total = sum((pair.sums for pair in compared), DiffSums())
    unequal = sum(pair.kind != "equal" for pair in compared)
    strange = [pair.sums.not_finite for pair in compared if pair.sums.not_finite]
    finite = f", {sum(strange):,} NaN or infinite in {len(strange):,} tensors" if strange else ""
    before, after = ("not stated" if one.origin.step is None else one.origin.step for one in (first, second))
    steps = "" if result.same_step else f", step {before} -> {after}"
    if result.same:
        return f"the same: {len(compared)} tensors, {total.elements:,} elements, every bit{finite}{steps}"
    lacking = f", {len(unpaired)} not comparable" if unpaired else ""
    values = f", {len(result.values)} other values" if result.values else ""
    return (
        f"different: {unequal} of {len(compared)} tensors{lacking}, {total.changed:,} of {total.elements:,} elements"
        f"{finite}{values}{steps}"
    )


def figures(sums: DiffSums) -> tuple[str, str, str, str, str]:
    """The share of changed elements, largest and root mean square difference, relative difference, and cosine."""
    share = format_share(sums.changed, sums.elements)
    if not sums.is_measured:
        return share, "-", "-", "-", "-"
    cosine = "-" if sums.cosine is None else f"{sums.cosine:.7f}"
    relative = "-" if sums.relative is None else f"{sums.relative:.3g}"
    return share, f"{sums.largest:.3g}", f"{sums.rms:.3g}", relative, cosine


def _row(sums: DiffSums) -> str:
    share, largest, rms, relative, cosine = figures(sums)
    strange = f"  ({sums.not_finite:,} not finite)" if sums.not_finite else ""
    return f"{share:>9} {largest:>9} {rms:>9} {relative:>9} {cosine:>10}{strange}"
