"""Run `stats`, and print the figures as a table, as CSV or as JSON, or write its page."""

import csv
import io
import time
from pathlib import Path
from typing import Any, cast

import click

from ckpt.compare.statistics import Figures, Stats, stats
from ckpt.compare.statistics.result import Grouping, figures_json, groups_json, rows_json
from ckpt.pipeline import Resources
from ckpt_cli import notes
from ckpt_cli.options.stats import StatsOptions
from ckpt_cli.progress import progress_bar
from ckpt_cli.views import columns, page
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.text import format_share, printable

_SCRIPTS = ("listing", "histograms", "states", "stats")
_PAGE_GROUPS: dict[str, Grouping] = {"roles": "role", "layers": "layer", "states": "state"}
"""The groups by their names in the page's script."""
_FIGURES = ("values", "nan", "infinite", "zero", "min", "max", "mean", "norm")
_HEADS = ("values", "NaN", "infinite", "zero", "min", "max", "mean", "norm")


def show(checkpoint: Checkpoint, how: StatsOptions, resources: Resources, as_json: bool) -> bool:
    """Measure with a progress bar, and show the figures. Returns whether no value is of a kind of `--fail-on`."""
    if how.html:
        page.check_place(Path(how.html), "stats")
    start = time.monotonic()
    with progress_bar("measuring") as progress:
        result = stats(checkpoint, how.only, how.skip, how.states, resources=resources, progress=progress)
    seconds = time.monotonic() - start
    notes.note(*result.notices)
    if how.html:
        page.write(page_of(checkpoint, result), Path(how.html), "stats")
    by = cast(Grouping, how.by)
    total = result.total
    counts = {"nan": total.nans, "inf": total.infinities}
    passed = not any(counts[kind] for kind in how.fail_on)
    if as_json:
        data(_facts(checkpoint, result, by) | {"passed": passed, "seconds": round(seconds, 3)})
    elif how.as_csv:
        notes.flush()
        click.echo(_csv(result, by), nl=False)
    else:
        _table(result, by, how.top)
        conclude(_summary(result, total, seconds))
    return passed


def page_of(checkpoint: Checkpoint, result: Stats) -> str:
    """The page that `--html` writes, of ASCII characters only. Equal figures give equal pages."""
    fields = _facts(checkpoint, result, "tensor")
    for row in fields["tensors"]:
        del row["histogram"]
    groups = {name: groups_json(result.by(by), by) for name, by in _PAGE_GROUPS.items()}
    return page.page("stats", _SCRIPTS, fields | groups | {"notices": list(map(str, result.notices))})


def _facts(checkpoint: Checkpoint, result: Stats, by: Grouping) -> dict[str, Any]:
    rows = {"tensors": rows_json(result.tensors)} if by == "tensor" else {"groups": groups_json(result.by(by), by)}
    return {"path": str(checkpoint.path), "step": checkpoint.step, "total": figures_json(result.total), **rows}


def _table(result: Stats, by: Grouping, top: int) -> None:
    """Print the rows: first those with NaN or infinity, then the others in the order of the checkpoint."""
    rows = sorted(result.by(by).items(), key=lambda row: not (row[1].nans or row[1].infinities))
    shown = rows[:top] if top else rows
    if shown:
        heads = (*_HEADS, "state") if by == "state" else (*_HEADS, by, "state")
        cells = [(*_cells(figures), *map(printable, key)) for key, figures in shown]
        columns.show(columns.table(heads, cells, right=range(len(_HEADS))))
    if len(rows) > len(shown):
        click.echo(f"and {len(rows) - len(shown):,} more (--top 0 shows all)")


def _cells(figures: Figures) -> tuple[str, ...]:
    numbers = (figures.least, figures.greatest, figures.mean, figures.norm)
    zeros = format_share(figures.zeros, figures.values)
    counts = (f"{figures.values:,}", f"{figures.nans:,}", f"{figures.infinities:,}", zeros)
    return (*counts, *("-" if number is None else f"{number:.4g}" for number in numbers))


def _csv(result: Stats, by: Grouping) -> str:
    """All rows as CSV, with a head; numbers are as exact as in JSON, and empty where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if by == "tensor":
        writer.writerow(("tensor", "state", "dtype", "shape", "scheme", *_FIGURES))
        for row in rows_json(result.tensors):
            shape = "x".join(map(str, row["shape"]))
            texts = (printable(row["name"]), printable(row["state"]), row["dtype"], shape, row["scheme"])
            writer.writerow((*texts, *(row[name] for name in _FIGURES)))
    else:
        names = ("state",) if by == "state" else (by, "state")
        writer.writerow((*names, *_FIGURES))
        for row in groups_json(result.by(by), by):
            writer.writerow((*(printable(row[name]) for name in names), *(row[name] for name in _FIGURES)))
    return text.getvalue()


def _summary(result: Stats, total: Figures, seconds: float) -> str:
    size = f"{total.values:,} values in {_tensors(len(result))} ({seconds:.1f} s)"
    if not (total.nans or total.infinities):
        return f"no value is NaN or infinite: {size}"
    hit = sum(1 for one in result if one.figures.nans or one.figures.infinities)
    counts = [f"{total.nans:,} NaN"] * bool(total.nans) + [f"{total.infinities:,} infinite"] * bool(total.infinities)
    return f"{' and '.join(counts)} in {_tensors(hit)}, of {size}"


def _tensors(count: int) -> str:
    return f"{count:,} tensor{'s' * (count != 1)}"
