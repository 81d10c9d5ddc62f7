"""The right to write in a place: an object that its owner renews, and that others may take when it is not.

Whether it was renewed is decided by the clock of the place alone, so clocks of machines may differ. An owner that was
killed on this machine is known to be dead at once.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from uuid import uuid4

from ckpt.pipeline.lease_owner import LeaseOwner, owner_in
from ckpt_formats.core.errors import CkptError, LockedError, OutputError
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.place import Place, Version

SECONDS = 60.0
"""An owner that has not renewed its lease for so long is taken for dead."""
_RENEWALS = 3
"""Renewals within that time."""
_ATTEMPTS = 10


class Right(Protocol):
    """The exclusive right to write in a place: a lease, or a lock of the file system."""

    def check(self) -> None:
        """Raise `LockedError` unless this process may still write."""

    def confirm(self) -> None:
        """As `check`, and as the place itself sees it: for deletions, which no store makes conditional.

        It may cost a request. The clock of this machine does not show for how long the machine itself was stopped.
        """


class _Lock:
    """A lock that the file system holds until this process ends."""

    def check(self) -> None:
        pass

    def confirm(self) -> None:
        pass


class Lease:
    """A lease that this process has taken. A thread renews it."""

    def __init__(self, place: Place, key: str, owner: LeaseOwner, version: Version, began: float) -> None:
        """`began`: `time.monotonic` before the request that took it, whose answer may have come late."""
        self._place, self._key, self._owner, self._version = place, key, owner, version
        self._renewed = began
        self._is_lost = False
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="ckpt-lease", daemon=True)
        self._thread.start()

    @property
    def owner(self) -> LeaseOwner:
        """This process as an owner."""
        return self._owner

    @property
    def version(self) -> Version:
        """That of the lease since this process has renewed it last."""
        return self._version

    def check(self) -> None:
        """Raise `LockedError` unless this process may still write."""
        if self._is_lost or time.monotonic() - self._renewed > self._owner.seconds:
            raise self._locked()

    def confirm(self) -> None:
        """Raise `LockedError` unless the place, too, says that this process may still write."""
        self.check()
        if owner_of(self._place, self._key) != self._owner:
            raise self._locked()

    def _locked(self) -> LockedError:
        return LockedError(
            "another process may write here now: this one could not renew its lease in time",
            where=self._place.where(self._key),
            hint="Run the same command again. What was written is used, if nobody else has written the target.",
        )

    def _renew(self) -> None:
        while not self._released.wait(self._owner.seconds / _RENEWALS):
            started = time.monotonic()  # the answer may come late
            try:
                self._version = self._place.renew(self._key, _body(self._owner), self._version)
            except FileExistsError:
                self._is_lost = True
                return
            except OSError:
                continue  # `check` notices if this lasts
            self._renewed = started

    def release(self) -> None:
        """Let others write. An error is none for the user: then the lease ends by itself.

        It also does so if it has ended already: another process may take it at the moment when it would be deleted.
        """
        self._released.set()
        self._thread.join()
        with suppress(OSError, CkptError):
            self.confirm()
            self._place.delete([self._key])


@dataclass(frozen=True)
class Busy:
    """Another process has the lease."""

    holder: LeaseOwner | None
    """None if the lease names none."""
    seconds: float = SECONDS
    """How long the lease lasts yet, unless it is renewed."""

    def __str__(self) -> str:
        return "another process" if self.holder is None else str(self.holder)


def acquire(place: Place, key: str) -> Lease | Busy:
    """Take the lease `key` of a place, if no living process has it. Does not wait."""
    owner = LeaseOwner.of_this_process(SECONDS)
    for _ in range(_ATTEMPTS):
        began = time.monotonic()
        with suppress(FileExistsError):
            return Lease(place, key, owner, place.create(key, _body(owner)), began)
        there = place.read(key)
        if there is None:
            continue  # it was released meanwhile
        data, version = there
        holder, left = owner_in(data), 0.0
        if holder is None or not holder.is_dead:
            left = _seconds_left(place, key, holder)
        if left > 0:
            return Busy(holder, left)
        began = time.monotonic()
        with suppress(FileExistsError):
            return Lease(place, key, owner, place.replace_stale(key, _body(owner), version), began)
    return Busy(None)


@contextmanager
def hold(
    place: Place, key: str, target: object, conditions: bool = True, purpose: str = "writing this target"
) -> Iterator[Right]:
    """Hold the exclusive right to write the target: a lock on the file `key`, or a lease of that name in a store.

    `purpose`: what another process that holds it does, for messages. `conditions`: refuse a file system that cannot
    lock, or a store that would let two processes have the lease. Raises `LockedError` if another process holds it, and
    `OutputError`.
    """
    error = LockedError(f"another process is {purpose}", where=str(target), hint="Wait for it to end.")
    with place.lock(key, error, conditions) as is_locked:
        if is_locked:
            yield _Lock()
            return
        try:
            lease = acquire(place, key)
        except CkptError:
            raise
        except OSError as error:
            raise unwritable(error, Path(key)) from error
        if isinstance(lease, Busy):
            raise _locked_by(target, lease, purpose)
        try:
            if conditions:
                check_conditions(
                    place,
                    key,
                    target,
                    "Two writers could damage the target. If no other process writes it, give --no-lock.",
                    lease.version,
                    _body(lease.owner),
                )
            yield lease
        finally:
            lease.release()


def check_conditions(
    place: Place, key: str, target: object, hint: str, version: Version, data: bytes = b"again"
) -> None:
    """Refuse a store that ignores conditions, as the object `key` of this version shows, which is deleted then.

    Raises `OutputError`.
    """
    try:
        ignored = place.ignored_condition(key, version, data)
    except OSError as error:
        raise unwritable(error, Path(key)) from error
    if ignored is None:
        return
    with suppress(OSError):
        place.delete([key])
    raise OutputError(
        f"this store overwrites objects whatever the request's condition is: it ignores `{ignored}`",
        where=str(target),
        hint=hint,
    )


def owner_of(place: Place, key: str) -> LeaseOwner | None:
    """The owner that a lease names; None if there is none."""
    there = place.read(key)
    return None if there is None else owner_in(there[0])


def _seconds_left(place: Place, key: str, holder: LeaseOwner | None) -> float:
    """How long a lease lasts yet, by the clock of the place."""
    there = place.head(key)
    if there is None:
        return 0.0
    lasts = SECONDS if holder is None else holder.seconds
    return there.modified + lasts - place.now()


def _locked_by(target: object, busy: Busy, purpose: str) -> LockedError:
    who = "" if busy.holder is None else f" ({busy.holder})"
    return LockedError(
        f"another process is {purpose}{who}",
        where=str(target),
        hint=f"Wait for it to end. If it was killed, this place is free in {busy.seconds:.0f} s.",
    )


def _body(owner: LeaseOwner) -> bytes:
    # Renewals must differ: a store may take equal bytes for the same version.
    return owner.to_json(renewal=uuid4().hex)
