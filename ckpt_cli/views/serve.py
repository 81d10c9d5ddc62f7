"""Serve a chain until a signal ends it."""

from ckpt.serving.server import ChainServer
from ckpt_cli.options.shadow import ListenOptions
from ckpt_cli.views.report import say
from ckpt_cli.views.shadow import print_event, show_address, stopped_by_signals, tls
from ckpt_formats.stores.address import parse_address


def serve(chain: str, options: ListenOptions, as_json: bool) -> None:
    """Serve until SIGINT (Ctrl-C) or SIGTERM."""
    assert options.listen is not None
    with stopped_by_signals() as stop:
        server = ChainServer(chain, parse_address(options.listen), options.token, tls(options))
        show_address(server.url, as_json)
        stop.wait()
        server.close()
    if as_json:
        print_event({"event": "stopped"})
    else:
        say("stopped")
