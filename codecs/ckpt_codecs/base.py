"""The interface of codecs: a codec is a pair of pure functions between an array and bytes."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from ckpt_codecs.errors import CodecError

Array = np.ndarray[Any, np.dtype[Any]]
DType = np.dtype[Any]
Shape = tuple[int, ...]
Bytes = bytes | memoryview
"""An encoded chunk. A memoryview may be of a buffer that the encoder was given: then it is valid as long as that."""


@dataclass(frozen=True)
class Codec(ABC):
    """Encodes a chunk of one tensor, for some codecs relative to a base of the same shape.

    Configuration: the dataclass fields of a codec are its whole configuration. A file stores them as JSON next to the
    encoded chunks. A field never changes its meaning. Two codecs have the same name only if each decodes the bytes of
    the other.

    Exactness: if `lossless`, then `decode(encode(a, b), a.shape, a.dtype, b)` has the bits of `a`, or `encode` raises
    `NotApplicable`.

    Purity: the result depends on the arguments and the configuration only. Several threads may use one codec.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    context: ClassVar[str | None] = None
    """The state of the same parameter that is the base, by the optimizer's name for it. None: there is no base."""

    @abstractmethod
    def encode(self, array: Array, base: Array | None) -> Bytes:
        """Encode a chunk. The result belongs to the caller.

        Args:
            array: Any shape and dtype.
            base: The shape of `array`, any dtype; None if there is none.

        Raises:
            NotApplicable: This codec cannot represent these values exactly.
        """

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        """Encode a chunk as `encode` does, if possible into `out`: the result may be a view of `out`.

        Args:
            out: (m,) uint8, m >= `encode_bound(array.nbytes)`; if it is smaller, the result is another buffer.

        Raises:
            NotApplicable: As `encode`.
        """
        return self.encode(array, base)

    @abstractmethod
    def decode(self, data: Bytes, shape: Shape, dtype: DType, base: Array | None) -> Array:
        """Decode a chunk: an array of this shape and dtype, which belongs to the caller.

        Args:
            data: Untrusted bytes. The memory that is used depends on `shape` and `dtype` only, not on `data`.
            base: The base of the encoder: (shape), of the base's dtype.

        Raises:
            CodecError: `data` is not a chunk of this codec, or the base is missing.
        """

    def decode_into(self, data: Bytes, out: Array, base: Array | None) -> None:
        """Decode a chunk into `out`, of any shape and dtype. It is fastest if `out` is C-contiguous and aligned.

        Raises:
            CodecError: As `decode`. `out` is then undefined.
        """
        decoded = self.decode(data, out.shape, out.dtype, base)
        if decoded.shape != out.shape or decoded.dtype != out.dtype:
            raise CodecError("the decoded array has another shape or dtype")
        out[...] = decoded

    def config(self) -> dict[str, Any]:
        """Return the configuration as JSON values; `from_config` turns it into an equal codec."""
        return {"name": self.name, **asdict(self)}


def encode_bound(nbytes: int) -> int:
    """Return the size in bytes of a buffer in which the built-in codecs can encode a chunk of `nbytes` bytes."""
    return nbytes + nbytes // 64 + 128
