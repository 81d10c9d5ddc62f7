"""The process beside each rank: it encodes what the trainer copied into the ring, and appends it to the rank's file.

It is started with `python -m ckpt_recorder.writer RING STATUS`, two descriptors, and reads orders from its standard input:
first the settings, then a line of JSON for each record. It outlives a killed trainer: what is in the ring is written,
flushed, and the file is left whole. It needs no torch.

To the trainer it sends lines: `ready`, `free` for each slot that may be used again, and `broken REASON`.
"""

import errno
import fcntl
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ckpt_codecs import Codec
from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.gradients import gradient_codec
from ckpt_formats.gradients import layout as layouts
from ckpt_formats.gradients.layout import RankLayout
from ckpt_formats.gradients.record import FileHead, Kind, hash_values, record_parts
from ckpt_formats.gradients.segment import rank_file
from ckpt_formats.gradients.state import BUFFER_CHUNK
from ckpt_recorder.ring import Ring

_MAX_PARTS = 512
"""Parts of one `writev`; the system takes 1,024."""


@dataclass(frozen=True)
class Settings:
    """What the trainer tells its writer first."""

    folder: str
    rank: int
    codec: str
    slot_nbytes: int
    slots: int
    flush_steps: int
    flush_seconds: float


class RankFile:
    """A rank's file as it grows. Whatever fails, it ends with a whole record."""

    def __init__(self, folder: Path, rank: int) -> None:
        content = (folder / layouts.NAME).read_bytes()
        self.layout = layouts.load(folder / layouts.NAME)
        path = folder / rank_file(rank)
        self._file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # tells others that this run goes on
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


def write_log(orders: BinaryIO, ring_file: int, status: int) -> None:
    """Do all orders, until there are no more."""
    settings = Settings(**json.loads(orders.readline()))
    ring = Ring(settings.slot_nbytes, settings.slots, ring_file)
    file: RankFile | None = None
    try:
        file = RankFile(Path(settings.folder), settings.rank)
        encoder = Encoder(file.layout.ranks[settings.rank], gradient_codec(settings.codec), ring)
        file.flush()
        _send(status, "ready")
    except Exception as error:
        _send(status, f"broken {_reason(error)}")
    unflushed, flushed_at = 0, time.monotonic()
    for line in orders:
        order = json.loads(line)
        data = orders.read(order.get("nbytes", 0))
        if file is not None:
            try:
                _append(file, encoder, order, data)
                unflushed += order["kind"] == Kind.GRADIENTS
                late = time.monotonic() - flushed_at >= settings.flush_seconds
                if unflushed >= settings.flush_steps or late or order["kind"] == Kind.END:
                    file.flush()
                    unflushed, flushed_at = 0, time.monotonic()
            except Exception as error:
                file = None  # from here on, slots are only emptied
                _send(status, f"broken {_reason(error)}")
        if order.get("slot") is not None:
            _send(status, "free")
    if file is not None:
        file.flush()


def _append(file: RankFile, encoder: Encoder, order: dict[str, Any], data: bytes) -> None:
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


def _send(status: int, line: str) -> None:
    try:
        os.write(status, line.encode() + b"\n")
    except BrokenPipeError:
        pass  # the trainer is gone: what it ordered is written all the same


def main() -> None:
    ring_file, status = map(int, sys.argv[1:3])
    write_log(sys.stdin.buffer, ring_file, status)


if __name__ == "__main__":
    main()
