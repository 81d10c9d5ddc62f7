"""`ckpt reshard`: write a checkpoint again for another number of ranks."""

import click

from ckpt_cli.options import (
    CheckpointPath,
    LayoutOptions,
    PathsCommand,
    SourceOptions,
    accept_suspicious,
    as_json,
    common,
    cut,
    effort,
    no_lock,
    reading,
    target_format,
)


@click.command(cls=PathsCommand)
@click.argument("source", type=CheckpointPath())
@click.argument("target", type=CheckpointPath())
@cut
@target_format(None, "  [default: the source's own]")
@click.option("--dry-run", is_flag=True, help="Check everything and show the plan for each rank, write nothing.")
@accept_suspicious
@effort
@no_lock
@reading
@as_json
@common
def reshard(
    source: str,
    target: str,
    cut: LayoutOptions,
    format_name: str | None,
    dry_run: bool,
    accept_suspicious: bool,
    workers: int | None,
    memory: int,
    no_lock: bool,
    reading: SourceOptions,
    as_json: bool,
) -> None:
    """Write the checkpoint SOURCE again as TARGET, for another number of ranks or ZeRO stage.

    The optimizer comes along, bit for bit. What is not given stays as the source
    has it. The engine loads the result like one of its own. As with convert,
    everything is checked first, and an interrupted run can be continued.

    \b
    Examples:
      ckpt reshard run resumed --dp 4
      ckpt reshard run/global_step1000 resumed --dp 8 --zero 3 --dry-run
      ckpt reshard step1000 resumed --to deepspeed --dp 2 --zero 1
      ckpt reshard megatron/iter_0001000 resumed --tp 4 --pp 2 --vpp 2
    """
    from pathlib import Path

    from ckpt import pipeline
    from ckpt import rename as renaming
    from ckpt_cli import notes, work
    from ckpt_cli.views import inspect as picture
    from ckpt_cli.views import report
    from ckpt_formats.registry import detect, writable

    format = writable(format_name or detect(Path(source)).name)
    checkpoint = renaming.renamed(work.open_source(source, reading, accept_suspicious), None, format.name)
    goal = work.goal_of(target, cut, reading)
    work.check_degrees(format, goal.degrees)
    notes.note(*checkpoint.notices)
    if dry_run:
        parts = pipeline.plan(checkpoint, format, goal)
        report.note_losses(format, checkpoint, parts)
        picture.print_ranks(checkpoint, parts, goal.target, format.name, as_json)
        return
    effort = work.effort_of(workers, memory, no_lock)
    work.run(checkpoint, format, goal, work.choices(reading), effort, "resharding", as_json)
