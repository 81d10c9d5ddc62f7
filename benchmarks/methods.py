"""What is measured in the comparison of codecs: methods, and the pieces of a state that they are given.

Who can is given memory that is used again to put its results in, as `ckpt` does it; zstandard and ZipNN take their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import zipnn
import zstandard
from pcodec import ChunkConfig, standalone

from ckpt_codecs import Codec, Rounded, candidate_codecs
from ckpt_codecs.base import Bytes, encode_bound
from ckpt_codecs.scratch import thread_buffer
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.encode_state import ROW_NBYTES

STATES = ("fp32", "param", "exp_avg", "exp_avg_sq")
PIECE = 4 << 20
"""Bytes that the other methods are given at once, so that they can be spread over threads."""

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Piece:
    """What is coded at once; `base` is the same piece of another state."""

    values: Array
    base: Array | None = None


@dataclass(frozen=True)
class Method:
    """A pair of functions on pieces, and how a state is cut for it."""

    name: str
    cut: Callable[[str, dict[str, list[Array]]], list[Piece]]
    encode: Callable[[str, Piece], Any]
    decode: Callable[[str, Any, Piece], Any]
    overhead: int = 0
    """Bytes for each piece that are stored beside what `encode` makes of it."""


def whole(state: str, held: dict[str, list[Array]]) -> list[Piece]:
    """All tensors of a state, one after another, at once: as large as a layer of a large model."""
    return [Piece(np.concatenate([array.reshape(-1) for array in held[state]]))]


def runs(state: str, held: dict[str, list[Array]]) -> list[Piece]:
    """The same in pieces that stay in a cache: what general compressors get."""
    (joined,) = (piece.values for piece in whole(state, held))
    each = PIECE // joined.dtype.itemsize
    return [Piece(joined[i : i + each]) for i in range(0, joined.size, each)]


def chunks(state: str, held: dict[str, list[Array]]) -> list[Piece]:
    """Every tensor cut into chunks, as the universal format cuts it."""
    context = candidate_codecs("parameter", state, held[state][0].dtype)[0].context
    bases = held[context] if context in held else [None] * len(held[state])
    return [
        Piece(*(None if tensor is None else part(tensor, i) for tensor in (array, base)))
        for array, base in zip(held[state], bases, strict=True)
        for i in range(-(-array.size // Chunking.default(array.shape).chunk_size))
    ]


def part(array: Array, index: int) -> Array:
    chunking = Chunking.default(array.shape)
    values = array.reshape(-1)[slice(*chunking.range(index))]
    return values.reshape(chunking.chunk_shape(values.size))


def ours(level: str) -> Method:
    @cache
    def chosen(state: str, dtype: np.dtype[Any], based: bool) -> Codec:
        fitting = candidate_codecs("parameter", state, dtype, level)
        return next(one for one in fitting if one.context is None or based)

    def codec(state: str, piece: Piece) -> Codec:
        return chosen(state, piece.values.dtype, piece.base is not None)

    def encode(state: str, piece: Piece) -> Bytes:
        return codec(state, piece).encode_into(
            piece.values, piece.base, thread_buffer("coded", encode_bound(piece.values.nbytes))
        )

    def decode(state: str, data: Bytes, piece: Piece) -> Array:
        return into(piece, lambda out: codec(state, piece).decode_into(data, out, piece.base))

    return Method(f"ckpt {level}", chunks, encode, decode, ROW_NBYTES)


def into(piece: Piece, decode: Callable[[Array], object]) -> Array:
    """A piece decoded to memory that this thread uses again."""
    out = thread_buffer("decoded", piece.values.nbytes).view(piece.values.dtype).reshape(piece.values.shape)
    decode(out)
    return out


def zstd(level: int) -> Method:
    return Method(
        f"zstd -{level}",
        runs,
        lambda state, piece: zstandard.ZstdCompressor(level=level).compress(raw(piece.values)),
        lambda state, data, piece: zstandard.ZstdDecompressor().decompress(data),
    )


def blosc() -> Method:
    return Method(
        "blosc2 shuffle zstd -1",
        runs,
        lambda state, piece: blosc2.compress2(
            raw(piece.values),
            typesize=piece.values.dtype.itemsize,
            codec=blosc2.Codec.ZSTD,
            clevel=1,
            filters=[blosc2.Filter.SHUFFLE],
            nthreads=1,
        ),
        lambda state, data, piece: into(piece, lambda out: blosc2.decompress2(data, dst=out, nthreads=1)),
    )


def zip_nn(name: str, cut: Callable[[str, dict[str, list[Array]]], list[Piece]], threads: int) -> Method:
    def make(piece: Piece) -> zipnn.ZipNN:
        kind = {2: "bfloat16", 4: "float32"}[piece.values.dtype.itemsize]
        return zipnn.ZipNN(input_format="byte", bytearray_dtype=kind, threads=threads)

    return Method(
        name,
        cut,
        lambda state, piece: make(piece).compress(bytearray(raw(piece.values))),  # it works in the bytes it is given
        lambda state, data, piece: make(piece).decompress(data),
    )


def pco(level: int) -> Method:
    return Method(
        f"pcodec {level}",
        runs,
        lambda state, piece: standalone.simple_compress(numbers(piece.values), ChunkConfig(compression_level=level)),
        lambda state, data, piece: into(piece, lambda out: standalone.simple_decompress_into(data, numbers(out))),
    )


def numbers(values: Array) -> Array:
    """pcodec knows no bfloat16: its bits, as integers."""
    return values.view(np.uint16) if values.dtype.itemsize == 2 else values


def raw(values: Array) -> memoryview:
    return memoryview(values.reshape(-1).view(np.uint8))


def derivation(held: dict[str, list[Array]]) -> Method | None:
    """How ckpt keeps the model's copy: nothing, if it is its master, rounded."""
    if not {"fp32", "param"} <= held.keys():
        return None

    def cut(state: str, held: dict[str, list[Array]]) -> list[Piece]:
        return [
            Piece(part(copy, i), part(master, i))
            for copy, master in zip(held["param"], held["fp32"], strict=True)
            for i in range(-(-copy.size // Chunking.default(copy.shape).chunk_size))
        ]

    return Method(
        "derived",
        cut,
        lambda state, piece: Rounded().encode(piece.values, piece.base),
        lambda state, data, piece: into(piece, lambda out: Rounded().decode_into(data, out, piece.base)),
    )


def states_of(path: Path) -> dict[str, list[Array]]:
    """All values of each kind of state, of the parameters of a checkpoint that have them all."""
    parameters = open_checkpoint(path).parameters.values()
    kinds = [s for s in STATES if any(from_stored(s) in p.states for p in parameters)]
    complete = [p for p in parameters if set(map(from_stored, kinds)) <= p.states.keys()]
    return {kind: [read(parameter.states[from_stored(kind)]) for parameter in complete] for kind in kinds}


Coded = list[tuple[Piece, Any]]


def coded(method: Method, state: str, held: dict[str, list[Array]]) -> Coded:
    """Every piece, and what a method makes of it, of which every bit comes back."""
    results = []
    for piece in method.cut(state, held):
        data = method.encode(state, piece)
        back = method.decode(state, data, piece)
        decoded = back.reshape(-1).view(np.uint8) if isinstance(back, np.ndarray) else np.frombuffer(back, np.uint8)
        assert np.array_equal(decoded, np.frombuffer(raw(piece.values), np.uint8)), (method.name, state)
        results.append((piece, bytes(data)))  # what `encode` gave may be used again
    return results
