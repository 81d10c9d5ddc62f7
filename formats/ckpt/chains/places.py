"""Where a chain is changed: in a folder, or in a store. This process alone changes it meanwhile.

    in a folder                                  in a store
    a lock on the file `chain.lock`              a lease on the object `.ckpt/lease`
    the list is replaced by a rename             the list is replaced if it is still that which was read
    a member grows in a hidden folder beside     a member grows at its own place, with `.ckpt/` in it

What the list does not name is a leftover, in both.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt.pipeline import Execution
from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import CkptError, IncompleteError, LockedError, OutputError
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.core.text import STAGED, printable
from ckpt_formats.registry.published import is_unfinished
from ckpt_formats.stores.location import listed_again
from ckpt_formats.universal.chain import file, folder
from ckpt_formats.universal.chain.file import ChainIndex

if TYPE_CHECKING:
    from ckpt.pipeline.lease import Lease
    from ckpt_formats.stores.bucket import Bucket, Version

_LEASE = "lease"


class ChainPlace(ABC):
    """A chain that this process alone changes."""

    run: Path
    """The chain as it was when somebody looked last."""
    chain: ChainIndex | None
    """The list; None if there is none yet."""
    resources: Execution
    """What the jobs may use that write members."""

    @property
    @abstractmethod
    def temporary(self) -> Path:
        """A folder of the file system for values that are needed while the chain is changed."""

    @abstractmethod
    def look(self) -> Path:
        """The chain with what was written since."""

    @abstractmethod
    def replace(self, chain: ChainIndex) -> None:
        """Replace the list. It stays when this returns."""

    @abstractmethod
    def leftovers(self, chain: ChainIndex | None, continued: str | None = None) -> list[Path]:
        """What interrupted runs left, but for what a run has written of the member `continued`, which goes on."""

    @abstractmethod
    def remove(self, paths: Iterable[Path]) -> None:
        """Remove folders and files. What is left of a folder after a crash does not look like a checkpoint."""

    def remove_unneeded(self, paths: Sequence[Path]) -> tuple[Notice, ...]:
        """Remove what the list names no more. The chain is published: what cannot be removed is a note."""
        try:
            self.remove(paths)
        except OSError as error:
            names = tuple(printable(path.relative_to(self.run).as_posix()) for path in paths)
            return (Notice(f"not needed any more, and could not be removed ({error.strerror or error})", names),)
        return ()

    @abstractmethod
    def truncate(self, path: Path, nbytes: int) -> None:
        """Remove the end of a file that the list says does not count, if the place can do so."""

    def remove_leftovers(self, continued: str | None = None) -> tuple[Notice, ...]:
        """Remove the leftovers. Returns a note for each."""
        left = self.leftovers(self.chain, continued)
        if left:
            self.remove(left)
            self.look()
        return _removed(self.run, left)


def _removed(run: Path, leftovers: Iterable[Path]) -> tuple[Notice, ...]:
    names = [printable(path.relative_to(run).as_posix()) for path in leftovers]
    return tuple(Notice(f"removed {name}, which an interrupted run left behind") for name in names)


@dataclass
class FolderPlace(ChainPlace):
    """A chain in a folder, whose lock this process holds."""

    run: Path
    chain: ChainIndex | None
    resources: Execution

    @property
    def temporary(self) -> Path:
        return self.run

    def look(self) -> Path:
        return self.run

    def replace(self, chain: ChainIndex) -> None:
        folder.replace(self.run, chain)

    def leftovers(self, chain: ChainIndex | None, continued: str | None = None) -> list[Path]:
        return folder.leftovers(self.run, chain, continued)

    def remove(self, paths: Iterable[Path]) -> None:
        folder.remove([path for path in paths if path.exists() or path.is_symlink()])

    def truncate(self, path: Path, nbytes: int) -> None:
        os.truncate(path, nbytes)


@dataclass
class StorePlace(ChainPlace):
    """A chain in a store, whose lease this process holds."""

    run: StorePath
    chain: ChainIndex | None
    resources: Execution
    bucket: "Bucket"
    lease: "Lease"
    scratch: Path
    version: "Version | None"
    """That of the list, which is replaced only if nobody else has replaced it."""
    _is_confirmed: bool = False
    """Whether the list is the one that this process has put."""

    @property
    def temporary(self) -> Path:
        return self.scratch

    def look(self) -> Path:
        self.run = _listed(self.run)
        return self.run

    def replace(self, chain: ChainIndex) -> None:
        data = file.dump(chain)
        self._put(data)
        there = self.bucket.read(self._list_key)
        if there is None or there[0] != data:
            raise OutputError(
                "the store has acknowledged the list of the chain, and then shows another one",
                where=self.run / file.NAME,
                hint=f"Look which states there are (ckpt log {self.run}), then run the same command again.",
            )

    def confirm(self) -> None:
        """Raise `LockedError` unless the list is still the one that was read, as the store says to a condition.

        What is removed is removed on the word of the list, and a store may answer a read with an older one. So the same
        list is put again, if it is still the one that was read; an empty one, if there is none.
        """
        if not self._is_confirmed:
            self._put(file.dump(self.chain or ChainIndex(())))

    def _put(self, data: bytes) -> None:
        """Replace the list if it is still the one that this process has read or put."""
        self.lease.check()
        try:
            if self.version is None:
                self.version = self.bucket.create(self._list_key, data)
            else:
                self.version = self.bucket.replace(self._list_key, data, self.version)
        except FileExistsError:
            raise LockedError(
                "another process has changed this chain meanwhile", where=self.run, hint="Run the same command again."
            ) from None
        self._is_confirmed = True

    @property
    def _list_key(self) -> str:
        return (self.run / file.NAME).key

    def remove_leftovers(self, continued: str | None = None) -> tuple[Notice, ...]:
        if self.leftovers(self.chain, continued):
            self.confirm()
        return super().remove_leftovers(continued)

    def leftovers(self, chain: ChainIndex | None, continued: str | None = None) -> list[Path]:
        left = folder.leftovers(self.run, chain)
        goes_on = None if continued is None else self.run / continued
        return [path for path in left if path != goes_on or not is_unfinished(path)]

    def forget_beginning(self) -> None:
        """Remove an empty list, which says only that there was none before."""
        with suppress(OSError):
            there = None if self.version is None or self.chain is not None else self.bucket.read(self._list_key)
            if there is not None and file.is_empty(there[0], self.run / file.NAME):
                self.bucket.delete([self._list_key])

    def remove(self, paths: Iterable[Path]) -> None:
        keys = [key for path in paths for key in self._keys(path)]
        manifests = {key for key in keys if key.rpartition("/")[2] == folder.MANIFEST}
        self.lease.check()
        self.bucket.delete(manifests)
        self.bucket.delete(set(keys) - manifests)

    def truncate(self, path: Path, nbytes: int) -> None:
        """Nothing: an object can only be written again."""

    def _keys(self, path: Path) -> list[str]:
        """Those of a file, or of all objects in a folder."""
        assert isinstance(path, StorePath)
        return [path.key] if path.is_file() else [*self.bucket.list(path.key)] if path.is_dir() else []


@contextmanager
def changed(run: Path, resources: Execution, create: bool = False) -> Iterator[ChainPlace]:
    """Within, this process alone changes the chain at a path; with `create`, one may begin there.

    Raises `LockedError`, `NotFoundError` if there is no chain, `OutputError` if something else is there.
    """
    if isinstance(run, StorePath):
        with _in_store(run, resources, create) as place:
            yield place
        return
    with folder.locked(run, create, resources.locks) as chain:
        yield FolderPlace(run, chain, resources)


@contextmanager
def _in_store(run: StorePath, resources: Execution, create: bool) -> Iterator[StorePlace]:
    from ckpt.pipeline.lease import hold_lease
    from ckpt.pipeline.scratch import scratch_folder
    from ckpt_formats.stores.bucket import Bucket

    if not run.key:
        raise OutputError("is a bucket", where=run, hint=f"Name a chain in it, such as {run}/run.chain.")
    if not (run / file.NAME).is_file():  # the list is read when nobody can replace it any more
        folder.peek(run) if create else file.read(run)  # raise if something else is there, or nothing
    bucket, staged = Bucket(run.store.url, resources.read_back), (run / STAGED).key
    try:
        key = f"{staged}/{_LEASE}"
        with hold_lease(bucket, key, run, resources.locks) as lease, scratch_folder(resources.scratch) as scratch:
            now = _listed(run)
            if is_unfinished(now):
                raise IncompleteError(
                    "not complete: a job that writes here was interrupted",
                    where=run,
                    hint=f"Run the same command again to continue, or remove what it wrote: ckpt clean {run}",
                )
            # Killed processes may have left what they requested from the store.
            stale = (
                (one.key for one in (now / STAGED).iterdir() if one.name != _LEASE) if (now / STAGED).is_dir() else ()
            )
            with suppress(OSError):  # without the right to delete, they stay
                bucket.delete(stale)
            chain, version = _read(now, bucket) if (now / file.NAME).is_file() else (None, None)
            # The store keeps conditions: the jobs within need not try it again.
            place = StorePlace(now, chain, replace(resources, locks=False), bucket, lease, scratch, version)
            try:
                yield place
            except BaseException:
                place.forget_beginning()
                raise
    except CkptError:
        raise
    except OSError as error:
        raise unwritable(error, run) from error


def _read(run: StorePath, bucket: "Bucket") -> "tuple[ChainIndex | None, Version | None]":
    """The list, and the version by which it is replaced."""
    path = run / file.NAME
    if path.stat().st_size > MAX_LIST:
        file.read(run)  # raises
    read = bucket.read(path.key)
    if read is None:
        return None, None
    # A process that was killed may have left an empty list.
    return (None if file.is_empty(read[0], path) else file.parse(read[0], path)), read[1]


def _listed(path: StorePath) -> StorePath:
    now = listed_again(path)
    assert isinstance(now, StorePath)
    return now
