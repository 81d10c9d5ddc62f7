"""`ckpt compact`: fewer states in a chain, and fewer deltas to replay."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_cli.options.chain import base_every, retention
from ckpt_cli.options.command import command, resources
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution


@command("compact")
@click.argument("chain", type=CheckpointPath())
@retention
@base_every
@click.option("--dry-run", is_flag=True, help="Show what would happen to each state, write nothing.")
@resources()
def compact(
    chain: str, retention: Any, base_every: int | None, dry_run: bool, resources: "Execution", as_json: bool
) -> None:
    from ckpt.chains.compact import plan
    from ckpt.chains.write import DeltaPolicy
    from ckpt_cli.views.compact import run, show_plan
    from ckpt_formats.stores.location import target_path
    from ckpt_formats.universal.chain import chain_file

    policy, path = DeltaPolicy(base_every=base_every), target_path(chain)
    if dry_run:
        index = chain_file.read(path)
        show_plan(path, index, plan(path, index, retention, policy), as_json)
        return
    run(path, retention, policy, resources, as_json)
