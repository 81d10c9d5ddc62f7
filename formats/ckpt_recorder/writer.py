"""The writer process of a rank: it encodes the values in the ring and appends them to the rank's file.

`python -m ckpt_recorder.writer RING STATUS TRAINER` starts it, with two descriptors and a process id. It reads orders
from its standard input: first the settings, then those of `ckpt_recorder.orders`.
If the trainer is killed, the writer writes and flushes all orders, so the file ends with a complete record. It does not
need torch.

It sends lines to the trainer: `ready`, `free` for each slot that may be used again, `flushed`, and `broken REASON`.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.gradients import GradientCodec, gradient_codec
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.layout import RankLayout
from ckpt_formats.universal.gradients.random_states import GeneratorState, RandomStateEncoder
from ckpt_formats.universal.gradients.record import FileHead, Kind, hash_values
from ckpt_formats.universal.gradients.recorded_values import (
    DELTA,
    GONE,
    WHOLE,
    RecordedRow,
    chunk_size,
    encode_chunk,
)
from ckpt_formats.universal.gradients.segment import rank_file
from ckpt_recorder.orders import (
    LOG_ORDERS,
    Flush,
    FlushEvery,
    LogOrder,
    SegmentFollows,
    WriteRandomStates,
    WriteRecord,
    WriteValues,
)
from ckpt_recorder.record_file import RecordFile
from ckpt_training.writing.ring import Ring
from ckpt_training.writing.trainer_messages import OrderWriter, execute_orders, reason_of

if TYPE_CHECKING:
    from ckpt.holding.log_sender import LogSender

_FOLLOWED_SECONDS, _CLOSE_SECONDS, _ORPHAN_SECONDS = 0.2, 2.0, 60.0
"""How long the end of a log waits until its holders have it: if another segment follows, else, and if the trainer has
ended. Otherwise, the trainer waits, too."""
_MAX_DELTAS = 31
"""The maximum number of differences after a record of full values: a restore decodes all of them."""


@dataclass(frozen=True)
class WriterSettings:
    """The first message of the trainer to its writer."""

    folder: str
    rank: int
    codec: str
    slot_nbytes: int
    slots: int
    flush_steps: int
    flush_seconds: float
    peers: dict[str, Any] | None = None
    """The fields of `ckpt.holding.peers.Peers`: where else the log is held; None: nowhere."""


class LogFile(RecordFile):
    """The growing file of a rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        content = (folder / layouts.NAME).read_bytes()
        self.layout = layouts.load(folder / layouts.NAME)
        head = FileHead(rank, len(self.layout.ranks), self.layout.first, layouts.identity(content))
        self._flushed = 0
        super().__init__(folder / rank_file(rank), head)

    def append(self, kind: Kind, step: int, meta: dict[str, Any], chunks: Sequence[Bytes], values: list[int]) -> None:
        """Add a record. Raises `OSError`, and then leaves the file unchanged."""
        super().append(kind, step, {**meta, "flushed": self._flushed}, chunks, values)

    def flush(self) -> None:
        """Flush all records to the disk."""
        if self._flushed < self.nbytes:
            os.fdatasync(self.descriptor)
            self._flushed = self.nbytes


class Encoder:
    """Encodes the slots of the ring."""

    def __init__(self, layout: RankLayout, codec: GradientCodec, ring: Ring) -> None:
        self._layout, self._codec, self._ring = layout, codec, ring
        self._exact = gradient_codec("exact")

    def no_chunks(self) -> tuple[list[Bytes], list[int]]:
        """The empty chunks of a record without gradients, and their hashes."""
        return [b""] * self._layout.chunk_count, [0] * self._layout.chunk_count

    def chunks(self, order: WriteRecord, slot: int) -> tuple[list[Bytes], list[int]]:
        """The encoded chunks of a slot, and the XXH3-64 of the values that a reader decodes from each."""
        values = self._ring.slot(slot)[: self._layout.size * 4].view(np.float32)
        codec = self._codec if order.kind == Kind.GRADIENTS else self._exact
        selected = range(self._layout.chunk_count) if order.chunks is None else frozenset(order.chunks)
        chunks: list[Bytes] = []
        hashes = []
        for index in range(self._layout.chunk_count):
            if index not in selected:
                chunks.append(b"")
                hashes.append(0)
                continue
            start, stop = self._layout.chunk_bounds(index)
            part = values[start:stop]
            data = bytes(codec.encode_range(part, *self._layout.chunk_place(index)))
            if not codec.lossless:
                part = codec.decode(data, part.shape, part.dtype, None)
            chunks.append(data)
            hashes.append(hash_values(part))
        return chunks, hashes


class ValueEncoder:
    """Encodes tensors as they are, as differences from the last record of the same tensor. It holds these values."""

    def __init__(self) -> None:
        self._rows: list[RecordedRow] = []
        self._last: dict[int, Array] = {}
        self._deltas: dict[int, int] = {}
        """The number of differences since the last record of the full values, by row."""

    def record(self, order: WriteValues, data: bytes) -> tuple[dict[str, Any], list[Bytes], list[int]]:
        """The fields of a record's text, its encoded chunks, and the XXH3-64 of the values of each."""
        self._rows += map(RecordedRow.from_json, order.tensors)
        changes: list[list[int]] = []
        chunks: list[Bytes] = []
        hashes: list[int] = []
        at = 0
        for number, coding in order.changes:
            before = self._last.pop(number, None)
            if coding == GONE:
                changes.append([number, GONE])
                continue
            row = self._rows[number]
            dtype = DTYPES[row.dtype]
            values = np.frombuffer(data, dtype, row.size, at)
            at += values.nbytes
            if self._deltas.get(number, 0) >= _MAX_DELTAS:
                before = None
            self._deltas[number] = 0 if before is None else self._deltas[number] + 1
            self._last[number] = values
            changes.append([number, WHOLE if before is None else DELTA])
            for start in range(0, row.size, chunk_size(dtype)):
                part = slice(start, start + chunk_size(dtype))
                chunks.append(encode_chunk(row.state, values[part], None if before is None else before[part]))
                hashes.append(hash_values(values[part]))
        meta = {**order.meta, "changes": changes}
        return (meta | {"tensors": order.tensors} if order.tensors else meta), chunks, hashes


class LogWriter(OrderWriter):
    """Executes orders. After a failure it only frees slots."""

    def __init__(self, settings: WriterSettings, ring: Ring, status: int, trainer: int) -> None:
        """`status`: the descriptor for messages. `trainer`: the id of its process."""
        self._settings, self._ring, self._status = settings, ring, status
        self._file: LogFile | None = None
        self._encoder: Encoder | None = None
        self._random = RandomStateEncoder()
        self._values = ValueEncoder()
        self._unflushed, self._flushed_at = 0, time.monotonic()
        self._flush_steps = settings.flush_steps
        self._trainer, self._is_followed = trainer, False
        self._sender: LogSender | None = None
        self._report_errors(self._begin)

    def do(self, order: LogOrder, data: bytes) -> None:
        """Execute an order. `data`: its bytes."""
        if isinstance(order, FlushEvery):
            self._flush_steps = order.steps
        elif isinstance(order, SegmentFollows):
            self._is_followed = True
        elif isinstance(order, Flush):
            self._report_errors(self._flush)
            self._send("flushed")
        else:
            self._report_errors(lambda: self._append(order, data))
            if isinstance(order, WriteRecord) and order.slot is not None:
                self._send("free")

    def idle(self) -> None:
        """Flush if it is due. Called after some time without an order."""
        if time.monotonic() - self._flushed_at >= self._settings.flush_seconds:
            self._report_errors(self._flush)

    def close(self) -> None:
        """Flush all written records to the disk, and send them to their holders."""
        self._report_errors(self._flush)
        if self._file is not None:
            self._file.close()  # a run that goes on with this chain waits for the lock, and must not for holders
            self._file = None
        if self._sender is not None:
            seconds = _FOLLOWED_SECONDS if self._is_followed else _CLOSE_SECONDS
            self._sender.close(seconds if os.getppid() == self._trainer else _ORPHAN_SECONDS)
            self._sender = None

    def _begin(self) -> None:
        file = LogFile(Path(self._settings.folder), self._settings.rank)
        layout = file.layout.ranks[self._settings.rank]
        self._encoder = Encoder(layout, gradient_codec(self._settings.codec), self._ring)
        self._file = file
        if self._settings.peers is not None:
            self._sender = _sender_of(self._settings, file, self._send)
        self._flush()
        self._send("ready")

    def _append(self, order: LogOrder, data: bytes) -> None:
        if self._file is None or self._encoder is None:
            return
        kind = Kind.RANDOM if isinstance(order, WriteRandomStates) else Kind.VALUES
        if isinstance(order, WriteRandomStates):
            self._file.append(kind, order.step, *self._random.record(_generators(order, data)))
        elif isinstance(order, WriteValues):
            self._file.append(kind, order.step, *self._values.record(order, data))
        elif isinstance(order, WriteRecord):
            kind = Kind(order.kind)
            if kind is Kind.END:
                self._flush()  # what is before an end was on the disk: readers take it for damaged, and not for torn
            _append(self._file, self._encoder, order)
        else:
            return
        if self._sender is not None:
            self._sender.advance(self._file.nbytes, kind, order.step)
        if isinstance(order, WriteRecord):
            if order.kind == Kind.GRADIENTS:
                self._file.check_path()
                self._unflushed += 1
            is_late = time.monotonic() - self._flushed_at >= self._settings.flush_seconds
            if self._unflushed >= self._flush_steps or is_late or order.kind == Kind.END:
                self._flush()

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()
        self._unflushed, self._flushed_at = 0, time.monotonic()

    def _report_errors(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._file = None
            self._send(f"broken {reason_of(error)}")


def _sender_of(settings: WriterSettings, file: LogFile, send: Callable[[str], None]) -> "LogSender | None":
    """Start to send the log to its holders, and to say of each whether it has it; None if nothing can be sent."""
    from ckpt.holding.log_sender import LogSender
    from ckpt.holding.peers import Peers

    def say(address: str, state: str) -> None:
        send(f"peer {address} {' '.join(state.split())[:500]}")

    peers = Peers(**settings.peers or {})
    try:
        sender = LogSender(peers, Path(settings.folder), settings.rank, say)
    except (CkptError, OSError) as error:  # such as a token file that cannot be read: the log is written all the same
        own = peers.host_of(settings.rank, len(file.layout.ranks))
        for host in (*peers.holders_of(own), *peers.parities_of(own)):
            say(str(peers.addresses[host]), reason_of(error))
        return None
    sender.advance(file.nbytes, Kind.NOTES, file.layout.first)
    return sender


def _append(file: LogFile, encoder: Encoder, order: WriteRecord) -> None:
    kind, chunks, values = Kind(order.kind), list[Bytes](), list[int]()
    if order.slot is not None:
        chunks, values = encoder.chunks(order, order.slot)
    elif kind is Kind.GRADIENTS:
        chunks, values = encoder.no_chunks()
    file.append(kind, order.step, dict(order.meta), chunks, values)


def _generators(order: WriteRandomStates, data: bytes) -> dict[str, GeneratorState]:
    """The states of an order, by generator."""
    states, at = dict[str, GeneratorState](), 0
    for name, nbytes, fields in order.generators:
        states[name] = GeneratorState(fields, np.frombuffer(data, np.uint8, nbytes, at))
        at += nbytes
    return states


def main() -> None:
    execute_orders(WriterSettings, LOG_ORDERS, LogWriter)


if __name__ == "__main__":
    main()
