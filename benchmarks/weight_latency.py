"""How long a step takes from the optimizer to a folder that is served, through a slow network."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice, pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np

from ckpt.following.follower import Follower
from ckpt.following.served import ServedFolder
from ckpt.following.source import PublishedSource
from ckpt.publishing.publication import Publication, open_publication
from ckpt.publishing.published_objects import put_object
from ckpt.publishing.rank_buffers import RankBuffers
from ckpt_formats.core.geometry import Box
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.boxes.table import BoxPlace
from ckpt_formats.universal.published.model import PublishedModel, PublishedTensor, TensorPiece

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from object_stores import BUCKET, StoreServer, killing, moto, reached, seaweedfs
from slow_network import slow
from weight_runs import BF16, WeightRun

CHAIN = f"s3://{BUCKET}/policy.chain"
MAX_STATES = 41
SECONDS = 300


@dataclass(frozen=True)
class LargeModel:
    """A run repeated to a larger model. Its copies are at different steps of the run, so that no two are equal."""

    states: list[np.ndarray[Any, Any]]
    run: WeightRun
    copies: int
    steps: int
    """How many steps of the larger model there are."""

    @classmethod
    def of(cls, run: WeightRun, nbytes: float, steps: int) -> LargeModel:
        states = [weights for _, weights in islice(run.states(), MAX_STATES)]
        return cls(states, run, max(1, round(nbytes / states[0].nbytes)), steps)

    def model(self, ranks: int) -> PublishedModel:
        tensors, pieces = list[PublishedTensor](), [list[TensorPiece]() for _ in range(ranks)]
        for copy in range(self.copies):
            for name, shape in self.run.shapes.items():
                place = BoxPlace(shape, Box.whole(shape), 0, shape)
                pieces[copy * ranks // self.copies].append(TensorPiece(len(tensors), place))
                tensors.append(PublishedTensor(f"copy{copy}.{name}", BF16, shape))
        return PublishedModel(tuple(tensors), tuple(map(tuple, pieces)), {}, {})

    def fill(self, ranks: list[RankBuffers], step: int) -> None:
        """Copy the weights after a step into the buffers, as from the memory of a GPU."""
        at = [0] * len(ranks)
        for copy in range(self.copies):
            rank = copy * len(ranks) // self.copies
            for values in self.run.tensors(self.weights(copy, step)).values():
                ranks[rank].piece(at[rank])[:] = values.reshape(-1)
                at[rank] += 1

    def weights(self, copy: int, step: int) -> np.ndarray[Any, Any]:
        return self.states[step + copy * (self.steps + 1) % (len(self.states) - self.steps)]


@dataclass(frozen=True)
class Latency:
    """One step: seconds since the optimizer's step was done, and bytes."""

    step: int
    filled: float
    encoded: float
    stored: float
    committed: float
    verified: float
    """When the follower holds it, or serves its folder."""
    nbytes: int


class Publisher:
    """All ranks of a trainer in one process."""

    def __init__(self, large: LargeModel, ranks: int, threads: int) -> None:
        self.large, self.model = large, large.model(ranks)
        self.ranks = [RankBuffers(self.model, rank, threads=threads) for rank in range(ranks)]

    def start(self, publication: Publication) -> None:
        self.large.fill(self.ranks, 0)
        publication.start(0, [rank.state() for rank in self.ranks])
        self.publish(publication, 0)

    def publish(self, publication: Publication, step: int) -> tuple[list[float], int]:
        """Publish a step; return when it was filled, encoded, stored and committed, and its bytes."""
        times = []
        self.large.fill(self.ranks, step)
        times.append(time.time())
        parent = None if publication.needs_base() else publication.parent
        with ThreadPoolExecutor(len(self.ranks)) as pool:
            stored = []
            for rank in self.ranks:
                one = rank.encode(parent is None)
                stored.append((one, pool.submit(put_object, publication.place, one.share.object, one.object)))
            times.append(time.time())
            for _, future in stored:
                future.result()
        times.append(time.time())
        publication.commit(step, parent, [one.share for one, _ in stored])
        times.append(time.time())
        for rank in self.ranks:
            rank.accept()
        return times, sum(len(one.object) for one, _ in stored)


def _follow(environment: dict[str, str], results: Connection) -> None:
    """Follow in memory, and tell of each step when it was verified."""
    os.environ.update(environment)
    with Follower(CHAIN) as follower:
        while True:
            step = follower.wait(timeout=1, every=0.1)
            if step is not None:
                follower.update(step)
                results.send((step.step, time.time()))


class MemoryTarget:
    """A follower in another process, which holds the weights in memory."""

    def __init__(self, server: StoreServer) -> None:
        self.results, child = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        self.process = spawn.Process(target=_follow, args=(server.environment, child), daemon=True)
        self.process.start()

    def verified(self, step: int) -> float:
        """Wait until a step is verified; return when it was."""
        while True:
            assert self.results.poll(SECONDS), f"step {step} does not come"
            at, seconds = self.results.recv()
            if at == step:
                return float(seconds)

    def close(self) -> None:
        self.process.kill()
        self.process.join()


class FolderTarget:
    """`ckpt follow`, which serves a folder, and tells a server of each step that is served."""

    def __init__(self, server: StoreServer, folder: Path) -> None:
        self.served: Queue[tuple[int, float]] = Queue()
        served = self.served

        class Engine(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                seconds = time.time()
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                served.put((int(body["step"]), seconds))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        self.engine = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
        threading.Thread(target=self.engine.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{self.engine.server_port}/"
        command = [sys.executable, "-m", "ckpt_cli", "follow", CHAIN, str(folder / "served"), "--every", "0.1"]
        with (folder / "log").open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--notify", url], env={**os.environ, **server.environment}, stdout=log, stderr=log
            )

    def verified(self, step: int) -> float:
        while True:
            at, seconds = self.served.get(timeout=SECONDS)
            if at == step:
                return seconds

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.engine.shutdown()


@contextmanager
def closing_target(kind: str, server: StoreServer, folder: Path) -> Iterator[MemoryTarget | FolderTarget]:
    target = MemoryTarget(server) if kind == "memory" else FolderTarget(server, folder)
    try:
        yield target
    finally:
        target.close()


def latencies(
    run: WeightRun, folder: Path, target: str, gb: float, ranks: int, steps: int, network: tuple[float, float]
) -> Iterator[Latency]:
    """Publish steps of a repeated run through a slow network to SeaweedFS, and follow each through another one."""
    publisher = Publisher(LargeModel.of(run, gb * 1e9, steps), ranks, os.cpu_count() or 1)
    (folder / "store").mkdir()
    with (
        seaweedfs(folder / "store") as server,
        slow(server.endpoint, *network) as there,
        slow(server.endpoint, *network) as back,
    ):
        with reached(server), open_publication(target_path(CHAIN), publisher.model) as publication:
            publisher.start(publication)
        with (
            reached(StoreServer(there)),
            open_publication(target_path(CHAIN), publisher.model) as publication,
            closing_target(target, StoreServer(back), folder) as following,
        ):
            publication.start(0, [share.state for share in publication.record.shares])  # type: ignore[union-attr]
            following.verified(0)
            for step in range(1, steps + 1):
                began = time.time()
                times, nbytes = publisher.publish(publication, step)
                verified = following.verified(step)
                yield Latency(step, *(at - began for at in (*times, verified)), nbytes)
                time.sleep(0.5)


@dataclass(frozen=True)
class Stage:
    """A part of the way of a step, without a network."""

    name: str
    wall: float
    """Seconds."""
    cpu: float
    """Of all threads of the process."""


def stages(run: WeightRun, folder: Path, gb: float, ranks: int, steps: int) -> Iterator[list[Stage]]:
    """Publish steps of a repeated run into a folder, and serve each in another one, in this process; time each stage.

    The first three steps are not timed: the served folders are new then.
    """
    threads = os.cpu_count() or 1
    publisher = Publisher(LargeModel.of(run, gb * 1e9, steps + 3), ranks, threads)
    chain, source = folder / "policy.chain", PublishedSource(folder / "policy.chain")
    with (
        open_publication(chain, publisher.model) as publication,
        ServedFolder(folder / "served", source, threads) as to,
    ):
        publisher.start(publication)
        for step in range(1, steps + 4):
            times = [("", time.perf_counter(), time.process_time())]

            def done(name: str, times: list[tuple[str, float, float]] = times) -> None:
                times.append((name, time.perf_counter(), time.process_time()))

            publisher.large.fill(publisher.ranks, step)
            done("the trainer's copy")
            for rank in publisher.ranks:
                rank.state()
            done("publisher: hash")
            encoded = [rank.encode(is_base=False) for rank in publisher.ranks]
            done("publisher: compare and encode")
            for one in encoded:
                put_object(publication.place, one.share.object, one.object)
            done("publisher: objects")
            publication.commit(step, publication.parent, [one.share for one in encoded])
            done("publisher: record and head")
            for rank in publisher.ranks:
                rank.accept()
            head = source.head()
            assert head is not None
            source.record(head.record)
            done("follower: head and record")
            to.advance(head, head.record)
            done("follower: objects, decode, hash, rename")
            to.release_other()
            if step > 3:
                yield [Stage(b[0], b[1] - a[1], b[2] - a[2]) for a, b in pairwise(times)]


def requests(run: WeightRun, ranks: int, steps: int) -> dict[str, Counter[str]]:
    """Count the requests of a publisher and of a follower in so many steps, by method and kind of object."""
    publisher = Publisher(LargeModel.of(run, ranks * run.state(0).nbytes, steps), ranks, 1)
    with moto() as server, killing(server) as there, killing(server) as back, ExitStack() as stack:
        stack.enter_context(reached(StoreServer(there.endpoint)))
        publication = stack.enter_context(open_publication(target_path(CHAIN), publisher.model))
        publisher.start(publication)
        with reached(StoreServer(back.endpoint)):
            follower = stack.enter_context(Follower(CHAIN))
            follower.update()
        there.expect()
        back.expect()
        for step in range(1, steps + 1):
            publisher.publish(publication, step)
            with reached(StoreServer(back.endpoint)):
                assert follower.update().step == step
        return {name: Counter(map(_what, one.seen)) for name, one in (("publisher", there), ("follower", back))}


def _what(request: str) -> str:
    method, _, path = request.partition(" ")
    parts = path.partition("?")[0].split("/policy.chain/")[-1].split("/")
    return f"{method} {parts[1] if len(parts) > 1 and parts[0] == 'published' else parts[0]}"
