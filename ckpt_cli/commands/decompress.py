"""`ckpt decompress`: a compressed checkpoint as it was before."""

import click

from ckpt_cli.options import (
    CheckpointPath,
    PathsCommand,
    SourceOptions,
    as_json,
    common,
    effort,
    no_lock,
    reading,
    target_format,
)


@click.command(cls=PathsCommand)
@click.argument("source", type=CheckpointPath())
@click.argument("target", type=CheckpointPath())
@target_format(None, "  [default: by its ending, .safetensors or .pt; else the one that it was in]")
@effort
@no_lock
@reading
@as_json
@common
def decompress(
    source: str,
    target: str,
    format_name: str | None,
    workers: int | None,
    memory: int,
    no_lock: bool,
    reading: SourceOptions,
    as_json: bool,
) -> None:
    """Write the compressed checkpoint SOURCE as TARGET, as it was before.

    It has the format that was compressed, and a file of torch.save the same
    keys in the same order. If that was a single file, TARGET may be a folder
    that exists, and the file gets its old name. No command needs its source
    decompressed first; `ckpt convert` has more options.

    \b
    Examples:
      ckpt decompress step1000.small step1000
      ckpt decompress model.small model.safetensors
      ckpt decompress step1000.small step1000.pt
    """
    from pathlib import Path

    from ckpt_cli import notes, work
    from ckpt_cli.views import compress as compression

    checkpoint = work.open_source(source, reading)
    notes.note(*checkpoint.notices)
    format, goal = compression.undo(checkpoint, Path(target), format_name)
    effort = work.effort_of(workers, memory, no_lock)
    work.run(checkpoint, format, goal, work.choices(reading), effort, "decompressing", as_json)
