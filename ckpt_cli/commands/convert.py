"""`ckpt convert`: write a checkpoint again in another format."""

from typing import TYPE_CHECKING

from ckpt_cli.options.combine import converted_experts
from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.resize import resized
from ckpt_cli.options.source import edits, renames, source
from ckpt_cli.options.target import target

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_cli.options.target import Target
    from ckpt_formats.core.checkpoint import Checkpoint


@command("convert")
@source("source", accept_suspicious=True)
@target("universal")
@resized
@edits
@renames
@converted_experts
@dry_run
@resources(scales_out=True)
def convert(source: "Checkpoint", target: "Target", dry_run: bool, resources: "Execution", as_json: bool) -> None:
    from ckpt.job import Job
    from ckpt_cli.views import job

    work = Job(source, target.path, target.format("universal"), target.overwrite)
    job.write("converting", work, dry_run, resources, as_json, target)
