"""QD-Compressor (ICCD 2021, TPDS 2023): both versions quantised with one step, and their integers subtracted.

Known: a uniform quantiser between the least and the largest value of a layer, the same step for both versions, the
difference of the integers, entropy coding. The paper finds the bits of each layer from its range and a weighted entropy
and feeds errors back into training: of these the details were not known, so bits are the caller's, and a chain stays
closed by quantising against what a decoder has. The error of a weight is at most half a step.
"""

from __future__ import annotations

import numpy as np

from papers.coding import Array, decode_integers, encode_integers


def step_size(values: Array, bits: int) -> float:
    """Of a layer; 1 if all its values are the same."""
    wide = float(values.max()) - float(values.min()) if values.size else 0.0
    return wide / ((1 << bits) - 1) or 1.0


def encode(after: Array, before: Array, bits: int) -> bytes:
    """float32 weights against those that a decoder has of the earlier step."""
    step = step_size(after, bits)
    return np.float64(step).tobytes() + encode_integers(_numbers(after, step) - _numbers(before, step))


def decode(data: bytes, before: Array) -> Array:
    step = float(np.frombuffer(data[:8], np.float64)[0])
    numbers = _numbers(before, step).reshape(-1) + decode_integers(data[8:])
    return (numbers * step).astype(np.float32).reshape(before.shape)


def _numbers(values: Array, step: float) -> Array:
    return np.rint(values.astype(np.float64) / step).astype(np.int64)
