"""The trainer's connection to a writer process: starts the process, sends it orders, and counts free slots."""

import fcntl
import json
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any, ClassVar, Protocol

from ckpt_training.writing.orders import End, Order, encode_order
from ckpt_training.writing.ring import Ring

_START_SECONDS = 120.0
_END_SECONDS = 600.0
_PIPE_NBYTES = 1 << 20


class LinkSettings(Protocol):
    """The first message to a process."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def slots(self) -> int:
        """The number of slots of its ring."""


class WriterBroken(Exception):
    """The writer cannot write any more. The message states the reason."""


class WriterLink:
    """One writer process. Every method but `close` raises `WriterBroken` after the writer fails, ends or hangs."""

    def __init__(
        self, settings: LinkSettings, ring: Ring, stall_seconds: float, module: str, task: str = "the log"
    ) -> None:
        """Start the process, and wait until it is ready.

        Args:
            settings: Its first message: a dataclass of plain values.
            ring: The memory that it shares with the trainer.
            stall_seconds: The time to wait for a message before the writer counts as stuck.
            module: The module that it runs.
            task: What it writes, for messages.
        """
        self._name = f"the process that writes {task}"
        self.messages: deque[tuple[str, str]] = deque()
        """Messages that only the process's own task knows: their first word, and the rest."""
        self.peers: dict[str, str] = {}
        """Of each host that should hold what is recorded, the last that the process said of it."""
        self._stall_seconds, self._is_stuck = stall_seconds, False
        self._status, status = os.pipe()
        os.set_blocking(self._status, False)
        self._poll = select.poll()
        self._poll.register(self._status, select.POLLIN)
        self._text = b""
        self._free, self._slots, self._next = settings.slots, settings.slots, 0
        self._is_ready = False
        self.waited = 0.0
        """Seconds for which the trainer has waited for free slots."""
        self._reason: str | None = None
        try:
            self._process = start_process(module, ring.file, status, files=(ring.file, status), stdin=subprocess.PIPE)
        except OSError as error:
            os.close(self._status)
            raise WriterBroken(f"{self._name} cannot be started: {error.strerror}") from None
        finally:
            os.close(status)
        assert self._process.stdin is not None
        self._orders = self._process.stdin
        self._unused = weakref.finalize(self, _end_unused, os.getpid(), self._process, self._status)
        """Ends the process if its owner is collected before it is closed."""
        self._unused.atexit = False
        os.set_blocking(self._orders.fileno(), False)
        with suppress(OSError):  # more than the system allows
            fcntl.fcntl(self._orders.fileno(), getattr(fcntl, "F_SETPIPE_SZ", 1031), _PIPE_NBYTES)
        try:
            self._write(json.dumps(asdict(settings)).encode() + b"\n")
            self._wait(lambda: self._is_ready, _START_SECONDS, "it did not start")
        except BaseException:
            self._process.kill()
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Does the process run?"""
        return self._process.poll() is None

    @property
    def _ended(self) -> str:
        return f"{self._name} has ended"

    @property
    def _stuck(self) -> str:
        return f"{self._name} makes no progress: does its disk or file server hang?"

    def acquire_slot(self) -> int:
        """The index of a free slot. Waits while the writer still needs all slots."""
        self.check()
        if self._free == 0:
            begin = time.monotonic()
            self._wait(lambda: self._free > 0, self._stall_seconds, self._stuck)
            self.waited += time.monotonic() - begin
        self._free -= 1
        slot, self._next = self._next, (self._next + 1) % self._slots
        return slot

    def order(self, order: Order, content: bytes = b"") -> None:
        """Send an order, and the bytes that follow it."""
        self.check()
        self._write(encode_order(order, content))

    def next_message(self) -> tuple[str, str]:
        """Wait for a message of the process's own task, for as long as the process lives."""
        while not self.messages:
            self._listen(1.0)
            if self._reason is None and not self.messages and self._process.poll() is not None:
                self._reason = self._ended
            if self._reason is not None:
                raise WriterBroken(self._reason)
        return self.messages.popleft()

    def await_answer(self, order: Order) -> None:
        """Send an order, and wait for the message with which the process answers it."""
        self.order(order)
        self._wait(lambda: bool(self.messages), self._stall_seconds, self._stuck)
        self.messages.popleft()

    def check(self) -> None:
        """Raise `WriterBroken` if the writer has reported an error or has ended."""
        self._listen(0)
        if self._reason is not None:
            raise WriterBroken(self._reason)

    def close(self) -> None:
        """End the writer after it has written and flushed all orders. Does not wait for a writer that is stuck."""
        self._unused.detach()
        if self._is_stuck:
            self._orders.close()
            os.close(self._status)
            self._process.returncode = 0  # do not wait for it: it ends when the system lets it
            return
        with suppress(WriterBroken):
            self._write(encode_order(End()))  # children of the trainer may hold the pipe open
        self._orders.close()
        try:
            code = self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._reason = self._reason or "it did not end"
        else:
            self._listen(0)
            if code:
                self._reason = self._reason or self._ended
        os.close(self._status)

    @property
    def reason(self) -> str | None:
        """Why the writer is broken; None if it is not, as far as the trainer knows."""
        return self._reason

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                self._wait_to_write()
                rest = rest[os.write(self._orders.fileno(), rest) :]
        except (OSError, ValueError):
            self._reason = self._reason or self._ended
            raise WriterBroken(self._reason) from None
        except BaseException:  # Ctrl-C: the writer would read the next order as the rest of this one
            self._reason = "it was interrupted"
            self._orders.close()
            raise

    def _wait_to_write(self) -> None:
        """Wait until the writer has read some of its orders."""
        poll = select.poll()
        poll.register(self._orders.fileno(), select.POLLOUT)
        if not poll.poll(self._stall_seconds * 1000):
            self._is_stuck, self._reason = True, self._stuck
            raise OSError(self._stuck)

    def _wait(self, is_done: Callable[[], bool], seconds: float, reason: str) -> None:
        deadline = time.monotonic() + seconds
        while not is_done() and self._reason is None:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self._is_stuck, self._reason = reason == self._stuck, reason
            elif self._listen(min(remaining, 1.0)):
                deadline = time.monotonic() + seconds
        if self._reason is not None:  # the result is useless then, such as a flush after a failed write
            raise WriterBroken(self._reason)

    def _listen(self, seconds: float) -> bool:
        """Read the messages of the writer, and wait at most `seconds` for them. Was there any?"""
        if not self._poll.poll(seconds * 1000):
            return False
        data = os.read(self._status, 1 << 16)
        if not data:
            if self._process.poll() != 0:
                self._reason = self._reason or self._ended
            return False
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode("utf-8", "replace").partition(" ")
            if word == "free":
                self._free += 1
            elif word == "ready":
                self._is_ready = True
            elif word == "broken":
                self._reason = self._reason or rest
            elif word == "peer":
                address, _, state = rest.partition(" ")
                self.peers[address] = state
            else:
                self.messages.append((word, rest))
        return True


def _end_unused(trainer: int, process: "subprocess.Popen[bytes]", status: int) -> None:
    """End a process whose link is collected. In a fork of the trainer, only close what the fork has of it."""
    assert process.stdin is not None
    if os.getpid() != trainer:
        process.returncode = 0  # not a child of this process
    else:
        with suppress(OSError, ValueError):  # children of the trainer may hold the pipe open
            os.write(process.stdin.fileno(), encode_order(End()))
        with suppress(RuntimeError):  # the interpreter ends
            threading.Thread(target=process.wait, daemon=True).start()
    process.stdin.close()
    os.close(status)


def start_process(module: str, *arguments: object, files: Sequence[int], stdin: int) -> "subprocess.Popen[bytes]":
    """Start a module as a process beside the trainer, which gets the trainer's id as its last argument.

    `files`: the descriptors that it shares with the trainer. Raises `OSError`.
    """
    path = os.pathsep.join(part for part in sys.path if part)
    return subprocess.Popen(
        [sys.executable, "-m", module, *map(str, arguments), str(os.getpid())],
        stdin=stdin,
        bufsize=0,
        pass_fds=files,
        start_new_session=True,  # so Ctrl-C and signals to the trainer's process group do not reach it
        env={**os.environ, "PYTHONPATH": path},
    )
