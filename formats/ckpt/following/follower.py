"""A follower: the weights of a published chain in the memory of one process, brought forward step by step."""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from ckpt.following.changes import TensorChange, changed_tensors, whole_tensors
from ckpt.following.decode import ChunkChange, find_changes, positions_of_changes, write_state
from ckpt.following.shards import TensorParallelRank
from ckpt.following.source import FollowedStep, FollowingStopped, PublishedSource
from ckpt.following.state import State, StateLayout, other_model
from ckpt.following.tensors import tensor_memory
from ckpt.pipeline import Resources
from ckpt_formats.core.arguments import Count, LocalPath, Positive, StrPath, checked
from ckpt_formats.core.errors import CorruptError, InvalidArgumentError, NotFoundError, UnsafeError
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.rules import rules_of
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.text import format_nbytes
from ckpt_formats.universal.published.model import model_digest
from ckpt_formats.universal.published.records import Head, ObjectRef, RecordRef, StepName
from ckpt_formats.universal.published.route import Route

_POLL = 1.0
"""Seconds for which one look at the head waits for another one, where the place can wait."""


@dataclass(frozen=True, eq=False)
class _NextState:
    """What was fetched and verified of a step that the follower does not hold yet."""

    step: FollowedStep
    layout: StateLayout
    model_ref: ObjectRef
    base: RecordRef | None
    """The state that the changes are of; None: there is a whole state."""
    changes: list[ChunkChange]
    whole: State | None = None


class Follower:
    """Holds the weights of one published step, and brings them forward.

    The weights are those of the last step that was `confirm`ed: by `update`, `apply_to`, or the caller after
    `iter_changes`. They change only after every chunk of the next step was verified. One thread uses it at a time;
    `close` may be called from any.
    """

    @checked
    def __init__(
        self,
        chain: StrPath,
        *,
        key: bytes | None = None,
        resources: Resources | None = None,
        accept_other_model: bool = False,
        tp: Positive = 1,
        rank: Count = 0,
        rules: LocalPath | Sequence[Rule] = (),
        patience: float = 5.0,
    ) -> None:
        """Follow the chain at a path or URL; nothing is read yet.

        Args:
            chain: A folder, or s3://, gs://, az://, http:// or https:// and the place of the chain.
            key: The key with which the run signs its records. None: signatures are not checked.
            resources: Threads that decode, and the folder for objects larger than 64 MiB on their way.
            accept_other_model: Go on if the run publishes tensors of other names, shapes or dtypes than before.
            tp: Of how many tensor-parallel ranks this follower serves one. Above 1, all tensors are the shards of that
                rank, and of the chain only the chunks are read that have values of them.
            rank: Which of them: 0 to tp - 1.
            rules: How tensors are sharded, as a TOML file, the name of a shipped set, or rules; names of Hugging
                Face's Llama family need none.
            patience: Seconds for which a missing object is read again before another route is tried.
        """
        self._part = TensorParallelRank(tp, rank, rules_of(rules))
        own = resources or Resources.of_machine()
        self._threads = own.workers
        self._stop = threading.Event()
        scratch = None if own.scratch is None else Path(own.scratch)
        self._source = PublishedSource(chain, key, patience, self._stop, scratch)
        self._accepts_other = accept_other_model
        self._step: FollowedStep | None = None
        self._layout: StateLayout | None = None
        self._model_ref: ObjectRef | None = None
        self._state: State = ()
        self._next: _NextState | None = None
        self._confirmed: tuple[RecordRef, ...] = ()
        """The state of whoever writes the changes of `iter_changes`; two: some of the changes from the first to the
        second are written; none: it is not known."""
        self._written: RecordRef | None = None
        """The state of the tensors of the last `apply_to`; None: it is not known."""
        self._addresses: tuple[int, ...] = ()
        """Where these tensors lie."""

    def __enter__(self) -> "Follower":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def step(self) -> FollowedStep | None:
        """The step whose weights the follower holds; None before the first one."""
        return self._step

    def tensors(self) -> dict[str, Array]:
        """The weights by name, each (shape) in its dtype of NumPy or `ml_dtypes`: read-only views; copies of shards."""
        if self._layout is None:
            return {}
        return {one.name: one.values for one in whole_tensors(self._layout, self._state)}

    def files(self) -> dict[str, bytes]:
        """The files that belong to the weights, such as `config.json`, by name."""
        self._check_open()
        return {} if self._step is None else self._source.files(self._source.record(self._step.ref))

    @checked
    def wait(
        self,
        after: int | FollowedStep | None = None,
        timeout: float | None = None,
        stop: threading.Event | None = None,
        every: float = 0.2,
    ) -> FollowedStep | None:
        """Wait for a step that is newer than `after`, and return the last one; no weights are read.

        Args:
            after: A step, or its number: a step of a newer epoch is newer, too. None: the step that is held.
            timeout: Seconds. None: for ever.
            stop: Ends the wait once it is set.
            every: Seconds between two looks at the head, where the place cannot wait.

        Returns None after the timeout, and if `stop` is set. Raises `CorruptError`, `OSError`.
        """
        end = None if timeout is None else time.monotonic() + timeout
        epoch = self._known_epoch()
        while not self._stop.is_set():
            remaining = _POLL if end is None else max(end - time.monotonic(), 0.0)
            head = self._source.head(min(remaining, _POLL))
            if head is not None:
                epoch = head.record.name.epoch if epoch is None else epoch
                if self._is_newer(head.record, after, epoch):
                    return FollowedStep.of(self._source.record(head.record), head.record)
            if (stop is not None and stop.is_set()) or (end is not None and time.monotonic() >= end):
                return None
            self._stop.wait(every if end is None else min(every, max(end - time.monotonic(), 0.0)))
        raise _closed()

    @checked
    def update(self, step: int | FollowedStep | None = None) -> FollowedStep:
        """Hold the weights of a step; None: of the last one. A number is one of the newest epoch.

        Raises:
            NotFoundError: Nothing is published, or not this step.
            IncompleteError: Objects are missing on every way to the step.
            CorruptError: Something is damaged, also when it is read again.
            UnsupportedError: The run publishes another model than the one that is held.
            UnsafeError: The chain states sizes that cannot be.
        """
        following = self._fetch(step)
        self._hold(following)
        return following.step

    @checked
    def iter_changes(self, step: int | FollowedStep | None = None, *, whole: bool = False) -> Iterator[TensorChange]:
        """The values to write so that the caller has the weights of a step: of each changed tensor, in order.

        Everything is fetched and verified before the first one is yielded. After the last one is written, call
        `confirm`. The first time, after an iteration that was not confirmed, and with `whole`, all tensors are yielded
        whole. Raises as `update`.
        """
        following = self._fetch(step)
        current = None if self._step is None else self._step.ref
        # An iteration to the same step may have been left half-way.
        can_apply = self._confirmed in ((current,), (current, following.step.ref))
        if whole or current is None or following.base != current or not can_apply:
            self._hold(following)
            self._confirmed = ()
            yield from whole_tensors(following.layout, self._state)
        else:
            self._confirmed = (current, following.step.ref)
            yield from changed_tensors(following.layout, following.changes)

    @checked
    def confirm(self, step: int | FollowedStep | None = None) -> FollowedStep:
        """State that the caller has written all that `iter_changes` has yielded: its step is now the one that is held.

        `step`: the same as there. Raises `InvalidArgumentError` if it is another one, or if there was none.
        """
        step_now = self._step if self._next is None else self._next.step
        given = step.step if isinstance(step, FollowedStep) else step
        if step_now is None or given not in (None, step_now.step):
            there = "none" if step_now is None else f"that of step {step_now.step}"
            raise InvalidArgumentError(
                f"step {given} cannot be confirmed: the last iteration was {there}",
                hint="Call `confirm` with the step of the last `iter_changes`.",
            )
        if self._next is not None:
            self._hold(self._next)
        self._confirmed = (step_now.ref,)
        return step_now

    def apply_to(self, tensors: Mapping[str, Any], step: int | FollowedStep | None = None) -> FollowedStep:
        """Write the weights of a step into tensors that the caller has: only what changed since the last call.

        All is fetched and verified, and the tensors are checked, before the first value is written. A value is never
        half written, but who computes with the tensors meanwhile sees old and new values together. If the tensors are
        not those of the last call, or do not have the values of then where the step changes them, all values are
        written.

        tensors: by name, such as `model.state_dict()`: exactly the published ones, aliases are optional; CPU tensors
        of torch or arrays of NumPy or `ml_dtypes`, contiguous, in the published shapes and dtypes.

        Raises as `update`; `NoMatchError` for missing or unknown names, `InvalidArgumentError` for other shapes,
        dtypes or strides, `UnsupportedError` for other devices.
        """
        head = self._look_now()
        target = self._target(head, step)
        layout = self._layout_at(target)
        memory = tensor_memory(tensors, layout.model, layout.tensors)
        following = self._fetch(step, head)
        copies, addresses = _by_copy(memory), tuple(values.ctypes.data for _, values in memory)
        changes = [
            _LocatedChange(one, following.layout, copy[one.chunk.tensor])
            for copy in copies
            for one in following.changes
            if one.chunk.tensor in copy
        ]
        current = None if self._step is None else self._step.ref
        has_last = addresses == self._addresses and current is not None and self._written == following.base == current
        with ThreadPoolExecutor(self._threads, "ckpt-apply") as pool:
            has_last = has_last and all(pool.map(lambda one: one.is_before(self._state), changes))
            self._written, self._addresses = None, addresses
            self._hold(following)
            if has_last:
                pending = [pool.submit(change.write) for change in changes]
            else:
                layout = following.layout
                pending = [pool.submit(_copy, layout, number, self._state, values) for number, values in memory]
            for one in pending:
                one.result()
        self._written = following.step.ref
        return following.step

    def close(self) -> None:
        """Free the weights. What waits or fetches in another thread raises `InvalidArgumentError` there."""
        self._stop.set()
        self._state, self._next, self._layout, self._step = (), None, None, None

    def _look_now(self) -> Head:
        self._check_open()
        head = self._source.head()
        if head is None:
            raise NotFoundError(
                "nothing is published here yet",
                where=self._source.where,
                hint="Wait for the first step with `wait`, or check the path.",
            )
        return head

    def _target(self, head: Head, step: int | FollowedStep | None) -> RecordRef:
        if isinstance(step, FollowedStep):
            return step.ref
        if step is None and self._step is not None and self._step.ref.name > head.record.name:
            return self._step.ref
        return self._source.ref(head, step)

    def _fetch(self, step: int | FollowedStep | None, head: Head | None = None) -> _NextState:
        """Fetch and verify what leads to a step, unless that was done before."""
        head = self._look_now() if head is None else head
        target, current = self._target(head, step), self._step
        if self._next is not None and self._next.step.ref == target:
            return self._next
        self._next = None
        record = self._source.record(target)
        following = FollowedStep.of(record, target)
        if current is not None and current.ref == target:
            assert self._layout is not None
            return _NextState(following, self._layout, record.model, target, [])
        layout, before = self._layout_at(target), self._layout
        is_same = before is not None and model_digest(before.model) == model_digest(layout.model)
        if before is not None and not is_same and not self._accepts_other:
            raise other_model(before.model, layout.model, self._source.where)
        if not is_same:
            check_memory(layout, self._source.where)

        def use(route: Route) -> _NextState:
            if before is not None and is_same and current is not None and before.can_continue(layout):
                if not route.begins_with_base and route.end.model != self._model_ref:
                    raise CorruptError("deltas between two models", where=self._source.where / record.key)
                state = before.in_order(self._state, layout)
                changes = find_changes(self._source, route, layout, state, self._threads)
                return _NextState(following, layout, record.model, current.ref, changes)
            if not route.begins_with_base:
                raise CorruptError("deltas between two models", where=self._source.where / record.key)
            whole = layout.new_state()
            write_state(self._source, route, layout, None, whole, self._threads)
            return _NextState(following, layout, record.model, None, [], whole)

        begin = current.ref if is_same and current is not None else None
        try:
            self._next = self._source.along_route(head, begin, target, use)
        except FollowingStopped:
            raise _closed() from None
        return self._next

    def _layout_at(self, target: RecordRef) -> StateLayout:
        """What this follower has of the model of a step."""
        record = self._source.record(target)
        if self._layout is not None and record.model == self._model_ref:
            return self._layout
        return self._part.layout_of(self._source, record)

    def _hold(self, following: _NextState) -> None:
        """Let a state that was verified be the one that is held."""
        if following.whole is not None:
            self._state = following.whole
        elif self._layout is not None:
            self._state = self._layout.in_order(self._state, following.layout)
        for change in following.changes:
            change.put(self._state)
        self._step, self._layout, self._model_ref, self._next = (
            following.step,
            following.layout,
            following.model_ref,
            None,
        )

    def _known_epoch(self) -> int | None:
        newest = self._source.newest
        return self._step.epoch if self._step is not None else None if newest is None else newest.record.name.epoch

    def _is_newer(self, ref: RecordRef, after: int | FollowedStep | None, epoch: int) -> bool:
        if isinstance(after, int):
            return ref.name > StepName(epoch, after)
        before = self._step if after is None else after
        return before is None or ref.name > before.ref.name

    def _check_open(self) -> None:
        if self._stop.is_set():
            raise _closed()


@dataclass(frozen=True, eq=False)
class _LocatedChange:
    """A change of a chunk, and the memory of its tensor that the caller has: (elements,) in its dtype."""

    change: ChunkChange
    layout: StateLayout
    memory: Array

    def is_before(self, state: State) -> bool:
        """Whether the caller's values are those of a state."""
        indices, which = self.layout.indices(self.change.chunk, self.change.positions)
        before = self.change.values_before(state)
        return not len(positions_of_changes(before if which is None else before[which], self.memory[indices]))

    def write(self) -> None:
        """Write the values after."""
        indices, which = self.layout.indices(self.change.chunk, self.change.positions)
        self.memory[indices] = self.change.values if which is None else self.change.values[which]


def _copy(layout: StateLayout, number: int, state: State, values: Array) -> None:
    np.copyto(values, layout.values(number, state).reshape(-1))


def check_memory(layout: StateLayout, where: Path) -> None:
    """Raise `UnsafeError` if this machine cannot have a state in memory."""
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if layout.nbytes > there:
        needed, has = format_nbytes(layout.nbytes), format_nbytes(there)
        raise UnsafeError(f"the weights need {needed}, and this machine has {has} of memory", where=where)


def _by_copy(memory: list[tuple[int, Array]]) -> list[dict[int, Array]]:
    """The memory of tensors as states: in the first, one memory of each; in the others, further ones of some."""
    copies = list[dict[int, Array]]()
    for number, values in memory:
        free = next((copy for copy in copies if number not in copy), None)
        if free is None:
            copies.append(free := {})
        free[number] = values
    return copies


def _closed() -> InvalidArgumentError:
    return InvalidArgumentError("the follower is closed")
