"""`ckpt restore`: the whole state of any step of a chain."""

import click

from ckpt_cli.options import (
    CheckpointPath,
    LayoutOptions,
    PathsCommand,
    SourceOptions,
    as_json,
    common,
    cut,
    effort,
    no_lock,
    reading,
    target_format,
)


@click.command(cls=PathsCommand)
@click.argument("chain", type=CheckpointPath())
@click.argument("target", type=CheckpointPath())
@click.option("--step", type=click.IntRange(0, 1 << 62), help="Which state.  [default: the last]")
@target_format("universal", "")
@cut
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan, write nothing.")
@effort
@no_lock
@reading
@as_json
@common
def restore(
    chain: str,
    target: str,
    step: int | None,
    format_name: str,
    cut: LayoutOptions,
    dry_run: bool,
    workers: int | None,
    memory: int,
    no_lock: bool,
    reading: SourceOptions,
    as_json: bool,
) -> None:
    """Write a state of CHAIN as TARGET: the whole checkpoint, in any format and layout.

    CHAIN may also be a delta on its own. Deltas are replayed chunk by chunk, each
    stored byte read once; every chunk and every state is held against its checksum,
    and nothing is published that does not fit. If a delta is damaged, the states
    before it can still be restored: the message says which.

    \b
    Examples:
      ckpt restore run.chain step2000
      ckpt restore run.chain resumed --step 1500 --to deepspeed --dp 4 --zero 3
      ckpt restore run.chain for-dcp --to dcp
    """
    from pathlib import Path

    from ckpt import pipeline
    from ckpt.chains import restore as restoring
    from ckpt_cli import notes, work
    from ckpt_cli.views import report
    from ckpt_formats.registry import writable

    format = writable(format_name)
    goal = work.goal_of(target, cut, reading)
    work.check_degrees(format, goal.degrees)
    state = restoring.open_step(Path(chain), step, work.options_of(reading))
    notes.note(*state.checkpoint.notices)
    if dry_run:
        parts = pipeline.plan(state.checkpoint, format, goal)
        report.note_losses(format, state.checkpoint, parts)
        restoring.note_detour(state.checkpoint, format)
        report.plan(state.checkpoint, parts, goal.target, format.name, as_json)
        return
    effort = work.effort_of(workers, memory, no_lock)
    outcome, seconds = restoring.write(state, format, goal, work.choices(reading), effort)
    report.outcome(outcome, seconds, as_json)
    restoring.say_exactness(state.checkpoint)
