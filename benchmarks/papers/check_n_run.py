"""Check-N-Run (Eisenman et al., NSDI 2022): of an embedding table, only the rows that changed; quantised on demand.

Known: a bit for each row that changed, the rows as they are, or with 2, 3, 4 or 8 bits for a value: asymmetric uniform
quantisation of each row between a least and a largest value, which a greedy search moves inwards while that makes the
error smaller. IncrCP (Lin et al., PVLDB 18(4)) records the same rows with their indexes; what it adds is how
they are arranged for recovery.
"""

from __future__ import annotations

import numpy as np

from papers.coding import Array, frame, pack_bits, unframe, unpack_bits, unzstd, zstd

_MOVES = 20
"""The search moves an end by so many parts of the range, and as often at most."""


def touched(after: Array, before: Array) -> Array:
    """Which rows differ in any bit: (rows,) bool."""
    width = f"u{after.dtype.itemsize}"
    return (after.view(width) != before.view(width)).reshape(after.shape[0], -1).any(axis=1)


def encode(after: Array, before: Array, bits: int | None = None) -> bytes:
    """A table (rows, columns) of float32 against the earlier one. `bits` None: exact."""
    rows = touched(after, before)
    mask = zstd(np.packbits(rows).tobytes())
    if bits is None:
        return frame(mask, after[rows].tobytes())
    return frame(mask, bytes([bits]), *_quantised(after[rows], bits))


def decode(data: bytes, before: Array) -> Array:
    mask, *rest = unframe(data)
    rows = np.unpackbits(np.frombuffer(unzstd(mask, before.shape[0]), np.uint8), count=before.shape[0]).astype(bool)
    after = before.copy()
    if len(rest) == 1:
        after[rows] = np.frombuffer(rest[0], before.dtype).reshape(-1, before.shape[1])
        return after
    (bits,), ends, packed = rest
    low, step = np.frombuffer(ends, np.float32).reshape(2, -1, 1)
    numbers = unpack_bits(packed, bits, int(rows.sum()) * before.shape[1]).reshape(-1, before.shape[1])
    after[rows] = low + step * numbers.astype(np.float32)
    return after


def _quantised(rows: Array, bits: int) -> tuple[bytes, bytes]:
    levels = (1 << bits) - 1
    low, high = (end.astype(np.float64) for end in (rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)))
    best = (low, high, _error(rows, low, high, levels))
    part = (high - low) / (2 * _MOVES)
    for _ in range(_MOVES):
        raised, lowered = (low + part, high), (low, high - part)
        errors = [_error(rows, *ends, levels) for ends in (raised, lowered)]
        choose = errors[0] < errors[1]
        low, high = np.where(choose, raised[0], lowered[0]), np.where(choose, raised[1], lowered[1])
        error = np.where(choose, *errors)
        better = error < best[2]
        best = tuple(np.where(better, new, old) for new, old in zip((low, high, error), best, strict=True))  # type: ignore[assignment]
    least = best[0].astype(np.float32)
    step = ((best[1] - best[0]) / levels).astype(np.float32)
    numbers = _numbers(rows, least, step, levels)
    return np.concatenate([least, step]).tobytes(), pack_bits(numbers.reshape(-1), bits)


def _numbers(rows: Array, low: Array, step: Array, levels: int) -> Array:
    with np.errstate(all="ignore"):
        return np.clip(np.nan_to_num(np.rint((rows - low) / step)), 0, levels)


def _error(rows: Array, low: Array, high: Array, levels: int) -> Array:
    step = (high - low) / levels
    return ((low + step * _numbers(rows, low, step, levels) - rows) ** 2).sum(axis=1, keepdims=True)
