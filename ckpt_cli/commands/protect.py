"""`ckpt protect`: write parity for the files of a checkpoint."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution


@command("protect")
@click.argument("path", type=CheckpointPath())
@click.option(
    "--lose",
    type=click.IntRange(1, 32),
    default=2,
    show_default=True,
    metavar="M",
    help="How many files, or nodes or folders with --by, may be lost.",
)
@click.option(
    "--by",
    default="file",
    show_default=True,
    metavar="WHAT",
    help="What is lost together: file, folder (the first one in a path), or node:N, the files of N ranks.",
)
@click.option(
    "--domains",
    type=click.Path(dir_okay=False, readable=False),
    metavar="FILE",
    help="Table of what is lost together: lines DOMAIN PATTERN, of which the first that matches a file counts.",
)
@click.option(
    "--into",
    type=click.Path(file_okay=False, readable=False),
    multiple=True,
    metavar="FOLDER",
    help="Keep the parity there; given several times, in turn: on other disks or machines.",
)
@click.option("--overwrite", is_flag=True, help="Replace parity that is there.")
@dry_run
@resources(locks=False)
def protect(
    path: str,
    lose: int,
    by: str,
    domains: str | None,
    into: tuple[str, ...],
    overwrite: bool,
    dry_run: bool,
    resources: "Execution",
    as_json: bool,
) -> None:
    from pathlib import Path

    from ckpt.protection.protect import plan_protect
    from ckpt_cli.views.protect import protect, show_plan

    if domains is not None and by != "file":
        raise click.UsageError("--domains is a table of what is lost together: leave --by out.")
    table, places = None if domains is None else Path(domains), tuple(map(Path, into))
    plan = plan_protect(path, lose, by=by, domains=table, into=places, overwrite=overwrite)
    if dry_run:
        show_plan(plan, as_json)
    else:
        protect(plan, resources, as_json)
