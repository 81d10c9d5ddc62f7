"""The lossless codec of gradients."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.frame import MIN_FLOATS, as_uints, decode_trivial, encode_constant
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import FLOAT_PLANES, MAGNITUDES, MULTIPLES, RAW, SPARSE
from ckpt_codecs.gradients.chunk import GradientCodec
from ckpt_codecs.gradients.scaled import decode_scaled, encode_scaled, find_factor
from ckpt_codecs.gradients.sparse import decode_sparse, encode_sparse
from ckpt_codecs.lossless.float_planes import Planes, decode_planes, read_planes
from ckpt_codecs.native import lossless
from ckpt_codecs.scratch import thread_buffer

_MAGNITUDES_HEAD = 3
"""The bytes of the mode of magnitudes and of the smallest top."""
_TOP, _LOW = np.uint32(21), np.uint32(5)
"""The bits below the top of a magnitude, whose last bit is the sign; and the bits of the last plane."""
_REST, _LAST = np.uint32((1 << 21) - 1), np.uint32(31)
_ONE, _BYTE, _PLACE = np.uint32(1), np.uint32(8), np.uint32(24)


@dataclass(frozen=True)
class ExactGradients(GradientCodec):
    """Stores a chunk in the first mode that can represent it.

    The modes are: one value, few values among zeros, bfloat16 numbers times one factor, planes. Values are compared by
    their bits: -0.0 is not zero, and NaNs keep their payloads.
    """

    name: ClassVar[str] = "gradients-exact"
    lossless: ClassVar[bool] = True

    def _encode(self, array: Array, out: Array) -> Bytes:
        return (
            encode_constant(array)
            or encode_sparse(as_uints(array), self.level, out, self._encode_values)
            or self._dense(array, out)
        )

    def _encode_values(self, values: Array, out: Array) -> Bytes:
        """The chunk of the values of a sparse chunk. `values`: (n,) float32."""
        chunk = encode_constant(values) or self._dense(values, out)
        if chunk[0] not in (RAW, FLOAT_PLANES):
            return chunk
        magnitudes = encode_magnitudes(values, self.level)
        return chunk if magnitudes is None or len(chunk) <= len(magnitudes) else magnitudes

    def _dense(self, array: Array, out: Array) -> Bytes:
        factor = find_factor(array)
        chunk = None if factor is None else encode_scaled(array, factor, out, self.level)
        if chunk is not None and len(chunk) <= array.nbytes:
            return chunk
        return Planes(self.level).encode_into(array, None, out)

    def _decode(self, data: Bytes, out: Array, base: Array | None) -> None:
        decode_own(self.name, data, out)


def decode_own(name: str, data: Bytes, out: Array) -> None:
    """Fill `out`, (n,) float32, from a chunk of a mode of gradients. Raises `CodecError` if the chunk is damaged."""
    if data[0] == SPARSE:
        decode_sparse(data, as_uints(out), lambda inner, values: _decode_inner(name, inner, values))
    else:
        _decode_dense(name, data, out)


def _decode_dense(name: str, data: Bytes, out: Array) -> None:
    if data[0] == MULTIPLES:
        decode_scaled(data, as_uints(out))
    elif data[0] == MAGNITUDES:
        decode_magnitudes(data, as_uints(out))
    elif data[0] == FLOAT_PLANES:
        decode_planes(data, out)
    else:
        raise CodecError(f"{name} has no chunks of mode {data[0]}")


def _decode_inner(name: str, data: Bytes, out: Array) -> None:
    """Fill `out`, float32, from the chunk of the values of a sparse chunk, which is never sparse itself."""
    if not decode_trivial(data, out):
        _decode_dense(name, data, out)


def encode_magnitudes(values: Array, level: str) -> Bytes | None:
    """A chunk of the values of pruned gradients, in a buffer of this thread.

    None if their magnitudes differ by a factor of more than 2**31. Most magnitudes are close to a threshold. Inside a
    binade, smaller ones are more frequent, so the code of the exponent includes three bits of the mantissa.

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
    out = thread_buffer("gradients-magnitudes", _MAGNITUDES_HEAD + 20 + planes.nbytes)
    area = out[_MAGNITUDES_HEAD - 1 :]
    end = _MAGNITUDES_HEAD - 1 + lossless.write_planes(planes, False, coding.max_ratio, coding.sampled, area)
    out[0] = MAGNITUDES
    out[1:_MAGNITUDES_HEAD] = np.frombuffer(int(min_top).to_bytes(2, "little"), np.uint8)
    return out[:end].data


def decode_magnitudes(data: Bytes, out: Array) -> None:
    """Fill `out`, (n,) uint32, with words from a chunk of mode 11. Raises `CodecError` if the chunk is damaged."""
    if len(data) < _MAGNITUDES_HEAD:
        raise CodecError("a chunk ends inside its head")
    min_top = np.uint32(int.from_bytes(data[1:_MAGNITUDES_HEAD], "little"))
    planes = thread_buffer("gradients-magnitudes", out.nbytes).view(np.uint32)
    read_planes(data[_MAGNITUDES_HEAD - 1 :], planes, False)
    rotated = (planes >> _PLACE) + min_top << _TOP | (planes >> _BYTE & np.uint32(0xFFFF)) << _LOW | planes & _LAST
    out[:] = rotated >> _ONE | rotated << np.uint32(31)
