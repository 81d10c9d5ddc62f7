"""`ckpt copy`: a checkpoint or a chain as it is, between folders and stores."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Resources


@command("copy")
@click.argument("source", type=CheckpointPath())
@click.argument("target", type=CheckpointPath())
@click.option("--all", "everything", is_flag=True, help="Copy also files that are not part of the checkpoint.")
@click.option("--update", is_flag=True, help="Bring TARGET, a copy in a store, to what the chain SOURCE is now.")
@click.option("--follow", is_flag=True, help="Do so again and again, until the run has ended that records into SOURCE.")
@click.option(
    "--every", type=click.FloatRange(min=0.1), default=30.0, show_default=True, help="Seconds from one to the next."
)
@dry_run
@resources()
def copy(
    source: str,
    target: str,
    everything: bool,
    update: bool,
    follow: bool,
    every: float,
    dry_run: bool,
    resources: "Resources",
    as_json: bool,
) -> None:
    from ckpt.copying.copy import Copy
    from ckpt_cli.views import copy

    if update or follow:
        if everything or dry_run:
            raise click.UsageError("--update and --follow take neither --all nor --dry-run")
        copy.update(source, target, every if follow else None, resources, as_json)
        return
    work = Copy(source, target, everything)
    if dry_run:
        copy.show_plan(work, as_json)
    else:
        copy.run(work, resources, as_json)
