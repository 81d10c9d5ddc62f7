"""The checkpoints in the folder of a run: a row for each, the newest last."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from ckpt.findings.checks import problems_of_headers
from ckpt_cli.progress import doing
from ckpt_cli.views import columns, page
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.registry.location import locate
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.registry.parents import named_by_pointer


@dataclass(frozen=True)
class Row:
    """What is known of one checkpoint from its headers."""

    path: Path
    format: str | None = None
    step: int | None = None
    nbytes: int | None = None
    problem: str | None = None
    """Why it is not whole; None if its headers agree."""


_SCRIPTS = ("charts", "listing", "run")


def show_checkpoints(run: Path, inside: list[Path], options: ReadOptions, as_json: bool, html: Path | None) -> None:
    """Print all checkpoints in a folder, and which of them its path alone means; with `html`, also write their page."""
    if html is not None:
        page.check_place(html, "inspect")
    with doing(f"reading the headers of {len(inside)} checkpoints"):
        rows = [_row(path, options) for path in inside]
        meant = _meant(run, inside)
        latest = _named_as_last(run, inside)
    newest_whole = next((row.path for row in reversed(rows) if row.problem is None), None)
    facts = {
        "path": str(run),
        "checkpoints": list(map(_to_json, rows)),
        "meant": _name(meant),
        "latest": _name(latest),
        "newest_whole": _name(newest_whole),
    }
    if html is not None:
        page.write(page_of(facts), html, "inspect")
    if as_json:
        data(facts)
        return
    click.echo(f"{printable(str(run))}: {len(rows)} checkpoints")
    cells = [
        (
            printable(row.path.name),
            ", ".join(mark for mark, path in (("latest", latest), ("newest whole", newest_whole)) if path == row.path),
            "-" if row.step is None else str(row.step),
            "-" if row.nbytes is None else format_nbytes(row.nbytes),
            row.format or "-",
            "whole" if row.problem is None else f"not whole: {printable(row.problem)}",
        )
        for row in rows
    ]
    columns.show(columns.table(("name", "", "step", "size", "format", "headers"), cells, right=(2, 3), breaks=(5,)))
    if latest is not None and latest not in (meant, newest_whole):
        else_read = "" if newest_whole is None else f"; the newest whole one is {printable(str(newest_whole))}"
        conclude(f"a file says that {printable(latest.name)} is the last, which is not whole{else_read}")
    elif meant is None:
        conclude("no file says which one is the last: commands need the path of one of them")
    else:
        why = " (a file in it says so)" if meant == latest else ""
        conclude(f'"{printable(str(run))}" means {printable(meant.name)}{why}')


def page_of(facts: Mapping[str, Any]) -> str:
    """The page of a run, of ASCII characters only, from the fields of `--json`."""
    return page.page("inspect", _SCRIPTS, facts, template="run")


def _to_json(row: Row) -> dict[str, Any]:
    return {
        "name": row.path.name,
        "path": str(row.path),
        "format": row.format,
        "step": row.step,
        "nbytes": row.nbytes,
        "whole": row.problem is None,
        "problem": row.problem,
    }


def _name(path: Path | None) -> str | None:
    return None if path is None else path.name


def _row(path: Path, options: ReadOptions) -> Row:
    format = None
    try:
        format = locate(path).format.name
        checkpoint = open_checkpoint(path, options)
        problems = problems_of_headers(checkpoint)
    except CkptError as error:
        return Row(path, format, problem=error.what)
    nbytes = sum(file.nbytes for file in checkpoint.files)
    return Row(path, format, checkpoint.step, nbytes, problems[0].what if problems else None)


def _named_as_last(run: Path, inside: list[Path]) -> Path | None:
    """The checkpoint that a file such as `latest` names; None if there is no such file, or it cannot be read."""
    try:
        return named_by_pointer(run, inside)
    except CkptError:
        return None


def _meant(run: Path, inside: list[Path]) -> Path | None:
    """The checkpoint that is read if the folder is named; None if commands refuse it."""
    try:
        checkpoint = open_checkpoint(run)
    except CkptError:
        return None
    files = [file.path for file in checkpoint.files]
    return next((path for path in inside if any(file == path or path in file.parents for file in files)), None)
