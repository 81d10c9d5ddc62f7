"""The records of a rank's file: their bytes, and which of them are valid.

    head 64 B | record | record | ...
    record = head 64 B | meta (typed JSON, filled with spaces to 8) | directory, 16 B a chunk | chunks, zeros to 8

A head has the hashes of the bytes that follow it and of the head before it. A record is valid if it is complete, if
its hashes fit, and if it names the record before it. A reader ignores all bytes from the first record on that is not
valid. If those bytes were flushed before, which later records state, they are damaged: otherwise, a killed writer can
have left them. See docs/format.md.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from struct import Struct
from typing import Any, TypeVar

import numpy as np
import xxhash

from ckpt_codecs.base import Array, Bytes
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError
from ckpt_formats.core.files import Reader, unreadable
from ckpt_formats.core.open_file import OpenFile, open_file

MAGIC, RECORD_MAGIC = b"CKPTGRAD", b"CKGR"
VERSION = 1
FILE_HEAD = Struct("<8sIIIIQ16s8xQ")
HEAD = Struct("<4sHHQIIQQQQQ")
ENTRY = np.dtype([("end", "<u8"), ("values", "<u8")])
"""An entry of the directory: the end of a chunk, counted from the start of the first, and the XXH3-64 of its values."""
ALIGNMENT = 8
MAX_CHUNK_OVERHEAD = 1 << 12
"""The maximum number of bytes by which an encoded chunk is longer than its values."""


class Kind(IntEnum):
    """The kind of a record."""

    GRADIENTS = 1
    SKIPPED = 2
    """A step that the optimizer skipped because its gradients were not finite: no state changed."""
    STATE = 3
    """One state of the rank's vector at the start of the segment; or of some of its chunks, which a run set later."""
    BUFFERS = 4
    """Tensors that no optimizer steps, at a step; in logs of version 1."""
    NOTES = 5
    """Other values that the run needs to resume at a step."""
    FINGERPRINT = 6
    """Hashes of the states at a step."""
    END = 7
    """The run closed its log."""
    VALUES = 8
    """Tensors that no replay gives, at a step: their values, or the differences from earlier values."""
    RANDOM = 9
    """The states of random number generators at a step, of those that changed."""


KINDS = frozenset(Kind)
_MAX_SHARED = 1 << 12
"""The maximum number of parts of texts that are remembered while records are read."""
_NO_HEAD = "its head is not written yet"
_ENDS_IN_HEAD, _ENDS_IN_RECORD = "it ends inside the head of a record", "it ends inside a record"
_GROWS = frozenset((_NO_HEAD, _ENDS_IN_HEAD, _ENDS_IN_RECORD))
"""Why bytes are not a complete record that are whole as far as they are there."""
_WINDOW = 1 << 20
_MAGIC_NUMBER = int.from_bytes(RECORD_MAGIC, "little")
_Found = TypeVar("_Found")
LARGE = ("notes", "fields")
"""The fields of a record's text that are read again when needed, and not kept in memory for thousands of steps."""


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


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A complete record: its text, and the position of its chunks."""

    kind: Kind
    step: int
    meta: Mapping[str, Any]
    """Typed JSON that is not decoded (see `typed_json`), without the fields in `LARGE`."""
    begin: int
    """The offset of its text in the file."""
    meta_nbytes: int
    count: int
    """The number of chunks."""
    nbytes: int
    """The size of all chunks."""
    flushed: int
    """The number of bytes of the file that were flushed to the disk when the record was written."""
    hash: int
    """The hash of its head, which the next record names: so it is one of all bytes of the file up to its end."""

    def read_meta(self, path: Path, reader: Reader) -> dict[str, Any]:
        """All fields of its text, typed JSON that is not decoded. Raises `CorruptError`."""
        content = bytearray(self.meta_nbytes)
        reader.read_into(path, self.begin, memoryview(content))
        try:
            return _meta(bytes(content))
        except _TornRecord as reason:
            raise CorruptError(str(reason), where=path) from None

    def nbytes_of(self, path: Path, count: int, reader: Reader) -> int:
        """The size of its first `count` chunks in bytes."""
        entry = np.zeros(1, ENTRY)
        if count:
            directory = self.begin + self.meta_nbytes
            reader.read_into(path, directory + (count - 1) * ENTRY.itemsize, entry.view(np.uint8).data)
        return int(entry["end"][0])

    def read_chunk(self, path: Path, index: int, max_nbytes: int, reader: Reader) -> tuple[Array, int]:
        """The bytes of a chunk, (n,) uint8, and the XXH3-64 of its values.

        Raises `CorruptError` if n > `max_nbytes`.
        """
        low = max(index - 1, 0)
        entries = np.empty(index + 1 - low, ENTRY)
        directory = self.begin + self.meta_nbytes
        reader.read_into(path, directory + low * ENTRY.itemsize, entries.view(np.uint8).data)
        begin, end = int(entries["end"][0]) if index else 0, int(entries["end"][-1])
        if not begin <= end <= self.nbytes or end - begin > max_nbytes:
            raise CorruptError(f"step {self.step}: the directory of its record is damaged", where=path)
        data = np.empty(end - begin, np.uint8)
        reader.read_into(path, directory + self.count * ENTRY.itemsize + begin, data.data)
        return data, int(entries["values"][-1])


def hash_values(values: Array) -> int:
    """The XXH3-64 of an array's bytes. `values`: any shape and dtype, C-contiguous."""
    return xxhash.xxh3_64_intdigest(values.reshape(-1).view(np.uint8).data)


def with_one_nan(values: Array) -> Array:
    """The values with the same bits in each NaN, (n,) float32: which bits a NaN has depends on machine and library."""
    if values.dtype != np.float32 or not values.size or not np.isnan(values.min()):
        return values
    values = values.copy()
    values[np.isnan(values)] = np.nan
    return values


def record_parts(
    kind: Kind, step: int, meta: Mapping[str, Any], chunks: Sequence[Bytes], values: Sequence[int], previous: int
) -> tuple[list[Bytes], int]:
    """The bytes of a record in parts, and the hash of its head, which the next record names.

    `meta`: JSON; values that JSON does not have are typed (`typed_json.encode`). `values`: the XXH3-64 of each chunk's
    values. `previous`: the hash of the head of the record before, or of the file's head for the first record.
    """
    text = json.dumps(dict(meta), separators=(",", ":"), allow_nan=False).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    directory = np.empty(len(chunks), ENTRY)
    directory["end"], directory["values"] = np.cumsum([len(chunk) for chunk in chunks], dtype=np.uint64), values
    nbytes = int(directory["end"][-1]) if chunks else 0
    padding = bytes(-nbytes % ALIGNMENT)
    index = xxhash.xxh3_64(text)
    index.update(directory.tobytes())
    body = xxhash.xxh3_64()
    for chunk in (*chunks, padding):
        body.update(chunk)
    head = HEAD.pack(
        *(RECORD_MAGIC, kind, 0, step, len(text), len(chunks), nbytes + len(padding)),
        *(index.intdigest(), body.intdigest(), previous, 0),
    )
    own_hash = _hash(head[:56])
    return [head[:56] + own_hash.to_bytes(8, "little"), text, directory.tobytes(), *chunks, padding], own_hash


def _hash(data: Bytes) -> int:
    return xxhash.xxh3_64_intdigest(data)


@dataclass(frozen=True)
class DamagedSteps:
    """Steps that need damaged records. If `first` > `last`, no complete step needs any of them."""

    first: int
    """The first step that may need one."""
    last: int
    """The last step that was complete."""


@dataclass(frozen=True)
class RankLog:
    """The complete records of a rank's file."""

    path: Path
    records: tuple[LogRecord, ...]
    end: int
    """The offset where the complete records end."""
    last_hash: int
    """The hash of the last complete head, which the next record must name."""
    torn: str | None
    """Why the bytes after `end` are not a complete record; None if there are none."""
    damaged: DamagedSteps | None = None
    """What needs those bytes, if later records prove that they were flushed to the disk, or that the run closed its log
    after them: they are damaged. None: a killed writer may have left them."""


def scan(path: Path, head: FileHead, check_from: int | None = None) -> RankLog:
    """The complete records of a rank's file.

    Reads and checks only the chunks that were not flushed to the disk, and all from the offset `check_from` on. Raises
    `IncompleteError` if the file does not exist, and `CorruptError` if it belongs to another log.
    """
    return _with_file(path, head, lambda file: _scan(path, file, head, check_from))


def scan_after(log: RankLog, head: FileHead, check_from: int, max_records: int) -> RankLog:
    """The complete records that follow those of `log` in a file that grows: at most `max_records`.

    All chunks of records from the step `check_from` on are read and checked. Raises as `scan`.
    """
    return _with_file(log.path, head, lambda file: _scan_after(log, file, head, check_from, max_records))


def damage_after(log: RankLog, head: FileHead, step: int, records: Sequence[LogRecord]) -> DamagedSteps | None:
    """The steps that need the bytes after the complete records of a file that grows, if later records prove them.

    `records`: those of later steps than `step` that were read. Reads all bytes after `log.end` if they are not the
    start of a record. Raises as `scan`.
    """
    if log.torn is None or log.torn in _GROWS:
        return None
    end, previous = log.end, log.last_hash
    return _with_file(
        log.path, head, lambda file: _damaged_steps(file, end, file.status.st_size, step, records, previous)
    )


def _with_file(path: Path, head: FileHead, scan_file: Callable[[OpenFile], _Found]) -> _Found:
    try:
        with closing(open_file(path)) as file:
            return scan_file(file)
    except CkptError:
        raise
    except FileNotFoundError:
        raise IncompleteError(f"the log of rank {head.rank} is missing", where=path) from None
    except OSError as error:
        raise unreadable(error, path) from error


@dataclass(frozen=True, slots=True)
class _ScannedRecord:
    """A record, and the position and hash of its chunks."""

    record: LogRecord
    begin: int
    body: int
    """The offset of its chunks."""
    body_nbytes: int
    body_hash: int
    before: int
    """The hash of the head before its own."""


def _scan(path: Path, file: OpenFile, head: FileHead, check_from: int | None) -> RankLog:
    nbytes, first = file.status.st_size, _head_hash(path, file, head)
    if first is None:
        return RankLog(path, (), 0, 0, _NO_HEAD)
    records: list[LogRecord] = []
    unflushed: list[_ScannedRecord] = []
    torn, end, previous, flushed, limit = None, FILE_HEAD.size, first, 0, 1024
    damaged: DamagedSteps | None = None
    known = dict[str, Any]()
    while end < nbytes:
        try:
            one = _next(file, end, nbytes, previous, known)
        except _TornRecord as reason:
            torn, damaged = str(reason), _damaged_steps(file, end, nbytes, head.first, records, previous)
            break
        records.append(one.record)
        end, previous = one.body + one.body_nbytes, one.record.hash
        flushed = max(flushed, one.record.flushed)
        unflushed.append(one)
        if check_from is None and len(unflushed) >= limit:
            unflushed = [one for one in unflushed if one.begin >= flushed]
            limit = max(limit, 2 * len(unflushed))
    for one in unflushed:
        is_read = one.begin >= flushed or (check_from is not None and one.begin >= check_from)
        if is_read and _body_hash(file, one.body, one.body_nbytes) != one.body_hash:
            torn, end, previous = f"the values of step {one.record.step} do not fit their hash", one.begin, one.before
            if damaged is not None or flushed > end or records[-1].kind is Kind.END:
                ends = (
                    0 if damaged is None else damaged.last,
                    *map(_complete_at, records[records.index(one.record) :]),
                )
                damaged = DamagedSteps(_first_in_need(one.record.kind, one.record.step), max(ends))
            del records[records.index(one.record) :]
            break
    return RankLog(path, tuple(records), end, previous, torn, damaged)


def _damaged_steps(
    file: OpenFile, end: int, nbytes: int, first: int, records: Sequence[LogRecord], previous: int
) -> DamagedSteps | None:
    """The steps that need what is after `end`, where no record begins, if it was on the disk.

    `first`: the step where the file begins. `records`: those before, the last of which has the hash `previous`.
    The step of a record is that of its head, if that is whole. Else it may be the one whose gradients came last, unless
    something of a later step came already.
    """
    last = _last_step_after(file, end, nbytes)
    if last is None:
        return None
    raw = file.read(end, HEAD.size)
    if len(raw) == HEAD.size:
        _, kind, _, step, *_, before, own_hash = HEAD.unpack(raw)
        if (before, own_hash) == (previous, _hash(raw[:56])):
            return DamagedSteps(_first_in_need(kind, step), last)
    done = max((record.step for record in records if record.kind is Kind.GRADIENTS), default=first)
    return DamagedSteps(done + any(record.step > done for record in records), last)


def _first_in_need(kind: int, step: int) -> int:
    """The first step whose state needs a record."""
    return step + 1 if kind in (Kind.FINGERPRINT, Kind.END) else step


def _complete_at(record: LogRecord) -> int:
    """The last step that was complete, as far as a record shows: buffers, generators and doubts come before a step."""
    after = (Kind.GRADIENTS, Kind.FINGERPRINT, Kind.END)
    is_after = record.kind in after or (record.kind is Kind.NOTES and "doubt" not in record.meta)
    return record.step if is_after else max(record.step - 1, 0)


def _last_step_after(file: OpenFile, end: int, nbytes: int) -> int | None:
    """The last step that records after `end` show, where none begins; None if what is between may have been torn."""
    at, step, was_flushed = end + ALIGNMENT, None, False
    to_read = 2 * nbytes + MAX_LIST  # heads that all state the same long text would be read for ever
    while at < nbytes and to_read > 0:
        window = file.read(at, min(_WINDOW, nbytes - at))
        to_read -= len(window)
        places = np.frombuffer(window, "<u4", len(window) // 4)[:: ALIGNMENT // 4] == _MAGIC_NUMBER
        following = at + len(window) // ALIGNMENT * ALIGNMENT
        for place in (at + ALIGNMENT * int(row) for row in np.flatnonzero(places)):
            if to_read <= 0:
                break
            with suppress(_TornRecord):
                to_read -= _text_nbytes(file, place)
                one = _next(file, place, nbytes, None, {})
                step = max(step or 0, _complete_at(one.record))
                was_flushed |= one.record.flushed > end or one.record.kind is Kind.END
                following = one.body + one.body_nbytes
                break
        at = max(following, at + ALIGNMENT)
    return step if was_flushed else None


def _scan_after(log: RankLog, file: OpenFile, head: FileHead, check_from: int, max_records: int) -> RankLog:
    nbytes, end, previous = file.status.st_size, log.end, log.last_hash
    if end == 0:
        first = _head_hash(log.path, file, head)
        if first is None:
            return RankLog(log.path, (), 0, 0, _NO_HEAD)
        end, previous = FILE_HEAD.size, first
    records: list[LogRecord] = []
    torn, known = None, dict[str, Any]()
    while end < nbytes and len(records) < max_records:
        try:
            one = _next(file, end, nbytes, previous, known)
        except _TornRecord as reason:
            torn = str(reason)
            break
        if one.record.step >= check_from and _body_hash(file, one.body, one.body_nbytes) != one.body_hash:
            torn = f"the values of step {one.record.step} do not fit their hash"
            break
        records.append(one.record)
        end, previous = one.body + one.body_nbytes, one.record.hash
    return RankLog(log.path, tuple(records), end, previous, torn)


def _head_hash(path: Path, file: OpenFile, head: FileHead) -> int | None:
    """The hash of a file's head; None if it is not written yet. Raises `CorruptError` if the file has another head."""
    content = file.read(0, FILE_HEAD.size)
    if content == head.dump():
        return int.from_bytes(content[56:], "little")
    if len(content) < FILE_HEAD.size or not any(content):
        return None
    raise CorruptError(
        "not a file of this log: it belongs to another run, rank or step, or its head is damaged",
        where=path,
        hint="The files of a segment belong together: restore the original file.",
    )


def _text_nbytes(file: OpenFile, at: int) -> int:
    """The bytes of a text and directory, as the head at `at` states them; of a head that is damaged, only its own."""
    raw = file.read(at, HEAD.size)
    if len(raw) < HEAD.size:
        return len(raw)
    _, _, _, _, meta_nbytes, count, *_, own_hash = HEAD.unpack(raw)
    return HEAD.size + (meta_nbytes + count * ENTRY.itemsize if _hash(raw[:56]) == own_hash else 0)


def _next(file: OpenFile, at: int, nbytes: int, previous: int | None, known: dict[str, Any]) -> _ScannedRecord:
    """The record at `at`, which follows the one whose head has the hash `previous`; None: any one."""
    raw = file.read(at, HEAD.size)
    if len(raw) < HEAD.size:
        raise _TornRecord(_ENDS_IN_HEAD)
    magic, kind, flags, step, meta_nbytes, count, body_nbytes, index, body, before, own_hash = HEAD.unpack(raw)
    if magic != RECORD_MAGIC or _hash(raw[:56]) != own_hash or flags or kind not in KINDS:
        raise _TornRecord("the head of a record is damaged")
    if previous is not None and before != previous:
        raise _TornRecord("a record does not follow the one before it")
    directory_nbytes, begin = count * ENTRY.itemsize, at + HEAD.size
    if meta_nbytes > MAX_LIST or begin + meta_nbytes + directory_nbytes + body_nbytes > nbytes:
        raise _TornRecord(_ENDS_IN_RECORD)
    content = file.read(begin, meta_nbytes + directory_nbytes)
    if _hash(content) != index:
        raise _TornRecord("the directory of a record is damaged")
    ends = np.frombuffer(content, ENTRY, offset=meta_nbytes)["end"]
    total = int(ends[-1]) if count else 0
    if (ends[1:] < ends[:-1]).any() or not total <= body_nbytes < total + ALIGNMENT:
        raise _TornRecord("the directory of a record is damaged")
    meta = _meta(content[:meta_nbytes])
    flushed = meta.pop("flushed", 0)
    meta = _shared({key: value for key, value in meta.items() if key not in LARGE}, known)
    record = LogRecord(
        *(Kind(kind), step, meta),
        *(begin, meta_nbytes, count, total, flushed if is_natural(flushed) else 0, own_hash),
    )
    return _ScannedRecord(record, at, begin + meta_nbytes + directory_nbytes, body_nbytes, body, before)


def _shared(value: Any, known: dict[str, Any]) -> Any:
    """A value of JSON in which each part that `known` has, by its text, is the same object. New parts are added to it.

    Almost all parts are the same in thousands of records.
    """
    text = json.dumps(value)
    if text in known:
        return known[text]
    if len(known) >= _MAX_SHARED:  # a schedule gives each step parts of its own
        known.clear()
    if isinstance(value, list):
        value = [_shared(one, known) for one in value]
    elif isinstance(value, dict):
        value = {sys.intern(key): _shared(one, known) for key, one in value.items()}
    known[text] = value
    return value


def _body_hash(file: OpenFile, begin: int, nbytes: int) -> int:
    """The XXH3-64 of a range of the file, up to the end of the file."""
    state, done = xxhash.xxh3_64(), 0
    while done < nbytes and (part := file.read(begin + done, min(nbytes - done, 1 << 22))):
        state.update(part)
        done += len(part)
    return state.intdigest()


def _meta(content: bytes) -> dict[str, Any]:
    try:
        meta = json.loads(content)
    except (ValueError, RecursionError):
        raise _TornRecord("the text of a record is not JSON") from None
    if not isinstance(meta, dict):
        raise _TornRecord("the text of a record is not a JSON object")
    return meta


class _TornRecord(Exception):
    """The next bytes are not a complete record. The message states the reason."""
