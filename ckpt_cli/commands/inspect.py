"""`ckpt inspect`: what a checkpoint is, without reading its tensors."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, html
from ckpt_cli.options.source import opening, read_options, with_checkpoints_inside
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt_formats.core.format import ReadOptions


@command("inspect")
@click.argument("path", type=CheckpointPath())
@click.option("--depth", type=click.IntRange(1), default=None, help="Fold the tree of names below this depth.")
@click.option("--extras", is_flag=True, help="Show all extras in full, not only their names.")
@read_options
@html
def inspect(
    path: str, depth: int | None, extras: bool, options: "ReadOptions", html: str | None, as_json: bool
) -> None:
    from ckpt_cli.views import inspect

    place, inside = with_checkpoints_inside(path)
    target = None if html is None else Path(html)
    if inside:
        inspect.print_all(place, inside, options, as_json, target)
        return
    checkpoint = opening(place, options)()
    if target is not None:
        from ckpt_cli.views.inspect_page import write_page

        write_page(checkpoint, target)
    if as_json:
        inspect.print_json(checkpoint)
    else:
        inspect.print_text(checkpoint, depth, extras)
