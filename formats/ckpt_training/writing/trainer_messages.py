"""The orders of a trainer as its writer process reads and executes them, and what it reports."""

import json
import os
import select
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from ckpt_formats.core.errors import CkptError
from ckpt_training.writing.orders import End, decode_order
from ckpt_training.writing.ring import Ring

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


def text_of(error: Exception) -> str:
    """Why something failed, with where and what to do, in one line."""
    if not isinstance(error, CkptError):
        return reason_of(error)
    return " ".join(f"{error}{'' if error.hint is None else f' ({error.hint})'}".split())


class OrderWriter(ABC):
    """Executes the orders of a trainer, and reports to it."""

    _status: int
    """The descriptor for messages."""

    @abstractmethod
    def do(self, order: Any, data: bytes) -> None:
        """Execute an order. `data`: the bytes after its line."""

    def idle(self) -> None:  # noqa: B027  # most have nothing to do
        """Use a second without an order."""

    @abstractmethod
    def close(self) -> None:
        """End, because no order follows."""

    def _send(self, line: str) -> None:
        """Send a line to the trainer, if it has not ended: its orders are executed, too, when it has."""
        with suppress(BrokenPipeError):
            os.write(self._status, line.encode() + b"\n")


def execute_orders(
    settings: type[Any], orders: Iterable[type[Any]], create: Callable[[Any, Ring, int, int], OrderWriter]
) -> None:
    """Execute the orders of the trainer that has started this process, until they end.

    The arguments of the process are the descriptors of the ring and for messages, and the id of the trainer.

    Args:
        settings: The type of the first message.
        orders: The types of the others.
        create: Makes the writer of the settings, the ring, the descriptor for messages and the id of the trainer.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # a job's end sends them to all processes; this one ends after its trainer
    ring_file, status, trainer = map(int, sys.argv[1:4])
    messages, writer = TrainerMessages(sys.stdin.fileno(), trainer), None
    try:
        while (first := messages.next(IDLE_SECONDS)) is None:
            pass
        own = settings(**first[0])
        writer = create(own, Ring(own.slot_nbytes, own.slots, ring_file), status, trainer)
        while True:
            message = messages.next(IDLE_SECONDS)
            if message is None:
                writer.idle()
                continue
            order = decode_order(message[0], orders)
            if isinstance(order, End):
                break
            writer.do(order, message[1])
    except MessagesEnd:
        pass
    finally:
        if writer is not None:
            writer.close()
