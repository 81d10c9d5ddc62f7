"""Find damage by the hashes of a manifest: blocks that are lost, torn, flipped or those of another file."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import xxhash

from ckpt.pipeline import Resources
from ckpt.pipeline.executors import run_tasks
from ckpt.protection.wrong_hashes import wrong_hashes
from ckpt_codecs.base import Array
from ckpt_formats.core.arguments import Checked, Count
from ckpt_formats.core.errors import CkptError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.folders import file_nbytes
from ckpt_formats.core.identity import LOG
from ckpt_formats.parity.blocks import (
    BlockAddress,
    BlockPlace,
    BlockSource,
    ProtectedFolder,
    ThreadReaders,
    combine,
    parity_file,
    read_block,
    recovery_factors,
)
from ckpt_formats.parity.copies import ManifestCopy, copy_at
from ckpt_formats.parity.manifest import HASH_NBYTES, BlockHashes
from ckpt_formats.universal.chain.folder import is_growing
from ckpt_formats.universal.gradients.segment import layout_and_heads, rank_file
from ckpt_formats.universal.published.records import HEAD, MAX_HEAD, Head, StepName
from ckpt_formats.universal.published.steps import read_file

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
    """Files that are missing, or have another length, but for logs that have grown."""
    grown: frozenset[Path] = frozenset()
    """Logs that are longer than they were protected, and damaged ones into which a run records. They stay: a repair
    would cut off what was recorded since, or what the run records next."""
    heads: frozenset[Path] = frozenset()
    """Those of published chains that name a record that was not protected: a run has published steps since."""
    copies: Mapping[Path, str] = field(default_factory=dict)
    """What is wrong with copies of the manifest."""

    @property
    def is_whole(self) -> bool:
        """Whether nothing is wrong."""
        return not self.files()

    def files(self) -> tuple[DamagedFile, ...]:
        """The files that are not as they should be, by path; parity last."""
        bad, ranges = defaultdict[Path, int](int), defaultdict[Path, list[BlockPlace]](list)
        for at in self.bad:
            place = self.folder.place(at)
            if place.path in self.heads:
                continue
            bad[place.path] += 1
            if at in self.irreplaceable:
                ranges[place.path].append(place)
        parity = {path for path, _, is_parity in all_files(self.folder) if is_parity}
        files = (
            DamagedFile(
                path, _what(path, self.lengths, self.grown, bad[path]), bad[path], _ranges(ranges[path]), path in parity
            )
            for path in sorted({*bad, *self.lengths}, key=lambda path: (path in parity, str(path)))
        )
        return *files, *(DamagedFile(path, what, 0, is_parity=True) for path, what in self.copies.items())


def _what(path: Path, lengths: Iterable[Path], grown: Iterable[Path], blocks: int) -> str:
    count = f"{blocks:,} block{'s' * (blocks != 1)}"
    if path in grown:
        return f"a log that goes on, {count} of another content"
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

    for name, nbytes in folder.manifest.lengths.items():
        yield folder.root / name, nbytes, False
    for number, group in enumerate(folder.manifest.groups):
        for place in folder.places:
            yield parity_file(place, number), group.parity_nbytes, True


def nbytes_to_scan(folder: ProtectedFolder) -> int:
    """The bytes that `find_damage` counts."""
    return folder.manifest.nbytes + (folder.manifest.parity_nbytes if folder.places else 0)


def find_damage(
    folder: ProtectedFolder,
    resources: Resources,
    count: Callable[[int], None] = lambda nbytes: None,
    others: Sequence[Path] = (),
    leftover: Callable[[Path], Path | None] = lambda path: None,
    rebuilt: "RebuiltFiles | None" = None,
) -> Damage:
    """Read all blocks, and look for those that are not where they should be.

    `others`: folders with files of the same names, or copies of the only file, which may have them. `leftover`: the
    file that an interrupted repair has left for a path. Blocks are found elsewhere by their hash alone; `others` are
    read only for what parity does not replace. `rebuilt`: takes blocks that are computed meanwhile, and then are
    elsewhere.
    """
    wrong = _scan(folder, resources, count, rebuilt)
    elsewhere = {**dict(_misplaced(folder, wrong)), **(rebuilt.places if rebuilt is not None else {})}
    copies = wrong_copies(folder)
    nowhere = {at: digest for at, digest in wrong.items() if at not in elsewhere}
    if right := wrong_hashes(folder, nowhere, frozenset(too_many(folder, nowhere))):
        folder = _with_hashes(folder, right)
        wrong = {at: digest for at, digest in wrong.items() if at not in right}
        hashes = f"{len(right):,} hash{'es' * (len(right) != 1)} of blocks that parity shows to be right"
        copies = {path: copies.get(path, hashes) for path in folder.copies}
    bad = frozenset(wrong)
    more_nbytes = {path: file_nbytes(path) - nbytes for path, nbytes, _ in all_files(folder)}
    changed = {folder.place(at).path for at in bad}
    grown = frozenset(
        path
        for path, more in more_nbytes.items()
        if path.suffix == LOG
        and (more > 0 or (more == 0 and path in changed and is_growing(path.parent)))
        and _is_own_log(folder, path, bad)
    )
    heads = frozenset(
        path
        for path, more in more_nbytes.items()
        if (more or path in changed) and path.as_posix().endswith(f"/{HEAD}") and _is_later_head(folder, path)
    )
    lengths = frozenset(path for path, more in more_nbytes.items() if more) - grown - heads

    def look(blocks: Iterable[BlockAddress], candidates: Callable[[Path], Iterable[Path | None]]) -> None:
        for at in sorted(blocks, key=lambda at: (at.group, at.stripe, at.column)):
            count(0)  # raises if the user has interrupted
            place = folder.place(at)
            for path in candidates(place.path):
                if path is not None and _has(folder, at, other := BlockPlace(path, place.offset, place.nbytes)):
                    elsewhere[at] = other
                    break

    look(bad - elsewhere.keys(), lambda path: [leftover(path)])
    # Copies may be far away: of them, only what parity cannot replace is read.
    look(list(too_many(folder, bad - elsewhere.keys())), lambda path: _copies(folder, path, others))
    stays = grown | heads
    irreplaceable = {*too_many(folder, bad - elsewhere.keys()), *(at for at in bad if folder.place(at).path in stays)}
    return Damage(folder, bad, elsewhere, frozenset(irreplaceable), lengths, grown, heads, copies)


def _is_own_log(folder: ProtectedFolder, path: Path, bad: Collection[BlockAddress]) -> bool:
    """Whether a file is a log under its own name, and not under another's: by its blocks, or else by its head."""
    if any(at not in bad for at in folder.blocks_of_file(path.relative_to(folder.root).as_posix())):
        return True
    try:
        _, heads = layout_and_heads(path.parent)
        head = next(one for rank, one in enumerate(heads) if rank_file(rank) == path.name).dump()
        there = bytearray(len(head))
        with Reader(check=False) as reader:
            reader.read_into(path, 0, memoryview(there))
    except (CkptError, OSError, StopIteration):
        return False
    return there == head


def _is_later_head(folder: ProtectedFolder, path: Path) -> bool:
    """Whether a file is there and is the head of a published chain in which something was published since.

    It then names a record that is there and was not protected. One that names no such record is an earlier one, or its
    signature is damaged, which needs a key to be seen.
    """
    try:
        data = read_file(path, MAX_HEAD)
        if data is None:
            return False
        head = Head.from_bytes(data, path)
    except UnsupportedError:
        return True  # of a later version
    except CkptError:
        return False
    name, run = head.record.name, path.parent.parent
    keys = [name.key, *(StepName(name.epoch, last).fold_key(first) for first, last in head.folds)]
    records = (run / key for key in keys)
    protected = folder.manifest.lengths.keys()
    return any(one.relative_to(folder.root).as_posix() not in protected and one.is_file() for one in records)


def wrong_copies(folder: ProtectedFolder) -> dict[Path, str]:
    """What is wrong with the copies of the manifest where they should be."""
    digest = folder.hashes.to_bytes()[-HASH_NBYTES:]
    there = {copy.path: copy for path in folder.copies if (copy := copy_at(path)) is not None}
    return {path: what for path in folder.copies if (what := _what_of_copy(there.get(path), digest)) is not None}


def _what_of_copy(copy: ManifestCopy | None, digest: bytes) -> str | None:
    if copy is None:
        return "missing"
    if copy.digest is None:
        return "the manifest does not match its checksum"
    return None if copy.digest == digest else "another manifest than most copies"


def _with_hashes(folder: ProtectedFolder, right: Mapping[BlockAddress, bytes]) -> ProtectedFolder:
    """The folder with other hashes of some blocks."""
    hashes = BlockHashes(folder.manifest, folder.hashes.table.copy())
    for at, digest in right.items():
        hashes.note(at.group, at.column, at.stripe, digest)
    return replace(folder, hashes=hashes)


def _copies(folder: ProtectedFolder, path: Path, others: Sequence[Path]) -> Iterator[Path]:
    """Where copies of a file may be."""
    if path.is_relative_to(folder.root):
        name, is_single = path.relative_to(folder.root).as_posix(), folder.file is not None
        yield from (other if is_single and not other.is_dir() else other / name for other in others)


class RebuiltFiles(Protocol):
    """Files that are written beside those that are missing or too short. Threads share it."""

    @property
    def places(self) -> Mapping[BlockAddress, BlockPlace]:
        """Where the blocks are that it has taken."""

    def takes(self, at: BlockAddress) -> bool:
        """Whether it has a file for a block."""

    def put(self, at: BlockAddress, block: Array) -> None:
        """Write a block, (n,) uint8, which fits its hash."""


def _scan(
    folder: ProtectedFolder, resources: Resources, count: Callable[[int], None], rebuilt: RebuiltFiles | None
) -> dict[BlockAddress, bytes | None]:
    """The blocks that are bad, each with the hash of what is in its place; None if that cannot be read."""
    stripes = list(folder.stripes())
    nbytes = {path: file_nbytes(path) for path, _, _ in all_files(folder)}

    def scan(first: int) -> list[tuple[BlockAddress, bytes | None]]:
        wrong = []
        for stripe in stripes[first : first + _TOGETHER]:
            wrong += _scan_stripe(folder, stripe, nbytes, threads, rebuilt)
            count(sum(folder.place(at).nbytes for at in folder.blocks_of(*stripe)))
        return wrong

    with (
        ThreadReaders(len(folder.places)) as threads,
        ThreadPoolExecutor(resources.workers, "ckpt") as pool,
    ):
        results = run_tasks(pool, scan, range(0, len(stripes), _TOGETHER), 2 * resources.workers)
        return {at: digest for wrong in results for at, digest in wrong}


def _scan_stripe(
    folder: ProtectedFolder,
    stripe: tuple[int, int],
    nbytes: Mapping[Path, int],
    threads: ThreadReaders,
    rebuilt: RebuiltFiles | None,
) -> list[tuple[BlockAddress, bytes | None]]:
    """The bad blocks of a stripe, as `_scan`. `nbytes`: how long the files are.

    Those that are beyond the end of a file are computed from the others while these are read and compared.
    """
    blocks = {at: folder.place(at) for at in folder.blocks_of(*stripe)}
    absent = [at for at, place in blocks.items() if place.offset + place.nbytes > nbytes[place.path]]
    there = [at for at in blocks if at not in absent]
    is_rebuilt = rebuilt is not None and len(absent) <= len(folder.places) and all(map(rebuilt.takes, absent))
    wanted = absent if is_rebuilt else []
    factors = recovery_factors(folder, wanted, there) if wanted else np.zeros((0, len(there)), np.uint8)
    longest = folder.manifest.groups[stripe[0]].stripe_nbytes[stripe[1]]
    digests, sums = combine(threads.reader, [blocks[at] for at in there], factors, longest, threads.buffers)
    hashes = {at: None if isinstance(one, CkptError) else one for at, one in zip(there, digests, strict=True)}
    wrong = {at: digest for at, digest in hashes.items() if digest != folder.hash(at)}
    # A block that is bad would spoil all sums that it is in.
    if rebuilt is not None and not any(factors[:, number].any() for number, at in enumerate(there) if at in wrong):
        for at, block in zip(wanted, sums, strict=True):
            if xxhash.xxh3_128_digest(block[: blocks[at].nbytes].data) == folder.hash(at):
                rebuilt.put(at, block[: blocks[at].nbytes])
    return [*wrong.items(), *((at, None) for at in absent)]


def _has(folder: ProtectedFolder, at: BlockAddress, place: BlockPlace) -> bool:
    with Reader(check=False) as reader:
        return read_block(reader, place, np.empty(place.nbytes, np.uint8)) == folder.hash(at)


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


def too_many(folder: ProtectedFolder, bad: Iterable[BlockAddress]) -> Iterator[BlockAddress]:
    """The bad blocks of stripes of which more are bad than there are parities."""
    stripes = defaultdict[tuple[int, int], list[BlockAddress]](list)
    for at in bad:
        stripes[at.group, at.stripe].append(at)
    for own in stripes.values():
        if len(own) > len(folder.places):
            yield from own


class FoundBlocks(BlockSource):
    """Reads blocks from where they should be, or from where they were found."""

    def __init__(self, damage: Damage, reader: Reader) -> None:
        super().__init__(damage.folder, reader)
        self._damage = damage

    def is_lost(self, at: BlockAddress) -> bool:
        """Whether a block is known to be nowhere."""
        return at in self._damage.bad and at not in self._damage.elsewhere

    def place(self, at: BlockAddress) -> BlockPlace:
        return self._damage.elsewhere.get(at) or super().place(at)

    def fetch(self, at: BlockAddress, out: Array) -> bool:
        return not self.is_lost(at) and super().fetch(at, out)
