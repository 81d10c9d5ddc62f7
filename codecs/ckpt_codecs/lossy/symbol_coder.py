"""Small signed numbers as a stream: an adaptive binary range coder whose contexts are the numbers near by."""

from math import frexp

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import lossy
from ckpt_codecs.scratch import thread_buffer

MOST_SHIFT = 24
_SPARE = 4096
"""More than a group can take: so much must be left for the next one."""


def encode(symbols: Array, columns: int, total: int | None = None) -> bytes:
    """A stream of int32, read row by row: one byte for how many low bits are stored as they are, then the code.

    `total` is the sum of all magnitudes, if that is known.
    """
    flat = np.ascontiguousarray(symbols, np.int32).reshape(-1)
    if not flat.size:
        return b"\0"
    total = int(np.abs(flat).sum(dtype=np.int64)) if total is None else total
    shift = _shift(total, flat.size)
    # A symbol takes a part of its group's decision, one for being zero, its sign, its low bits, and what tells `high`.
    room = flat.size * (3 + shift) + 2 * (total >> shift) + _SPARE
    decisions = thread_buffer("decisions", 2 * room).view(np.uint16)
    count = lossy.model_symbols(flat, columns, shift, decisions)
    out = thread_buffer("code", 2 * count + 4)
    return bytes([shift]) + out[lossy.code_decisions(decisions, count, out) :].tobytes()


def decode(data: bytes | memoryview, count: int, columns: int, out: Array | None = None) -> Array:
    """So many symbols again, in `out` if there is one. Raises `CodecError` if it is no stream of them."""
    held = np.frombuffer(data, np.uint8)
    if not held.size or held[0] > MOST_SHIFT or (not count and held.size > 1):
        raise CodecError("a stream of symbols is damaged")
    symbols = np.empty(count, np.int32) if out is None else out
    if count and not lossy.decode_symbols(held[1:], columns, int(held[0]), symbols):
        raise CodecError("a stream of symbols is damaged")
    return symbols


def _shift(total: int, count: int) -> int:
    """So many low bits that what is above them is small."""
    mean = total / count
    return min(MOST_SHIFT, max(0, frexp(mean / 3)[1] - 1)) if mean > 6 else 0
