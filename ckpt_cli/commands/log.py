"""`ckpt log`: what a chain holds."""

import click

from ckpt_cli.options.command import command
from ckpt_cli.options.types import CheckpointPath


@command("log")
@click.argument("chain", type=CheckpointPath())
def log(chain: str, as_json: bool) -> None:
    from ckpt_cli.views.chain_log import show_log
    from ckpt_formats.stores.location import source_path

    show_log(source_path(chain), as_json)
