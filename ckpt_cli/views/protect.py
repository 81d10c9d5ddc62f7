"""Write parity and repair by it with a progress bar, and show what was done."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.pipeline import Execution, Resources
from ckpt.protection.protect import run_protect
from ckpt.protection.protect_plan import Protection, ProtectPlan, plan_protect
from ckpt_cli import notes
from ckpt_cli.options.protect import ProtectOptions
from ckpt_cli.progress import progress_bar
from ckpt_cli.views.columns import show, table
from ckpt_cli.views.report import conclude, data, error_lines, file_count
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.text import format_nbytes, list_names, printable
from ckpt_formats.stores.location import listed_again, target_path

if TYPE_CHECKING:
    from ckpt.protection.damage import DamagedFile
    from ckpt.protection.repair import Repair

_MAX_ROWS = 50
_MAX_TENSORS = 8
_ALL_STATES = "all states have parity; nothing was written"


def show_plan(plan: ProtectPlan, as_json: bool) -> None:
    """Show what would be protected."""
    show_summary(plan.summary, as_json)


def show_summary(of: Protection, as_json: bool) -> None:
    """Show what would be written."""
    if as_json:
        data(protection_json(of))
    else:
        conclude(f"would write {_sizes(of)}; nothing was written" if of.files else _ALL_STATES)


def protect(plan: ProtectPlan, resources: Execution, as_json: bool) -> None:
    """Write parity, and show what was written."""
    done = _run(plan, resources)
    if as_json:
        data(protection_json(done))
    else:
        conclude(f"wrote {_sizes(done)}: {printable(str(done.parity))}")


def _run(plan: ProtectPlan, resources: Execution) -> Protection:
    notes.flush()
    with progress_bar("writing parity") as progress:
        return run_protect(plan, resources=resources, progress=progress)


def _sizes(of: Protection) -> str:
    things = "file" if of.domains == of.files else "part" if of.files == 1 else "domain"
    if of.domains <= of.lose:
        tolerated = "all of which may be lost" if of.domains > 1 else "which may be lost"
    elif of.groups == 1:
        tolerated = f"of which any {of.lose} of {of.domains} {things}s may be lost"
    else:
        tolerated = f"of which {of.lose} {things}s of each of {of.groups} groups may be lost"
    share = 100 * of.parity_nbytes / of.nbytes
    return (
        f"{format_nbytes(of.parity_nbytes)} of parity ({share:.0f} %) for {format_nbytes(of.nbytes)} in "
        f"{file_count(of.files)}, {tolerated}"
    )


def protection_json(of: Protection) -> dict[str, Any]:
    """What was protected, as plain data."""
    return {**asdict(of), "parity": str(of.parity)}


def repair(
    path: str, others: Sequence[str], parity: Sequence[str], dry_run: bool, resources: Execution, as_json: bool
) -> bool:
    """Repair files, and show which ones. Returns whether all that was damaged is, or can be, repaired."""
    from ckpt.protection.repair import repair as repair_files

    with progress_bar("comparing with parity") as progress:
        done = repair_files(path, others=others, parity=parity, dry_run=dry_run, resources=resources, progress=progress)
    if as_json:
        data(_repair_json(done))
    else:
        _show(done)
    return not done.unrepairable and not done.damaged_before


def _show(done: "Repair") -> None:
    notes.flush()
    _show_rows(done)
    place, read = printable(str(done.path)), format_nbytes(done.nbytes)
    if not done.damaged:
        what = "data" if done.unnamed_parity else "data and parity"
        conclude(f"ok: {place}: {read} of {what} fit their hashes")
        _note_rest(done)
        return
    if done.lost_tensors:
        conclude(f"lost tensors: {list_names(list(done.lost_tensors), printable, _MAX_TENSORS)}")
    repaired = len(done.damaged) - len(done.unrepairable)
    text = f"{'repaired' if done.written else 'can repair'} {repaired} of {file_count(len(done.damaged))}: {place}"
    if done.unrepairable:
        why = "parity was not read" if done.unnamed_parity else "more is lost than parity replaces"
        text = f"LOST: {file_count(len(done.unrepairable))} cannot be repaired: {why}; {text}"
        notes.note("with copies of these files, perhaps older ones: ckpt repair --from OTHER")
    _note_rest(done)
    conclude(text)
    for problem in done.damaged_before:
        conclude(f"DAMAGED: {problem}; so it was when it was protected")


def _note_rest(done: "Repair") -> None:
    """Note what has grown, where parity lies that was not read, and the option that names it."""
    if done.grown:
        names = list_names(list(done.grown), lambda one: printable(one.removeprefix(f"{done.path}/")))
        notes.note(
            f"of logs and published chains that have grown since they were protected, later steps have no parity, and "
            f"these files stay as they are: {names}; "
            f"protect what is there now: ckpt protect {printable(str(done.path))} --overwrite"
        )
    if done.unnamed_parity:
        places = " ".join(f"--parity {printable(one)}" for one in done.unnamed_parity)
        notes.note(f"its parity is elsewhere and was not read; if you know the place, name it: {places}")


def _show_rows(done: "Repair") -> None:
    """Print a row for each damaged file."""
    rows = [(printable(_name(done.path, one.path)), one.what, _fate(one, done.written)) for one in done.damaged]
    if rows:
        show(table(("file", "found", ""), rows[:_MAX_ROWS], breaks=(0,)))
    if len(rows) > _MAX_ROWS:
        conclude(f"and {len(rows) - _MAX_ROWS} more files")


def _fate(one: "DamagedFile", written: bool) -> str:
    if one.is_repairable:
        return "repaired" if written else "can be repaired"
    nbytes = sum(stop - start for start, stop in one.lost_ranges)
    return f"LOST: {format_nbytes(nbytes)}, from byte {one.lost_ranges[0][0]:,} on"


def _name(root: Path, path: Path) -> str:
    return path.relative_to(root).as_posix() if path != root and path.is_relative_to(root) else str(path)


def _repair_json(done: "Repair") -> dict[str, Any]:
    return {
        "path": str(done.path),
        "nbytes": done.nbytes,
        "written": done.written,
        "damaged": list(map(damaged_json, done.damaged)),
        "unrepairable": [str(one.path) for one in done.unrepairable],
        "lost_tensors": list(done.lost_tensors),
        "unnamed_parity": list(done.unnamed_parity),
        "damaged_before": list(done.damaged_before),
        "grown": list(done.grown),
    }


def damaged_json(one: "DamagedFile") -> dict[str, Any]:
    """A damaged file, as plain data."""
    return {
        "file": str(one.path),
        "what": one.what,
        "blocks": one.blocks,
        "repairable": one.is_repairable,
        "lost_ranges": [list(one_range) for one_range in one.lost_ranges],
        "parity": one.is_parity,
    }


def verify_parity(folders: Sequence[Path], resources: Resources, ok: bool, verified: Mapping[str, Any] | None) -> bool:
    """Compare all files of folders with their parity, and show what is damaged, and whether it can be repaired.

    `ok`: whether the checkpoint itself is. `verified`: what `verify` prints of it with `--json`. Returns whether
    nothing is wrong.
    """
    from ckpt.protection.repair import repair as repair_files

    is_whole, nbytes, damaged, grown, is_read = True, 0, list["DamagedFile"](), list[str](), True
    for folder in folders:
        try:
            with progress_bar("comparing with parity") as progress:
                done = repair_files(folder, dry_run=True, resources=resources, progress=progress)
        except CkptError as error:
            is_whole = False
            if verified is None:
                error_lines(error)
            continue
        is_whole, nbytes = is_whole and not done.damaged, nbytes + done.nbytes
        damaged += done.damaged
        grown += done.grown
        is_read = is_read and not done.unnamed_parity
        _note_rest(done)
        if done.damaged and verified is None:
            _show_differences(done)
    if verified is not None:
        fields = {"ok": is_whole, "nbytes": nbytes, "damaged": list(map(damaged_json, damaged)), "grown": grown}
        data({**verified, "ok": ok and is_whole, "parity": fields})
    elif is_whole:
        what = "data and parity" if is_read else "data"
        conclude(f"parity: {format_nbytes(nbytes)} of {what} fit their hashes")
    return ok and is_whole


def _show_differences(done: "Repair") -> None:
    _show_rows(done)
    place, count = printable(str(done.path)), len(done.damaged)
    fate = (
        f"{file_count(len(done.unrepairable))} of them cannot be repaired"
        if done.unrepairable
        else "all can be repaired"
    )
    verb = "differs" if count == 1 else "differ"
    conclude(f"DAMAGED: {file_count(count)} of {place} {verb} from parity; {fate}: ckpt repair {place}")


def protect_states(
    chain: Path,
    lose: int | None,
    folders: Sequence[str] | None,
    resources: Execution,
    without: Collection[str] = (),
) -> None:
    """Write parity for states of a chain: those in these folders, or all. `lose` None: if others have it in groups.

    `without`: those that will be removed.
    """
    from ckpt.protection.members import losses_of_groups, protect_members

    lose = losses_of_groups(listed_again(chain)) if lose is None else lose
    if lose is None:
        place = printable(str(chain))
        notes.note(
            f"the parity of {place} covers an earlier state of it; protect it again: ckpt protect {place} --overwrite"
        )
        return
    notes.flush()
    with progress_bar("writing parity") as progress:
        protect_members(chain, lose, folders, without=without, resources=resources, progress=progress)


def protect_all_states(path: str, options: ProtectOptions, dry_run: bool, resources: Execution, as_json: bool) -> None:
    """Write parity for all states of a chain that have none, and show it."""
    from ckpt.protection.members import plan_members, protect_members

    if options.into or options.jump != 1:
        raise click.UsageError(
            "--by state keeps parity in the chain, in groups of its own: leave --into and --jump out."
        )
    chain, lose, anew = target_path(path), options.lose, options.overwrite
    plan = plan_members(chain, lose, anew=anew)
    if plan.unfinished:
        notes.note(
            f"a log that may still grow has no parity yet: {list_names(list(plan.unfinished), printable)}; "
            "run the command again when its run has ended"
        )
    if dry_run:
        show_summary(plan.summary, as_json)
        return
    notes.flush()
    with progress_bar("writing parity") as progress:
        done = protect_members(chain, lose, anew=anew, resources=resources, progress=progress)
    if as_json:
        data(protection_json(done))
    else:
        conclude(f"wrote {_sizes(done)}: {printable(str(done.parity))}" if done.files else _ALL_STATES)


def protect_target(target: Path, lose: int, resources: Execution) -> dict[str, Any]:
    """Protect what a command has just written; parity that it has copied is replaced. Returns the result as data."""
    return protection_json(_run(plan_protect(listed_again(target), lose, overwrite=True), resources))
