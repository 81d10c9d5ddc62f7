"""`ckpt diff`: what changed between two checkpoints, or from one to each of several."""

from typing import TYPE_CHECKING, Any

from ckpt_cli.options.command import command, resources
from ckpt_cli.options.delta import delta_file
from ckpt_cli.options.names import named_alike
from ckpt_cli.options.report import report_options
from ckpt_cli.options.source import source

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckpt.pipeline import Execution
    from ckpt_cli.options.report import ReportOptions
    from ckpt_formats.core.checkpoint import Checkpoint
    from ckpt_formats.core.errors import CkptError


@command("diff")
@report_options
@delta_file
@source("checkpoints", several="FIRST SECOND...", runs=True, goes_on=True)
@named_alike
@resources(writes=False)
def diff(
    checkpoints: "tuple[Checkpoint, ...]",
    unread: "Mapping[str, CkptError]",
    report: "ReportOptions",
    delta: Any,
    resources: "Execution",
    as_json: bool,
) -> None:
    import click

    from ckpt_cli.views import append, diff, diff_table

    exit = click.get_current_context().exit
    is_table = report.is_table(len(checkpoints) + len(unread), delta is not None, as_json)
    if delta is not None:
        append.write_delta(checkpoints[0], checkpoints[1], delta, resources, as_json)
    elif is_table:
        exit(diff_table.show(checkpoints, unread, report, resources, as_json))
    elif not diff.show(checkpoints, report, resources, as_json):
        exit(1)
