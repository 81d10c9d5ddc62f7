"""The orders of a trainer as its writer process reads them."""

import json
import os
import select
from typing import Any

IDLE_SECONDS = 1.0
"""The time without an order after which a writer checks whether its trainer is alive and something is due."""


class MessagesEnd(Exception):
    """There are no more orders."""


class TrainerMessages:
    """The orders of the trainer. They end when the trainer ends, even if its forked children keep the pipe open."""

    def __init__(self, file: int, trainer: int) -> None:
        """`file`: the descriptor to read from. `trainer`: the id of the trainer's process."""
        self._file, self._trainer = file, trainer
        self._text = bytearray()
        self._poll = select.poll()
        self._poll.register(file, select.POLLIN)

    def next(self, seconds: float) -> tuple[dict[str, Any], bytes] | None:
        """The next order and its bytes; None if no order starts within `seconds`.

        Raises `MessagesEnd` at the end, also if a killed trainer sent an incomplete order.
        """
        searched = 0
        while (end := self._text.find(b"\n", searched)) < 0:
            searched = len(self._text)
            if not self._read_more(seconds) and not searched:
                return None
        order: dict[str, Any] = json.loads(self._text[:end])
        stop = end + 1 + order.get("nbytes", 0)
        while len(self._text) < stop:
            self._read_more(IDLE_SECONDS)
        data = bytes(self._text[end + 1 : stop])
        del self._text[:stop]
        return order, data

    def _read_more(self, seconds: float) -> bool:
        """Read more bytes, and wait at most `seconds` for them. Were there any?"""
        if not self._poll.poll(seconds * 1000):
            if os.getppid() == self._trainer or self._poll.poll(0):
                return False
            raise MessagesEnd
        part = os.read(self._file, 1 << 20)
        if not part:
            raise MessagesEnd
        self._text += part
        return True


def reason_of(error: Exception) -> str:
    """Why something failed, in one line."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return " ".join(str(text).split())[:500]
