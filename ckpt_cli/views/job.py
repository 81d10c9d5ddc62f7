"""Run jobs, and show what they write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.job import Job
from ckpt.pipeline import Execution, Result, complete_before, space_needed
from ckpt.pipeline.planned_reads import StoreReads
from ckpt_cli import notes
from ckpt_cli.progress import doing, progress_bar
from ckpt_cli.views.report import conclude, data, file_count
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import OutputError
from ckpt_formats.core.format import Plan
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import counted, format_nbytes, list_names, printable
from ckpt_formats.core.value_changes import ChangedTensor

if TYPE_CHECKING:
    from ckpt_cli.options.target import Target

_MAX_ROWS = 20
_NAMED = 8
"""So many shards, at most, are named in a message."""


def run(label: str, job: Job, resources: Execution, notices: Sequence[Notice] = ()) -> Result:
    """Run a job with a progress bar. The notes of its plan, and further ones, come first."""
    if resources.shard is not None and job.is_published():
        return complete_before(job.path)
    notes.note(*notices)
    try:
        plan = planned(job)
    except OutputError:
        if resources.shard is None or not job.is_published():  # by another shard, since we looked
            raise
        return complete_before(job.path)
    note_plan(plan, job.format.name)
    if job.replay_notice is not None and resources.shard is None:
        notes.note(job.replay_notice)
    if (reads := job.store_reads(resources=resources)) is not None and reads.requests:
        notes.note(f"reads {_in_words(reads)} from the store")
    notes.flush()
    with progress_bar(label) as progress:
        result = job.run(resources=resources, progress=progress)
    notes.note(*result.notes)
    return result


@dataclass(frozen=True)
class Afterwards:
    """What else is written when a target is complete."""

    resources: Execution
    seal: bool = False
    """Its checksums."""
    protect: int | None = None
    """Parity that replaces so many of its files."""

    def run(self, target: Path, is_pending: bool) -> dict[str, Any]:
        """Write it. Returns fields of the JSON. What has to wait is noted."""
        place, fields = printable(str(target)), dict[str, Any]()
        if is_pending:
            orders = {f"ckpt seal {place}": self.seal, f"ckpt protect {place} --lose {self.protect}": self.protect}
            for order in (order for order, is_wanted in orders.items() if is_wanted):
                notes.note(f"when the target is published, run `{order}`")
            return fields
        if self.seal:
            from ckpt_cli.views.seal import seal_target  # few targets are sealed

            fields["seal_file"] = seal_target(target, self.resources)
        if self.protect is not None:
            from ckpt_cli.views.protect import protect_target

            fields["parity"] = protect_target(target, self.protect, self.resources)
        return fields


def write(label: str, job: Job, dry_run: bool, resources: Execution, as_json: bool, target: "Target") -> None:
    """Run a job with a progress bar, and show what it wrote; with `dry_run`, only show what it would write.

    `target`: what else the user wants written.
    """
    if dry_run:
        show_plan(
            job.source, planned(job), job.path, job.format.name, as_json, reads=job.store_reads(resources=resources)
        )
    else:
        afterwards = Afterwards(resources, target.seal, target.protect)
        show_result(run(label, job, resources), as_json, afterwards=afterwards)


def planned(job: Job) -> Plan:
    """The plan of a job. A terminal shows it, if it takes long."""
    with doing(f"planning the files of {printable(str(job.target))}"):
        return job.plan()


def note_plan(plan: Plan, format_name: str) -> None:
    """Note what the format cannot hold, and what else the user should know of the result."""
    for dropped in plan.dropped:
        notes.note(replace(dropped, text=f"{format_name} has no place for {dropped.text}", weight=Weight.LOST))
    notes.note(*plan.notes)


def show_plan(
    source: Checkpoint,
    plan: Plan,
    target: Path,
    format_name: str,
    as_json: bool,
    more: Mapping[str, Any] | None = None,
    reads: StoreReads | None = None,
) -> None:
    """Show what a job would write. `more`: further fields of the JSON. `reads`: what it requests from stores."""
    note_plan(plan, format_name)
    needed = space_needed(plan.files)
    if as_json:
        files = [{"file": one.file, "nbytes": one.nbytes, "tensors": one.names()} for one in plan.files]
        data(
            {
                "target": str(target),
                "format": format_name,
                "nbytes": needed,
                "files": files,
                **_reads_json(reads),
                **(more or {}),
            }
        )
        return
    notes.flush()
    for one in sorted(plan.files, key=lambda file: -file.nbytes)[:_MAX_ROWS]:
        click.echo(f"{format_nbytes(one.nbytes):>10}  {one.file}  ({list_names(one.names(), printable, 2)})")
    if len(plan.files) > _MAX_ROWS:
        click.echo(f"{'':>10}  and {len(plan.files) - _MAX_ROWS} smaller files")
    total = sum(file.nbytes for file in source.files)
    count = 1 if plan.single_file else len(plan.files)
    read = _in_words(reads) if reads is not None and reads.requests else f"up to {format_nbytes(total)}" * (total > 0)
    conclude(  # what a replay of a log reads is not known before
        f"would {f'read {read} and ' if read else ''}write about {format_nbytes(needed)} "
        f"in {file_count(count)} to {printable(str(target))}; nothing was written"
    )


def _in_words(reads: StoreReads) -> str:
    return f"about {format_nbytes(reads.nbytes)} in {reads.requests:,} request{'s' * (reads.requests != 1)}"


def _reads_json(reads: StoreReads | None) -> dict[str, Any]:
    return {} if reads is None else {"store_reads": {"nbytes": reads.nbytes, "requests": reads.requests}}


def show_result(
    result: Result, as_json: bool, more: Mapping[str, Any] | None = None, afterwards: Afterwards | None = None
) -> None:
    """Show what a job wrote. `more`: further fields of the JSON. `afterwards`: what is written first."""
    if afterwards is not None:
        more = {**(more or {}), **afterwards.run(result.target, result.status == "pending")}
    if as_json:
        data({**to_json(result), **(more or {})})
        return
    resumed = f"; {format_nbytes(result.resumed_nbytes)} of it by an earlier run" if result.resumed else ""
    if result.status == "already complete":
        conclude(f"{printable(str(result.target))} is complete: shards of this job have published it already")
        return
    if result.status == "pending":
        conclude(f"wrote {format_nbytes(result.nbytes)} in {file_count(result.files)}{resumed}; {_pending(result)}")
        return
    rate = format_nbytes(result.nbytes / result.seconds) if result.seconds else "?"
    wrote = f"wrote {printable(str(result.target))}: {format_nbytes(result.nbytes)} in {file_count(result.files)}"
    conclude(f"{wrote}, {result.seconds:.1f} s, {rate}/s{resumed}; {_checked(result)}")


def _checked(result: Result) -> str:
    """Which checksums of the source were compared."""
    parts = [
        counted(number, what) for number, what in ((result.checksums, "checksum"), (result.chunks, "chunk")) if number
    ]
    if not parts:
        return "the source has no checksums"
    is_one = result.checksums + result.chunks == 1
    owned = "" if not result.chunks else " its checksum" if is_one else " their checksums"
    return f"{' and '.join(parts)} of the source match{'es' * is_one}{owned}"


def to_json(result: Result) -> dict[str, Any]:
    """The result of a job as plain data."""
    return {
        "target": str(result.target),
        "files": result.files,
        "nbytes": result.nbytes,
        "seconds": round(result.seconds, 3),
        "resumed_files": result.resumed,
        "resumed_nbytes": result.resumed_nbytes,
        "checksums_verified": result.checksums,
        "chunks_verified": result.chunks,
        "status": result.status,
        **({"pending": _pending(result)} if result.status == "pending" else {}),
        **({"changed_values": [_changed_json(one) for one in result.changed]} if result.changed else {}),
    }


def _pending(result: Result) -> str:
    """What other processes have yet to do before the target is there."""
    if not result.missing:
        return f"all files are written; {result.publisher} publishes the target"
    count, numbers = sum(map(len, result.missing.values())), list(result.missing)
    is_one = count == 1
    text = f"{file_count(count)} {'is' if is_one else 'are'} not written yet"
    return f"{text}: {'that' if is_one else 'those'} of shards {list_names(numbers, str, _NAMED)}"


def _changed_json(one: ChangedTensor) -> dict[str, Any]:
    return {
        "tensor": one.name,
        "dtype": one.dtype,
        "overflows": one.overflows,
        "underflows": one.underflows,
        "not_finite": one.not_finite,
    }
