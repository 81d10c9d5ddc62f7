"""The commit of published steps, by one process for all ranks: the record, then the head.

A step counts once the head names its record. So a process that is killed leaves the last step or the next one; what it
stored before is used if the same bytes are published again. Two processes never publish at once: one has the lease of
the chain, and the head is replaced only if it is the one that this process has put or read last.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from types import MappingProxyType

from ckpt.pipeline.lease import Right, hold
from ckpt.publishing.published_objects import create, create_chain, put_object, read_model, read_record_bytes
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    InvalidArgumentError,
    LockedError,
    OutputError,
    UnsupportedError,
)
from ckpt_formats.core.locking import unwritable
from ckpt_formats.core.place import Place, Version
from ckpt_formats.stores.location import place_at
from ckpt_formats.universal.published.model import MAX_MODEL, PublishedModel, model_digest
from ckpt_formats.universal.published.records import (
    FOLDER,
    HEAD,
    MAX_EPOCH,
    MAX_FOLDS,
    MAX_HEAD,
    MAX_STEP,
    Head,
    ObjectRef,
    RankShare,
    RecordRef,
    StepName,
    StepRecord,
    parse_name,
    state_of_ranks,
)
from ckpt_formats.universal.published.route import Route, find_route, read_record, ref_of

_LEASE = f"{FOLDER}/lease"
_PUBLISHING = "publishing into this chain"
_REQUESTS = 16
"""Records that are read at once."""
FOLDS = {4: 4, 16: 16, 48: 16}
"""How many steps a fold joins, and after how many steps the next such fold ends, both counted from the base.

Between two steps 64 apart lie 48 from one multiple of 16 to another, wherever they begin; `benchmarks/weight_folds.py`
compares such plans.
"""
_AGAIN = "Run the same command again."


@dataclass(frozen=True)
class RunStart:
    """How a run goes on in a published chain."""

    name: StepName
    """The first step that the run publishes, in its epoch."""
    parent: RecordRef | None
    """The published step against which the first one may be coded; None: it is a base."""
    is_published: bool
    """Whether this step is published with this very state: the run goes on with the next one."""
    continues: RecordRef | None = None
    """Of a new epoch: the step of an earlier epoch that has this very state, if one has."""

    @property
    def is_base(self) -> bool:
        """Whether the first step has to be a base."""
        return not self.is_published and self.parent is None


@dataclass(frozen=True)
class FoldShares:
    """What all ranks have stored of a fold."""

    shares: Sequence[RankShare]
    """By rank: the states are those at its end."""
    before: Sequence[str]
    """By rank: the state from which the fold leads."""


class Publication:
    """A published chain that this process alone extends. Only one thread may call the methods of an instance."""

    def __init__(
        self,
        run: Path,
        place: Place,
        right: Right,
        model: PublishedModel,
        signing_key: bytes | None = None,
        files: Mapping[str, bytes] = MappingProxyType({}),
    ) -> None:
        """See `open_publication`."""
        self.run, self.place, self.model = run, place, model
        self._right, self._key = right, signing_key
        self._files, self._model_bytes = files, model.to_bytes()
        if len(self._model_bytes) > MAX_MODEL:
            raise UnsupportedError(
                f"the description of the model has {len(self._model_bytes):,} bytes, more than {MAX_MODEL:,}", where=run
            )
        self.model_ref = ObjectRef.of(self._model_bytes, signing_key is not None)
        self.head: Head | None = None
        """The head that this process has read or put last; None if nothing is published yet."""
        self.record: StepRecord | None = None
        """The last published step."""
        self.parent: RecordRef | None = None
        """The published step against which the next one is coded; None: it must be a base."""
        self.removed: set[str] = set()
        """The keys of objects that this process has removed."""
        self.first: StepName | None = None
        """The first step that stays, if steps were removed: the head names no fold that begins before it."""
        self.cleaned: float | None = None
        """When this process last looked for what is no longer needed, by `time.monotonic`."""
        self._version: Version | None = None
        self._start: RunStart | None = None
        self._epochs = 0
        self._unpublished: list[StepName] = []
        """The steps after the last one of which killed processes have left records that do not follow it."""
        self._steps: list[StepName] = []
        """The published steps from the last base on."""
        self._refs: dict[StepName, RecordRef] = {}
        """Those that this process has published."""
        self._states: dict[StepName, str] = {}
        """Their states."""
        self._records: dict[str, StepRecord] = {}
        self._files_of_models: dict[ObjectRef, set[str]] = {}
        self._is_model_stored = False
        self._is_lost = False
        self._uncertain: tuple[Head, StepRecord] | None = None
        """The head that was put, but not acknowledged."""

    def start(self, step: int, states: Sequence[str], has_values: bool = False) -> RunStart:
        """Decide how a run goes on whose first step is `step`.

        Args:
            step: The step of the state with which the run starts.
            states: The hash of the state of each rank (`RankBuffers.state`), by rank.
            has_values: Whether all ranks have the values of the last published step, so that a later step may be coded
                against it.

        Raises:
            UnsupportedError: The chain has another model.
            CorruptError: The chain is damaged.
        """
        if step > MAX_STEP:
            raise InvalidArgumentError(f"step {step:,} is too large: steps are at most {MAX_STEP:,}")
        self._start = self._decide(step, states, has_values)
        self.parent = self._start.parent
        return self._start

    def _decide(self, step: int, states: Sequence[str], has_values: bool) -> RunStart:
        if self.head is None or self.record is None:
            return RunStart(StepName(self._epochs + 1, step), None, is_published=False)
        last, is_same_model = self.head.record, self.record.model == self.model_ref
        if not is_same_model:
            self._check_model(self.record.model)
        same_state = is_same_model and [one.state for one in self.record.shares] == list(states)
        is_taken = any(name.epoch == last.name.epoch and name.step >= step for name in self._unpublished)
        if step > last.name.step and not is_taken:
            parent = last if has_values and is_same_model else None
            return RunStart(StepName(last.name.epoch, step), parent, is_published=False)
        if step == last.name.step and same_state and not is_taken:
            return RunStart(last.name, last, is_published=True)
        if self._epochs == MAX_EPOCH:
            raise OutputError("has too many epochs", where=self.run, hint="Publish into a new chain.")
        continues = self._same_step(last.name.epoch, step, states) if step <= last.name.step else None
        return RunStart(StepName(self._epochs + 1, step), None, is_published=False, continues=continues)

    @property
    def epoch(self) -> int:
        """The epoch in which this run publishes, once it has started."""
        if self._start is None:
            raise InvalidArgumentError("the run has not started to publish: call `start` first")
        return self._start.name.epoch

    def needs_base(self) -> bool:
        """Whether the next step should be a base: no other can be published, or the deltas have become too large."""
        return self.parent is None or self.head is None or is_base_due(self.head)

    def commit(
        self,
        step: int,
        parent: RecordRef | None,
        shares: Sequence[RankShare],
        delta: Sequence[RankShare] | None = None,
        folds: Mapping[int, FoldShares] = MappingProxyType({}),
    ) -> RecordRef:
        """Publish a step whose objects all ranks have stored.

        Args:
            step: Its number, after the last one of the epoch.
            parent: The step against which all objects are coded; None for a base.
            shares: What each rank has stored, by rank.
            delta: Of a base, what each rank has stored of the same step against `self.parent`, if it has: so who has
                that state need not fetch the base.
            folds: Folds that end at the step before this one, by how many steps they join.

        Returns:
            The step as the head names it.

        Raises:
            LockedError: Another process publishes into this chain.
            OutputError: The step is not published, as far as this process knows: the next `commit` reads the head.
            InvalidArgumentError: The step cannot follow the last one, or is coded against another one; or a fold does
                not lead from the published states of one step to those of the last.
        """
        known = self.parent
        self._refresh()
        if self.parent != known:
            delta, folds = None, {}  # the step is published after all that seemed not to be: they lead past it
        name = StepName(self.epoch, step)
        last = None if self.head is None else self.head.record.name
        if (last is not None and name <= last) or step > MAX_STEP or len(shares) != len(self.model.pieces):
            raise InvalidArgumentError(f"step {step} of {len(shares)} ranks cannot follow {last}")
        if parent is not None and parent != self.parent:
            raise InvalidArgumentError(f"step {step} is coded against {parent.name}, which is not the last step")
        if delta is not None and (parent is not None or self.parent is None or not _are_same(shares, delta)):
            raise InvalidArgumentError(f"the delta of step {step} does not lead from the last step to the base")
        try:
            self._right.check()
            self._check_objects([*shares, *(delta or ()), *(one for fold in folds.values() for one in fold.shares)])
            self._store_folds(folds)
            self._store_model()
            time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            is_first = last is None or last.epoch != name.epoch
            continues = self._start.continues if self._start is not None and is_first else None
            record = StepRecord(name, parent, self.model_ref, tuple(shares), time, continues)
            data = record.to_bytes(self._key)
            ref, over_base = ref_of(name, data), tuple[tuple[int, int], ...]()
            if delta is not None and self.parent is not None:
                over_base = self._with_fold(self.parent, record, ref, delta)
            try:
                create(self.place, name.key, data)
            except FileExistsError:
                raise self._locked() from None
            self._put_head(_head_after(self.head, record, ref, over_base), record)
        except OSError as error:
            if isinstance(error, CkptError):
                raise
            raise unwritable(error, self.run) from error
        return ref_of(name, data)

    def due_folds(self) -> list[RecordRef]:
        """The steps from which a fold to the last one is due, the nearest first. Raises `OSError`, `CorruptError`."""
        number = len(self._steps) - 1
        return [self._ref_at(self._steps[number - length]) for length in due_lengths(number)]

    def route_to(self, ref: RecordRef) -> Route:
        """The records from a base to a published step. Raises `CorruptError`."""
        if self.head is None:
            raise InvalidArgumentError("no step is published yet")
        return find_route(self.head, None, self._read, self.run, ref, self._key)

    def add_fold(self, parent: RecordRef, shares: Sequence[RankShare]) -> None:
        """Publish the steps after `parent` up to the last one as one delta. Raises as `commit`."""
        self._refresh()
        head, record = self.head, self.record
        if head is None or record is None or parent.name.epoch != self.epoch or parent.name >= head.record.name:
            raise InvalidArgumentError(f"no fold begins at {parent.name}")
        if not _are_same(shares, record.shares):
            raise InvalidArgumentError("the fold does not end at the state of the last step")
        try:
            self._right.check()
            self._check_objects(shares)
            folds = self._with_fold(parent, record, head.record, shares)
            self._put_head(replace(head, folds=folds), record)
        except OSError as error:
            if isinstance(error, CkptError):
                raise
            raise unwritable(error, self.run) from error

    def load_records(self, keys: Iterable[str]) -> None:
        """Read the records of steps and folds that `record_at` will return, many at once. Raises as that."""
        unread = [key for key in keys if key not in self._records]
        with ThreadPoolExecutor(_REQUESTS, "ckpt-records") as pool:
            for _ in pool.map(self.record_at, unread):
                pass

    def record_at(self, key: str) -> StepRecord:
        """The record of a step or a fold. Raises `CorruptError`."""
        if key not in self._records:
            data = self._read(key)
            if data is None:
                raise CorruptError("the record is missing", where=self.run / key)
            record = StepRecord.from_bytes(data, self.run / key, self._key)
            if record.key != key:
                raise CorruptError("is the record of another step", where=self.run / key)
            self._records[key] = record
        return self._records[key]

    def forget_records(self, keys: Iterable[str]) -> None:
        """Keep records that were removed no longer in memory: a run may publish for weeks."""
        for key in keys:
            self._records.pop(key, None)

    def objects_of(self, key: str) -> set[str]:
        """The keys of all objects that a record needs: those of the ranks, the model and the model's files."""
        record = self.record_at(key)
        if record.model not in self._files_of_models:
            files = read_model(self.place, record.model, self.run).files.values()
            self._files_of_models[record.model] = {one.key for one in files}
        own = {one.object.key for one in record.shares}
        return {record.model.key, *own, *self._files_of_models[record.model]}

    def confirm(self) -> None:
        """Raise `LockedError` unless this process still has the lease, as the place itself says."""
        self._right.confirm()

    def _store_folds(self, folds: Mapping[int, FoldShares]) -> None:
        """Create the records of folds that end at the last step, and let the next head name them."""
        number, head, record = len(self._steps) - 1, self.head, self.record
        for length, fold in sorted(folds.items()):
            if head is None or record is None or not 0 < length <= number or not _are_same(fold.shares, record.shares):
                raise InvalidArgumentError(f"no fold of {length} steps ends at the last step")
            parent = self._ref_at(self._steps[number - length])
            if state_of_ranks(fold.before) != self._state_at(parent):
                raise InvalidArgumentError(f"the fold of {length} steps does not lead from the state before them")
            self.head = head = replace(head, folds=self._with_fold(parent, record, head.record, fold.shares))

    def _state_at(self, ref: RecordRef) -> str:
        """The state of a published step."""
        if ref.name not in self._states:
            self._states[ref.name] = read_record(ref, self._read, self.run, self._key).state
        return self._states[ref.name]

    def _with_fold(
        self, parent: RecordRef, record: StepRecord, ref: RecordRef, shares: Sequence[RankShare]
    ) -> tuple[tuple[int, int], ...]:
        """Create the record of a fold; the folds that the head then names."""
        fold = replace(record, parent=parent, shares=tuple(shares), continues=None, same_as=ref)
        with suppress(FileExistsError):  # a killed process has put it: readers compare it with the step's record
            create(self.place, fold.key, fold.to_bytes(self._key))
        before = () if self.head is None else self.head.folds
        pairs = sorted({*before, (parent.name.step, record.name.step)}, key=lambda pair: (pair[1], pair[0]))
        return _most_useful(pairs)

    def _put_head(self, head: Head, record: StepRecord) -> None:
        if self.first is not None and self.first.epoch == head.record.name.epoch:
            head = replace(head, folds=tuple(one for one in head.folds if one[0] >= self.first.step))
        self._uncertain = head, record
        try:
            below, _, name = HEAD.rpartition("/")
            version = self.place.within(below).replace(name, head.to_bytes(self._key), self._version)
        except FileExistsError:
            raise self._locked() from None
        self._note_head(head, record, version)

    def _note_head(self, head: Head, record: StepRecord, version: Version) -> None:
        """Note that a head is there which this process has put."""
        if self.head is None or head.record != self.head.record:
            self._steps = [*([] if record.is_base else self._steps), head.record.name]
            if record.is_base:
                self._refs, self._states = {}, {}
            self._refs[head.record.name], self._states[head.record.name] = head.record, record.state
        self.head, self.record, self.parent, self._version = head, record, head.record, version
        self._uncertain = None

    def _refresh(self) -> None:
        """Read the head if it is not known whether the last one was put."""
        if self._is_lost:
            raise self._locked()
        if self._uncertain is None:
            return
        head, record = self._uncertain
        there = self.place.read(HEAD, MAX_HEAD)
        if there is not None and there[0] == head.to_bytes(self._key):
            self._note_head(head, record, there[1])
        elif (None if there is None else there[1]) != self._version:
            raise self._locked()
        self._uncertain = None

    def _store_model(self) -> None:
        if not self._is_model_stored and (self.record is None or self.record.model != self.model_ref):
            for name, data in self._files.items():
                put_object(self.place, self.model.files[name], data)
            put_object(self.place, self.model_ref, self._model_bytes)
        self._is_model_stored = True

    def _check_objects(self, shares: Sequence[RankShare]) -> None:
        """Raise unless the objects are there that this process may have removed after a rank saw them."""
        for one in shares:
            if one.object.key in self.removed:
                if self.place.head(one.object.key) is None:
                    raise OutputError(
                        "an object of the step was removed, because no step needed it",
                        where=self.place.where(one.object.key),
                        hint=_AGAIN,
                    )
                self.removed.discard(one.object.key)

    def _check_model(self, ref: ObjectRef) -> None:
        if model_digest(read_model(self.place, ref, self.run)) != model_digest(self.model):
            raise UnsupportedError(
                "this chain has another model: other names, shapes or dtypes",
                where=self.run,
                hint="Publish into a new chain, or with the same --dtype and --names as before.",
            )

    def _same_step(self, epoch: int, step: int, states: Sequence[str]) -> RecordRef | None:
        name = StepName(epoch, step)
        data = self._read(name.key)
        if data is None:
            return None
        record = StepRecord.from_bytes(data, self.run / name.key, self._key)
        is_same = record.model == self.model_ref and [one.state for one in record.shares] == list(states)
        return ref_of(name, data) if is_same else None

    def _ref_at(self, name: StepName) -> RecordRef:
        if name in self._refs:
            return self._refs[name]
        data = self._read(name.key)
        if data is None:
            raise CorruptError("the record is missing", where=self.run / name.key)
        return ref_of(name, data)

    def _names(self) -> list[StepName]:
        keys = self.place.within(f"{FOLDER}/steps").list()
        names = (parse_name(key.removesuffix(".json")) for key in keys)
        return sorted(name for name in names if name is not None)

    def _load(self) -> None:
        """Read the head, and finish the commit of a process that was killed between its record and the head."""
        there = self.place.read(HEAD, MAX_HEAD)
        if there is not None:
            self.head, self._version = self._parse_head(there[0]), there[1]
            self.record = read_record(self.head.record, self._read, self.run, self._key)
        head, last, names = self.head, self.record, self._names()
        self._epochs = names[-1].epoch if names else 0
        for name in names:
            if head is not None and name <= head.record.name:
                continue
            data = self._read(name.key)
            record = None if data is None else StepRecord.from_bytes(data, self.run / name.key, self._key)
            if data is None or record is None or record.name != name:
                continue
            follows = record.is_base or (head is not None and record.parent == head.record)
            if follows and all(self._is_stored(ref) for ref in (record.model, *(one.object for one in record.shares))):
                folds = () if head is None or not record.is_base else self._fold_over(head, name)
                head, last = _head_after(head, record, ref_of(name, data), folds), record
        if head is not None and last is not None and head != self.head:
            self._put_head(head, last)
        self._unpublished = [name for name in names if head is None or name > head.record.name]
        if head is not None:
            self._steps = [name for name in names if head.base <= name <= head.record.name]

    def _fold_over(self, head: Head, base: StepName) -> tuple[tuple[int, int], ...]:
        """The folds that a head may name after a base, if a killed process has stored it as a delta, too."""
        last = head.record.name
        if last.epoch != base.epoch or self.place.head(base.fold_key(last.step)) is None:
            return ()
        return _most_useful([*head.folds, (last.step, base.step)])

    def _is_stored(self, ref: ObjectRef) -> bool:
        there = self.place.head(ref.key)
        return there is not None and there.nbytes == ref.nbytes

    def _parse_head(self, data: bytes) -> Head:
        return Head.from_bytes(data, self.run / HEAD, self._key)

    def _read(self, key: str) -> bytes | None:
        return read_record_bytes(self.place, key)

    def _locked(self) -> LockedError:
        self._is_lost = True
        return LockedError("another process publishes into this chain", where=self.run, hint="Let only one run do so.")


@contextmanager
def open_publication(
    run: Path,
    model: PublishedModel,
    signing_key: bytes | None = None,
    locks: bool = True,
    files: Mapping[str, bytes] = MappingProxyType({}),
    read_back: bool = False,
) -> Iterator[Publication]:
    """Open a published chain to extend it, and create it if there is nothing at `run`.

    Args:
        run: A path of `stores.location.target_path`.
        model: What is published.
        signing_key: Signs the records and the head.
        locks: Refuse a file system that cannot lock, or a store that ignores conditions.
        files: The content of the files of the model, by name.
        read_back: Read back all that is written into a store, whatever the store says of it.

    Raises:
        LockedError: Another process publishes into the chain.
        OutputError: Something else is there, or it cannot be written.
        UnsupportedError: A chain is there that is not a published one.
        CorruptError: The chain is damaged, or not signed with this key.
    """
    place = place_at(run, read_back)
    try:
        create_chain(run, place)
        with hold(place, _LEASE, run, locks, _PUBLISHING) as right:
            publication = Publication(run, place, right, model, signing_key, files)
            publication._load()
            yield publication
    except CkptError:
        raise
    except OSError as error:
        raise unwritable(error, run) from error


@dataclass(frozen=True)
class LastStep:
    """The last step of a published chain."""

    head: Head
    record: StepRecord
    model: PublishedModel


def last_step(run: Path, signing_key: bytes | None = None) -> LastStep | None:
    """The last step of a published chain, without a lock; None if there is none. Raises `CorruptError`."""
    place = place_at(run)

    there = place.read(HEAD, MAX_HEAD)
    if there is None:
        return None
    head = Head.from_bytes(there[0], run / HEAD, signing_key)
    record = read_record(head.record, partial(read_record_bytes, place), run, signing_key)
    return LastStep(head, record, read_model(place, record.model, run))


def due_lengths(number: int) -> list[int]:
    """How many steps each fold joins that ends at the step `number` after the base; the shortest comes first."""
    return [length for length, every in FOLDS.items() if length <= number and number % every == 0]


def is_base_due(head: Head) -> bool:
    """Whether the deltas since the base exceed half of it."""
    return 2 * head.delta_nbytes > head.base_nbytes


def _are_same(shares: Sequence[RankShare], others: Sequence[RankShare]) -> bool:
    """Whether all ranks have the same states."""
    return [one.state for one in shares] == [one.state for one in others]


def _head_after(head: Head | None, record: StepRecord, ref: RecordRef, folds: tuple[tuple[int, int], ...] = ()) -> Head:
    """The head that names a record that follows the last one. `folds`: of a base, those that lead over it."""
    if record.is_base or head is None:
        return Head(ref, record.name, folds, record.nbytes, 0)
    return replace(head, record=ref, delta_nbytes=head.delta_nbytes + record.nbytes)


def _most_useful(pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """At most `MAX_FOLDS` folds: the first ones that lie within a longer one are left out first."""
    result = list(pairs)
    while len(result) > MAX_FOLDS:
        inner = (a for a in result if any(b != a and b[0] <= a[0] and a[1] <= b[1] for b in result))
        result.remove(next(inner, result[0]))
    return tuple(result)
