"""`ckpt diff`: what changed between two checkpoints."""

import click

from ckpt_cli.options import Reading, as_json, common, effort, reading


@click.command()
@click.argument("first", type=click.Path(readable=False))
@click.argument("second", type=click.Path(readable=False))
@click.option("--only", multiple=True, metavar="PATTERN", help="Compare parameters whose names match.")
@click.option("--skip", multiple=True, metavar="PATTERN", help="Leave out parameters whose names match.")
@click.option("--tensors-only", is_flag=True, help="Leave out extras, counters and the optimizer's options.")
@click.option(
    "--sort",
    type=click.Choice(["relative", "max", "rms", "changed", "name"]),
    default="relative",
    show_default=True,
    help="Which come first.",
)
@click.option("--by", type=click.Choice(["state", "layer", "kind"]), help="Add tensors up, too.")
@click.option("--top", type=click.IntRange(0), default=20, show_default=True, help="Rows to show; 0 for all.")
@effort
@reading
@as_json
@common
def diff(
    first: str,
    second: str,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    tensors_only: bool,
    sort: str,
    by: str | None,
    top: int,
    workers: int | None,
    memory: int,
    reading: Reading,
    as_json: bool,
) -> None:
    """Show what changed from the checkpoint FIRST to the checkpoint SECOND.

    They may be of different engines, formats and numbers of ranks. Of each tensor:
    the share of elements with other bits, the largest and the root mean square
    difference, its norm over that of the tensor, and the cosine between the two.
    Exit code 0 if both are the same, 1 if they differ.

    \b
    Examples:
      ckpt diff run/global_step1000 run/global_step2000
      ckpt diff zero3/global_step1000 fsdp/step-1000 --tensors-only
      ckpt diff a b --only 'layers\\.3\\.' --by state --json
    """
    from ckpt_cli import difference_report, differences, selection, work
    from ckpt_cli.pipeline import check_whole
    from ckpt_cli.progress import progress

    pair = [work.open_source(path, reading) for path in (first, second)]
    if only or skip:
        pair = [selection.only(checkpoint, only, skip) for checkpoint in pair]
    for checkpoint in pair:
        check_whole(checkpoint)
    ours, theirs = pair
    with progress("comparing", differences.amount(ours, theirs)) as moved:
        found = differences.compare(ours, theirs, work.effort_of(workers, memory), moved, tensors_only)
    if as_json:
        difference_report.as_json(ours, theirs, found, by)
    else:
        difference_report.as_text(ours, theirs, found, sort, by, top)
    if not found.same:
        click.get_current_context().exit(1)
