"""`ckpt watch`: store each new checkpoint of a run in a chain, or copy it, and prune the run."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options.chain import bases
from ckpt_cli.options.command import command, resources
from ckpt_cli.options.delta import delta_policy
from ckpt_cli.options.source import read_options
from ckpt_cli.options.types import CheckpointPath
from ckpt_cli.options.watch import watch_options

if TYPE_CHECKING:
    from ckpt.chains.write import DeltaPolicy
    from ckpt.pipeline import Execution
    from ckpt_cli.options.watch import WatchOptions
    from ckpt_formats.core.format import ReadOptions


@command("watch")
@click.argument("run", type=CheckpointPath())
@click.argument("target", type=CheckpointPath())
@watch_options
@delta_policy
@bases
@read_options
@resources()
def watch(
    run: str,
    target: str,
    given: "WatchOptions",
    policy: "DeltaPolicy",
    options: "ReadOptions",
    resources: "Execution",
    as_json: bool,
) -> None:
    from ckpt_cli.views.watch import watch_run

    watch_run(run, target, given, policy, options, resources, as_json)
