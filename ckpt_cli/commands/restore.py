"""`ckpt restore`: the full state of any step of a chain."""

from typing import TYPE_CHECKING

from ckpt_cli.options.chain import chain_state
from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.partial import partial_recovery
from ckpt_cli.options.target import target

if TYPE_CHECKING:
    from ckpt.chains.restore import ChainState
    from ckpt.pipeline import Execution
    from ckpt_cli.options.target import Target


@command("restore")
@chain_state
@partial_recovery
@target("universal")
@dry_run
@resources(scales_out=True)
def restore(state: "ChainState", target: "Target", dry_run: bool, resources: "Execution", as_json: bool) -> None:
    from ckpt_cli.views import restore

    format = target.format("universal")
    if dry_run:
        restore.show_plan(state, target, format, resources, as_json)
    else:
        restore.restore(state, target, format, resources, as_json)
