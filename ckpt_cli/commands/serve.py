"""`ckpt serve`: the files of a chain, for readers on other machines."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command
from ckpt_cli.options.shadow import serve_options
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt_cli.options.shadow import ListenOptions


@command("serve")
@click.argument("chain", type=CheckpointPath())
@serve_options
def serve(chain: str, options: "ListenOptions", as_json: bool) -> None:
    from ckpt_cli.views import serve

    serve.serve(chain, options, as_json)
