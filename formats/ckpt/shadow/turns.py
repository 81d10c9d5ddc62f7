"""Who has the state in memory: one thread that changes it, or threads that read it between two steps."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Turns:
    """A lock for one writer or several readers. A reader may enter while others read."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers, self._writes = 0, False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within, nobody writes."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writes)
            self._readers += 1
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Within, nobody reads."""
        with self._changed:
            self._changed.wait_for(lambda: not self._writes and not self._readers)
            self._writes = True
        try:
            yield
        finally:
            with self._changed:
                self._writes = False
                self._changed.notify_all()
