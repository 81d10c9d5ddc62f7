"""Halves of which many change, in NumPy: what the kernels do, sixteen values at once."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.deltas.packing import PADDING, packed, unpacked
from ckpt_codecs.deltas.portable_ranges import MODELS_OF_A_BIT, Reader, Writer

LANES, WEIGHT_BITS, LEAST_STATE = 16, 12, 1 << 16
NEAR, NEAR_BITS, SYMBOLS = 32, 5, 108
BYTE_MODELS = 8 * MODELS_OF_A_BIT


def tally_steps(foretold: Array, found: Array, which: Array, contexts: int) -> tuple[Array, Array, Array]:
    step = (found - foretold).view(np.int16).astype(np.int64)
    size = np.abs(step)
    octave = np.frexp(np.maximum(size, 1).astype(np.float64))[1].astype(np.int64) - 1
    far = size >= NEAR
    kind = np.where(far, NEAR + 2 * (octave - NEAR_BITS) + (size >> np.maximum(octave - 1, 0) & 1), size)
    told = which.astype(np.int64) << 8 | 2 * kind - (step > 0)
    counts = np.bincount(told, minlength=contexts << 8).reshape(contexts, 256)[:, :SYMBOLS].astype(np.uint32)
    many = octave[far] - 1
    return told.astype(np.uint16), counts, packed(size[far] & (1 << many) - 1, many)


def write_steps(told: Array, weights: Array) -> tuple[Array, Array]:
    begins = np.cumsum(weights, axis=1, dtype=np.int64) - weights
    context, symbol = told >> 8, told & 255
    weight, begin = weights[context, symbol].astype(np.int64), begins[context, symbol]
    states, words = np.full(LANES, LEAST_STATE, np.int64), []
    for start in range((told.size - 1) // LANES * LANES, -1, -LANES):
        each, first = weight[start : start + LANES], begin[start : start + LANES]
        state = states[: each.size]
        full = state >= each << 20
        words.append((state[full] & 0xFFFF).astype(np.uint16))
        state = state >> 16 * full
        states[: each.size] = (state // each << WEIGHT_BITS) + state % each + first
    return states.astype(np.uint32), np.concatenate([np.empty(0, np.uint16), *reversed(words)])


def read_steps(
    foretold: Array, which: Array, weights: Array, states: Array, words: Array, bits: Array, out: Array
) -> bool:
    contexts = weights.shape[0]
    symbols = np.repeat(np.tile(np.arange(SYMBOLS), contexts), weights.reshape(-1)).reshape(contexts, -1)
    begins = np.cumsum(weights, axis=1, dtype=np.int64) - weights
    held, at = states.astype(np.int64), 0
    found = np.empty(out.size, np.int64)
    for start in range(0, out.size, LANES):
        context = which[start : start + LANES]
        state = held[: context.size]
        slot = state & (1 << WEIGHT_BITS) - 1
        symbol = symbols[context, slot]
        state = weights[context, symbol] * (state >> WEIGHT_BITS) + slot - begins[context, symbol]
        empty = state < LEAST_STATE
        taken = words[at : at + np.count_nonzero(empty)]
        if taken.size < np.count_nonzero(empty):
            return False
        state[empty] = state[empty] << 16 | taken
        held[: context.size], found[start : start + LANES], at = state, symbol, at + taken.size
    if at != words.size or (held != LEAST_STATE).any():
        return False
    kind = found + 1 >> 1
    far = kind >= NEAR
    many = NEAR_BITS - 1 + (kind[far] - NEAR >> 1)
    if (int(many.sum()) + 7) // 8 + PADDING != bits.size:
        return False
    kind[far] = (2 | kind[far] & 1) << many | unpacked(bits, many)
    out[:] = foretold + np.where(found & 1, kind, -kind).astype(np.uint16)
    return True


def write_rows(plane: Array, columns: int, out: Array) -> int:
    writer, held = Writer(9 * BYTE_MODELS), plane.tolist()
    for i, byte in enumerate(held):
        writer.number(BYTE_MODELS * _like(held, i, columns), 8, byte + 1)
    data = writer.done()
    out[: len(data)] = np.frombuffer(data, np.uint8)[: out.size]
    return len(data)


def read_rows(data: Array, columns: int, plane: Array) -> bool:
    reader, held = Reader(9 * BYTE_MODELS, data.tobytes()), [0] * plane.size
    for i in range(plane.size):
        held[i] = reader.number(BYTE_MODELS * _like(held, i, columns), 8) - 1
    plane[:] = held
    return reader.all_read


def _like(held: list[int], i: int, columns: int) -> int:
    return held[i - columns if i >= columns else max(i - 1, 0)].bit_length() if i else 0
