"""The records of a rank's file: how they are written, and which of them count.

    head 64 B | record | record | ...
    record = head 64 B | meta (typed JSON, filled with spaces to 8) | directory, 16 B a chunk | chunks, zeros to 8

A head has the hashes of what follows it and of the head before it. A record counts when it is whole, its hashes fit,
and the one before it is the one that it names; a reader cuts the file at the first that does not. docs/format.md.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
import xxhash

from ckpt_codecs.base import Array, Bytes
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.core.errors import Corrupt, Incomplete
from ckpt_formats.core.files import Reader, unreadable

MAGIC, RECORD_MAGIC = b"CKPTGRAD", b"CKGR"
VERSION = 1
FILE_HEAD = Struct("<8sIIIIQ16s8xQ")
HEAD = Struct("<4sHHQIIQQQQQ")
ENTRY = np.dtype([("end", "<u8"), ("values", "<u8")])
"""Of the directory: where a chunk ends, counted from where the first begins, and the XXH3-64 of its values."""
ALIGNMENT = 8
MAX_META = 1 << 28
MAX_CHUNK_OVERHEAD = 1 << 12
"""Bytes by which a coded chunk may be longer than its values."""


class Kind(IntEnum):
    """What a record holds."""

    GRADIENTS = 1
    SKIPPED = 2
    """A step that the optimizer left out, since its gradients were not finite: nothing changed."""
    STATE = 3
    """One state of the rank's pieces, as it was where the segment begins."""
    BUFFERS = 4
    """Tensors that no optimizer steps, as they are at a step."""
    NOTES = 5
    """What else the run resumes with, at a step."""
    FINGERPRINT = 6
    """Hashes of the states at a step."""
    END = 7
    """The run closed its log."""


KINDS = frozenset(Kind)
LARGE = ("notes",)
"""What of a record's text is read again when it is needed, rather than stored in memory for thousands of steps."""


@dataclass(frozen=True)
class FileHead:
    """The first bytes of a rank's file."""

    rank: int
    world: int
    first: int
    layout: bytes
    """`layout.identity`."""

    def dump(self) -> bytes:
        head = FILE_HEAD.pack(MAGIC, VERSION, self.rank, self.world, 0, self.first, self.layout, 0)
        return head[:56] + _hash(head[:56]).to_bytes(8, "little")


@dataclass(frozen=True)
class LogRecord:
    """A whole record: its text, and where its chunks are."""

    kind: Kind
    step: int
    meta: Mapping[str, Any]
    """JSON, still typed (see `typed_json`), without what is in `LARGE`."""
    begin: int
    """Where in the file its text begins."""
    meta_nbytes: int
    count: int
    """Of chunks."""
    nbytes: int
    """Of all chunks."""
    flushed: int
    """How much of the file was on the disk when it was written."""

    def read_meta(self, path: Path, reader: Reader) -> dict[str, Any]:
        """All of its text, JSON that is still typed. Raises `Corrupt`."""
        content = bytearray(self.meta_nbytes)
        reader.read_into(path, self.begin, memoryview(content))
        try:
            return _meta(bytes(content))
        except _TornRecord as reason:
            raise Corrupt(str(reason), where=path) from None

    def nbytes_of(self, path: Path, count: int, reader: Reader) -> int:
        """Bytes of its first so many chunks."""
        entry = np.zeros(1, ENTRY)
        if count:
            directory = self.begin + self.meta_nbytes
            reader.read_into(path, directory + (count - 1) * ENTRY.itemsize, entry.view(np.uint8).data)
        return int(entry["end"][0])

    def read_chunk(self, path: Path, index: int, max_nbytes: int, reader: Reader) -> tuple[Array, int]:
        """The bytes of a chunk of at most so many, and the XXH3-64 of its values. Raises `Corrupt`."""
        low = max(index - 1, 0)
        entries = np.empty(index + 1 - low, ENTRY)
        directory = self.begin + self.meta_nbytes
        reader.read_into(path, directory + low * ENTRY.itemsize, entries.view(np.uint8).data)
        begin, end = int(entries["end"][0]) if index else 0, int(entries["end"][-1])
        if not begin <= end <= self.nbytes or end - begin > max_nbytes:
            raise Corrupt(f"step {self.step}: the directory of its record is damaged", where=path)
        data = np.empty(end - begin, np.uint8)
        reader.read_into(path, directory + self.count * ENTRY.itemsize + begin, data.data)
        return data, int(entries["values"][-1])


def hash_values(values: Array) -> int:
    """The XXH3-64 of an array's bytes."""
    return xxhash.xxh3_64_intdigest(values.reshape(-1).view(np.uint8).data)


def record_parts(
    kind: Kind, step: int, meta: Mapping[str, Any], chunks: Sequence[Bytes], values: Sequence[int], previous: int
) -> tuple[list[Bytes], int]:
    """A record's bytes in parts, and the hash of its head, which the next record names.

    `meta`: JSON, typed where values are not JSON's own (`typed_json.encode`). `values`: the XXH3-64 of each chunk's
    values. `previous`: the hash of the head before; of the file's, for the first.
    """
    text = json.dumps(dict(meta), separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    directory = np.empty(len(chunks), ENTRY)
    directory["end"], directory["values"] = np.cumsum([len(chunk) for chunk in chunks], dtype=np.uint64), values
    nbytes = int(directory["end"][-1]) if chunks else 0
    filling = bytes(-nbytes % ALIGNMENT)
    index = xxhash.xxh3_64(text)
    index.update(directory.tobytes())
    body = xxhash.xxh3_64()
    for chunk in (*chunks, filling):
        body.update(chunk)
    head = HEAD.pack(
        *(RECORD_MAGIC, kind, 0, step, len(text), len(chunks), nbytes + len(filling)),
        *(index.intdigest(), body.intdigest(), previous, 0),
    )
    own = _hash(head[:56])
    return [head[:56] + own.to_bytes(8, "little"), text, directory.tobytes(), *chunks, filling], own


def _hash(data: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


@dataclass(frozen=True)
class RankLog:
    """What of a rank's file is whole."""

    path: Path
    records: tuple[LogRecord, ...]
    end: int
    """Where the whole records end."""
    last_hash: int
    """Of the last whole head: the next record has to name it."""
    torn: str | None
    """Why what follows is no whole record; None if nothing follows."""


def scan(path: Path, head: FileHead, check: bool = False) -> RankLog:
    """The whole records of a rank's file. Of chunks, those are read that were not flushed yet; with `check`, all.

    Raises `Incomplete` if there is no such file, `Corrupt` if it is of another log.
    """
    try:
        with path.open("rb", buffering=0) as file:
            return _scan(path, file.fileno(), head, check)
    except FileNotFoundError:
        raise Incomplete(f"the log of rank {head.rank} is missing", where=path) from None
    except OSError as error:
        raise unreadable(error, path) from error


@dataclass(frozen=True)
class _ScannedRecord:
    """A record, and what it takes to check its chunks."""

    record: LogRecord
    begin: int
    body: int
    """Where its chunks begin."""
    body_nbytes: int
    body_hash: int
    own_hash: int


def _scan(path: Path, file: int, head: FileHead, check: bool) -> RankLog:
    nbytes, expected = os.fstat(file).st_size, head.dump()
    first = os.pread(file, FILE_HEAD.size, 0)
    if first != expected:
        if nbytes < FILE_HEAD.size or not any(first):
            return RankLog(path, (), 0, 0, "its head is not written yet")
        raise Corrupt(
            "not a file of this log: it is of another run, rank or step, or its head is damaged",
            where=path,
            hint="The files of a segment belong together: put the right one back.",
        )
    scanned: list[_ScannedRecord] = []
    torn, end, previous, flushed = None, FILE_HEAD.size, int.from_bytes(first[56:], "little"), 0
    options: dict[str, Any] = {}
    while end < nbytes:
        try:
            one = _next(file, end, nbytes, previous, options)
        except _TornRecord as reason:
            torn = str(reason)
            break
        scanned.append(one)
        end, previous = one.body + one.body_nbytes, one.own_hash
        flushed = max(flushed, one.record.flushed)
    for number, one in enumerate(scanned):
        if (check or one.begin >= flushed) and _body_hash(file, one.body, one.body_nbytes) != one.body_hash:
            torn, end = f"the values of step {one.record.step} do not fit their hash", one.begin
            previous = scanned[number - 1].own_hash if number else int.from_bytes(first[56:], "little")
            del scanned[number:]
            break
    return RankLog(path, tuple(one.record for one in scanned), end, previous, torn)


def _next(file: int, at: int, nbytes: int, previous: int, options: dict[str, Any]) -> _ScannedRecord:
    raw = os.pread(file, HEAD.size, at)
    if len(raw) < HEAD.size:
        raise _TornRecord("it ends in the head of a record")
    magic, kind, flags, step, meta_nbytes, count, body_nbytes, index, body, before, own = HEAD.unpack(raw)
    if magic != RECORD_MAGIC or _hash(raw[:56]) != own or flags or kind not in KINDS:
        raise _TornRecord("the head of a record is damaged")
    if before != previous:
        raise _TornRecord("a record does not follow the one before it")
    listed, begin = count * ENTRY.itemsize, at + HEAD.size
    if meta_nbytes > MAX_META or begin + meta_nbytes + listed + body_nbytes > nbytes:
        raise _TornRecord("it ends in a record")
    content = os.pread(file, meta_nbytes + listed, begin)
    if _hash(content) != index:
        raise _TornRecord("the directory of a record is damaged")
    ends = np.frombuffer(content, ENTRY, offset=meta_nbytes)["end"]
    total = int(ends[-1]) if count else 0
    if (ends[1:] < ends[:-1]).any() or not total <= body_nbytes < total + ALIGNMENT:
        raise _TornRecord("the directory of a record is damaged")
    meta = _meta(content[:meta_nbytes])
    flushed = meta.pop("flushed", 0)
    groups = json.dumps(meta.get("groups"))
    if "groups" in meta:  # the same for thousands of steps, nearly always
        meta["groups"] = options.setdefault(groups, meta["groups"])
    record = LogRecord(
        *(Kind(kind), step, {key: value for key, value in meta.items() if key not in LARGE}),
        *(begin, meta_nbytes, count, total, flushed if is_natural(flushed) else 0),
    )
    return _ScannedRecord(record, at, begin + meta_nbytes + listed, body_nbytes, body, own)


def _body_hash(file: int, begin: int, nbytes: int) -> int:
    """The XXH3-64 of a range of the file, as far as it is there."""
    state, done = xxhash.xxh3_64(), 0
    while done < nbytes and (part := os.pread(file, min(nbytes - done, 1 << 22), begin + done)):
        state.update(part)
        done += len(part)
    return state.intdigest()


def _meta(content: bytes) -> dict[str, Any]:
    try:
        meta = json.loads(content)
    except (ValueError, RecursionError):
        raise _TornRecord("the text of a record is no JSON") from None
    if not isinstance(meta, dict):
        raise _TornRecord("the text of a record is no object")
    return meta


class _TornRecord(Exception):
    """What follows is no whole record: the reason, for people."""
