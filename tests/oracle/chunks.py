"""The twin of `chunks.c`: whole chunks. Functions have the arguments of `ckpt_codecs.native.lossless`."""

from collections.abc import Sequence

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.format_ids import CONSTANT, ENTRY, HUFFMAN, STORED
from oracle import sparse
from oracle.entropy import estimate_bits
from oracle.planes import merge_planes, split_planes
from oracle.residuals import from_residuals, to_residuals
from oracle.streams import read_stream, write_stream


def write_planes(words: Array, floats: bool, max_ratio: float, sampled: bool, out: Array) -> int:
    width = words.itemsize
    sampled_each = [sampled] * width
    if floats and width in (2, 4):
        sampled_each[-1] = False
    return _write(list(split_planes(words, floats)), [max_ratio] * width, sampled_each, out)


def write_residuals(
    words: Array, base: Array | None, columns: int, max_ratio: float, sampled: bool, row_max_ratio: float, out: Array
) -> int:
    *lower, exponents = split_planes(words, True)
    residuals, scales = to_residuals(words, base, columns)
    gain = estimate_bits(exponents) * words.size - (estimate_bits(residuals) * words.size + 8 * scales.size)
    if gain <= 0:
        return 0
    more = (scales - scales.min()).view(np.uint16)
    least = scales.min(keepdims=True).view(np.uint8)
    planes = [*lower, least, more.astype(np.uint8), (more >> np.uint16(8)).astype(np.uint8), residuals]
    ratios = [max_ratio] * len(lower) + [row_max_ratio] * 3 + [max_ratio]
    return _write(planes, ratios, [sampled] * len(lower) + [True] * 3 + [False], out)


def write_streams(sizes: Sequence[int], max_ratios: Sequence[float], sampled: Sequence[bool], out: Array) -> int:
    begins = 1 + ENTRY * len(sizes) + np.cumsum([0, *sizes])
    planes = [out[begin : begin + size].copy() for begin, size in zip(begins[:-1].tolist(), sizes, strict=True)]
    return _write(planes, max_ratios, sampled, out)


def _write(planes: Sequence[Array], max_ratios: Sequence[float], sampled: Sequence[bool], out: Array) -> int:
    streams = [write_stream(*each) for each in zip(planes, max_ratios, sampled, strict=True)]
    directory = b"".join(sparse.head(kind, len(data)) for kind, data in streams)
    chunk = directory + b"".join(data for _, data in streams)
    out[1 : 1 + len(chunk)] = np.frombuffer(chunk, np.uint8)
    return 1 + len(chunk)


def read_planes(source: Array, floats: bool, words: Array) -> bool:
    planes = _read(source, [words.size] * words.itemsize)
    if planes is None:
        return False
    merge_planes(planes, floats, words)
    return True


def read_residuals(source: Array, base: Array | None, columns: int, words: Array) -> bool:
    rows = words.size // columns
    planes = _read(source, [*[words.size] * (words.itemsize - 1), 2, rows, rows, words.size])
    if planes is None:
        return False
    *lower, least, low, high, residuals = planes
    scales = (least.copy().view(np.uint16) + low + (high.astype(np.uint16) << np.uint16(8))).view(np.int16)
    merge_planes([*lower, from_residuals(residuals, lower[-1], scales, base, columns)], True, words)
    return True


def _read(source: Array, sizes: Sequence[int]) -> list[Array] | None:
    """The planes of all streams of a chunk, or None."""
    at = 1 + ENTRY * len(sizes)
    if source.size < at:
        return None
    planes = []
    for i, size in enumerate(sizes):
        kind, *length = source[1 + ENTRY * i : 1 + ENTRY * (i + 1)].tobytes()
        end = at + int.from_bytes(bytes(length), "little")
        planes.append(np.empty(size, np.uint8))
        if end > source.size or not read_stream(kind, source[at:end], planes[-1]):
            return None
        at = end
    return planes if at == source.size else None


def read_streams(
    source: Array, kinds: Sequence[int], starts: Sequence[int], sizes: Sequence[int], places: Sequence[int], out: Array
) -> int:
    for i, kind in enumerate(kinds):
        plane = out[places[i] : places[i] + sizes[i]]
        if kind != STORED and not read_stream(kind, source[starts[i] : starts[i + 1]], plane):
            return i
    return len(kinds)


def entropy_code(plane: Array, out: Array) -> int:
    kind, data = sparse.entropy_code(plane)
    if kind not in (CONSTANT, HUFFMAN):
        return 0
    out[: len(data)] = np.frombuffer(data, np.uint8)
    return len(data)
