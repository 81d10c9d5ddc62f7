"""`ckpt compact`: fewer states in a chain, and fewer deltas to replay."""

import click

from ckpt_cli.options import CheckpointPath, PathsCommand, SegmentsType, as_json, common, effort, no_lock


@click.command(cls=PathsCommand)
@click.argument("chain", type=CheckpointPath())
@click.option(
    "--keep",
    multiple=True,
    metavar="POLICY",
    default=["all"],
    show_default=True,
    help="States that stay: last:N, every:N (steps that N divides), all, or steps with commas. May be given again.",
)
@click.option(
    "--gradients",
    type=SegmentsType(),
    metavar="last:N|all",
    default="all",
    show_default=True,
    help="Segments of the log of gradients that stay: the last N, or all.",
)
@click.option("--upto", type=click.IntRange(0, 1 << 62), metavar="STEP", help="Drop all steps after STEP.")
@click.option("--anchor-every", type=click.IntRange(1), metavar="N", help="Store each Nth state that stays whole.")
@click.option("--dry-run", is_flag=True, help="Say what would become of each state, write nothing.")
@effort
@no_lock
@as_json
@common
def compact(
    chain: str,
    keep: tuple[str, ...],
    gradients: int | None,
    upto: int | None,
    anchor_every: int | None,
    dry_run: bool,
    workers: int | None,
    memory: int,
    no_lock: bool,
    as_json: bool,
) -> None:
    """Remove states from CHAIN, and fold the deltas that others stand on.

    A state that stays is bit for bit what it was; the last one always stays. What
    loses its parent is written again, as a base or against the last state before it
    that stays. Nothing is removed before all that stays is on the disk; interrupted,
    the chain is as it was.

    A step that only the log of gradients has becomes a base if --keep names it.
    --upto drops later steps, so that a run can go on from STEP into the same chain.

    \b
    Examples:
      ckpt compact run.chain --keep last:5 --keep every:1000
      ckpt compact run.chain --anchor-every 10
      ckpt compact run.chain --keep 1000,2000 --dry-run
      ckpt compact run.chain --keep 1234 --gradients last:1
      ckpt compact run.chain --upto 1500
    """
    from pathlib import Path

    from ckpt.chains import compact as compacting
    from ckpt.chains.append import BasePolicy
    from ckpt.chains.compact import Retention
    from ckpt.chains.write import DeltaPolicy
    from ckpt_cli import work
    from ckpt_formats.universal.chain import file as index

    run, anchors = Path(chain), BasePolicy(anchor_every)
    retention = Retention(keep, gradients, upto)
    if dry_run:
        found = index.read(run)
        kept = compacting.plan(run, found, retention, anchors)
        compacting.say_plan(found, kept, as_json)
        return
    done = compacting.compact(run, retention, anchors, DeltaPolicy.of(), work.effort_of(workers, memory, no_lock))
    compacting.say(done, as_json)
