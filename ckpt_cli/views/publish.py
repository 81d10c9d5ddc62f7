"""Run `publish`, and show what it did."""

import sys
from contextlib import suppress
from typing import Any

import click

from ckpt.pipeline import Execution
from ckpt.publishing.publish import PublishedCheckpoint, PublishPlan, plan_publish
from ckpt.publishing.publish import publish as publish_checkpoint
from ckpt.publishing.watch import publish_each
from ckpt.runs.new import SkippedCheckpoint
from ckpt_cli import notes
from ckpt_cli.options.publish import PublishOptions
from ckpt_cli.progress import progress_bar
from ckpt_cli.views import report
from ckpt_cli.views.chain_log import times
from ckpt_cli.views.shadow import stopped_by_signals
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.text import format_nbytes, format_share, printable
from ckpt_formats.universal.published.records import read_signing_key


def publish_one(
    checkpoint: Checkpoint,
    chain: str,
    given: PublishOptions,
    before: Checkpoint | None,
    resources: Execution,
    as_json: bool,
) -> None:
    """Publish a checkpoint, with a bar, or show what would be published."""
    common: dict[str, Any] = {"step": given.step, "names": given.names, "dtype": given.dtype, "config": given.config}
    key = _key(given)
    if given.dry_run:
        _show_plan(plan_publish(checkpoint, chain, signing_key=key, **common), as_json)
        return
    notes.flush()
    with progress_bar("publishing") as progress:
        result = publish_checkpoint(
            checkpoint,
            chain,
            before=before,
            keep=given.keep,
            signing_key=key,
            resources=resources,
            progress=progress,
            **common,
        )
    notes.note(*result.notices)
    _show(result, as_json)


def watch(
    run: str, chain: str, given: PublishOptions, options: ReadOptions, resources: Execution, as_json: bool
) -> None:
    """Publish each checkpoint of a run until a signal comes. With JSON, an object on each line."""
    assert given.every is not None
    notes.flush()
    with stopped_by_signals() as stop:
        published = publish_each(
            run,
            chain,
            names=given.names,
            dtype=given.dtype,
            config=given.config,
            keep=given.keep,
            signing_key=_key(given),
            every=given.every,
            options=options,
            resources=resources,
            stop=stop,
        )
        with suppress(KeyboardInterrupt):  # the signal came while a step was published: the chain is as it was
            for one in published:
                _show_watched(one, as_json)


def _show_watched(one: PublishedCheckpoint | SkippedCheckpoint, as_json: bool) -> None:
    if isinstance(one, SkippedCheckpoint):
        report.say(f"not published: {printable(str(one.error))}")
        return
    if as_json:
        notes.note(*one.notices)
    _show(one, as_json)
    sys.stdout.flush()


def _key(given: PublishOptions) -> bytes | None:
    return None if given.key is None else read_signing_key(given.key)


def _show(result: PublishedCheckpoint, as_json: bool) -> None:
    if as_json:
        report.data(
            {
                "chain": str(result.path),
                "epoch": result.epoch,
                "step": result.step,
                "kind": result.kind,
                "state": result.state,
                "values": result.values,
                "changed": result.changed,
                "raw_nbytes": result.raw_nbytes,
                "stored_nbytes": result.stored_nbytes,
                "removed": result.removed,
                "seconds": round(result.seconds, 3),
            }
        )
        return
    where = f"{printable(str(result.path))}: step {result.step}"
    if result.kind == "unchanged":
        report.conclude(f"{where} of epoch {result.epoch} is published with this state: nothing was written")
        return
    raw, stored = result.raw_nbytes, result.stored_nbytes
    share = f"{format_share(result.changed, result.values)} of the values changed, " if result.kind == "delta" else ""
    report.conclude(
        f"{where} of epoch {result.epoch}, {result.kind}, {share}{format_nbytes(stored)} for {format_nbytes(raw)}, "
        f"{times(raw, stored)} ({result.seconds:.1f} s)"
    )


def _show_plan(plan: PublishPlan, as_json: bool) -> None:
    notes.note(*plan.notices)
    if as_json:
        report.data(
            {
                "chain": str(plan.path),
                "step": plan.step,
                "kind": plan.kind,
                "tensors": plan.tensors,
                "raw_nbytes": plan.raw_nbytes,
                "files": list(plan.files),
            }
        )
        return
    notes.flush()
    files = f" and {len(plan.files)} files" if plan.files else ""
    click.echo(
        f"{printable(str(plan.path))}: step {plan.step}, {plan.kind}: {plan.tensors} tensors of "
        f"{format_nbytes(plan.raw_nbytes)}{files}"
    )
    report.conclude("nothing was written")
