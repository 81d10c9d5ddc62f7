"""`ckpt prune`: remove the checkpoints of a run that no rule keeps."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, dry_run
from ckpt_cli.options.source import place_of, read_options
from ckpt_cli.options.types import CheckpointPath, DurationType

if TYPE_CHECKING:
    from ckpt_formats.core.format import ReadOptions


@command("prune")
@click.argument("run", type=CheckpointPath())
@click.option(
    "--keep", required=True, metavar="RULES", help="Which checkpoints stay, such as last:3,daily:7,every:1000."
)
@click.option("--incomplete", is_flag=True, help="Also remove incomplete ones older than the newest complete one.")
@click.option(
    "--unchanged-for",
    type=DurationType(),
    default="1m",
    show_default=True,
    help="A checkpoint whose files changed within this time may be unfinished: it stays.",
)
@dry_run
@read_options
def prune(
    run: str, keep: str, incomplete: bool, unchanged_for: float, dry_run: bool, options: "ReadOptions", as_json: bool
) -> None:
    from ckpt_cli.views.prune import prune_run

    prune_run(place_of(run), keep, incomplete, unchanged_for, dry_run, options, as_json)
