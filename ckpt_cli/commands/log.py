"""`ckpt log`: what a chain holds."""

from pathlib import Path

import click

<<<<<<< HEAD
from ckpt_cli.options.command import command
from ckpt_cli.options.source import anonymous, place_of
=======
from ckpt_cli.options.command import command, html
>>>>>>> main
from ckpt_cli.options.types import CheckpointPath


@command("log")
@click.argument("chain", type=CheckpointPath())
<<<<<<< HEAD
@anonymous
def log(chain: str, as_json: bool) -> None:
=======
@html
def log(chain: str, html: str | None, as_json: bool) -> None:
>>>>>>> main
    from ckpt_cli.views.chain_log import show_log

<<<<<<< HEAD
    show_log(place_of(chain), as_json)
=======
    show_log(source_path(chain), as_json, None if html is None else Path(html))
>>>>>>> main
