"""`ckpt inspect`: what checkpoints are, without reading their tensors."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, html
from ckpt_cli.options.source import Choice, choosing, read_options
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt_formats.core.format import ReadOptions


@command("inspect")
@click.argument("paths", type=CheckpointPath(), nargs=-1, required=True, metavar="CKPT...")
@click.option("--depth", type=click.IntRange(1), default=None, help="Fold the tree of names below this depth.")
@click.option("--extras", is_flag=True, help="Show all extras in full, not only their names.")
@choosing
@read_options
@html
def inspect(
    paths: tuple[str, ...],
    depth: int | None,
    extras: bool,
    choice: Choice,
    options: "ReadOptions",
    html: str | None,
    as_json: bool,
) -> None:
    from ckpt_cli.views.inspect_paths import Shown, show

    code = show(paths, options, choice, Shown(depth, extras, as_json, html))
    if code:
        raise SystemExit(code)
