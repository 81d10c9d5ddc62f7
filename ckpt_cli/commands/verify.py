"""`ckpt verify`: is a checkpoint complete and undamaged?"""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, resources
from ckpt_cli.options.source import opening, place_of, read_options
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Resources
    from ckpt_formats.core.format import ReadOptions


@command("verify")
@click.argument("path", type=CheckpointPath())
@click.option("--replay", is_flag=True, help="Repeat all logged steps of a chain, and compare with the run.")
@resources(locks=False)
@read_options
def verify(path: str, replay: bool, resources: "Resources", options: "ReadOptions", as_json: bool) -> None:
    from ckpt_cli.views.verify import verify

    place = place_of(path)
    if not verify(place, opening(place, options), resources, replay, as_json):
        raise SystemExit(20)
