"""`ckpt protect`: write parity for the files of a checkpoint."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.protect import protect_options
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_cli.options.protect import ProtectOptions


@command("protect")
@click.argument("path", type=CheckpointPath())
@protect_options
@dry_run
@resources(locks=False)
def protect(path: str, options: "ProtectOptions", dry_run: bool, resources: "Execution", as_json: bool) -> None:
    from dataclasses import asdict

    from ckpt.protection.protect_plan import plan_protect
    from ckpt_cli.views.protect import protect, protect_all_states, show_plan

    if options.by == "state":
        protect_all_states(path, options, dry_run, resources, as_json)
        return
    plan = plan_protect(path, **asdict(options))
    if dry_run:
        show_plan(plan, as_json)
    else:
        protect(plan, resources, as_json)
