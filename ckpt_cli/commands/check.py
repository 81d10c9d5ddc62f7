"""`ckpt check`: does a checkpoint fit a model?"""

from typing import TYPE_CHECKING, Any

import click

from ckpt_cli.options.check import model_option
from ckpt_cli.options.command import command
from ckpt_cli.options.source import Choice, choosing, source

if TYPE_CHECKING:
    from ckpt_formats.core.checkpoint import Checkpoint


@command("check")
@model_option
@click.option("--top", type=click.IntRange(0), default=20, show_default=True, help="Names to show; 0 shows all.")
@choosing
@source("checkpoint")
def check(
    checkpoint: "Checkpoint",
    like: str,
    model: Any,
    top: int,
    choice: Choice,
    as_json: bool,
) -> None:
    from ckpt_cli.views import check

    if not check.show(choice.of(checkpoint), like, model, top, as_json):
        click.get_current_context().exit(1)
