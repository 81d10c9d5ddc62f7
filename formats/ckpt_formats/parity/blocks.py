"""Read blocks of protected files, compare each with its hash, and compute those that are lost from others."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import local
from typing import cast

import numpy as np
import xxhash

from ckpt_codecs.base import Array
from ckpt_codecs.native.parity import add_products
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, NotFoundError
from ckpt_formats.core.files import Reader, unreadable
from ckpt_formats.core.folders import PARITY, check_no_stale_sidecars, has_stale_sidecars, hidden_name, parity_of_file
from ckpt_formats.core.identity import Identities
from ckpt_formats.core.store_path import StoreError, is_remote, request
from ckpt_formats.core.text import PARTIAL, printable
from ckpt_formats.parity.code import parity_matrix, recovery_matrix
from ckpt_formats.parity.copies import ManifestCopy, copies_in, copy_at, manifests
from ckpt_formats.parity.manifest import BLOCK_NBYTES, NAME, BlockHashes, ParityManifest

PLAN = "plan.json"
"""In a folder with parity that grows: what is protected. It goes before the folder gets its name."""
BLOCKS_AT_ONCE = 16
"""Blocks of a stripe that are in memory together: a thread needs so many and the parities, whatever the group is."""
_SLICE_NBYTES = 1 << 16
"""Bytes of each of these blocks that are read, hashed and multiplied before the next ones, so that caches hold them."""


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block lies."""

    path: Path
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class BlockAddress:
    """Which block: the number of its group, its column (a domain, or then a parity) and its stripe."""

    group: int
    column: int
    stripe: int


@dataclass(frozen=True)
class ProtectedFolder:
    """A folder, or a file in it, with its parity: what the manifest says, and where all files are."""

    root: Path
    places: tuple[Path, ...]
    """The folder of each parity; none if they are elsewhere, in folders that the user has not named."""
    hashes: BlockHashes
    file: str | None = None
    """The name of the file, if only that is protected."""

    @property
    def path(self) -> Path:
        """The folder, or the file in it, that is protected."""
        return self.root if self.file is None else self.root / self.file

    @property
    def base(self) -> Path:
        """The folder that has the parity, or the manifest that says where it is."""
        return self.root / (PARITY if self.file is None else hidden_name(self.file, PARITY))

    @property
    def manifest(self) -> ParityManifest:
        return self.hashes.manifest

    @property
    def copies(self) -> tuple[Path, ...]:
        """Where copies of the manifest should be: with the folder, and in all places that are known."""
        folders = (self.base, *(place.parent for place in self.places), *self.places)
        return tuple(folder / NAME for folder in dict.fromkeys(folders))

    @property
    def unnamed(self) -> tuple[str, ...]:
        """The folders and URLs that have the parity, by the manifest, if the user has not named them."""
        return () if self.places else self.manifest.elsewhere

    def place(self, at: BlockAddress) -> BlockPlace:
        """Where a block should lie. It has no bytes if its domain has no block in this stripe."""
        group = self.manifest.groups[at.group]
        parity = at.column - len(group.domains)
        if parity >= 0:
            path = parity_file(self.places[parity], at.group)
            return BlockPlace(path, group.starts[at.stripe], group.stripe_nbytes[at.stripe])
        domain = group.domains[at.column]
        if at.stripe >= domain.block_count:
            return BlockPlace(self.root, 0, 0)
        file, index = domain.block(at.stripe)
        return BlockPlace(self.root / file.name, file.start + index * BLOCK_NBYTES, file.block_nbytes(index))

    def hash(self, at: BlockAddress) -> bytes:
        """The hash that a block should have."""
        return self.hashes.of(at.group, at.column, at.stripe)

    def stripes(self) -> Iterator[tuple[int, int]]:
        """All stripes: each the number of its group, and its own."""
        for number, group in enumerate(self.manifest.groups):
            for stripe in range(len(group.stripe_nbytes)):
                yield number, stripe

    def blocks_of(self, group: int, stripe: int) -> Iterator[BlockAddress]:
        """The blocks of a stripe that have bytes."""
        own = self.manifest.groups[group]
        for column in range(len(own.domains) + len(self.places)):
            if own.block_nbytes(column, stripe):
                yield BlockAddress(group, column, stripe)

    def blocks_of_file(self, name: str) -> Iterator[BlockAddress]:
        """The blocks of a protected file, in their order."""
        for number, group in enumerate(self.manifest.groups):
            for column, domain in enumerate(group.domains):
                stripe = 0
                for file in domain.files:
                    if file.name == name:
                        yield from (BlockAddress(number, column, stripe + at) for at in range(file.block_count))
                    stripe += file.block_count


def parity_file(place: Path, group: int) -> Path:
    """The file with a parity of a group, in the folder of this parity."""
    return place / f"group-{group:03}"


def places_of(base: Path, elsewhere: Sequence[Path], parities: int) -> tuple[Path, ...]:
    """The folder of each parity: in the folder with the parity, or in turn in those `elsewhere`."""
    folders = elsewhere or (base,)
    return tuple(folders[number % len(folders)] / str(number) for number in range(parities))


def parity_folder(path: Path) -> Path:
    """The folder with the parity of a folder, or of a file, which may be missing."""
    of_file = parity_of_file(path)
    return of_file if path.is_file() or (of_file.is_dir() and not path.exists()) else path / PARITY


def find_parity(path: Path, elsewhere: Sequence[Path] = ()) -> ProtectedFolder:
    """The parity of a folder, or of a file, by the manifest of which there are most whole copies.

    `elsewhere`: the folders that have the parity now, if they are not in its own one. What a manifest says of folders
    elsewhere is not followed: a checkpoint of a stranger would choose what is read and written.

    Raises `NotFoundError` if there is no copy, `CorruptError` if none is whole and damaged ones together do not give
    one either, if it is of another file, or if `elsewhere` is of another state; `OutputError` if the file was replaced.
    """
    check_no_stale_sidecars(path)
    base = parity_folder(path)
    root, file = (path, None) if base.parent == path else (path.parent, path.name)
    errors = list[CkptError]()
    for copy, hashes in manifests(_copies_of_state(base, elsewhere)):
        if isinstance(hashes, CkptError):
            errors.append(hashes)
            continue
        if file is not None and hashes.manifest.lengths.keys() != {file}:
            # Or the parity of one file would write others beside it.
            names = ", ".join(map(printable, list(hashes.manifest.lengths)[:2]))
            hint = "Give both the names that they had, or protect the file with --overwrite."
            errors.append(CorruptError(f"is the parity of {names or 'no file'}", where=copy, hint=hint))
            continue
        known = 0 if hashes.manifest.elsewhere and not elsewhere else hashes.manifest.parities
        return ProtectedFolder(root, _places_now(base, elsewhere, known), hashes, file)
    if errors:
        raise errors[0]
    raise NotFoundError(
        "has no parity", where=path, hint="`ckpt protect` writes it. If it lies in another folder: --parity FOLDER."
    )


def _copies_of_state(base: Path, elsewhere: Sequence[Path]) -> list[ManifestCopy]:
    """The copies of manifests, without those of an earlier state if a run was killed that gave folders a new one.

    Raises `CorruptError` if a folder has parity of another state than the checkpoint's own manifest states: an older
    one must not outvote what was protected last.
    """
    copies = {folder: copies_in((folder,)) for folder in (*elsewhere, base)}
    every = [copy for of in copies.values() for copy in of]
    own = copy_at(base / NAME) if elsewhere else None
    if own is None or own.digest is None:
        return every
    grown = base.with_name(base.name + PARTIAL)
    draft = copy_at(grown / NAME) if not is_remote(base) and (grown / PLAN).is_file() else None
    if draft is not None and any(copy.digest == draft.digest is not None for one in elsewhere for copy in copies[one]):
        return [copy for copy in every if copy.digest == draft.digest]
    for folder in elsewhere:
        digests = {copy.digest for copy in copies[folder] if copy.digest is not None}
        if digests and own.digest not in digests:
            hint = f"Name the folders of the last `ckpt protect --into`. If {own.path} is the older one, remove it."
            raise CorruptError(
                "has the parity of another state than the checkpoint's own manifest", where=folder, hint=hint
            )
    return every


def _places_now(base: Path, elsewhere: Sequence[Path], parities: int) -> tuple[Path, ...]:
    """The folder of each parity, in whichever folder `elsewhere` it is; those that are lost go to folders with none."""
    known = {
        number: one / str(number)
        for one in reversed(elsewhere)
        for number in range(parities)
        if (one / str(number)).is_dir()
    }
    missing = [number for number in range(parities) if number not in known]
    free = [one for one in elsewhere if one not in {place.parent for place in known.values()}] or elsewhere
    new = dict(zip(missing, places_of(base, free, len(missing)), strict=True))
    return tuple(known.get(number) or new[number].with_name(str(number)) for number in range(parities))


def has_parity(path: Path) -> bool:
    """Whether a folder, or a file, has parity of its own, whole or not."""
    return parity_folder(path).is_dir() and not has_stale_sidecars(path)


def protected_folders(root: Path) -> list[Path]:
    """The folders with parity of their own: this one, and those in it, such as the members of a chain."""
    try:
        inside = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    except OSError:
        inside = []
    return [path for path in (root, *inside) if has_parity(path)]


class StripeBuffers:
    """Memory of one thread for blocks of a stripe: used again for the next one."""

    def __init__(self, rows: int) -> None:
        self._inputs = np.empty(BLOCKS_AT_ONCE * BLOCK_NBYTES, np.uint8)
        self._sums = np.empty(rows * BLOCK_NBYTES, np.uint8)

    def inputs(self, nbytes: int) -> Array:
        """Room for blocks, or slices of them, of this length: (BLOCKS_AT_ONCE, nbytes) uint8, of any content."""
        return self._inputs[: BLOCKS_AT_ONCE * nbytes].reshape(BLOCKS_AT_ONCE, nbytes)

    def room(self, rows: int, nbytes: int) -> Array:
        """Room for sums of blocks: (rows, nbytes) uint8, of any content."""
        return self._sums[: rows * nbytes].reshape(rows, nbytes)


class ThreadReaders:
    """A reader and memory for each thread that asks. All readers are closed at the end of the context."""

    def __init__(self, rows: int, identities: Identities | None = None) -> None:
        """`rows`: of sums. `identities`: of the files that may not change meanwhile."""
        self._rows, self._identities = rows, identities
        self._local = local()
        self._opened: list[Reader] = []

    def __enter__(self) -> "ThreadReaders":
        return self

    def __exit__(self, *error: object) -> None:
        for reader in self._opened:
            reader.close()

    @property
    def reader(self) -> Reader:
        """The reader of this thread."""
        if not hasattr(self._local, "reader"):
            self._local.reader = Reader(check=False, identities=self._identities)
            self._opened.append(self._local.reader)
        return cast(Reader, self._local.reader)

    @property
    def buffers(self) -> StripeBuffers:
        """The memory of this thread for blocks of a stripe."""
        if not hasattr(self._local, "buffers"):
            self._local.buffers = StripeBuffers(self._rows)
        return cast(StripeBuffers, self._local.buffers)

    @property
    def block(self) -> Array:
        """The memory of this thread for one more block: (1 MiB,) uint8."""
        if not hasattr(self._local, "block"):
            self._local.block = np.empty(BLOCK_NBYTES, np.uint8)
        return cast(Array, self._local.block)


def read_block(reader: Reader, place: BlockPlace, out: Array) -> bytes | None:
    """Fill `out`, (n,) uint8, with a block and zeros after it. Return its hash; None if it cannot be read.

    Raises `NotFoundError` if a store cannot be reached: this says nothing about its objects.
    """
    try:
        reader.read_into(place.path, place.offset, out.data[: place.nbytes])
    except CkptError as error:
        if isinstance(error.__cause__, StoreError):
            raise
        return None
    out[place.nbytes :] = 0
    return xxhash.xxh3_128_digest(out[: place.nbytes].data)


def combine(
    reader: Reader, places: Sequence[BlockPlace], matrix: Array, nbytes: int, buffers: StripeBuffers
) -> tuple[list[bytes | CkptError], Array]:
    """Read blocks once, and return the hash of each, and the sums of their products: (rows, nbytes) uint8.

    `matrix`: the factors of each block in each sum, (rows, blocks) uint8. Of a block that cannot be read, the error is
    returned, and the sums in which it has a factor mean nothing. They are valid until `buffers` are used again.
    """
    sums, results = buffers.room(len(matrix), nbytes), list[bytes | CkptError]()
    at_once = min(BLOCKS_AT_ONCE, reader.max_files)
    for first in range(0, len(places), at_once):
        some = places[first : first + at_once]
        factors = np.ascontiguousarray(matrix[:, first : first + len(some)])
        blocks = [_SlicedBlock(reader, place) for place in some]
        for place in some:
            request(place.path, place.offset, place.nbytes)
        # What is only hashed needs no memory of its own; a store is asked for whole blocks.
        is_sliced = len(matrix) and not any(is_remote(place.path) for place in some)
        step = _SLICE_NBYTES if is_sliced else BLOCK_NBYTES
        for start in range(0, nbytes, step):
            own = sums[:, start : start + step]
            inputs = buffers.inputs(own.shape[1])
            for number, block in enumerate(blocks):
                block.read(start, inputs[number if len(matrix) else 0])
            if len(matrix):
                if first == 0:
                    own[:] = 0
                add_products(factors, inputs[: len(some)], own)
        results += (block.result() for block in blocks)
    return results, sums


class _SlicedBlock:
    """A block that is read front to back and hashed meanwhile."""

    def __init__(self, reader: Reader, place: BlockPlace) -> None:
        self._place, self._digest = place, xxhash.xxh3_128()
        self._error: CkptError | None = None
        try:
            self._file = reader.opened(place.path) if place.nbytes else None
        except CkptError as error:
            self._error = error

    def read(self, start: int, out: Array) -> None:
        """Fill `out`, (n,) uint8, with the bytes from `start` on, and with zeros after the end."""
        there = min(self._place.nbytes - start, out.size)
        if there < out.size:
            out[max(there, 0) :] = 0
        if there <= 0 or self._error is not None or self._file is None:
            return
        view, offset = out.data[:there], self._place.offset + start
        try:
            while view:
                done = self._file.read_into(offset, view)
                if done == 0:
                    self._error = CorruptError(f"the file ends at byte {offset:,}", where=self._place.path)
                    return
                self._digest.update(view[:done])
                view, offset = view[done:], offset + done
        except CkptError as error:
            self._error = error
        except StoreError as error:
            raise unreadable(error, self._place.path) from error  # says nothing about the object
        except OSError as error:
            self._error = unreadable(error, self._place.path)

    def result(self) -> bytes | CkptError:
        """The hash of all its bytes, or why they cannot be read."""
        return self._digest.digest() if self._error is None else self._error


def encode_stripe(folder: ProtectedFolder, group: int, stripe: int, reader: Reader, buffers: StripeBuffers) -> Array:
    """Read the data of a stripe once, note the hashes of all its blocks, and return its parities: (m, n) uint8.

    Raises `CkptError` if a file cannot be read. The result is valid until `buffers` are used again.
    """
    own = folder.manifest.groups[group]
    blocks = [at for at in folder.blocks_of(group, stripe) if at.column < len(own.domains)]
    matrix = parity_matrix(len(own.domains), own.parities)[:, [at.column for at in blocks]]
    digests, sums = combine(reader, list(map(folder.place, blocks)), matrix, own.stripe_nbytes[stripe], buffers)
    for at, digest in zip(blocks, digests, strict=True):
        if isinstance(digest, CkptError):
            raise digest
        folder.hashes.note(group, at.column, stripe, digest)
    for number, block in enumerate(sums):
        folder.hashes.note(group, len(own.domains) + number, stripe, xxhash.xxh3_128_digest(block.data))
    return sums


def extend_stripe(
    folder: ProtectedFolder,
    earlier: ProtectedFolder,
    at: tuple[int, int, int],
    stays: Collection[int],
    reader: Reader,
    buffers: StripeBuffers,
) -> Array | None:
    """Return the parities of a stripe in which domains came or went, (m, n) uint8, from the earlier ones and these.

    `at`: the number of the group, what it was earlier, and the stripe. `stays`: the columns of domains that are in
    both, and are not read: a parity is a sum, to which blocks are added, and from which they are taken by adding them
    once more. The hashes of new blocks and of all parities are noted. Returns None if an earlier block that is needed
    does not fit its hash.

    Raises `CkptError` if a file cannot be read. The result is valid until `buffers` are used again.
    """
    number, before, stripe = at
    own, there = folder.manifest.groups[number], earlier.manifest.groups[before]
    data, parities, nbytes = len(own.domains), own.parities, own.stripe_nbytes[stripe]
    added = [one for one in folder.blocks_of(number, stripe) if one.column < data and one.column not in stays]
    is_there = stripe < len(there.stripe_nbytes)
    old = [one for one in earlier.blocks_of(before, stripe) if one.column not in stays] if is_there else []
    factors = np.hstack((parity_matrix(data, parities), np.eye(parities, dtype=np.uint8)))
    matrix = factors[:, [one.column for one in (*added, *old)]]
    places = [*map(folder.place, added), *map(earlier.place, old)]
    longest = max(nbytes, there.stripe_nbytes[stripe]) if is_there else nbytes
    digests, sums = combine(reader, places, matrix, longest, buffers)
    if any(digest != earlier.hash(one) for one, digest in zip(old, digests[len(added) :], strict=True)):
        return None
    for one, digest in zip(added, digests, strict=False):
        if isinstance(digest, CkptError):
            raise digest
        folder.hashes.note(number, one.column, stripe, digest)
    sums = sums[:, :nbytes]
    for row, block in enumerate(sums):
        folder.hashes.note(number, data + row, stripe, xxhash.xxh3_128_digest(block.data))
    return sums


def recovery_factors(folder: ProtectedFolder, wanted: Sequence[BlockAddress], others: Sequence[BlockAddress]) -> Array:
    """The factors by which other blocks of a stripe give the wanted ones: (wanted, others) uint8; 0 of spare ones.

    `others`: all other blocks of the stripe with bytes. At most as many are wanted as there are parities.
    """
    group = folder.manifest.groups[others[0].group]
    data, columns = len(group.domains), tuple(at.column for at in wanted)
    present = tuple([column for column in range(data + group.parities) if column not in columns][:data])
    matrix = _recovery_matrix(data, group.parities, present, columns)
    factors = np.zeros((len(wanted), len(others)), np.uint8)
    for number, at in enumerate(others):
        if at.column in present:
            factors[:, number] = matrix[:, present.index(at.column)]
    return factors


_recovery_matrix = lru_cache(maxsize=64)(recovery_matrix)
"""Most stripes have lost the same domains. Nobody changes the result."""


class BlockSource:
    """Reads blocks from where they should be; a class derived from it knows further places."""

    def __init__(self, folder: ProtectedFolder, reader: Reader) -> None:
        self.folder, self.reader = folder, reader

    def place(self, at: BlockAddress) -> BlockPlace:
        """Where a block is read, unless it is known to be lost."""
        return self.folder.place(at)

    def fetch(self, at: BlockAddress, out: Array) -> bool:
        """Fill `out`, (n,) uint8, with a block and zeros; False if it is not there with its hash."""
        return read_block(self.reader, self.place(at), out) == self.folder.hash(at)


def recover(
    source: BlockSource, wanted: Sequence[BlockAddress], missing: Collection[BlockAddress], buffers: StripeBuffers
) -> Array:
    """Compute blocks of one stripe from its others: (wanted, n) uint8, as long as the stripe.

    `missing`: blocks that are known to be lost. What is read is compared with its hash, and so is the result.
    The result is valid until `buffers` are used again.

    Raises:
        IncompleteError: Fewer blocks are left than there are domains.
        CorruptError: The result does not fit its hash: the manifest is not that of these files.
    """
    folder, number, stripe = source.folder, wanted[0].group, wanted[0].stripe
    group = folder.manifest.groups[number]
    bad = {at.column for at in (*missing, *wanted)}
    while True:
        columns = range(len(group.domains) + len(folder.places))
        present = tuple([column for column in columns if column not in bad][: len(group.domains)])
        if len(present) < len(group.domains):
            raise IncompleteError(
                f"{len(bad)} blocks of a stripe are lost, and its parity replaces {len(folder.places)}",
                where=folder.place(wanted[0]).path,
                hint=None
                if folder.places
                else f"Its parity is elsewhere: ckpt repair {printable(str(folder.path))} "
                + " ".join(f"--parity {printable(one)}" for one in folder.unnamed),
            )
        others = [BlockAddress(number, column, stripe) for column in present if group.block_nbytes(column, stripe)]
        matrix = _recovery_matrix(len(group.domains), group.parities, present, tuple(at.column for at in wanted))
        factors = matrix[:, [present.index(at.column) for at in others]]
        places = list(map(source.place, others))
        digests, sums = combine(source.reader, places, factors, group.stripe_nbytes[stripe], buffers)
        failed = {at.column for at, digest in zip(others, digests, strict=True) if digest != folder.hash(at)}
        if not failed:
            break
        bad |= failed
    for at, block in zip(wanted, sums, strict=True):
        if xxhash.xxh3_128_digest(block[: folder.place(at).nbytes].data) != folder.hash(at):
            raise CorruptError("what parity gives does not fit the hash", where=folder.place(at).path)
    return sums
