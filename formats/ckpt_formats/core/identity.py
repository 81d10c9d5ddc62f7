"""Check that files do not change while they are read.

A checkpoint is read for minutes, from many threads, and by path. If a file is
written again, replaced or removed meanwhile, what is read is a mixture of two
states. So the identity of each file is recorded when it is first opened, and
compared when it is opened again and before a result is used.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError

T = TypeVar("T")
R = TypeVar("R")

_THREADS = 8
"""How many threads open files at once. On a shared file system, to open a file is mostly to wait."""
_SHARES = 4
"""So many shares of the files for each thread: a task for each small file would take as long as to open it."""
_HINT = "Read it when no process writes it any longer."
LOG = ".ckg"
"""The suffix of logs, to which a run appends while others read its earlier steps. Each record has its checksum."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What differs between two files, and between a file and the same file written again."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int
    records: int | None = field(default=None, compare=False)
    """Of a log: a hash of all its records that are read, which are the same when it has grown; None: not known."""

    @property
    def content(self) -> str:
        """What another process has of it, too, if it reads the same: of a log its records, else length and time."""
        return f"{self.nbytes} {self.mtime_ns}" if self.records is None else str(self.records)

    @classmethod
    def of(cls, result: os.stat_result) -> "Identity":
        return cls(result.st_dev, result.st_ino, result.st_size, result.st_mtime_ns)


Identities = Mapping[Path, Identity]

_RECORDS: ContextVar[tuple[dict[Path, Identity], ...]] = ContextVar("records", default=())


@contextmanager
def recording() -> Iterator[dict[Path, Identity]]:
    """Within, record the identity of every file that is opened, at its first opening. Gives the record, by path."""
    record: dict[Path, Identity] = {}
    token = _RECORDS.set((*_RECORDS.get(), record))
    try:
        yield record
    finally:
        _RECORDS.reset(token)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Within, record nothing: for files that a run writes again while its checkpoints stay, such as `latest`."""
    token = _RECORDS.set(())
    try:
        yield
    finally:
        _RECORDS.reset(token)


def in_threads(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """The results of `call` for each item, in their order. Files that the threads open are recorded in this context."""
    waiting = list(items)
    if len(waiting) < 2:
        return [copy_context().run(call, item) for item in waiting]
    from concurrent.futures import ThreadPoolExecutor  # a single file needs no threads

    size = -(-len(waiting) // (_THREADS * _SHARES))
    shares = [(copy_context(), waiting[at : at + size]) for at in range(0, len(waiting), size)]
    with ThreadPoolExecutor(_THREADS) as pool:
        results = pool.map(lambda share: share[0].run(lambda: [call(item) for item in share[1]]), shares)
        return [result for of_share in results for result in of_share]


def note(path: Path, result: os.stat_result, known: Identities) -> None:
    """Record a file that was opened.

    Raises `CorruptError` if it is not the same as in `known`, or as when first opened.
    """
    now = Identity.of(result)
    befores = (known.get(path, now), *(record.setdefault(path, now) for record in _RECORDS.get()))
    if not all(is_same(path, before, now) for before in befores):
        raise _changed(path)


def note_records(path: Path, digest: int) -> None:
    """Record which part of a log is read: a hash of its records. Raises `OSError` if the file is missing."""
    for record in _RECORDS.get():
        record[path] = replace(record.get(path) or Identity.of(path.stat()), records=digest)


def joined(*identities: Identities) -> dict[Path, Identity]:
    """The identities of the files of several checkpoints: of a log of which they read other records, both count."""
    files: dict[Path, Identity] = {}
    for path, one in (item for some in identities for item in some.items()):
        before = files.setdefault(path, one)
        if before.records != one.records:
            import hashlib  # every command imports this module, and few jobs read two states of one log

            digest = hashlib.blake2b(f"{before.content}; {one.content}".encode(), digest_size=8).digest()
            one = replace(one, records=int.from_bytes(digest, "little"))
        files[path] = one
    return files


def changes(identities: Identities, is_whole: bool = False) -> Iterator[CkptError]:
    """An error for each file that is not the one that was opened: `CorruptError`, or `IncompleteError` if it is
    missing.

    `is_whole`: whole files were read, of logs, too, which may not have grown.
    """
    for path, before in identities.items():
        try:
            now = Identity.of(path.stat())
        except OSError as error:
            yield IncompleteError(f"was removed while it was read: {error.strerror}", where=path, hint=_HINT)
            continue
        if now != before if is_whole else not is_same(path, before, now):
            yield _changed(path)


def check_unchanged(identities: Identities, is_whole: bool = False) -> None:
    """Raises the first of `changes`. Its message has their number."""
    errors = list(changes(identities, is_whole))
    if errors:
        if len(errors) > 1:
            errors[0].what += f" (and {len(errors) - 1:,} more files)"
        raise errors[0]


def is_same(path: Path, before: Identity, now: Identity) -> bool:
    """Whether a file is the one that it was: a log may have grown."""
    if now == before:
        return True
    has_grown = (now.device, now.inode) == (before.device, before.inode) and now.nbytes > before.nbytes
    return has_grown and path.suffix == LOG


def _changed(path: Path) -> CorruptError:
    return CorruptError("was changed or replaced while it was read", where=path, hint=_HINT)
