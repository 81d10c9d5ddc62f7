"""`ckpt inspect`: what a checkpoint is, without reading its tensors."""

import click

from ckpt_cli.options import CheckpointPath, PathsCommand, SourceOptions, as_json, common, reading


@click.command(cls=PathsCommand)
@click.argument("path", type=CheckpointPath())
@click.option("--depth", type=click.IntRange(1), default=None, help="Fold the tree of names below this depth.")
@click.option("--extras", is_flag=True, help="Show all extras in full, not only their names.")
@reading
@as_json
@common
def inspect(path: str, depth: int | None, extras: bool, reading: SourceOptions, as_json: bool) -> None:
    """Show what the checkpoint at PATH is: engine, layout, step, parameters, optimizer, extras.

    Only headers are read, so it takes no longer on terabytes.

    \b
    Examples:
      ckpt inspect run/global_step1000
      ckpt inspect run --depth 2
      ckpt inspect run --json | jq '.parameters[].name'
    """
    from ckpt_cli import notes, work
    from ckpt_cli.views import inspect as picture

    checkpoint = work.open_source(path, reading)
    notes.note(*checkpoint.notices)
    if as_json:
        picture.print_json(checkpoint)
    else:
        picture.print_text(checkpoint, depth, extras)
