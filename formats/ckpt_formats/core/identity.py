"""Is a file still the one that was opened first?

A checkpoint is read for minutes, from many threads, and by path: a file may be
written again, replaced or removed meanwhile, and what is read would be half of
one and half of another. So the identity of each file is recorded when it is
first opened, and compared whenever it is opened again and before a result is
believed.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ckpt_formats.core.errors import CkptError, Corrupt, Incomplete

T = TypeVar("T")
R = TypeVar("R")

_THREADS = 8
"""That open files at a time: on a shared file system, opening is waiting."""
_HINT = "Read it when nobody writes it any more."


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells a file from another, and from itself after it was written again."""

    device: int
    inode: int
    nbytes: int
    mtime_ns: int

    @classmethod
    def of(cls, result: os.stat_result) -> "Identity":
        return cls(result.st_dev, result.st_ino, result.st_size, result.st_mtime_ns)


Identities = Mapping[Path, Identity]

_RECORDS: ContextVar[tuple[dict[Path, Identity], ...]] = ContextVar("records", default=())


@contextmanager
def recording() -> Iterator[dict[Path, Identity]]:
    """Within, the identity of every file that is opened, as it was when it was opened first."""
    record: dict[Path, Identity] = {}
    token = _RECORDS.set((*_RECORDS.get(), record))
    try:
        yield record
    finally:
        _RECORDS.reset(token)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Within, nothing is recorded: for files that a run writes again while its checkpoints stay, such as `latest`."""
    token = _RECORDS.set(())
    try:
        yield
    finally:
        _RECORDS.reset(token)


def in_threads(call: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """`call` of each item, in their order; files that it opens are recorded as if no other thread had opened them."""
    waiting = [(copy_context(), item) for item in items]
    with ThreadPoolExecutor(_THREADS) as pool:
        return list(pool.map(lambda task: task[0].run(call, task[1]), waiting))


def note(path: Path, result: os.stat_result, known: Identities) -> None:
    """Record a file that was opened. Raises `Corrupt` if it is not the one that was opened, or is `known`, before."""
    now = Identity.of(result)
    if known.get(path, now) != now or any(record.setdefault(path, now) != now for record in _RECORDS.get()):
        raise _changed(path)


def changes(identities: Identities) -> Iterator[CkptError]:
    """An error for each file that is no longer the one that was opened: `Corrupt`, or `Incomplete` if it is gone."""
    for path, before in identities.items():
        try:
            now = Identity.of(path.stat())
        except OSError as error:
            yield Incomplete(f"was there at first, and is gone: {error.strerror}", where=path, hint=_HINT)
            continue
        if now != before:
            yield _changed(path)


def check_unchanged(identities: Identities) -> None:
    """Raises the first of `changes`, which tells how many there are."""
    errors = list(changes(identities))
    if errors:
        if len(errors) > 1:
            errors[0].what += f" (and {len(errors) - 1:,} more files)"
        raise errors[0]


def _changed(path: Path) -> Corrupt:
    return Corrupt("was changed or replaced while it was read", where=path, hint=_HINT)
