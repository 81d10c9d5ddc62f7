"""Repair protected files: blocks that are lost are computed from others, and files renamed into place whole."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from ckpt.job import AnyProgress, count_to
from ckpt.pipeline import Resources
from ckpt.pipeline.executors import run_tasks
from ckpt.pipeline.interrupts import interruptible
from ckpt.pipeline.removal import delete
from ckpt.protection.chain_parts import problem_of_segment
from ckpt.protection.damage import (
    Damage,
    DamagedFile,
    FoundBlocks,
    all_files,
    find_damage,
    nbytes_to_scan,
    too_many,
)
from ckpt.protection.members import check_not_newer
from ckpt.protection.work_files import REPAIRED, locked, scratch_for
from ckpt_codecs.base import Array
from ckpt_formats.core.arguments import Checked, Count, StrPath, checked
from ckpt_formats.core.errors import CkptError, CorruptError, OutputError, UnsafeError
from ckpt_formats.core.files import write_at
from ckpt_formats.core.folders import file_nbytes, hidden_name, replaced_file
from ckpt_formats.core.identity import Identities, Identity, check_unchanged
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.place import ObjectEntry
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import printable
from ckpt_formats.parity.blocks import (
    BlockAddress,
    BlockPlace,
    ProtectedFolder,
    StripeBuffers,
    ThreadReaders,
    find_parity,
    parity_file,
    recover,
)
from ckpt_formats.parity.manifest import MAX_NBYTES, NAME
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.stores.location import entry_at, listed_again, place_at, source_path, target_path
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import SEGMENT_FOLDER

_FILES_AT_ONCE = 128
_READ_BACK = 1 << 16
"""Bytes that are compared at once with what was written: a cache holds them."""


@dataclass(frozen=True)
class Repair(Checked):
    """What `repair` found, and what it did."""

    path: Path
    damaged: tuple[DamagedFile, ...]
    """The files that were not what was protected, parity last."""
    nbytes: Count
    """Bytes that were read and compared with their hashes."""
    written: bool
    """Whether the files that can be repaired are repaired."""
    lost_tensors: tuple[str, ...] = ()
    """The tensors with bytes in what cannot be repaired, if the headers of the checkpoint can be read."""
    unnamed_parity: tuple[str, ...] = ()
    """The folders and URLs that have the parity, by the manifest, and were not read: `parity` has to name them."""
    damaged_before: tuple[str, ...] = ()
    """Repaired segments of a log that do not fit their own checksums, and why: they were damaged when protected."""

    grown: tuple[str, ...] = ()
    """Logs that have more records than were protected, damaged ones into which a run records, and heads of published
    chains in which steps were published since. They stay as they are: a repair would cut the later steps off."""

    @property
    def unrepairable(self) -> tuple[DamagedFile, ...]:
        """The files that cannot be repaired."""
        return tuple(file for file in self.damaged if not file.is_repairable)


@checked
def repair(
    path: StrPath,
    *,
    others: Sequence[StrPath] = (),
    parity: Sequence[StrPath] = (),
    dry_run: bool = False,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> Repair:
    """Compare all files of a folder with the hashes of its parity, and write again those that are damaged or missing.

    Each block is compared with its hash before it is written, and again when it is; a file is renamed into place when
    it is whole. What cannot be repaired is left as it is, and is in the result: `unrepairable`.
    Only what the arguments name is read and written, whatever the manifest of the parity says.

    Args:
        path: The folder, file or URL that `protect` was given.
        others: Folders or URLs with copies of files, perhaps older ones: blocks of theirs are used where hashes fit.
        parity: The folders and URLs with the parity, if they are not with the files.
        dry_run: Write nothing.

    Raises:
        NotFoundError: There is no parity.
        CorruptError: No copy of the manifest is whole, or a chain was changed since it was protected.
        OutputError: A file cannot be written.
        LockedError: Another process protects or repairs the folder.
    """
    resources = resources or Resources.of_machine()
    root = source_path(path) if dry_run else target_path(path)
    places = tuple(source_path(one) if dry_run else target_path(one) for one in parity)
    folder = find_parity(root, places)
    copies = tuple(source_path(other) for other in others)
    with ExitStack() as stack:
        if not dry_run:
            stack.enter_context(locked(folder.base, folder.path if folder.file else None))
            root, places = listed_again(root), tuple(map(listed_again, places))
            folder = find_parity(root, places)  # another process may have written it until it gave the lock back
        check_not_newer(folder)
        nbytes = nbytes_to_scan(folder)
        count_bytes = count_to(nbytes, progress)
        count = stack.enter_context(interruptible(count_bytes))
        if dry_run:
            damage = find_damage(folder, resources, count, copies, _repaired)
            files = damage.files()
        else:
            try:
                identities = {path: Identity.of(path.stat()) for path, _, _ in all_files(folder) if path.exists()}
                entries = {path: entry_at(path) for path in identities}
                in_store = next(filter(is_remote, (root, *folder.places)), root)
                scratch = stack.enter_context(scratch_for(in_store, resources))
                with _Rebuilt(folder, scratch) as rebuilt:
                    damage = find_damage(folder, resources, count, copies, _repaired, rebuilt)
                files = damage.files()
                while unfit := _write(damage, files, rebuilt, identities, entries, resources, count):
                    damage = replace(damage, irreplaceable=damage.irreplaceable | unfit)
                    files = damage.files()
                _renew_manifests(damage.folder)
            except OSError as error:
                if isinstance(error, CkptError):
                    raise
                raise unwritable(error, root) from error
    return Repair(
        path=root,
        damaged=files,
        nbytes=nbytes,
        written=not dry_run,
        lost_tensors=_tensors_in(root, files),
        unnamed_parity=folder.unnamed,
        damaged_before=() if dry_run else _damaged_before(files),
        grown=tuple(sorted(map(str, damage.grown | damage.heads))),
    )


def _damaged_before(files: Sequence[DamagedFile]) -> tuple[str, ...]:
    """Compare repaired segments of a chain's log with their own checksums. Returns what is wrong with each."""
    folders = {file.path.parent for file in files if file.is_repairable}
    segments = sorted(folder for folder in folders if SEGMENT_FOLDER.fullmatch(folder.name))
    return tuple(f"{printable(one.name)}: {what}" for one in segments if (what := _problem_of_segment(one)) is not None)


def _problem_of_segment(segment: Path) -> str | None:
    """What is wrong with a segment; None if it is whole, or if the list that names it is damaged."""
    run = listed_again(segment.parent)
    try:
        named = next((one for one in chain_file.read(run).segments if one.folder == segment.name), None)
    except CkptError:
        return None
    error = None if named is None else problem_of_segment(run, named)
    return None if error is None else error.what


def _tensors_in(root: Path, files: Sequence[DamagedFile]) -> tuple[str, ...]:
    """The parameters with bytes in ranges that are lost; none if the checkpoint cannot be opened."""
    of_file = {file.path.resolve(): file.lost_ranges for file in files if file.lost_ranges and not file.is_parity}
    try:
        checkpoint = open_checkpoint(root) if of_file else None
    except CkptError:
        return ()
    if checkpoint is None:
        return ()
    names: dict[str, None] = {}
    for parameter, _, tensor in checkpoint.tensors():
        for blob in tensor.sources():
            ranges = of_file.get(blob.path.resolve(), ())
            if any(start < blob.offset + blob.span and blob.offset < stop for start, stop in ranges):
                names[parameter.name] = None
    return tuple(names)


def _repaired(path: Path) -> Path:
    """The file beside a damaged one that will replace it, or has what is left of it."""
    return path.with_name(hidden_name(path.name, REPAIRED))


def _draft(path: Path, scratch: Path | None) -> Path:
    """Where the file grows that will have this path: beside it, or in the scratch folder if the path is in a store."""
    if not is_remote(path) or scratch is None:
        return path
    return scratch / xxhash.xxh3_128_hexdigest(str(path).encode("utf-8", "surrogateescape"))


class _Rebuilt:
    """The files beside those that are missing or too short, which get their blocks while all others are compared.

    Only of groups that have not lost more domains than parity replaces, and where no interrupted repair left anything.
    """

    def __init__(self, folder: ProtectedFolder, scratch: Path | None) -> None:
        """`scratch`: a folder for files on their way to a store."""
        self._folder, self._files = folder, dict[Path, int]()
        self.scratch = scratch
        self.places: dict[BlockAddress, BlockPlace] = {}

    def __enter__(self) -> "_Rebuilt":
        for path, nbytes in _short_files(self._folder)[:_FILES_AT_ONCE]:
            if _is_there(_repaired(path)):
                continue
            with suppress(UnsafeError):
                _make_parents(self._folder, path)
                self._files[path] = _created(_draft(_repaired(path), self.scratch), path, nbytes)
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            os.close(file)

    def takes(self, at: BlockAddress) -> bool:
        return self._folder.place(at).path in self._files

    def put(self, at: BlockAddress, block: Array) -> None:
        place = self._folder.place(at)
        _put(self._folder, at, block, self._files[place.path])
        self.places[at] = BlockPlace(_draft(_repaired(place.path), self.scratch), place.offset, place.nbytes)

    @property
    def paths(self) -> dict[Path, Path]:
        """The files by the paths that they are for."""
        return {path: _draft(_repaired(path), self.scratch) for path in self._files}


def _is_there(path: Path) -> bool:
    """Whether a path has a file, an object or a link, which may lead nowhere."""
    return path.exists() if is_remote(path) else os.path.lexists(path)


def _short_files(folder: ProtectedFolder) -> list[tuple[Path, int]]:
    """The files that are missing or too short, with the length that they should have, of groups that replace them."""
    result: dict[Path, int] = {}
    lengths = {path: nbytes for path, nbytes, _ in all_files(folder)}
    actual = {path: file_nbytes(path, 0) for path in lengths}
    for number, group in enumerate(folder.manifest.groups):
        ends = [[(folder.root / file.name, file.start + file.nbytes) for file in one.files] for one in group.domains]
        ends += [[(parity_file(place, number), group.parity_nbytes)] for place in folder.places]
        short = [[path for path, end in column if actual[path] < end] for column in ends]
        if sum(map(bool, short)) <= len(folder.places):
            result |= {path: lengths[path] for own in short for path in own}
    return list(result.items())


def _created(new: Path, path: Path, nbytes: int) -> int:
    """A new file of zeros that will replace another one, opened to read and write."""
    file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    os.ftruncate(file, nbytes)
    if not is_remote(path):
        with suppress(OSError):
            os.fchmod(file, path.stat().st_mode & 0o777)
    return file


def _write(
    damage: Damage,
    damaged: Sequence[DamagedFile],
    rebuilt: _Rebuilt,
    identities: Identities,
    entries: Mapping[Path, ObjectEntry | None],
    resources: Resources,
    count: Callable[[int], None],
) -> frozenset[BlockAddress]:
    """Write the files that can be repaired beside their places, compare them, and rename them.

    Returns the blocks that parity gives, and which do not fit their hash: then nothing is renamed.

    `damaged`: its files. `identities` and `entries`: what was known of the files before they were read.

    Nothing is removed that has the only copy of a block. If one of a file that cannot be repaired is in a file that is
    replaced, what is left of the first one is written beside its place, where the next repair finds it.
    """
    folder, files = damage.folder, [file for file in damaged if file.path not in damage.copies]
    lengths = {path: nbytes for path, nbytes, _ in all_files(folder)}
    paths = [file.path for file in files if file.is_repairable]
    unrepairable = {file.path for file in files if not file.is_repairable}
    replaced = set(paths)
    homeless = {
        folder.place(at).path for at, place in damage.elsewhere.items() if place.path in replaced
    } & unrepairable
    for path in (*homeless, *paths):
        _make_parents(folder, path)
    leftovers = {place.path for place in damage.elsewhere.values()} - set(rebuilt.paths.values())
    outputs: dict[Path, Path] = {}
    for path in (*sorted(homeless), *paths):
        new = _repaired(path)
        # What an interrupted repair has left may be the only copy of a block: it stays until another one is whole.
        outputs[path] = _draft(_repaired(new) if new in leftovers else new, rebuilt.scratch)
    incomplete = _incomplete(folder, list(outputs), rebuilt)
    # Files of which some are open together: a process may open so many.
    for first in range(0, len(incomplete), _FILES_AT_ONCE):
        some = {path: outputs[path] for path in incomplete[first : first + _FILES_AT_ONCE]}
        if unfit := _fill(damage, some, lengths, rebuilt, resources, count):
            return unfit
    check_unchanged({path: identities[path] for path in paths if path in identities}, is_whole=True)
    if appeared := [path for path in paths if path not in identities and path.exists()]:
        raise CorruptError("appeared during the repair", where=appeared[0], hint="Repair it when nothing writes it.")
    for path, new in outputs.items():
        final = _repaired(path) if path in unrepairable else path
        there = entry_at(final) if path in unrepairable else entries.get(final)
        if not is_remote(final):
            delete(replaced_file(final))  # else what lies beside the file would seem to be of the damaged one
        try:
            place_at(final.parent).replace_from(final.name, new, there)
        except FileExistsError:
            hint = "Repair it when nothing writes it."
            raise CorruptError("was written during the repair", where=final, hint=hint) from None
    # Without what an interrupted repair has left, parity computes the blocks of a stripe in which not too many are bad.
    remaining = too_many(folder, [at for at in damage.bad if folder.place(at).path in unrepairable])
    needed = leftovers & {damage.elsewhere[at].path for at in remaining if at in damage.elsewhere}
    stay = homeless | {path for path in unrepairable if _repaired(path) in needed}
    for path in lengths.keys() - stay:
        for leftover in (_repaired(path), _repaired(_repaired(path))):
            if _is_there(leftover):
                place_at(leftover.parent).delete([leftover.name])
    return frozenset()


def _incomplete(folder: ProtectedFolder, paths: Sequence[Path], rebuilt: _Rebuilt) -> list[Path]:
    """Those of which not all blocks are written yet."""
    blocks = Counter(folder.place(at).path for stripe in folder.stripes() for at in folder.blocks_of(*stripe))
    written = Counter(folder.place(at).path for at in rebuilt.places)
    return [path for path in paths if path not in rebuilt.paths or written[path] < blocks[path]]


def _make_parents(folder: ProtectedFolder, path: Path) -> None:
    """Make the folders of a file that are missing. Raises `UnsafeError` if one of them is a link."""
    if is_remote(path):
        return
    if path.is_relative_to(folder.root):
        for above in list(path.relative_to(folder.root).parents)[:-1]:
            if (folder.root / above).is_symlink():
                raise UnsafeError("is a link, through which no file is written", where=folder.root / above)
    path.parent.mkdir(parents=True, exist_ok=True)


def _fill(
    damage: Damage,
    outputs: dict[Path, Path],
    lengths: dict[Path, int],
    rebuilt: _Rebuilt,
    resources: Resources,
    count: Callable[[int], None],
) -> frozenset[BlockAddress]:
    """Write all blocks of the files that are not rebuilt yet, and compare what was written.

    Returns blocks that do not fit their hash, so that it is wrong, or parity is.
    """
    folder, unfit = damage.folder, set[BlockAddress]()
    with (
        ExitStack() as stack,
        ThreadReaders(len(folder.places)) as threads,
        ThreadPoolExecutor(resources.workers, "ckpt") as pool,
    ):
        opened: dict[Path, int] = {}
        for path, new in outputs.items():
            if path in rebuilt.paths:
                opened[path] = os.open(new, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            else:
                new.unlink(missing_ok=True)  # a link would be written through
                opened[path] = _created(new, path, lengths[path])
            stack.callback(os.close, opened[path])

        def fill(stripe: tuple[int, int]) -> None:
            count(0)  # raises if the user has interrupted
            blocks = folder.blocks_of(*stripe)
            wanted = [
                at
                for at in blocks
                if folder.place(at).path in opened and at not in rebuilt.places and at not in damage.irreplaceable
            ]
            if not wanted:
                return
            source = FoundBlocks(damage, threads.reader)

            def put(wanted: Sequence[BlockAddress]) -> None:
                for at, block in _blocks(damage, wanted, source, threads.buffers, threads.block):
                    _put(folder, at, block, opened[folder.place(at).path])

            try:
                put(wanted)
            except CorruptError:
                for at in wanted:
                    try:
                        put([at])
                    except CorruptError:  # noqa: PERF203  # rare
                        unfit.add(at)

        for _ in run_tasks(pool, fill, folder.stripes(), 2 * resources.workers):
            pass
    return frozenset(unfit)


def _blocks(
    damage: Damage, wanted: Sequence[BlockAddress], source: FoundBlocks, buffers: StripeBuffers, buffer: Array
) -> Iterator[tuple[BlockAddress, Array]]:
    """The blocks of a stripe that are wanted: those that are there, then those that are computed."""
    computed = []
    for at in wanted:
        block = buffer[: damage.folder.place(at).nbytes]
        if source.fetch(at, block):
            yield at, block
        else:
            computed.append(at)
    if computed:
        bad = [at for at in damage.folder.blocks_of(computed[0].group, computed[0].stripe) if source.is_lost(at)]
        sums = recover(source, computed, bad, buffers)
        for at, block in zip(computed, sums, strict=True):
            yield at, block[: damage.folder.place(at).nbytes]


def _put(folder: ProtectedFolder, at: BlockAddress, block: Array, file: int) -> None:
    """Write a block, and compare what is there then with its hash. Raises `CorruptError`, `OutputError`."""
    place, digest = folder.place(at), folder.hash(at)
    if xxhash.xxh3_128_digest(block.data) != digest:
        raise CorruptError("a block does not fit its hash, and is not written", where=place.path)
    write_at(file, block.data, place.offset)
    if _hash_of(file, place) != digest:
        raise OutputError("what is on the disk is not what was written", where=place.path, hint="Check the disk.")


def _hash_of(file: int, place: BlockPlace) -> bytes:
    """The hash of what a file has in the place of a block."""
    digest, part = xxhash.xxh3_128(), bytearray(_READ_BACK)
    for start in range(0, place.nbytes, _READ_BACK):
        view = memoryview(part)[: place.nbytes - start]
        digest.update(view[: os.preadv(file, [view], place.offset + start)])
    return digest.digest()


def _renew_manifests(folder: ProtectedFolder) -> None:
    """Write the copies of the manifest that are missing or not whole."""
    data = folder.hashes.to_bytes()
    for path in folder.copies:
        _make_parents(folder, path)
        place = place_at(path.parent)
        there = place.read(NAME, MAX_NBYTES) if path.is_file() else None  # a pipe would block
        place.remove_drafts(NAME)
        if there is None or there[0] != data:
            place.replace(NAME, data, None if there is None else there[1])
