"""A chain that is changed, wherever it is: this process alone changes it meanwhile.

    in a folder                                  in a store
    a lock on the file `chain.lock`              a lease on the object `.ckpt/lease`
    a member grows in a hidden folder beside     a member grows at its own place, with `.ckpt/` in it

In both, the list is replaced if it is still the one that was read, and what it does not name is a leftover.
"""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.pipeline.lease import Right, hold
from ckpt.pipeline.resources import Execution
from ckpt.pipeline.scratch import scratch_folder
from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import CkptError, IncompleteError, LockedError, OutputError, UnsupportedError
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.place import Place, Version
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.core.text import STAGED, printable
from ckpt_formats.registry.published import is_unfinished
from ckpt_formats.stores.location import listed_again, place_at
from ckpt_formats.universal.chain import chain_file, folder
from ckpt_formats.universal.chain.chain_file import ChainIndex

_LEASE = "lease"
_CHANGING = "changing this chain"
_POLL_SECONDS = 0.2


@dataclass
class ChainChange:
    """A chain that this process alone changes."""

    run: Path
    """The chain as it was when this process looked last."""
    place: Place
    right: Right
    chain: ChainIndex | None
    """The list; None if there is none yet."""
    version: Version | None
    """That of the list, which is replaced only if nobody else has replaced it."""
    resources: Execution
    """What the jobs may use that write members."""
    temporary: Path
    """A folder of the file system for values that are needed while the chain is changed."""
    _is_confirmed: bool = False
    """Whether the list is the one that this process has put."""

    def look(self) -> Path:
        """The chain with what was written since."""
        self.run = listed_again(self.run)
        return self.run

    def replace(self, chain: ChainIndex) -> None:
        """Replace the list. It stays when this returns."""
        data = chain_file.dump(chain)
        self._put(data)
        there = self.place.read(chain_file.NAME)
        if there is None or there[0] != data:
            raise OutputError(
                "the store has acknowledged the list of the chain, and then shows another one",
                where=self.run / chain_file.NAME,
                hint=f"Look which states there are (ckpt log {self.run}), then run the same command again.",
            )

    def add(self, chain: ChainIndex, name: str) -> None:
        """Replace the list by one that names a new folder. If that fails, the folder is removed.

        It stays if the list may name it all the same: an error may come after the list was put, and a request to which
        a store did not answer may have been served. It also stays if another process may write here now, perhaps the
        same folder: the next change removes what the list does not name.
        """
        try:
            self.replace(chain)
        except BaseException as error:
            is_certain = self.place.is_consistent or isinstance(error, LockedError)
            with suppress(LockedError):
                if is_certain and not self._may_name(name):
                    self.right.confirm()
                    self.place.remove([name], first=folder.MANIFEST)
            raise

    def _may_name(self, name: str) -> bool:
        """Whether the list that is there now names a folder, or cannot be read."""
        try:
            there = self.place.read(chain_file.NAME)
            chain = None if there is None else chain_file.parse(there[0], self.run / chain_file.NAME)
        except (CkptError, OSError):
            return True
        return chain is not None and name in {one.folder for one in chain.members}

    def confirm(self) -> None:
        """Raise `LockedError` unless the list is still the one that was read, as the place says to a condition.

        What is removed is removed on the word of the list, and a store may answer a read with an older one. So the same
        list is put again, if it is still the one that was read; an empty one, if there is none.
        """
        self.right.confirm()
        if not self._is_confirmed and not self.place.is_consistent:
            self._put(chain_file.dump(self.chain or ChainIndex(())))

    def _put(self, data: bytes) -> None:
        """Replace the list if it is still the one that this process has read or put."""
        self.right.check()
        try:
            self.version = self.place.replace(chain_file.NAME, data, self.version)
        except FileExistsError:
            raise LockedError(
                "another process has changed this chain meanwhile", where=self.run, hint="Run the same command again."
            ) from None
        self._is_confirmed = True

    def leftovers(self, chain: ChainIndex | None, continued: str | None = None) -> list[Path]:
        """What interrupted runs left, but for what a run has written of the member `continued`, which goes on."""
        left = folder.leftovers(self.run, chain, continued)
        goes_on = None if continued is None else self.run / continued
        return [path for path in left if path != goes_on or not is_unfinished(path)]

    def remove_leftovers(self, continued: str | None = None) -> tuple[Notice, ...]:
        """Remove the leftovers. Returns a note for each."""
        left = self.leftovers(self.chain, continued)
        if left:
            self.confirm()
            self.remove(left)
            self.look()
        names = [printable(path.relative_to(self.run).as_posix()) for path in left]
        return tuple(Notice(f"removed {name}, which an interrupted run left behind") for name in names)

    def remove(self, paths: Iterable[Path]) -> None:
        """Remove folders and files. What is left of a folder after a crash does not look like a checkpoint."""
        self.right.confirm()  # another process may have written under these names since, if this one was stopped
        self.place.remove([path.relative_to(self.run).as_posix() for path in paths], first=folder.MANIFEST)

    def remove_unneeded(self, paths: Sequence[Path]) -> tuple[Notice, ...]:
        """Remove what the list names no more. The chain is published: what cannot be removed is a note."""
        try:
            self.remove(paths)
        except OSError as error:
            names = tuple(printable(path.relative_to(self.run).as_posix()) for path in paths)
            return (Notice(f"no longer needed, and could not be removed ({error.strerror or error})", names),)
        return ()

    def truncate(self, path: Path, nbytes: int) -> None:
        """Remove the end of a file that the list says does not count, if the place can do so."""
        self.place.truncate(path.relative_to(self.run).as_posix(), nbytes)


@contextmanager
def change(
    run: Path, resources: Execution, create: bool = False, wait: float = 0.0, families: bool = False
) -> Iterator[ChainChange]:
    """Change the chain at a path; with `create`, one may begin there. `wait`: seconds to wait for another process.

    Raises `LockedError`, `NotFoundError` if there is no chain, `OutputError` if something else is there, and
    `UnsupportedError` for a family of models, unless the caller can change `families`, too.
    """
    place = place_at(run, resources.read_back)
    deadline = time.monotonic() + wait
    with ExitStack() as stack:
        while True:
            try:
                if place.local is None:
                    chain = stack.enter_context(_in_store(run, place, resources, create))
                else:
                    chain = stack.enter_context(_in_folder(run, place, resources, create))
                break
            except LockedError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_POLL_SECONDS)
                run = listed_again(run)
        if chain.chain is not None and chain.chain.is_family and not families:
            raise family_error(run)
        yield chain


@contextmanager
def _in_folder(run: Path, place: Place, resources: Execution, create: bool) -> Iterator[ChainChange]:
    if not create and not (run / chain_file.NAME).is_file():
        chain_file.read(run)  # raises the error that it is no chain
    created = folder.make(run) if create else False
    if not created and not (run / chain_file.NAME).is_file():
        folder.check_empty(run)
    is_locked = False
    try:
        with hold(place, folder.LOCK, run, resources.locks, _CHANGING) as right:
            is_locked = True
            place.remove_drafts(chain_file.NAME)
            chain, version = _read(run, place)
            try:
                yield ChainChange(run, place, right, chain, version, resources, run)
            finally:
                if created and os.listdir(run) == [folder.LOCK]:  # nothing was added
                    _remove_empty(run)
    except LockedError:
        raise  # whoever has the lock needs its file: without it, a third process would change the chain, too
    except OutputError:
        if created and not is_locked:
            _remove_empty(run)
        raise
    except CkptError:
        raise
    except OSError as error:
        raise unwritable(error, run) from error


def _remove_empty(run: Path) -> None:
    """Remove the folder of a chain that did not begin, unless another process begins one there."""
    with suppress(OSError):
        (run / folder.LOCK).unlink(missing_ok=True)
        run.rmdir()


@contextmanager
def _in_store(run: Path, place: Place, resources: Execution, create: bool) -> Iterator[ChainChange]:
    assert isinstance(run, StorePath)
    if not (run / chain_file.NAME).is_file():  # the list is read when nobody can replace it any more
        folder.peek(run) if create else chain_file.read(run)  # raise if something else is there, or nothing
    notes = place.within(STAGED)
    try:
        with (
            hold(notes, _LEASE, run, resources.locks, _CHANGING) as right,
            scratch_folder(resources.scratch) as temporary,
        ):
            run = listed_again(run)
            if is_unfinished(run):
                raise IncompleteError(
                    "not complete: a job that writes here was interrupted",
                    where=run,
                    hint=f"Run the same command again to continue, or remove what it wrote: ckpt clean {run}",
                )
            # Killed processes may have left what they requested from the store.
            with suppress(OSError):  # without the right to delete, they stay
                left = (run / STAGED).iterdir() if (run / STAGED).is_dir() else ()
                notes.delete([one.name for one in left if one.name != _LEASE])
            chain, version = _read(run, place)
            # The store keeps conditions: the jobs within need not try it again.
            changed = ChainChange(run, place, right, chain, version, replace(resources, locks=False), temporary)
            try:
                yield changed
            except BaseException:
                _forget_beginning(changed)
                raise
    except CkptError:
        raise
    except OSError as error:
        raise unwritable(error, run) from error


def _forget_beginning(changed: ChainChange) -> None:
    """Remove an empty list, which says only that there was none before."""
    with suppress(OSError):
        is_new = changed.version is not None and changed.chain is None
        there = changed.place.read(chain_file.NAME) if is_new else None
        if there is not None and chain_file.is_empty(there[0], changed.run / chain_file.NAME):
            changed.place.delete([chain_file.NAME])


def _read(run: Path, place: Place) -> tuple[ChainIndex | None, Version | None]:
    """The list, and the version by which it is replaced."""
    path = run / chain_file.NAME
    if not path.is_file():
        return None, None
    if path.stat().st_size > MAX_LIST:
        chain_file.read(run)  # raises
    read = place.read(chain_file.NAME)
    if read is None:
        return None, None
    # A process that was killed may have left an empty list in a store.
    is_empty = not place.is_consistent and chain_file.is_empty(read[0], path)
    chain = None if is_empty else chain_file.parse(read[0], path)
    if chain is not None:
        check_appendable(run, chain)
    return chain, read[1]


def family_error(run: Path) -> UnsupportedError:
    """The error of what can only be done to a chain of the states of a run."""
    return UnsupportedError(
        "the chain is a family of models, which has no steps",
        where=run,
        hint="Name another chain; `ckpt append FAMILY MODEL` adds a model.",
    )


def check_appendable(run: Path, chain: ChainIndex) -> None:
    """Raise `UnsupportedError` if states are published in a chain, which none but its publisher changes."""
    if chain.is_published:
        raise UnsupportedError(
            "a run publishes its weights in this chain, and only it and `ckpt publish` change the chain",
            where=run,
            hint="Name another chain.",
        )
