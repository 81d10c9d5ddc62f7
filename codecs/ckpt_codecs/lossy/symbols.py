"""Small signed numbers as a stream: an adaptive binary range coder whose contexts are the numbers near by."""

from math import log2

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy.arithmetic import arithmetic
from ckpt_codecs.lossy.model import context_table
from ckpt_codecs.scratch import borrow

MOST_SHIFT = 24
_TABLE = context_table()
_MOST_DECISIONS = 111
"""For one symbol, at the very most; a group's own included."""


def encode(symbols: Array, columns: int) -> bytes:
    """A stream of int32, read row by row: one byte for how many low bits are stored as they are, then the code."""
    flat = np.ascontiguousarray(symbols, np.int32).reshape(-1)
    if not flat.size:
        return b"\0"
    shift, run = _shift(flat), arithmetic()
    for each in (4, _MOST_DECISIONS):
        records = borrow("records", 2 * (each * flat.size + 4096)).view(np.uint16)
        many = run.note(flat, columns, shift, _TABLE, records)
        if many >= 0:
            break
    out = borrow("code", 2 * many + 8)
    return bytes([shift]) + out[run.write(records, many, out) :].tobytes()


def decode(data: bytes | memoryview, count: int, columns: int) -> Array:
    """So many symbols again. Raises `CodecError` if it is no stream of them."""
    held = np.frombuffer(data, np.uint8)
    if not held.size or held[0] > MOST_SHIFT or (not count and held.size > 1):
        raise CodecError("a stream of symbols is damaged")
    symbols = np.empty(count, np.int32)
    if count and not arithmetic().read(held[1:], columns, int(held[0]), _TABLE, symbols):
        raise CodecError("a stream of symbols is damaged")
    return symbols


def _shift(flat: Array) -> int:
    """So many low bits that what is above them is small."""
    mean = float(np.abs(flat).mean(dtype=np.float64))
    return min(MOST_SHIFT, max(0, int(log2(mean / 3)))) if mean > 6 else 0
