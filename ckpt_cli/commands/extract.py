"""`ckpt extract`: one tensor of a checkpoint, as a file or on the terminal."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, resources
from ckpt_cli.options.source import source
from ckpt_cli.options.types import LocalTarget

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_formats.core.checkpoint import Checkpoint


@command("extract")
@source("checkpoint")
@click.argument("tensor")
@click.argument("target", type=LocalTarget(dir_okay=False), required=False)
@resources(locks=False)
def extract(checkpoint: "Checkpoint", tensor: str, target: str | None, resources: "Execution", as_json: bool) -> None:
    from ckpt_cli.views import extract

    extract.show(checkpoint, tensor, target, resources, as_json)
