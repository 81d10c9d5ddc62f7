"""How fast chunks of bf16 weights are coded after one step: `python benchmarks/weight_chunks.py [--rounds 15]`.

The weights are made up: normal, of standard deviation 0.03, with a step of the fp32 masters that changes the share of
bf16 values in the first column. Chunks have 2^18 values, as in published chains. `default` and `fast` are the speeds of
the codec `difference`; `encode` and the others are those of `ckpt_codecs.deltas.single_state`, Python counted. Speeds
are GB of weights per second of CPU time of one thread, the best of all rounds; `copy` is `numpy.copyto` beside them.
The environment variable CKPT_CPU_LEVEL selects the kernels: 2 is plain C on x86-64.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ckpt_codecs import StatePair
from ckpt_codecs.deltas.difference import Difference
from ckpt_codecs.deltas.single_state import decode_chunk, encode_chunk, read_changes
from ckpt_codecs.native import library

Array = np.ndarray[Any, np.dtype[Any]]
BF16 = np.dtype(ml_dtypes.bfloat16)
CHUNK, CHUNKS = 1 << 18, 8
RATES = (1.5e-7, 2.6e-7, 6e-7, 1.35e-6, 2.8e-6)


def weights(rate: float) -> list[tuple[Array, Array]]:
    """Chunks before and after a step."""
    random = np.random.default_rng(0)
    masters = random.normal(0, 0.03, CHUNK * CHUNKS)
    updates = rate * np.clip(random.normal(0, 0.6, masters.size), -1.5, 1.5)
    before, after = (values.astype(np.float32).astype(BF16) for values in (masters, masters - updates))
    return [(before[i : i + CHUNK], after[i : i + CHUNK]) for i in range(0, before.size, CHUNK)]


def speed(work: Callable[[int], object], rounds: int, prepare: Callable[[int], object] = lambda i: None) -> float:
    """GB/s of `work` on each chunk by its number."""
    best = float("inf")
    for _ in range(rounds):
        seconds = 0.0
        for i in range(CHUNKS):
            prepare(i)
            begun = time.thread_time()
            work(i)
            seconds += time.thread_time() - begun
        best = min(best, seconds)
    return 2 * CHUNK * CHUNKS / best / 1e9


def measure(rate: float, rounds: int) -> list[str]:
    pairs = weights(rate)
    changed = sum(int(np.count_nonzero(a.view(np.uint16) != b.view(np.uint16))) for a, b in pairs)
    out = [np.empty_like(before) for before, _ in pairs]
    cells = [f"{changed / CHUNK / CHUNKS:.2%}", f"{speed(lambda i: np.copyto(out[i], pairs[i][0]), rounds):.1f}"]
    sizes, changes = [], [StatePair({"param": before}, {"param": after}) for before, after in pairs]
    for codec in (Difference(), Difference(speed="fast")):
        chunks = [codec.encode(change) for change in changes]

        def encode(i: int, codec: Difference = codec) -> bytes:
            return codec.encode(changes[i])

        def decode(i: int, codec: Difference = codec, chunks: list[bytes] = chunks) -> Array:
            return codec.decode(chunks[i], {"param": pairs[i][0]}, (CHUNK,), {"param": BF16})["param"]

        assert all(decode(i).tobytes() == after.tobytes() for i, (_, after) in enumerate(pairs))
        sizes.append(sum(map(len, chunks)))
        cells.append(f"{sizes[-1] / changed:.3f}")
        cells.append(f"{speed(encode, rounds):.2f}, {speed(decode, rounds):.2f}")
    cells.append(f"{sizes[1] / sizes[0] - 1:+.1%}")
    chunks = [encode_chunk(before, after) for before, after in pairs]
    for i, (before, after) in enumerate(pairs):
        decode_chunk(chunks[i], before, out[i])
        assert out[i].tobytes() == after.tobytes()
    speeds = (
        speed(lambda i: encode_chunk(*pairs[i]), rounds),
        speed(lambda i: decode_chunk(chunks[i], pairs[i][0], out[i]), rounds),
        speed(lambda i: decode_chunk(chunks[i], out[i], out[i]), rounds, lambda i: np.copyto(out[i], pairs[i][0])),
        speed(lambda i: read_changes(chunks[i], pairs[i][0]), rounds),
    )
    return [*cells, *(f"{each:.2f}" for each in speeds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(f"{platform.platform()}, kernels of level {library.level()} of {library.levels()}\n")
    head = ["changed", "copy", "default: B a change", "speeds", "fast: B a change", "speeds", "larger by"]
    head += ["encode", "decode", "decode in place", "read changes"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for rate in RATES:
        print("| " + " | ".join(measure(rate, rounds)) + " |", flush=True)


if __name__ == "__main__":
    main()
