"""zstd for what no other codec knows."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Bytes, Codec, DType, Shape
from ckpt_codecs.chunks import MOST, plain, raw, words
from ckpt_codecs.errors import CodecError
from ckpt_codecs.kinds import ZSTD
from ckpt_codecs.zstd import compress

ZSTD_LEVELS = {"fast": 1, "default": 3, "max": 19}


@dataclass(frozen=True)
class Zstd(Codec):
    """One frame of zstd a chunk."""

    level: int = 3

    name: ClassVar[str] = "zstd"
    lossless: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if type(self.level) is not int or not 1 <= self.level <= 22:
            raise CodecError(f"levels of zstd go from 1 to 22, not {self.level!r}")

    def encode(self, array: Array, base: Array | None = None) -> Bytes:
        return min(zstd(array, self.level), raw(array), key=len)

    def decode(self, data: Bytes, shape: Shape, dtype: DType, base: Array | None = None) -> Array:
        made = plain(data, shape, dtype)
        if made is None:
            raise CodecError(f"{self.name} has no chunks of mode {data[0]}")
        return made


def zstd(array: Array, level: int) -> Bytes:
    if array.size > MOST:
        return raw(array)
    return bytes([ZSTD]) + compress(words(array).view(np.uint8), level)
