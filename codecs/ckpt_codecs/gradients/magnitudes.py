"""The values of pruned gradients: magnitudes above a threshold, most of them close to it.

Inside a binade, smaller magnitudes are more frequent, so the code of the exponent includes three bits of the mantissa.
"""

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.frame import MIN_FLOATS, as_uints
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import MAGNITUDES
from ckpt_codecs.lossless.float_planes import read_planes
from ckpt_codecs.native import lossless
from ckpt_codecs.scratch import thread_buffer

HEAD = 3
"""The bytes of the mode and of the smallest top."""
_TOP, _LOW = np.uint32(21), np.uint32(5)
"""The bits below the top of a magnitude, whose last bit is the sign; and the bits of the last plane."""
_REST, _LAST = np.uint32((1 << 21) - 1), np.uint32(31)
_ONE, _BYTE, _PLACE = np.uint32(1), np.uint32(8), np.uint32(24)


def encode_magnitudes(values: Array, level: str) -> Bytes | None:
    """A chunk of values, in a buffer of this thread; None if their magnitudes differ by a factor of more than 2**31.

    `values`: (n,) float32. The chunk is valid until the next call in this thread.
    """
    bits, coding = as_uints(values), LEVELS[level]
    if bits.size < MIN_FLOATS:
        return None
    rotated = bits << _ONE | bits >> np.uint32(31)
    tops = rotated >> _TOP
    min_top = tops.min()
    tops -= min_top
    if tops.max() > 255:
        return None
    rest = rotated & _REST
    planes = tops << _PLACE | rest >> _LOW << _BYTE | rest & _LAST
    out = thread_buffer("gradients-magnitudes", HEAD + 20 + planes.nbytes)
    area = out[HEAD - 1 :]
    end = HEAD - 1 + lossless.write_planes(planes, False, coding.max_ratio, coding.sampled, area)
    out[0] = MAGNITUDES
    out[1:HEAD] = np.frombuffer(int(min_top).to_bytes(2, "little"), np.uint8)
    return out[:end].data


def decode_magnitudes(data: Bytes, out: Array) -> None:
    """Fill `out`, (n,) uint32, with words from a chunk of mode 11. Raises `CodecError` if the chunk is damaged."""
    if len(data) < HEAD:
        raise CodecError("a chunk ends inside its head")
    min_top = np.uint32(int.from_bytes(data[1:HEAD], "little"))
    planes = thread_buffer("gradients-magnitudes", out.nbytes).view(np.uint32)
    read_planes(data[HEAD - 1 :], planes, False)
    rotated = (planes >> _PLACE) + min_top << _TOP | (planes >> _BYTE & np.uint32(0xFFFF)) << _LOW | planes & _LAST
    out[:] = rotated >> _ONE | rotated << np.uint32(31)
