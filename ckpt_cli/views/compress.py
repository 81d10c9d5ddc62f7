"""Show how many bytes `compress` saved, or would save."""

from collections.abc import Sequence
from pathlib import Path

from ckpt.job import Job, load_kernels
from ckpt.original import compressed_path
from ckpt.pipeline import Result
from ckpt.sizes import StateSizes, total, written_rows
from ckpt.sizes.estimate import estimate
from ckpt_cli import notes
from ckpt_cli.progress import doing
from ckpt_cli.views import columns, job
from ckpt_cli.views.report import conclude, data
from ckpt_cli.views.sizes import table
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.text import printable
from ckpt_formats.registry.endings import notices_of_ending
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal import Universal, manifest


def target_of(source: Checkpoint, target: str) -> tuple[Path, tuple[Notice, ...]]:
    """Where the compressed checkpoint is written, and what is to be said of it."""
    place, notices = compressed_path(source, target_path(target), target.endswith("/"))
    return place, (*notices, *notices_of_ending(place, Universal.name))


def show_result(result: Result, as_json: bool) -> None:
    """Show the stored bytes of each kind of state."""
    if result.status == "pending":
        job.show_result(result, as_json)
        return
    rows = written_rows(manifest.load(manifest.manifest_path(result.target)).entries)
    if as_json:
        data(job.to_json(result) | _json(rows))
        return
    _print(rows, "stored")
    job.show_result(result, as_json=False)


def show_estimate(work: Job, as_json: bool, notices: Sequence[Notice] = ()) -> None:
    """Show an estimate of the stored bytes of each kind of state; nothing is written."""
    notes.note(*notices)
    job.planned(work)
    load_kernels()
    assert isinstance(work.format, Universal)
    with doing("encoding some chunks of each kind of state"):
        rows = estimate(work.source, work.format.encoding or EncodingOptions())
    if as_json:
        data({"target": str(work.target), "estimate": True} | _json(rows))
        return
    _print(rows, "about")
    conclude(f"estimated for {printable(str(work.target))} from some chunks of each kind; nothing was written")


def _print(rows: list[StateSizes], sizes: str) -> None:
    columns.show(table(rows, sizes))


def _json(rows: list[StateSizes]) -> dict[str, object]:
    total_row = total(rows)
    ratio = None if total_row.ratio is None else round(total_row.ratio, 4)
    sums = {"raw_nbytes": total_row.raw, "stored_nbytes": total_row.stored, "ratio": ratio}
    return sums | {"states": [row.to_json() for row in rows]}
