"""`ckpt plan`: how often to checkpoint, and what failures then cost."""

from typing import Any

import click

from ckpt_cli.options.command import command, html
from ckpt_cli.options.plan import plan_options
from ckpt_cli.options.types import CheckpointPath


@command("plan")
@click.argument("chain", type=CheckpointPath(), required=False)
@html
@plan_options
def plan(chain: str | None, options: Any, as_json: bool) -> None:
    from ckpt_cli.views.plan import show_plan

    show_plan(chain, options, as_json)
