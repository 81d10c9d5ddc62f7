"""Encodings of the change between two states of bf16 weights, as they are in use, and ckpt's own.

Each is reimplemented from the public description or code that `source` names, looked up on 2026-11-26. They take the
bits of one tensor before and after as uint16 and return parts, whose bytes are counted; the framing around them
(safetensors, JSON) is not. ckpt takes a tensor in chunks of 2^18 values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import zstandard

from ckpt_codecs import CodecError, DeltaCodec, StatePair, delta_from_config
from ckpt_formats.universal.published import share

Array = np.ndarray[Any, np.dtype[Any]]
Shape = tuple[int, ...]
Parts = Sequence[bytes]
Encode = Callable[[Array, Array, Shape], Parts]
Decode = Callable[[Parts, Array, Shape], None]
"""Brings the bits of before to those of after, in place."""

BF16 = np.dtype(ml_dtypes.bfloat16)
CHUNK = 1 << 18


@dataclass(frozen=True)
class Encoding:
    name: str
    source: str
    encode: Encode
    decode: Decode


def zstd(data: bytes | Array, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data)


def unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(data)


def positions(before: Array, after: Array) -> Array:
    return np.flatnonzero(before != after)


def gaps_of(changed: Array) -> Array:
    """How many values lie between each changed one and the changed one before it."""
    return np.diff(changed, prepend=-1) - 1


def narrowest(values: Array, *dtypes: str) -> Array:
    top = int(values.max(initial=0))
    return values.astype(next(dtype for dtype in dtypes if top <= np.iinfo(dtype).max))


def place(gaps: Array) -> Array:
    return np.cumsum(gaps.astype(np.int64) + 1) - 1


def coo(before: Array, after: Array, shape: Shape) -> Parts:
    changed = positions(before, after)
    return [changed.astype("<i4").tobytes(), after[changed].tobytes()]


def from_coo(parts: Parts, values: Array, shape: Shape) -> None:
    values[np.frombuffer(parts[0], "<i4")] = np.frombuffer(parts[1], "<u2")


def gap_delta(before: Array, after: Array, shape: Shape) -> Parts:
    changed = positions(before, after)
    return [narrowest(gaps_of(changed), "<u2", "<u4").tobytes(), after[changed].tobytes()]


def from_gap_delta(parts: Parts, values: Array, shape: Shape) -> None:
    fresh = np.frombuffer(parts[1], "<u2")
    values[place(np.frombuffer(parts[0], f"<u{len(parts[0]) // max(fresh.size, 1) or 2}"))] = fresh


def gap_zstd(before: Array, after: Array, shape: Shape) -> Parts:
    return [zstd(b"".join(parts := gap_delta(before, after, shape)), 1), len(parts[1]).to_bytes(4, "little")]


def from_gap_zstd(parts: Parts, values: Array, shape: Shape) -> None:
    raw, nbytes = unzstd(parts[0]), int.from_bytes(parts[1], "little")
    from_gap_delta([raw[: len(raw) - nbytes], raw[len(raw) - nbytes :]], values, shape)


def gap_xor_zstd(before: Array, after: Array, shape: Shape) -> Parts:
    changed = positions(before, after)
    gaps = narrowest(gaps_of(changed), "<u2", "<u4").tobytes()
    return [zstd(gaps, 1), zstd((before ^ after)[changed], 1)]


def from_gap_xor_zstd(parts: Parts, values: Array, shape: Shape) -> None:
    gaps, xors = unzstd(parts[0]), np.frombuffer(unzstd(parts[1]), "<u2")
    values[place(np.frombuffer(gaps, f"<u{len(gaps) // max(xors.size, 1) or 2}"))] ^= xors


def rows_and_columns(before: Array, after: Array, shape: Shape) -> Parts:
    changed = positions(before, after)
    rows, columns = np.divmod(changed, max(prod(shape[1:]), 1))
    row_gaps = np.diff(rows, prepend=0)
    column_gaps = np.where(row_gaps, columns, np.diff(columns, prepend=0))
    parts = [narrowest(row_gaps, "<u1", "<i4"), narrowest(column_gaps, "<u2", "<i4"), after[changed]]
    return [zstd(b"".join(part.tobytes() for part in parts), 1), bytes(part.dtype.itemsize for part in parts)]


def from_rows_and_columns(parts: Parts, values: Array, shape: Shape) -> None:
    raw, (row_size, column_size, value_size) = unzstd(parts[0]), parts[1]
    count = len(raw) // (row_size + column_size + value_size)
    row_gaps = np.frombuffer(raw, f"<u{row_size}", count).astype(np.int64)
    column_gaps = np.frombuffer(raw, f"<u{column_size}", count, row_size * count).astype(np.int64)
    sums = np.cumsum(column_gaps)
    starts = np.flatnonzero(row_gaps)
    ends = np.diff(np.append(starts, count))
    columns = sums.copy()
    if starts.size:
        columns[starts[0] :] -= np.repeat(sums[starts] - column_gaps[starts], ends)
    changed = np.cumsum(row_gaps) * max(prod(shape[1:]), 1) + columns
    values[changed] = np.frombuffer(raw, "<u2", count, (row_size + column_size) * count)


def xor_zstd(level: int) -> tuple[Encode, Decode]:
    def decode(parts: Parts, values: Array, shape: Shape) -> None:
        values ^= np.frombuffer(unzstd(parts[0]), "<u2")

    return lambda before, after, shape: [zstd(before ^ after, level)], decode


def overwritten_bytes(before: Array, after: Array, shape: Shape) -> Parts:
    changed = np.flatnonzero(before.view(np.uint8) != after.view(np.uint8))
    return [zstd(changed.astype("<u4").tobytes() + after.view(np.uint8)[changed].tobytes(), 1)]


def from_overwritten_bytes(parts: Parts, values: Array, shape: Shape) -> None:
    raw = unzstd(parts[0])
    count = len(raw) // 5
    values.view(np.uint8)[np.frombuffer(raw, "<u4", count)] = np.frombuffer(raw, np.uint8, count, 4 * count)


def plain(level: int) -> tuple[Encode, Decode]:
    """The best that gaps, differences and zstd gave us: gaps as bytes with escapes, differences as planes of bytes."""

    def encode(before: Array, after: Array, shape: Shape) -> Parts:
        changed = positions(before, after)
        gaps = gaps_of(changed)
        signed = (after[changed] - before[changed]).view(np.int16)
        folded = ((signed << 1) ^ (signed >> 15)).astype("<u2")
        far = gaps[gaps >= 255].astype("<u4")
        parts = [np.minimum(gaps, 255).astype(np.uint8), far, folded.astype(np.uint8), (folded >> 8).astype(np.uint8)]
        return [zstd(part.tobytes(), level) for part in parts]

    def decode(parts: Parts, values: Array, shape: Shape) -> None:
        near, far, low, high = (
            np.frombuffer(unzstd(p), t) for p, t in zip(parts, ("u1", "<u4", "u1", "u1"), strict=True)
        )
        gaps = near.astype(np.int64)
        gaps[near == 255] = far
        folded = low.astype(np.uint16) | high.astype(np.uint16) << 8
        values[place(gaps)] += (folded >> 1) ^ (0 - (folded & 1)).astype(np.uint16)

    return encode, decode


def ours(codec: DeltaCodec) -> tuple[Encode, Decode]:
    def encode(before: Array, after: Array, shape: Shape) -> Parts:
        pairs = zip(chunks(before), chunks(after), strict=True)
        return [codec.encode(StatePair({"param": old}, {"param": new})) for old, new in pairs]

    def decode(parts: Parts, values: Array, shape: Shape) -> None:
        for data, chunk in zip(parts, chunks(values), strict=True):
            chunk[:] = codec.decode(data, {"param": chunk}, chunk.shape, {"param": BF16})["param"]

    return encode, decode


def chunks(values: Array) -> list[Array]:
    """Return views of 2^18 values, as bfloat16."""
    return [values[at : at + CHUNK].view(BF16) for at in range(0, values.size, CHUNK)]


def published(before: Array, after: Array, shape: Shape) -> Parts:
    pairs = zip(chunks(before), chunks(after), strict=True)
    return [part for old, new in pairs for part in (share.encode_chunk(old, new), share.digest_of(new), bytes(4))]


def from_published(parts: Parts, values: Array, shape: Shape) -> None:
    for data, digest, chunk in zip(parts[::3], parts[1::3], chunks(values), strict=True):
        share.decode_chunk(data, chunk, chunk, Path())
        assert share.digest_of(chunk) == digest


def ckpt_encodings() -> list[Encoding]:
    """Return ckpt's: form 17 of residuals, form 19 where this version has it, and what `publish` stores."""
    page = "docs/delta-codecs.md"
    encodings = [Encoding("ckpt difference", page, *ours(delta_from_config({"name": "difference"})))]
    with suppress(CodecError):  # a version without form 19
        fast = delta_from_config({"name": "difference", "speed": "fast"})
        encodings.append(Encoding("ckpt difference:speed=fast", page, *ours(fast)))
    return [*encodings, Encoding("ckpt publish, with sizes and digests", "docs/format.md", published, from_published)]


OTHERS = (
    Encoding(
        "int32 positions, values", "vLLM sparse_nccl_engine.py 8f5ec677 (#40096, #53751); TRL `raw`", coo, from_coo
    ),
    Encoding("uint16 gaps, values", "TRL delta_codec.py 019ac735, `gap_delta` (#5937)", gap_delta, from_gap_delta),
    Encoding("uint16 gaps, values; zstd 1", "slime #1806, first wire format", gap_zstd, from_gap_zstd),
    Encoding(
        "positions of bytes, bytes; zstd 1",
        "slime disk_delta.py 1a7ef658, `overwrite`",
        overwritten_bytes,
        from_overwritten_bytes,
    ),
    Encoding(
        "gaps of rows and columns, values; zstd 1",
        "PULSE: grail sparse_codec.py 0257ceb5, v3.1",
        rows_and_columns,
        from_rows_and_columns,
    ),
    Encoding(
        "uint16 gaps, XOR of changed; zstd 1",
        "NeMo-RL weight_transfer_sparse_codec.py (#2444), `xor`",
        gap_xor_zstd,
        from_gap_xor_zstd,
    ),
    Encoding("XOR; zstd 1", "slime update_weight_from_disk_delta.py 06236d02, default", *xor_zstd(1)),
    Encoding("XOR; zstd 3", "SkyRL delta_payload.py 05aa2781 (#1903, #1935)", *xor_zstd(3)),
    Encoding("byte gaps, differences in planes; zstd 3", "best plain encoding found", *plain(3)),
    Encoding("byte gaps, differences in planes; zstd 19", "the same, slowest", *plain(19)),
)
