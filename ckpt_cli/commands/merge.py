"""`ckpt merge`: one model out of several, by one of the usual methods."""

from typing import TYPE_CHECKING

from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.merge import merged
from ckpt_cli.options.target import target

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_cli.options.target import Target
    from ckpt_formats.core.checkpoint import Checkpoint


@command("merge")
@merged
@target("universal")
@dry_run
@resources(scales_out=True)
def merge(source: "Checkpoint", target: "Target", dry_run: bool, resources: "Execution", as_json: bool) -> None:
    from ckpt.job import Job
    from ckpt_cli.views import job

    work = Job(source, target.path, target.format("universal", source.format))
    job.write("merging", work, dry_run, resources, as_json, target)
