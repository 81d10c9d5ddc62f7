"""Run `prune`, and show which checkpoints stay and which go."""

from datetime import datetime, timezone
from pathlib import Path

from ckpt.runs.prune import PrunedCheckpoint, PruneResult, prune
from ckpt_cli import notes
from ckpt_cli.progress import doing
from ckpt_cli.views import columns
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.text import format_nbytes, printable


def prune_run(
    run: Path, keep: str, incomplete: bool, unchanged_for: float, dry_run: bool, options: ReadOptions, as_json: bool
) -> None:
    """Remove checkpoints, or show which ones would be removed."""
    with doing(f"looking at the checkpoints in {printable(str(run))}"):
        result = prune(run, keep, incomplete=incomplete, unchanged_for=unchanged_for, dry_run=dry_run, options=options)
    freed = sum(one.nbytes for one in result.removed)
    if result.finished:
        notes.note(f"removed what an interrupted removal had left: {', '.join(map(printable, result.finished))}")
    if as_json:
        data(
            {
                "run": str(result.run),
                "dry_run": dry_run,
                "retained": list(map(_json, result.retained)),
                "removed": list(map(_json, result.removed)),
                "incomplete": list(map(_json, result.incomplete)),
                "freed_nbytes": freed,
                "finished": list(result.finished),
            }
        )
        return
    notes.flush()
    _show(result, dry_run)
    total = len(result.retained) + len(result.removed) + len(result.incomplete)
    verb = "would remove" if dry_run else "removed"
    conclude(
        f"{verb} {len(result.removed)} of {total} checkpoints, {format_nbytes(freed)}: {printable(str(result.run))}"
    )


def _show(result: PruneResult, dry_run: bool) -> None:
    """Print a row for each checkpoint, the newest first."""
    verb = "would go" if dry_run else "removed"
    rows = [
        *((one, f"stays: {one.reason}") for one in result.retained),
        *((one, f"{verb}{f': incomplete: {one.reason}' if one.reason else ''}") for one in result.removed),
        *((one, f"stays: incomplete: {one.reason}") for one in result.incomplete),
    ]
    order = {one.path: number for number, (one, _) in enumerate(rows)}
    rows.sort(key=lambda row: (row[0].step is None, -(row[0].step or 0), order[row[0].path]))
    cells = [
        (
            printable(one.path.name),
            "-" if one.step is None else str(one.step),
            format_nbytes(one.nbytes),
            datetime.fromtimestamp(one.modified, timezone.utc).strftime("%Y-%m-%d %H:%M"),
            printable(what),
        )
        for one, what in rows
    ]
    columns.show(columns.table(("name", "step", "size", "saved (UTC)", ""), cells, right=(1, 2), breaks=(4,)))


def _json(one: PrunedCheckpoint) -> dict[str, object]:
    return {
        "path": str(one.path),
        "name": one.path.name,
        "step": one.step,
        "nbytes": one.nbytes,
        "modified": one.modified,
        "reason": one.reason,
    }
