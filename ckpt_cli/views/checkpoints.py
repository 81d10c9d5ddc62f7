"""The checkpoints in the folder of a run: a row for each, the newest last."""

from dataclasses import dataclass
from pathlib import Path

import click

from ckpt.findings import problems_of_headers
from ckpt_cli.progress import doing
from ckpt_cli.views import columns
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.registry.location import locate
from ckpt_formats.registry.opening import open_checkpoint


@dataclass(frozen=True)
class Row:
    """What is known of one checkpoint from its headers."""

    path: Path
    format: str | None = None
    step: int | None = None
    nbytes: int | None = None
    problem: str | None = None
    """Why it is not whole; None if its headers agree."""


def show_checkpoints(run: Path, inside: list[Path], options: ReadOptions, as_json: bool) -> None:
    """Print all checkpoints in a folder, and which of them its path alone means."""
    with doing(f"reading the headers of {len(inside)} checkpoints"):
        rows = [_row(path, options) for path in inside]
        meant = _meant(run, inside)
    if as_json:
        checkpoints = [
            {
                "name": row.path.name,
                "path": str(row.path),
                "format": row.format,
                "step": row.step,
                "nbytes": row.nbytes,
                "whole": row.problem is None,
                "problem": row.problem,
            }
            for row in rows
        ]
        data({"path": str(run), "checkpoints": checkpoints, "meant": None if meant is None else meant.name})
        return
    click.echo(f"{printable(str(run))}: {len(rows)} checkpoints")
    cells = [
        (
            printable(row.path.name),
            "-" if row.step is None else str(row.step),
            "-" if row.nbytes is None else format_nbytes(row.nbytes),
            row.format or "-",
            "whole" if row.problem is None else f"not whole: {printable(row.problem)}",
        )
        for row in rows
    ]
    columns.show(columns.table(("name", "step", "size", "format", "headers"), cells, right=(1, 2), breaks=(4,)))
    if meant is None:
        conclude("no file says which one is the last: commands need the path of one of them")
    else:
        conclude(f"commands read {printable(meant.name)} if the folder is named")


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


def _meant(run: Path, inside: list[Path]) -> Path | None:
    """The checkpoint that is read if the folder is named; None if commands refuse it."""
    try:
        checkpoint = open_checkpoint(run)
    except CkptError:
        return None
    files = [file.path for file in checkpoint.files]
    return next((path for path in inside if any(file == path or path in file.parents for file in files)), None)
