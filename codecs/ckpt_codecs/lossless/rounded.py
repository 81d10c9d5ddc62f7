"""A low-precision copy that is its master, rounded: it takes no bytes."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes, Codec, DType, Shape
from ckpt_codecs.errors import CodecError, NotApplicable

_MIN_ELEMENTS = 1024
"""Elements from which on a kernel rounds. Readers compare a few, for which no kernels are loaded."""


_BY_KERNEL = (("float32", "bfloat16"), ("float32", "float16"), ("float16", "bfloat16"), ("float16", "float32"))
"""The dtypes before and after rounding for which there are kernels, several times as fast as NumPy."""


@dataclass(frozen=True)
class Rounded(Codec):
    """Codec of arrays that are their base, rounded to nearest, ties to even (IEEE 754), as trainers cast masters.

    The encoded chunk is empty. Values are compared by their bits: -0.0 is not 0.0. The codec does not apply to NaNs,
    whose payloads depend on the machine.
    """

    name: ClassVar[str] = "rounded"
    lossless: ClassVar[bool] = True

    def encode(self, array: Array, base: Array | None) -> Bytes:
        if base is not None and base.shape == array.shape and _is_bfloat16_copy(base.dtype, array.dtype):
            from ckpt_codecs.chunk.frame import as_uints
            from ckpt_codecs.native import lossless

            if not lossless.is_bfloat16_of(as_uints(base), as_uints(array)):
                raise NotApplicable("the copy is not its master, rounded, or it has NaNs")
            return b""
        if base is None or not self.is_defined(base, array.dtype):
            raise NotApplicable("there is no base, or it has NaNs")
        if not _same_bits(self.decode(b"", array.shape, array.dtype, base), array):
            raise NotApplicable("the copy is not its master, rounded")
        return b""

    def is_defined(self, base: Array, dtype: DType) -> bool:
        """Tell if `base`, any shape and dtype, rounds to `dtype` with the same bits on every machine."""
        with np.errstate(invalid="ignore"):
            return self.can_round(base.dtype, dtype) and bool(base.dtype == dtype or not np.isnan(base).any())

    @staticmethod
    def can_round(base: DType, dtype: DType) -> bool:
        """Tell if values of one dtype round to another.

        8-bit floats for values do not round to those for scales, nor floats to integers: the result of a number that
        is too large depends on the machine.
        """
        return base == dtype or (np.can_cast(base, dtype, "unsafe") and not {base.kind, dtype.kind} & set("biu"))

    def decode(self, data: Bytes, shape: Shape, dtype: DType, base: Array | None) -> Array:
        out = np.empty(shape, dtype)
        self.decode_into(data, out, base)
        return out

    def decode_into(self, data: Bytes, out: Array, base: Array | None) -> None:
        if base is None or base.shape != out.shape or data:
            raise CodecError("a rounded copy needs a base of the same shape, and has no bytes")
        if not self.can_round(base.dtype, out.dtype):
            raise CodecError(f"{base.dtype} does not round to {out.dtype}")
        if (base.dtype.name, out.dtype.name) in _BY_KERNEL and out.flags.c_contiguous and out.size >= _MIN_ELEMENTS:
            _by_kernel(base, out)
            return
        with np.errstate(over="ignore", invalid="ignore"):
            np.copyto(out, base, casting="unsafe")


def _by_kernel(base: Array, out: Array) -> None:
    from ckpt_codecs.chunk.frame import as_uints
    from ckpt_codecs.native import lossless

    words = as_uints(base)
    if base.dtype.name == "float16":
        numbers, words = words, as_uints(out) if out.dtype.name == "float32" else np.empty(base.size, np.uint32)
        lossless.from_float16(numbers, words)
    if out.dtype.name != "float32":
        (lossless.to_bfloat16 if out.dtype.name == "bfloat16" else lossless.to_float16)(words, as_uints(out))


def _is_bfloat16_copy(base: DType, dtype: DType) -> bool:
    """Tell if this is the common case, for which kernels are ten times as fast as NumPy."""
    return base.name == "float32" and dtype.name == "bfloat16"


def _same_bits(a: Array, b: Array) -> bool:
    a, b = (np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in (a, b))
    return bool(np.array_equal(a, b))
