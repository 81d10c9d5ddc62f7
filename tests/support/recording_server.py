"""An HTTP server that keeps what clients post, and answers as an inference server is documented to."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class RecordedPosts:
    """A server's address and what it received: the path with its query, the JSON, and the Authorization header."""

    url: str
    posts: list[tuple[str, Any, str | None]] = field(default_factory=list)

    @property
    def exchange(self) -> list[tuple[str, Any]]:
        return [(path, body) for path, body, _ in self.posts]


@contextmanager
def recording_server(answers: Mapping[str, tuple[int, Any]] = {}) -> Iterator[RecordedPosts]:
    """Run a server. `answers`: status and JSON by path without query; 200 and an empty object for all others."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            recorded.posts.append((self.path, body, self.headers["Authorization"]))
            status, answer = answers.get(self.path.partition("?")[0], (200, {}))
            content = json.dumps(answer).encode()
            self.send_response(status)
            if 300 <= status < 400:
                self.send_header("Location", answer)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        recorded = RecordedPosts(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield recorded
        finally:
            server.shutdown()
            thread.join()
