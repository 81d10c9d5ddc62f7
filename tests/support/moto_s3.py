"""moto's S3 as a server of its own: `python -I moto_s3.py PORT`.

`moto.server` serves all of AWS: it lists its hundred services for each request, looks for the one that is meant, and
logs the answer, which takes as long as the answer itself. A list of objects parses the same times again and again.
"""

import sys
from functools import lru_cache
from typing import Any

from moto.core import serialize
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server


class Quiet(MotoRequestHandler):
    """Requests, of which nobody reads a log."""

    disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its head

    def log(self, type: str, message: str, *arguments: Any) -> None:
        pass


def main(port: int) -> None:
    parse = "parse_to_aware_datetime"
    setattr(serialize, parse, lru_cache(maxsize=10_000)(getattr(serialize, parse)))
    make_server("127.0.0.1", port, create_backend_app("s3"), threaded=True, request_handler=Quiet).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]))
