"""`ckpt rules`: how each parameter is sharded over ranks, and which rule states it."""

from typing import TYPE_CHECKING

from ckpt_cli.options.command import command
from ckpt_cli.options.source import chosen, only, skip, source

if TYPE_CHECKING:
    from ckpt_formats.core.checkpoint import Checkpoint


@command("rules")
@only
@skip
@source("path")
def rules(path: "Checkpoint", only: tuple[str, ...], skip: tuple[str, ...], as_json: bool) -> None:
    from ckpt_cli.views.rules import show_rules

    show_rules(chosen(path, only, skip), as_json)
