"""Store each new whole checkpoint of a run elsewhere, in a chain or as a copy, and prune the run.

What is stored there is the only record. A chain has the steps of its members, a folder of copies has their names: both
appear at once, when they are whole. So a watch that was killed goes on where it stopped, and stores nothing twice.
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from ckpt.chains.append import append, plan_append
from ckpt.chains.write import DeltaPolicy
from ckpt.compare import diff
from ckpt.copying.compare import digest_of
from ckpt.copying.copy import Copy
from ckpt.job import AnyProgress
from ckpt.pipeline import Execution, Resources
from ckpt.pipeline.folder_target import sweep
from ckpt.runs.keep import parse_keep
from ckpt.runs.new import NewCheckpoints, SkippedCheckpoint, State, modified_of, state_of
from ckpt.runs.prune import PruneResult, prune_stored
from ckpt_formats.core.arguments import Range, StrPath, checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NotFoundError,
    UnsupportedError,
)
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import printable
from ckpt_formats.registry.location import checkpoints_in, is_checkpoint
from ckpt_formats.registry.newest import open_whole, step_of
from ckpt_formats.stores.location import listed_again, source_path, target_path
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex
from ckpt_formats.universal.chain.states import open_state

Seconds = Annotated[float, Range(0, above=True)]
Kind = Literal["base", "delta", "copy"]
_CHAIN = ".chain"


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint of a run that is stored elsewhere now, or would be."""

    path: Path
    step: int | None
    target: Path
    """The copy, or the chain."""
    kind: Kind
    raw_nbytes: int
    """The bytes of its values, or of its files if it is a copy."""
    stored_nbytes: int | None
    """The bytes that were written; None if nothing was."""
    seconds: float
    notices: tuple[Notice, ...] = ()


@checked
def watch(
    run: StrPath,
    target: StrPath,
    *,
    keep: str | None = None,
    every: Seconds = 5.0,
    once: bool = False,
    timeout: Seconds | None = None,
    policy: DeltaPolicy | None = None,
    dry_run: bool = False,
    options: ReadOptions | None = None,
    resources: Resources | None = None,
    locks: bool = True,
    stop: threading.Event | None = None,
    progress: AnyProgress | None = None,
) -> Iterator[StoredCheckpoint | SkippedCheckpoint | PruneResult]:
    """Append each checkpoint of a run to a chain, or copy it, once it is whole, in the order of steps, until `stop`.

    A checkpoint is whole when all its parts are there, and none of its files changed for `every` seconds. If this is
    killed, the target is as it was, and the next call goes on. What is stored already is not stored again.

    Args:
        run: The folder or the URL in which checkpoints appear.
        target: A chain, if it is one or its name ends in `.chain`; else the folder or URL of copies, which keep their
            names.
        keep: Rules as for `prune`: after something was stored, remove the checkpoints of the run that no rule keeps.
            Only those go that are in `target` as they are now.
        every: Seconds between two passes.
        once: End when those that are whole now are stored.
        timeout: End when nothing has become whole for so many seconds.
        policy: How states are appended to a chain.
        dry_run: Yield what would be stored, then end. Nothing is written or removed.
        options: How checkpoints are opened.
        resources: Threads and memory.
        locks: As in `Job.run`.
        stop: Ends the iteration when it is set.
        progress: Is called while a checkpoint is stored.

    Yields:
        What was stored; a checkpoint that cannot be, once, and again if it changes; what was pruned.

    Raises:
        NotFoundError: There is no folder `run`, with `once` or `dry_run`; without, it may appear later.
        CkptError: If `target` cannot be written, but not for a checkpoint that is damaged.
    """
    if keep is not None:
        parse_keep(keep)
    place, execution = target_path(target), Execution.of(resources, locks=locks)
    _check_apart(source_path(run), place)
    store: _Store
    if place.name.endswith(_CHAIN) or (place / chain_file.NAME).is_file():
        store = _Chain(place, execution, policy or DeltaPolicy())
    elif policy is None:
        store = _Copies(place, execution)
        if not dry_run and not is_remote(place):
            sweep(place)
    else:
        hint = f"Name a chain: {printable(place.name)}{_CHAIN}"
        raise InvalidArgumentError("the options of deltas are for a chain", where=place, hint=hint)
    folder = source_path(run)
    if folder.is_dir() and is_checkpoint(folder) and not checkpoints_in(folder):
        hint = (
            "Name the folder in which a run saves its checkpoints; store a single one by `ckpt append` or `ckpt copy`."
        )
        raise InvalidArgumentError("is one checkpoint, not the folder of a run", where=folder, hint=hint)
    new = NewCheckpoints(run, every, options, stop or threading.Event())
    passes, since, reported = 0, time.monotonic(), dict[Path, str]()
    while not new.stop.is_set():
        stored_any = False
        for one in new.look():
            result = one if isinstance(one, SkippedCheckpoint) else _stored(one, store, new, dry_run, progress)
            if isinstance(result, StoredCheckpoint):
                stored_any, since = True, time.monotonic()
            if result is not None:
                yield result
            if new.stop.is_set():
                return
        passes += 1
        is_last = passes > 1 and (once or dry_run)
        if is_last and not new.folder.is_dir():
            raise NotFoundError("there is no such folder", where=printable(str(new.folder)))
        for path, error in new.incomplete.items():
            if reported.get(path) != error.what and (is_last or new.has_later(path)):
                reported[path] = error.what
                yield SkippedCheckpoint(path, error)
        if keep is not None and not dry_run and (stored_any or is_last):
            with suppress(NotFoundError, IncompleteError):  # nothing is whole and was left alone long enough
                pruned = prune_stored(run, keep, is_stored=store.holds, unchanged_for=every, options=options)
                if pruned.removed or pruned.finished:
                    yield pruned
        if is_last or (timeout is not None and time.monotonic() - since >= timeout):
            return
        new.stop.wait(every)


def _check_apart(run: Path, target: Path) -> None:
    """Raise `InvalidArgumentError` if the target would be in the run itself, where it would be one more checkpoint."""
    own, other = run.resolve(), target.resolve()
    if is_remote(own) == is_remote(other) and own in (other, *other.parents):
        hint = "Name a place outside of the run."
        raise InvalidArgumentError(
            "is in the folder of the run, whose checkpoints are watched", where=target, hint=hint
        )


def _stored(
    checkpoint: Checkpoint, store: "_Store", new: NewCheckpoints, dry_run: bool, progress: AnyProgress | None
) -> StoredCheckpoint | SkippedCheckpoint | None:
    """Store a checkpoint, or only say how; None if it is stored already."""
    path, state = checkpoint.path, new.state(checkpoint.path)
    try:
        if store.has(path, step_of(checkpoint), modified_of(state)):
            return None
        return store.plan(checkpoint) if dry_run else store.add(checkpoint, state, progress)
    except _NotStoredError as error:
        return SkippedCheckpoint(path, error)
    except (CorruptError, IncompleteError, NotFoundError) as error:
        if not new.is_of_run(error):
            raise
        return SkippedCheckpoint(path, error)


class _NotStoredError(UnsupportedError):
    """A checkpoint cannot be stored beside what is stored already."""


@dataclass
class _Store(ABC):
    """Where checkpoints are stored: a chain, or a folder of copies."""

    place: Path
    execution: Execution
    added: dict[Path, State] = field(default_factory=dict, init=False)
    """What this process stored, with its files as they were."""
    _same: dict[tuple[Path, State], bool] = field(default_factory=dict, init=False)

    @abstractmethod
    def has(self, path: Path, step: int | None, modified: float) -> bool:
        """Whether a checkpoint is stored. Raises `_NotStoredError` if another state of it is, or it cannot be.

        `modified`: when the last of its files was written, in seconds since 1970.
        """

    @abstractmethod
    def plan(self, checkpoint: Checkpoint) -> StoredCheckpoint:
        """What `add` would do."""

    @abstractmethod
    def add(self, checkpoint: Checkpoint, state: State, progress: AnyProgress | None) -> StoredCheckpoint:
        """Store a checkpoint. It is there when it is whole, or not at all."""

    @abstractmethod
    def stored(self, path: Path, step: int | None) -> Checkpoint | None:
        """What is stored of a checkpoint; None if nothing is."""

    def holds(self, path: Path, step: int | None) -> bool:
        """Whether a checkpoint may be removed: its state of now is stored here.

        This process stored and verified it; or else, after a restart or a change, both are compared.
        """
        try:
            stored = self.stored(path, step)
            if stored is None:
                return False
            state = state_of(path)  # of all files: one that was replaced may be older than others
            if self.added.get(path) == state:
                return True
            if (path, state) not in self._same:
                self._same[path, state] = self._is_same(path, stored)
            return self._same[path, state]
        except (CkptError, OSError):
            return False

    @abstractmethod
    def _is_same(self, path: Path, stored: Checkpoint) -> bool:
        """Whether all that is stored of checkpoints here is as it is in the run. Both are read."""


@dataclass
class _Chain(_Store):
    """The chain to which checkpoints are appended."""

    policy: DeltaPolicy
    _planned: list[int] = field(default_factory=list, init=False)

    def _index(self) -> ChainIndex:
        self.place = listed_again(self.place)
        file = self.place / chain_file.NAME
        return chain_file.load(file) if file.is_file() else ChainIndex(())

    def has(self, path: Path, step: int | None, modified: float) -> bool:
        if step is None:
            raise _NotStoredError("neither it nor its name states a step", where=path, hint="Append it with --step.")
        members = {member.step: member for member in self._index().members}
        last = max((*members, *self._planned), default=-1)
        if step > last:
            return False
        if step not in members:
            what = f"step {step} is before {last}, the chain's last step: it cannot be appended"
            raise _NotStoredError(what, where=path, hint="If the run started again, give it another chain.")
        if path in self.added or modified > _written(self.place / members[step].folder):
            what = f"changed after step {step} was appended to the chain, which keeps what it has"
            raise _NotStoredError(what, where=path, hint="If the run started again, give it another chain.")
        return True

    def plan(self, checkpoint: Checkpoint) -> StoredCheckpoint:
        step = step_of(checkpoint)
        kind: Kind = "delta"
        if not self._planned:
            kind = plan_append(self.place, checkpoint, step, self.policy)[1]
        self._planned.append(step or 0)
        return StoredCheckpoint(checkpoint.path, step, self.place, kind, _raw_nbytes(checkpoint), None, 0.0)

    def add(self, checkpoint: Checkpoint, state: State, progress: AnyProgress | None) -> StoredCheckpoint:
        path, step = checkpoint.path, step_of(checkpoint)
        written = append(listed_again(self.place), checkpoint, step, self.policy, self.execution, progress)
        self.added[path] = state
        member, seconds = written.member, written.result.seconds
        raw, notes = _raw_nbytes(checkpoint), written.notes
        return StoredCheckpoint(path, step, self.place, member.kind, raw, member.stored_nbytes, seconds, notes)

    def stored(self, path: Path, step: int | None) -> Checkpoint | None:
        chain = self._index()
        is_there = any(member.step == step for member in chain.members)
        return open_state(self.place, chain, step) if is_there and step is not None else None

    def _is_same(self, path: Path, stored: Checkpoint) -> bool:
        return diff(open_whole(path, ReadOptions()), stored, resources=self.execution).same


@dataclass
class _Copies(_Store):
    """The folder of copies, which have the names of their checkpoints."""

    def has(self, path: Path, step: int | None, modified: float) -> bool:
        copied = listed_again(self.place) / path.name
        if not copied.exists():
            return False
        work = Copy(path, copied, everything=True)
        copied_sizes = _sizes(copied)
        is_other = any(copied_sizes.get(one.name if copied.is_dir() else "") != one.nbytes for one in work.files)
        if path in self.added or is_other or modified > _written(copied):
            what = f"changed after it was copied: {printable(str(copied))} keeps what it has"
            raise _NotStoredError(what, where=path, hint="Remove the copy, or name another place.")
        return True

    def plan(self, checkpoint: Checkpoint) -> StoredCheckpoint:
        path, target = checkpoint.path, self.place / checkpoint.path.name
        nbytes = sum(one.nbytes for one in Copy(path, target, everything=True).files)
        return StoredCheckpoint(path, step_of(checkpoint), target, "copy", nbytes, None, 0.0)

    def add(self, checkpoint: Checkpoint, state: State, progress: AnyProgress | None) -> StoredCheckpoint:
        planned = self.plan(checkpoint)
        if not is_remote(self.place):
            self.place.mkdir(parents=True, exist_ok=True)
        work = Copy(planned.path, planned.target, everything=True)
        notes = tuple(work.plan().notes)
        result = work.run(resources=self.execution, locks=self.execution.locks, progress=progress)
        self.added[planned.path] = state
        return replace(planned, stored_nbytes=result.nbytes, seconds=result.seconds, notices=notes)

    def stored(self, path: Path, step: int | None) -> Checkpoint | None:
        copied = listed_again(self.place) / path.name
        return open_whole(copied, ReadOptions()) if copied.exists() else None

    def _is_same(self, path: Path, stored: Checkpoint) -> bool:
        """A file that is no part of the checkpoint may have changed, or come, since it was copied."""
        copied = listed_again(self.place) / path.name
        pairs = [
            (one.path, copied / one.name if copied.is_dir() else copied)
            for one in Copy(path, copied, everything=True).files
        ]
        return all(copy.is_file() and digest_of(own) == digest_of(copy) for own, copy in pairs)


def _raw_nbytes(checkpoint: Checkpoint) -> int:
    return sum(parameter.nbytes for parameter in checkpoint.parameters.values())


def _written(path: Path) -> float:
    """When the first file of what is stored was written, in seconds since 1970; stores state whole seconds."""
    return min((one.stat().st_mtime for one in _files(path)), default=0.0) + (1.0 if is_remote(path) else 0.0)


def _sizes(path: Path) -> dict[str, int]:
    """The sizes of the files in a folder by their names; of a single file, under no name."""
    return {one.relative_to(path).as_posix() if one != path else "": one.stat().st_size for one in _files(path)}


def _files(path: Path) -> list[Path]:
    return [one for one in path.rglob("*") if one.is_file()] if path.is_dir() else [path]
