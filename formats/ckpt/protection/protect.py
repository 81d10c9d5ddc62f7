"""Write parity for the files of a folder, which stay as they are.

The files are read once, stripe by stripe. Parity grows in a folder beside its own, and a journal there has the hashes
of the stripes that are on the disk, so that an interrupted run goes on. One rename publishes the whole.
"""

import json
import os
import shutil
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import xxhash

from ckpt.job import AnyProgress, count_to
from ckpt.pipeline import Resources
from ckpt.pipeline.executors import run_tasks
from ckpt.pipeline.interrupts import interruptible
from ckpt.protection.domains import domains_of, groups_of, parts_of
from ckpt.protection.parity_folders import give_name, upload, upload_changed, write_whole
from ckpt.protection.work_files import is_protected, locked, scratch_for
from ckpt_codecs.base import Array
from ckpt_formats.core.arguments import Checked, Count, LocalPath, StrPath, as_path, checked
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    InvalidArgumentError,
    LockedError,
    NotFoundError,
    OutputError,
    UnsupportedError,
)
from ckpt_formats.core.files import Reader, write_at
from ckpt_formats.core.folders import below, check_no_stale_sidecars
from ckpt_formats.core.identity import LOG, Identity, check_unchanged
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.own_folder import make_own
from ckpt_formats.core.publish import flush, flush_all
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import PARTIAL, printable
from ckpt_formats.parity.blocks import (
    PLAN,
    BlockAddress,
    ProtectedFolder,
    ThreadReaders,
    encode_stripe,
    extend_stripe,
    parity_file,
    parity_folder,
    places_of,
)
from ckpt_formats.parity.code import MAX_BLOCKS, Parities
from ckpt_formats.parity.copies import manifest_copies
from ckpt_formats.parity.manifest import (
    BLOCK_NBYTES,
    HASH_NBYTES,
    NAME,
    BlockHashes,
    DomainGroup,
    ParityManifest,
    ProtectedFile,
    check_names,
    read,
)
from ckpt_formats.stores.location import listed_again, target_path
from ckpt_formats.universal.chain.folder import is_growing

_PARTS = 16
"""For each part of a single file that may be lost, it has so many."""
_JOURNAL, _UPLOAD = "journal", "upload-"
_JOURNAL_EVERY = 1 << 30
"""Bytes of data after which what was computed is flushed and noted."""


@dataclass(frozen=True)
class Protection(Checked):
    """What `protect` wrote, or would write."""

    parity: Path
    """The folder with the parity, or with the manifest that says where it is."""
    files: Count
    """Files that are protected."""
    nbytes: Count
    """Their bytes."""
    parity_nbytes: Count
    """The bytes of all parity."""
    manifest_nbytes: Count
    """The bytes of all copies of the manifest."""
    domains: Count
    groups: Count
    lose: Count
    """How many domains of each group may be lost."""


@dataclass(frozen=True)
class EarlierGroups:
    """Parity that is there for some of the groups of a plan, or for some of their domains."""

    folder: ProtectedFolder
    numbers: tuple[int | None, ...]
    """The number of each group of the plan in the earlier parity: domains of both have the same columns."""
    replaced: frozenset[str] = frozenset()
    """The domains that were written anew since: the earlier parity has nothing of them."""

    def columns(self, group: int, own: DomainGroup) -> tuple[int, ...]:
        """The columns of a group of the plan in which both have the same domain."""
        number = self.numbers[group]
        there = () if number is None else self.folder.manifest.groups[number].domains
        both = enumerate(zip(own.domains, there, strict=False))
        return tuple(column for column, (one, other) in both if one == other and one.name not in self.replaced)


@dataclass(frozen=True)
class ProtectPlan:
    """What will be protected, and where its parity will be."""

    folder: ProtectedFolder
    """The files, and the folders of the parities once they are published."""
    elsewhere: tuple[Path, ...]
    identities: dict[Path, Identity] = field(repr=False)
    overwrite: bool = False
    earlier: "EarlierGroups | None" = None
    """Groups of parity that is there, and is used again."""

    @property
    def summary(self) -> Protection:
        """What `protect` will return."""
        manifest = self.folder.manifest
        copies = 1 + manifest.parities
        return Protection(
            parity=self.folder.base,
            files=len(manifest.lengths),
            nbytes=manifest.nbytes,
            parity_nbytes=manifest.parity_nbytes,
            manifest_nbytes=copies * len(self.folder.hashes.to_bytes()),
            domains=sum(bool(domain.files) for group in manifest.groups for domain in group.domains),
            groups=len(manifest.groups),
            lose=manifest.parities,
        )

    @property
    def bases(self) -> tuple[Path, ...]:
        """The folders that are published: those elsewhere first, last the one in the folder, which says where."""
        return (*dict.fromkeys(self.elsewhere), self.folder.base)


def plan_protect(
    path: StrPath,
    lose: int = 2,
    *,
    by: str = "file",
    domains: Path | None = None,
    jump: int = 1,
    into: Sequence[StrPath] = (),
    overwrite: bool = False,
) -> ProtectPlan:
    """What `protect` would do. No file is read. Raises as `protect`."""
    given = target_path(path)
    if is_remote(given) and given.is_file():
        hint = "Protect the folder with it, or a copy in the file system."
        raise UnsupportedError("is a single object: in a store, folders have parity", where=given, hint=hint)
    root = given.parent if given.is_file() else given
    if not root.is_dir():
        raise NotFoundError("is not a folder" if root.exists() else "there is nothing here", where=root)
    there = [(given.name, given)] if given.is_file() else [one for one in below(root) if is_protected(one[0])]
    check_names([name for name, _ in there], root)
    _check_none_records([file for _, file in there])
    identities = {file: Identity.of(file.stat()) for _, file in there}
    files = [ProtectedFile(name, identities[file].nbytes) for name, file in there]
    if not any(file.nbytes for file in files):
        raise NotFoundError("holds no file with content", where=given)
    elsewhere = _elsewhere(given, into)
    check_no_stale_sidecars(given)
    base = parity_folder(given)
    check_no_link(base)
    if not overwrite and ((base / NAME).exists() if is_remote(base) else os.path.lexists(base)):
        raise OutputError(
            "has parity already",
            where=base,
            hint="`ckpt repair --dry-run` compares it. Give --overwrite to write it anew.",
        )
    if given.is_file():
        if by != "file" or domains is not None or jump != 1:
            hint = "Leave out --by, --domains and --jump."
            raise InvalidArgumentError("a single file is divided into parts of its own", where=given, hint=hint)
        count = min(_PARTS * lose, MAX_BLOCKS - lose)
        groups: tuple[DomainGroup, ...] = (DomainGroup(parts_of(files[0], count), lose),)
        kind = "part"
    else:
        groups = groups_of(domains_of(files, by, domains), lose, jump)
        kind = "table" if domains is not None else by
    manifest = ParityManifest(groups, lose, kind, tuple(map(str, elsewhere)))
    name = given.name if given.is_file() else None
    folder = ProtectedFolder(root, places_of(base, elsewhere, lose), BlockHashes.empty(manifest), name)
    return ProtectPlan(folder, elsewhere, identities, overwrite)


def _check_none_records(files: Sequence[Path]) -> None:
    """Raise `LockedError` if a run records into one of the files: a repair would cut off what it wrote since."""
    folders = dict.fromkeys(file.parent for file in files if file.suffix == LOG)
    growing = next(filter(is_growing, folders), None)
    if growing is not None:
        raise LockedError(
            "a run is recording into this log, and parity would be of its beginning",
            where=growing,
            hint="End the run first, or give what has ended parity in the chain: `ckpt protect CHAIN --by state`.",
        )


def check_no_link(base: Path) -> None:
    """Raise `OutputError` if the folder for parity is a link: it would be replaced, and not what it leads to."""
    if not is_remote(base) and base.is_symlink():
        hint = "Remove the link, and name the folder that should have the parity: --into FOLDER."
        raise OutputError("is a link, through which no parity is written", where=base, hint=hint)


def _elsewhere(given: Path, into: Sequence[StrPath]) -> tuple[Path, ...]:
    """The folders that get parity instead of the one at the checkpoint. Raises as `protect`."""
    elsewhere = tuple(target_path(one).absolute() for one in into)
    if any(given.resolve() in (one.resolve(), *one.resolve().parents) for one in elsewhere):
        raise InvalidArgumentError(
            "parity cannot be kept in the folder that it protects", where=given, hint="Leave out --into."
        )
    return elsewhere


@checked
def protect(
    path: StrPath,
    lose: Parities = 2,
    *,
    by: str = "file",
    domains: LocalPath | None = None,
    jump: Count = 1,
    into: Sequence[StrPath] = (),
    overwrite: bool = False,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> Protection:
    """Write parity for all files below a folder, from which `repair` computes files or blocks that are lost.

    The files stay as they are, and whoever loads them does not read the parity. It lies in the folder `.ckpt-parity`.
    A single file is divided into parts, of which so many may be damaged; parity lies beside it.

    Args:
        path: The folder of a checkpoint of any format, of several, or of a chain; or a single file. A URL names one in
            a bucket: it is read from there, and its parity is put beside it.
        lose: How many domains may be lost: that many times the largest domain is written.
        by: What a domain is, which is lost as a whole: `file`, `folder` (the first one in the path), or `node:N` (the
            files of N ranks, by the ranks in their names).
        domains: A table with lines `DOMAIN PATTERN` instead: the first pattern that a file's name matches counts.
        jump: Divide the domains into so many groups, each of which may lose `lose` of them. Ranks of a group are `jump`
            apart, so that neighbours, which share a host, are in different groups. With `by="node:1"`, a domain is a
            rank.
        into: Folders or URLs that get the parities in turn, in place of the checkpoint's: on other disks or machines.
        overwrite: Replace parity that is there.

    Raises:
        OutputError: There is parity already, or it cannot be written.
        NotFoundError: There is no folder with files.
        UnsupportedError: A URL names a single object.
        CorruptError: A file changed meanwhile.
        LockedError: Another process protects or repairs the folder, or a run records into a log there.
    """
    plan = plan_protect(
        path,
        lose,
        by=by,
        domains=None if domains is None else as_path(domains),
        jump=jump,
        into=into,
        overwrite=overwrite,
    )
    return run_protect(plan, resources=resources, progress=progress)


def run_protect(
    plan: ProtectPlan,
    *,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
    is_locked: bool = False,
) -> Protection:
    """Do what was planned. `is_locked`: within `locked`. Raises as `protect`."""
    resources = resources or Resources.of_machine()
    root = plan.folder.root
    count_bytes = count_to(plan.folder.manifest.nbytes, progress)
    try:
        with ExitStack() as stack:
            if not is_locked:
                stack.enter_context(locked(plan.folder.base))
            work = _Work(plan, stack.enter_context(scratch_for(plan.folder.base, resources)))
            _take_back(plan, work)
            journal = _Journal(work)
            journal.open()
            with journal, interruptible(count_bytes) as count:
                _encode(work, journal, resources, count)
            _check_unchanged(plan)
            _publish(work)
    except OSError as error:
        if isinstance(error, CkptError):
            raise
        raise unwritable(error, root) from error
    return plan.summary


def _check_unchanged(plan: ProtectPlan) -> None:
    """Raise `CorruptError` or `IncompleteError` if a file is not the one that was read."""
    root = plan.folder.root
    if is_remote(root):  # its listing is that of the beginning
        now = listed_again(root)
        check_unchanged({now / path.relative_to(root): one for path, one in plan.identities.items()}, is_whole=True)
    else:
        check_unchanged(plan.identities, is_whole=True)


class _Work:
    """Where the folders with parity grow until they are published."""

    def __init__(self, plan: ProtectPlan, scratch: Path | None) -> None:
        """`scratch`: a folder for what is on its way to a store, if the protected folder is in one."""
        self.plan = plan
        own = plan.folder.base
        self.folder = own.with_name(own.name + PARTIAL) if scratch is None or not is_remote(own) else scratch / "own"
        """The one of the protected folder, which also has the journal."""
        names = dict.fromkeys(plan.elsewhere)
        self.elsewhere: dict[Path, Path] = {
            # Not in the scratch folder, so that it is there when an interrupted run goes on.
            base: self.folder / f"{_UPLOAD}{number}" if is_remote(base) else base.with_name(base.name + PARTIAL)
            for number, base in enumerate(names)
        }
        folders = tuple(self.elsewhere[base] for base in plan.elsewhere)
        places = places_of(self.folder, folders, plan.folder.manifest.parities)
        self.grown = replace(plan.folder, places=places)
        """The protected folder with the parities as they grow."""

    @property
    def folders(self) -> tuple[Path, ...]:
        """All folders that grow, that of the protected folder first."""
        return (self.folder, *self.elsewhere.values())


def _take_back(plan: ProtectPlan, work: _Work) -> None:
    """Take back what a run has published elsewhere that died before all was.

    Raises `OutputError` for what is not ours.
    """
    for base in plan.bases[:-1]:
        is_there = base.exists() if is_remote(base) else os.path.lexists(base)
        if not is_there or (base.is_dir() and not any(base.iterdir())) or _is_replaced(plan, base):
            continue
        if not any(_is_equal(plan, copy) for copy in manifest_copies([base])):
            raise OutputError("exists already", where=base, hint="Choose another folder for --into, or remove it.")
        if not is_remote(base):  # what is in a store is removed when it is written anew
            shutil.rmtree(work.elsewhere[base], ignore_errors=True)
            os.rename(base, work.elsewhere[base])


def _is_equal(plan: ProtectPlan, copy: Path) -> bool:
    """Whether a manifest is of the same files, domains and places."""
    try:
        return read(copy).manifest.header() == plan.folder.manifest.header()
    except (OSError, CkptError):
        return False


def _is_replaced(plan: ProtectPlan, base: Path) -> bool:
    """Whether a folder elsewhere has the parity that will be replaced: it stays until the new one is whole."""
    if not plan.overwrite:
        return False
    try:
        return str(base) in read(plan.folder.base / NAME).manifest.elsewhere and (base / NAME).is_file()
    except (OSError, CkptError):
        return False


class _Journal:
    """The stripes that are on the disk with their hashes, in the order of the manifest."""

    def __init__(self, work: _Work) -> None:
        self._folder, self._work, self._plan = work.folder, work, work.plan
        self._hashes = work.plan.folder.hashes
        self._stripes = list(work.plan.folder.stripes())
        self.done = 0
        """How many stripes are noted."""
        self._descriptor = -1

    def open(self) -> None:
        """Continue what an equal run left, or begin anew."""
        note = json.dumps(
            [self._plan.folder.manifest.header().decode(), [asdict(one) for one in self._plan.identities.values()]]
        ).encode()
        folders = self._work.folders
        if not (self._is_equal(note) and all(folder.is_dir() for folder in folders)):
            for folder in folders:
                shutil.rmtree(folder, ignore_errors=True)
            for folder in folders:
                folder.parent.mkdir(parents=True, exist_ok=True)
                make_own(folder)
            for place in self._work.grown.places:
                place.mkdir()
            (self._folder / _JOURNAL).touch()
            write_whole(self._folder / PLAN, note)
        self._descriptor = os.open(self._folder / _JOURNAL, os.O_RDWR | os.O_CLOEXEC)
        self._read()

    def _is_equal(self, note: bytes) -> bool:
        try:
            return (self._folder / PLAN).read_bytes() == note
        except OSError:
            return False

    def _read(self) -> None:
        """Take over the records that are whole. One that is torn, and what follows, is cut off."""
        data, at = (self._folder / _JOURNAL).read_bytes(), 0
        while self.done < len(self._stripes):
            rows = self._rows(self.done)
            end = at + len(rows) * HASH_NBYTES
            record, digest = data[at:end], data[end : end + 8]
            if len(digest) < 8 or xxhash.xxh3_64_digest(record, seed=self.done) != digest:
                break
            self._hashes.table[rows] = np.frombuffer(record, np.uint8).reshape(-1, HASH_NBYTES)
            at, self.done = end + 8, self.done + 1
        os.ftruncate(self._descriptor, at)
        os.lseek(self._descriptor, at, os.SEEK_SET)

    def _rows(self, number: int) -> list[int]:
        """The rows of the hashes of a stripe."""
        group, stripe = self._stripes[number]
        return [self._hashes.row(group, at.column, stripe) for at in self._plan.folder.blocks_of(group, stripe)]

    def note(self, done: int) -> None:
        """Note the stripes up to a number, whose hashes are known and whose parities are on the disk."""
        records = bytearray()
        for number in range(self.done, done):
            record = self._hashes.table[self._rows(number)].tobytes()
            records += record + xxhash.xxh3_64_digest(record, seed=number)
        view = memoryview(records)
        while view:
            view = view[os.write(self._descriptor, view) :]
        os.fsync(self._descriptor)
        self.done = done

    def __enter__(self) -> "_Journal":
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)


def _encode(work: _Work, journal: _Journal, resources: Resources, count: Callable[[int], None]) -> None:
    """Compute and write the parities of all stripes that are not noted."""
    folder, parities = work.grown, work.grown.manifest.parities
    stripes = list(folder.stripes())
    starts = [bisect_left(stripes, (number, 0)) for number in range(len(folder.manifest.groups) + 1)]

    def data_nbytes(number: int) -> int:
        group, stripe = stripes[number]
        own = folder.manifest.groups[group]
        return sum(domain.block_nbytes(stripe) for domain in own.domains)

    for number in range(journal.done):
        count(data_nbytes(number))
    with (
        ThreadReaders(parities, work.plan.identities) as threads,
        ThreadPoolExecutor(resources.workers, "ckpt") as pool,
    ):
        for group, stop in enumerate(starts[1:]):
            if _carry(work, group):
                for number in range(max(journal.done, starts[group]), stop):
                    count(data_nbytes(number))
                journal.note(max(journal.done, stop))
                continue
            with _Outputs(folder, group) as outputs:

                def encode(number: int, outputs: _Outputs = outputs) -> int:
                    group, stripe = stripes[number]
                    sums = _encoded(work, group, stripe, threads)
                    outputs.write(folder.manifest.groups[group].starts[stripe], sums)
                    count(data_nbytes(number))
                    return number

                finished, first, waiting = set[int](), journal.done, 0
                for number in run_tasks(pool, encode, range(journal.done, stop), 2 * resources.workers):
                    finished.add(number)
                    waiting += data_nbytes(number)
                    while first in finished:
                        finished.remove(first)
                        first += 1
                    if waiting >= _JOURNAL_EVERY:
                        outputs.flush()
                        journal.note(first)
                        waiting = 0
                outputs.flush()
                journal.note(first)


def _carry(work: _Work, group: int) -> bool:
    """Take over the hashes of a group that has parity already, and its parities if no domain was added or removed.

    Returns whether nothing is left to do for it.
    """
    earlier, folder = work.plan.earlier, work.grown
    number = None if earlier is None else earlier.numbers[group]
    if earlier is None or number is None:
        return False
    own = folder.manifest.groups[group]
    data, columns = len(own.domains), earlier.columns(group, own)
    is_same = len(columns) == data
    for column in range(data + own.parities) if is_same else columns:
        for stripe in range(len(own.stripe_nbytes)):
            if own.block_nbytes(column, stripe):
                folder.hashes.note(group, column, stripe, earlier.folder.hashes.of(number, column, stripe))
    if is_same:
        for old, new in zip(earlier.folder.places, folder.places, strict=True):
            if not is_remote(old):
                _link(parity_file(old, number), parity_file(new, group))
            elif group != number:  # objects that keep their names stay
                _download(parity_file(old, number), parity_file(new, group))
    return is_same


def _download(old: Path, new: Path) -> None:
    """Copy an object to a file; one that is missing stays so, as in `_link`."""
    if not old.is_file():
        return
    block = np.empty(BLOCK_NBYTES, np.uint8)
    with Reader(check=False) as reader, new.open("wb") as file:
        for offset in range(0, nbytes := old.stat().st_size, BLOCK_NBYTES):
            part = block[: nbytes - offset]
            reader.read_into(old, offset, part.data)
            file.write(part.data)


def _link(old: Path, new: Path) -> None:
    """Give a file, if it is there, a second name: the first one goes with its folder. Copies it where links fail.

    One that is missing or damaged stays so: its hashes say it, and `repair` writes it again.
    """
    new.unlink(missing_ok=True)
    if not old.is_file():
        return
    try:
        os.link(old, new, follow_symlinks=False)
    except OSError:
        shutil.copyfile(old, new)


def _encoded(work: _Work, group: int, stripe: int, threads: ThreadReaders) -> Array:
    """The parities of a stripe, (m, n) uint8, from those that are there, or from all data.

    Raises `CorruptError` if data has another hash than when it was protected.
    """
    folder, earlier = work.grown, work.plan.earlier
    number = None if earlier is None else earlier.numbers[group]
    if earlier is None or number is None:
        return encode_stripe(folder, group, stripe, threads.reader, threads.buffers)
    own = folder.manifest.groups[group]
    stays = earlier.columns(group, own)
    sums = extend_stripe(folder, earlier.folder, (group, number, stripe), stays, threads.reader, threads.buffers)
    if sums is not None:
        return sums
    sums = encode_stripe(folder, group, stripe, threads.reader, threads.buffers)
    for column in stays:
        at = BlockAddress(group, column, stripe)
        if own.block_nbytes(column, stripe) and folder.hash(at) != earlier.folder.hashes.of(number, column, stripe):
            place = folder.place(at)
            raise CorruptError(
                f"byte {place.offset:,} and those after it are not what was protected",
                where=place.path,
                hint=f"Repair it first: ckpt repair {printable(str(folder.path))}",
            )
    return sums


class _Outputs:
    """The files with the parities of a group. Threads may share it."""

    def __init__(self, folder: ProtectedFolder, group: int) -> None:
        self._files: list[int] = []
        for place in folder.places:
            file = os.open(parity_file(place, group), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._files.append(file)
            os.ftruncate(file, folder.manifest.groups[group].parity_nbytes)

    def write(self, start: int, blocks: Array) -> None:
        """Write the parities of a stripe, (m, n) uint8, from byte `start` on."""
        for file, block in zip(self._files, blocks, strict=True):
            write_at(file, block.data, start)

    def flush(self) -> None:
        for file in self._files:
            os.fsync(file)

    def __enter__(self) -> "_Outputs":
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            os.close(file)


def _publish(work: _Work) -> None:
    """Write the copies of the manifest, and give all folders their names: last the one in the protected folder."""
    plan, own = work.plan, work.plan.folder.base
    data = plan.folder.hashes.to_bytes()
    for path in dict.fromkeys((*work.grown.places, *work.folders)):
        write_whole(path / NAME, data)
    for folder in work.folders:
        folder.chmod(0o755)
        flush_all(folder)
    for base, folder in work.elsewhere.items():
        if is_remote(base):
            upload(folder, base)
            continue
        with suppress(OSError):
            base.rmdir()  # an empty one
        give_name(folder, base, _is_replaced(plan, base))
    # Until here, an interrupted run goes on.
    is_replaced = not is_remote(own) and plan.overwrite and os.path.lexists(own)
    if not (is_replaced and plan.elsewhere):
        _remove_notes(work.folder)
    for folder in work.elsewhere.values():
        if folder.parent == work.folder:
            shutil.rmtree(folder)
    if is_remote(own) and plan.earlier is not None:
        upload_changed(work.folder, plan.folder)
    elif is_remote(own):
        upload(work.folder, own)
    else:
        flush(work.folder)
        give_name(work.folder, own, is_replaced)
        _remove_notes(own)  # `find_parity` knows by them that the state counts which parity elsewhere has already


def _remove_notes(folder: Path) -> None:
    """Remove what an interrupted run would need to go on."""
    for name in (PLAN, _JOURNAL):
        (folder / name).unlink(missing_ok=True)
