"""The process beside each rank: it encodes what the trainer copied into the ring, and appends it to the rank's file.

It is started with `python -m ckpt_recorder.writer RING STATUS TRAINER`, two descriptors and a process id, and reads
orders from its standard input: first the settings, then a line of JSON for each record, `{"flush":true}` or
`{"end":true}`. It outlives a killed trainer: what is in the ring is written, flushed, and the file is left whole. It
needs no torch.

To the trainer it sends lines: `ready`, `free` for each slot that may be used again, `flushed`, and `broken REASON`.
"""

import errno
import fcntl
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_codecs import Codec
from ckpt_codecs.base import Bytes
from ckpt_codecs.gradients import gradient_codec
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.layout import RankLayout
from ckpt_formats.universal.gradients.record import FileHead, Kind, hash_values, record_parts
from ckpt_formats.universal.gradients.segment import rank_file
from ckpt_formats.universal.gradients.state import BUFFER_CHUNK
from ckpt_recorder.ring import Ring

_MAX_PARTS = 512
"""Parts of one `writev`; the system takes 1,024."""
_IDLE_SECONDS = 1.0
"""After so long without an order, the writer looks whether its trainer lives, and whether it is time to flush."""


@dataclass(frozen=True)
class WriterSettings:
    """What the trainer tells its writer first."""

    folder: str
    rank: int
    codec: str
    slot_nbytes: int
    slots: int
    flush_steps: int
    flush_seconds: float


class LogFile:
    """A rank's file as it grows. Whatever fails, it ends with a whole record."""

    def __init__(self, folder: Path, rank: int) -> None:
        content = (folder / layouts.NAME).read_bytes()
        self.layout = layouts.load(folder / layouts.NAME)
        path = folder / rank_file(rank)
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX)  # tells others that this run goes on; who looks holds it for a moment
        head = FileHead(rank, len(self.layout.ranks), self.layout.first, layouts.identity(content)).dump()
        self._end, self._flushed, self._previous = 0, 0, int.from_bytes(head[56:], "little")
        self._write([head])

    def append(self, kind: Kind, step: int, meta: dict[str, Any], chunks: Sequence[Bytes], values: list[int]) -> None:
        """Add a record. Raises OSError, and leaves the file as it was."""
        meta = {**meta, "flushed": self._flushed}
        parts, previous = record_parts(kind, step, meta, chunks, values, self._previous)
        self._write(parts)
        self._previous = previous

    def flush(self) -> None:
        """Bring all records to the disk."""
        if self._flushed < self._end:
            os.fdatasync(self._file)
            self._flushed = self._end

    def _write(self, parts: Sequence[Bytes]) -> None:
        end = self._end
        try:
            for i in range(0, len(parts), _MAX_PARTS):
                end += _write_all(self._file, parts[i : i + _MAX_PARTS], end)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end = end


def _write_all(file: int, parts: Sequence[Bytes], offset: int) -> int:
    total = sum(len(part) for part in parts)
    done = os.pwritev(file, parts, offset)
    if done < total:  # a disk that is nearly full, or a signal
        rest = memoryview(b"".join(parts))[done:]
        while rest:
            count = os.pwrite(file, rest, offset + done)
            if count == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rest, done = rest[count:], done + count
    return total


class Encoder:
    """Records from the slots of the ring."""

    def __init__(self, layout: RankLayout, codec: Codec, ring: Ring) -> None:
        self._layout, self._codec, self._ring = layout, codec, ring
        self._exact = gradient_codec("exact")

    def chunks(self, order: dict[str, Any]) -> tuple[list[Bytes], list[int]]:
        """The chunks of a slot, encoded, and the XXH3-64 of what a reader decodes from each."""
        values = self._ring.slot(order["slot"])[: self._layout.size * 4].view(np.float32)
        codec = self._codec if order["kind"] == Kind.GRADIENTS else self._exact
        wanted = order.get("chunks")
        selected = range(self._layout.chunk_count) if wanted is None else frozenset(wanted)
        chunks: list[Bytes] = []
        hashes = []
        for index in range(self._layout.chunk_count):
            if index not in selected:
                chunks.append(b"")
                hashes.append(0)
                continue
            start, stop = self._layout.chunk_bounds(index)
            part = values[start:stop]
            data = bytes(codec.encode(part, None))
            if not codec.lossless:
                part = codec.decode(data, part.shape, part.dtype, None)
            chunks.append(data)
            hashes.append(hash_values(part))
        return chunks, hashes


def buffer_chunks(data: bytes, sizes: Sequence[tuple[int, int]]) -> Iterator[memoryview]:
    """Tensors' bytes, one after another, each cut into chunks. `sizes`: bytes of each, and of its elements."""
    view, at = memoryview(data), 0
    for nbytes, itemsize in sizes:
        each = BUFFER_CHUNK // itemsize * itemsize
        for begin in range(0, nbytes, each):
            yield view[at + begin : at + min(begin + each, nbytes)]
        at += nbytes


class MessagesEnd(Exception):
    """No more orders come."""


class TrainerMessages:
    """What the trainer orders. They end where the trainer does, though children that it forked hold the pipe open."""

    def __init__(self, file: int, trainer: int) -> None:
        """`file`: where to read. `trainer`: the id of the process that orders."""
        self._file, self._trainer = file, trainer
        self._text = bytearray()
        self._poll = select.poll()
        self._poll.register(file, select.POLLIN)

    def next(self, seconds: float) -> tuple[dict[str, Any], bytes] | None:
        """An order, and the bytes that belong to it; None if none begins within so many seconds.

        Raises `MessagesEnd`; what a killed trainer sent of half an order is none.
        """
        seen = 0
        while (end := self._text.find(b"\n", seen)) < 0:
            seen = len(self._text)
            if not self._more(seconds) and not seen:
                return None
        order: dict[str, Any] = json.loads(self._text[:end])
        stop = end + 1 + order.get("nbytes", 0)
        while len(self._text) < stop:
            self._more(_IDLE_SECONDS)
        data = bytes(self._text[end + 1 : stop])
        del self._text[:stop]
        return order, data

    def _more(self, seconds: float) -> bool:
        """Has more come within so many seconds?"""
        if not self._poll.poll(seconds * 1000):
            if os.getppid() == self._trainer or self._poll.poll(0):
                return False
            raise MessagesEnd
        part = os.read(self._file, 1 << 20)
        if not part:
            raise MessagesEnd
        self._text += part
        return True


class LogWriter:
    """Does orders until something fails; from then on it only empties slots."""

    def __init__(self, settings: WriterSettings, ring: Ring, status: int) -> None:
        self._settings, self._ring, self._status = settings, ring, status
        self._file: LogFile | None = None
        self._encoder: Encoder | None = None
        self._unflushed, self._flushed_at = 0, time.monotonic()
        self._guarded(self._begin)

    def do(self, order: dict[str, Any], data: bytes) -> None:
        """An order, and the bytes that belong to it."""
        if "flush" in order:
            self._guarded(self._flush)
            self._send("flushed")
            return
        self._guarded(lambda: self._append(order, data))
        if order.get("slot") is not None:
            self._send("free")

    def idle(self) -> None:
        """Nothing was ordered for a while."""
        if time.monotonic() - self._flushed_at >= self._settings.flush_seconds:
            self.flush()

    def flush(self) -> None:
        """Bring to the disk what was written."""
        self._guarded(self._flush)

    def _begin(self) -> None:
        file = LogFile(Path(self._settings.folder), self._settings.rank)
        layout = file.layout.ranks[self._settings.rank]
        self._encoder = Encoder(layout, gradient_codec(self._settings.codec), self._ring)
        self._file = file
        self._flush()
        self._send("ready")

    def _append(self, order: dict[str, Any], data: bytes) -> None:
        if self._file is None or self._encoder is None:
            return
        _append(self._file, self._encoder, order, data)
        self._unflushed += order["kind"] == Kind.GRADIENTS
        late = time.monotonic() - self._flushed_at >= self._settings.flush_seconds
        if self._unflushed >= self._settings.flush_steps or late or order["kind"] == Kind.END:
            self._flush()

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()
        self._unflushed, self._flushed_at = 0, time.monotonic()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._file = None
            self._send(f"broken {_reason(error)}")

    def _send(self, line: str) -> None:
        with suppress(BrokenPipeError):  # the trainer is gone: what it ordered is written all the same
            os.write(self._status, line.encode() + b"\n")


def write_log(orders: TrainerMessages, ring_file: int, status: int) -> None:
    """Do all orders, until there are no more."""
    try:
        while (first := orders.next(_IDLE_SECONDS)) is None:
            pass
        settings = WriterSettings(**first[0])
        writer = LogWriter(settings, Ring(settings.slot_nbytes, settings.slots, ring_file), status)
    except MessagesEnd:
        return
    try:
        while True:
            order = orders.next(_IDLE_SECONDS)
            if order is None:
                writer.idle()
            elif "end" in order[0]:
                break
            else:
                writer.do(*order)
    except MessagesEnd:
        pass
    writer.flush()


def _append(file: LogFile, encoder: Encoder, order: dict[str, Any], data: bytes) -> None:
    kind, chunks, values = Kind(order["kind"]), list[Bytes](), list[int]()
    if order.get("slot") is not None:
        chunks, values = encoder.chunks(order)
        if order.get("random") is not None:
            text = json.dumps(order["random"], separators=(",", ":")).encode()
            chunks.append(text)
            values.append(hash_values(np.frombuffer(text, np.uint8)))
    elif data:
        chunks = list(buffer_chunks(data, order["sizes"]))
        values = [hash_values(np.frombuffer(chunk, np.uint8)) for chunk in chunks]
    file.append(kind, order["step"], order["meta"], chunks, values)


def _reason(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
    return " ".join(str(text).split())[:500]


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # sent to all of a job when it ends; the writer ends after its trainer
    ring_file, status, trainer = map(int, sys.argv[1:4])
    write_log(TrainerMessages(sys.stdin.fileno(), trainer), ring_file, status)


if __name__ == "__main__":
    main()
