"""Hold pieces of runs until a signal ends it, or show what a holder has."""

from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any

from ckpt.holding.holder import DamagedPart, HeldPieces, Holder, scrub_until
from ckpt_cli.options.shadow import HoldOptions
from ckpt_cli.reading import shadow_credentials
from ckpt_cli.views.report import conclude, data, say
from ckpt_cli.views.shadow import print_event, show_address, stopped_by_signals, tls
from ckpt_formats.core.errors import IncompleteError
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.stores import piece_requests
from ckpt_formats.stores.address import parse_address
from ckpt_formats.stores.connection import Connection
from ckpt_formats.stores.freed_runs import free_run


def hold(options: HoldOptions, as_json: bool) -> None:
    """Hold until SIGINT (Ctrl-C) or SIGTERM."""
    assert options.listening.listen is not None
    assert options.memory is not None
    with stopped_by_signals() as stop:
        address = parse_address(options.listening.listen)
        pieces = HeldPieces(options.memory)
        holder = Holder(pieces, address, options.listening.token, tls(options.listening))
        show_address(str(holder.address), as_json)
        scrub_until(stop, pieces, partial(_show_damage, as_json))
        holder.close()
    if as_json:
        print_event({"event": "stopped"})
    else:
        say("stopped: what was held is gone")


def _show_damage(as_json: bool, part: DamagedPart) -> None:
    """Say what is damaged in memory: readers do without it, and a holder that is started again is filled again."""
    if as_json:
        print_event({"event": "damaged", **asdict(part)})
    else:
        where = f"{printable(part.run)}: {printable(part.what)}, at byte {part.offset}"
        say(f"DAMAGED in memory: {where}. Readers do without it. Start this holder again: a run that goes on fills it.")


def free(url: str, as_json: bool) -> None:
    """Let holders free a run, and show how much each had of it.

    Raises `InvalidArgumentError` for another address, `NotFoundError` if nobody who answers has the run, and
    `IncompleteError` if a holder does not answer: it may still have the run.
    """
    freed = free_run(url, shadow_credentials())
    silent = {str(one.address): one.error.what for one in freed if one.error is not None}
    nbytes = {str(one.address): one.nbytes for one in freed if one.error is None}
    if as_json:
        data({"run": url, "freed": nbytes, "silent": silent})
    else:
        for address, count in nbytes.items():
            say(f"{printable(address)}: freed {format_nbytes(count)}")
        for address, reason in silent.items():
            say(f"{printable(address)}: {printable(reason)}")
    if silent:
        raise IncompleteError(
            f"{len(silent)} holders do not answer, and may still have the run", where=url, hint="Run it again."
        )
    if not as_json:
        conclude(f"freed {format_nbytes(sum(nbytes.values()))} of {printable(url)}")


def show_status(address: str, as_json: bool) -> None:
    """Ask a holder what it has, and show it."""
    with closing(Connection(parse_address(address), shadow_credentials(), "holder")) as connection:
        status = piece_requests.holder_status(connection)
    if as_json:
        fields: dict[str, Any] = {"address": address, "memory": status.memory, "nbytes": status.nbytes}
        data({**fields, "runs": [vars(run) for run in status.runs]})
        return
    for run in status.runs:
        parity = f", {format_nbytes(run.parity_nbytes)} of parity" if run.parity_nbytes else ""
        pieces_text = f"{format_nbytes(run.nbytes)} in {run.files} files{parity}"
        say(f"{printable(run.run)}: up to step {run.step}, {pieces_text}")
    conclude(f"{printable(address)}: {format_nbytes(status.nbytes)} of {format_nbytes(status.memory)} in use")
