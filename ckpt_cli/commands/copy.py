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
@dry_run
@resources()
def copy(source: str, target: str, everything: bool, dry_run: bool, resources: "Resources", as_json: bool) -> None:
    from ckpt.copying.copy import Copy
    from ckpt_cli.views import copy

    work = Copy(source, target, everything)
    if dry_run:
        copy.show_plan(work, as_json)
    else:
        copy.run(work, resources, as_json)
