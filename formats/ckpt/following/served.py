"""A folder that always serves a verified step: two folders of safetensors, and a link to one of them.

`TARGET/a` and `TARGET/b` are models as Hugging Face's libraries save them, `TARGET/current` is a link to the one that
is served. The next step is written into `TARGET/.next`, from the weights of the served one. Once every chunk was
verified, `.next` gets the free name, and the link is replaced by one rename. Weights are not flushed to the disk: a
follower that starts verifies what the link names.

A folder of one tensor-parallel rank has the rank's shards in its safetensors, and in `.chunks` the chunks of which they
are parts, because a change is coded against all values of its chunk.
"""

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from ckpt.following.decode import first_wrong_rank, write_state
from ckpt.following.mapped_weights import (
    INDEX,
    MappedWeights,
    WeightsFile,
    chunks_nbytes,
    index_of,
    map_weights,
    weights_files,
)
from ckpt.following.shards import ALL_RANKS, ShardLayout, TensorParallelRank
from ckpt.following.source import FollowedStep, PublishedSource
from ckpt.following.state import StateLayout, other_model
from ckpt_formats.containers.safetensors import SUFFIX
from ckpt_formats.core import locking
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    LockedError,
    NoSpaceError,
    OutputError,
    UnsafeError,
)
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.universal.published.model import PublishedModel, model_digest
from ckpt_formats.universal.published.records import MAX_RECORD, Head, RecordRef, StepRecord
from ckpt_formats.universal.published.route import Route, ref_of

CURRENT = "current"
RECORD = "published-step.json"
_NAMES = ("a", "b")
_NEXT, _NEXT_LINK, _OLD, _LOCK = ".next", ".current", ".old", ".lock"


@dataclass(frozen=True)
class Advance:
    """How a folder came to serve a step."""

    step: FollowedStep
    path: Path
    """The folder that is served now: `TARGET/a` or `TARGET/b`."""
    records: int
    """The deltas, folds and bases that were read."""
    nbytes: int
    """What was read of their objects."""
    from_base: bool


class ServedFolder(AbstractContextManager["ServedFolder"]):
    """The folder TARGET, which this process alone writes. One thread uses it at a time."""

    def __init__(
        self,
        target: Path,
        source: PublishedSource,
        threads: int,
        part: TensorParallelRank = ALL_RANKS,
    ) -> None:
        """Serve steps of a chain in a folder, which is created within the context. `part`: whose shards it has.

        Raises there: `LockedError` if another process serves it, `OutputError` if it has other contents or cannot be
        written.
        """
        self.target = target
        self.source = source
        self.threads = threads
        self._part = part
        self.step: FollowedStep | None = None
        """The step that is served, verified by this process."""
        self._current: MappedWeights | None = None
        self._other: MappedWeights | None = None
        """What was served before."""
        self._is_released = False
        """Whether nobody reads that any more."""
        self._lock: AbstractContextManager[None] | None = None

    def __enter__(self) -> "ServedFolder":
        with _writing(self.target):
            self.target.mkdir(parents=True, exist_ok=True)
        error = LockedError("another process serves this folder", where=self.target, hint="Choose another TARGET.")
        self._lock = locking.lock(self.target / _LOCK, error)
        self._lock.__enter__()
        try:
            self._check_contents()
            with _writing(self.target):
                self._remove_leftovers()
        except BaseException:
            self._lock.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._current = self._other = None
        if self._lock is not None:
            self._lock.__exit__(None, None, None)

    @property
    def path(self) -> Path | None:
        """The folder that is served: `TARGET/a` or `TARGET/b`; None if there is none."""
        name = self._served_name()
        return None if name is None else self.target / name

    def verify(self) -> CkptError | None:
        """Compare what is served, which another process has written, with its record and the model of the chain.

        If it differs, it is served no longer. Returns how it differs; None if it is whole, or nothing is served.
        Raises `OSError` if the chain cannot be read.
        """
        folder = self.path
        if folder is None:
            return None
        try:
            self._verify(folder)
        except (CorruptError, IncompleteError, UnsafeError, FileNotFoundError, NotADirectoryError) as error:
            with _writing(self.target):
                _remove(self.target / CURRENT)
            return error if isinstance(error, CkptError) else IncompleteError("a file is missing", where=folder)
        return None

    def advance(self, head: Head, target: RecordRef) -> Advance:
        """Serve a step: write it next to what is served, verify it, and let the link name it.

        Raises as `Follower.update`; `NoSpaceError` if the disk is full, `OutputError` if the folder cannot be written.
        After an error, what was served is served still.
        """
        if self.step is not None and self.step.ref == target and self.path is not None:
            return Advance(self.step, self.path, 0, 0, False)
        record = self.source.record(target)
        layout, files = self._layout_of(record)
        model, following = layout.model, FollowedStep.of(record, target)
        data = {**self.source.files(record), **index_of(files), RECORD: self.source.record_bytes(target)}
        written: MappedWeights | None = None

        def use(route: Route) -> tuple[Route, int]:
            nonlocal written
            current = None if route.begins_with_base else self._current
            if current is not None and current.layout.model != model:
                raise CorruptError("deltas between two models", where=self.source.where / record.key)
            if written is None:
                with _writing(self.target):
                    written = self._next_folder(layout, files)
            before = None if current is None else current.state
            read = write_state(self.source, route, layout, before, written.state, self.threads)
            written.write_shards(read.digests)
            return route, read.nbytes

        try:
            route, nbytes = self.source.along_route(head, None if self.step is None else self.step.ref, target, use)
            assert written is not None
            with _writing(self.target):
                folder = self._publish(data)
        except BaseException:
            self._other, self._is_released = None, False
            with suppress(OSError):
                _remove(self.target / _NEXT)
            raise
        self._other, self._is_released = self._current, False
        self._current, self.step = written, following
        return Advance(following, folder, len(route.records), nbytes, route.begins_with_base)

    def _layout_of(self, record: StepRecord) -> tuple[StateLayout, Sequence[WeightsFile]]:
        """What is served of the model of a step, and the files that have it: computed anew for another model only.

        Raises `UnsupportedError` if it is not the model that is served, and as `PublishedSource.model`.
        """
        model, current = self.source.model(record), self._current
        if current is not None and current.layout.model is model:
            return current.layout, current.files
        if current is not None and model_digest(current.layout.model) != model_digest(model):
            raise other_model(current.layout.model, model, self.source.where)
        layout = self._part.layout_of(self.source, record)
        _check_names(model, self.source.where / record.model.key)
        return layout, weights_files(layout, self._part)

    def release_other(self) -> None:
        """State that nobody reads the folder that was served before: its files may be written in place."""
        self._is_released = self._other is not None

    def _served_name(self) -> str | None:
        try:
            name = os.readlink(self.target / CURRENT)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise locking.unwritable(error, self.target / CURRENT) from error
        return name if name in _NAMES else None

    def _check_contents(self) -> None:
        """Raise `OutputError` if the folder has anything that no follower writes there."""
        own = {*_NAMES, CURRENT, _NEXT, _NEXT_LINK, _OLD, _LOCK}
        for path in sorted(self.target.iterdir()):
            is_own = path.name in own
            if path.name == CURRENT:
                is_own = path.is_symlink() and self._served_name() is not None
            elif path.name in _NAMES:
                is_own = path.is_dir() and not path.is_symlink() and (path / RECORD).is_file()
            if not is_own:
                raise OutputError(
                    f"the folder holds something else: {printable(path.name)!r}",
                    where=self.target,
                    hint="Choose an empty or new folder as TARGET.",
                )

    def _verify(self, folder: Path) -> None:
        """Take what is served for what it is. Raises `CorruptError`, `IncompleteError`, `OSError`."""
        data = read_whole(folder / RECORD, MAX_RECORD)
        record = StepRecord.from_bytes(data, folder / RECORD, self.source.signing_key)
        layout = self._part.layout_of(self.source, record)
        files = weights_files(layout, self._part)
        for name, content in {**self.source.files(record), **index_of(files)}.items():
            if read_whole(folder / name, max(len(content), 1)) != content:
                raise CorruptError("is not the file that was published", where=folder / name)
        weights = map_weights(folder, layout, files, is_new=False)
        rank = first_wrong_rank(record, layout, weights.state, self.threads, weights.digests_by_rank())
        if rank is not None:
            raise CorruptError(f"the weights of rank {rank} are not those of step {record.name.step}", where=folder)
        for number, shard in enumerate([] if weights.shards is None else weights.shards):
            if layout.values(number, weights.state).tobytes() != shard.tobytes():
                raise CorruptError("a shard has other values than its chunks", where=folder)
        self._current = weights
        self.step = FollowedStep.of(record, ref_of(record.name, data))

    def _next_folder(self, layout: StateLayout, files: Sequence[WeightsFile]) -> MappedWeights:
        """The folder for the next step, mapped: what was served before, if it may be written in place, else new."""
        other, path = self.target / self._free_name(), self.target / _NEXT
        self._remove_leftovers()
        if self._is_released and self._other is not None and self._other.layout.model == layout.model:
            os.rename(other, path)
            (path / RECORD).unlink()
            return self._other
        self._other = None
        if other.exists():  # by a rename first: a folder that a kill leaves half removed is not called a or b
            os.rename(other, self.target / _OLD)
            _remove(self.target / _OLD)
        path.mkdir()
        needed, there = sum(file.nbytes for file in files), shutil.disk_usage(path).free
        if isinstance(layout, ShardLayout):
            needed += chunks_nbytes(layout)
        if needed > there:
            raise _full(needed, there, self.target)
        return map_weights(path, layout, files, is_new=True)

    def _remove_leftovers(self) -> None:
        """Remove what a step has left that could not be served."""
        for name in (_NEXT, _NEXT_LINK, _OLD):
            _remove(self.target / name)

    def _publish(self, files: dict[str, bytes]) -> Path:
        """Give the folder that is complete its name, and let the link name it."""
        name, path = self._free_name(), self.target / _NEXT
        for key, data in files.items():
            (path / key).unlink(missing_ok=True)
            (path / key).write_bytes(data)
        os.rename(path, self.target / name)
        os.symlink(name, self.target / _NEXT_LINK)
        os.replace(self.target / _NEXT_LINK, self.target / CURRENT)
        return self.target / name

    def _free_name(self) -> str:
        return _NAMES[1] if self._served_name() == _NAMES[0] else _NAMES[0]


def _check_names(model: PublishedModel, where: Path) -> None:
    """Raise `UnsafeError` if a file that belongs to the model would be taken for its weights, or replace them."""
    for name in model.files:
        if name in (RECORD, INDEX) or name.endswith(SUFFIX):
            raise UnsafeError(f"a file of the model has the name of weights: {printable(name)!r}", where=where)


def _remove(path: Path) -> None:
    """Remove a file, a link or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _full(needed: int, there: int, place: Path) -> NoSpaceError:
    return NoSpaceError(
        f"the next step needs {format_nbytes(needed)}, and {format_nbytes(there)} are free",
        where=place,
        hint="Free space for two copies of the weights. ckpt still serves the previous step.",
    )


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    """Within, an error of the system is one of the target, whose disk may be full."""
    try:
        yield
    except CkptError:
        raise
    except OSError as error:
        raise locking.unwritable(error, place) from error
