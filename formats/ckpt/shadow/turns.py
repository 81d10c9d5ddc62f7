"""Who has the state in memory: one thread that changes it, or threads that read it between two steps."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

JOIN_SECONDS = 5.0
"""For how long readers may join others that read already. Then they wait, or the writer would never write."""


class Turns:
    """A lock for one writer or several readers."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers, self._waiting_writers, self._writes = 0, 0, False
        self._reading_since = 0.0

    @contextmanager
    def reading(self, seconds: float | None = None) -> Iterator[bool]:
        """Within, nobody writes. Gives False if others wrote for all of `seconds`; None: wait without limit."""
        with self._changed:
            if entered := self._changed.wait_for(self._may_read, seconds):
                if not self._readers:
                    self._reading_since = time.monotonic()
                self._readers += 1
        try:
            yield entered
        finally:
            if entered:
                with self._changed:
                    self._readers -= 1
                    self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within, nobody reads."""
        with self._changed:
            self._waiting_writers += 1
            try:
                self._changed.wait_for(lambda: not self._writes and not self._readers)
                self._writes = True
            finally:
                self._waiting_writers -= 1
        try:
            yield
        finally:
            with self._changed:
                self._writes = False
                self._changed.notify_all()

    def _may_read(self) -> bool:
        if self._writes:
            return False
        if not self._waiting_writers:
            return True
        return self._readers > 0 and time.monotonic() - self._reading_since < JOIN_SECONDS
