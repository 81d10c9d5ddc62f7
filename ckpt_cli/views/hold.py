"""Hold pieces of runs until a signal ends it, or show what a holder has."""

from contextlib import closing
from typing import Any

from ckpt.holding.holder import HeldPieces, Holder
from ckpt_cli.options.shadow import HoldOptions
from ckpt_cli.reading import shadow_credentials
from ckpt_cli.views.report import conclude, data, say
from ckpt_cli.views.shadow import print_event, show_address, stopped_by_signals, tls
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.stores import piece_requests
from ckpt_formats.stores.address import parse_address
from ckpt_formats.stores.connection import Connection


def hold(options: HoldOptions, as_json: bool) -> None:
    """Hold until SIGINT (Ctrl-C) or SIGTERM."""
    assert options.listening.listen is not None
    assert options.memory is not None
    with stopped_by_signals() as stop:
        address = parse_address(options.listening.listen)
        pieces = HeldPieces(options.memory)
        holder = Holder(pieces, address, options.listening.token, tls(options.listening))
        show_address(str(holder.address), as_json)
        stop.wait()
        holder.close()
    if as_json:
        print_event({"event": "stopped"})
    else:
        say("stopped: what was held is gone")


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
