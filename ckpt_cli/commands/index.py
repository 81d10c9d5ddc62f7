"""`ckpt index`: write the `.metadata` for files that each rank saved on its own."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.source import rules_option
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_formats.core.layout import Rule


@command("index")
@click.argument("folder", type=CheckpointPath())
@rules_option
@dry_run
@resources(locks=False)
def index(folder: str, rules: "tuple[Rule, ...]", dry_run: bool, resources: "Execution", as_json: bool) -> None:
    from ckpt.copying.rank_index import plan_index
    from ckpt_cli.views.index import write_index

    write_index(plan_index(folder, rules=rules), dry_run, resources, as_json)
