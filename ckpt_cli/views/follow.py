"""Follow a published chain into a folder, and show each step."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt.following.follow import FollowEvent, follow_into
from ckpt.job import load_kernels
from ckpt.pipeline import Resources
from ckpt_cli.options.follow import FollowOptions
from ckpt_cli.views.report import bounded, conclude, data, say
from ckpt_cli.views.shadow import print_event, stopped_by_signals
from ckpt_formats.core.text import format_nbytes
from ckpt_formats.universal.published.records import read_signing_key


def follow_once(chain: str, target: Path, options: FollowOptions, resources: Resources, as_json: bool) -> None:
    """Go to the last step, or to that of the options, and show it."""
    events = list[FollowEvent]()

    def report(event: FollowEvent) -> None:
        events.append(event)
        if not as_json and event.kind != "verified":
            say(_text(event))

    with stopped_by_signals() as stop:
        _run(chain, target, options, resources, report, stop)
        if stop.is_set():
            raise KeyboardInterrupt
    last = events[-1]
    if as_json:
        data({"chain": chain, "target": str(target), **_where(last), "events": [_to_json(event) for event in events]})
    else:
        conclude(f"{_served(last)}, verified")


def follow(chain: str, target: Path, options: FollowOptions, resources: Resources, as_json: bool) -> None:
    """Follow until a signal ends it: SIGINT (Ctrl-C) or SIGTERM."""
    last: FollowEvent | None = None

    def report(event: FollowEvent) -> None:
        nonlocal last
        last = event
        if as_json:
            print_event(_to_json(event))
        elif event.kind != "waiting" or event.step is None:
            say(_text(event))

    with stopped_by_signals() as stop:
        _run(chain, target, options, resources, report, stop)
    if as_json:
        print_event({"event": "stopped", **({} if last is None else _where(last))})
    else:
        conclude("stopped" if last is None else f"stopped: {_served(last)}")


def _run(
    chain: str,
    target: Path,
    options: FollowOptions,
    resources: Resources,
    report: Callable[[FollowEvent], None],
    stop: threading.Event,
) -> None:
    load_kernels()
    follow_into(
        chain,
        target,
        report,
        stop=stop,
        once=options.once,
        step=options.step,
        every=options.every,
        notify=options.notify,
        command=options.command,
        key=None if options.key is None else read_signing_key(options.key),
        tp=options.tp,
        rank=options.rank,
        rules=() if options.rules is None else options.rules,
        resources=resources,
    )


def _text(event: FollowEvent) -> str:
    error = "" if event.error is None else str(event.error)
    if event.kind == "serving" and event.step is not None and event.advance is not None:
        base = ", from a base" if event.advance.from_base else ""
        read = f"{format_nbytes(event.advance.nbytes)} read{base}, {event.seconds or 0:.2f} s"
        before = event.step.continues
        went_back = "" if before is None else f"; the run went on from step {before[1]} of epoch {before[0]}"
        return bounded(f"{_served(event)}: {read}, published {event.step.age:.1f} s ago{went_back}")
    texts = {
        "verified": f"{_served(event)}: verified",
        "discarded": f"the served step is damaged, and is no longer served: {error}",
        "notified": "the URL has answered" if event.error is None else f"the URL has no answer: {error}",
        "executed": f"the command has ended with exit code {event.exit_code}",
        "waiting": "waiting for the first published step",
        "failed": f"the chain cannot be read now: {error}",
    }
    return bounded(texts.get(event.kind, event.kind))


def _served(event: FollowEvent) -> str:
    if event.step is None:
        return "nothing is served"
    return bounded(f"{event.path}: step {event.step.step} of epoch {event.step.epoch}")


def _where(event: FollowEvent) -> dict[str, Any]:
    step = event.step
    return {
        "epoch": None if step is None else step.epoch,
        "step": None if step is None else step.step,
        "hash": None if step is None else step.hash,
        "path": None if event.path is None else str(event.path),
    }


def _to_json(event: FollowEvent) -> dict[str, Any]:
    fields: dict[str, Any] = {"event": event.kind, **_where(event)}
    if event.step is not None:
        fields["age"] = round(event.step.age, 3)
    if event.advance is not None:
        advance = event.advance
        fields |= {"records": advance.records, "nbytes": advance.nbytes, "base": advance.from_base}
        before = advance.step.continues
        if before is not None:
            fields["continues"] = {"epoch": before[0], "step": before[1]}
    if event.seconds is not None:
        fields["seconds"] = round(event.seconds, 3)
    if event.exit_code is not None:
        fields["exit_code"] = event.exit_code
    if event.error is not None:
        fields["error"] = {"what": event.error.what, "where": event.error.where, "hint": event.error.hint}
    return fields
