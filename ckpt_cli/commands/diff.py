"""`ckpt diff`: what changed between two checkpoints."""

from typing import TYPE_CHECKING, Any

from ckpt_cli.options.command import command, resources
from ckpt_cli.options.delta import delta_file
from ckpt_cli.options.report import report_options
from ckpt_cli.options.source import source

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_formats.core.checkpoint import Checkpoint


@command("diff")
@report_options
@delta_file
@source("first", "second")
@resources(writes=False)
def diff(
    first: "Checkpoint", second: "Checkpoint", report: Any, delta: Any, resources: "Execution", as_json: bool
) -> None:
    import click

    from ckpt_cli.views import append, diff

    if delta is not None:
        append.write_delta(first, second, delta, resources, as_json)
    elif not diff.show(first, second, report, resources, as_json):
        click.get_current_context().exit(1)
