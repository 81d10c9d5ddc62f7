"""Seal a checkpoint with a progress bar, and show what was sealed."""

from pathlib import Path
from typing import Any

from ckpt.copying.sealing import Sealed, SealPlan, plan_seal, run_seal
from ckpt.pipeline import Execution
from ckpt_cli import notes
from ckpt_cli.progress import progress_bar
from ckpt_cli.views.report import conclude, data, file_count
from ckpt_formats.core.text import format_nbytes, printable


def show_plan(plan: SealPlan, as_json: bool) -> None:
    """Show what would be sealed."""
    notes.note(*plan.checkpoint.notices)
    if as_json:
        data(_json(plan.seal_file, len(plan.files), plan.nbytes))
    else:
        conclude(
            f"would read {format_nbytes(plan.nbytes)} in {file_count(len(plan.files))} and write "
            f"{printable(str(plan.seal_file))}; nothing was written"
        )


def seal(plan: SealPlan, resources: Execution, as_json: bool) -> None:
    """Seal a checkpoint, and show what was sealed."""
    notes.note(*plan.checkpoint.notices)
    done = _run(plan, resources)
    if as_json:
        data(_json(done.seal_file, done.files, done.nbytes))
    else:
        conclude(
            f"sealed {format_nbytes(done.nbytes)} in {file_count(done.files)}: {printable(str(done.seal_file))}. "
            "From now on, ckpt compares with it whatever it reads of them"
        )


def seal_target(target: Path, resources: Execution) -> str:
    """Seal what a command has just written. Returns the path of the seal file."""
    return str(_run(plan_seal(target), resources).seal_file)


def _run(plan: SealPlan, resources: Execution) -> Sealed:
    notes.flush()
    with progress_bar("sealing") as progress:
        return run_seal(plan, resources=resources, progress=progress)


def _json(seal_file: Path, files: int, nbytes: int) -> dict[str, Any]:
    return {"seal_file": str(seal_file), "files": files, "nbytes": nbytes}
