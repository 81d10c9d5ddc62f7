"""The lossless codec of gradients."""

from dataclasses import dataclass
from typing import ClassVar

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.frame import as_uints, decode_trivial, encode_constant
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import FLOAT_PLANES, MAGNITUDES, MULTIPLES, RAW, SPARSE
from ckpt_codecs.gradients.chunk import GradientCodec
from ckpt_codecs.gradients.magnitudes import decode_magnitudes, encode_magnitudes
from ckpt_codecs.gradients.scaled import decode_scaled, encode_scaled, find_factor
from ckpt_codecs.gradients.sparse import decode_sparse, encode_sparse
from ckpt_codecs.lossless.float_planes import Planes, decode_planes


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
