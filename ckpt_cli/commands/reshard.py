"""`ckpt reshard`: write a checkpoint again for another number of ranks."""

import click

from ckpt_cli.options import MOST_RANKS, Numbers, Reading, accept_doubts, as_json, common, effort, reading
from ckpt_formats.registry import FORMATS
from ckpt_formats.state_dicts.keys import STYLES


@click.command()
@click.argument("source", type=click.Path(readable=False))
@click.argument("target", type=click.Path(readable=False))
@click.option("--dp", type=click.IntRange(1, MOST_RANKS), help="Data-parallel ranks.")
@click.option(
    "--tp", type=click.IntRange(1, MOST_RANKS), help="Tensor-parallel ranks; the checkpoint's rules must say how."
)
@click.option("--pp", type=click.IntRange(1, MOST_RANKS), help="Pipeline stages.")
@click.option("--vpp", type=click.IntRange(1, MOST_RANKS), help="Model chunks of each pipeline stage.")
@click.option("--stages", type=Numbers(), help="First layer of each pipeline stage, or model chunk, such as 0,4,8.")
@click.option("--ep", type=click.IntRange(1, MOST_RANKS), help="Expert-parallel ranks.")
@click.option("--etp", type=click.IntRange(1, MOST_RANKS), help="Tensor-parallel ranks of each expert.")
@click.option(
    "--vocab-rows",
    type=click.IntRange(1),
    help="Rows of the vocabulary's tables with padding, if the model pads otherwise at the new TP.",
)
@click.option(
    "--zero",
    type=click.IntRange(0, 3),
    help="ZeRO stage; of Megatron, 1 is its distributed optimizer, 0 the plain one.",
)
@click.option("--to", "format_name", type=click.Choice(list(FORMATS)), help="Format.  [default: the source's own]")
@click.option(
    "--keys",
    type=click.Choice(list(STYLES)),
    help="How `dcp` keys its state dicts.  [default: as the source has them, else nested]",
)
@click.option("--dry-run", is_flag=True, help="Check everything and show the plan for each rank, write nothing.")
@accept_doubts
@effort
@reading
@as_json
@common
def reshard(
    source: str,
    target: str,
    dp: int | None,
    tp: int | None,
    pp: int | None,
    vpp: int | None,
    stages: tuple[int, ...] | None,
    ep: int | None,
    etp: int | None,
    vocab_rows: int | None,
    zero: int | None,
    format_name: str | None,
    keys: str | None,
    dry_run: bool,
    accept_doubts: bool,
    workers: int | None,
    memory: int,
    reading: Reading,
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

    from ckpt_cli import picture, pipeline, report, work
    from ckpt_formats.base import Degrees, Goal
    from ckpt_formats.registry import detect, writable

    checkpoint = work.open_source(source, reading, accept_doubts)
    format = writable(format_name or detect(Path(source)).name)
    pp = len(stages) // (vpp or 1) if stages and pp is None else pp
    goal = Goal(
        Path(target),
        Degrees(dp, tp, pp, zero, vpp, ep, etp, stages),
        work.rules_of(reading),
        vocab_rows,
        keys=STYLES[keys] if keys else None,
    )
    work.check_degrees(format, goal.degrees)
    report.say_notices(checkpoint)
    if dry_run:
        parts = pipeline.plan(checkpoint, format, goal)
        report.say_losses(format, checkpoint, parts)
        picture.print_ranks(checkpoint, parts, goal.target, format.name, as_json)
        return
    effort = work.effort_of(workers, memory)
    work.run(checkpoint, format, goal, work.choices(reading, keys), effort, "resharding", as_json)
