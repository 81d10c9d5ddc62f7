"""Frames of zstd in the place of Huffman codes, as older versions of ckpt wrote them. They are read for ever."""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.chunk.zstd import decompress
from ckpt_codecs.format_ids import DIGITS, ENTRY, HUF0, RUNS, STORED

_DIGITS_PER_BYTE = {2: 8, 3: 5, **dict.fromkeys(range(4, 17), 2)}
"""By the base."""


def expand_inner(kind: int, stream: Array, size: int) -> Array | None:
    """Return a stream of runs or digits, (m,) uint8, with its inner frames of zstd as stored inner streams.

    `size`: that of its plane. None if the stream has no such frames, or is damaged. Raises `CodecError` if a frame is.
    """
    head = _inner_sizes(kind, stream, size)
    if head is None:
        return None
    at, sizes = head
    parts = [stream[:at]]
    for inner in sizes:
        if stream.size - at < ENTRY:
            return None
        end = at + ENTRY + int.from_bytes(stream[at + 1 : at + ENTRY].tobytes(), "little")
        if end > stream.size:
            return None
        if stream[at] == HUF0:
            content = decompress(stream[at + ENTRY : end], inner)
            parts.append(np.frombuffer(bytes([STORED]) + inner.to_bytes(4, "little") + content, np.uint8))
        else:
            parts.append(stream[at:end])
        at = end
    return np.concatenate([*parts, stream[at:]])


def _inner_sizes(kind: int, stream: Array, size: int) -> tuple[int, list[int]] | None:
    """Where the inner streams begin, and how many bytes their planes have; None if there are none."""
    if kind == DIGITS and stream.size and int(stream[0]) in _DIGITS_PER_BYTE:
        base = int(stream[0])
        return 1 + base, [-(-size // _DIGITS_PER_BYTE[base])]
    if kind == RUNS and stream.size >= 9:
        gaps, others = (int.from_bytes(stream[i : i + 4].tobytes(), "little") for i in (1, 5))
        if others <= size and gaps <= size + size // 255:
            return 9, [gaps, others]
    return None
