"""Watch a run, and show what is stored of it."""

import sys

from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Execution
from ckpt.runs.new import SkippedCheckpoint
from ckpt.runs.prune import PruneResult
from ckpt.runs.watch import StoredCheckpoint, watch
from ckpt_cli import notes
from ckpt_cli.options.watch import WatchOptions
from ckpt_cli.views.chain_log import times
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.errors import NotFoundError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.stores.location import source_path


def watch_run(
    run: str,
    target: str,
    given: WatchOptions,
    policy: DeltaPolicy,
    options: ReadOptions,
    resources: Execution,
    as_json: bool,
) -> None:
    """Store new checkpoints until a signal comes, or the options end it. With JSON, an object on each line."""
    if not (folder := source_path(run)).is_dir():
        if folder.is_file():
            hint = "Name the folder in which a run saves its checkpoints."
            raise NotFoundError("is a file, not the folder of a run", where=printable(run), hint=hint)
        notes.note(f"there is no folder {printable(run)} yet")
    notes.flush()
    count = 0
    for one in watch(
        run,
        target,
        keep=given.keep,
        every=given.interval,
        once=given.once,
        timeout=given.timeout,
        policy=None if policy == DeltaPolicy() else policy,
        dry_run=given.dry_run,
        options=options,
        resources=resources,
        locks=resources.locks,
    ):
        count += 1
        if as_json:
            data(_json(one))
        else:
            _say(one)
        sys.stdout.flush()
    if not count and not as_json:
        conclude(f"nothing is new in {printable(run)}")


def _say(one: StoredCheckpoint | SkippedCheckpoint | PruneResult) -> None:
    if isinstance(one, SkippedCheckpoint):
        conclude(f"not stored: {printable(one.path.name)}: {printable(one.error.what)}")
    elif isinstance(one, PruneResult):
        freed = format_nbytes(sum(old.nbytes for old in one.removed))
        names = ", ".join(printable(old.path.name) for old in reversed(one.removed)) or "what was left of a removal"
        conclude(f"pruned: {names}, {freed}")
    else:
        notes.note(*one.notices)
        verb = "would store" if one.stored_nbytes is None else "stored"
        conclude(f"{verb} {printable(one.path.name)} in {printable(str(one.target))}: {_how(one)}")
        notes.flush()


def _how(one: StoredCheckpoint) -> str:
    raw = format_nbytes(one.raw_nbytes)
    if one.kind == "copy" or one.stored_nbytes is None:
        return f"{one.kind}, {raw}" if one.stored_nbytes is None else f"copy, {raw} ({one.seconds:.1f} s)"
    stored = format_nbytes(one.stored_nbytes)
    return f"{one.kind}, {stored} for {raw}, {times(one.raw_nbytes, one.stored_nbytes)} ({one.seconds:.1f} s)"


def _json(one: StoredCheckpoint | SkippedCheckpoint | PruneResult) -> dict[str, object]:
    if isinstance(one, SkippedCheckpoint):
        return {"event": "skipped", "checkpoint": str(one.path), "problem": one.error.what}
    if isinstance(one, PruneResult):
        removed = [str(old.path) for old in reversed(one.removed)]
        return {"event": "pruned", "removed": removed, "freed_nbytes": sum(old.nbytes for old in one.removed)}
    notes.note(*one.notices)
    return {
        "event": "planned" if one.stored_nbytes is None else "stored",
        "checkpoint": str(one.path),
        "step": one.step,
        "target": str(one.target),
        "kind": one.kind,
        "raw_nbytes": one.raw_nbytes,
        "stored_nbytes": one.stored_nbytes,
        "seconds": round(one.seconds, 3),
    }
