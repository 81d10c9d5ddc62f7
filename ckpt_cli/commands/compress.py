"""`ckpt compress`: write a checkpoint again, smaller, without losing a bit."""

from typing import TYPE_CHECKING, Any

import click

from ckpt_cli.options.command import command, resources
from ckpt_cli.options.encoding import encoding
from ckpt_cli.options.source import parts, source
from ckpt_cli.options.target import overwriting
from ckpt_cli.options.types import CheckpointPath

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_formats.core.checkpoint import Checkpoint


@command("compress")
@source("source", accept_suspicious=True)
@click.argument("target", type=CheckpointPath())
@parts
@encoding
@click.option("--dry-run", is_flag=True, help="Estimate the savings from some chunks, write nothing.")
@overwriting
@resources(scales_out=True)
def compress(
    source: "Checkpoint",
    target: str,
    encoding: dict[str, Any],
    dry_run: bool,
    overwrite: bool,
    resources: "Execution",
    as_json: bool,
) -> None:
    from ckpt.job import Job
    from ckpt_cli.views import compress, job
    from ckpt_formats.universal import Universal

    place, notices = compress.target_of(source, target)
    work = Job(source, place, Universal(**encoding), overwrite)
    if dry_run:
        compress.show_estimate(work, as_json, notices)
    else:
        compress.show_result(job.run("compressing", work, resources, notices), as_json)
