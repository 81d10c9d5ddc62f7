"""zstd, for dtypes that no other codec handles."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.codec import ChunkCodec
from ckpt_codecs.chunk.frame import MAX_ELEMENTS, as_uints, encode_raw
from ckpt_codecs.chunk.zstd import compress
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import ZSTD

ZSTD_LEVELS = {"fast": 1, "default": 3, "max": 19}


@dataclass(frozen=True)
class Zstd(ChunkCodec):
    """Codec of one frame of zstd per chunk."""

    level: int = 3

    name: ClassVar[str] = "zstd"
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.level) is not int or not 1 <= self.level <= 22:
            raise CodecError(f"a level of zstd is a number from 1 to 22, not {self.level!r}")

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        chunk = encode_zstd(array, self.level)
        return chunk if chunk is not None and len(chunk) <= array.nbytes + 1 else encode_raw(array, out)


def encode_zstd(array: Array, level: int) -> Bytes | None:
    """Return a chunk of one frame of an array, any shape and dtype; None if it has more than MAX_ELEMENTS."""
    if array.size > MAX_ELEMENTS:
        return None
    return bytes([ZSTD]) + compress(as_uints(array).view(np.uint8), level)
