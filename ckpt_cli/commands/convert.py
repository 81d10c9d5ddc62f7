"""`ckpt convert`: write a checkpoint again in another format."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.options import (
    NAMINGS,
    CheckpointPath,
    FloatType,
    PathsCommand,
    SizeType,
    SourceOptions,
    accept_suspicious,
    as_json,
    common,
    effort,
    no_lock,
    reading,
    target_format,
)
from ckpt_formats.state_dicts.keys import STYLES

if TYPE_CHECKING:
    from ckpt_formats.names import Naming


@click.command(cls=PathsCommand)
@click.argument("source", type=CheckpointPath())
@click.argument("target", type=CheckpointPath())
@target_format("universal", "")
@click.option("--only", multiple=True, metavar="PATTERN", help="Keep parameters whose names match.")
@click.option("--skip", multiple=True, metavar="PATTERN", help="Leave out parameters whose names match.")
@click.option("--model-only", is_flag=True, help="The model's tensors, without optimizer and extras.")
@click.option(
    "--dtype",
    type=FloatType(),
    metavar="TYPE",
    help="Round the model's weights to fp32, bf16, fp16, ... (states stay).",
)
@click.option(
    "--shard-size",
    type=SizeType(),
    default="5G",
    show_default=True,
    help="Largest file, where a format cuts into several.",
)
@click.option(
    "--config",
    type=click.Path(readable=False),
    help="config.json, or the folder that holds it and the tokenizer, for `hf`.  [default: what the source has]",
)
@click.option(
    "--keys",
    type=click.Choice(list(STYLES)),
    help="How `dcp` keys its state dicts.  [default: as the source has them, else nested]",
)
@click.option(
    "--names",
    type=click.Choice(NAMINGS),
    help="Whose names tensors get.  [default: those that the format needs, else the source's]",
)
@click.option("--dry-run", is_flag=True, help="Check everything and print the plan, write nothing.")
@accept_suspicious
@effort
@no_lock
@reading
@as_json
@common
def convert(
    source: str,
    target: str,
    format_name: str,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    model_only: bool,
    dtype: str | None,
    shard_size: int,
    config: str | None,
    keys: str | None,
    names: "Naming | None",
    dry_run: bool,
    accept_suspicious: bool,
    workers: int | None,
    memory: int,
    no_lock: bool,
    reading: SourceOptions,
    as_json: bool,
) -> None:
    """Write the checkpoint SOURCE again as TARGET, in another format.

    The source is told by its content, and is never changed. Every tensor is
    checked to be whole before anything is written, and the checksums of all that
    is read are checked on the way. TARGET appears only when it is complete; an
    interrupted run goes on where it was when the same command is given again.

    PATTERNs are regular expressions found anywhere in a name of the source.

    Between Megatron and Hugging Face, tensors are renamed, split and joined as
    the other has them, optimizer states too; --to hf does so by itself.

    \b
    Examples:
      ckpt convert run/global_step1000 step1000
      ckpt convert run weights.pt --to torch --dtype bf16 --model-only
      ckpt convert megatron/iter_0001000 model --to hf
      ckpt convert run/global_step1000 hf --to safetensors --skip '\\.bias$' --dry-run
    """
    from pathlib import Path

    from ckpt import pipeline
    from ckpt import rename as renaming
    from ckpt.edits import Edits
    from ckpt_cli import notes, work
    from ckpt_cli.views import report
    from ckpt_formats.core.checkpoint import Goal
    from ckpt_formats.registry import writable

    checkpoint = work.open_source(source, reading, accept_suspicious)
    edits = Edits(only, skip, model_only, dtype, names)
    checkpoint = renaming.edited(checkpoint, edits, format_name, Path(config) if config else None)
    notes.note(*checkpoint.notices)
    format = writable(format_name)
    goal = Goal(
        Path(target),
        shard_nbytes=shard_size,
        config=Path(config) if config else None,
        keys=STYLES[keys] if keys else None,
        partial=bool(only or skip),
    )
    if dry_run:
        parts = pipeline.plan(checkpoint, format, goal)
        report.note_losses(format, checkpoint, parts)
        report.plan(checkpoint, parts, goal.target, format_name, as_json)
        return
    effort = work.effort_of(workers, memory, no_lock)
    work.run(checkpoint, format, goal, work.choices(reading, edits), effort, "converting", as_json)
