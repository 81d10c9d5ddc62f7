"""`ckpt log`: what a chain holds."""

from pathlib import Path

import click

from ckpt_cli.options.command import command, html
from ckpt_cli.options.source import anonymous, place_of
from ckpt_cli.options.types import CheckpointPath


@command("log")
@click.argument("chain", type=CheckpointPath())
@anonymous
@html
def log(chain: str, html: str | None, as_json: bool) -> None:
    from ckpt_cli.views.chain_log import show_log

    show_log(place_of(chain), as_json, None if html is None else Path(html))
