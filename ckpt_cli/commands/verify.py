"""`ckpt verify`: is a checkpoint complete and undamaged?"""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, resources
from ckpt_cli.options.source import only, opening, places_of, read_options, skip
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_formats.core.format import ReadOptions


@command("verify")
@click.argument("paths", type=CheckpointPath(), nargs=-1, required=True, metavar="PATH...")
@click.option("--all", "every", is_flag=True, help="Verify all checkpoints in the folder of a run, not only the last.")
@click.option("--replay", is_flag=True, help="Repeat all logged steps of a chain, and compare with the run.")
@click.option("--quick", is_flag=True, help="Check only what the headers of the files say; read no tensor.")
@click.option("--values", is_flag=True, help="Read all values for NaN and zeros, also without checksums.")
@only
@skip
@resources(locks=False)
@read_options
def verify(
    paths: tuple[str, ...],
    every: bool,
    replay: bool,
    quick: bool,
    values: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    resources: "Execution",
    options: "ReadOptions",
    as_json: bool,
) -> None:
    from ckpt_cli.views.verify import How, verify_each

    if quick and replay:
        raise click.UsageError("--quick reads headers only, and --replay repeats all steps: give one of them.")
    if values and (quick or replay):
        raise click.UsageError("--values reads all values of one checkpoint: leave --quick and --replay out.")
    if replay and (only or skip):
        raise click.UsageError("--replay repeats steps of all parameters: leave --only and --skip out.")
    checkpoints = [(place, opening(place, options)) for place in places_of(paths, every)]
    if not verify_each(checkpoints, resources, How(replay, quick, values, only, skip), as_json):
        raise SystemExit(20)
