"""`ckpt follow`: the last step of a published chain in a folder, while the run goes on."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, resources
from ckpt_cli.options.follow import follow_options
from ckpt_cli.options.types import CheckpointPath, LocalTarget

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_cli.options.follow import FollowOptions


@command("follow")
@click.argument("chain", type=CheckpointPath())
@click.argument("target", type=LocalTarget(path_type=Path))
@follow_options
@resources(locks=False)
def follow(chain: str, target: Path, options: "FollowOptions", resources: "Execution", as_json: bool) -> None:
    from ckpt_cli.views import follow

    if options.once:
        follow.follow_once(chain, target, options, resources, as_json)
    else:
        follow.follow(chain, target, options, resources, as_json)
