"""`ckpt inspect`: what a checkpoint is, without reading its tensors."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, html
from ckpt_cli.options.source import source

if TYPE_CHECKING:
    from ckpt_formats.core.checkpoint import Checkpoint


@command("inspect")
@source("path")
@click.option("--depth", type=click.IntRange(1), default=None, help="Fold the tree of names below this depth.")
@click.option("--extras", is_flag=True, help="Show all extras in full, not only their names.")
@html
def inspect(path: "Checkpoint", depth: int | None, extras: bool, html: str | None, as_json: bool) -> None:
    from ckpt_cli.views import inspect

    if html is not None:
        from ckpt_cli.views.inspect_page import write_page

        write_page(path, Path(html))
    if as_json:
        inspect.print_json(path)
    else:
        inspect.print_text(path, depth, extras)
