"""What was read of sealed ranges, as numbers: 32 bytes a range, in memory and on its way to another process."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ckpt_formats.core.checksums import Crc32, digest_of
from ckpt_formats.core.coverage import Piece

if TYPE_CHECKING:
    from ckpt_formats.core.seals import Seal

RANGE = np.dtype([("seal", "<u8"), ("start", "<u8"), ("stop", "<u8"), ("digest", "<u8")])
"""One range: the number of its seal, its ends within the sealed range, and its checksum (see `digest_of`)."""
NUMBER = np.dtype("<u8")
"""The number of a seal (see `seal_number`)."""

Ranges = np.ndarray[Any, np.dtype[np.void]]
Numbers = np.ndarray[Any, np.dtype[np.uint64]]

_MANY = 64
"""Pieces of one seal above which neighbours are combined. Fewer are kept as they are: reads that overlap need them."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The checksums of what was read of sealed ranges: plain data, which another process may send back."""

    ranges: bytes = b""
    """Those of seals that need more evidence, or that are damaged: records of `RANGE`."""
    matched: bytes = b""
    """The numbers of the seals whose whole range one reader read, and whose checksum matched: of `NUMBER`."""
    seals: tuple[Seal, ...] = ()
    """The seals of `ranges`, without those that whoever gets the evidence can list."""

    @property
    def table(self) -> Ranges:
        """The ranges: (ranges,) of `RANGE`."""
        return np.frombuffer(self.ranges, RANGE)

    @property
    def numbers(self) -> Numbers:
        """The numbers of the seals that match: (seals,) uint64."""
        return np.frombuffer(self.matched, NUMBER)

    def __bool__(self) -> bool:
        return bool(self.ranges or self.matched)

    def without_seals(self, listed: Container[int]) -> Evidence:
        """The same without the seals of these numbers, which whoever gets it can list."""
        if not self.seals:
            return self
        return replace(self, seals=tuple(seal for seal in self.seals if seal_number(seal) not in listed))


def seal_number(seal: Seal) -> int:
    """A number of 64 bits that stands for a seal. It is a hash of its fields, so it is the same in every process."""
    path = str(seal.path)
    fields = f"{seal.offset} {seal.nbytes} {seal.kind} {seal.digest} {seal.chunk_nbytes} {len(path)} {path}{seal.label}"
    return int(xxhash.xxh3_64_intdigest(fields.encode("utf-8", "surrogatepass")))


def evidence_of(read: Iterable[tuple[Seal, Sequence[Piece]]]) -> Evidence:
    """The evidence of the pieces that were read of each of these seals, which are different ones."""
    rows, matched = list[tuple[int, int, int, int]](), list[int]()
    seals: list[Seal] = []
    for seal, pieces in read:
        number = seal_number(seal)
        if seal.kind == "crc32" and (len(pieces) > _MANY or sum(one.stop - one.start for one in pieces) >= seal.nbytes):
            pieces = Crc32(seal).joined(pieces)
        if any((one.start, one.stop, one.checksum) == (0, seal.nbytes, seal.digest) for one in pieces):
            matched.append(number)
            continue
        rows += ((number, one.start, one.stop, digest_of(one.checksum)) for one in pieces)
        seals.append(seal)
    return Evidence(np.array(rows, RANGE).tobytes(), np.array(matched, NUMBER).tobytes(), tuple(seals))


def joined(parts: Iterable[Evidence]) -> Evidence:
    """The evidence of several readers as one."""
    every = [one for one in parts if one]
    if len(every) == 1:
        return every[0]
    seals = dict.fromkeys(seal for one in every for seal in one.seals)
    return Evidence(b"".join(one.ranges for one in every), b"".join(one.matched for one in every), tuple(seals))
