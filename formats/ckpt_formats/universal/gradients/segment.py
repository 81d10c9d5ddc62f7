"""A segment of the log: the files of all ranks, and the steps that are complete in all of them."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_codecs.gradients import GRADIENT_CODECS
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.typed_json import decode
from ckpt_formats.core.claims import MAX_INDEX, MAX_RANDOM
from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError
from ckpt_formats.core.files import Reader, read_whole
from ckpt_formats.core.identity import in_threads
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.text import list_names
from ckpt_formats.core.values import Value
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients.layout import RankLayout, SegmentLayout
from ckpt_formats.universal.gradients.random_states import random_states_at
from ckpt_formats.universal.gradients.record import HEAD, FileHead, Kind, LogRecord, RankLog, hash_values, scan

FOLDER = "gradients-{:010d}"
LOSSY = tuple(name for name, codec in GRADIENT_CODECS.items() if not codec.lossless)
"""The lossy codecs of gradients."""
_AFTERWARDS = (Kind.FINGERPRINT, Kind.END)
"""The kinds of records that come when the state at their step can be read already, and that it does not need."""


def rank_file(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.ckg"


@dataclass(frozen=True)
class LoggedUpdate:
    """One call of an optimizer, as one rank recorded it."""

    record: LogRecord
    optimizer: int
    vectors: frozenset[int] | None
    """The vectors of the rank that had a gradient; None: all vectors of the optimizer."""
    groups: tuple[Mapping[str, Value], ...]
    """The options of that optimizer's groups."""


@dataclass(frozen=True)
class Doubt:
    """Steps at which some tensors may have had other values than the log has."""

    first: int
    last: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class Segment:
    """A segment with the steps after `layout.first`."""

    folder: Path
    layout: SegmentLayout
    logs: tuple[RankLog, ...]
    limit: int | None = None
    """The last valid step, if the chain states one: later steps were dropped."""
    earlier_options: Mapping[int, tuple[Mapping[str, Value], ...]] = field(default_factory=dict)
    """The options of all groups at `first`, by optimizer, if there were steps before."""

    @cached_property
    def updates(self) -> tuple[tuple[tuple[LoggedUpdate, ...], ...], ...]:
        """The updates of each step, by rank and by step, from the step after `first` on. Only complete steps."""
        return tuple(tuple(self.steps(rank)) for rank in range(len(self.logs)))

    @cached_property
    def sets(self) -> tuple[dict[tuple[int, bool], tuple[LogRecord, ...]], ...]:
        """The states that the run set outside its optimizers, in the order of the file.

        By rank, then by the step and whether they were set after the gradients of that step were applied, not before.
        """
        return tuple(_sets(log) for log in self.logs)

    @property
    def first(self) -> int:
        return self.layout.first

    @cached_property
    def last(self) -> int:
        """The last step that is complete in all ranks, and needs no damaged record."""
        last = self.first + min(len(steps) for steps in self.updates)
        last = min([last, *(max(log.damaged.first - 1, self.first) for log in self.logs if log.damaged is not None)])
        return last if self.limit is None else min(last, self.limit)

    @cached_property
    def last_recorded(self) -> int:
        """The last step that was complete in all ranks, as the chain states or later records prove."""
        if self.limit is not None:
            return self.limit
        complete = (self.first + len(steps) for steps in self.updates)
        return min(
            max(step, log.damaged.last if log.damaged else 0) for step, log in zip(complete, self.logs, strict=True)
        )

    @property
    def torn(self) -> dict[Path, str]:
        """Why a file does not end with a complete record, by file. A killed writer can leave such a file."""
        return {log.path: log.torn for log in self.logs if log.torn is not None}

    @property
    def damage(self) -> CorruptError | None:
        """The error for damaged records, which the chain states or later records prove; None if there are none."""
        if self.last_recorded > self.last:
            return self.lacks(self.last + 1, self.last_recorded)
        path, reason = self._reason
        if path not in self._damaged:
            return None
        hint = f"Steps up to {self.last} do not need it: `--step {self.last}`."
        return CorruptError(f"{path.name} is damaged after step {self.last}: {reason}", where=path, hint=hint)

    def lacks(self, first: int, last: int) -> CorruptError:
        """The error for steps after `self.last`, whose records are damaged or not there."""
        path, reason = self._reason
        steps = f"step {last}" if first == last else f"steps {first} to {last}"
        return CorruptError(
            f"{steps} cannot be restored: {path.name}: {reason}",
            where=path,
            hint=f"Steps up to {self.last} do not need it: `--step {self.last}`.",
        )

    @property
    def _damaged(self) -> dict[Path, str | None]:
        """Why records are damaged that count, by file."""
        return {
            log.path: log.torn
            for log in self.logs
            if log.damaged is not None and (self.limit is None or log.damaged.first <= self.limit)
        }

    @property
    def _reason(self) -> tuple[Path, str | None]:
        """Why there are no steps after `last`: a file, and what is wrong with it."""
        return next(iter({**self._damaged, **self.torn}.items()), (self.folder, "a file is shorter"))

    @cached_property
    def has_ended(self) -> bool:
        """Did every rank close its log?"""
        return all(any(record.kind is Kind.END for record in log.records) for log in self.logs)

    @property
    def nbytes(self) -> int:
        """The size of all complete records in bytes."""
        return sum(log.end for log in self.logs)

    @property
    def is_exact(self) -> bool:
        """Does a replay of its steps give the exact bits of the run?"""
        approximate = any(one.exactness == "approximate" for one in self.layout.optimizers)
        return not approximate and self.layout.codec not in LOSSY

    @cached_property
    def has_start(self) -> bool:
        """Does every rank have the state at the start of the segment? Its fingerprint follows when it is complete."""
        return all(
            has_own_states(self.layout, rank, log.records)
            and any(record.kind is Kind.FINGERPRINT and record.step == self.first for record in log.records)
            for rank, log in enumerate(self.logs)
        )

    def records(self, rank: int, kind: Kind) -> Iterator[LogRecord]:
        """The records of one kind of a rank, in order."""
        return (record for record in self.logs[rank].records if record.kind is kind)

    def path(self, rank: int) -> Path:
        return self.logs[rank].path

    @property
    def has_proofs(self) -> bool:
        """Did the run compare its steps with a replay? Not in logs of version 1, nor with lossy gradients."""
        return self.layout.codec not in LOSSY and any("proved" in one.meta for log in self.logs for one in log.records)

    @cached_property
    def proved(self) -> int:
        """The last step of which a replay beside the run had the run's own states, on all ranks.

        What is not replayed needs no proof. The first step counts as proved. Logs of version 1 have no proofs.
        """
        return min(self._proved(rank) for rank in range(len(self.logs)))

    def _proved(self, rank: int) -> int:
        if not self.layout.ranks[rank].chunk_count:
            return self.last
        steps = (record.meta.get("proved") for record in self.logs[rank].records)
        return max((int(step) for step in steps if is_natural(step)), default=self.first)  # type: ignore[arg-type]

    @cached_property
    def difference(self) -> str | None:
        """How a replay beside the run differed from it, in words; None if it did not."""
        texts = (record.meta.get("differs") for log in self.logs for record in log.records)
        return next((text for text in texts if isinstance(text, str)), None)

    @cached_property
    def doubtful_steps(self) -> tuple[Doubt, ...]:
        """The steps at which tensors may have had other values, because nothing saw that the run set them."""
        rows: Iterator[Any] = (record.meta.get("doubt") for log in self.logs for record in log.records)
        return tuple(dict.fromkeys(Doubt(row[0], row[1], tuple(row[2])) for row in rows if _is_doubt(row)))

    def doubt(self, step: int) -> tuple[str, ...]:
        """The names of tensors that may have had other values at a step."""
        named = (one.names for one in self.doubtful_steps if one.first <= step <= one.last)
        return tuple(dict.fromkeys(name for names in named for name in names))

    def nbytes_upto(self, rank: int, step: int) -> int:
        """The size in bytes of the start of a rank's file that has all records of steps up to `step`.

        Some of the next step may be among them: a run may note a step after the next one has changed buffers.
        """
        records = self.logs[rank].records
        stop = max((number for number, one in enumerate(records, 1) if one.step <= step), default=0)
        return records[stop].begin - HEAD.size if stop < len(records) else self.logs[rank].end

    def hash_upto(self, rank: int, step: int) -> int:
        """A hash of all records of a rank that the state at a step needs: they are the same when the log has grown."""
        needed = (one for one in reversed(self.logs[rank].records) if one.step <= step and one.kind not in _AFTERWARDS)
        return next((record.hash for record in needed), 0)

    def notes(self, step: int, reader: Reader) -> dict[str, Value]:
        """The notes of a step, by name. All ranks have the same notes; these are those of rank 0."""
        notes: dict[str, Value] = {}
        for record in self.records(0, Kind.NOTES):
            if record.step == step:
                notes.update(_typed(record.read_meta(self.path(0), reader).get("notes", {}), self.path(0)))
        return notes

    def group_options(self, step: int) -> dict[int, tuple[Mapping[str, Value], ...]]:
        """The options of all groups after a step, by optimizer: those that a schedule set for the next step."""
        options: dict[int, tuple[Mapping[str, Value], ...]] = dict(self.earlier_options)
        for record in self.logs[0].records:
            if record.step <= step:
                options |= self.options_in(record)
        steps = self.updates[0]
        is_noted = any(record.step == step for record in self.records(0, Kind.NOTES))
        if self.layout.version == 1 and not is_noted:
            # Without notes, the options of the next step are closer than those of this step.
            for updates in steps[step - self.first : step - self.first + 1]:
                options.update((update.optimizer, update.groups) for update in updates)
        return options

    def options_in(self, record: LogRecord) -> dict[int, tuple[Mapping[str, Value], ...]]:
        """The options of groups, by optimizer, that a record of rank 0 has. Raises `CorruptError`."""
        path, groups = self.path(0), record.meta.get("groups")
        if record.kind is Kind.GRADIENTS:
            number = record.meta.get("optimizer", 0)
            return {number: self._options(groups, number, record, path)} if is_natural(number) else {}
        if record.kind is not Kind.NOTES or groups is None:
            return {}
        if not isinstance(groups, list):
            raise CorruptError(f"step {record.step}: its notes are damaged", where=path)
        return {number: self._options(one, number, record, path) for number, one in enumerate(groups)}

    def random_states(self, step: int, reader: Reader) -> dict[str, Value]:
        """The states of random number generators at a step, by rank and by generator: arrays of bytes or words."""
        states: dict[str, Value] = {}
        for rank, steps in enumerate(self.updates):
            if step > self.first and steps[step - self.first - 1]:
                record = steps[step - self.first - 1][-1].record
                if record.count > self.layout.ranks[rank].chunk_count:  # a log of version 1
                    states[f"rank-{rank:05d}"] = self._random(record, rank, reader)
            if recorded := random_states_at(self.logs[rank].records, step, self.path(rank), reader):
                states[f"rank-{rank:05d}"] = recorded
        return states

    def _random(self, record: LogRecord, rank: int, reader: Reader) -> Value:
        """The typed JSON after the chunks of gradients, decoded."""
        path = self.path(rank)
        data, digest = record.read_chunk(path, record.count - 1, MAX_RANDOM, reader)
        if hash_values(data) != digest:
            raise CorruptError(
                f"step {record.step}: the states of its random number generators are damaged", where=path
            )
        try:
            return decode(json.loads(data.tobytes()), path)
        except (ValueError, RecursionError):
            raise CorruptError(f"step {record.step}: its random states are not JSON", where=path) from None

    def steps(self, rank: int) -> Iterator[tuple[LoggedUpdate, ...]]:
        """The updates of each complete step of a rank, from the step after `first` on. Raises `CorruptError`."""
        log = self.logs[rank]
        updates: list[LoggedUpdate] = []
        step = self.first + 1
        for record in log.records:
            if record.kind is not Kind.GRADIENTS:
                continue
            if record.step != step:
                raise CorruptError(
                    f"steps are missing: step {record.step} follows, but step {step} is expected", where=log.path
                )
            part, count = self._part(record, log.path)
            if not part:
                updates = []  # an error interrupted the step, and the run did it again
            if part != len(updates):
                raise CorruptError(f"step {step}: part {part} follows {len(updates)} parts", where=log.path)
            updates.append(self._update(record, rank))
            if len(updates) == count:
                yield tuple(updates)
                updates, step = [], step + 1

    def _part(self, record: LogRecord, where: Path) -> tuple[int, int]:
        part = record.meta.get("part", [0, 1])
        if not (isinstance(part, list) and len(part) == 2 and all(map(is_natural, part)) and part[0] < part[1]):
            raise CorruptError(f"step {record.step}: a record does not state which part of the step it is", where=where)
        return part[0], part[1]

    def _options(self, groups: Any, optimizer: int, record: LogRecord, where: Path) -> tuple[Mapping[str, Value], ...]:
        """The options of all groups of an optimizer, decoded from a record. Raises `CorruptError`."""
        if optimizer >= len(self.layout.optimizers):
            raise CorruptError(f"step {record.step}: its optimizer does not exist", where=where)
        count = len(self.layout.optimizers[optimizer].groups)
        options = decode(groups, where)
        if not isinstance(options, list) or len(options) != count or not all(isinstance(one, dict) for one in options):
            raise CorruptError(f"step {record.step}: it does not have the options of {count} groups", where=where)
        return tuple(options)

    def _update(self, record: LogRecord, number: int) -> LoggedUpdate:
        rank, log = self.layout.ranks[number], self.logs[number]
        optimizer = record.meta.get("optimizer", 0)
        if not is_natural(optimizer):
            raise CorruptError(f"step {record.step}: its optimizer does not exist", where=log.path)
        options = self._options(record.meta.get("groups"), optimizer, record, log.path)
        if not 0 <= record.count - rank.chunk_count <= 1:
            raise CorruptError(
                f"step {record.step}: it has {record.count} chunks, not {rank.chunk_count}", where=log.path
            )
        vectors = record.meta.get("vectors")
        if vectors is not None:
            if not (isinstance(vectors, list) and all(is_natural(v) and v < len(rank.vectors) for v in vectors)):
                raise CorruptError(
                    f"step {record.step}: it has gradients of a vector that does not exist", where=log.path
                )
            vectors = frozenset(vectors)
        return LoggedUpdate(record, optimizer, vectors, options)


def _is_doubt(row: Any) -> bool:
    if not (isinstance(row, list) and len(row) == 3 and all(map(is_natural, row[:2])) and isinstance(row[2], list)):
        return False
    return all(isinstance(name, str) for name in row[2])


def has_own_states(layout: SegmentLayout, rank: int, records: Iterable[LogRecord]) -> bool:
    """Are there states of a rank from which its steps are replayed? A rank may have no such steps."""
    if layout.ranks[rank].chunk_count:
        return any(record.kind is Kind.STATE for record in records)
    return layout.parent is None


def is_set(record: LogRecord) -> bool:
    """Is it a state that the run set outside its optimizers?"""
    return record.kind is Kind.STATE and "set" in record.meta


def _sets(log: RankLog) -> dict[tuple[int, bool], tuple[LogRecord, ...]]:
    sets: dict[tuple[int, bool], tuple[LogRecord, ...]] = {}
    for record in filter(is_set, log.records):
        if record.meta["set"] not in ("before", "after"):
            raise CorruptError(f"step {record.step}: its set state has no place", where=log.path)
        key = (record.step, record.meta["set"] == "after")
        sets[key] = (*sets.get(key, ()), record)
    return sets


def count_steps(rank: RankLayout, before: Array, steps: Iterable[tuple[LoggedUpdate, ...]]) -> Array:
    """The number of steps that each vector of a rank has taken after `steps`: (vectors,) int64.

    `before`: the same before them. Takes the time of one pass over the records, whatever the number of vectors.
    """
    whole, single = Counter[int](), Counter[int]()
    for update in (update for updates in steps for update in updates):
        if update.vectors is None:
            whole[update.optimizer] += 1
        else:
            single.update(update.vectors)
    after = before.copy()
    if whole:
        of_optimizer = np.zeros(max(*whole, *(vector.optimizer for vector in rank.vectors), 0) + 1, np.int64)
        of_optimizer[list(whole)] = list(whole.values())
        after += of_optimizer[[vector.optimizer for vector in rank.vectors]]
    after[list(single)] += np.fromiter(single.values(), np.int64, len(single))
    return after


def open_segment(folder: Path, check_from: int | None = None, limit: int | None = None) -> Segment:
    """The segment in a folder with the records that are complete now, up to step `limit`.

    The bytes of all chunks from the offset `check_from` of each file on are read and checked. Raises `NotFoundError` if
    there is no segment, `IncompleteError` if the file of a rank is missing, and `CorruptError`.
    """
    layout, heads = open_layout(folder)
    # The heads of records are read one after another, so a store answers many small requests.
    logs = in_threads(lambda head: scan(folder / rank_file(head.rank), head, check_from), heads)
    return Segment(folder, layout, tuple(logs), limit)


def open_layout(folder: Path) -> tuple[SegmentLayout, tuple[FileHead, ...]]:
    """The layout of the segment in a folder, and the heads that the files of its ranks must have.

    Raises as `open_segment`.
    """
    layout, heads = layout_and_heads(folder)
    missing = [rank_file(rank) for rank in range(len(heads)) if not (folder / rank_file(rank)).is_file()]
    if missing:
        raise IncompleteError(f"of {len(heads)} files of ranks, {list_names(missing, str, 1)} is missing", where=folder)
    return layout, heads


def layout_and_heads(folder: Path) -> tuple[SegmentLayout, tuple[FileHead, ...]]:
    """The same of a segment whose files may be missing, by its layout alone."""
    path = folder / layouts.NAME
    if not path.is_file():
        raise NotFoundError("not a log of gradients: it has no layout.json", where=folder)
    layout = layouts.load(path)
    name = layouts.identity(read_whole(path, MAX_INDEX))
    world = len(layout.ranks)
    return layout, tuple(FileHead(rank, world, layout.first, name) for rank in range(world))


def _typed(value: Any, where: Path) -> dict[str, Value]:
    decoded = decode(value, where)
    if not isinstance(decoded, dict):
        raise CorruptError("notes are not a mapping", where=where)
    return decoded
