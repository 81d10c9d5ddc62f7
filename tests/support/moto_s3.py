"""moto's S3 as a server of its own: `python -I moto_s3.py PORT`.

`moto.server` serves all of AWS: it lists its hundred services for each request, looks for the one that is meant, and
logs the answer, which takes as long as the answer itself. A list of objects parses the same times again and again.

A thread serves each request, and moto checks conditions such as `If-None-Match` some lines before it writes: of two
requests at once, both could create an object, which no real store allows. Here, one object is changed at a time.
"""

import sys
import threading
from functools import lru_cache, wraps
from typing import Any

from moto.core import serialize
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from moto.s3.responses import S3Response
from werkzeug.serving import make_server


class Quiet(MotoRequestHandler):
    """Requests, of which nobody reads a log."""

    disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its head

    def log(self, type: str, message: str, *arguments: Any) -> None:
        pass


def change_one_at_a_time() -> None:
    """Look at no request while another does what its condition allowed. Bodies are here before: none waits for long."""
    lock = threading.Lock()

    def locked(change: Any) -> Any:
        @wraps(change)
        def changed(*arguments: Any, **options: Any) -> Any:
            with lock:
                return change(*arguments, **options)

        return changed

    for method in ("put", "post", "delete"):
        name = f"_key_response_{method}"
        setattr(S3Response, name, locked(getattr(S3Response, name)))


def main(port: int) -> None:
    change_one_at_a_time()
    parse = "parse_to_aware_datetime"
    setattr(serialize, parse, lru_cache(maxsize=10_000)(getattr(serialize, parse)))
    make_server("127.0.0.1", port, create_backend_app("s3"), threaded=True, request_handler=Quiet).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
