"""The twin of `ans_steps.c`: steps of 16-bit floats by asymmetric numeral systems, sixteen values at once."""

import numpy as np

from ckpt_codecs.base import Array
from oracle.bit_packing import PADDING, pack, unpack

STATES, WEIGHT_BITS, MIN_STATE = 16, 12, 1 << 16
NEAR, NEAR_BITS, SYMBOLS = 32, 5, 108


def count_step_symbols(predicted: Array, actual: Array, which: Array, contexts: int) -> tuple[Array, Array, Array]:
    step = (actual - predicted).view(np.int16).astype(np.int64)
    size = np.abs(step)
    octave = np.frexp(np.maximum(size, 1).astype(np.float64))[1].astype(np.int64) - 1
    far = size >= NEAR
    kind = np.where(far, NEAR + 2 * (octave - NEAR_BITS) + (size >> np.maximum(octave - 1, 0) & 1), size)
    symbols = which.astype(np.int64) << 8 | 2 * kind - (step > 0)
    counts = np.bincount(symbols, minlength=contexts << 8).reshape(contexts, 256)[:, :SYMBOLS].astype(np.uint32)
    widths = octave[far] - 1
    return symbols.astype(np.uint16), counts, pack(size[far] & (1 << widths) - 1, widths)


def write_ans_steps(symbols: Array, weights: Array) -> tuple[Array, Array]:
    begins = np.cumsum(weights, axis=1, dtype=np.int64) - weights
    context, symbol = symbols >> 8, symbols & 255
    weight, begin = weights[context, symbol].astype(np.int64), begins[context, symbol]
    states, words = np.full(STATES, MIN_STATE, np.int64), []
    for start in range((symbols.size - 1) // STATES * STATES, -1, -STATES):
        each, first = weight[start : start + STATES], begin[start : start + STATES]
        state = states[: each.size]
        full = state >= each << 20
        words.append((state[full] & 0xFFFF).astype(np.uint16))
        state = state >> 16 * full
        states[: each.size] = (state // each << WEIGHT_BITS) + state % each + first
    return states.astype(np.uint32), np.concatenate([np.empty(0, np.uint16), *reversed(words)])


def read_ans_steps(
    predicted: Array, which: Array, weights: Array, states: Array, words: Array, bits: Array, out: Array
) -> bool:
    contexts = weights.shape[0]
    slots = np.repeat(np.tile(np.arange(SYMBOLS), contexts), weights.reshape(-1)).reshape(contexts, -1)
    begins = np.cumsum(weights, axis=1, dtype=np.int64) - weights
    all_states, at = states.astype(np.int64), 0
    symbols = np.empty(out.size, np.int64)
    for start in range(0, out.size, STATES):
        context = which[start : start + STATES]
        state = all_states[: context.size]
        slot = state & (1 << WEIGHT_BITS) - 1
        symbol = slots[context, slot]
        state = weights[context, symbol] * (state >> WEIGHT_BITS) + slot - begins[context, symbol]
        empty = state < MIN_STATE
        taken = words[at : at + np.count_nonzero(empty)]
        if taken.size < np.count_nonzero(empty):
            return False
        state[empty] = state[empty] << 16 | taken
        all_states[: context.size], symbols[start : start + STATES], at = state, symbol, at + taken.size
    if at != words.size or (all_states != MIN_STATE).any():
        return False
    kind = symbols + 1 >> 1
    far = kind >= NEAR
    widths = NEAR_BITS - 1 + (kind[far] - NEAR >> 1)
    if (int(widths.sum()) + 7) // 8 + PADDING != bits.size:
        return False
    kind[far] = (2 | kind[far] & 1) << widths | unpack(bits, widths)
    out[:] = predicted + np.where(symbols & 1, kind, -kind).astype(np.uint16)
    return True
