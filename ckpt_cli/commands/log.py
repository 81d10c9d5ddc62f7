"""`ckpt log`: what a chain holds."""

import click

from ckpt_cli.options.command import command
from ckpt_cli.options.types import CheckpointPath


@command("log")
@click.argument("chain", type=CheckpointPath())
def log(chain: str, as_json: bool) -> None:
    from pathlib import Path

    from ckpt_cli.views.chain_log import show_log

    show_log(Path(chain), as_json)
