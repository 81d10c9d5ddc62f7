"""The right to write a target in a store: an object that its owner renews, and that others may take when it is not.

Whether it was renewed is decided by the clock of the store alone, so clocks of machines may differ. An owner that was
killed on this machine is known to be dead at once.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from ckpt.pipeline.lease_owner import LeaseOwner, owner_in
from ckpt_formats.core.errors import CkptError, LockedError, OutputError
from ckpt_formats.core.locking import unwritable
from ckpt_formats.stores.bucket import Bucket, Version

SECONDS = 60.0
"""An owner that has not renewed its lease for so long is taken for dead."""
_RENEWALS = 3
"""Renewals within that time."""
_ATTEMPTS = 10


class Lease:
    """A lease that this process has taken. A thread renews it."""

    def __init__(self, bucket: Bucket, key: str, owner: LeaseOwner, version: Version) -> None:
        self._bucket, self._key, self._owner, self._version = bucket, key, owner, version
        self._renewed = time.monotonic()
        self._is_lost = False
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="ckpt-lease", daemon=True)
        self._thread.start()

    @property
    def owner(self) -> str:
        """The id of this process as an owner."""
        return self._owner.id

    @property
    def as_owner(self) -> LeaseOwner:
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
        """Raise `LockedError` unless the store, too, says that this process may still write.

        It costs a request, and is for what no store makes conditional: to delete. The clock of this machine does not
        show for how long the machine itself was stopped.
        """
        self.check()
        if not has_lease(self._bucket, self._key, self.owner):
            raise self._locked()

    def _locked(self) -> LockedError:
        return LockedError(
            "another process may write here now: this one could not renew its lease in time",
            where=f"{self._bucket.url}/{self._key}",
            hint="Run the same command again. What was written is used, if nobody else has written the target.",
        )

    def _renew(self) -> None:
        while not self._released.wait(self._owner.seconds / _RENEWALS):
            # The lease runs from before the request, because the answer may come late.
            started = time.monotonic()
            try:
                self._version = self._bucket.replace(self._key, _body(self._owner), self._version)
            except FileExistsError:
                self._is_lost = True
                return
            except OSError:
                continue  # `check` notices if this lasts
            self._renewed = started

    def release(self) -> None:
        """Let others write. An error is none for the user: then the lease ends by itself."""
        self._released.set()
        self._thread.join()
        with suppress(OSError):
            there = self._bucket.read(self._key)
            if there is not None and owner_in(there[0]) == self._owner:
                self._bucket.delete([self._key])


@contextmanager
def hold_lease(bucket: Bucket, key: str, target: object, conditions: bool = True) -> Iterator[Lease]:
    """Within, this process alone may write the target. Raises `LockedError` if another one does, and `OutputError`.

    `conditions`: refuse a store that would let two processes have the lease.
    """
    try:
        lease = _take(bucket, key, target)
    except CkptError:
        raise
    except OSError as error:
        raise unwritable(error, Path(key)) from error
    try:
        if conditions:
            check_conditions(
                bucket,
                key,
                target,
                "Two writers could damage the target. If no other process writes it, give --no-lock.",
                lease.version,
                _body(lease.as_owner),
            )
        yield lease
    finally:
        lease.release()


def check_conditions(
    bucket: Bucket, key: str, target: object, hint: str, version: Version, data: bytes = b"again"
) -> None:
    """Refuse a store that ignores conditions, as the object `key` of this version shows, which is deleted then.

    Raises `OutputError`.
    """
    try:
        ignored = bucket.ignored_condition(key, version, data)
    except OSError as error:
        raise unwritable(error, Path(key)) from error
    if ignored is None:
        return
    with suppress(OSError):
        bucket.delete([key])
    raise OutputError(
        f"this store overwrites objects whatever the request's condition is: it ignores `{ignored}`",
        where=str(target),
        hint=hint,
    )


def has_lease(bucket: Bucket, key: str, owner: str) -> bool:
    """Whether the owner with this id has the lease, or nobody has taken it from him yet."""
    there = bucket.read(key)
    holder = None if there is None else owner_in(there[0])
    return holder is not None and holder.id == owner


def _take(bucket: Bucket, key: str, target: object) -> Lease:
    owner = LeaseOwner.of_this_process(SECONDS)
    for _ in range(_ATTEMPTS):
        with suppress(FileExistsError):
            return Lease(bucket, key, owner, bucket.create(key, _body(owner)))
        there = bucket.read(key)
        if there is None:
            continue  # it was released meanwhile
        data, version = there
        holder, left = owner_in(data), 0.0
        if holder is None or not holder.is_dead:
            left = _seconds_left(bucket, key, holder)
        if left > 0:
            raise _locked_by(target, holder, left)
        with suppress(FileExistsError):
            return Lease(bucket, key, owner, bucket.replace(key, _body(owner), version))
    raise _locked_by(target, None, SECONDS)


def _seconds_left(bucket: Bucket, key: str, holder: LeaseOwner | None) -> float:
    """How long a lease lasts yet, by the clock of the store."""
    there = bucket.head(key)
    if there is None:
        return 0.0
    lasts = SECONDS if holder is None else holder.seconds
    return there.modified + lasts - bucket.now(key.rpartition("/")[0])


def _locked_by(target: object, holder: LeaseOwner | None, left: float) -> LockedError:
    who = "" if holder is None else f" ({holder})"
    return LockedError(
        f"another process is writing this target{who}",
        where=str(target),
        hint=f"Wait for it to end. If it was killed, the target is free in {left:.0f} s.",
    )


def _body(owner: LeaseOwner) -> bytes:
    # Renewals must differ: a store may take equal bytes for the same version.
    return owner.to_json(renewal=uuid4().hex)
