"""Compare several checkpoints with the first, and print a row for each: as text, CSV or JSON."""

import csv
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ckpt.compare import Selection, each_selected, select_each
from ckpt.compare.result import Diff, grouped
from ckpt.compare.sums import DiffSums
from ckpt.compare.to_json import numbers, totals, value_facts
from ckpt.pipeline import Resources
from ckpt_cli import notes
from ckpt_cli.options.exit_codes import exit_code
from ckpt_cli.options.report import ReportOptions
from ckpt_cli.progress import progress_bar
from ckpt_cli.views import columns
from ckpt_cli.views.diff import figures, note_differences
from ckpt_cli.views.files import write_file
from ckpt_cli.views.report import conclude, data, error_lines, say
from ckpt_formats.core.checkpoint import Checkpoint, opened_path
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    NotFoundError,
    OutputError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.core.locking import check_folder_of
from ckpt_formats.core.text import format_count, printable

_FIGURES = ("elements", "changed", "max", "rms", "relative", "cosine", "first_not_finite", "second_not_finite", "codes")
_CSV_HEAD = ("checkpoint", "step")
"""How every such file begins. One that does may be replaced."""
_STDOUT = "-"
_OF_ONE = (CorruptError, IncompleteError, NotFoundError, UnsafeError, UnsupportedError)
"""Errors that a single checkpoint may cause, and not what the user asks of all."""
_SHOWN = {"changed": 0, "max": 1, "rms": 2, "relative": 3, "cosine": 4}
"""The place of a figure in those that `figures` returns, by the name that `--sort` has for it."""


@dataclass(frozen=True)
class Compared:
    """A checkpoint, and how it differs from the first."""

    path: str
    step: int | None
    diff: Diff

    @property
    def total(self) -> DiffSums:
        return sum((pair.sums for pair in self.diff.compared), DiffSums())

    def count(self, kind: str) -> int:
        """How many tensors are of a kind."""
        return sum(pair.kind == kind for pair in self.diff.pairs)

    @property
    def differing(self) -> int:
        """How many of the tensors that were compared differ."""
        return sum(pair.kind != "equal" for pair in self.diff.compared)


def show(
    checkpoints: Sequence[Checkpoint],
    unread: Mapping[str, CkptError],
    options: ReportOptions,
    resources: Resources,
    as_json: bool,
) -> int:
    """Compare with a progress bar, and show a row for each but the first, then why others could not be read.

    Returns the exit code: that of the first error, else whether any checkpoint differs.
    """
    if options.csv is not None and options.csv != _STDOUT:
        _check_place(Path(options.csv))
    choice = Selection(options.only, options.skip, extras=not options.tensors_only)
    baseline, *others = select_each(checkpoints, choice)
    rows, damaged = _compared(baseline, others, options, resources, is_only_one=len(others) + len(unread) == 1)
    unread = {**unread, **damaged}
    if options.csv is not None:
        _write_csv(_csv(rows, options.by), options.csv)
    if as_json:
        data({**_facts(baseline, rows, options.by), "unread": _facts_of_unread(unread)})
    elif options.csv != _STDOUT:
        _show_rows(baseline, rows)
        if options.by:
            _show_groups(rows, options)
        conclude(_summary(baseline, rows))
    for path, error in unread.items():
        say(f"NOT COMPARED: {printable(path)}")
        error_lines(error)
    if unread:
        return exit_code(next(iter(unread.values())))
    return int(not all(row.diff.same for row in rows))


def _compared(
    baseline: Checkpoint,
    others: Sequence[Checkpoint],
    options: ReportOptions,
    resources: Resources,
    *,
    is_only_one: bool,
) -> tuple[list[Compared], dict[str, CkptError]]:
    """A row for each checkpoint that can be read, and by path the errors of those that are incomplete or damaged.

    Raises the first error if there are no others, or if there is no row.
    """

    def compared(some: Sequence[Checkpoint]) -> list[Compared]:
        with progress_bar("comparing") as progress:
            diffs = each_selected(baseline, some, options.states, options.tensors_only, resources, progress)
        rows = [Compared(str(opened_path(one)), one.step, diff) for one, diff in zip(some, diffs, strict=True)]
        for other, row in zip(some, rows, strict=True):
            note_differences(baseline, other, row.diff, ("the first", row.path))
        return rows

    def compared_or_error(other: Checkpoint) -> Compared | CkptError:
        try:
            return compared([other])[0]
        except CkptError as error:
            return error

    try:
        return compared(others), {}
    except _OF_ONE:
        if is_only_one:
            raise
    each = [(other, compared_or_error(other)) for other in others]  # alone: an error does not say whose it is
    errors = {str(opened_path(other)): one for other, one in each if isinstance(one, CkptError)}
    if len(errors) == len(each):
        raise next(iter(errors.values()))
    return [one for _, one in each if isinstance(one, Compared)], errors


def _show_rows(baseline: Checkpoint, rows: Sequence[Compared]) -> None:
    """Print how each checkpoint differs, all tensors together."""
    elements = format_count(max((row.total.elements for row in rows), default=0))
    step = "" if baseline.step is None else f", step {baseline.step}"
    click.echo(f"against {printable(str(opened_path(baseline)))}{step}: {elements} elements")
    head = ("checkpoint", "step", "changed", "max", "rms", "relative", "cosine", "not finite", "tensors", "other")
    cells = []
    for row in rows:
        unpaired = sum(map(row.count, ("missing", "added", "reshaped")))
        tensors = f"{row.differing} of {len(row.diff.compared)}{f' + {unpaired}' if unpaired else ''}"
        own = (printable(row.path), "-" if row.step is None else str(row.step))
        cells.append((*own, *figures(row.total), _not_finite(row.total), tensors, str(len(row.diff.values))))
    columns.show(columns.table(head, cells, right=range(1, len(head))))


def _not_finite(sums: DiffSums) -> str:
    """How many elements of the checkpoint are NaN or infinite, and how many were so in the first."""
    before = f" (before: {sums.first_not_finite:,})" if sums.first_not_finite else ""
    return f"{sums.second_not_finite:,}{before}" if sums.second_not_finite or before else "0"


def _show_groups(rows: Sequence[Compared], options: ReportOptions) -> None:
    """Print one figure for each group and checkpoint: groups with NaN first, then those that changed most at last."""
    figure = options.sort if options.sort in _SHOWN else "relative"
    by_checkpoint = [dict(grouped(row.diff.compared, options.by)) for row in rows]
    keys = list(dict.fromkeys(key for groups in by_checkpoint for key in groups))
    if options.sort == "name":
        keys.sort()
    else:
        keys.sort(
            key=lambda key: _most_changed_first([groups[key] for groups in by_checkpoint if key in groups], figure)
        )
    shown = keys[: options.top] if options.top else keys
    click.echo(f"\n{figure} by {' and '.join(options.by)}")
    cells = [(*map(printable, key), *(_cell(groups.get(key), figure) for groups in by_checkpoint)) for key in shown]
    head = (*options.by, *_labels(rows))
    columns.show(columns.table(head, cells, right=range(len(options.by), len(head))))
    if len(keys) > len(shown):
        click.echo(f"and {len(keys) - len(shown):,} more (--top 0 shows all)")


def _most_changed_first(sums: Sequence[DiffSums], figure: str) -> tuple[bool, float]:
    """The key by which groups are sorted: by the last checkpoint that has it."""
    last = sums[-1]
    value = {
        "changed": last.changed / max(last.elements, 1),
        "max": last.largest,
        "rms": last.rms,
        "relative": last.relative or 0.0,
        "cosine": -1.0 if last.cosine is None else -last.cosine,
    }[figure]
    return not any(one.not_finite for one in sums), -value


def _cell(sums: DiffSums | None, figure: str) -> str:
    if sums is None:
        return ""
    if sums.not_finite and figure != "changed":
        return f"{sums.not_finite:,} not finite"
    return figures(sums)[_SHOWN[figure]]


def _labels(rows: Sequence[Compared]) -> list[str]:
    """A short name for each checkpoint: its step, else the end of its path, if these differ."""
    for labels in ([f"step {row.step}" for row in rows], [printable(Path(row.path).name) for row in rows]):
        if len(set(labels)) == len(rows) and "step None" not in labels:
            return labels
    return [printable(row.path) for row in rows]


def _summary(baseline: Checkpoint, rows: Sequence[Compared]) -> str:
    path = printable(str(opened_path(baseline)))
    differing = [row for row in rows if not row.diff.same]
    if not differing:
        return f"the same: {len(rows)} checkpoint{'s' * (len(rows) != 1)}, every bit as in {path}"
    strange = [row for row in rows if row.total.second_not_finite]
    finite = f"; the first with NaN or infinity is {printable(strange[0].path)}" if strange else ""
    return f"different: {len(differing)} of {len(rows)} from {path}{finite}"


def _facts(baseline: Checkpoint, rows: Sequence[Compared], by: Sequence[str]) -> dict[str, Any]:
    """The fields of `--json`."""
    others = [
        {
            "path": row.path,
            "step": row.step,
            "same": row.diff.same,
            "compared": len(row.diff.compared),
            "differing": row.differing,
            **{kind: row.count(kind) for kind in ("missing", "added", "reshaped")},
            "total": numbers(row.total),
            "values": list(map(value_facts, row.diff.values)),
            **({"groups": totals(row.diff, by)} if by else {}),
        }
        for row in rows
    ]
    same = all(row.diff.same for row in rows)
    return {"first": str(opened_path(baseline)), "step": baseline.step, "same": same, "checkpoints": others}


def _facts_of_unread(unread: Mapping[str, CkptError]) -> list[dict[str, Any]]:
    return [
        {"path": path, "what": error.what, "where": error.where, "hint": error.hint} for path, error in unread.items()
    ]


def _csv(rows: Sequence[Compared], by: Sequence[str]) -> str:
    """A line for each checkpoint, or for each group of each; numbers are as exact as in JSON."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*_CSV_HEAD, *by, *_FIGURES))
    for row in rows:
        for key, fields in _groups(row, by):
            own = (printable(row.path), row.step, *map(printable, key))
            writer.writerow((*own, *(fields[name] for name in _FIGURES)))
    return text.getvalue()


def _groups(row: Compared, by: Sequence[str]) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    if not by:
        yield (), numbers(row.total)
        return
    for key, sums in grouped(row.diff.compared, by):
        yield key, numbers(sums)


def _write_csv(text: str, place: str) -> None:
    """Write a table completely or not at all, and say where it is. Raises `OutputError`, `NoSpaceError`."""
    notes.flush()
    if place == _STDOUT:
        click.echo(text, nl=False)
        return
    target = Path(place)
    write_file(text.encode(), target, lambda: _check_place(target))
    say(f"table: {printable(place)}")


def _check_place(target: Path) -> None:
    """Raise `OutputError` if there is a file that is no such table; called before anything is read."""
    check_folder_of(target, "table")
    if not os.path.lexists(target):
        return
    sign = ",".join(_CSV_HEAD).encode()
    try:
        with target.open("rb") as file:
            if file.read(len(sign)) == sign:
                return
    except OSError:
        pass
    hint = "Choose another name, or remove it first."
    raise OutputError("a file exists here that is not a table of `ckpt diff`", where=target, hint=hint)
