"""Base classes of codecs that encode chunks into buffers of the caller."""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from ckpt_codecs.base import Array, Bytes, Codec, DType, Shape, encode_bound
from ckpt_codecs.chunk.frame import decode_trivial
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.errors import CodecError


class ChunkCodec(Codec):
    """A codec of chunks. `encode` and `decode` allocate their results; `encode_into` and `decode_into` do not."""

    def encode(self, array: Array, base: Array | None = None) -> Bytes:
        return self.encode_into(array, base, np.empty(encode_bound(array.nbytes), np.uint8))

    @abstractmethod
    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes: ...

    def decode(self, data: Bytes, shape: Shape, dtype: DType, base: Array | None = None) -> Array:
        out = np.empty(shape, dtype)
        self.decode_into(data, out, base)
        return out

    def decode_into(self, data: Bytes, out: Array, base: Array | None) -> None:
        if not (out.flags.c_contiguous and out.flags.aligned):
            out[...] = self.decode(data, out.shape, out.dtype, base)
        elif not decode_trivial(data, out):
            self._decode(data, out, base)

    def _decode(self, data: Bytes, out: Array, base: Array | None) -> None:
        """Fill `out` from a chunk of one of this codec's own modes."""
        raise CodecError(f"{self.name} has no chunks of mode {data[0]}")


@dataclass(frozen=True)
class LeveledCodec(ChunkCodec):
    """A codec of chunks with a choice of levels: a higher one takes more time for fewer bytes."""

    level: str = "default"

    def __post_init__(self) -> None:
        if not isinstance(self.level, str) or self.level not in LEVELS:
            raise CodecError(f"there is no level {self.level!r}; there are: {', '.join(LEVELS)}")
