"""`ckpt diff`: what changed between two checkpoints."""

from typing import TYPE_CHECKING

import click

from ckpt_cli.delta_options import DeltaOptions, check_together, writing
from ckpt_cli.options import CheckpointPath, PathsCommand, SourceOptions, as_json, common, effort, no_lock, reading

if TYPE_CHECKING:
    from ckpt.pipeline import Resources


@click.command(cls=PathsCommand)
@click.argument("first", type=CheckpointPath())
@click.argument("second", type=CheckpointPath(), required=False)
@click.option("--only", multiple=True, metavar="PATTERN", help="Compare parameters whose names match.")
@click.option("--skip", multiple=True, metavar="PATTERN", help="Leave out parameters whose names match.")
@click.option("--state", "states", multiple=True, metavar="STATE", help="Compare this state only: weight, exp_avg, ...")
@click.option("--tensors-only", is_flag=True, help="Leave out extras, counters and the optimizer's options.")
@click.option(
    "--sort",
    type=click.Choice(["relative", "max", "rms", "changed", "cosine", "name"]),
    default="relative",
    show_default=True,
    help="Which come first.",
)
@click.option(
    "--by",
    type=click.Choice(["layer", "role", "state", "kind"]),
    multiple=True,
    help="Add tensors up, too. Twice: by both together.",
)
@click.option("--top", type=click.IntRange(0), default=20, show_default=True, help="Rows to show; 0 for all.")
@click.option("--html", type=click.Path(dir_okay=False), metavar="FILE", help="Write a page to look at in a browser.")
@writing
@effort
@no_lock
@reading
@as_json
@common
def diff(
    first: str,
    second: str | None,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    states: tuple[str, ...],
    tensors_only: bool,
    sort: str,
    by: tuple[str, ...],
    top: int,
    html: str | None,
    writing: DeltaOptions,
    workers: int | None,
    memory: int,
    no_lock: bool,
    reading: SourceOptions,
    as_json: bool,
) -> None:
    """Show what changed from the checkpoint FIRST to the checkpoint SECOND.

    They may be of different engines, formats and numbers of ranks. Of each tensor:
    the share of elements with other bits, the largest and the root mean square
    difference, its norm over that of the tensor, and the cosine between the two.
    Exit code 0 if both are the same, 1 if they differ.

    With -o, SECOND is written as a delta against FIRST: a universal checkpoint
    that stands on FIRST, and is read like any other. With --into, FIRST is the
    only checkpoint, and is appended to a chain as a delta against the last state
    that the chain has; the first one begins the chain. Every value is decoded
    again and compared before it is believed. Nothing is lost unless --preset, a
    bound or a lossy --codec says so. Exit code 0.

    \b
    Examples:
      ckpt diff run/global_step1000 run/global_step2000
      ckpt diff zero3/global_step1000 fsdp/step-1000 --tensors-only
      ckpt diff a b --only 'layers\\.3\\.' --by state --json
      ckpt diff a b --state weight --by layer --by role
      ckpt diff a b --html diff.html
      ckpt diff --into run.chain run/global_step2000
      ckpt diff --into run.chain run/global_step3000 --preset balanced --exact norm
      ckpt diff step1000 run/global_step2000 -o step2000.delta
    """
    from pathlib import Path

    from ckpt.compare import Selection, compare, pair_tensors, select_both
    from ckpt.compare.to_json import facts
    from ckpt.pipeline import check_complete
    from ckpt_cli import notes, work
    from ckpt_cli.progress import progress
    from ckpt_cli.views import diff_page as page
    from ckpt_cli.views import report
    from ckpt_cli.views.diff import as_text, note_differences
    from ckpt_formats.core.identity import check_unchanged
    from ckpt_formats.core.notices import Weight

    check_together(writing, click.get_current_context())
    if writing.asked:
        _write(first, second, writing, work.effort_of(workers, memory, no_lock), reading, as_json)
        return
    if second is None:
        raise click.UsageError("Missing argument 'SECOND'.")
    if html:
        page.check_place(Path(html))
    pair = [work.open_source(path, reading) for path in (first, second)]
    notes.note(*pair[0].notices, *pair[1].notices)
    if Path(first).resolve() == Path(second).resolve():
        notes.note("FIRST and SECOND are the same path", weight=Weight.UNSURE)
    ours, theirs = select_both(pair[0], pair[1], Selection(only, skip, extras=not tensors_only))
    for checkpoint in (ours, theirs):
        check_complete(checkpoint)
    both = pair_tensors(ours, theirs, states)
    with progress("comparing", both.nbytes) as moved:
        found = compare(both, work.effort_of(workers, memory), moved, tensors_only)
    check_unchanged({**ours.identities, **theirs.identities})
    if html:
        page.write(page.page_of(ours, theirs, found), Path(html))
    note_differences(ours, theirs, found)
    if as_json:
        report.data(facts(ours, theirs, found, by))
    else:
        as_text(ours, theirs, found, sort, by, top)
    if not found.same:
        click.get_current_context().exit(1)


def _write(
    first: str, second: str | None, writing: DeltaOptions, effort: "Resources", reading: SourceOptions, as_json: bool
) -> None:
    from pathlib import Path

    from ckpt_cli import work
    from ckpt_cli.views import append as diffing

    if writing.into is not None:
        if second is not None:
            raise click.UsageError("--into takes one checkpoint: what comes before it is in the chain.")
        diffing.into(Path(writing.into), work.open_source(first, reading), writing, effort, as_json)
        return
    if second is None:
        raise click.UsageError("Missing argument 'SECOND'.")
    assert writing.output is not None
    pair = [work.open_source(path, reading) for path in (first, second)]
    diffing.against(pair[0], pair[1], Path(writing.output), writing, effort, as_json)
