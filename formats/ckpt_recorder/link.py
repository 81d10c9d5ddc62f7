"""The trainer's end of its writer: starts the process, gives it orders, and knows which slots are free."""

import fcntl
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ckpt_recorder.ring import Ring
from ckpt_recorder.writer import Settings

_START_SECONDS = 120.0
_END_SECONDS = 600.0
_PIPE_NBYTES = 1 << 20


class WriterBroken(Exception):
    """The writer cannot write any more: the reason, for people."""


class WriterLink:
    """One writer process. Every method but `close` raises `WriterBroken` once it has failed or is gone."""

    def __init__(self, settings: Settings, ring: Ring) -> None:
        reads, status = os.pipe()
        os.set_blocking(reads, False)
        command = [sys.executable, "-m", "ckpt_recorder.writer", str(ring.file), str(status)]
        path = os.pathsep.join(part for part in sys.path if part)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                pass_fds=(ring.file, status),
                start_new_session=True,  # Ctrl-C and the end of the trainer's group are not for it
                env={**os.environ, "PYTHONPATH": path},
            )
        finally:
            os.close(status)
        assert self._process.stdin is not None
        self._orders = self._process.stdin
        fcntl.fcntl(self._orders.fileno(), getattr(fcntl, "F_SETPIPE_SZ", 1031), _PIPE_NBYTES)
        self._status = reads
        self._text = b""
        self._free, self._slots, self._next = settings.slots, settings.slots, 0
        self._is_ready = False
        self._reason: str | None = None
        self._write(json.dumps(asdict(settings)).encode() + b"\n")
        self._wait(lambda: self._is_ready, _START_SECONDS, "it did not start")

    @property
    def pid(self) -> int:
        return self._process.pid

    def acquire_slot(self) -> int:
        """A slot that may be filled. Waits while the writer is all slots behind."""
        self.check()
        self._wait(lambda: self._free > 0, None, "")
        self._free -= 1
        slot, self._next = self._next, (self._next + 1) % self._slots
        return slot

    def order(
        self,
        kind: int,
        step: int,
        meta: Mapping[str, Any],
        slot: int | None = None,
        chunks: Sequence[int] | None = None,
        random: Any = None,
    ) -> None:
        """A record of a slot that is filled, or without values.

        `chunks`: those that have values; None: all. `random`: states of random number generators, as typed JSON.
        """
        fields = {"kind": int(kind), "step": step, "meta": meta, "slot": slot, "chunks": chunks, "random": random}
        self._send(fields, b"")

    def order_bytes(
        self, kind: int, step: int, meta: Mapping[str, Any], content: bytes, sizes: Sequence[tuple[int, int]]
    ) -> None:
        """A record of tensors' bytes. `sizes`: bytes of each, and of its elements."""
        fields = {"kind": int(kind), "step": step, "meta": meta, "nbytes": len(content), "sizes": sizes}
        self._send(fields, content)

    def settle(self) -> None:
        """Wait until everything that was ordered with a slot is written."""
        self._wait(lambda: self._free == self._slots, None, "")

    def check(self) -> None:
        """Raise `WriterBroken` if the writer has said so, or is gone."""
        self._listen(0)
        if self._reason is not None:
            raise WriterBroken(self._reason)

    def close(self) -> None:
        """Let the writer end: what it has is written and flushed."""
        try:
            self._orders.close()
        except BrokenPipeError:
            pass
        deadline = time.monotonic() + _END_SECONDS
        try:
            self._process.wait(max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            self._reason = self._reason or "it did not end"
        self._listen(0)
        os.close(self._status)

    @property
    def reason(self) -> str | None:
        """Why the writer is broken; None while it is not known to be."""
        return self._reason

    def _send(self, fields: dict[str, Any], content: bytes) -> None:
        self.check()
        self._write(json.dumps(fields, separators=(",", ":")).encode() + b"\n" + content)

    def _write(self, data: bytes) -> None:
        try:
            self._orders.write(data)
            self._orders.flush()
        except (BrokenPipeError, ValueError, OSError):
            self._reason = self._reason or "the process that writes the log is gone"
            raise WriterBroken(self._reason) from None

    def _wait(self, is_done: Any, seconds: float | None, reason: str) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while not is_done():
            if self._reason is not None:
                raise WriterBroken(self._reason)
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise WriterBroken(reason)
            self._listen(min(left, 1.0))

    def _listen(self, seconds: float) -> None:
        """Take in what the writer has said, waiting for at most so long."""
        if not select.select([self._status], [], [], seconds)[0]:
            return
        try:
            data = os.read(self._status, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._reason = self._reason or "the process that writes the log is gone"
            return
        *lines, self._text = (self._text + data).split(b"\n")
        for line in lines:
            word, _, rest = line.decode("utf-8", "replace").partition(" ")
            if word == "free":
                self._free += 1
            elif word == "ready":
                self._is_ready = True
            elif word == "broken":
                self._reason = self._reason or rest
