"""Codes of four bits with shared scales: MXFP4, NVFP4, and the tables NF4 and FP4 of bitsandbytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, DType
from ckpt_codecs.errors import CodecError
from ckpt_codecs.quantised.base import (
    BFLOAT16,
    FLOAT32,
    MIN_ELEMENTS,
    Block,
    Part,
    Quantisation,
    check_positive,
    flat_range,
    outer,
    rounded_into,
    take_block,
    to_float32,
)

_SIZES = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
E2M1 = np.array([*_SIZES, *(-size for size in _SIZES)], FLOAT32)
E2M1[8] = -0.0
MX_BLOCK = 32
"""The values that share a scale in MX formats."""
NVFP4_BLOCK = 16
_TILE = 16
"""Rows that are transposed at once."""
_OVERFLOWING = 255
"""A scale of MX formats, 2^128, that float32 does not have, but some of its products."""


def nibbles(packed: Array, high_first: bool = False) -> Array:
    """The two halves of each byte: an array of uint8, any shape, whose last axis is twice as long as that of `packed`.

    packed: uint8. The low half comes first, as in MX formats, unless `high_first`.
    """
    out = np.empty((*packed.shape[:-1], packed.shape[-1], 2), np.uint8)
    np.bitwise_and(packed, 15, out=out[..., int(high_first)])
    np.right_shift(packed, 4, out=out[..., int(not high_first)])
    return out.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


@dataclass(frozen=True)
class Mxfp4(Quantisation):
    """MXFP4: 32 values share a power of two. GPT-OSS has the matrix transposed in its files.

    Parts: blocks (..., out, in / 32, 16) and scales (..., out, in / 32), uint8. The weight is (..., in, out), as in
    memory of transformers; `transposed=False`: (..., out, in). Values are exact in bfloat16, but for scales that
    overflow.
    """

    transposed: bool = True
    grouped: bool = True
    """Whether the codes have an axis of groups; compressed-tensors has (out, in / 2)."""

    name: ClassVar[str] = "MXFP4"

    def __post_init__(self) -> None:
        """Raise `CodecError` for a shape that no such weight has."""
        check_positive(self.shape)
        if len(self.shape) < 2 or self._in % MX_BLOCK:
            raise CodecError(f"a weight of the shape {list(self.shape)} has no whole blocks of {MX_BLOCK} values")

    @property
    def _in(self) -> int:
        return self.shape[-2] if self.transposed else self.shape[-1]

    @property
    def code_bits(self) -> float:
        return 4

    @property
    def dtype(self) -> DType:
        return BFLOAT16

    def parts(self) -> tuple[Part, ...]:
        rows = self.shape[-1] if self.transposed else self.shape[-2]
        scales = (*self.shape[:-2], rows, self._in // MX_BLOCK)
        codes = (*scales, MX_BLOCK // 2) if self.grouped else (*scales[:-1], self._in // 2)
        return Part("codes", codes, ("uint8",)), Part("scales", scales, ("uint8",))

    def part_blocks(self, block: Block) -> tuple[Block, ...]:
        *rest, first, second = block
        rows, columns = (second, first) if self.transposed else (first, second)
        low, high = groups = outer(columns, MX_BLOCK)
        scales, half = (*rest, rows, groups), MX_BLOCK // 2
        return (*scales, (0, half)) if self.grouped else (*rest, rows, (low * half, high * half)), scales

    def decode(self, block: Block, parts: Sequence[Array], out: Array) -> None:
        scales = parts[1]
        blocks = parts[0].reshape(*scales.shape, MX_BLOCK // 2)
        if blocks.size >= MIN_ELEMENTS and scales.max() < _OVERFLOWING:
            from ckpt_codecs.native import quantised  # small weights need no kernels

            values: Array = np.empty(2 * blocks.size, FLOAT32)
            powers = np.ldexp(FLOAT32.type(1), scales.astype(np.int32) - 127).reshape(-1)
            quantised.scale_nibbles(np.ascontiguousarray(blocks).reshape(-1), False, E2M1, powers, MX_BLOCK, values)
        else:
            values = self._products(blocks, scales)
        values = values.reshape(*scales.shape[:-1], -1)
        low, high = block[-2] if self.transposed else block[-1]
        skipped = low % MX_BLOCK
        values = values[..., skipped : skipped + high - low]
        if not self.transposed:
            rounded_into(values, out)
            return
        rounded = np.empty(values.shape, BFLOAT16)
        rounded_into(np.ascontiguousarray(values), rounded)
        words, target = rounded.view(np.uint16), out.view(np.uint16)
        for first in range(0, values.shape[-2], _TILE):  # a few rows at a time, whose columns fill lines of the cache
            target[..., first : first + _TILE] = words[..., first : first + _TILE, :].swapaxes(-1, -2)

    def _products(self, blocks: Array, scales: Array) -> Array:
        with np.errstate(over="ignore"):
            values: Array = np.ldexp(E2M1[nibbles(blocks)], (scales.astype(np.int32) - 127)[..., None])
        return values


@dataclass(frozen=True)
class Nvfp4(Quantisation):
    """NVFP4 of compressed-tensors: 16 values share an FP8 scale, which was multiplied by a scale of the whole tensor.

    Parts: packed (..., n, m / 2) uint8, scales (..., n, m / 16) float8_e4m3fn, global scale float32 of one element.
    """

    global_shape: tuple[int, ...] = (1,)

    name: ClassVar[str] = "NVFP4"

    def __post_init__(self) -> None:
        """Raise `CodecError` for a shape that no such weight has."""
        check_positive(self.shape)
        if self.shape[-1] % NVFP4_BLOCK or prod(self.global_shape) != 1:
            raise CodecError(f"a weight of the shape {list(self.shape)} has no whole blocks of {NVFP4_BLOCK} values")

    @property
    def code_bits(self) -> float:
        return 4

    @property
    def dtype(self) -> DType:
        return FLOAT32

    def parts(self) -> tuple[Part, ...]:
        *rest, length = self.shape
        codes, scales = (*rest, length // 2), (*rest, length // NVFP4_BLOCK)
        return (
            Part("codes", codes, ("uint8",)),
            Part("scales", scales, ("float8_e4m3fn",)),
            Part("scales", self.global_shape, ("float32",)),
        )

    def part_blocks(self, block: Block) -> tuple[Block, ...]:
        *rest, columns = block
        low, high = outer(columns, NVFP4_BLOCK)
        codes = (low * NVFP4_BLOCK // 2, high * NVFP4_BLOCK // 2)
        return (*rest, codes), (*rest, (low, high)), tuple((0, n) for n in self.global_shape)

    def decode(self, block: Block, parts: Sequence[Array], out: Array) -> None:
        codes, scales, overall = parts
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            own = to_float32(scales) / overall.reshape(())
        if codes.size >= MIN_ELEMENTS:
            from ckpt_codecs.native import quantised  # small weights need no kernels

            values: Array = np.empty(2 * codes.size, FLOAT32)
            flat = np.ascontiguousarray(codes).reshape(-1), np.ascontiguousarray(own).reshape(-1)
            quantised.scale_nibbles(flat[0], False, E2M1, flat[1], NVFP4_BLOCK, values)
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                values = E2M1[nibbles(codes)].reshape(*scales.shape, NVFP4_BLOCK) * own[..., None]
        low, high = block[-1]
        skipped = low % NVFP4_BLOCK
        rounded_into(values.reshape(*scales.shape[:-1], -1)[..., skipped : skipped + high - low], out)


@dataclass(frozen=True)
class LookupTable(Quantisation):
    """NF4 and FP4 of bitsandbytes: a table of 16 numbers, times the largest size in a block of the flat weight.

    Parts: codes uint8 (ceil(size / 2), 1), sizes of blocks, table float32 (16,). If the sizes are quantised, too, they
    are uint8, and there are two more parts: the sizes' own table float32 (256,), and their blocks' sizes float32.
    """

    block: int
    """The values that share a scale."""
    signed_zero: bool
    """Whether code 8 is -0, as in the kernels of FP4, although the table that files store has 0 there."""
    nested_block: int | None = None
    """The sizes that share a scale, if they are quantised."""
    offset: float = 0.0
    """Is added to sizes that were quantised."""
    code_shape: tuple[int, ...] | None = None
    """The shape in which the codes are stored; None: (ceil(size / 2), 1)."""

    name: ClassVar[str] = "lookup table"

    def __post_init__(self) -> None:
        """Raise `CodecError` for sizes that no such weight has."""
        check_positive(self.shape, self.block, *(() if self.nested_block is None else (self.nested_block,)))
        if self.code_shape is not None and prod(self.code_shape) != -(-prod(self.shape) // 2):
            raise CodecError(f"codes of the shape {list(self.code_shape)} are not a half byte for each value")

    @property
    def code_bits(self) -> float:
        return 4

    @property
    def dtype(self) -> DType:
        return FLOAT32

    def parts(self) -> tuple[Part, ...]:
        size = prod(self.shape)
        blocks = -(-size // self.block)
        codes = Part("codes", (-(-size // 2), 1) if self.code_shape is None else self.code_shape, ("uint8",))
        table = Part("table", (16,), ("float32",))
        if self.nested_block is None:
            return codes, Part("scales", (blocks,), ("float32",)), table
        return (
            codes,
            Part("scales", (blocks,), ("uint8",)),
            table,
            Part("table", (256,), ("float32",)),
            Part("scales", (-(-blocks // self.nested_block),), ("float32",)),
        )

    def part_blocks(self, block: Block) -> tuple[Block, ...]:
        flat = flat_range(block, self.shape)
        bytes_read, blocks = outer(flat, 2), outer(flat, self.block)
        shape = self.parts()[0].shape
        axis = max(range(len(shape)), key=lambda i: shape[i]) if shape else 0
        whole = len([n for n in shape if n != 1]) > 1
        codes = tuple((0, n) if whole or i != axis else bytes_read for i, n in enumerate(shape))
        if self.nested_block is None:
            return codes, (blocks,), ((0, 16),)
        return codes, (blocks,), ((0, 16),), ((0, 256),), (outer(blocks, self.nested_block),)

    def decode(self, block: Block, parts: Sequence[Array], out: Array) -> None:
        codes, sizes, table = parts[0].reshape(-1), parts[1], parts[2].copy()
        low, high = flat_range(block, self.shape)
        if codes.size != -(-high // 2) - low // 2:
            codes = codes[low // 2 : -(-high // 2)]
        if self.signed_zero and table[8] == 0:
            table[8] = -0.0
        first = low // self.block
        with np.errstate(over="ignore", invalid="ignore"):
            if self.nested_block is not None:
                own = (np.arange(first, first + sizes.size) // self.nested_block) - first // self.nested_block
                sizes = parts[3][sizes] * parts[4][own] + FLOAT32.type(self.offset)
        if low % self.block == 0 and self.block % 2 == 0 and codes.size >= MIN_ELEMENTS:
            from ckpt_codecs.native import quantised  # small weights need no kernels

            numbers = np.empty(2 * codes.size, FLOAT32)
            quantised.scale_nibbles(
                np.ascontiguousarray(codes), True, table, sizes.astype(FLOAT32), self.block, numbers
            )
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                numbers = table[nibbles(codes, high_first=True)[low % 2 : low % 2 + high - low]]
                numbers *= sizes[np.arange(low, high) // self.block - first]
        take_block(block, self.shape, low, numbers, out)


def mxfp4_of(values: Array, blocks: Array, scales: Array) -> None:
    """Quantise to MXFP4 as OCP MX 1.0 states: exponent of the largest size less 2; nearest, ties to even; saturated.

    values: (..., groups * 32) float32, without NaN; blocks: (..., groups, 16) uint8, scales: (..., groups) uint8, both
    filled.
    """
    from ckpt_codecs.native import quantised  # readers need no such kernel

    groups = np.ascontiguousarray(values).reshape(-1, MX_BLOCK)
    codes, exponents = np.empty((len(groups), MX_BLOCK // 2), np.uint8), np.empty(len(groups), np.uint8)
    quantised.encode_mxfp4(groups, codes, exponents)
    blocks[...], scales[...] = codes.reshape(blocks.shape), exponents.reshape(scales.shape)
