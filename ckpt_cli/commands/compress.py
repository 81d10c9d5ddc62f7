"""`ckpt compress`: write a checkpoint again, smaller, without losing a bit."""

import click

from ckpt_cli.options import (
    CheckpointPath,
    PathsCommand,
    SourceOptions,
    accept_suspicious,
    as_json,
    common,
    effort,
    no_lock,
    reading,
)
from ckpt_formats.core.encoding import LEVELS


@click.command(cls=PathsCommand)
@click.argument("source", type=CheckpointPath())
@click.argument("target", type=CheckpointPath())
@click.option(
    "--codec",
    default="auto",
    show_default=True,
    metavar="NAME[:OPTION=VALUE,...]",
    help="One codec for all states that it can hold, instead of the best for each.",
)
@click.option(
    "--level",
    type=click.Choice(list(LEVELS)),
    default="default",
    show_default=True,
    help="How hard to try. max takes up to twice as long: floats, mostly noise, become some per mille smaller.",
)
@click.option("--no-check", is_flag=True, help="Do not decode again, and compare, what was encoded.")
@click.option("--dry-run", is_flag=True, help="Estimate the savings from some chunks, write nothing.")
@accept_suspicious
@effort
@no_lock
@reading
@as_json
@common
def compress(
    source: str,
    target: str,
    codec: str,
    level: str,
    no_check: bool,
    dry_run: bool,
    accept_suspicious: bool,
    workers: int | None,
    memory: int,
    no_lock: bool,
    reading: SourceOptions,
    as_json: bool,
) -> None:
    """Write the checkpoint SOURCE as a compressed universal checkpoint TARGET, a folder.

    SOURCE is any checkpoint that can be read, also a single .safetensors or .pt
    file. Nothing is lost: every tensor comes back bit for bit, and what was
    encoded is decoded and compared before it is believed. Every command reads
    the result like any other checkpoint; `ckpt decompress` undoes it. A table on
    stdout says what each kind of state takes.

    \b
    Examples:
      ckpt compress run/global_step1000 step1000.small
      ckpt compress model.safetensors model.small --level max
      ckpt compress run/global_step1000 step1000.small --dry-run
    """
    from pathlib import Path

    from ckpt_cli import notes, work
    from ckpt_cli.views import compress as compression
    from ckpt_formats.core.checkpoint import Goal

    checkpoint = work.open_source(source, reading, accept_suspicious)
    notes.note(*checkpoint.notices)
    goal = Goal(Path(target), coding=compression.coding_of(codec, level, not no_check))
    if dry_run:
        compression.foretell(checkpoint, goal, as_json)
        return
    effort = work.effort_of(workers, memory, no_lock)
    compression.run(checkpoint, goal, work.choices(reading), effort, as_json)
