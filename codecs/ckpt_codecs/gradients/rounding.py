"""Gradients rounded to bfloat16."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.frame import MIN_ELEMENTS, as_uints, encode_constant, encode_raw
from ckpt_codecs.gradients.chunk import GradientCodec
from ckpt_codecs.gradients.exact import decode_own
from ckpt_codecs.gradients.scaled import encode_multiples, encode_scaled
from ckpt_codecs.gradients.sparse import encode_sparse
from ckpt_codecs.native import gradients as kernels
from ckpt_codecs.native import lossless
from ckpt_codecs.scratch import thread_buffer


@dataclass(frozen=True)
class Bfloat16Gradients(GradientCodec):
    """Rounds to the nearest bfloat16, ties to even (IEEE 754). Numbers beyond the largest bfloat16 become infinite.

    A NaN stays a NaN but loses its payload. All other values that are bfloat16 numbers are exact. The chunks have the
    modes of `gradients-exact`.
    """

    name: ClassVar[str] = "gradients-bf16"
    lossless: ClassVar[bool] = False

    def _encode(self, array: Array, out: Array) -> Bytes:
        numbers = thread_buffer("gradients-rounded", 2 * array.size).view(np.uint16)
        wide = thread_buffer("gradients-wide", 4 * array.size).view(np.uint32)
        lossless.to_bfloat16(as_uints(array), numbers)
        kernels.multiply_by_factor(numbers, 1.0, wide)
        chunk = encode_constant(wide) or encode_sparse(wide, self.level, out, self._encode_values)
        if chunk is not None:
            return chunk
        return encode_multiples(numbers, 1.0, out, self.level) if array.size >= MIN_ELEMENTS else encode_raw(wide, out)

    def _encode_values(self, values: Array, out: Array) -> Bytes:
        return encode_constant(values) or encode_scaled(values, 1.0, out, self.level) or encode_raw(values, out)

    def _decode(self, data: Bytes, out: Array, base: Array | None) -> None:
        decode_own(self.name, data, out)
