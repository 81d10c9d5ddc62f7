"""A low-precision copy that is only its master, rounded: stored as nothing at all."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes, Codec, DType, Shape
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.errors import CodecError, NotApplicable
from ckpt_codecs.native import lossless


@dataclass(frozen=True)
class Rounded(Codec):
    """Round to nearest, ties to even (IEEE 754), as every trainer casts its masters.

    Zero bytes long. Equality is of bits: -0.0 for 0.0 is a difference. NaNs are
    not for this codec, since machines treat their payloads each in its own way.
    """

    name: ClassVar[str] = "rounded"
    lossless: ClassVar[bool] = True

    def encode(self, array: Array, base: Array | None) -> Bytes:
        if base is not None and base.shape == array.shape and _is_bfloat16_copy(base.dtype, array.dtype):
            if not lossless.is_bfloat16_of(as_uints(base), as_uints(array)):
                raise NotApplicable("the copy is not its master, rounded, or there are NaNs")
            return b""
        if base is None or not self.holds(base, array.dtype):
            raise NotApplicable("there is no base, or it has NaNs")
        if not _same_bits(self.decode(b"", array.shape, array.dtype, base), array):
            raise NotApplicable("the copy is not its master, rounded")
        return b""

    def holds(self, base: Array, dtype: DType) -> bool:
        """Is there a rounding of these values, the same on every machine?"""
        with np.errstate(invalid="ignore"):
            return self.rounds(base.dtype, dtype) and bool(base.dtype == dtype or not np.isnan(base).any())

    @staticmethod
    def rounds(base: DType, dtype: DType) -> bool:
        """Are values of one type rounded to another? Not 8-bit floats that are values to those that are scales.

        Nor floats to integers: what becomes of a number that is too large, each machine decides for itself.
        """
        return base == dtype or (np.can_cast(base, dtype, "unsafe") and not {base.kind, dtype.kind} & set("biu"))

    def decode(self, data: Bytes, shape: Shape, dtype: DType, base: Array | None) -> Array:
        out = np.empty(shape, dtype)
        self.decode_into(data, out, base)
        return out

    def decode_into(self, data: Bytes, out: Array, base: Array | None) -> None:
        if base is None or base.shape != out.shape or data:
            raise CodecError("a rounded copy needs a base of its own shape, and no bytes")
        if not self.rounds(base.dtype, out.dtype):
            raise CodecError(f"{base.dtype} is not rounded to {out.dtype}")
        if _is_bfloat16_copy(base.dtype, out.dtype) and out.flags.c_contiguous:
            lossless.to_bfloat16(as_uints(base), as_uints(out))
            return
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(out, base, casting="unsafe")


def _is_bfloat16_copy(base: DType, dtype: DType) -> bool:
    """Is this the common case, for which there are kernels, ten times as fast as NumPy?"""
    return base.name == "float32" and dtype.name == "bfloat16"


def _same_bits(a: Array, b: Array) -> bool:
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return bool(np.array_equal(a, b))
