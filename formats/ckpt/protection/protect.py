"""Write parity for the files of a folder, which stay as they are.

The files are read once, stripe by stripe. Parity grows in a folder beside its own, and a journal there has the hashes
of the stripes that are on the disk, so that an interrupted run goes on. One rename publishes the whole.
"""

import os
import shutil
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ckpt.job import AnyProgress, count_to
from ckpt.pipeline import Resources
from ckpt.pipeline.executors import run_tasks
from ckpt.pipeline.interrupts import interruptible
from ckpt.protection.parity_draft import ParityDraft, ParityJournal
from ckpt.protection.protect_plan import Protection, ProtectPlan, plan_protect
from ckpt.protection.work_files import locked, scratch_for
from ckpt_codecs.base import Array
from ckpt_formats.core.arguments import Count, LocalPath, StrPath, as_path, checked
from ckpt_formats.core.errors import CkptError, CorruptError
from ckpt_formats.core.files import Reader, write_at
from ckpt_formats.core.identity import check_unchanged
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import printable
from ckpt_formats.parity.blocks import (
    BlockAddress,
    ProtectedFolder,
    ThreadReaders,
    encode_stripe,
    extend_stripe,
    parity_file,
)
from ckpt_formats.parity.code import Parities
from ckpt_formats.parity.manifest import BLOCK_NBYTES
from ckpt_formats.stores.location import listed_again

_JOURNAL_EVERY = 1 << 30
"""Bytes of data after which what was computed is flushed and noted."""


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
                stack.enter_context(locked(plan.folder.base, plan.folder.path if plan.folder.file else None))
            draft = ParityDraft(plan, stack.enter_context(scratch_for(plan.folder.base, resources)))
            draft.take_back()
            journal = ParityJournal(draft)
            journal.open()
            with journal, interruptible(count_bytes) as count:
                _encode(draft, journal, resources, count)
            _check_unchanged(plan)
            draft.publish()
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


def _encode(draft: ParityDraft, journal: ParityJournal, resources: Resources, count: Callable[[int], None]) -> None:
    """Compute and write the parities of all stripes that are not noted."""
    folder, parities = draft.grown, draft.grown.manifest.parities
    stripes = list(folder.stripes())
    starts = [bisect_left(stripes, (number, 0)) for number in range(len(folder.manifest.groups) + 1)]

    def data_nbytes(number: int) -> int:
        group, stripe = stripes[number]
        own = folder.manifest.groups[group]
        return sum(domain.block_nbytes(stripe) for domain in own.domains)

    for number in range(journal.done):
        count(data_nbytes(number))
    with (
        ThreadReaders(parities, draft.plan.identities) as threads,
        ThreadPoolExecutor(resources.workers, "ckpt") as pool,
    ):
        for group, stop in enumerate(starts[1:]):
            if _carry(draft, group):
                for number in range(max(journal.done, starts[group]), stop):
                    count(data_nbytes(number))
                journal.note(max(journal.done, stop))
                continue
            with _Outputs(folder, group) as outputs:

                def encode(number: int, outputs: _Outputs = outputs) -> int:
                    group, stripe = stripes[number]
                    sums = _encoded(draft, group, stripe, threads)
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


def _carry(draft: ParityDraft, group: int) -> bool:
    """Take over the hashes of a group that has parity already, and its parities if no domain was added or removed.

    Returns whether nothing is left to do for it.
    """
    earlier, folder = draft.plan.earlier, draft.grown
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


def _encoded(draft: ParityDraft, group: int, stripe: int, threads: ThreadReaders) -> Array:
    """The parities of a stripe, (m, n) uint8, from those that are there, or from all data.

    Raises `CorruptError` if data has another hash than when it was protected.
    """
    folder, earlier = draft.grown, draft.plan.earlier
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
