"""Write the index of ranks' files with a progress bar, and show what was written."""

from ckpt.copying.rank_index import IndexedRanks, IndexPlan, run_index
from ckpt.pipeline import Execution
from ckpt_cli import notes
from ckpt_cli.progress import progress_bar
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.text import format_nbytes, printable


def write_index(plan: IndexPlan, dry_run: bool, resources: Execution, as_json: bool) -> None:
    """Compare the copies that ranks saved and write the index, or show what would be written."""
    notes.note(*plan.notices)
    notes.flush()
    with progress_bar("comparing copies") as progress:
        indexed = run_index(plan, dry_run=dry_run, resources=resources, progress=progress)
    if as_json:
        data({"dry_run": dry_run, "indexes": list(map(_json, indexed))})
        return
    for planned, one in zip(plan.joined, indexed, strict=True):
        file = printable(str(one.path))
        if planned.data is None:
            conclude(f"{file} is there: torch loads {one.tensors} tensors with it, nothing was written")
            continue
        what = f"{one.tensors} tensors of {one.ranks} ranks, {format_nbytes(one.nbytes)}: {file}"
        conclude(f"would index {what}; nothing was written" if dry_run else f"indexed {what}")


def _json(one: IndexedRanks) -> dict[str, object]:
    return {
        "path": str(one.path),
        "ranks": one.ranks,
        "tensors": one.tensors,
        "nbytes": one.nbytes,
        "compared_nbytes": one.compared_nbytes,
        "differing": list(one.differing),
        "written": one.written,
    }
