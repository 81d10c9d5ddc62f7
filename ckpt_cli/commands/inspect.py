"""`ckpt inspect`: what checkpoints are, without reading their tensors."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, html
from ckpt_cli.options.source import chosen, listed, only, opening, read_options, skip, with_checkpoints_inside
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt_formats.core.format import ReadOptions


@command("inspect")
@click.argument("paths", type=CheckpointPath(), nargs=-1, required=True, metavar="PATH...")
@click.option("--depth", type=click.IntRange(1), default=None, help="Fold the tree of names below this depth.")
@click.option("--extras", is_flag=True, help="Show all extras in full, not only their names.")
@only
@skip
@read_options
@html
def inspect(
    paths: tuple[str, ...],
    depth: int | None,
    extras: bool,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    options: "ReadOptions",
    html: str | None,
    as_json: bool,
) -> None:
    from ckpt_cli.views import checkpoints, inspect

    target = None if html is None else Path(html)
    if len(paths) > 1:
        code = checkpoints.show_several(listed(paths, options, only, skip), as_json, target)
        if code:
            raise SystemExit(code)
        return
    place, inside = with_checkpoints_inside(paths[0])
    if inside:
        if only or skip:
            raise click.UsageError("--only and --skip are about one checkpoint: name one of those in the folder.")
        checkpoints.show_run(Path(place) if isinstance(place, str) else place, inside, options, as_json, target)
        return
    checkpoint = chosen(opening(place, options)(), only, skip)
    inspect.note_lack_of_index(checkpoint)
    if target is not None:
        from ckpt_cli.views.inspect_page import write_page

        write_page(checkpoint, target)
    if as_json:
        inspect.print_json(checkpoint, place)
    else:
        inspect.print_text(checkpoint, depth, extras)
