"""Which steps are published, read by name: no chunk is decoded here."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpt_formats.core.errors import CorruptError, NotFoundError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.folders import names_in
from ckpt_formats.core.identity import unrecorded
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.universal.published.model import MAX_MODEL, PublishedModel
from ckpt_formats.universal.published.records import (
    FOLDER,
    HEAD,
    MAX_HEAD,
    MAX_RECORD,
    Head,
    ObjectRef,
    StepName,
    StepRecord,
    object_key,
    parse_name,
)

HINT = "The chain was damaged after it was written: restore it from a copy. `ckpt verify` lists all damage."


@dataclass(frozen=True)
class PublishedStep:
    """A published step, as its record states it."""

    epoch: int
    step: int
    kind: Literal["base", "delta"]
    stored_nbytes: int
    """The bytes of the objects of all ranks."""
    ranks: int
    time: str
    """When it was published: UTC, ISO 8601."""

    __repr__ = short_repr


def read_steps(run: Path) -> list[PublishedStep]:
    """All published steps, in the order of their numbers. Raises `CorruptError` for a damaged record."""
    head = read_head(run)
    names = {} if head is None else published_steps(run, head)
    steps = []
    for number in sorted(names):
        record = read_record_at(run, names[number])[0]
        kind: Literal["base", "delta"] = "base" if record.is_base else "delta"
        steps.append(PublishedStep(record.name.epoch, number, kind, record.nbytes, len(record.shares), record.time))
    return steps


def read_head(run: Path) -> Head | None:
    """The head of a published chain; None if no step is published yet."""
    with unrecorded():  # a run replaces it with each step
        data = read_file(run / HEAD, MAX_HEAD)
    return None if data is None else Head.from_bytes(data, run / HEAD)


def published_steps(run: Path, head: Head) -> dict[int, StepName]:
    """All steps that are published, by number: of several epochs with the same step, the last epoch.

    A web server that lists no folders shows the last step only.
    """
    names = (parse_name(name.removesuffix(".json")) for name in names_in(run / FOLDER / "steps"))
    there = {name for name in names if name is not None and name <= head.record.name}
    return {name.step: name for name in sorted(there | {head.record.name})}


def find_step(run: Path, head: Head, step: int) -> StepName | None:
    """A published step by its number: of several epochs with it, the last epoch; None if there is none."""
    last = head.record.name
    name = StepName(last.epoch, step)
    if name == last or (name < last and (run / name.key).is_file()):  # without a listing
        return name
    return published_steps(run, head).get(step)


def read_record_at(run: Path, name: StepName) -> tuple[StepRecord, bytes]:
    """The record of a step, and its bytes. Raises `NotFoundError`, `CorruptError`."""
    data = read_file(run / name.key, MAX_RECORD)
    if data is None:
        raise NotFoundError(f"step {name.step} is not published", where=run / name.key)
    return StepRecord.from_bytes(data, run / name.key), data


def read_model(run: Path, ref: ObjectRef) -> PublishedModel:
    """The model of a step. Raises `CorruptError`."""
    return PublishedModel.from_bytes(read_object(run, ref, MAX_MODEL), run / ref.key)


def read_object(run: Path, ref: ObjectRef, max_nbytes: int) -> bytes:
    """A small object, compared with its hash. Raises `CorruptError`."""
    data = read_file(run / object_key(ref.hash), max_nbytes)
    if data is None:
        raise CorruptError("the object is missing", where=run / ref.key, hint=HINT)
    ref.check(data, str(run / ref.key))
    return data


def read_file(path: Path, max_nbytes: int) -> bytes | None:
    """All bytes of a file of a published chain; None if it does not exist. Raises `UnsafeError` if it is too large."""
    try:
        return read_whole(path, max_nbytes)
    except NotFoundError:
        return None
