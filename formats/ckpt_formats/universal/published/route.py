"""The way from a state that a follower has to a published step: by folds where they are, else step by step."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.universal.published.records import Head, RecordRef, StepName, StepRecord, hash_bytes

MAX_ROUTE = 1 << 16
"""Records on the way to a step."""
ReadRecord = Callable[[str], bytes | None]
"""Returns the bytes of a record by its key; None if the chain does not have it."""


@dataclass(frozen=True)
class Route:
    """Records to apply in this order. The first one is a base, or its parent is the state that there is."""

    records: tuple[StepRecord, ...]
    end: StepRecord
    """The step where it ends: its state is that of the last record."""
    at: RecordRef
    """The same, as other records name it."""

    @property
    def begins_with_base(self) -> bool:
        return bool(self.records) and self.records[0].is_base

    @property
    def nbytes(self) -> int:
        """The bytes of all objects."""
        return sum(record.nbytes for record in self.records)


def find_route(
    head: Head,
    have: RecordRef | None,
    read: ReadRecord,
    where: Path,
    target: RecordRef | None = None,
    signing_key: bytes | None = None,
) -> Route:
    """The route from the state `have` (None: there is none) to `target`, or to the last step if it is None.

    From the end backwards: a fold that ends at a step and does not begin before `have`, else the step itself. So a fold
    that ends at a base leads over it; if that takes more bytes than the base, the route begins with the base. Each
    record is the one that the record after it names by its hash, so all of them belong to the head.

    Raises `CorruptError` if a record is not the one that is named, or does not lead to a base, `IncompleteError` if one
    is missing.
    """
    at = head.record if target is None else target
    end = read_record(at, read, where, signing_key)
    route_end, records = at, list[StepRecord]()
    base: tuple[int, RecordRef] | None = None
    is_behind = have is not None and have.name.epoch == at.name.epoch and have.name.step < at.name.step
    folds = _longest_folds(head, at, have.name.step if have is not None and is_behind else None)
    while at != have:
        own = end if at == route_end else None
        if at.name == head.base:
            base = len(records), at
        if not is_behind and at.name <= head.base:
            own = own or read_record(at, read, where, signing_key)
        fold = None
        if own is None or is_behind or not own.is_base:
            tried = (_fold(at, first, read, where, signing_key) for first in folds.get(at.name.step, ()))
            fold = next((one for one in tried if one is not None), None)
        record = fold or own or read_record(at, read, where, signing_key)
        if at == route_end and record.state != end.state:
            raise CorruptError("the fold has another state than its step", where=where / record.key)
        records.append(record)
        if len(records) > MAX_ROUTE:
            raise CorruptError(f"more than {MAX_ROUTE:,} steps without a base", where=where / record.key)
        if record.parent is None:
            break
        at = record.parent
    if base is not None and sum(one.nbytes for one in records[base[0] :]) > head.base_nbytes > 0:
        own = end if base[1] == route_end else read_record(base[1], read, where, signing_key)
        if not own.is_base:
            raise CorruptError("the head names it as a base, and it is none", where=where / own.key)
        records[base[0] :] = [own]
    return Route(tuple(reversed(records)), end, route_end)


def _longest_folds(head: Head, at: RecordRef, have: int | None) -> dict[int, list[int]]:
    """The first steps of the folds that may be used, by their last step; the longest comes first.

    have: the step of the state that there is, or None: then no fold may begin before the base.
    """
    result: dict[int, list[int]] = {}
    least = (head.base.step if at.name >= head.base else 0) if have is None else have
    for first, last in sorted(head.folds) if at.name.epoch == head.record.name.epoch else ():
        if first >= least:
            result.setdefault(last, []).append(first)
    return result


def read_record(ref: RecordRef, read: ReadRecord, where: Path, signing_key: bytes | None = None) -> StepRecord:
    """The record of a step that is named by its hash. Raises `CorruptError`, `IncompleteError`."""
    data = read(ref.name.key)
    if data is None:
        raise IncompleteError(f"the record of step {ref.name.step} is missing", where=where / ref.name.key)
    if hash_bytes(data) != ref.hash:
        raise CorruptError("not the record that a later one names", where=where / ref.name.key)
    record = StepRecord.from_bytes(data, where / ref.name.key, signing_key)
    if record.name != ref.name:
        raise CorruptError("the record of another step", where=where / ref.name.key)
    return record


def ref_of(name: StepName, data: bytes) -> RecordRef:
    """The reference to a record with these bytes."""
    return RecordRef(name, hash_bytes(data))


def _fold(at: RecordRef, first: int, read: ReadRecord, where: Path, signing_key: bytes | None) -> StepRecord | None:
    """The fold from the step `first` to `at`; None if there is none any more, or it is of another step."""
    key = at.name.fold_key(first)
    data = read(key)
    if data is None:
        return None
    record = StepRecord.from_bytes(data, where / key, signing_key)
    fits = record.same_as == at and record.parent is not None and record.parent.name.step == first
    return record if fits else None
