"""Find damage by the hashes of a manifest: blocks that are lost, torn, flipped or those of another file."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ckpt.pipeline import Resources
from ckpt.pipeline.executors import run_tasks
from ckpt_codecs.base import Array
from ckpt_formats.core.arguments import Checked, Count
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.parity.blocks import (
    BlockAddress,
    BlockPlace,
    BlockSource,
    ProtectedFolder,
    ThreadReaders,
    parity_file,
    read_block,
)

_TOGETHER = 8
"""Stripes of one task."""


@dataclass(frozen=True)
class DamagedFile(Checked):
    """A file that is not what was protected."""

    path: Path
    what: str
    """Whether it is missing, has another length, or how many of its blocks have another content."""
    blocks: Count
    """How many of its blocks are not there with their hash."""
    lost_ranges: tuple[tuple[int, int], ...] = ()
    """The ranges of its bytes that nothing replaces, each with its first byte and the one after its last."""
    is_parity: bool = False

    @property
    def is_repairable(self) -> bool:
        """Whether all of it can be had again."""
        return not self.lost_ranges


@dataclass(frozen=True)
class Damage:
    """What is wrong with a protected folder."""

    folder: ProtectedFolder
    bad: frozenset[BlockAddress] = frozenset()
    """Blocks that are not where they should be."""
    elsewhere: Mapping[BlockAddress, BlockPlace] = field(default_factory=dict, repr=False)
    """Where some of them are instead: in a file with another's name, in one that a repair has left, in another copy."""
    irreplaceable: frozenset[BlockAddress] = frozenset()
    """Those that nothing replaces: too many of their stripe are bad."""
    lengths: frozenset[Path] = frozenset()
    """Files that are missing, or have another length."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.bad and not self.lengths

    def files(self) -> tuple[DamagedFile, ...]:
        """The files that are not as they should be, by path; parity last."""
        bad, ranges = defaultdict[Path, int](int), defaultdict[Path, list[BlockPlace]](list)
        for at in self.bad:
            place = self.folder.place(at)
            bad[place.path] += 1
            if at in self.irreplaceable:
                ranges[place.path].append(place)
        parity = {path for path, _, is_parity in all_files(self.folder) if is_parity}
        return tuple(
            DamagedFile(path, _what(path, self.lengths, bad[path]), bad[path], _ranges(ranges[path]), path in parity)
            for path in sorted({*bad, *self.lengths}, key=lambda path: (path in parity, str(path)))
        )


def _what(path: Path, lengths: Iterable[Path], blocks: int) -> str:
    count = f"{blocks:,} block{'s' * (blocks != 1)}"
    if path not in lengths:
        return f"{count} of another content"
    if not path.is_file():
        return "missing"
    return f"of another length, {count} not there" if blocks else "longer than it was"


def _ranges(places: Sequence[BlockPlace]) -> tuple[tuple[int, int], ...]:
    ranges: list[tuple[int, int]] = []
    for place in sorted(places, key=lambda place: place.offset):
        if ranges and ranges[-1][1] == place.offset:
            ranges[-1] = (ranges[-1][0], place.offset + place.nbytes)
        else:
            ranges.append((place.offset, place.offset + place.nbytes))
    return tuple(ranges)


def all_files(folder: ProtectedFolder) -> Iterator[tuple[Path, int, bool]]:
    """All files, those of parity last: path, length, and whether it is one of parity."""

    for file in folder.manifest.files:
        yield folder.root / file.name, file.nbytes, False
    for number, group in enumerate(folder.manifest.groups):
        for place in folder.places:
            yield parity_file(place, number), group.parity_nbytes, True


def nbytes_to_scan(folder: ProtectedFolder) -> int:
    """The bytes that `find_damage` counts."""
    return folder.manifest.nbytes + folder.manifest.parity_nbytes


def find_damage(
    folder: ProtectedFolder,
    resources: Resources,
    count: Callable[[int], None] = lambda nbytes: None,
    others: Sequence[Path] = (),
    leftover: Callable[[Path], Path | None] = lambda path: None,
) -> Damage:
    """Read all blocks, and look for those that are not where they should be.

    `others`: folders with files of the same names, which may have them. `leftover`: the file that an interrupted repair
    has left for a path. Blocks are found elsewhere by their hash alone.
    """
    wrong = _scan(folder, resources, count)
    bad = frozenset(wrong)
    elsewhere = dict(_misplaced(folder, wrong))
    lengths = frozenset(path for path, nbytes, _ in all_files(folder) if _nbytes(path) != nbytes)
    for at in bad - elsewhere.keys():
        place = folder.place(at)
        candidates = [leftover(place.path)]
        if place.path.is_relative_to(folder.root):
            candidates += [other / place.path.relative_to(folder.root).as_posix() for other in others]
        for path in candidates:
            if path is not None and _has(folder, at, candidate := BlockPlace(path, place.offset, place.nbytes)):
                elsewhere[at] = candidate
                break
    return Damage(folder, bad, elsewhere, frozenset(_too_many(folder, bad - elsewhere.keys())), lengths)


def _scan(
    folder: ProtectedFolder, resources: Resources, count: Callable[[int], None]
) -> dict[BlockAddress, bytes | None]:
    """The blocks that are bad, each with the hash of what is in its place; None if that cannot be read."""
    stripes = list(folder.stripes())

    def scan(first: int) -> list[tuple[BlockAddress, bytes | None]]:
        wrong = []
        for group, stripe in stripes[first : first + _TOGETHER]:
            for at in folder.blocks_of(group, stripe):
                place = folder.place(at)
                digest = _hash(threads.reader, place, threads.block)
                if digest != folder.hash(at):
                    wrong.append((at, digest))
                count(place.nbytes)
        return wrong

    with ThreadReaders(0) as threads, ThreadPoolExecutor(resources.workers, "ckpt") as pool:
        results = run_tasks(pool, scan, range(0, len(stripes), _TOGETHER), 2 * resources.workers)
        return {at: digest for wrong in results for at, digest in wrong}


def _hash(reader: Reader, place: BlockPlace, buffer: Array) -> bytes | None:
    try:
        return read_block(reader, place, buffer[: place.nbytes])
    except CkptError:
        return None


def _has(folder: ProtectedFolder, at: BlockAddress, place: BlockPlace) -> bool:
    with Reader(check=False) as reader:
        return _hash(reader, place, np.empty(place.nbytes, np.uint8)) == folder.hash(at)


def _misplaced(
    folder: ProtectedFolder, wrong: Mapping[BlockAddress, bytes | None]
) -> Iterator[tuple[BlockAddress, BlockPlace]]:
    """The bad blocks whose content lies in the place of another one: two files may have each other's names."""
    there = {digest: at for at, digest in wrong.items() if digest is not None}
    for at in wrong:
        other = there.get(folder.hash(at))
        nbytes = folder.place(at).nbytes
        if other is not None and folder.place(other).nbytes == nbytes:
            yield at, folder.place(other)


def _too_many(folder: ProtectedFolder, bad: Iterable[BlockAddress]) -> Iterator[BlockAddress]:
    """The bad blocks of stripes of which more are bad than there are parities."""
    stripes = defaultdict[tuple[int, int], list[BlockAddress]](list)
    for at in bad:
        stripes[at.group, at.stripe].append(at)
    for own in stripes.values():
        if len(own) > folder.manifest.parities:
            yield from own


def _nbytes(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None


class FoundBlocks(BlockSource):
    """Reads blocks from where they should be, or from where they were found."""

    def __init__(self, damage: Damage, reader: Reader) -> None:
        super().__init__(damage.folder, reader)
        self._damage = damage

    def is_lost(self, at: BlockAddress) -> bool:
        """Whether a block is known to be nowhere."""
        return at in self._damage.bad and at not in self._damage.elsewhere

    def fetch(self, at: BlockAddress, out: Array) -> bool:
        place = self._damage.elsewhere.get(at)
        if place is None:
            return at not in self._damage.bad and super().fetch(at, out)
        try:
            return read_block(self.reader, place, out) == self.folder.hash(at)
        except CkptError:
            return False
