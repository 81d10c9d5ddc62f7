"""Requests of ranges that are repeated when they fail, and fewer at once when a store says that there are too many."""

import errno
import random
import time
from collections.abc import Callable
from threading import Condition
from typing import TypeVar

T = TypeVar("T")

_DEPTH = 16
"""Requests at once."""
_ATTEMPTS = 10
_FIRST_PAUSE = 0.1
"""Seconds before the second attempt; each further pause is twice as long, up to the longest."""
_LONGEST_PAUSE = 10.0
_CALM = 60.0
"""Seconds without a complaint of the store after which all requests are made at once again."""


class Transient(Exception):
    """A request failed, and may succeed later. The text is for the user."""

    def __init__(self, text: str, is_throttled: bool = False, pause: float | None = None) -> None:
        super().__init__(text)
        self.text = text
        self.is_throttled = is_throttled
        """Whether the store says that there are too many requests."""
        self.pause = pause
        """Seconds to wait before the next attempt; None: longer with each attempt."""


class Repetition:
    """The requests to one store. Threads may share it."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._depth, self._running, self._calm_at = _DEPTH, 0, 0.0
        self._changed = Condition()

    @property
    def depth(self) -> int:
        """How many requests are made at once."""
        return self._depth

    def __call__(self, request: Callable[[], T], where: str) -> T:
        """The result of `request`, which raises `Transient` if it should be repeated. Raises `OSError` in the end."""
        pause = _FIRST_PAUSE
        for attempt in range(_ATTEMPTS):
            try:
                self._begin()
                try:
                    return request()
                finally:
                    self._end()
            except Transient as error:
                if error.is_throttled:
                    self._slow_down()
                if attempt + 1 == _ATTEMPTS:
                    raise OSError(errno.EIO, error.text, where) from None
                own = error.pause
            # Not all at the same moment: they failed together.
            self._sleep(pause * random.uniform(0.5, 1.5) if own is None else own)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise AssertionError("the last attempt returns or raises")

    def _begin(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._running < self._depth)
            self._running += 1

    def _end(self) -> None:
        with self._changed:
            self._running -= 1
            if self._depth < _DEPTH and self._clock() >= self._calm_at:
                self._depth = _DEPTH
            self._changed.notify_all()

    def _slow_down(self) -> None:
        """Half as many at once. Those that were on their way together complain together: that counts once."""
        with self._changed:
            now = self._clock()
            if now >= self._calm_at - _CALM + 1.0:
                self._depth = max(1, self._depth // 2)
            self._calm_at = now + _CALM
