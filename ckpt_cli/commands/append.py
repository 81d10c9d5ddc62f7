"""`ckpt append`: one more state at the end of a chain, or one more model in a family."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.chain import bases
from ckpt_cli.options.command import command, resources
from ckpt_cli.options.delta import append_options, delta_policy
from ckpt_cli.options.source import is_family, source
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_cli.options.delta import AppendOptions
    from ckpt_formats.core.checkpoint import Checkpoint


@command("append")
@click.argument("chain", type=CheckpointPath())
@delta_policy
@bases
@source("checkpoints", several="CKPT...", states=False)
@append_options
@resources()
def append(
    chain: str,
    checkpoints: "tuple[Checkpoint, ...]",
    options: "AppendOptions",
    resources: "Execution",
    as_json: bool,
) -> None:
    from ckpt_formats.stores.location import target_path

    place = target_path(chain)
    if options.family or options.name is not None or is_family(place):
        from ckpt_cli.views import append_family

        append_family.run(place, checkpoints, options, resources, as_json)
    else:
        from ckpt_cli.views import append

        append.run(place, checkpoints, options, resources, as_json)
