"""How long, and for how many dollars, a checkpoint is converted in a store: `python benchmarks/scale.py`.

A model, not a measurement: parts are dealt to the processes of all workers, each reads, computes and writes at the same
time, and the slowest of these counts. Nothing is fitted. All assumptions are printed. `--check FILE` compares it with
what `python benchmarks/stores.py --json FILE` measured, and, where the file has them, with times of one and of two
worker processes.
"""

from __future__ import annotations

import argparse
import heapq
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

GB = 1e9
MiB = float(1 << 20)


@dataclass(frozen=True)
class Store:
    """What a store gives. Amazon's own figures for S3, but for the first two, which vary."""

    latency: float = 0.03
    """Seconds to the first byte of an answer."""
    stream: float = 90e6
    """Bytes a second of one connection."""
    gets: float = 5500.0
    """Requests a second of one prefix that read."""
    puts: float = 3500.0
    prefixes: int = 8
    """Prefixes over which the objects are spread."""
    rate: float = 400e9
    """Bytes a second of the whole store, each way."""


@dataclass(frozen=True)
class Node:
    """One worker."""

    network: float = 12.5e9
    """Bytes a second, each way."""
    cores: int = 32
    processes: int = 32
    """Parts at a time. Threads of one process share the interpreter's lock, and are worth about three cores."""


@dataclass(frozen=True)
class Costs:
    """CPU seconds for each GB; measured here, see benchmarks/results/stores.md."""

    read: float = 0.6
    """To request ranges (obstore, 8 MiB each)."""
    own: float = 0.8
    """To copy, compare and hash."""
    write: float = 1.05
    """To upload (obstore, in parts)."""
    codec: float = 0.0


@dataclass(frozen=True)
class Work:
    """What is to be done."""

    nbytes: float = 10e12
    written: float = 1.0
    """Bytes written for each that is read."""
    part: float = 1e9
    """Bytes of a part: what a process does at a time."""
    request: float = 8 * MiB
    """Bytes of a request that reads."""
    upload: float = 16 * MiB
    """Bytes of a request that writes."""
    ahead: int = 16
    """Requests on their way for a part: 8 MiB each in the half of --memory that is for them."""
    opening: float = 60.0
    """Seconds until the first part: the listing, headers, the plan."""
    closing: float = 20.0
    """Seconds after the last part: checksums, the manifest."""


@dataclass(frozen=True)
class Prices:
    """Dollars: list prices of Amazon in us-east-1 as of 2025, from memory: nothing can be looked up here.

    Within a region, traffic costs nothing. What the store takes for keeping the bytes is not in it.
    """

    get: float = 0.4e-6
    put: float = 5e-6
    node_hour: float = 2.0
    """32 cores with 100 Gb/s, on demand."""


@dataclass(frozen=True)
class Setup:
    """One row of the table."""

    workers: int = 64
    node: Node = Node()
    store: Store = Store()
    work: Work = Work()
    costs: Costs = Costs()
    prices: Prices = Prices()
    lost: int = 0
    """Workers that are killed on the way."""
    slow: int = 0
    """Workers at a quarter of the speed."""

    @property
    def slots(self) -> int:
        """Parts at a time, on all workers."""
        return self.workers * self.node.processes


@dataclass(frozen=True)
class Outcome:
    """What the model says."""

    seconds: float
    bound: str
    """What the time of a part is spent on."""
    gets: float
    puts: float
    dollars: float
    repeated: int
    """Parts that were begun by a worker that was killed."""


def bounds(setup: Setup, speed: float = 1.0) -> dict[str, float]:
    """Seconds of a part for each thing it needs, while all slots are busy. They go on at the same time."""
    work, store, node, costs = setup.work, setup.store, setup.node, setup.costs
    out = work.part * work.written
    share = min(node.network * speed / node.processes, store.rate / setup.slots)
    gets, puts = work.part / work.request, out / work.upload
    cpu = work.part / GB * (costs.read + costs.own + costs.codec) + out / GB * costs.write
    return {
        "network": max(work.part, out) / share,
        "latency": gets * (store.latency + work.request / store.stream) / work.ahead,
        "uploads": puts * (store.latency + work.upload / store.stream) / work.ahead,
        "requests": max(gets / store.gets, puts / store.puts) * setup.slots / store.prefixes,
        "CPU": cpu * max(1.0, node.processes / node.cores) / speed,
    }


def part_seconds(setup: Setup, speed: float = 1.0) -> float:
    """Seconds of a part: the slowest of its needs, and the time to fill and to empty what is on the way."""
    return max(bounds(setup, speed).values()) + 4 * setup.store.latency


def outcome(setup: Setup, seed: int = 0) -> Outcome:
    """Deal the parts to all slots, each to the one that is free first."""
    chosen = random.Random(seed)
    parts = max(1, round(setup.work.nbytes / setup.work.part))
    busy = parts / setup.slots * part_seconds(setup)
    killed = {n: chosen.uniform(0.2, 0.8) * busy for n in chosen.sample(range(setup.workers), setup.lost)}
    slow = set(chosen.sample(range(setup.workers), setup.slow))
    free = [(0.0, worker, slot) for worker in range(setup.workers) for slot in range(setup.node.processes)]
    left, repeated, last = parts, 0, 0.0
    while left and free:
        at, worker, slot = heapq.heappop(free)
        end = at + part_seconds(setup, 0.25 if worker in slow else 1.0) * chosen.uniform(0.95, 1.15)
        if end > killed.get(worker, end):
            repeated += at < killed[worker]
            continue
        left, last = left - 1, max(last, end)
        heapq.heappush(free, (end, worker, slot))
    seconds = setup.work.opening + last + setup.work.closing
    by_need = bounds(setup)
    gets, puts = setup.work.nbytes / setup.work.request, setup.work.nbytes * setup.work.written / setup.work.upload
    prices = setup.prices
    dollars = gets * prices.get + puts * prices.put + seconds / 3600 * setup.workers * prices.node_hour
    return Outcome(seconds, max(by_need, key=lambda need: by_need[need]), gets, puts, dollars, repeated)


def rows() -> dict[str, Setup]:
    """What the table compares."""
    usual = Setup()
    work, store = usual.work, usual.store
    small = Node(network=1.56e9, cores=8, processes=8)
    return {
        "1 worker": replace(usual, workers=1),
        "2 workers": replace(usual, workers=2),
        "64 workers, ranges joined to 8 MiB": usual,
        "- without requests ahead": replace(usual, work=replace(work, ahead=1)),
        "- a store of 100 GB/s": replace(usual, store=replace(store, rate=100e9)),
        "- one prefix": replace(usual, store=replace(store, prefixes=1)),
        "- ranges of 1 MiB": replace(usual, work=replace(work, request=MiB)),
        "- ranges of 40 kB: 1,024 ranks, not joined": replace(usual, work=replace(work, request=40e3)),
        "- encoded: 3.3 CPU s/GB, 0.7 of the bytes": replace(
            usual, work=replace(work, written=0.7), costs=replace(usual.costs, codec=3.3)
        ),
        "- parts of 100 GB: fewer than processes": replace(usual, work=replace(work, part=100e9)),
        "- 4 workers killed on the way": replace(usual, lost=4),
        "- 6 workers at a quarter of the speed": replace(usual, slow=6),
        "- one process of 32 threads on each": replace(usual, node=Node(cores=3)),
        "one machine of 8 cores, 12.5 Gb/s": replace(usual, workers=1, node=small),
        "- download, convert, upload there": replace(
            usual, workers=1, node=small, work=replace(work, nbytes=3 * work.nbytes)
        ),
    }


def foretold(figures: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """Seconds by the model and as measured by `benchmarks/stores.py`, for each of its rows that reads from a store.

    What the store gives, and what a request takes there without delay, are those of the runs without delay.
    """
    nbytes, near = figures["nbytes"], figures["runs"]["the store"]
    workers, blocks = 2, nbytes / MiB
    opening, requests_opening = 10, 0.35
    one_request = max(0.0, near["store, blocks only"]["seconds"] * workers / blocks)
    pairs = {}
    for title, programs in figures["runs"].items():
        if "requests" not in programs:
            continue
        latency = 0.03 if "30 ms" in title else 0.0
        rate = nbytes / programs["requests"]["seconds"]
        start = requests_opening + opening * latency
        cpu = near["store"]["cpu"] / 2
        pairs[f"{title}: store"] = (start + max(nbytes / rate, cpu), programs["store"]["seconds"])
        each = max(one_request + latency, workers * MiB / rate)
        pairs[f"{title}: blocks only"] = (start + blocks / workers * each, programs["store, blocks only"]["seconds"])
    return pairs


def show(name: str, setup: Setup) -> None:
    """Print one row."""
    result = outcome(setup)
    repeated = f"  {result.repeated} parts again" if result.repeated else ""
    print(
        f"{name:44}{result.seconds / 60:8.1f} min {setup.work.nbytes / result.seconds / GB:7.1f} GB/s  "
        f"{result.bound:9}{result.gets / 1e6:8.2f} M GET {result.puts / 1e6:6.2f} M PUT "
        f"${result.dollars:6.0f}{repeated}"
    )


def show_assumptions() -> None:
    """Print the numbers that the model starts from."""
    setup = Setup()
    for part in (setup.store, setup.node, setup.work, setup.costs, setup.prices):
        values = ", ".join(f"{field.name} {getattr(part, field.name):g}" for field in fields(part))
        print(f"{type(part).__name__.lower()}: {values}")
    print("units: bytes, seconds, CPU seconds a GB, dollars (list prices as of 2025); see the docstrings\n")


def check(figures: Mapping[str, Any]) -> None:
    """Print the model beside what was measured."""
    for name, (model, measured) in foretold(figures).items():
        print(f"{name:44}{model:8.2f} s by the model, {measured:8.2f} s measured: {model / measured:5.2f}")
    times = figures.get("workers")
    if times is None:
        print("speed-up of worker processes: the file has no times of them")
    else:
        model = outcome(replace(Setup(), workers=1)).seconds / outcome(replace(Setup(), workers=2)).seconds
        print(f"2 worker processes: {times['1'] / times['2']:.2f} times as fast as 1, {model:.2f} by the model")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", type=Path, metavar="FILE", help="figures that benchmarks/stores.py wrote")
    options = parser.parse_args()
    if options.check is not None:
        check(json.loads(options.check.read_text()))
        return
    show_assumptions()
    for name, setup in rows().items():
        show(name, setup)


if __name__ == "__main__":
    main()
