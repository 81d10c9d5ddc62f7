"""`ckpt decompress`: a compressed checkpoint as it was before."""

from typing import TYPE_CHECKING

from ckpt_cli.options.command import command, dry_run, resources
from ckpt_cli.options.source import source
from ckpt_cli.options.target import target

if TYPE_CHECKING:
    from ckpt.pipeline import Execution
    from ckpt_cli.options.target import Target
    from ckpt_formats.core.checkpoint import Checkpoint


@command("decompress")
@source("source")
@target("the original one")
@dry_run
@resources(scales_out=True)
def decompress(source: "Checkpoint", target: "Target", dry_run: bool, resources: "Execution", as_json: bool) -> None:
    from ckpt.job import Job
    from ckpt.original import original_format, original_path
    from ckpt_cli import notes
    from ckpt_cli.views import job

    format, notices = original_format(source, target.path, target.format_name)
    target.note_ending(format.name)
    place = original_path(source, target.path, format, target.format_name)
    work = Job(source, place, target.with_options(format), target.overwrite)
    notes.note(*notices)
    job.write("decompressing", work, dry_run, resources, as_json, target)
