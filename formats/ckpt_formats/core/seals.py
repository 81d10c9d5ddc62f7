"""What a file promises of its own bytes: seals, one by one and as tables, and the arithmetic of CRC-32s.

A `Seal` is a checksum that a file promises for a range of its own bytes. Readers compute these checksums of what they
read anyway (`files`), each kind in its own way (`checksums`).
"""

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import xxhash
from isal import isal_zlib

if TYPE_CHECKING:
    from ckpt_formats.core.files import Reader

Kind = Literal["crc32", "xxh3-128", "xxh3-64"]

_Array = np.ndarray[Any, np.dtype[Any]]

_PERIOD = (1 << 32) - 1


@dataclass(frozen=True, slots=True, eq=False)
class Leaves:
    """The checksums of the chunks of a range, which follow one another."""

    nbytes: _Array
    """The length of each chunk: (chunks,) int64."""
    digests: bytes
    """The checksums, one after another, most significant byte first: 16 bytes each (XXH3-128) or 8 (XXH3-64)."""


# Not frozen, like `Box`: there is one for each tensor.
@dataclass(slots=True, unsafe_hash=True)
class Seal:
    """A checksum that a file promises for a range of its own bytes.

    A range in chunks has a checksum for each: then `digest` is the XXH3-128 of these, one after another.
    """

    path: Path
    offset: int
    nbytes: int
    kind: Kind
    digest: int
    label: str
    """The name of the range in messages: `archive/data/3`, `layer.0/exp_avg`."""
    chunk_nbytes: int = 0
    """The length of every chunk but the last; 0 if the range is not in chunks, or in chunks of several lengths."""
    leaves: Leaves | None = field(default=None, compare=False, repr=False)
    """The checksums of the chunks, if they are known."""


class LazySeals(Sequence[Seal]):
    """Seals some of which are made, or read from files, when they are looked up."""

    @abstractmethod
    def listed(self) -> Iterable[Seal]:
        """Those that are known without reading anything: the same ones in every process that opens the checkpoint."""

    def digest(self) -> bytes:
        """A hash that differs if the checksums do, as far as they are known without reading anything."""
        return digest_of_seals(tuple(self.listed()))


def digest_of_seals(seals: Sequence[Seal]) -> bytes:
    """A hash of ranges and checksums, without the paths of the files."""
    if isinstance(seals, LazySeals):
        return seals.digest()
    return xxhash.xxh3_128(b"".join(b"%d %d %d\n" % (one.offset, one.nbytes, one.digest) for one in seals)).digest()


class SealTable(LazySeals):
    """Seals that are columns, so that many are compared at once. None is made before it is looked up."""

    def listed(self) -> Iterable[Seal]:
        return self.alone()

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The bytes of all ranges."""

    @abstractmethod
    def alone(self) -> Iterator[Seal]:
        """The seals that are in no part: few, such as those of headers."""

    @abstractmethod
    def parts(self) -> Sequence["SealPart"]:
        """All others, in parts that are compared each by itself."""

    def contradictions(self) -> "Iterator[Contradiction]":
        """What files say of themselves otherwise than these seals do, although all bytes fit."""
        return iter(())

    @abstractmethod
    def of(self, number: int) -> "tuple[Seal, str]":
        """A seal of a part by its number, and the name of the parameter whose values it is of."""


@dataclass(frozen=True)
class Contradiction:
    """What a file says of itself otherwise than what has its checksums: of which tensor, if it is about one."""

    path: Path
    what: str
    tensor: str | None = None


class SealPart(Protocol):
    """Sealed ranges of a file that are read front to back."""

    @property
    def nbytes(self) -> int: ...

    def unequal(self, reader: "Reader") -> list[int]:
        """The numbers of the seals in `SealTable.of` that do not match, or whose bytes cannot be read."""


def crc32(data: bytes | memoryview, start: int = 0) -> int:
    """The CRC-32 of zip and zlib. `start`: that of the bytes before."""
    return int(isal_zlib.crc32(data, start))


def crc32_combine(first: int, second: int, nbytes: int) -> int:
    """The CRC-32 of two neighbouring ranges, the second of them `nbytes` long."""
    return int(isal_zlib.crc32_combine(first, second, nbytes))


def crc32_without(both: int, second: int, nbytes: int) -> int:
    """The CRC-32 of the first of two neighbouring ranges, given that of both and that of the second, `nbytes` long."""
    # To append n zeros is linear in the CRC, and to append 2^32 - 1 zeros changes nothing: the polynomial is primitive.
    return crc32_combine(both ^ second, 0, -nbytes % _PERIOD)
