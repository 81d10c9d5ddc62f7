"""Codecs side by side on a real training state: `python benchmarks/codecs.py [STATE] --rounds 5`.

STATE is a checkpoint that ckpt reads; by default the pre-training state that `trajectory.py` made. Each method codes
every kind of state, all methods in turn in one process (A B C, B C A, ...); that every bit comes back is checked once,
before the clock runs. Speeds are of decoded bytes: on one thread by the CPU time of the process, which other load on
the machine changes little, and on all cores by the clock. Figures are medians.

In the total of a mixed-precision state the model's copy counts as ckpt stores it, derived from its master where it is
that, rounded; the time to find that out and to make it again is in the total. The other methods code it.

Needs zipnn, blosc2, pcodec and zstandard.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import blosc2
import numpy as np
import zipnn
import zstandard
from pcodec import ChunkConfig, standalone
from states import default_folder, state_path

from ckpt_codecs import Codec, Rounded, best_for, warm_up
from ckpt_formats.base import Checkpoint
from ckpt_formats.coded import ENTRY, chunk_form
from ckpt_formats.registry import open_checkpoint
from ckpt_formats.tensor import read
from ckpt_formats.universal.coded_state import chunk_shape

STATES = ("fp32", "param", "exp_avg", "exp_avg_sq")
PIECE = 4 << 20
"""Bytes that the other methods are given at once, so that they can be spread over threads."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Piece:
    """What is coded at once; `base` is the same piece of another state."""

    values: Array
    base: Array | None = None


@dataclass(frozen=True)
class Method:
    """A pair of functions on pieces, and how a state is cut for it."""

    name: str
    cut: Callable[[str, dict[str, list[Array]]], list[Piece]]
    encode: Callable[[str, Piece], Any]
    decode: Callable[[str, Any, Piece], Any]
    overhead: int = 0
    """Bytes for each piece that are stored beside what `encode` makes of it."""


def whole(state: str, held: dict[str, list[Array]]) -> list[Piece]:
    """All tensors of a state, one after another, at once: as large as a layer of a large model."""
    return [Piece(np.concatenate([array.reshape(-1) for array in held[state]]))]


def runs(state: str, held: dict[str, list[Array]]) -> list[Piece]:
    """The same in pieces that stay in a cache: what general compressors get."""
    (joined,) = (piece.values for piece in whole(state, held))
    each = PIECE // joined.dtype.itemsize
    return [Piece(joined[i : i + each]) for i in range(0, joined.size, each)]


def chunks(state: str, held: dict[str, list[Array]]) -> list[Piece]:
    """Every tensor cut into chunks, as the universal format cuts it."""
    context = best_for("parameter", state, held[state][0].dtype)[0].context
    bases = held[context] if context in held else [None] * len(held[state])
    return [
        Piece(*(None if tensor is None else part(tensor, i) for tensor in (array, base)))
        for array, base in zip(held[state], bases, strict=True)
        for i in range(-(-array.size // prod(chunk_shape(array.shape))))
    ]


def part(array: Array, index: int) -> Array:
    chunk = chunk_shape(array.shape)
    values = array.reshape(-1)[index * prod(chunk) : (index + 1) * prod(chunk)]
    return values.reshape(chunk_form(chunk, values.size))


def ours(level: str) -> Method:
    def codec(state: str, piece: Piece) -> Codec:
        fitting = best_for("parameter", state, piece.values.dtype, level)
        return next(one for one in fitting if one.context is None or piece.base is not None)

    return Method(
        f"ckpt {level}",
        chunks,
        lambda state, piece: codec(state, piece).encode(piece.values, piece.base),
        lambda state, data, piece: codec(state, piece).decode(data, piece.values.shape, piece.values.dtype, piece.base),
        ENTRY.itemsize,
    )


def zstd(level: int) -> Method:
    return Method(
        f"zstd -{level}",
        runs,
        lambda state, piece: zstandard.ZstdCompressor(level=level).compress(raw(piece.values)),
        lambda state, data, piece: zstandard.ZstdDecompressor().decompress(data),
    )


def blosc() -> Method:
    return Method(
        "blosc2 shuffle zstd -1",
        runs,
        lambda state, piece: blosc2.compress2(
            raw(piece.values),
            typesize=piece.values.dtype.itemsize,
            codec=blosc2.Codec.ZSTD,
            clevel=1,
            filters=[blosc2.Filter.SHUFFLE],
            nthreads=1,
        ),
        lambda state, data, piece: blosc2.decompress2(data, nthreads=1),
    )


def zip_nn(name: str, cut: Callable[[str, dict[str, list[Array]]], list[Piece]], threads: int) -> Method:
    def make(piece: Piece) -> zipnn.ZipNN:
        kind = {2: "bfloat16", 4: "float32"}[piece.values.dtype.itemsize]
        return zipnn.ZipNN(input_format="byte", bytearray_dtype=kind, threads=threads)

    return Method(
        name,
        cut,
        lambda state, piece: make(piece).compress(bytearray(raw(piece.values))),  # it works in the bytes it is given
        lambda state, data, piece: make(piece).decompress(data),
    )


def pco(level: int) -> Method:
    return Method(
        f"pcodec {level}",
        runs,
        lambda state, piece: standalone.simple_compress(numbers(piece.values), ChunkConfig(compression_level=level)),
        lambda state, data, piece: standalone.simple_decompress(data),
    )


def numbers(values: Array) -> Array:
    """pcodec knows no bfloat16: its bits, as integers."""
    return values.view(np.uint16) if values.dtype.itemsize == 2 else values


def raw(values: Array) -> memoryview:
    return memoryview(values.reshape(-1).view(np.uint8))


@dataclass
class Times:
    """Seconds of each round, and what came out."""

    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)
    nbytes: int = 0


Coded = list[tuple[Piece, Any]]
Spread = Callable[[Callable[[Any], Any], Iterable[Any]], list[Any]]


def once(method: Method, state: str, work: Coded, spread: Spread, clock: Callable[[], float], to: Times) -> None:
    """One round. What comes out is dropped at once, as by whoever writes it to a file."""

    def encode(piece: Piece) -> None:
        method.encode(state, piece)

    def decode(pair: tuple[Piece, Any]) -> None:
        method.decode(state, pair[1], pair[0])

    began = clock()
    spread(encode, [piece for piece, _ in work])
    middle = clock()
    spread(decode, work)
    to.encode.append(middle - began)
    to.decode.append(clock() - middle)
    to.nbytes = sum(len(data) + method.overhead for _, data in work)


def coded(method: Method, state: str, held: dict[str, list[Array]]) -> Coded:
    """Every piece, and what a method makes of it, of which every bit comes back."""
    made = []
    for piece in method.cut(state, held):
        data = method.encode(state, piece)
        back = method.decode(state, data, piece)
        found = back.reshape(-1).view(np.uint8) if isinstance(back, np.ndarray) else np.frombuffer(back, np.uint8)
        assert np.array_equal(found, np.frombuffer(raw(piece.values), np.uint8)), (method.name, state)
        made.append((piece, data))
    return made


def derivation(held: dict[str, list[Array]]) -> Method | None:
    """How ckpt keeps the model's copy: nothing, if it is its master, rounded."""
    if not {"fp32", "param"} <= held.keys():
        return None

    def cut(state: str, held: dict[str, list[Array]]) -> list[Piece]:
        return [
            Piece(part(copy, i), part(master, i))
            for copy, master in zip(held["param"], held["fp32"], strict=True)
            for i in range(-(-copy.size // prod(chunk_shape(copy.shape))))
        ]

    return Method(
        "derived",
        cut,
        lambda state, piece: Rounded().encode(piece.values, piece.base),
        lambda state, data, piece: Rounded().decode(data, piece.values.shape, piece.values.dtype, piece.base),
    )


def measure(
    held: dict[str, list[Array]], methods: Sequence[Method], rounds: int, threads: int
) -> dict[tuple[str, str], tuple[Times, Times]]:
    """Of each method and state: times on one thread by CPU time, and on all by the clock."""
    found: dict[tuple[str, str], tuple[Times, Times]] = {}
    derived = derivation(held)
    work = [(method, state) for state in held for method in methods]
    work += [(derived, "param")] if derived is not None else []
    done = {(method.name, state): coded(method, state, held) for method, state in work}
    with ThreadPoolExecutor(threads) as pool:

        def alone(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
            return [function(item) for item in items]

        def together(function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
            return list(pool.map(function, items))

        for turn in range(rounds):
            shift = turn % len(work)
            for method, state in work[shift:] + work[:shift]:
                times = found.setdefault((method.name, state), (Times(), Times()))
                mine = done[method.name, state]
                once(method, state, mine, alone, time.process_time, times[0])
                if threads > 1:
                    once(method, state, mine, together, time.perf_counter, times[1])
    return found


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


def lines(held: dict[str, list[Array]], found: dict[tuple[str, str], tuple[Times, Times]]) -> list[Line]:
    made = []
    for (method, state), (one, all_) in found.items():
        size = sum(array.nbytes for array in held[state])
        count = sum(array.size for array in held[state])
        seconds = [median(t) if t else 0.0 for t in (one.encode, one.decode, all_.encode, all_.decode)]
        made.append(Line(method, state, size, one.nbytes, count, *seconds))
    return made


def totals(of: Sequence[Line]) -> list[Line]:
    """The whole state by each method. Bits are for each parameter."""
    derived = {line.state: line for line in of if line.method == "derived"}
    made = []
    for name in dict.fromkeys(line.method for line in of if line.method != "derived"):
        mine = [
            derived.get(line.state, line) if name.startswith("ckpt") else line for line in of if line.method == name
        ]
        count = max(line.elements for line in mine)
        sums = [sum(getattr(line, key) for line in mine) for key in ("encode", "decode", "encode_all", "decode_all")]
        made.append(Line(name, "total", sum(l.raw for l in mine), sum(l.nbytes for l in mine), count, *sums))  # noqa: E741
    return made


def states_of(source: Checkpoint) -> dict[str, list[Array]]:
    """All values of each kind of state, of parameters that have them all."""
    kinds = [s for s in STATES if any(s in p.states for p in source.parameters.values())]
    whole = [p for p in source.parameters.values() if set(kinds) <= p.states.keys()]
    return {kind: [read(parameter.states[kind]) for parameter in whole] for kind in kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("state", type=Path, nargs="?", default=state_path(default_folder()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", nargs="*", default=[], help="methods whose names begin so")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    held = states_of(open_checkpoint(given.state))
    methods = [*map(ours, ("fast", "default", "max")), zstd(1), zstd(3), blosc(), pco(4), pco(8)]
    methods += [zip_nn("ZipNN", whole, given.threads), zip_nn("ZipNN in pieces of 4 MiB", runs, 1)]
    methods = [m for m in methods if not given.only or any(m.name.startswith(o) for o in given.only)]
    began = time.monotonic()
    compiled = warm_up()
    print(f"{platform.platform()}, {platform.processor() or platform.machine()}, Python {sys.version.split()[0]}")
    print(f"kernels {'compiled' if compiled else 'loaded'} in {time.monotonic() - began:.1f} s")
    print(f"{given.state}: {sum(a.nbytes for s in held.values() for a in s) / 1e6:.0f} MB, {given.rounds} rounds\n")
    found = lines(held, measure(held, methods, given.rounds, given.threads))
    every = [*sorted(found, key=lambda line: list(held).index(line.state)), *totals(found)]
    head = [
        "state",
        "method",
        "ratio",
        "bits",
        "enc MB/s",
        "dec MB/s",
        f"enc x{given.threads}",
        f"dec x{given.threads}",
    ]
    for row in [head, ["---"] * len(head), *(line.cells() for line in every)]:
        print("| " + " | ".join(row) + " |")
    if given.json:
        given.json.write_text(json.dumps([vars(line) for line in every], indent=1))


if __name__ == "__main__":
    main()
