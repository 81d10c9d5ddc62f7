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

    from ckpt.protection.protect import plan_protect
    from ckpt_cli.views.protect import protect, show_plan

    if options.by == "state":
        _protect_states(path, options, dry_run, resources, as_json)
        return
    plan = plan_protect(path, **asdict(options))
    if dry_run:
        show_plan(plan, as_json)
    else:
        protect(plan, resources, as_json)


def _protect_states(path: str, options: "ProtectOptions", dry_run: bool, resources: "Execution", as_json: bool) -> None:
    from ckpt.protection.members import plan_members
    from ckpt_cli.views.protect import protect_all_states, show_summary
    from ckpt_formats.stores.location import local_path

    if options.into or options.jump != 1:
        raise click.UsageError(
            "--by state keeps parity in the chain, in groups of its own: leave --into and --jump out."
        )
    chain = local_path(path)
    if dry_run:
        show_summary(plan_members(chain, options.lose, anew=options.overwrite).summary, as_json)
    else:
        protect_all_states(chain, options.lose, options.overwrite, resources, as_json)
