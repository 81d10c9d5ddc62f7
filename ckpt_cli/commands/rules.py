"""`ckpt rules`: how each parameter is sharded over ranks, and which rule states it."""

from typing import TYPE_CHECKING

from ckpt_cli.options.command import command
from ckpt_cli.options.source import Choice, choosing, source

if TYPE_CHECKING:
    from ckpt_formats.core.checkpoint import Checkpoint


@command("rules")
@choosing
@source("path")
def rules(path: "Checkpoint", choice: Choice, as_json: bool) -> None:
    from ckpt_cli.views.rules import show_rules

    show_rules(choice.of(path), as_json)
