"""`ckpt rules`: how each parameter is sharded over ranks, and which rule states it."""

from typing import TYPE_CHECKING

from ckpt_cli.options.command import command
from ckpt_cli.options.source import source

if TYPE_CHECKING:
    from ckpt_formats.core.checkpoint import Checkpoint


@command("rules")
@source("path")
def rules(path: "Checkpoint", as_json: bool) -> None:
    from ckpt_cli.views.rules import show_rules

    show_rules(path, as_json)
