"""How far level `max` is from context models: bits that each takes for a value of the states of a trained model.

    .venv/bin/python benchmarks/context_models.py [STATE] [--values 4000000]

STATE is a checkpoint that ckpt reads; by default the pre-training state that `trajectory.py` made. A context model
codes a plane of bytes with adaptive counts in each context. Its length here is exact, as of an arithmetic coder without
loss: the product of all predictions depends on the last counts only (Krichevsky and Trofimov, 1981). One model goes
through all tensors of a state, and takes no room itself. Contexts are those of codecs for floats and images:
neighbours, means of row and column so far, the same value in another state of the optimizer, and pairs of them. Of each
plane, the best context counts. Models that mix contexts by weights, such as PAQ, are not among them.
"""

import argparse
from collections.abc import Iterator, Mapping
from math import lgamma, log
from pathlib import Path

import numpy as np
from states import default_folder, state_path

from ckpt_codecs import candidate_codecs
from ckpt_codecs.base import Array
from ckpt_codecs.native import lossless
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint

STATES = ("fp32", "exp_avg", "exp_avg_sq")
ESTIMATES = (0.5, 0.1, 0.02, 0.004)
"""What each symbol counts before it was seen; the best for a plane is taken."""
_LGAMMA = np.vectorize(lgamma, otypes=[np.float64])


def matrices(path: Path, limit: int) -> dict[str, list[Array]]:
    """The matrices of each state, (rows, columns), so many values of each or a few more."""
    held: dict[str, list[Array]] = {}
    count = 0
    for parameter in open_checkpoint(path).parameters.values():
        states = {name: parameter.states.get(from_stored(name)) for name in STATES}
        tensors = {name: tensor for name, tensor in states.items() if tensor is not None}
        if len(tensors) < 3 or len(tensors["exp_avg"].shape) != 2 or count >= limit:
            continue
        count += tensors["exp_avg"].size
        for name, tensor in tensors.items():
            held.setdefault(name, []).append(read(tensor))
    return held


def ckpt_bits(state: str, held: Mapping[str, list[Array]], level: str) -> float:
    """Bits of all chunks of a state, with the best codec of ckpt for each chunk."""
    total = 0
    codecs = candidate_codecs("parameter", state, held[state][0].dtype, level)
    usable = [codec for codec in codecs if codec.context is None or codec.context in held]
    for index, array in enumerate(held[state]):
        chunking = Chunking.default(array.shape)
        for number in range(-(-array.size // chunking.chunk_size)):
            part = slice(*chunking.range(number))
            values = _chunk(array, part, chunking)
            bases = [None if c.context is None else _chunk(held[c.context][index], part, chunking) for c in usable]
            total += 8 * min(len(c.encode(values, base)) for c, base in zip(usable, bases, strict=True))
    return total


def _chunk(array: Array, part: slice, chunking: Chunking) -> Array:
    values = array.reshape(-1)[part]
    return values.reshape(chunking.chunk_shape(values.size))


def planes_of(array: Array) -> Array:
    """(width, rows, columns) uint8: bytes of the mantissa, then the exponent; the sign is with the mantissa."""
    words = np.ascontiguousarray(array).view(f"u{array.itemsize}").reshape(-1)
    return lossless.split_planes(words, True).reshape(array.itemsize, *array.shape)


def model_bits(planes: list[Array], contexts: list[Array]) -> float:
    """The length of planes, uint8, coded adaptively in contexts, integers of the same shapes: in bits."""
    joined = np.concatenate([plane.reshape(-1) for plane in planes]).astype(np.int64)
    context = np.concatenate([one.reshape(-1) for one in contexts]).astype(np.int64)
    symbols = len(np.unique(joined))
    numbers, counts = np.unique(context * 256 + joined, return_counts=True)
    totals = np.bincount(np.unique(numbers >> 8, return_inverse=True)[1], counts)
    best = float("inf")
    for before in ESTIMATES:
        whole = _LGAMMA(totals + before * symbols).sum() - totals.size * lgamma(before * symbols)
        best = min(best, whole - (_LGAMMA(counts + before).sum() - counts.size * lgamma(before)))
    return best / log(2)


def running(sizes: Array, axis: int, gain: float = 1 / 8) -> Array:
    """The running mean of what comes before each value along an axis; of the first, 0. `sizes`: (rows, columns)."""
    result, mean = np.zeros(sizes.shape, np.float32), np.zeros(sizes.shape[1 - axis], np.float32)
    for i in range(sizes.shape[axis]):
        now = sizes[i] if axis == 0 else sizes[:, i]
        if axis == 0:
            result[i] = mean
        else:
            result[:, i] = mean
        mean = now.astype(np.float32) if i == 0 else mean + max(gain, 1 / (i + 1)) * (now - mean)
    return result


def sizes_of(array: Array) -> Array:
    """Logarithms of magnitudes, base 2, from -149; (rows, columns) float32."""
    magnitudes = np.abs(array.astype(np.float32))
    return np.log2(np.maximum(magnitudes, np.float32(2.0**-149))).astype(np.float32)


def contexts_of(index: int, state: str, held: Mapping[str, list[Array]]) -> Iterator[tuple[str, Array]]:
    """Contexts of the exponents of one matrix, by name: (rows, columns) integers."""
    array = held[state][index]
    exponents = planes_of(array)[-1].astype(np.int64)
    zeros = np.zeros_like(exponents)
    left, above = zeros.copy(), zeros.copy()
    left[:, 1:], above[1:] = exponents[:, :-1], exponents[:-1]
    sizes = sizes_of(array)
    column, row = running(sizes, 0), running(sizes, 1)
    yield "none", zeros
    yield "left", left
    yield "above", above
    yield "left and above", left << 8 | above
    yield "column", _steps(column, 4)
    yield "row", _steps(row, 4)
    yield "column and row", _steps(column, 2) << 12 | _steps(row, 2)
    yield "mean of both", _steps((column + row) / 2, 8)
    others = {name: sizes_of(held[name][index]) for name in STATES if name in held and name != state}
    for name, other in others.items():
        yield name, _steps(other, 4)
        corrected = other + running(sizes - other, 0)
        yield f"{name}, moved by column", _steps(corrected, 8)
        halves = other / 2 if name == "exp_avg_sq" else other
        drift = sizes - halves
        both = halves + (running(drift, 0) + running(drift, 1)) / 2
        yield f"{name}, moved by column and row", _steps(both, 8)
        yield f"{name} moved, column and row", _steps(both, 4) << 12 | _steps((column + row) / 2, 2)


def _steps(sizes: Array, each: int) -> Array:
    """Logarithms as whole steps, so many an octave, from 0."""
    steps: Array = np.clip(np.rint((sizes + 300) * each), 0, None).astype(np.int64)
    return steps


def best_bits(state: str, held: Mapping[str, list[Array]]) -> tuple[float, str]:
    """Bits of a state, with the best context for each plane, and the context of exponents."""
    planes = [planes_of(array) for array in held[state]]
    by_name: dict[str, list[Array]] = {}
    for index in range(len(planes)):
        for name, context in contexts_of(index, state, held):
            by_name.setdefault(name, []).append(context)
    exponents = [plane[-1] for plane in planes]
    best, name = min((model_bits(exponents, contexts), name) for name, contexts in by_name.items())
    for lower in range(planes[0].shape[0] - 1):
        plane = [one[lower] for one in planes]
        given = {"none": [np.zeros(one.shape, np.int64) for one in plane], "exponent": exponents}
        best += min(model_bits(plane, contexts) for contexts in given.values())
    return best, name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("state", type=Path, nargs="?", default=state_path(default_folder()))
    parser.add_argument("--values", type=int, default=4_000_000, help="of each state, about")
    arguments = parser.parse_args()
    held = matrices(arguments.state, arguments.values)
    print("| state | values | default | max | best context of each plane | max above it | of exponents |")
    print("|---|---|---|---|---|---|---|")
    sums = np.zeros(3)
    for state, arrays in held.items():
        size = sum(array.size for array in arrays)
        bits, name = best_bits(state, held)
        lengths = np.array([ckpt_bits(state, held, "default"), ckpt_bits(state, held, "max"), bits])
        sums += lengths
        default, most, bound = lengths / size
        print(f"| {state} | {size:,} | {default:.4f} | {most:.4f} | {bound:.4f} | {most / bound - 1:.2%} | {name} |")
    print(f"| all | | | | | {sums[1] / sums[2] - 1:.2%} | |")


if __name__ == "__main__":
    main()
