"""`ckpt shadow`: the state of a recorded run in memory, while the run goes on."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, resources
from ckpt_cli.options.shadow import shadow_options
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_cli.options.shadow import ShadowOptions


@command("shadow")
@click.argument("chain", type=CheckpointPath())
@shadow_options
@resources(locks=False)
def shadow(chain: str, options: "ShadowOptions", resources: "Execution", as_json: bool) -> None:
    from ckpt_cli.views import shadow

    if options.once:
        shadow.follow_once(chain, options, resources, as_json)
    else:
        shadow.follow(chain, options, resources, as_json)
