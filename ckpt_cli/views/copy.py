"""Show the plan and the result of `copy`."""

import sys
from dataclasses import asdict

import click

from ckpt.copying.copy import Copy
from ckpt.pipeline import Execution
from ckpt_cli import notes
from ckpt_cli.progress import progress_bar
from ckpt_cli.views import job, report
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.stores.location import is_url, source_path

_MAX_ROWS = 20


def run(work: Copy, protect: int | None, resources: Execution, as_json: bool) -> None:
    """Copy with a bar, and show what was written. `protect`: how many files parity of the copy shall replace."""
    if protect is not None and is_url(str(work.target)) and source_path(work.source).is_file():
        raise click.UsageError("--protect in a store is for folders: the copy would be a single object.")
    notes.note(*work.plan().notes)
    notes.flush()
    with progress_bar("copying") as progress:
        result = work.run(resources=resources, progress=progress)
    notes.note(*result.notes)
    job.show_result(result, as_json, afterwards=job.Afterwards(resources, protect=protect))


def update(source: str, target: str, every: float | None, resources: Execution, as_json: bool) -> None:
    """Bring a copy to what its chain is now: once, or each `every` seconds. With JSON, an object on each line."""
    from ckpt.copying.follow import CopyUpdate, follow_copy, update_copy
    from ckpt_cli.views.shadow import stopped_by_signals

    def show(brought: CopyUpdate) -> None:
        if as_json:
            report.data({"target": target, **asdict(brought)})
            sys.stdout.flush()
        elif brought.objects or every is None:
            step = "" if brought.last is None else f", up to step {brought.last}"
            count = f"{brought.objects} new object{'s' * (brought.objects != 1)}"
            report.say(f"{printable(target)}: {format_nbytes(brought.nbytes)} in {count}{step}")

    if every is None:
        show(update_copy(source, target, resources=resources))
        return
    with stopped_by_signals() as stop:
        follow_copy(source, target, every=every, stop=stop, resources=resources, on_update=show)


def show_plan(work: Copy, as_json: bool) -> None:
    """Show what would be copied."""
    notes.note(*work.plan().notes)
    files = work.files
    nbytes = sum(one.nbytes for one in files)
    if as_json:
        rows = [{"file": one.name, "nbytes": one.nbytes} for one in files]
        report.data({"target": str(work.target), "format": work.format_name, "nbytes": nbytes, "files": rows})
        return
    notes.flush()
    for one in sorted(files, key=lambda one: -one.nbytes)[:_MAX_ROWS]:
        click.echo(f"{format_nbytes(one.nbytes):>10}  {printable(one.name)}")
    if len(files) > _MAX_ROWS:
        click.echo(f"{'':>10}  and {len(files) - _MAX_ROWS} smaller files")
    report.say(
        f"would copy {format_nbytes(nbytes)} in {len(files)} file{'s' * (len(files) != 1)} to "
        f"{printable(str(work.target))}; nothing was written"
    )
