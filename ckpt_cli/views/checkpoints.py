"""Several checkpoints, in the folder of a run or named one by one: a row for each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from ckpt import sizes
from ckpt_cli import notes
from ckpt_cli.options.exit_codes import exit_code
from ckpt_cli.options.source import Listed
from ckpt_cli.progress import doing
from ckpt_cli.views import columns, page
from ckpt_cli.views.chain_log import show_log
from ckpt_cli.views.report import conclude, data, error_lines
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, NotFoundError, UnsafeError, UnsupportedError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.header_problems import header_problems
from ckpt_formats.core.state_table import ROLES
from ckpt_formats.core.text import format_count, format_nbytes, printable
from ckpt_formats.registry.location import format_name, locate
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.registry.parents import named_by_pointer, pointer_in

_OF_THE_MODEL = tuple(ROLES.index(role) for role in ("parameter", "frozen"))
_SCRIPTS = ("charts", "listing", "run")


@dataclass(frozen=True)
class Row:
    """What is known of one checkpoint from its headers; None where it cannot be opened."""

    path: str
    name: str
    """Its name in the folder of the run, or the path that was given."""
    kind: str | None = None
    """`file`, `files` (shards that are read together), `folder`, `chain` (one of its states), or `shadow`."""
    format: str | None = None
    engine: str | None = None
    step: int | None = None
    ranks: int | None = None
    """Ranks that wrote it; None if it is not sharded."""
    tensors: int | None = None
    """The model's parameters, frozen ones included."""
    elements: int | None = None
    """Elements of these."""
    nbytes: int | None = None
    """Bytes of its files."""
    problem: str | None = None
    """Why it is incomplete; None if its headers agree."""
    error: CkptError | None = None
    """Why it cannot be opened."""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": self.path,
            "kind": self.kind,
            "format": self.format,
            "engine": self.engine,
            "step": self.step,
            "ranks": self.ranks,
            "tensors": self.tensors,
            "elements": self.elements,
            "nbytes": self.nbytes,
            "whole": self.problem is None,
            "problem": self.problem,
        }


def row_of(place: str | Path, name: str, checkpoint: Checkpoint) -> Row:
    """The row of a checkpoint that could be opened. Reads no tensor."""
    format = format_name(checkpoint)
    states = sizes.table(checkpoint)
    members = np.isin(states.role, _OF_THE_MODEL)
    problem = next(iter(header_problems(checkpoint)), None)
    return Row(
        str(place),
        name,
        _kind(place, format, checkpoint),
        format,
        checkpoint.origin.engine,
        checkpoint.step,
        _count_ranks(checkpoint),
        int(members.sum()),
        int(states.elements[states.weight][members].sum()),
        sum(file.nbytes for file in checkpoint.files),
        None if problem is None else problem.what,
    )


def show_run(run: Path, inside: Sequence[Path], options: ReadOptions, as_json: bool, html: Path | None) -> None:
    """Print all checkpoints in a folder, and which of them its path alone means; with `html`, also write their page."""
    if html is not None:
        page.check_place(html, "inspect")
    with doing(f"reading the headers of {len(inside)} checkpoints"):
        rows = [_opened_row(Listed(path.name, path, partial(open_checkpoint, path, options))) for path in inside]
        meant = _meant(run, inside)
        latest = _named_as_last(run, inside)
    whole = [path for path, row in zip(inside, rows, strict=True) if row.problem is None]
    newest_whole = whole[-1] if whole else None
    facts = facts_of("run", rows, run, meant=meant, latest=latest, newest_whole=newest_whole)
    if html is not None:
        page.write(page_of(facts), html, "inspect")
    if as_json:
        data(facts)
        return
    click.echo(f"{printable(str(run))}: {len(rows)} checkpoints")
    named = (("latest", latest), ("newest complete", newest_whole))
    marks = [", ".join(mark for mark, path in named if path == own) for own in inside]
    _show_run_rows(rows, marks)
    conclude(_meaning(run, meant, latest, newest_whole))


def show_family(run: Path, models: Sequence[Path], options: ReadOptions, as_json: bool, html: Path | None) -> None:
    """Print the tree of a family of models; with `as_json` or `html`, a row for each model."""
    if not (as_json or html is not None):
        show_log(run, as_json)
        return
    if html is not None:
        page.check_place(html, "inspect")
    with doing(f"reading the headers of {len(models)} models"):
        rows = [_opened_row(Listed(path.name, path, partial(open_checkpoint, path, options))) for path in models]
    facts = facts_of("family", rows, run)
    if html is not None:
        page.write(page_of(facts), html, "inspect")
    if as_json:
        data(facts)
    else:
        show_log(run, as_json)


def _meaning(run: Path, meant: Path | None, latest: Path | None, newest: Path | None) -> str:
    """Say which checkpoint commands read if they get the folder."""
    folder = f'"{printable(str(run))}"'
    if latest is not None and latest not in (meant, newest):
        instead = "" if newest is None else f"; the newest complete checkpoint is {printable(str(newest))}"
        return f'"{pointer_in(run)}" names {printable(latest.name)}, which is incomplete{instead}'
    if meant is None:
        return "no file names the last one: give commands the path of one checkpoint"
    if meant == run:
        return f"{folder} means the model in the folder itself, not the checkpoints in it"
    return f"{folder} means {printable(meant.name)}" + (
        f' (the file "{pointer_in(run)}" says so)' if meant == latest else ""
    )


def show_several(listed: Sequence[Listed], as_json: bool, html: Path | None) -> int:
    """Print a row for each of several checkpoints, also if some cannot be opened; with `html`, also write their page.

    Returns the exit code: that of the first error, 0 without one.
    """
    if html is not None:
        page.check_place(html, "inspect")
    with doing(f"reading the headers of {len(listed)} checkpoints"):
        rows = [_opened_row(one) for one in listed]
    facts = facts_of("several", rows)
    errors = [row.error for row in rows if row.error is not None]
    if html is not None:
        page.write(page_of(facts), html, "inspect")
    if as_json:
        data(facts)
    else:
        notes.flush()
        _show_rows(rows)
        for error in errors:
            error_lines(error)
    return exit_code(errors[0]) if errors else 0


def facts_of(
    kind: str,
    rows: Sequence[Row],
    path: str | Path | None = None,
    *,
    meant: Path | None = None,
    latest: Path | None = None,
    newest_whole: Path | None = None,
    details: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The fields of `inspect --json`, which are the same for whatever is inspected.

    kind: `checkpoint`, `run`, `family` or `several`. path: the one that was given. details: what is known of a single
    checkpoint beyond its row (see `DETAILS`).
    """
    return {
        "path": None if path is None else str(path),
        "kind": kind,
        "checkpoints": [row.to_json() for row in rows],
        "default": _name(meant),
        "latest": _name(latest),
        "newest_whole": _name(newest_whole),
        **(dict.fromkeys(DETAILS) if details is None else details),
    }


DETAILS = (
    *("format", "origin", "parameters", "aliases", "groups", "extras", "files"),
    *("quantised", "bits_per_weight", "shared"),
)
"""The fields that are null if several checkpoints are listed."""


def page_of(facts: Mapping[str, Any]) -> str:
    """The page of several checkpoints, of ASCII characters only, from the fields of `--json`."""
    return page.page("inspect", _SCRIPTS, facts, template="run")


def _show_run_rows(rows: Sequence[Row], marks: Sequence[str]) -> None:
    """Print the table of a run. `marks`: what is said of each checkpoint beside its name."""
    head = ("name", "", "step", "size", "format", "parameters", "headers")
    cells = [
        (
            *(printable(row.name), mark, _shown(row.step), _shown(row.nbytes, format_nbytes), row.format or "-"),
            *(_shown(row.elements, format_count), _headers(row)),
        )
        for row, mark in zip(rows, marks, strict=True)
    ]
    columns.show(columns.table(head, cells, right=(2, 3, 5), breaks=(6,)))


def _show_rows(rows: Sequence[Row]) -> None:
    """Print the table of several checkpoints. Errors have lines of their own after it."""
    head = ("checkpoint", "kind", "format", "step", "parameters", "size", "ranks", "headers")
    cells = [
        (
            *(printable(row.name), row.kind or "-", row.format or "-", _shown(row.step)),
            *(_shown(row.elements, format_count), _shown(row.nbytes, format_nbytes), _shown(row.ranks)),
            _headers(row) if row.error is None else "cannot be opened",
        )
        for row in rows
    ]
    is_long = any(row.problem is not None and row.error is None for row in rows)
    columns.show(columns.table(head, cells, right=(3, 4, 5, 6), breaks=(7,) if is_long else ()))


def _shown(value: int | None, as_text: Callable[[int], str] = str) -> str:
    return "-" if value is None else as_text(value)


def _headers(row: Row) -> str:
    if row.problem is None:
        return "complete"
    is_refused = isinstance(row.error, (NotFoundError, UnsupportedError, UnsafeError))  # it may well be complete
    return f"{'cannot be opened' if is_refused else 'incomplete'}: {printable(row.problem)}"


def _name(path: Path | None) -> str | None:
    return None if path is None else path.name


def _opened_row(one: Listed) -> Row:
    """The row of a checkpoint, also of one that cannot be opened."""
    format = None
    try:
        if isinstance(one.place, Path):
            format = locate(one.place).format.name  # known also if it then cannot be opened
        return row_of(one.place, one.name, one.open())
    except CkptError as error:
        return Row(str(one.place), one.name, format=format, problem=error.what, error=error)


def _kind(place: str | Path, format: str, checkpoint: Checkpoint) -> str:
    if format in ("chain", "shadow"):
        return format
    if isinstance(place, str) or not place.is_file():
        return "folder"
    return "file" if len(checkpoint.files) <= 1 else "files"


def _count_ranks(checkpoint: Checkpoint) -> int | None:
    """How many ranks wrote it: the most that files of one role have; None if no file states a rank."""
    ranks: dict[str, set[tuple[tuple[str, int], ...]]] = {}
    for file in checkpoint.files:
        if file.rank:
            ranks.setdefault(file.role, set()).add(tuple(sorted(file.rank.items())))
    return max(map(len, ranks.values()), default=None)


def _named_as_last(run: Path, inside: Sequence[Path]) -> Path | None:
    """The checkpoint that a file such as `latest` names; None if there is no such file, or it cannot be read."""
    try:
        return named_by_pointer(run, list(inside))
    except CkptError:
        return None


def _meant(run: Path, inside: Sequence[Path]) -> Path | None:
    """The checkpoint that is read if the folder is named; None if commands refuse it."""
    try:
        checkpoint = open_checkpoint(run)
    except CkptError:
        return None
    files = [file.path for file in checkpoint.files]
    return next((path for path in inside if any(file == path or path in file.parents for file in files)), None)
