"""`ckpt seal`: write checksums of a checkpoint beside it, which are compared ever after."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution


@command("seal")
@click.argument("path", type=CheckpointPath(), metavar="CKPT")
@dry_run
@resources(locks=False)
def seal(path: str, dry_run: bool, resources: "Execution", as_json: bool) -> None:
    from ckpt.copying.sealing import plan_seal
    from ckpt_cli.views.seal import seal, show_plan

    plan = plan_seal(path)
    if dry_run:
        show_plan(plan, as_json)
    else:
        seal(plan, resources, as_json)
