"""Read a published chain: its head, records, models and objects. All may be late, damaged or hostile."""

import mmap
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import TypeVar

from ckpt_formats.core.arguments import StrPath
from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError, UnsafeError
from ckpt_formats.core.files import write_all
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.place import ReadPlace, Version
from ckpt_formats.stores.location import read_place
from ckpt_formats.universal.published.model import MAX_FILE, MAX_MODEL, PublishedModel
from ckpt_formats.universal.published.records import (
    HEAD,
    MAX_HEAD,
    MAX_RECORD,
    Head,
    ObjectRef,
    RecordRef,
    StepName,
    StepRecord,
    hash_bytes,
)
from ckpt_formats.universal.published.route import Route, find_route, read_record, ref_of

T = TypeVar("T")

_ONE_SLASH = re.compile(r"^([a-z][a-z0-9+.-]*):/(?!/)")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds until something that is missing or damaged is read again: twice as long each time."""
_READS_OF_DAMAGE = 3
_BLOCK = 8 << 20
MAX_IN_MEMORY = 64 << 20
"""Bytes of an object that is read into memory; a larger one is put into a file first."""
_MAX_RECORDS = 64
"""Records in memory: each is read once."""


class FollowingStopped(Exception):
    """The caller has set the event that ends the work."""


class DamagedChunkError(CorruptError):
    """A chunk that was fetched without the rest of its object has other bytes than were published."""


class MissingObjectError(IncompleteError):
    """An object that a record names does not exist, or does not exist yet."""

    record: StepRecord


def _missing_object(record: StepRecord, where: str) -> MissingObjectError:
    error = MissingObjectError(
        f"an object of step {record.name.step} is missing",
        where=where,
        hint="If the chain is a copy, copy it again. Old steps are removed from a chain: follow its last one.",
    )
    error.record = record
    return error


@dataclass(frozen=True)
class FollowedStep:
    """A published step."""

    epoch: int
    """Rises when the run goes back to an earlier step."""
    step: int
    hash: str
    """Of the state: 32 hexadecimal digits. Two states are equal if their hashes are."""
    published: float
    """Seconds since 1970, by the clock of the run."""
    is_base: bool
    """Whether it was published alone, not as a change of the step before."""
    ref: RecordRef
    """Its record."""
    continues: tuple[int, int] | None = None
    """Of the first step of an epoch: the epoch and step from which the run continued, if it is known."""

    @property
    def age(self) -> float:
        """Seconds since it was published, if the clocks of the run and of this machine agree."""
        return time.time() - self.published

    @classmethod
    def of(cls, record: StepRecord, ref: RecordRef) -> "FollowedStep":
        """The step of a record. `ref`: the record as others name it."""
        name, before = ref.name, record.continues
        continues = None if before is None else (before.name.epoch, before.name.step)
        published = datetime.fromisoformat(record.time).timestamp()
        return cls(name.epoch, name.step, record.state, published, record.is_base, ref, continues)


class _ShownPlace(type(Path())):  # type: ignore[misc]
    """The path or URL of a chain, for messages: a `Path` shows only one slash after a scheme."""

    def __str__(self) -> str:
        text: str = super().__str__()
        return _ONE_SLASH.sub(r"\1://", text)


class PublishedSource:
    """What a published chain has, read and verified. Threads may share it."""

    def __init__(
        self,
        chain: StrPath,
        signing_key: bytes | None = None,
        patience: float = 5.0,
        stop: threading.Event | None = None,
        scratch: Path | None = None,
    ) -> None:
        """Read from a path or a URL; no request is made yet.

        `patience`: seconds for which a missing object is read again. `stop`: once it is set, every read raises
        `FollowingStopped`. `scratch`: the folder for objects that are too large for memory.
        """
        self.place: ReadPlace = read_place(chain)
        self.where: Path = _ShownPlace(self.place.where())
        self.signing_key = signing_key
        self.patience = patience
        self.stop = threading.Event() if stop is None else stop
        self.scratch = scratch
        self._version: Version | None = None
        self._newest: Head | None = None
        self._records: dict[str, bytes] = {}
        self._files: dict[ObjectRef, bytes] = {}
        self._is_past_caches = False
        """Whether all reads are such that no cache answers them."""
        self._model: tuple[ObjectRef, PublishedModel] | None = None

    @property
    def newest(self) -> Head | None:
        """The newest head that was read."""
        return self._newest

    def head(self, seconds: float = 0.0) -> Head | None:
        """The newest head so far; None if nothing has been published yet. An older one, from a cache, has no effect.

        `seconds`: how long to wait for another head than the last one, where the place can wait. Raises `CorruptError`.
        """
        head, newest = self._repeated(lambda place: self._read_head(place, seconds)), self._newest
        if head is None:
            return newest
        if newest is None or head.record.name > newest.record.name:
            self._newest = head
        elif head.record.name == newest.record.name:
            if head.record.hash != newest.record.hash:
                raise CorruptError("two records of one step", where=self.where / head.record.name.key)
            self._newest = head  # it may name more folds
        return self._newest

    def step(self, ref: RecordRef) -> FollowedStep:
        """A step by its record. Raises as `record`."""
        return FollowedStep.of(self.record(ref), ref)

    def ref(self, head: Head, step: int | None = None) -> RecordRef:
        """The last step as records name it, or the step `step` of the same epoch.

        Raises `NotFoundError` if the chain does not have the step.
        """
        if step is None or step == head.record.name.step:
            return head.record
        name = StepName(head.record.name.epoch, step)
        data = self._read_record(self.place, name.key) if step < head.record.name.step else None
        if data is None:
            raise NotFoundError(
                f"step {step} of epoch {name.epoch} is not published, or was removed",
                where=self.where,
                hint=f"The last step is {head.record.name.step}.",
            )
        return ref_of(name, data)

    def record(self, ref: RecordRef) -> StepRecord:
        """The record of a step. Raises `CorruptError`."""
        return self._repeated(
            lambda place: read_record(ref, partial(self._read_record, place), self.where, self.signing_key)
        )

    def record_bytes(self, ref: RecordRef) -> bytes:
        """The bytes of a step's record. Raises as `record`."""
        self.record(ref)
        data = self._read_record(self.place, ref.name.key)
        if data is None or hash_bytes(data) != ref.hash:
            raise CorruptError("the record was replaced", where=self.where / ref.name.key)
        return data

    def along_route(self, head: Head, current: RecordRef | None, target: RecordRef, use: Callable[[Route], T]) -> T:
        """The result of `use` for a route from the state `current` to `target`.

        If an object or a record is missing, other routes are tried: without the fold, then from a base. If a chunk that
        was fetched alone is damaged, all is read once more, past caches. Raises what `use` raised for the last one, or
        `IncompleteError`.
        """
        try:
            return self._along_route(head, current, target, use)
        except DamagedChunkError:
            self._is_past_caches = True
            return self._along_route(head, current, target, use)
        finally:
            self._is_past_caches = False

    def _along_route(self, head: Head, current: RecordRef | None, target: RecordRef, use: Callable[[Route], T]) -> T:
        missing, failure = set[str](), None

        def route_from(begin: RecordRef | None, place: ReadPlace) -> Route:
            def read(key: str) -> bytes | None:
                return None if key in missing else self._read_record(place, key)

            return find_route(head, begin, read, self.where, target, self.signing_key)

        for begin in dict.fromkeys((current, None)):
            while True:
                try:
                    route = self._repeated(partial(route_from, begin))
                except (CorruptError, IncompleteError) as error:
                    failure = failure or error
                    break
                try:
                    return use(route)
                except MissingObjectError as error:
                    failure = error
                    if error.record.same_as is None:
                        break
                    missing.add(error.record.key)
        assert failure is not None
        raise failure

    def model(self, record: StepRecord) -> PublishedModel:
        """The model of a step. Raises `CorruptError`, `MissingObjectError`, `UnsupportedError`."""
        if self._model is None or self._model[0] != record.model:
            data = self._small(record, record.model, MAX_MODEL)
            model = PublishedModel.from_bytes(data, self.where / record.model.key)
            if self.signing_key is not None and any(ref.sha256 is None for ref in model.files.values()):
                raise CorruptError("a file of the model is not signed", where=self.where / record.model.key)
            self._model = record.model, model
            self._files = {ref: data for ref, data in self._files.items() if ref in model.files.values()}
        model = self._model[1]
        if len(model.pieces) != len(record.shares):
            raise CorruptError("the record has another number of ranks than its model", where=self.where / record.key)
        return model

    def files(self, record: StepRecord) -> dict[str, bytes]:
        """The files that a folder of the model has next to its weights, by name. Raises as `model`."""
        model = self.model(record)
        return {name: self._file(record, ref) for name, ref in model.files.items()}

    def file(self, record: StepRecord, name: str) -> bytes | None:
        """A file that a folder of the model has next to its weights; None if it has no such file. Raises as `model`."""
        ref = self.model(record).files.get(name)
        return None if ref is None else self._file(record, ref)

    def _file(self, record: StepRecord, ref: ObjectRef) -> bytes:
        """A file of the model: those of the last model that was read stay in memory, so that no step waits for them."""
        if ref not in self._files:
            self._files[ref] = self._small(record, ref, MAX_FILE)
        return self._files[ref]

    def fetch(self, record: StepRecord, ref: ObjectRef, most: int) -> memoryview:
        """An object of a step, compared with its hash: (nbytes,) uint8, in memory or mapped from a temporary file.

        Raises `UnsafeError` if it has more than `most` bytes, `MissingObjectError`, `CorruptError`.
        """
        where = self.place.where(ref.key)
        if ref.nbytes > most:
            raise UnsafeError(f"has {ref.nbytes:,} bytes, more than it can need ({most:,})", where=where)

        def read(place: ReadPlace) -> memoryview:
            if ref.nbytes > MAX_IN_MEMORY:
                data = self._spool(place, ref, [(0, ref.nbytes)])[0]
            else:
                data = place.read_range(ref.key, 0, ref.nbytes)
            ref.check(data, where)
            return data

        return self._repeated(read, lambda: _missing_object(record, where))

    def fetch_ranges(
        self, record: StepRecord, ref: ObjectRef, most: int, ranges: Sequence[tuple[int, int]]
    ) -> list[memoryview]:
        """Ranges of an object of a step, by the offset and bytes of each; the caller verifies them. Raises as `fetch`.

        They are in memory, or together in a temporary file.
        """
        where = self.place.where(ref.key)
        if ref.nbytes > most or any(at + nbytes > ref.nbytes for at, nbytes in ranges):
            raise UnsafeError(f"has {ref.nbytes:,} bytes, but {most:,} at most can be needed", where=where)

        def read(place: ReadPlace) -> list[memoryview]:
            if sum(nbytes for _, nbytes in ranges) > MAX_IN_MEMORY:
                return self._spool(place, ref, ranges)
            return [place.read_range(ref.key, at, nbytes) for at, nbytes in ranges]

        return self._repeated(read, lambda: _missing_object(record, where))

    def check_stop(self) -> None:
        """Raise `FollowingStopped` if the work is to end."""
        if self.stop.is_set():
            raise FollowingStopped

    def _read_head(self, place: ReadPlace, seconds: float) -> Head | None:
        """The head, if it is another one than at the last time; else None."""
        try:
            if self._version is None:
                there = place.read(HEAD, MAX_HEAD)
            else:
                there = place.read_if_changed(HEAD, self._version, MAX_HEAD, seconds)
        except FileNotFoundError:
            there = None
        if there is None:
            return None
        self._version = None  # until it is known that it is a head
        head = Head.from_bytes(there[0], self.where / HEAD, self.signing_key)
        self._version = there[1]
        return head

    def _small(self, record: StepRecord, ref: ObjectRef, most: int) -> bytes:
        return bytes(self.fetch(record, ref, most))

    def _spool(self, place: ReadPlace, ref: ObjectRef, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Ranges of an object, mapped from a file without a name."""
        folder = Path(self.scratch or tempfile.gettempdir())
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            for first, nbytes in ranges:
                for at in range(first, first + nbytes, _BLOCK):
                    self.check_stop()
                    data = place.read_range(ref.key, at, min(_BLOCK, first + nbytes - at))
                    try:
                        write_all(file, data)
                    except OSError as error:
                        raise unwritable(error, folder) from error
            total = sum(nbytes for _, nbytes in ranges)
            whole = memoryview(mmap.mmap(file.fileno(), total, prot=mmap.PROT_READ))
        ends = list(accumulate(nbytes for _, nbytes in ranges))
        return [whole[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    def _read_record(self, place: ReadPlace, key: str) -> bytes | None:
        data = self._records.get(key)
        if data is None:
            self.check_stop()
            there = place.read(key, MAX_RECORD)
            if there is None:
                return None
            data = there[0]
            while len(self._records) >= _MAX_RECORDS:
                self._records.pop(next(iter(self._records)))
            self._records[key] = data
        return data

    def _repeated(self, read: Callable[[ReadPlace], T], missing: Callable[[], IncompleteError] | None = None) -> T:
        """What `read` returns; after a failure, it is called again. `missing`: the error if the object stays absent.

        What is damaged is read again past caches, which may have damaged it.
        """
        end, pause, damaged = time.monotonic() + self.patience, _FIRST_PAUSE, 0
        while True:
            self.check_stop()
            try:
                return read(self.place.past_caches() if damaged or self._is_past_caches else self.place)
            except (CorruptError, IncompleteError):
                damaged += 1
                self._records.clear()
                if damaged >= _READS_OF_DAMAGE:
                    raise
            except FileNotFoundError:
                if missing is None:
                    raise
                if time.monotonic() >= end:
                    raise missing() from None
            self.stop.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
