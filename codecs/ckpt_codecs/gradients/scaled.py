"""Values that are bfloat16 numbers times one float32 factor.

A backward pass in bfloat16 gives gradients of 16 significant bits in float32 arrays. Clipping by the norm, as
`torch.nn.utils.clip_grad_norm_` does, then multiplies all of them by one number, which no checkpoint states. Powers of
two cannot be told apart, so the factor is from 1 up to 2.
"""

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import MULTIPLES
from ckpt_codecs.gradients.chunk import append, put_number, take_number
from ckpt_codecs.lossless.float_planes import Planes
from ckpt_codecs.native import gradients as kernels
from ckpt_codecs.scratch import thread_buffer

HEAD = 5
_ONE, _TWO = 0x3F800000, 0x40000000


def find_factor(values: Array) -> float | None:
    """The factor, 1 <= factor < 2, so that sampled values are bfloat16 numbers times it; None if there is none.

    `values`: float32, any shape. The factor is exact in float32. The search takes a few microseconds for 2**18 values;
    only `encode_scaled` checks all values.
    """
    bits = kernels.find_factor(as_uints(values))
    return _as_float(bits) if bits else None


def encode_scaled(values: Array, factor: float, out: Array, level: str = "default") -> Bytes | None:
    """A chunk of bfloat16 numbers times a factor, in `out` if it is large enough; None if it would not be exact.

    `values`: float32, any shape. `out`: (encode_bound(values.nbytes),) uint8. `level`: that of `planes`.
    """
    bits = as_uints(values)
    numbers = thread_buffer("gradients-bfloat16", 2 * bits.size).view(np.uint16)
    if not kernels.divide_by_factor(bits, factor, numbers):
        return None
    return encode_multiples(numbers, factor, out, level)


def encode_multiples(numbers: Array, factor: float, out: Array, level: str) -> Bytes:
    """The chunk of bfloat16 numbers, (n,) uint16, and of the factor that multiplies them. `out`: uint8."""
    inner = Planes(level).encode_into(numbers, None, out[HEAD:])
    out[0] = MULTIPLES
    put_number(out, 1, int(np.float32(factor).view(np.uint32)))
    return out[: append(inner, out, HEAD)].data


def decode_scaled(data: Bytes, out: Array) -> None:
    """Fill `out`, (n,) uint32, with words from a chunk of mode 8. Raises `CodecError` if the chunk is damaged."""
    bits = take_number(data, 1)
    if not _ONE <= bits < _TWO:
        raise CodecError("the factor of a chunk is not from 1 up to 2")
    numbers = thread_buffer("gradients-bfloat16", 2 * out.size).view(np.uint16)
    Planes().decode_into(data[HEAD:], numbers, None)
    kernels.multiply_by_factor(numbers, _as_float(bits), out)


def _as_float(bits: int) -> float:
    return float(np.uint32(bits).view(np.float32))
