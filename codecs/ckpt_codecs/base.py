"""What a codec is: a pair of pure functions between an array and bytes."""

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy as np

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

    @abstractmethod
    def decode(self, data: Bytes, shape: Shape, dtype: DType, base: Array | None) -> Array:
        """The block again. `data` is hostile: raises `CodecError`, never more memory than `shape` earns."""

    def config(self) -> dict[str, Any]:
        """This codec as JSON; `from_config` makes it again."""
        return {"name": self.name, **asdict(self)}
