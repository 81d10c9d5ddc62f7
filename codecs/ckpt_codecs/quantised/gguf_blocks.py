"""The blocks of GGUF files: bytes of a fixed size, each with its own scales. Numbers are float32, d is float16."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from ckpt_codecs.base import Array, DType
from ckpt_codecs.errors import CodecError
from ckpt_codecs.quantised.base import FLOAT32, MIN_ELEMENTS, Block, Part, Quantisation, check_positive, outer
from ckpt_codecs.quantised.fp4 import E2M1


class GgufType(NamedTuple):
    """A type of blocks."""

    values: int
    """In a block."""
    nbytes: int
    """Of a block."""


GGUF_TYPES = {
    "Q4_0": GgufType(32, 18),
    "Q8_0": GgufType(32, 34),
    "Q4_K": GgufType(256, 144),
    "Q5_K": GgufType(256, 176),
    "Q6_K": GgufType(256, 210),
    "MXFP4": GgufType(32, 17),
}
"""By the name that ggml gives them."""

_E2M1 = E2M1 + FLOAT32.type(0)  # code 8 is +0 here


def decode_gguf(name: str, blocks: Array, out: Array) -> None:
    """Fill `out`, (n, values) float32, with the values of blocks, (n, nbytes) uint8, of a type in `GGUF_TYPES`.

    Raises `CodecError` if the type is unknown or the shapes do not fit it.
    """
    kind = GGUF_TYPES.get(name)
    if kind is None or blocks.ndim != 2 or blocks.shape[1] != kind.nbytes or out.shape != (len(blocks), kind.values):
        raise CodecError(f"blocks of {name:.20} do not have the shape {list(blocks.shape)}")
    with np.errstate(over="ignore", invalid="ignore"):
        _DECODERS[name](blocks, out)


def encode_q8_0(values: Array, out: Array) -> None:
    """Quantise to Q8_0 as ggml does: values (n, 32) float32 into `out`, (n, 34) uint8.

    The scale is the largest size over 127; codes are value times 1 / scale, halves away from zero; the scale is stored
    as float16 after that.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        scales = np.abs(values).max(1, keepdims=True) / FLOAT32.type(127)
        inverse = np.divide(FLOAT32.type(1), scales, out=np.zeros_like(scales), where=scales != 0)
        scaled = values * inverse
        sizes = np.abs(scaled)
        floors = np.floor(sizes)
        codes = np.copysign(floors + np.floor(2 * (sizes - floors)), scaled)
        out[:, :2] = scales.astype(np.float16).view(np.uint8)
        out[:, 2:] = codes.astype(np.int8).view(np.uint8)


def _half(raw: Array) -> Array:
    """Numbers of two bytes each, (n, 1) float32, of (n, 2) uint8."""
    return np.ascontiguousarray(raw).view(np.float16).astype(FLOAT32)


def _q8_0(blocks: Array, out: Array) -> None:
    if blocks.size >= MIN_ELEMENTS and blocks.flags.c_contiguous and out.flags.c_contiguous:
        from ckpt_codecs.native import quantised  # small weights need no kernels

        quantised.scale_integers(blocks, 2, _half(blocks[:, :2]).reshape(-1), out)
        return
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks[:, :2]), out=out, dtype=FLOAT32)


def _q4_0(blocks: Array, out: Array) -> None:
    codes = np.concatenate([blocks[:, 2:] & 15, blocks[:, 2:] >> 4], 1).astype(np.int8) - 8
    np.multiply(codes, _half(blocks[:, :2]), out=out, dtype=FLOAT32)


def _mxfp4(blocks: Array, out: Array) -> None:
    codes = np.concatenate([blocks[:, 1:] & 15, blocks[:, 1:] >> 4], 1)
    # ggml has twice the numbers of E2M1, and half of the scale, which no float32 overflows.
    exponent = blocks[:, :1].astype(np.int32) - 128
    out[...] = np.ldexp(FLOAT32.type(1), exponent) * (2 * _E2M1)[codes]


def _scales_of_six_bits(packed: Array) -> tuple[Array, Array]:
    """The eight scales and the eight minima of K-quants, (n, 8) float32 each, of (n, 12) uint8."""
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 2 & 48], 1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 2 & 48], 1)
    return scales.astype(FLOAT32), minima.astype(FLOAT32)


def _nibbles_of(packed: Array, run: int) -> Array:
    """Half bytes, (n, 8, 32) uint8, of (n, 128) uint8: of each `run` bytes, all low ones, then all high ones."""
    runs: Array = packed.reshape(len(packed), -1, 1, run)
    fields: Array = np.concatenate([runs & 15, runs >> 4], 2)
    return fields.reshape(-1, 8, 32)


def _q4_k(blocks: Array, out: Array) -> None:
    _scaled_k(blocks, _nibbles_of(blocks[:, 16:], 32), out)


def _q5_k(blocks: Array, out: Array) -> None:
    codes = _nibbles_of(blocks[:, 48:], 32)
    high = blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8)[:, None] & 1
    _scaled_k(blocks, codes | high << 4, out)


def _scaled_k(blocks: Array, codes: Array, out: Array) -> None:
    """Fill `out` from codes, (n, 8, 32): d * scale * code - dmin * minimum."""
    scales, minima = _scales_of_six_bits(blocks[:, 4:16])
    d, dmin = _half(blocks[:, :2]) * scales, _half(blocks[:, 2:4]) * minima
    out.reshape(-1, 8, 32)[...] = d[..., None] * codes.astype(FLOAT32) - dmin[..., None]


def _q6_k(blocks: Array, out: Array) -> None:
    low = _nibbles_of(blocks[:, :128], 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
    codes = (low | high.reshape(-1, 8, 32) << 4).astype(np.int8) - 32
    scales = _half(blocks[:, 208:]) * blocks[:, 192:208].view(np.int8).astype(FLOAT32)
    out.reshape(-1, 16, 16)[...] = scales[..., None] * codes.reshape(-1, 16, 16).astype(FLOAT32)


_DECODERS: dict[str, Callable[[Array, Array], None]] = {
    "Q4_0": _q4_0,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}


@dataclass(frozen=True)
class GgufBlocks(Quantisation):
    """A weight of a GGUF file: its last axis is cut into blocks of one type.

    Part: (..., m / values * nbytes) uint8.
    """

    type: str = "Q8_0"

    name: ClassVar[str] = "GGUF"

    def __post_init__(self) -> None:
        """Raise `CodecError` for an unknown type, and a shape without whole blocks."""
        check_positive(self.shape)
        if self.type not in GGUF_TYPES:
            raise CodecError(f"blocks of the type {self.type:.20} are not known")
        if self.shape[-1] % self._type.values:
            raise CodecError(f"a weight of the shape {list(self.shape)} has no whole blocks of {self.type}")

    @property
    def _type(self) -> GgufType:
        return GGUF_TYPES[self.type]

    @property
    def code_bits(self) -> float:
        return 8 * self._type.nbytes / self._type.values

    @property
    def dtype(self) -> DType:
        return FLOAT32

    def parts(self) -> tuple[Part, ...]:
        *rest, length = self.shape
        return (Part("codes", (*rest, length // self._type.values * self._type.nbytes), ("uint8",)),)

    def part_blocks(self, block: Block) -> tuple[Block, ...]:
        *rest, columns = block
        low, high = outer(columns, self._type.values)
        return ((*rest, (low * self._type.nbytes, high * self._type.nbytes)),)

    def decode(self, block: Block, parts: Sequence[Array], out: Array) -> None:
        rows = np.ascontiguousarray(parts[0])
        low, high = block[-1]
        skipped, count = low % self._type.values, rows.shape[-1] // self._type.nbytes
        if out.flags.c_contiguous and high - low == count * self._type.values:
            decode_gguf(self.type, rows.reshape(-1, self._type.nbytes), out.reshape(-1, self._type.values))
            return
        values = np.empty((*rows.shape[:-1], count * self._type.values), FLOAT32)
        decode_gguf(self.type, rows.reshape(-1, self._type.nbytes), values.reshape(-1, self._type.values))
        out[...] = values[..., skipped : skipped + high - low]
