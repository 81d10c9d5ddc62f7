"""Codecs side by side on a real training state: `python benchmarks/codecs.py [STATE] --rounds 5`.

STATE is a checkpoint that ckpt reads; by default the pre-training state that `trajectory.py` made. Each method codes
every kind of state, all methods in turn in one process (A B C, B C A, ...); that every bit comes back is checked once,
before the clock runs. Speeds are of decoded bytes: on one thread by the CPU time of the process, which other load on
the machine changes little, the median; on all cores by the clock, the best. How threads scale: `scaling.py`.

In the total of a mixed-precision state the model's copy counts as ckpt stores it, derived from its master where it is
that, rounded; the time to find that out and to make it again is in the total. The other methods code it.

Last comes what ckpt gains over ZipNN, which is given each state both whole, as its own tools do it, and in pieces that
stay in a cache, which it never does but is fastest at. The rows of `param` and `fp32` are also those of weights alone,
in bfloat16 and in float32.

Needs zipnn, blosc2, pcodec and zstandard.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from methods import (
    Array,
    Coded,
    Method,
    Piece,
    blosc,
    coded,
    derivation,
    ours,
    pco,
    runs,
    states_of,
    whole,
    zip_nn,
    zstd,
)
from scaling import share
from states import default_folder, state_path

from ckpt_codecs.native import library

OURS, ZIPNN, PIECES = "ckpt default", "ZipNN", "ZipNN in pieces of 4 MiB"


@dataclass
class Times:
    """Seconds of each round, and what came out."""

    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    nbytes: int = 0


def once(method: Method, state: str, work: Coded, threads: int, clock: Callable[[], float], to: Times) -> None:
    """One round. What comes out is dropped at once, as by whoever writes it to a file."""

    def encode(piece: Piece) -> None:
        method.encode(state, piece)

    def decode(pair: tuple[Piece, Any]) -> None:
        method.decode(state, pair[1], pair[0])

    began = clock()
    share(threads, encode, [piece for piece, _ in work])
    middle = clock()
    share(threads, decode, work)
    to.encode.append(middle - began)
    to.decode.append(clock() - middle)
    to.nbytes = sum(len(data) + method.overhead for _, data in work)


def measure(
    held: dict[str, list[Array]], methods: Sequence[Method], rounds: int, threads: int
) -> dict[tuple[str, str], tuple[Times, Times]]:
    """Of each method and state: times on one thread by CPU time, and on all by the clock."""
    times_by_case: dict[tuple[str, str], tuple[Times, Times]] = {}
    derived = derivation(held)
    work = [(method, state) for state in held for method in methods]
    work += [(derived, "param")] if derived is not None else []
    done = {(method.name, state): coded(method, state, held) for method, state in work}
    for turn in range(rounds):
        shift = turn % len(work)
        for method, state in work[shift:] + work[:shift]:
            times = times_by_case.setdefault((method.name, state), (Times(), Times()))
            mine = done[method.name, state]
            once(method, state, mine, 1, time.process_time, times[0])
            if threads > 1:
                once(method, state, mine, threads, time.perf_counter, times[1])
    return times_by_case


@dataclass(frozen=True)
class Line:
    method: str
    state: str
    raw: int
    nbytes: int
    elements: int
    encode: float
    decode: float
    encode_all: float
    decode_all: float
    """Seconds."""

    def cells(self) -> list[str]:
        speeds = [
            f"{self.raw / s / 1e6:,.0f}" if s else "-"
            for s in (self.encode, self.decode, self.encode_all, self.decode_all)
        ]
        ratio = f"{self.raw / self.nbytes:.4f}" if self.nbytes else "-"
        return [self.state, self.method, ratio, f"{8 * self.nbytes / self.elements:.2f}", *speeds]


def lines(held: dict[str, list[Array]], times_by_case: dict[tuple[str, str], tuple[Times, Times]]) -> list[Line]:
    rows = []
    for (method, state), (one, all_) in times_by_case.items():
        size = sum(array.nbytes for array in held[state])
        count = sum(array.size for array in held[state])
        seconds = [median(one.encode), median(one.decode), min(all_.encode, default=0.0), min(all_.decode, default=0.0)]
        rows.append(Line(method, state, size, one.nbytes, count, *seconds))
    return rows


def totals(of: Sequence[Line]) -> list[Line]:
    """The whole state by each method. Bits are for each parameter."""
    derived = {line.state: line for line in of if line.method == "derived"}
    rows = []
    for name in dict.fromkeys(line.method for line in of if line.method != "derived"):
        mine = [
            derived.get(line.state, line) if name.startswith("ckpt") else line for line in of if line.method == name
        ]
        count = max(line.elements for line in mine)
        sums = [sum(getattr(line, key) for line in mine) for key in ("encode", "decode", "encode_all", "decode_all")]
        rows.append(Line(name, "total", sum(l.raw for l in mine), sum(l.nbytes for l in mine), count, *sums))  # noqa: E741
    return rows


def gains(of: Sequence[Line], rival: str) -> list[list[str]]:
    """Rows: what ckpt is to a rival, state by state and in total, at its default level."""
    by_case = {(line.method, line.state): line for line in of}
    rows = []
    for (method, state), mine in by_case.items():
        if method == OURS and (rival, state) in by_case:
            other = by_case[rival, state]
            figures = (other.nbytes / mine.nbytes, other.encode / mine.encode, other.decode / mine.decode)
            rows.append(
                [state, rival, *(f"{figure:.{digits}f}" for figure, digits in zip(figures, (4, 2, 2), strict=True))]
            )
    return rows


def show(head: list[str], rows: list[list[str]]) -> None:
    for row in [head, ["---"] * len(head), *rows]:
        print("| " + " | ".join(row) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", type=Path, nargs="?", default=state_path(default_folder()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", default=[], help="methods whose names begin so")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    held = states_of(given.state)
    methods = [*map(ours, ("fast", "default", "max")), zstd(1), zstd(3), blosc(), pco(4), pco(8)]
    methods += [zip_nn(ZIPNN, whole, given.threads), zip_nn(PIECES, runs, 1)]
    methods = [m for m in methods if not given.only or any(m.name.startswith(o) for o in given.only)]
    began = time.monotonic()
    library.load()
    print(f"{platform.platform()}, {platform.processor() or platform.machine()}, Python {sys.version.split()[0]}")
    print(f"kernels loaded in {1000 * (time.monotonic() - began):.1f} ms, level {library.level()}")
    print(f"{given.state}: {sum(a.nbytes for s in held.values() for a in s) / 1e6:.0f} MB, {given.rounds} rounds\n")
    rows = lines(held, measure(held, methods, given.rounds, given.threads))
    every = [*sorted(rows, key=lambda line: list(held).index(line.state)), *totals(rows)]
    speeds = ["enc MB/s", "dec MB/s", f"enc x{given.threads}", f"dec x{given.threads}"]
    show(["state", "method", "ratio", "bits", *speeds], [line.cells() for line in every])
    against = [row for rival in (ZIPNN, PIECES) for row in gains(every, rival)]
    if against:
        print(f"\n{OURS}, times its rival:\n")
        show(["state", "rival", "ratio", "encode", "decode"], against)
    if given.json:
        given.json.write_text(json.dumps([vars(line) for line in every], indent=1))


if __name__ == "__main__":
    main()
