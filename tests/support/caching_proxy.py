"""A cache in front of a web server, as a CDN: it keeps what may be kept, and counts what it fetches."""

import threading
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Cache:
    """A running cache. `fetched`: the bytes of all bodies that the server behind it sent."""

    origin: str
    url: str = ""
    fetched: int = 0
    bodies: dict[str, tuple[dict[str, str], bytes]] = field(default_factory=dict)
    locks: dict[str, threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    def fetch(self, path: str, is_fresh: bool = False) -> tuple[int, dict[str, str], bytes]:
        """What the server has at a path: fetched, kept, or confirmed by its e_tag. One request of a path at a time."""
        with self.locks[path]:
            known = None if is_fresh else self.bodies.get(path)
            if known is not None and "immutable" in known[0]["cache-control"]:
                return 200, *known
            request = urllib.request.Request(self.origin + path)
            if known is not None:
                request.add_header("If-None-Match", known[0]["etag"])
            try:
                with urllib.request.urlopen(request, timeout=20) as answer:
                    headers, body = {name.lower(): value for name, value in answer.getheaders()}, answer.read()
            except urllib.error.HTTPError as error:
                with error:
                    return (200, *known) if error.code == 304 and known is not None else (error.code, {}, error.read())
            self.fetched += len(body)
            if "no-store" not in headers["cache-control"]:
                self.bodies[path] = (headers, body)
            return 200, headers, body


@contextmanager
def caching_proxy(origin: str) -> Iterator[Cache]:
    """A cache of a server, until the end of the context. `origin`: such as `http://127.0.0.1:7078`."""
    cache = Cache(origin)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its head

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            status, headers, body = cache.fetch(self.path, self.headers.get("Cache-Control") == "no-cache")
            wanted = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            passed = {name: headers[name] for name in ("etag", "cache-control", "content-type") if name in headers}
            if status == 200 and headers.get("etag") in (self.headers.get("If-None-Match") or "-").split(","):
                status, body = 304, b""
            elif status == 200 and wanted[1]:
                begin, end = int(wanted[0]), min(int(wanted[2]) + 1, len(body))
                passed["content-range"] = f"bytes {begin}-{end - 1}/{len(body)}"
                status, body = 206, body[begin:end]
            self.send_response(status)
            for name, value in passed.items():
                self.send_header(name, value)
            if status != 304:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        cache.url = f"http://127.0.0.1:{server.server_port}"
        yield cache
        server.shutdown()
        thread.join()
