"""`ckpt restore`: the whole state of any step of a chain."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.source import read_options
from ckpt_cli.options.target import target
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Resources
    from ckpt_cli.options.target import Target
    from ckpt_formats.core.format import ReadOptions


@command("restore")
@click.argument("chain", type=CheckpointPath())
@click.option("--step", type=click.IntRange(0, 1 << 62), help="Which state.  [default: the last]")
@target("universal")
@dry_run
@resources()
@read_options
def restore(
    chain: str, step: int | None, target: "Target", dry_run: bool, resources: "Resources",
    options: "ReadOptions", as_json: bool,
) -> None:  # fmt: skip
    from ckpt_cli.views import restore

    state, format = restore.open_state(chain, step, options), target.format("universal")
    if dry_run:
        restore.show_plan(state, target.path, format, as_json)
    else:
        restore.restore(state, target.path, format, resources, as_json)
