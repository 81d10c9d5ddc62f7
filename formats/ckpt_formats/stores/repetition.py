"""The one policy of all requests to stores: when they are given up, how long they are repeated, how many run at once.

A request that fails with a fault that may pass is repeated, with growing pauses of random length, until the budget is
spent: seconds since it failed for the first time. A request with the answer of another one is repeated a few times
only.
When a store says that there are too many requests, half as many run at once until a minute passed without that.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from threading import Condition, local
from typing import Any, TypeVar

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.store_path import StoreError

T = TypeVar("T")

_DEPTH = 16
"""Requests at once."""
_FIRST_PAUSE = 0.1
"""Seconds before the second attempt; each further pause is twice as long, up to the longest."""
_LONGEST_PAUSE = 10.0
_MAX_WRONG = 4
"""Attempts of a request that the store answers as if it were another one."""
_CALM = 60.0
"""Seconds without a complaint of the store after which all requests run at once again."""
_SLOWEST = 256 << 10
"""Bytes a second of an upload that is not given up."""
_CONNECT = 10
"""Seconds in which a connection must be there."""
_WHOLE = 3600
"""Seconds of a whole request that makes progress."""
_MAX_WAIT = 120.0
"""Seconds that a server may ask to wait."""
_BUDGET, _SILENCE = "CKPT_STORE_RETRY", "CKPT_STORE_TIMEOUT"


@dataclass(frozen=True)
class RetryPolicy:
    """How patient requests are."""

    budget: float = 120.0
    """Seconds after its first failure in which a request is repeated."""
    silence: float = 30.0
    """Seconds without a byte after which a request has failed."""
    first_contact: float = 10.0
    """Seconds in place of the budget, while no request has reached the store: its address may be mistyped."""

    @classmethod
    def of_user(cls) -> "RetryPolicy":
        """That of the environment: `CKPT_STORE_RETRY` and `CKPT_STORE_TIMEOUT`, in seconds.

        Raises `InvalidArgumentError` if one of them is no number.
        """
        return cls(_seconds(_BUDGET, cls.budget, 0.0), _seconds(_SILENCE, cls.silence, 0.1))

    def http(self, sent_nbytes: int = 0) -> dict[str, Any]:
        """The time-outs of a client of `obstore` whose requests send up to `sent_nbytes`.

        A client counts no progress while it sends, so the time is in proportion to the bytes.
        """
        silence = self.silence + sent_nbytes / _SLOWEST
        return {"read_timeout": f"{silence:.3f}s", "connect_timeout": f"{_CONNECT}s", "timeout": f"{_WHOLE}s"}

    def of_parts(self) -> Any:
        """The policy in the words of `obstore`, which repeats the parts of an upload by itself."""
        backoff = {
            "init_backoff": timedelta(seconds=_FIRST_PAUSE),
            "max_backoff": timedelta(seconds=_LONGEST_PAUSE),
            "base": 2,
        }
        return {"backoff": backoff, "max_retries": 1000, "retry_timeout": timedelta(seconds=self.budget)}


def _seconds(name: str, default: float, least: float) -> float:
    text = os.environ.get(name)
    try:
        seconds = default if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not least <= seconds < 1e6:
        raise InvalidArgumentError(f"{name} is not a number of seconds: {text!r}", hint=f"Give a number: {name}=60.")
    return seconds


ONCE: Any = {"max_retries": 0}
"""For clients of `obstore`, which would repeat requests by a policy of its own."""


class Transient(Exception):
    """A request failed, and may succeed later. The text is for the user."""

    def __init__(
        self,
        text: str,
        is_throttled: bool = False,
        pause: float | None = None,
        is_wrong: bool = False,
        is_unreached: bool = False,
        hint: str | None = None,
    ) -> None:
        super().__init__(text)
        self.text, self.hint = text, hint
        self.is_throttled = is_throttled
        """Whether the store says that there are too many requests."""
        self.pause = pause
        """Seconds to wait before the next attempt; None: longer with each attempt."""
        self.is_wrong = is_wrong
        """Whether the store answers as if it were another request: that seldom passes."""
        self.is_unreached = is_unreached
        """Whether there was no connection."""


class Repetition:
    """The requests to one store. Threads may share it. A request may consist of others: they take no further place."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        policy: RetryPolicy | None = None,
    ) -> None:
        """`policy`: None for that of the user."""
        self.policy = policy or RetryPolicy.of_user()
        self._clock, self._sleep = clock, sleep
        self._depth, self._running, self._calm_at = _DEPTH, 0, 0.0
        self._changed = Condition()
        self._own = local()
        self._is_reached = False

    @property
    def depth(self) -> int:
        """How many requests run at once."""
        return self._depth

    def __call__(self, request: Callable[[], T], where: str, takes_place: bool = True) -> T:
        """The result of `request`, which raises `Transient` if it should be repeated. Raises `StoreError` in the end.

        `takes_place`: whether it is one of those that run at once; not so if it waits for others, of other threads.
        """
        pause, failed_at, wrong = _FIRST_PAUSE, None, 0
        while True:
            try:
                with self._place() if takes_place else nullcontext():
                    result = request()
                self._is_reached = True
                return result
            except Transient as error:
                self._is_reached = self._is_reached or not error.is_unreached
                if error.is_throttled:
                    self._slow_down()
                wrong += error.is_wrong
                now = self._clock()
                failed_at = now if failed_at is None else failed_at
                # Not all at the same moment: they failed together.
                wait = pause * random.uniform(0.5, 1.5) if error.pause is None else error.pause
                if wrong == _MAX_WRONG or now + wait > failed_at + self._budget:
                    raise StoreError(error.text, where, error.hint) from None
            self._sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE)

    @property
    def _budget(self) -> float:
        budget = self.policy.budget
        return budget if self._is_reached else min(budget, self.policy.first_contact)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Within, this thread makes one of the requests that run at once."""
        if getattr(self._own, "is_inside", False):
            yield
            return
        with self._changed:
            self._changed.wait_for(lambda: self._running < self._depth)
            self._running += 1
        self._own.is_inside = True
        try:
            yield
        finally:
            self._own.is_inside = False
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


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds that an answer asks to wait; None if it does not, or to come back at once."""
    text = headers.get("retry-after", "")
    return min(float(text), _MAX_WAIT) or None if text.isascii() and text.isdigit() else None
