"""Put the evidence of all readers together as it arrives, and compare it with the checksums that files promise.

Only what nobody has read is read here, so bytes are read once, not twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np

from ckpt_formats.core.checksums import Checksum, MismatchError, checksum_of, digest_of
from ckpt_formats.core.coverage import Piece, union
from ckpt_formats.core.distinct import distinct
from ckpt_formats.core.evidence import NUMBER, RANGE, Evidence, Numbers, seal_number
from ckpt_formats.core.files import Reader
from ckpt_formats.core.seals import LazySeals, Seal

_MANY = 64
"""Pieces of one seal above which neighbours are combined."""
_FEW_NUMBERS = 1 << 16


class SealChecks:
    """What is known of all seals of which there was evidence. It has intervals, not every piece that somebody read.

    Only what the pieces of its checksum leave open is read here (see `checksums`).
    """

    def __init__(self, listed: Mapping[int, Seal] = MappingProxyType({})) -> None:
        """`listed`: the seals that evidence may name by their numbers alone."""
        self._listed = listed
        self._matched = _NumberSet()
        self._damaged: dict[int, Seal] = {}
        self._partly: dict[int, _PartlyRead] = {}

    def __len__(self) -> int:
        """How many seals there was evidence of."""
        return len(self._matched) + len(self._damaged) + len(self._partly)

    @property
    def intervals(self) -> int:
        """How many intervals it keeps, of seals that need more evidence."""
        return sum(len(one.parts) for one in self._partly.values())

    def knows(self, evidence: Evidence) -> bool:
        """Whether all seals of the evidence are known: in it, or listed."""
        own = {seal_number(seal) for seal in evidence.seals}
        return all(number in own or number in self._listed for number in distinct(evidence.table["seal"]).tolist())

    def add(self, evidence: Evidence) -> None:
        """Add evidence of one or several readers. Raises `KeyError` if it does not know one of its seals."""
        numbers = evidence.numbers.tolist()
        self._matched.update(numbers)
        for number in numbers if self._partly else ():
            self._partly.pop(number, None)
        own = {seal_number(seal): seal for seal in evidence.seals}
        for number, start, stop, digest in evidence.table.tolist():
            if number in self._damaged:
                continue
            seal = own[number] if number in own else self._listed[number]
            is_whole = (start, stop) == (0, seal.nbytes)
            if number in self._matched and (not is_whole or digest == digest_of(seal.digest)):
                continue
            state = self._partly.get(number)
            if state is None:
                state = self._partly[number] = _PartlyRead(checksum_of(seal))
            state.add(Piece(start, stop, digest))
            if state.fits is not None:
                del self._partly[number]
                if state.fits:
                    self._matched.update((number,))
                else:
                    self._damaged[number] = seal
                    self._matched.discard(number)

    @property
    def mismatched(self) -> Collection[Seal]:
        """The seals whose range does not fit, whatever its rest has."""
        return self._damaged.values()

    @property
    def decided(self) -> int:
        """How many seals need no more evidence."""
        return len(self._matched) + len(self._damaged)

    def undecided(self) -> Iterator[tuple[Checksum, Sequence[Piece]]]:
        """The checksums that need more evidence, each with what is known of its range."""
        for state in self._partly.values():
            yield state.checksum, state.pieces

    def evidence(self) -> Evidence:
        """All of it as evidence for somebody else, neighbours combined."""
        rows = [(number, 0, seal.nbytes, digest_of(seal.digest) ^ 1) for number, seal in self._damaged.items()]
        for number, state in self._partly.items():
            pieces = state.checksum.joined(state.pieces) or [Piece(0, 0, 0)]
            rows += ((number, one.start, one.stop, state.checksum.stated(one)) for one in pieces)
        return Evidence(np.array(rows, RANGE).tobytes(), self._matched.numbers.tobytes())

    def damaged(self, reader: Reader | None = None) -> Iterator[Seal]:
        """Yield the seals that are not valid. What nobody has read of the others is read. Raises as `Reader` does."""
        yield from self._damaged.values()
        with reader or Reader(check=False) as reader:
            for state in self._partly.values():
                if not state.checksum.is_valid(state.pieces, reader):
                    yield state.checksum.seal


def verify_seals(evidence: Iterable[Evidence], reader: Reader | None = None) -> Iterator[Seal]:
    """Yield the seals that are not valid, among those of which there is evidence."""
    checks = SealChecks()
    for one in evidence:
        checks.add(one)
    yield from checks.damaged(reader)


def seal_is_valid(seal: Seal, reader: Reader) -> bool:
    """Read the whole range, and compare its checksum."""
    return checksum_of(seal).is_valid((), reader)


def damaged_chunks(seal: Seal, reader: Reader) -> list[int]:
    """The numbers of the chunks of a range that do not match their checksums; none if it states none of chunks."""
    return checksum_of(seal).damaged_chunks(reader)


class ListedSeals(Mapping[int, Seal]):
    """The seals of several checkpoints that are known without reading anything, by their numbers.

    They are the same in every process that opens these checkpoints. None is looked at before one is looked up.
    """

    def __init__(self, every: Iterable[Sequence[Seal]]) -> None:
        self._every = tuple(every)

    @cached_property
    def _by_number(self) -> dict[int, Seal]:
        sequences = (seals.listed() if isinstance(seals, LazySeals) else seals for seals in self._every)
        return {seal_number(seal): seal for seals in sequences for seal in seals}

    def __getitem__(self, number: int) -> Seal:
        return self._by_number[number]

    def __iter__(self) -> Iterator[int]:
        return iter(self._by_number)

    def __len__(self) -> int:
        return len(self._by_number)


@dataclass(slots=True)
class _PartlyRead:
    """A sealed range of which parts were read."""

    checksum: Checksum
    fits: bool | None = None
    """Whether the range fits its checksum, once that is known."""
    parts: dict[tuple[int, int], int] = field(default_factory=dict)
    """Their checksums by start and stop (see `Checksum.checked`)."""
    covered: int = 0
    """Bytes of all parts; those that overlap count twice."""
    twice: int = 0
    """Of these, the bytes that were counted more than once when neighbours were last combined."""
    most: int = _MANY
    """Parts above which neighbours are combined."""

    @property
    def pieces(self) -> list[Piece]:
        return [Piece(start, stop, checksum) for (start, stop), checksum in self.parts.items()]

    def add(self, read: Piece) -> None:
        """Add what was read; `checksum` is what evidence has of it."""
        if (read.start, read.stop) == (0, self.checksum.seal.nbytes):
            self.fits = read.checksum == digest_of(self.checksum.seal.digest)
        elif read.start < read.stop:
            try:
                part = self.checksum.checked(read)
            except MismatchError:
                self.fits = False
                return
            if part is not None:
                self._note(part)

    def _note(self, part: Piece) -> None:
        if self.parts.setdefault((part.start, part.stop), part.checksum) != part.checksum:
            self.fits = False  # two readers got different bytes
            return
        nbytes = self.checksum.seal.nbytes
        self.covered += part.stop - part.start
        may_be_whole = self.covered >= nbytes + self.twice
        if not may_be_whole and len(self.parts) <= self.most:
            return
        pieces = self.checksum.joined(self.pieces)
        whole = [one for one in pieces if (one.start, one.stop) == (0, nbytes)]
        if whole:
            self.fits = self.checksum.is_right(whole[0].checksum)
        if len(self.parts) > self.most:
            self.parts = {(one.start, one.stop): one.checksum for one in pieces}
            self.covered = sum(one.stop - one.start for one in pieces)
            self.most = max(_MANY, 2 * len(pieces))
        self.twice = self.covered - sum(one.stop - one.start for one in union(pieces))


class _NumberSet:
    """A set of numbers of 64 bits, which takes 8 bytes for each."""

    def __init__(self) -> None:
        self._sorted: Numbers = np.empty(0, NUMBER)
        self._recent = set[int]()

    def __contains__(self, number: int) -> bool:
        if number in self._recent or not self._sorted.size:
            return number in self._recent
        at = int(np.searchsorted(self._sorted, np.uint64(number)))
        return at < len(self._sorted) and int(self._sorted[at]) == number

    def __len__(self) -> int:
        self._sort()
        return len(self._sorted)

    @property
    def numbers(self) -> Numbers:
        """All of them, ascending: (numbers,) uint64."""
        self._sort()
        return self._sorted

    def update(self, numbers: Iterable[int]) -> None:
        self._recent.update(numbers)
        if len(self._recent) > _FEW_NUMBERS:
            self._sort()

    def discard(self, number: int) -> None:
        self._sort()
        self._sorted = self._sorted[self._sorted != np.uint64(number)]

    def _sort(self) -> None:
        recent = np.fromiter(self._recent, NUMBER, len(self._recent))
        self._sorted, self._recent = distinct(np.concatenate([self._sorted, recent])), set()
