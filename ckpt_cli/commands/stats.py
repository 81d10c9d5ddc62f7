"""`ckpt stats`: figures of the values of a checkpoint."""

from typing import TYPE_CHECKING

from ckpt_cli.options.command import command, resources
from ckpt_cli.options.source import source
from ckpt_cli.options.stats import stats_options

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_cli.options.stats import StatsOptions
    from ckpt_formats.core.checkpoint import Checkpoint


@command("stats")
@stats_options
@source("checkpoint")
@resources(locks=False)
def stats(checkpoint: "Checkpoint", how: "StatsOptions", resources: "Execution", as_json: bool) -> None:
    import click

    from ckpt_cli.views import stats

    if not stats.show(checkpoint, how, resources, as_json):
        click.get_current_context().exit(1)
