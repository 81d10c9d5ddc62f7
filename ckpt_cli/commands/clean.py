"""`ckpt clean`: remove what an interrupted command left of a target."""

import click

from ckpt_cli.options.command import command
from ckpt_cli.options.types import CheckpointPath


@command("clean")
@click.argument("target", type=CheckpointPath())
def clean(target: str, as_json: bool) -> None:
    from ckpt.pipeline.targets import clean
    from ckpt_cli.views.clean import show_removed
    from ckpt_formats.stores.location import target_path

    show_removed(target, clean(target_path(target)), as_json)
