"""`ckpt repair`: repair files by their parity."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution


@command("repair")
@click.argument("path", type=CheckpointPath())
@click.option(
    "--from",
    "others",
    type=CheckpointPath(),
    multiple=True,
    metavar="OTHER",
    help="Folder or URL with copies of the files, perhaps older ones, for what parity cannot replace.",
)
@click.option(
    "--parity",
    type=click.Path(file_okay=False, readable=False),
    multiple=True,
    metavar="FOLDER",
    help="The folders of --into, if they are not where they were.",
)
@dry_run
@resources(locks=False)
def repair(
    path: str,
    others: tuple[str, ...],
    parity: tuple[str, ...],
    dry_run: bool,
    resources: "Execution",
    as_json: bool,
) -> None:
    from pathlib import Path

    from ckpt_cli.views.protect import repair

    if not repair(path, others, tuple(map(Path, parity)), dry_run, resources, as_json):
        raise SystemExit(20)
