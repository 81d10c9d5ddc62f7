"""`ckpt append`: one more state at the end of a chain."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.chain import bases
from ckpt_cli.options.command import command, resources
from ckpt_cli.options.delta import delta_policy, step
from ckpt_cli.options.source import source
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.chains.write import DeltaPolicy
    from ckpt.pipeline import Resources
    from ckpt_formats.core.checkpoint import Checkpoint


@command("append")
@click.argument("chain", type=CheckpointPath())
@delta_policy
@bases
@source("checkpoint")
@step
@click.option(
    "--dry-run", is_flag=True, help="Check everything, estimate from some chunks what it takes, write nothing."
)
@resources()
def append(
    chain: str, checkpoint: "Checkpoint", policy: "DeltaPolicy", step: int | None, dry_run: bool,
    resources: "Resources", as_json: bool,
) -> None:  # fmt: skip
    from pathlib import Path

    from ckpt_cli.views import append

    append.note_warnings(policy, checkpoint)
    if dry_run:
        append.show_plan(Path(chain), checkpoint, step, policy, resources, as_json)
    else:
        append.append(Path(chain), checkpoint, step, policy, resources, as_json)
