"""`ckpt verify`: is a checkpoint complete and undamaged?"""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, resources
from ckpt_cli.options.source import opening, places_of, read_options
from ckpt_cli.options.types import CheckpointPath
from ckpt_cli.options.verify import How, thoroughness

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_formats.core.format import ReadOptions


@command("verify")
@click.argument("paths", type=CheckpointPath(), nargs=-1, required=True, metavar="CKPT...")
@click.option("--all", "every", is_flag=True, help="Verify all checkpoints in the folder of a run, not only the last.")
@thoroughness
@resources(locks=False)
@read_options
def verify(
    paths: tuple[str, ...],
    every: bool,
    how: How,
    resources: "Execution",
    options: "ReadOptions",
    as_json: bool,
) -> None:
    from ckpt_cli.views.verify import verify_each

    checkpoints = [(place, opening(place, options)) for place in places_of(paths, every)]
    if code := verify_each(checkpoints, resources, how, as_json):
        raise SystemExit(code)
