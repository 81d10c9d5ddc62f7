"""What a codec is: a pair of pure functions between an array and bytes."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

from ckpt_codecs.errors import CodecError

Array = np.ndarray[Any, np.dtype[Any]]
DType = np.dtype[Any]
Shape = tuple[int, ...]
Bytes = bytes | memoryview
"""What is encoded. A codec that makes a whole buffer need not copy it to give it away."""


@dataclass(frozen=True)
class Codec(ABC):
    """Encodes a block of one tensor, where it helps against a base of the same shape.

    Law of configuration: a codec's dataclass fields are all of its
    configuration. They are stored beside what it wrote, as JSON, and never
    change meaning; two codecs share a name only if each decodes the other's bytes.

    Law of exactness: if `lossless`, then `decode(encode(a, b), ...) == a` bit for
    bit, or `encode` raises `NotApplicable`.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]
    context: ClassVar[str | None] = None
    """The state of the same parameter that serves as base, by the name that optimizers give it."""

    @abstractmethod
    def encode(self, array: Array, base: Array | None) -> Bytes:
        """Bytes for a block. Raises `NotApplicable` if this codec cannot hold these values."""

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        """The same bytes, where the codec can in `out`: `encode_bound(array.nbytes)` bytes, to be used again afterwards."""
        return self.encode(array, base)

    @abstractmethod
    def decode(self, data: Bytes, shape: Shape, dtype: DType, base: Array | None) -> Array:
        """The block again. `data` is hostile: raises `CodecError`, never more memory than `shape` earns."""

    def decode_into(self, data: Bytes, out: Array, base: Array | None) -> None:
        """The block again, into `out`, best where that is packed. Errors are those of `decode`."""
        made = self.decode(data, out.shape, out.dtype, base)
        if made.shape != out.shape or made.dtype != out.dtype:
            raise CodecError("another shape or type came out")
        out[...] = made

    def config(self) -> dict[str, Any]:
        """This codec as JSON; `from_config` makes it again."""
        return {"name": self.name, **asdict(self)}


def encode_bound(nbytes: int) -> int:
    """Bytes in which a codec of ours can work while it makes a chunk of so many bytes of values."""
    return nbytes + nbytes // 64 + 128
