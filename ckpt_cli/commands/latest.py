"""`ckpt latest`: the newest whole checkpoint of a run."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command
from ckpt_cli.options.source import is_anonymous, read_options
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt_formats.core.format import ReadOptions


@command("latest")
@click.argument("run", type=CheckpointPath())
@click.option("--verify", is_flag=True, help="Also read each checkpoint in full, and pass over damaged ones.")
@read_options
def latest(run: str, verify: bool, options: "ReadOptions", as_json: bool) -> None:
    from ckpt_cli.views.latest import show_latest

    show_latest(run, verify, options, is_anonymous(), as_json)
