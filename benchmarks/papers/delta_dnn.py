"""Delta-DNN (ICPP 2020): weights in steps of `2 log(1 + eps)` from the earlier ones; the best of three coders.

Known: both formulas, the error bounds that are tried (1e-1 to 1e-5), and that the best of Zstd, LZMA and run lengths is
taken. The paper chooses the bound by the accuracy that a user allows; here the caller does. The error of a weight is at
most `log(1 + eps)`.
"""

from __future__ import annotations

import lzma
from math import log1p

import numpy as np

from papers.coding import Array, decode_runs, encode_runs, unzstd, zstd

BOUNDS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5)


def encode(after: Array, before: Array, eps: float) -> bytes:
    """float32 weights against those that a decoder has of the earlier step."""
    step = 2 * log1p(eps)
    steps = np.floor((before.astype(np.float64) - after.astype(np.float64)) / step + 0.5).reshape(-1).astype(np.int64)
    width = next(w for w in (1, 2, 4, 8) if -(1 << (8 * w - 1)) <= steps.min(initial=0) and _below(steps, w))
    planes = np.ascontiguousarray(steps.astype(f"<i{width}").view(np.uint8).reshape(-1, width).T).reshape(-1)
    candidates = {
        b"z": zstd(planes.tobytes(), 19),
        b"l": lzma.compress(planes.tobytes(), preset=6),
        b"r": encode_runs(planes),
    }
    kind, body = min(candidates.items(), key=lambda item: len(item[1]))
    return kind + width.to_bytes(1, "little") + np.float64(eps).tobytes() + body


def decode(data: bytes, before: Array) -> Array:
    width, step = data[1], 2 * log1p(float(np.frombuffer(data[2:10], np.float64)[0]))
    body = data[10:]
    if data[:1] == b"r":
        planes = decode_runs(body)
    else:
        raw = unzstd(body, width * before.size) if data[:1] == b"z" else lzma.decompress(body)
        planes = np.frombuffer(raw, np.uint8)
    steps = np.ascontiguousarray(planes.reshape(width, -1).T).view(f"<i{width}").reshape(before.shape)
    return (before.astype(np.float64) - steps * step).astype(np.float32)


def _below(steps: Array, width: int) -> bool:
    return int(steps.max(initial=0)) < 1 << (8 * width - 1)
