"""Snapshots of a run: a thread copies its values into a ring while the next forward and backward pass run.

The thread hands what it has copied to the process of the rank, which saves or publishes it. Memory: the ring, and
nothing else; while the ring is full, the thread waits. An update waits for what is not copied yet.
"""

import json
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeVar

import torch

from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CkptError, IncompleteError, OutputError
from ckpt_training import copies
from ckpt_training.local_shards import dtype_name
from ckpt_training.save_plan import SavedShard
from ckpt_training.writing.link import LinkSettings, WriterBroken, WriterLink
from ckpt_training.writing.orders import Order
from ckpt_training.writing.ring import Ring
from ckpt_training.writing.save_orders import MODULE, DropSave, FinishSave, WriteRuns

_ALIGNMENT = 64
_LOOK_SECONDS = 0.02
"""Time between two looks at what the process reports, while a save is in flight."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class SnapshotTask:
    """What the process of a rank does with snapshots."""

    module: str
    """The module that it runs."""
    noun: str
    """What it writes, for messages."""
    participle: str
    """What a step is afterwards, for messages."""
    drop: "Callable[[Snapshot, str], Order]"
    """Returns the order that tells other ranks that this one takes no part in the step of a snapshot, and why."""


class SnapshotSettings(LinkSettings, Protocol):
    """The first message to the process."""

    @property
    def target(self) -> str:
        """What it writes, for messages."""

    @property
    def seconds(self) -> float:
        """How long it may make no progress."""


@dataclass(frozen=True)
class PendingOrder:
    """An order without values."""

    order: Order
    step: int | None
    """The step of the answer; None: there is none."""


@dataclass(frozen=True)
class CopiedRun:
    """Values of a shard that are copied together."""

    shard: SavedShard
    source: torch.Tensor
    """The values; as integers of the same size, unless they are cast."""
    dtype: DType
    """That of the copy."""
    offset: int
    """Where the copy begins in the state of the box, in bytes."""
    at: int
    """Where the copy begins in the slot, in bytes."""

    @property
    def nbytes(self) -> int:
        return self.source.numel() * self.dtype.itemsize


@dataclass(eq=False)
class Snapshot:
    """A state on its way to the process. `ended` is set once `result` or `error` is known."""

    step: int
    begin: Order
    shards: Sequence[SavedShard]
    notes: bytes
    after: Any = None
    """The point in the work of the device at which the state of the step is complete."""
    copied: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)
    error: CkptError | None = None
    result: Mapping[str, Any] = field(default_factory=dict)
    _versions: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._versions = [_version(one.memory) for one in self.shards]

    def changed(self) -> str | None:
        """Return the name of a tensor that was changed since the snapshot began; None if torch counted no change."""
        for one, version in zip(self.shards, self._versions, strict=True):
            if _version(one.memory) != version:
                return f"`{one.name}` ({one.state})"
        return None

    def end(self, error: CkptError | None = None, result: Mapping[str, Any] | None = None) -> None:
        """Note how the save ended."""
        if not self.ended.is_set():
            self.error, self.result = error, result or {}
            self.copied.set()
            self.ended.set()


SAVING = SnapshotTask(MODULE, "the saves", "saved", lambda snapshot, reason: DropSave(snapshot.step, reason))


class SnapshotThread:
    """Copies snapshots one after another. Its methods are for the thread of the training only.

    Attributes:
        waited: Seconds for which updates have waited for copies.
    """

    def __init__(
        self,
        settings: Callable[[int, int], SnapshotSettings],
        ring: Ring,
        device: torch.device,
        task: SnapshotTask = SAVING,
        answered: Callable[[Mapping[str, Any]], None] = lambda answer: None,
        has_peers: bool = False,
    ) -> None:
        """Start the process, in the background.

        Args:
            settings: Its first message, from the size of a slot and their number.
            ring: The memory that it shares with the trainer.
            device: Where the values are.
            task: What it does.
            answered: The thread calls it with each answer, before the snapshot ends.
            has_peers: Whether the process also says, between snapshots, what holders have.
        """
        self._ring, self._settings = ring, settings(ring.slot_nbytes, ring.slots)
        self._task, self._answered, self._has_peers = task, answered, has_peers
        self._copies = copies.copies_of(device)
        self._todo: queue.SimpleQueue[Snapshot | PendingOrder | None] = queue.SimpleQueue()
        self._flight: list[Snapshot] = []
        """The snapshots of which the process has not reported the end. Only the thread uses it."""
        self._dropped = set[int]()
        """The steps in which this rank takes no part, until the process answers. Only the thread uses it."""
        self._followed = set[int]()
        """The steps after which a job runs in the process. Only the thread uses it."""
        self._link: WriterLink | None = None
        self._broken = ""
        """Why the process could not be started."""
        self.pid: int | None = None
        self.waited = 0.0
        self._copying: list[Snapshot] = []
        self._thread = threading.Thread(target=self._work, name="ckpt-snapshots", daemon=True)
        self._thread.start()

    def begin(self, snapshot: Snapshot) -> None:
        """Copy a snapshot of what the state is now, in the background."""
        snapshot.after = self._copies.mark()
        self._copying = [one for one in self._copying if not one.copied.is_set()] + [snapshot]
        self._todo.put(snapshot)

    def order(self, order: Order, step: int | None = None) -> None:
        """Send an order without values, such as that this rank takes no part in a step, so that no rank waits for it.

        `step`: of the answer; None: there is none.
        """
        self._todo.put(PendingOrder(order, step))

    def wait_copied(self) -> None:
        """Wait until all values are copied that an update may change."""
        if all(one.copied.is_set() for one in self._copying):
            return
        begin = time.monotonic()
        for one in self._copying:
            one.copied.wait()
        self._copying.clear()
        self.waited += time.monotonic() - begin

    @property
    def peers(self) -> dict[str, str]:
        """Of each host that should hold what is saved, the last that the process said of it."""
        link = self._link
        return {} if link is None else dict(link.peers)

    def close(self, seconds: float) -> bool:
        """End the process after all snapshots. Returns False if it has not ended within `seconds`."""
        self._todo.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            try:
                self._start()
                is_due = self._flight or self._dropped or self._followed or self._has_peers
                task = self._todo.get(timeout=_LOOK_SECONDS) if is_due else self._todo.get()
                if task is None:
                    break
                self._do(task)
            except queue.Empty:
                pass
            except Exception as error:
                self._fail(error)
            self._look()
        while self._flight:
            time.sleep(_LOOK_SECONDS)
            self._look()
        if (link := self._link) is not None:
            link.close()
            self._take(link)
            self._give_up_jobs("its process has ended")

    def _start(self) -> None:
        """Start the process, if there is none that works."""
        if self._link is None and not self._flight:
            try:
                self._link = WriterLink(
                    self._settings, self._ring, self._settings.seconds, self._task.module, self._task.noun
                )
                self.pid = self._link.pid
                self._copies.pin(self._ring.content)
            except WriterBroken as error:
                self._broken = str(error)

    def _do(self, task: Snapshot | PendingOrder) -> None:
        link = self._link
        if isinstance(task, PendingOrder):
            if link is not None:
                self._dropped |= set() if task.step is None else {task.step}
                link.order(task.order)
            return
        self._flight.append(task)
        if link is None:
            raise WriterBroken(self._broken)
        link.order(task.begin)
        for runs in _pieces(task.shards, self._ring.slot_nbytes):
            slot = link.acquire_slot()
            content = self._ring.slot(slot)
            targets = [content[one.at : one.at + one.nbytes].view(one.dtype) for one in runs]
            shaped = [target.reshape(one.source.shape) for target, one in zip(targets, runs, strict=True)]
            self._copies.copy(shaped, [one.source for one in runs], task.after)
            link.order(
                WriteRuns(slot, [(one.shard.box, one.shard.state, one.offset, one.at, one.nbytes) for one in runs])
            )
        changed = task.changed()
        task.copied.set()
        if changed is not None:
            link.order(self._task.drop(task, f"{changed} was changed outside the optimizer while it was copied"))
        else:
            link.order(FinishSave(), task.notes)

    def _fail(self, error: Exception) -> None:
        """End all saves in flight with an error, and the process: the next save starts another one."""
        reason = error.what if isinstance(error, CkptError) else str(error) or type(error).__name__
        for one in self._flight:
            one.end(OutputError(self._failure(one.step, reason), where=self._settings.target))
            self.order(self._task.drop(one, reason), one.step)  # another process tells the other ranks
        self._flight.clear()
        self._dropped.clear()
        self._give_up_jobs(reason)
        link, self._link = self._link, None
        if link is not None:
            link.close()

    def _look(self) -> None:
        """Take what the process reports."""
        link = self._link
        if link is None:
            return
        try:
            link.check()
            if (self._flight or self._dropped or self._followed) and not link.is_alive:
                link.check()
                raise WriterBroken(f"the process that writes {self._task.noun} has ended")
        except WriterBroken as error:
            self._take(link)
            self._fail(error)
            return
        self._take(link)

    def _take(self, link: WriterLink) -> None:
        while link.messages:
            word, rest = link.messages.popleft()
            fields = json.loads(rest)
            if word == "then":
                self._followed.discard(fields["step"])
                self._answered(fields)
                continue
            self._dropped.discard(fields["step"])
            if fields.get("has_job"):
                self._followed.add(fields["step"])
            self._answered(fields)
            own = next((one for one in self._flight if one.step == fields["step"]), None)
            if own is None:
                continue
            self._flight.remove(own)
            if word == self._task.participle:
                own.end(result=fields)
            else:
                own.end(IncompleteError(self._failure(own.step, fields["error"]), where=self._settings.target))

    def _give_up_jobs(self, reason: str) -> None:
        for step in self._followed:
            self._answered({"step": step, "job_error": reason})
        self._followed.clear()

    def _failure(self, step: int, reason: str) -> str:
        return f"step {step} is not {self._task.participle}: {reason}"


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    """What changes if torch changes the values of a tensor, or gives it other memory."""
    try:
        return tensor._version, tensor.data_ptr()
    except RuntimeError:  # one of the inference mode
        return 0, tensor.data_ptr()


def _pieces(shards: Sequence[SavedShard], size: int) -> Iterator[list[CopiedRun]]:
    """The runs of all shards, as many together as a slot of `size` bytes has room for."""
    piece: list[CopiedRun] = []
    at = 0
    for shard in shards:
        offset = 0
        source = _integers(shard.memory) if shard.dtype is None else shard.memory
        dtype = DTYPES[dtype_name(source.dtype) if shard.dtype is None else shard.dtype]
        for block in _blocks(source, size // _ALIGNMENT * _ALIGNMENT // dtype.itemsize):
            rest = block
            while rest.numel():
                room = (size - at) // dtype.itemsize
                if not room or (not rest.is_contiguous() and rest.numel() > room):
                    yield piece
                    piece, at = [], 0
                    continue
                part = rest if rest.numel() <= room else rest.reshape(-1)[:room]
                rest = rest.reshape(-1)[part.numel() :] if rest.is_contiguous() else rest[:0]
                run = CopiedRun(shard, part, dtype, offset, at)
                piece.append(run)
                offset += run.nbytes
                at = -(-(at + run.nbytes) // _ALIGNMENT) * _ALIGNMENT
                if at >= size:
                    yield piece
                    piece, at = [], 0
    if piece:
        yield piece


def _integers(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as integers of the same size: copies are of bits. Of complex128, a tensor has two of them."""
    if tensor.element_size() not in _INTEGERS:
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.element_size()])


def _blocks(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """A tensor as blocks that follow each other in C order: itself, or blocks of at most `size` elements."""
    if tensor.is_contiguous() or tensor.numel() <= size:
        yield tensor
        return
    for row in tensor:
        yield from _blocks(row, size)


C = TypeVar("C", bound="SnapshotContext")


class SnapshotContext(ABC):
    """A context manager whose snapshots a `SnapshotThread` copies: what `Saver` and `Publisher` share."""

    _thread: SnapshotThread

    def __enter__(self: C) -> C:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End the work."""

    @property
    def waited(self) -> float:
        return self._thread.waited

    @property
    def writer_pid(self) -> int | None:
        return self._thread.pid
