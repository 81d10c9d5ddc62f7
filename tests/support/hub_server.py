"""A server that speaks the protocol of the Hugging Face Hub, as `huggingface_hub` itself asks: commits, listings in
pages, files by redirects, small ones on the same host and large ones with a signature on another, and its refusals."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_thetokenofthetests"
SIGNATURE = "the-signature-of-the-tests"
_LARGE = 1 << 14
"""Bytes of a file from which on it is on another server."""
_PAGE = 20


@dataclass
class Repository:
    """Commits by revision, and files of each commit."""

    revisions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    access: str = "public"
    """`public`, `private`: for those with the token; `gated`: for nobody."""

    def commit(self, folder: Path, revision: str = "main") -> str:
        """Upload a folder; the new commit."""
        files = {str(one.relative_to(folder)): one.read_bytes() for one in folder.rglob("*") if one.is_file()}
        commit = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[commit] = files
        self.revisions[revision] = self.revisions[commit] = commit
        return commit


@dataclass
class Hub:
    """A running server."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[tuple[str, str, bool]] = field(default_factory=list)
    """Of each: method, path without its query, whether it had a token."""
    lies: dict[str, str] = field(default_factory=dict)
    """Headers by which all files are answered falsely."""
    flips: int = 0
    """How many of the next ranges have a bit flipped."""
    failing: list[int] = field(default_factory=list)
    """The statuses by which the next requests of ranges are answered."""

    together: threading.Barrier | None = None
    """Where requests wait for one another that are to fail."""
    shift: int = 0
    """The bytes by which ranges are answered that begin later than those that were requested."""

    @property
    def gets_of_ranges(self) -> int:
        return sum(path.startswith(("/cdn/", "/api/resolve-cache/")) for _, path, _ in self.requests)


@contextmanager
def hub() -> Iterator[Hub]:
    state = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its head

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(address.query).items()}
            token = self.headers.get("Authorization") == f"Bearer {TOKEN}"
            state.requests.append((self.command, address.path, "Authorization" in self.headers))
            self._answer_to([unquote(part) for part in address.path.strip("/").split("/")], query, token)

        def do_POST(self) -> None:
            self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
            self.do_GET()

        def _answer_to(self, parts: list[str], query: dict[str, str], token: bool) -> None:
            if parts[0] == "cdn":
                # As of a signed address: valid by itself, and refused with further credentials.
                is_valid = query.get("sig") == SIGNATURE and "Authorization" not in self.headers
                return self._file(parts[1:], is_valid)
            is_api = parts[0] == "api"
            names = parts[2:4] if is_api else parts[:2]
            repository = state.repositories.get("/".join(names))
            if repository is None or (repository.access == "private" and not token):
                return self._refuse(401, "RepoNotFound")
            rest = parts[4:] if is_api else parts[2:]
            if is_api and parts[1] == "resolve-cache":
                return self._file(parts[2:], True)
            commit = repository.revisions.get(rest[1] if len(rest) > 1 else "main")
            if commit is None:
                return self._refuse(404, "RevisionNotFound")
            if not rest or rest[0] == "revision":
                return self._json({"id": "/".join(names), "sha": commit, "private": False, "tags": [], "siblings": []})
            if repository.access == "gated":
                return self._refuse(403, "GatedRepo")
            files = repository.commits[commit]
            if rest[0] == "tree":
                return self._tree(files, "/".join(rest[2:]), query)
            if rest[0] == "paths-info":
                return self._json([_entry(path, files[path]) for path in parse_qs(self.body)["paths"] if path in files])
            key = "/".join(rest[2:])
            if key not in files:
                return self._refuse(404, "EntryNotFound")
            place = f"{'/'.join(names)}/{commit}/{key}"
            if len(files[key]) >= _LARGE:
                host = state.url.replace("127.0.0.1", "localhost")
                return self._redirect(302, f"{host}/cdn/{place}?sig={SIGNATURE}", commit, files[key])
            return self._redirect(307, f"/api/resolve-cache/{place}", commit, files[key])

        def _tree(self, files: dict[str, bytes], folder: str, query: dict[str, str]) -> None:
            below = f"{folder}/" if folder else ""
            below_path = {path: data for path, data in files.items() if path.startswith(below)}
            if not below_path:
                return self._refuse(404, "EntryNotFound")
            entries: dict[str, object] = {}
            for path, data in sorted(below_path.items()):
                names = path[len(below) :].split("/")
                for depth in range(1, len(names)):
                    path_of_folder = below + "/".join(names[:depth])
                    entries[path_of_folder] = {"type": "directory", "path": path_of_folder, "oid": "0" * 40, "size": 0}
                entries[path] = _entry(path, data)
            if query.get("recursive", "").lower() != "true":
                entries = {path: one for path, one in entries.items() if "/" not in path[len(below) :]}
            first, listed = int(query.get("cursor", 0)), list(entries.values())
            more = {}
            if first + _PAGE < len(listed):
                own = f"{state.url}{urlsplit(self.path).path}?recursive={query.get('recursive')}&cursor={first + _PAGE}"
                more["Link"] = f'<{own}>; rel="next"'
            return self._json(listed[first : first + _PAGE], more)

        def _file(self, parts: list[str], is_valid: bool) -> None:
            if state.failing:
                status = state.failing.pop(0)
                if state.together is not None:
                    state.together.wait(10)
                return self._refuse(status, None)
            if not is_valid:
                return self._refuse(403, None)
            if parts[0] == "models":
                parts = parts[1:]
            data = state.repositories["/".join(parts[:2])].commits[parts[2]]["/".join(parts[3:])]
            begin, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            first = int(begin) + state.shift
            part = data[first : int(last) + 1 + state.shift if last else len(data)]
            stop = first + len(part) - 1
            if state.flips:
                state.flips, part = state.flips - 1, bytes([part[0] ^ 1]) + part[1:]
            self._send(206, part, {"Content-Range": f"bytes {first}-{stop}/{len(data)}", "ETag": f'"{_oid(data)}"'})
            return None

        def _redirect(self, status: int, location: str, commit: str, data: bytes) -> None:
            linked = hashlib.sha256(data).hexdigest() if len(data) >= _LARGE else _oid(data)
            size = {
                "X-Linked-Size": str(len(data)),
                "X-Linked-ETag": f'"{linked}"',
                "X-Repo-Commit": commit,
            } | state.lies
            self._send(status, b"", {"Location": location, **size, **state.lies})

        def _refuse(self, status: int, code: str | None) -> None:
            text = {} if code is None else {"X-Error-Code": code, "X-Error-Message": "as the hub says it"}
            self._send(status, b"{}", {**text, **({"Retry-After": "0"} if status == 429 else {})})

        def _json(self, content: object, headers: dict[str, str] | None = None) -> None:
            self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json", **(headers or {})})

        def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        state.url = f"http://127.0.0.1:{server.server_address[1]}"
        serving = threading.Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield state
        finally:
            server.shutdown()
            serving.join()


def _entry(path: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": path, "oid": _oid(data), "size": len(data)}
    if len(data) >= _LARGE:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry


def _oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0%b" % (len(data), data)).hexdigest()
