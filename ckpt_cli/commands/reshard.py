"""`ckpt reshard`: write a checkpoint again for another number of ranks."""

from typing import TYPE_CHECKING

from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.resize import resized
from ckpt_cli.options.source import renames, source
from ckpt_cli.options.target import target

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_cli.options.target import Target
    from ckpt_formats.core.checkpoint import Checkpoint


@command("reshard")
@source("source", accept_suspicious=True)
@target("the source's own")
@resized
@renames
@dry_run
@resources(scales_out=True)
def reshard(source: "Checkpoint", target: "Target", dry_run: bool, resources: "Execution", as_json: bool) -> None:
    from ckpt.job import Job
    from ckpt_cli.views import inspect, job
    from ckpt_formats.registry.location import detect

    work = Job(source, target.path, target.format(detect(source.path).name), target.overwrite)
    if dry_run:
        plan = job.planned(work)
        job.note_plan(plan, work.format.name)
        inspect.print_ranks(work.source, plan.files, target.path, work.format.name, as_json)
    else:
        afterwards = job.Afterwards(resources, target.seal, target.protect)
        job.show_result(job.run("resharding", work, resources), as_json, afterwards=afterwards)
