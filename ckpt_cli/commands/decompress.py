"""`ckpt decompress`: a compressed checkpoint as it was before."""

import click

from ckpt_cli.options import Reading, as_json, common, effort, reading, target_format


@click.command()
@click.argument("source", type=click.Path(readable=False))
@click.argument("target", type=click.Path(readable=False))
@target_format(None, "  [default: by its ending, .safetensors or .pt; else universal]")
@effort
@reading
@as_json
@common
def decompress(
    source: str,
    target: str,
    format_name: str | None,
    workers: int | None,
    memory: int,
    reading: Reading,
    as_json: bool,
) -> None:
    """Write the compressed checkpoint SOURCE as TARGET, with its values stored as they are.

    The same as `ckpt convert`, which has more options: no command needs its
    source decompressed first.

    \b
    Examples:
      ckpt decompress step1000.small step1000
      ckpt decompress model.small model.safetensors
    """
    from pathlib import Path

    from ckpt_cli import report, work
    from ckpt_formats.base import Goal
    from ckpt_formats.registry import writable

    checkpoint = work.open_source(source, reading)
    report.say_notices(checkpoint)
    suffixes = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch", ".ckpt": "torch"}
    format = writable(format_name or suffixes.get(Path(target).suffix, "universal"))
    effort = work.effort_of(workers, memory)
    work.run(checkpoint, format, Goal(Path(target)), work.choices(reading), effort, "decompressing", as_json)
