"""States of optimizers in 8 and 4 bits: codes in blocks of the flat tensor, as bitsandbytes and torchao store them."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import ml_dtypes
import numpy as np

from ckpt_codecs.base import Array, DType
from ckpt_codecs.errors import CodecError
from ckpt_codecs.quantised.base import (
    FLOAT32,
    MIN_ELEMENTS,
    Block,
    Part,
    Quantisation,
    check_positive,
    flat_range,
    outer,
    take_block,
    to_float32,
)
from ckpt_codecs.quantised.fp4 import nibbles

_BITS = {"uint8": 8, "uint4": 4, "float8_e4m3fn": 8}
_FLOAT8 = to_float32(np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn))


@dataclass(frozen=True)
class FlatBlocks(Quantisation):
    """Numbers of a table, or of FP8, times the scale of their block of the flat tensor. The last block may be shorter.

    Parts: codes, flat: a byte or half a byte each, the high half first; scales float32, of each block; a table float32
    with a number for each code, but for FP8. The product is float32.
    """

    block: int
    """The values that share a scale."""
    code: str = "uint8"
    """The type of the codes: uint8, uint4 or float8_e4m3fn."""

    name: ClassVar[str] = "flat blocks"

    def __post_init__(self) -> None:
        """Raise `CodecError` for sizes and types that no such state has."""
        check_positive(self.shape, self.block)
        if self.code not in _BITS:
            raise CodecError(f"codes of the type {self.code:.40} are not known")

    @property
    def code_bits(self) -> float:
        return _BITS[self.code]

    @property
    def dtype(self) -> DType:
        return FLOAT32

    @property
    def _per_byte(self) -> int:
        return 8 // _BITS[self.code]

    def parts(self) -> tuple[Part, ...]:
        size = prod(self.shape)
        stored = "uint8" if self.code == "uint4" else self.code
        listed = (
            Part("codes", (-(-size // self._per_byte),), (stored,)),
            Part("scales", (-(-size // self.block),), ("float32",)),
        )
        return listed if stored != "uint8" else (*listed, Part("table", (1 << _BITS[self.code],), ("float32",)))

    def part_blocks(self, block: Block) -> tuple[Block, ...]:
        flat = flat_range(block, self.shape)
        needed = (outer(flat, self._per_byte),), (outer(flat, self.block),)
        return needed if self.code == "float8_e4m3fn" else (*needed, ((0, 1 << _BITS[self.code]),))

    def decode(self, block: Block, parts: Sequence[Array], out: Array) -> None:
        low, high = flat_range(block, self.shape)
        table = _FLOAT8 if self.code == "float8_e4m3fn" else parts[2]
        codes = np.ascontiguousarray(parts[0]).view(np.uint8)
        if self._per_byte == 2:
            codes = nibbles(codes, high_first=True)[low % 2 : low % 2 + high - low]
        skipped, values = low % self.block, np.empty(codes.size, FLOAT32)
        if table.size == 256 and codes.size >= MIN_ELEMENTS:
            from ckpt_codecs.native import quantised  # small states need no kernels

            quantised.scale_codes(
                codes[None], table, np.ascontiguousarray(parts[1]), (0, skipped), (1, self.block), values
            )
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                np.multiply(table[codes], parts[1][(np.arange(codes.size) + skipped) // self.block], out=values)
        take_block(block, self.shape, low, values, out)
