"""`ckpt publish`: the weights of a checkpoint as the next step of a published chain."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, resources
from ckpt_cli.options.publish import publish_options
from ckpt_cli.options.source import opening, read_options
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_cli.options.publish import PublishOptions
    from ckpt_formats.core.format import ReadOptions


@command("publish")
@click.argument("checkpoint", type=CheckpointPath(), metavar="CKPT")
@click.argument("chain", type=CheckpointPath())
@publish_options
@read_options
@resources()
def publish(
    checkpoint: str,
    chain: str,
    given: "PublishOptions",
    options: "ReadOptions",
    resources: "Execution",
    as_json: bool,
) -> None:
    from ckpt_cli.views import publish

    if given.every is not None:
        publish.watch(checkpoint, chain, given, options, resources, as_json)
        return
    before = None if given.before is None else opening(given.before, options)()
    publish.publish_one(opening(checkpoint, options)(), chain, given, before, resources, as_json)
