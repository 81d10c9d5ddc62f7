"""Entropy coders that the papers' codecs share: rANS, Huffman (ours), zero runs, and packed bits. NumPy, one thread."""

from __future__ import annotations

from typing import Any

import numpy as np
import zstandard

from ckpt_codecs.chunk import streams

Array = np.ndarray[Any, np.dtype[Any]]

_SCALE = 12
"""Frequencies add up to 2^12."""
_LANES = 4096
"""States of rANS that step together, at most."""
_LEAST = 2048
"""Symbols below which tables cost more than they save: then zstd."""


def frame(*parts: bytes) -> bytes:
    """Parts behind one another, each with its length."""
    return b"".join(len(part).to_bytes(4, "little") + part for part in parts)


def unframe(data: bytes) -> list[bytes]:
    """What `frame` put together. Raises `ValueError` for lengths beyond the end."""
    parts, at = [], 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        if at + 4 + length > len(data):
            raise ValueError("a part ends after the data")
        parts.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return parts


def zstd(data: bytes, level: int = 3) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data)


def unzstd(data: bytes, most: int) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data, max_output_size=most)


def encode_symbols(symbols: Array) -> bytes:
    """uint8 symbols by static rANS of order 0 (Duda, arXiv 1311.2540), many states at once."""
    if symbols.size < _LEAST:
        return b"z" + symbols.size.to_bytes(4, "little") + zstd(symbols.tobytes(), 19)
    weights = _weights(np.bincount(symbols, minlength=256))
    begins = np.cumsum(weights) - weights
    lanes = max(1, min(_LANES, symbols.size // 512))
    rows = -(-symbols.size // lanes)
    padded = np.zeros(rows * lanes, np.uint8)
    padded[: symbols.size] = symbols
    padded[symbols.size :] = symbols[-1]
    states, words = np.full(lanes, 1 << 16, np.uint64), []
    limits, starts, sizes = (weights << (32 - _SCALE)).astype(np.uint64), begins.astype(np.uint64), weights.astype("u8")
    for row in padded.reshape(rows, lanes)[::-1]:
        size = sizes[row]
        full = states >= limits[row]
        words.append((states[full] & 0xFFFF).astype(np.uint16))
        states = np.where(full, states >> np.uint64(16), states)
        whole = states // size
        states = (whole << np.uint64(_SCALE)) + (states - whole * size) + starts[row]
    table, stream = zstd(weights.astype(np.uint16).tobytes(), 19), np.concatenate(words[::-1]).tobytes()
    head = symbols.size.to_bytes(4, "little") + lanes.to_bytes(4, "little")
    return b"a" + frame(head, table, states.astype(np.uint32).tobytes(), stream)


def decode_symbols(data: bytes) -> Array:
    """The symbols: (n,) uint8."""
    if data[:1] == b"z":
        count = int.from_bytes(data[1:5], "little")
        return np.frombuffer(unzstd(data[5:], count), np.uint8)
    head, table, last, stream = unframe(data[1:])
    count, lanes = int.from_bytes(head[:4], "little"), int.from_bytes(head[4:], "little")
    weights = np.frombuffer(unzstd(table, 512), np.uint16).astype(np.uint64)
    begins = np.cumsum(weights) - weights
    slots = np.repeat(np.arange(256, dtype=np.uint8), weights.astype(np.int64))
    states, words, at = np.frombuffer(last, np.uint32).astype(np.uint64), np.frombuffer(stream, np.uint16), 0
    rows = -(-count // lanes)
    symbols = np.empty((rows, lanes), np.uint8)
    mask = np.uint64((1 << _SCALE) - 1)
    for row in symbols:
        low = states & mask
        row[:] = slots[low]
        states = weights[row] * (states >> np.uint64(_SCALE)) + low - begins[row]
        empty = np.flatnonzero(states < (1 << 16))
        states[empty] = (states[empty] << np.uint64(16)) | words[at : at + empty.size]
        at += empty.size
    return symbols.reshape(-1)[:count]


def _weights(counts: Array) -> Array:
    """Counts as weights that add up to 2^12, at least 1 for each symbol that occurs: (256,) int64."""
    weights = np.where(counts > 0, np.maximum(1, counts * (1 << _SCALE) // counts.sum()), 0)
    while (excess := int(weights.sum()) - (1 << _SCALE)) != 0:
        largest = int(weights.argmax())
        weights[largest] -= min(excess, int(weights[largest]) - 1) if excess > 0 else excess
    return weights.astype(np.int64)


def huffman(plane: Array) -> bytes:
    """A uint8 plane by our Huffman code, so that its speed is that of a compiled one."""
    out = np.empty(plane.size + 4096, np.uint8)
    kind, size = streams.encode(plane, out, 0, streams.LEVELS["max"])
    body = plane.tobytes() if kind == 0 else out[:size].tobytes()
    return kind.to_bytes(1, "little") + plane.size.to_bytes(4, "little") + body


def unhuffman(data: bytes) -> Array:
    source = np.frombuffer(data, np.uint8)
    size = int.from_bytes(data[1:5], "little")
    return streams.decode(data[0], source, 5, source.size, size, "papers").copy()


def encode_integers(values: Array) -> bytes:
    """Signed integers as zigzag bytes, plane by plane, each by rANS."""
    wide = values.astype(np.int64).reshape(-1)
    zigzag = ((wide << 1) ^ (wide >> 63)).astype(np.uint64)
    planes = max(1, -(-int(zigzag.max(initial=0)).bit_length() // 8))
    return frame(*(encode_symbols((zigzag >> np.uint64(8 * i)).astype(np.uint8)) for i in range(planes)))


def decode_integers(data: bytes) -> Array:
    """The integers: (n,) int64."""
    planes = [decode_symbols(part) for part in unframe(data)]
    zigzag = np.zeros(planes[0].size, np.uint64)
    for i, plane in enumerate(planes):
        zigzag |= plane.astype(np.uint64) << np.uint64(8 * i)
    return (zigzag >> np.uint64(1)).astype(np.int64) ^ -(zigzag & np.uint64(1)).astype(np.int64)


def encode_runs(symbols: Array) -> bytes:
    """uint8 symbols that are mostly 0: the gaps before the others and these, each by Huffman's code."""
    places = np.flatnonzero(symbols)
    gaps = np.diff(places, prepend=-1) - 1
    whole = gaps // 255
    wide = np.repeat(np.full(gaps.size, 255, np.uint8), whole)  # a gap is 255 as often as that fits, then the rest
    order = np.repeat(np.arange(gaps.size), whole + 1)
    ends = np.cumsum(whole + 1) - 1
    plane = np.full(order.size, 255, np.uint8)
    plane[ends] = (gaps - 255 * whole).astype(np.uint8)
    assert wide.size + gaps.size == plane.size
    return frame(symbols.size.to_bytes(4, "little"), huffman(plane), huffman(symbols[places]))


def decode_runs(data: bytes) -> Array:
    head, gaps, values = unframe(data)
    symbols = np.zeros(int.from_bytes(head, "little"), np.uint8)
    plane = unhuffman(gaps)
    ends = np.flatnonzero(plane < 255)
    before = np.diff(ends, prepend=-1) - 1
    places = np.cumsum(before * 255 + plane[ends] + 1) - 1
    symbols[places] = unhuffman(values)
    return symbols


def pack_bits(values: Array, bits: int) -> bytes:
    """The low bits of unsigned numbers, without gaps."""
    wide = np.ascontiguousarray(values.astype(">u4")).view(np.uint8).reshape(-1, 4)
    return np.packbits(np.unpackbits(wide, axis=1)[:, 32 - bits :]).tobytes()


def unpack_bits(data: bytes, bits: int, count: int) -> Array:
    """(count,) uint32."""
    flat = np.unpackbits(np.frombuffer(data, np.uint8), count=bits * count).reshape(count, bits)
    wide = np.zeros((count, 32), np.uint8)
    wide[:, 32 - bits :] = flat
    return np.packbits(wide, axis=1).view(">u4").reshape(-1).astype(np.uint32)
