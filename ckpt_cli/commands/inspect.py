"""`ckpt inspect`: what a checkpoint is, without reading its tensors."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command
from ckpt_cli.options.source import checkpoints_inside, opening, read_options
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt_formats.core.format import ReadOptions


@command("inspect")
@click.argument("path", type=CheckpointPath())
@click.option("--depth", type=click.IntRange(1), default=None, help="Fold the tree of names below this depth.")
@click.option("--extras", is_flag=True, help="Show all extras in full, not only their names.")
@read_options
def inspect(path: str, depth: int | None, extras: bool, options: "ReadOptions", as_json: bool) -> None:
    from ckpt_cli.views import inspect

    if inside := checkpoints_inside(path):
        inspect.print_all(path, inside, options, as_json)
    elif as_json:
        inspect.print_json(opening(path, options)())
    else:
        inspect.print_text(opening(path, options)(), depth, extras)
