"""Run `restore`, and show its result."""

from dataclasses import asdict
from typing import Any

from ckpt.chains import restore as chain_restore
from ckpt.chains.restore import ChainState
from ckpt.partial.recovery import is_mixed
from ckpt.pipeline import Execution
from ckpt_cli import notes
from ckpt_cli.options.target import Target
from ckpt_cli.progress import doing, progress_bar
from ckpt_cli.reading import PEERS
from ckpt_cli.views import job
from ckpt_cli.views.report import conclude, say
from ckpt_formats.core.checkpoint import OLDER, OLDEST_STEP
from ckpt_formats.core.format import WritableFormat
from ckpt_formats.core.text import format_nbytes, printable


def show_plan(state: ChainState, target: Target, format: WritableFormat, resources: Execution, as_json: bool) -> None:
    """Show what would be replayed and written."""
    with doing(f"planning the files of {printable(str(target.path))}"):
        plan = chain_restore.plan(state, target.path, format, resources, target.overwrite)
        work = _work_json(state, resources)
    job.show_plan(state.checkpoint, plan, target.path, format.name, as_json, {"replay": work, **_partial_json(state)})


def restore(state: ChainState, target: Target, format: WritableFormat, resources: Execution, as_json: bool) -> None:
    """Restore with a progress bar, and show what was written."""
    silent = {one["holder"] for one in _peers_json(state).get("peers", {}).get("silent", ())}
    with doing(f"planning the files of {printable(str(target.path))}"):
        plan = chain_restore.plan(state, target.path, format, resources, target.overwrite)
    job.note_plan(plan, format.name)
    notes.flush()
    with progress_bar("restoring") as progress:
        result = chain_restore.restore(state, target.path, format, resources, progress, target.overwrite)
    peers = _peers_json(state)
    for one in peers.get("peers", {}).get("silent", ()):
        if one["holder"] not in silent:
            notes.note(f"{one['holder']} answers no longer: {printable(one['reason'])}")
    for one in peers.get("peers", {}).get("damaged", ()):
        piece = f"the piece of {one['file']} at byte {one['offset']}"
        what = f"its parity does not give {piece}" if one["is_parity"] else f"{piece} is damaged in its memory"
        notes.note(f"{one['holder']}: {what}")
    if not as_json:
        for one in peers.get("peers", {}).get("sources", ()):
            say(f"read {format_nbytes(one['nbytes'])} from {printable(one['source'])}")
        if computed := peers.get("peers", {}).get("computed_nbytes"):
            say(f"computed {format_nbytes(computed)} from parity")
    more = {**_partial_json(state), **peers}
    job.show_result(result, as_json, more, job.Afterwards(resources, target.seal, target.protect))
    if not (as_json or state.checkpoint.errors):
        conclude("exact: every bit is as it was saved")


def _peers_json(state: ChainState) -> dict[str, Any]:
    """From which holders the bytes came, which pieces were damaged, and who does not answer."""
    store = getattr(state.run, "store", None)
    if not str(state.run).startswith(PEERS) or store is None:
        return {}
    damaged = sorted(store.damaged, key=lambda one: (one.holder, one.file, one.offset))
    return {
        "peers": {
            "sources": [{"source": name, "nbytes": nbytes} for name, nbytes in sorted(store.nbytes_from.items())],
            "damaged": [asdict(one) for one in damaged],
            "computed_nbytes": store.nbytes_computed,
            "silent": [{"holder": holder, "reason": reason} for holder, reason in sorted(store.silent.items())],
        }
    }


def _work_json(state: ChainState, resources: Execution) -> dict[str, Any]:
    work = chain_restore.replay_work(state.checkpoint)
    return {
        "deltas": work.deltas,
        "stored_nbytes": work.stored_nbytes,
        "nbytes": work.nbytes,
        "seconds": round(work.seconds(resources.workers), 3),
    }


def _partial_json(state: ChainState) -> dict[str, Any]:
    """What is of an earlier step, if the state is recovered partially."""
    if not is_mixed(state.checkpoint):
        return {}
    ages = [figures for figures in state.checkpoint.errors.values() if OLDER in figures]
    steps = [step for figures in ages if isinstance(step := figures.get(OLDEST_STEP), int)]
    older = sum(count for figures in ages if isinstance(count := figures[OLDER], int))
    elements = sum(tensor.size for _, _, tensor in state.checkpoint.tensors())
    partial = {"states": len(ages), "older": older, "elements": elements, "oldest_step": min(steps, default=None)}
    return {"partial": {**partial, "step": state.checkpoint.step}}
