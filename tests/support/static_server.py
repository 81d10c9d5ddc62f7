"""A plain server of the files of a folder, without ranges and e_tags: that of Python's library."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its head

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def static_server(folder: Path) -> Iterator[str]:
    """The URL of a folder, until the end of the context."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder))) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
