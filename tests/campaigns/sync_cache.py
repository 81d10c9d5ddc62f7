"""Let fifty followers at once read a published chain through nginx, and count what nginx reads of its origin.

The origin is `ckpt serve`, or a bucket of SeaweedFS that everybody may read. For one follower, then for fifty, nginx
starts with an empty cache. Each follower goes from the base to the last step, one step after another, and compares all
bits. Needs nginx (`apt-get install nginx`): without it, the rounds say that they are skipped.
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import ml_dtypes
import numpy as np

from ckpt.following.follower import Follower
from ckpt.serving.server import ChainServer
from ckpt_formats.stores.address import NetworkAddress
from object_stores import BUCKET, free_port, seaweedfs
from published import PublishedRun, Weights
from run import Round, alternated

FOLLOWERS, RANKS, STEPS = 50, 4, 5
SHAPE = (1024, 1024)
CHANGED = SHAPE[0] * SHAPE[1] // 100
DEADLINE = 60.0
CONFIGURATION = """
daemon off;
user root;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
    log_format bytes "$upstream_bytes_received $upstream_cache_status $request_uri";
    access_log {folder}/access.log bytes;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    proxy_cache_path {folder}/cache keys_zone=chain:10m max_size=50g inactive=24h;
    upstream origin {{ server {origin}; keepalive 16; }}
    server {{
        listen 127.0.0.1:{port};
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host {origin};
        location / {{ proxy_pass http://origin; }}
        location ~ /published/(objects|steps|folds)/ {{
            proxy_pass http://origin;
            proxy_cache chain;
            proxy_cache_key $uri;
            proxy_cache_valid 200 24h;
            proxy_ignore_headers Cache-Control Expires;
            proxy_cache_lock on;
            proxy_cache_lock_timeout 10m;
        }}
    }}
}}
"""


def weights_at(step: int) -> list[Weights]:
    """The weights after each step up to one; each changes a hundredth of the values."""
    states, random_ = list[Weights](), np.random.default_rng(0)
    values = random_.normal(0, 0.02, SHAPE).astype(ml_dtypes.bfloat16)
    for _ in range(step + 1):
        states.append({f"layer.{number}": np.roll(values, number, 0) for number in range(RANKS)})
        values = values.copy()
        values.reshape(-1).view(np.uint16)[random_.integers(0, values.size, CHANGED)] += 1
    return states


@contextmanager
def nginx(folder: Path, origin: str) -> Iterator[str]:
    """nginx with an empty cache in front of a server. `origin`: its host and port."""
    folder.mkdir()
    port = free_port()
    (folder / "nginx.conf").write_text(CONFIGURATION.format(folder=folder, origin=origin, port=port))
    process = subprocess.Popen(
        ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    )
    try:
        end = time.monotonic() + DEADLINE
        while not is_listening(port):
            assert process.poll() is None, f"nginx has ended: {(folder / 'error.log').read_text()}"
            assert time.monotonic() < end, "nginx does not answer"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def upstream_nbytes(log: str) -> Counter[str]:
    """What nginx has received of its origin: bytes with heads, and requests."""
    seen = Counter[str]()
    for line in log.splitlines():
        for nbytes in line.split()[0].rstrip(",").split(","):
            if nbytes != "-":
                seen.update({"bytes of the origin": int(nbytes), "requests to the origin": 1})
    return seen


class CachedChain:
    """A chain, and the states that followers must have."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.states = folder, weights_at(STEPS)
        (folder / "policy.chain").mkdir(parents=True)
        run = PublishedRun(folder / "policy.chain", self.states[0], RANKS)
        for step, weights in enumerate(self.states):
            run.publish(step, weights)
        self.run = run.run

    def follow(self, url: str, start: threading.Barrier) -> None:
        start.wait()
        with Follower(url) as follower:
            for step, weights in enumerate(self.states):
                assert follower.update(step).step == step
                tensors = follower.tensors()
                assert all(tensors[name].tobytes() == values.tobytes() for name, values in weights.items())

    def read(self, followers: int, origin: str, path: str, name: str) -> Counter[str]:
        """Follow with so many at once; what nginx has received of the origin then."""
        with nginx(self.folder / name, origin) as url, ThreadPoolExecutor(followers) as pool:
            start = threading.Barrier(followers)
            for one in [pool.submit(self.follow, f"{url}{path}", start) for _ in range(followers)]:
                one.result()
        return upstream_nbytes((self.folder / name / "access.log").read_text())

    def compare(self, origin: str, path: str, name: str) -> Counter[str]:
        one = self.read(1, origin, path, f"{name}-one")
        many = self.read(FOLLOWERS, origin, path, f"{name}-many")
        nbytes = "bytes of the origin"
        assert many[nbytes] <= 1.1 * one[nbytes], f"{many[nbytes]:,} bytes, and {one[nbytes]:,} for one follower"
        seen = {f"{what}, {count}": by[what] for count, by in ((1, one), (FOLLOWERS, many)) for what in by}
        return Counter({**seen, "states compared": (1 + FOLLOWERS) * len(self.states)})


def rounds(folder: Path, seed: int) -> Iterator[Round]:
    """Yield followers of `ckpt serve` and of a bucket behind nginx, in turn."""
    if shutil.which("nginx") is None:
        yield from alternated({"nginx is missing": lambda: {"skipped": 1}})
    generator = random.Random(seed)
    with ExitStack() as stack:
        chain = CachedChain(folder / "chain")
        server = ChainServer(chain.run, NetworkAddress("127.0.0.1", 0))
        stack.callback(server.close)
        (folder / "store").mkdir()
        bucket = stack.enter_context(seaweedfs(folder / "store", is_public=True))
        bucket.upload(chain.run)

        def compare(origin: str, path: str) -> Counter[str]:
            return chain.compare(origin, path, f"nginx-{generator.getrandbits(32):08x}")

        store = bucket.endpoint.removeprefix("http://")
        yield from alternated(
            {
                "ckpt serve": partial(compare, server.address, f"/{chain.run.name}"),
                "bucket": partial(compare, store, f"/{BUCKET}/{chain.run.name}"),
            }
        )
