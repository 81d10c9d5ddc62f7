"""`ckpt repair`: repair files by their parity."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.protect import repair_options
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_cli.options.protect import RepairOptions


@command("repair")
@click.argument("path", type=CheckpointPath())
@repair_options
@dry_run
@resources(locks=False)
def repair(path: str, options: "RepairOptions", dry_run: bool, resources: "Execution", as_json: bool) -> None:
    from ckpt_cli.views.protect import repair

    if not repair(path, options.others, options.parity, dry_run, resources, as_json):
        raise SystemExit(20)
