"""Measure the sync of weights: `python benchmarks/weight_sync.py encodings|latency|stages|requests|folds [--json F]`.

`encodings` codes real steps of GRPO and DPO (`policy_runs.py` trains them) by ckpt and by what others use, decodes
each and compares every bit. It prints bytes per changed value, the size relative to ckpt's, and GB/s of weights in both
directions by CPU time of one thread, the best of some rounds. The speeds of memcpy and of XXH3-128 stand beside them.

`latency` repeats a run to a model of 1 GB, publishes steps of it by eight ranks through a slow network, and follows
them through another one: seconds from the optimizer's step until a follower has the verified weights. `stages` times
the parts of that way in one process, without a network. `requests` counts what a step asks of a store. `folds` compares
which steps are joined to folds.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import xxhash
from weight_encodings import CHUNK, OTHERS, Array, Encoding, ckpt_encodings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from weight_runs import WeightRun, default_runs

RUNS = ("dpo-1e-6", "grpo-1e-6", "dpo-3e-6", "grpo-3e-6", "dpo-1e-5", "grpo-1e-5")


@dataclass(frozen=True)
class Row:
    run: str
    encoding: str
    source: str
    changed: float
    """The share of the values that change in a step."""
    bytes_per_change: float
    encode: float
    decode: float
    """GB/s of weights."""


def measure(
    run: str, encoding: Encoding, pairs: list[tuple[Array, Array]], shapes: Sequence[tuple[int, ...]], rounds: int
) -> Row:
    ends = np.cumsum([prod(shape) for shape in shapes])
    spans = list(zip((0, *ends[:-1]), ends, shapes, strict=True))
    times: tuple[list[float], list[float]] = ([], [])
    nbytes = changed = 0
    for number in range(rounds):
        spent = [0.0, 0.0]
        for before, after in pairs:
            target = before.copy()
            began = time.thread_time()
            coded = [encoding.encode(before[i:j], after[i:j], shape) for i, j, shape in spans]
            middle = time.thread_time()
            for parts, (i, j, shape) in zip(coded, spans, strict=True):
                encoding.decode(parts, target[i:j], shape)
            spent[1] += time.thread_time() - middle
            spent[0] += middle - began
            assert np.array_equal(target, after), encoding.name
            if number == 0:
                nbytes += sum(len(part) for parts in coded for part in parts)
                changed += int(np.count_nonzero(before != after))
        for one, seconds in zip(times, spent, strict=True):
            one.append(seconds)
    raw = sum(after.nbytes for _, after in pairs)
    share = changed / (raw // 2)
    return Row(run, encoding.name, encoding.source, share, nbytes / changed, *(raw / min(t) / 1e9 for t in times))


def baselines(rounds: int = 200) -> dict[str, float]:
    """Return GB/s of memcpy and of XXH3-128, over one chunk in cache."""
    source, target = np.ones(CHUNK, np.uint16), np.empty(CHUNK, np.uint16)

    def speed(work: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(rounds):
            began = time.thread_time()
            work()
            best = min(best, time.thread_time() - began)
        return source.nbytes / best / 1e9

    return {
        "memcpy": speed(lambda: np.copyto(target, source)),
        "XXH3-128": speed(lambda: xxhash.xxh3_128_digest(source)),
    }


def encodings(given: argparse.Namespace) -> list[dict[str, object]]:
    known = [one for one in (*ckpt_encodings(), *OTHERS) if given.only in one.name]
    rows: list[Row] = []
    for name in given.runs:
        opened = WeightRun.open(given.folder / name)
        states = {at: weights for at, weights in opened.states() if given.first - given.since <= at <= given.last}
        pairs = [(states[at - given.since], states[at]) for at in range(given.first, given.last + 1)]
        shapes = [(pairs[0][0].size,)] if given.as_one else [*opened.shapes.values()]
        ours = 0.0
        for encoding in known:
            row = measure(name, encoding, pairs, shapes, given.rounds)
            if not rows or rows[-1].run != name:
                ours = row.bytes_per_change
                print(f"\n{name}: {row.changed:.2%} of {pairs[0][0].size:,} values change\n")
                print(
                    "| encoding | bytes per change | times ckpt's | encode GB/s | decode GB/s |\n|---|---|---|---|---|"
                )
            rows.append(row)
            size = row.bytes_per_change
            print(
                f"| {row.encoding} | {size:.3f} | {size / ours:.2f} | {row.encode:.2f} | {row.decode:.2f} |", flush=True
            )
    return [asdict(row) for row in rows]


def latency(given: argparse.Namespace) -> list[dict[str, float]]:
    from weight_latency import latencies

    run, rows = WeightRun.open(given.folder / given.run), []
    network = given.round_trip, given.rate
    print(
        f"{given.gb} GB, {given.ranks} ranks, {given.target}, {1e3 * network[0]:.0f} ms, {network[1] / 1e6:.0f} MB/s\n"
    )
    names = ("filled", "encoded", "stored", "committed", "verified", "nbytes")
    print(f"| step | {' | '.join(names)} |\n" + "|---" * (len(names) + 1) + "|")
    with TemporaryDirectory(dir=given.scratch) as scratch:
        for one in latencies(run, Path(scratch), given.target, given.gb, given.ranks, given.steps, network):
            rows.append(asdict(one))
            print(f"| {one.step} | " + " | ".join(f"{rows[-1][name]:,.2f}" for name in names) + " |", flush=True)
    middle = {name: median(row[name] for row in rows) for name in names}
    print("| median | " + " | ".join(f"{middle[name]:,.2f}" for name in names) + " |")
    return rows


def stages(given: argparse.Namespace) -> list[dict[str, object]]:
    from weight_latency import stages

    run = WeightRun.open(given.folder / given.run)
    with TemporaryDirectory(dir=given.scratch) as scratch:
        rounds = list(stages(run, Path(scratch), given.gb, given.ranks, given.steps))
    print("| stage | seconds | of CPU | the least of CPU |\n|---|---|---|---|")
    rows = list[dict[str, object]]()
    for same in zip(*rounds, strict=True):
        cpu = [one.cpu for one in same]
        rows.append(
            {"stage": same[0].name, "wall": median(one.wall for one in same), "cpu": median(cpu), "least": min(cpu)}
        )
        print("| {stage} | {wall:.3f} | {cpu:.3f} | {least:.3f} |".format(**rows[-1]))
    return rows


def requests(given: argparse.Namespace) -> list[dict[str, object]]:
    from weight_latency import requests

    run, rows = WeightRun.open(given.folder / given.run), list[dict[str, object]]()
    print("| ranks | who | requests for each step |\n|---|---|---|")
    for ranks in given.ranks:
        for who, counts in requests(run, ranks, given.steps).items():
            each = {what: count / given.steps for what, count in sorted(counts.items())}
            rows.append({"ranks": ranks, "who": who, **each})
            print(f"| {ranks} | {who} | {', '.join(f'{count:g} {what}' for what, count in each.items())} |", flush=True)
    return rows


def folds(given: argparse.Namespace) -> list[dict[str, object]]:
    from weight_folds import PLANS, cost, fold_sizes

    sizes, rows = fold_sizes(WeightRun.open(given.folder / given.run), given.first), list[dict[str, object]]()
    print("bytes of a fold, in those of a step: " + ", ".join(f"{n}: {size:.2f}" for n, size in sizes.items()))
    cells = " | ".join(f"{n} behind: objects, most and mean bytes" for n in given.behind)
    print(f"\n| folds of | bytes | folds a step | copies | {cells} |\n" + "|---" * (4 + len(given.behind)) + "|")
    for plan in PLANS:
        one = cost(plan, sizes, given.behind)
        rows.append(asdict(one))
        cells = " | ".join(f"{count}, {most:.2f}, {usual:.2f}" for count, most, usual in one.behind.values())
        print(f"| {one.plan} | {one.uploaded:.2f} | {one.encoded:.2f} | {one.copies} | {cells} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    part = parts.add_parser("encodings", help="bytes and speed of encodings")
    part.add_argument("--runs", nargs="+", default=RUNS)
    part.add_argument("--first", type=int, default=17, help="the first step that is coded")
    part.add_argument("--last", type=int, default=18)
    part.add_argument("--since", type=int, default=1, help="code each step against so many steps before")
    part.add_argument("--rounds", type=int, default=3)
    part.add_argument(
        "--as-one", action="store_true", help="take all tensors as one: whole chunks, as of a large model"
    )
    part.add_argument("--only", default="", help="encodings whose name contains a text")
    part.set_defaults(measure=encodings)
    part = parts.add_parser("latency", help="seconds from the optimizer's step to verified weights")
    part.add_argument("--target", choices=("folder", "memory"), default="folder", help="who follows")
    part.add_argument("--run", default="dpo-1e-6")
    part.add_argument("--gb", type=float, default=1.0)
    part.add_argument("--ranks", type=int, default=8)
    part.add_argument("--steps", type=int, default=7)
    part.add_argument("--round-trip", type=float, default=0.05, help="seconds")
    part.add_argument("--rate", type=float, default=100e6, help="bytes a second in each direction")
    part.add_argument("--scratch", help="a folder with room for four times the model")
    part.set_defaults(measure=latency)
    part = parts.add_parser("stages", help="seconds of each part of that way, without a network")
    part.add_argument("--run", default="dpo-1e-6")
    part.add_argument("--gb", type=float, default=1.0)
    part.add_argument("--ranks", type=int, default=8)
    part.add_argument("--steps", type=int, default=5)
    part.add_argument("--scratch", help="a folder with room for four times the model")
    part.set_defaults(measure=stages)
    part = parts.add_parser("requests", help="requests to a store for each step")
    part.add_argument("--run", default="dpo-1e-6")
    part.add_argument("--ranks", type=int, nargs="+", default=(1, 4))
    part.add_argument("--steps", type=int, default=5)
    part.set_defaults(measure=requests)
    part = parts.add_parser("folds", help="what plans of folds cost and save")
    part.add_argument("--run", default="dpo-1e-6", help="one of 80 steps or more")
    part.add_argument("--first", type=int, default=16, help="the first step that is a delta")
    part.add_argument("--behind", type=int, nargs="+", default=(8, 16, 32, 64, 128))
    part.set_defaults(measure=folds)
    for part in parts.choices.values():
        part.add_argument("--folder", type=Path, default=default_runs(), help="the runs of policy_runs.py")
        part.add_argument("--json", type=Path)
    given = parser.parse_args()
    print(f"{platform.platform()}, {platform.processor() or platform.machine()}, Python {sys.version.split()[0]}")
    speeds = baselines()
    print(", ".join(f"{name} {speed:.1f} GB/s" for name, speed in speeds.items()))
    rows = given.measure(given)
    if given.json:
        given.json.write_text(json.dumps({"baselines": speeds, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
