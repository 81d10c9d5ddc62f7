"""A lease in a shared folder: one process at a time, and another one when it has died. File systems need no locks.

A lease is a file that its holder touches every ten seconds. If it has not been touched for a minute, by the clock of
the file system, its holder is dead. A holder that was only stopped for so long may believe that it still has the lease:
what is done under it must do no harm twice.
"""

import os
import threading
from contextlib import suppress
from pathlib import Path

from ckpt.pipeline.lease_owner import LeaseOwner, owner_in
from ckpt_formats.core.own_folder import create_own

_TOUCH_EVERY = 10.0
_LASTS = 60.0


class FileLease:
    """The lease at a path, which this process may acquire once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._owner = LeaseOwner.of_this_process(_LASTS)
        self._released = threading.Event()

    def acquire(self) -> str | None:
        """None if this process has the lease now, else who has it: a part of a sentence. Does not wait."""
        draft = self._path.with_name(f"{self._path.name}-{self._owner.id}")
        with os.fdopen(create_own(draft), "wb") as file:
            file.write(self._owner.to_json())
        try:
            for _ in range(2):
                if _link_new(draft, self._path):
                    threading.Thread(target=self._touch, name="ckpt-lease", daemon=True).start()
                    return None
                data = _read(self._path)
                if data is None:
                    continue  # it was released meanwhile
                holder = owner_in(data)
                if not self._is_stale(holder, draft):
                    return "another process" if holder is None else str(holder)
                self._remove_stale(data)
            return "another process"
        finally:
            draft.unlink(missing_ok=True)

    def release(self) -> None:
        """Let others have it."""
        self._released.set()
        if owner_in(_read(self._path) or b"") == self._owner:
            self._path.unlink(missing_ok=True)

    def _touch(self) -> None:
        while not self._released.wait(_TOUCH_EVERY):
            with suppress(OSError):
                os.utime(self._path)

    def _is_stale(self, holder: LeaseOwner | None, draft: Path) -> bool:
        """Whether the holder is dead. `draft` was just written, so its time is the file system's clock."""
        if holder is not None and holder.is_dead:
            return True
        with suppress(OSError):
            return draft.stat().st_mtime - self._path.stat().st_mtime > _LASTS
        return False

    def _remove_stale(self, stale: bytes) -> None:
        """Remove the lease of a dead holder, unless another process has just done so and has it now."""
        aside = self._path.with_name(f"{self._path.name}-{self._owner.id}.stale")
        with suppress(OSError):
            os.rename(self._path, aside)
            if _read(aside) != stale:
                _link_new(aside, self._path)
        aside.unlink(missing_ok=True)


def _read(path: Path) -> bytes | None:
    """The content of a lease; None if there is none, and nothing of one that cannot be read."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError:
        return b""


def _link_new(draft: Path, path: Path) -> bool:
    """Give a file a second name, which nothing has yet; False if something has it."""
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    except OSError:  # a file system without links
        try:
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return False
        with os.fdopen(file, "w") as stream:
            stream.write(draft.read_text())
    return True
