"""Codes of one byte with a scale for each block, row or tensor: FP8 and INT8 of most libraries."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, DType, Shape
from ckpt_codecs.errors import CodecError
from ckpt_codecs.quantised.base import (
    BFLOAT16,
    FLOAT32,
    MIN_ELEMENTS,
    Block,
    Part,
    Quantisation,
    check_positive,
    outer,
    rounded_into,
    to_float32,
)

CODES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "int8")
_SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
E4M3_MAX = 448.0
ONE_127TH = 7.874015718698502e-3
"""The factor of bitsandbytes' INT8."""


@dataclass(frozen=True)
class ScaledCodes(Quantisation):
    """A code of one byte times the scale of its block; ragged blocks at the ends have a scale, too.

    The product is computed in float32 and rounded once, to the scale's dtype; powers of two (E8M0) leave float32.
    """

    code: str
    """The dtype of the codes."""
    scale: str
    """The dtype of the scales."""
    block: Shape
    """The elements along each axis that share a scale."""
    scale_shape: Shape | None = None
    """The shape of the stored scales, if they have other axes of length 1 than a scale for each block."""
    zeros: str | None = None
    """The dtype of the zero points, in the scales' shape; None if there are none."""
    factor: float | None = None
    """Multiplies the products, in float32: bitsandbytes stores the largest size of a row instead of its scale."""

    name: ClassVar[str] = "scaled codes"

    def __post_init__(self) -> None:
        """Raise `CodecError` for a configuration that no weight has."""
        check_positive(self.shape, *self.block)
        if self.code not in CODES or self.scale not in _SCALES or len(self.block) != len(self.shape):
            raise CodecError(f"no scheme has codes of {self.code:.40} and scales of {self.scale:.40}")
        if self.scale_shape is not None and _size(self.scale_shape) != _size(self._grid):
            raise CodecError(f"scales of the shape {list(self.scale_shape)} are not one for each block")

    @property
    def _grid(self) -> Shape:
        """The number of blocks along each axis."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.block, strict=True))

    @property
    def code_bits(self) -> float:
        return 8

    @property
    def dtype(self) -> DType:
        types: dict[str, DType] = {"bfloat16": BFLOAT16, "float16": np.dtype(np.float16)}
        return types.get(self.scale, FLOAT32)

    def parts(self) -> tuple[Part, ...]:
        scales = Part("scales", self._grid if self.scale_shape is None else self.scale_shape, (self.scale,))
        zeros = () if self.zeros is None else (Part("zeros", scales.shape, (self.zeros,)),)
        return (Part("codes", self.shape, (self.code,)), scales, *zeros)

    def part_blocks(self, block: Block) -> tuple[Block, ...]:
        if self.scale_shape is None or self.scale_shape == self._grid:
            scales = tuple(outer(span, size) for span, size in zip(block, self.block, strict=True))
        else:  # other axes: there are few, so all are read
            scales = tuple((0, n) for n in self.scale_shape)
        return (block, scales) if self.zeros is None else (block, scales, scales)

    def decode(self, block: Block, parts: Sequence[Array], out: Array) -> None:
        codes, scales = parts[0], self._own(block, to_float32(parts[1]))
        if self.zeros is None and self.factor is None and codes.size >= MIN_ELEMENTS:
            self._by_kernel(block, codes, scales, out)
            return
        values = _values(codes)
        if self.zeros is not None:
            values -= self._spread(block, self._own(block, to_float32(parts[2])))
        with np.errstate(over="ignore", invalid="ignore"):
            values *= self._spread(block, scales)
            if self.factor is not None:
                values *= FLOAT32.type(self.factor)
        rounded_into(values, out)

    def _by_kernel(self, block: Block, codes: Array, scales: Array, out: Array) -> None:
        """Compute a block matrix by matrix: of a vector, each element is a column."""
        from ckpt_codecs.native import quantised  # small weights need no kernels

        spans, sizes = ((0, 1), *block)[-2:], (1, *self.block)[-2:]
        skipped = spans[0][0] % sizes[0], spans[1][0] % sizes[1]
        table = _table(codes.dtype.name)
        values = out if out.dtype == FLOAT32 and out.flags.c_contiguous else np.empty(codes.shape, FLOAT32)
        matrices = np.ascontiguousarray(codes).view(np.uint8).reshape(-1, *_matrix(codes.shape))
        own, targets = scales.reshape(-1, *_matrix(scales.shape)), values.reshape(matrices.shape)
        places = np.arange(len(own)).reshape(scales.shape[:-2])
        for axis, (span, size) in enumerate(zip(block[:-2], self.block[:-2], strict=True)):
            places = places.take(np.arange(*span) // size - span[0] // size, axis)
        for matrix, place, target in zip(matrices, places.reshape(-1), targets, strict=True):
            quantised.scale_codes(
                matrix, table, np.ascontiguousarray(own[place]), skipped, (sizes[0], sizes[1]), target
            )
        if values is not out:
            rounded_into(values, out)

    def _own(self, block: Block, scales: Array) -> Array:
        """The scales of a block, with the axes of the weight."""
        if self.scale_shape is None or self.scale_shape == self._grid:
            return scales
        grid = scales.reshape(self._grid)
        return grid[tuple(slice(*outer(span, size)) for span, size in zip(block, self.block, strict=True))]

    def _spread(self, block: Block, scales: Array) -> Array:
        """The scale of each element, or one of an axis along which there is only one."""
        for axis, (span, size) in enumerate(zip(block, self.block, strict=True)):
            if scales.shape[axis] > 1:
                low = span[0] // size
                scales = scales.take(np.arange(*span) // size - low, axis)
        return scales


def _matrix(shape: Shape) -> tuple[int, int]:
    """The last two axes; a vector is a row."""
    return (shape[-2] if len(shape) > 1 else 1), shape[-1]


def _values(codes: Array) -> Array:
    """The numbers of codes of one byte, in float32 and the same shape."""
    numbers: Array = _table(codes.dtype.name)[codes.view(np.uint8)]
    return numbers


@cache
def _table(name: str) -> Array:
    from ml_dtypes import float8_e4m3fn, float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz

    types = {"float8_e4m3fn": float8_e4m3fn, "float8_e4m3fnuz": float8_e4m3fnuz}
    types |= {"int8": np.int8, "float8_e5m2": float8_e5m2, "float8_e5m2fnuz": float8_e5m2fnuz}
    return to_float32(np.arange(256, dtype=np.uint8).view(types[name]))


def _size(shape: Shape) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def scales_of(values: Array, block: tuple[int, int]) -> Array:
    """The scales of FP8 blocks: the largest size of a block over 448, and 1 for a block of zeros.

    values: (n, m) float32, beginning at the corner of a block. Returns (ceil(n / rows), ceil(m / columns)) float32.
    """
    rows, columns = (np.arange(0, n, size) for n, size in zip(values.shape, block, strict=True))
    largest = np.maximum.reduceat(np.maximum.reduceat(np.abs(values), rows, 0), columns, 1)
    scales: Array = largest / FLOAT32.type(E4M3_MAX)
    scales[scales == 0] = 1
    return scales


def codes_of(values: Array, scales: Array, block: tuple[int, int], out: Array) -> None:
    """Fill `out`, (n, m) float8_e4m3fn, with the nearest codes of values over scales, ties to even, saturated.

    values: (n, m) float32, beginning at the corner of a block; scales: float32, of each block, as of `scales_of`.
    """
    spread = scales.repeat(block[0], 0)[: values.shape[0]].repeat(block[1], 1)[:, : values.shape[1]]
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        quotients = np.clip(values / spread, -E4M3_MAX, E4M3_MAX)
        np.copyto(out, quotients, casting="unsafe")
