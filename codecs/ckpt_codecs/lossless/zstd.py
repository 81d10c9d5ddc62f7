"""zstd for what no other codec knows."""

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
    """One frame of zstd a chunk."""

    level: int = 3

    name: ClassVar[str] = "zstd"
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.level) is not int or not 1 <= self.level <= 22:
            raise CodecError(f"levels of zstd go from 1 to 22, not {self.level!r}")

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        made = zstd(array, self.level)
        return made if made is not None and len(made) <= array.nbytes + 1 else encode_raw(array, out)


def zstd(array: Array, level: int) -> Bytes | None:
    """A chunk of one frame; None if it would be too large."""
    if array.size > MAX_ELEMENTS:
        return None
    return bytes([ZSTD]) + compress(as_uints(array).view(np.uint8), level)
