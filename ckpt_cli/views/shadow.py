"""Run a shadow, and show where it is."""

import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ckpt.job import load_kernels
from ckpt.pipeline import Resources
from ckpt.shadow import follow as following
from ckpt.shadow.follow import ShadowEvent
from ckpt.shadow.shadow import Shadow, ShadowStatus
from ckpt_cli import notes
from ckpt_cli.options.shadow import ListenOptions, ShadowOptions
from ckpt_cli.progress import on_terminal, progress_bar
from ckpt_cli.views import job
from ckpt_cli.views.report import bounded, conclude, data, say
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.stores.address import parse_address, tls_of
from ckpt_formats.stores.location import local_path

if TYPE_CHECKING:
    from ssl import SSLContext

    from ckpt.shadow.server import Server

_REDRAW_SECONDS, _LINE_SECONDS = 0.2, 30.0
"""How often the line on a terminal changes, and how often a line is printed elsewhere."""


def follow_once(chain: str, options: ShadowOptions, resources: Resources, as_json: bool) -> None:
    """Go to the last step, and show it or write it."""
    load_kernels()
    bases: list[dict[str, Any]] = []

    def report(event: ShadowEvent) -> None:
        if event.base is not None or event.error is not None:
            bases.append(_to_json(event))
            if not as_json:
                say(_text(event))

    with _shadow(chain, options, resources) as shadow:
        following.follow(shadow, report, threading.Event(), once=True)
        with shadow.frozen() as checkpoint:
            notes.note(*checkpoint.notices)
        status = shadow.status
        result = None
        if options.output is not None:
            notes.flush()
            with progress_bar("writing") as progress:
                result = following.write(shadow, Path(options.output), progress)
    if as_json:
        more = {} if result is None else {"written": job.to_json(result)}
        data({"chain": chain, **status_json(status), "bases": bases, **more})
        return
    conclude(f"{printable(chain)}: {status_text(status)}")
    if result is not None:
        job.show_result(result, as_json)


def follow(chain: str, options: ShadowOptions, resources: Resources, as_json: bool) -> None:
    """Follow until a signal ends it: SIGINT (Ctrl-C) or SIGTERM."""
    load_kernels()
    with _shadow(chain, options, resources) as shadow:
        server = None if options.listening.listen is None else _listen(shadow, options.listening)
        if server is not None:
            show_address(f"tcp://{server.address}", as_json)
        try:
            _follow(shadow, as_json)
        finally:
            if server is not None:
                server.close()


def _follow(shadow: Shadow, as_json: bool) -> None:
    line = _Line()

    def report(event: ShadowEvent) -> None:
        if as_json:
            print_event(_to_json(event))
        elif event.base is not None or event.error is not None:
            line.end()
            say(_text(event))
        else:
            line.show(status_text(event.status), is_last=event.kind == "waiting")

    with stopped_by_signals() as stop:
        following.follow(shadow, report, stop)
    if as_json:
        print_event({"event": "stopped", **status_json(shadow.status)})
        return
    line.end()
    conclude(f"stopped: {status_text(shadow.status)}")


@contextmanager
def _shadow(chain: str, options: ShadowOptions, resources: Resources) -> Iterator[Shadow]:
    """A shadow of the chain in a folder, or of one that is served at an address."""
    part = None
    if options.part is not None:
        from ckpt_formats.universal.gradients.parts import StatePart

        part = StatePart(*options.part)
    if options.credentials is None:
        yield Shadow(local_path(chain), resources=resources, base_every=options.base_every, part=part)
        return
    from ckpt.shadow.mirror import LogMirror

    place = None if options.mirror is None else Path(options.mirror)
    with LogMirror(chain, options.credentials, place) as mirror:
        yield Shadow(mirror, resources=resources, base_every=options.base_every, part=part)


def _listen(shadow: Shadow, options: ListenOptions) -> "Server":
    from ckpt.shadow.server import Server

    assert options.listen is not None
    return Server(shadow, parse_address(options.listen), options.token, tls(options))


def tls(options: ListenOptions) -> "SSLContext | None":
    """TLS with the certificate that the user names; None: without TLS."""
    if options.tls_certificate is None or options.tls_key is None:
        return None

    return tls_of(Path(options.tls_certificate), Path(options.tls_key))


def show_address(address: str, as_json: bool) -> None:
    """Say where the command listens."""
    if as_json:
        print_event({"event": "listening", "address": address})
    else:
        say(f"listening on {address}")


def status_text(status: ShadowStatus) -> str:
    """A line about where a shadow is."""
    if status.step is None:
        return "waiting for the start of the log"
    verified = "" if status.verified is None else f", equal to the run's fingerprint of step {status.verified}"
    rate = f", {status.rate / 1e6:,.0f} Mparam/s" if status.steps else ""
    lag = f", about {status.lag_steps} steps behind" if status.lag_steps else ""
    damage = "" if status.damage is None else ", and the log is damaged after it"
    return f"step {status.step}{lag}{damage}: {format_nbytes(status.nbytes)} in memory{rate}{verified}"


def status_json(status: ShadowStatus) -> dict[str, Any]:
    """The same as plain data."""
    fields = vars(status) | {"seconds": round(status.seconds, 3)}
    return {**fields, "mparams_per_second": round(status.rate / 1e6, 1)}


def _to_json(event: ShadowEvent) -> dict[str, Any]:
    fields: dict[str, Any] = {"event": event.kind, **status_json(event.status)}
    if event.base is not None:
        base = event.base
        fields["base"] = {"folder": base.folder, "step": base.step, "nbytes": base.stored_nbytes}
    if event.error is not None:
        fields["error"] = {"what": event.error.what, "where": event.error.where, "hint": event.error.hint}
    return fields


def _text(event: ShadowEvent) -> str:
    if event.base is not None:
        return (
            f"base: step {event.base.step}, {format_nbytes(event.base.stored_nbytes)}, equal to the run's fingerprint"
        )
    if event.kind == "damaged":
        return bounded(f"no step after {event.status.step}: {event.error}")
    return bounded(f"no base at step {event.status.step}: {event.error}")


def print_event(fields: dict[str, Any]) -> None:
    """Print an object on a line of its own."""
    click.echo(json.dumps(fields, allow_nan=False))
    sys.stdout.flush()


@contextmanager
def stopped_by_signals() -> Iterator[threading.Event]:
    """Within, SIGINT and SIGTERM set the event. A second one has its usual effect."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def handle(number: int, frame: object) -> None:
        stop.set()
        restore()

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()


class _Line:
    """A line that changes on a terminal; elsewhere a line every half minute."""

    def __init__(self) -> None:
        self._shown, self._width = float("-inf"), 0

    def show(self, text: str, is_last: bool) -> None:
        """Show a text, if the last one is old enough. `is_last`: for some time, no other one follows."""
        now = time.monotonic()
        if on_terminal():
            if is_last or now - self._shown >= _REDRAW_SECONDS:
                click.echo(f"\r{text:<{self._width}}", err=True, nl=False)
                self._shown, self._width = now, len(text)
        elif now - self._shown >= _LINE_SECONDS:
            say(text)
            self._shown = now

    def end(self) -> None:
        """Begin a new line, if the last one is not empty."""
        if self._width:
            click.echo(err=True)
        self._width = 0
