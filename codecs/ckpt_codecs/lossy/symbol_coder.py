"""Streams of small signed integers: an adaptive binary range coder whose contexts are the neighboring symbols."""

from math import frexp

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import lossy
from ckpt_codecs.scratch import thread_buffer

MAX_SHIFT = 24
_GROUP_RESERVE = 4096
"""Decisions that must still fit before a group begins: more than one group can take."""


def encode(symbols: Array, columns: int, total: int | None = None) -> bytes:
    """The stream of symbols: one byte with the count of low bits that are stored as they are, then the code.

    `symbols`: int32 of any shape, read in C order as rows of `columns`. `total`: the sum of all magnitudes, if known.
    """
    flat = np.ascontiguousarray(symbols, np.int32).reshape(-1)
    if not flat.size:
        return b"\0"
    total = int(np.abs(flat).sum(dtype=np.int64)) if total is None else total
    shift = _shift(total, flat.size)
    # A symbol takes a share of its group's decision, one decision for zero, one for the sign, one for each low bit,
    # and those that encode `high`, the bits above.
    capacity = flat.size * (3 + shift) + 2 * (total >> shift) + _GROUP_RESERVE
    decisions = thread_buffer("decisions", 2 * capacity).view(np.uint16)
    count = lossy.model_symbols(flat, columns, shift, decisions)
    out = thread_buffer("code", 2 * count + 4)
    return bytes([shift]) + out[lossy.code_decisions(decisions, count, out) :].tobytes()


def decode(data: bytes | memoryview, count: int, columns: int, out: Array | None = None) -> Array:
    """The symbols of a stream, (count,) int32, in `out` if it is given. Raises `CodecError` if the data is damaged."""
    source = np.frombuffer(data, np.uint8)
    if not source.size or source[0] > MAX_SHIFT or (not count and source.size > 1):
        raise CodecError("a stream of symbols is damaged")
    symbols = np.empty(count, np.int32) if out is None else out
    if count and not lossy.decode_symbols(source[1:], columns, int(source[0]), symbols):
        raise CodecError("a stream of symbols is damaged")
    return symbols


def _shift(total: int, count: int) -> int:
    """The count of low bits to store as they are, so that the bits above them are small numbers."""
    mean = total / count
    return min(MAX_SHIFT, max(0, frexp(mean / 3)[1] - 1)) if mean > 6 else 0
