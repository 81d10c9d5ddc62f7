"""A folder that always serves a verified step: two folders of safetensors, and a link to one of them.

`TARGET/a` and `TARGET/b` are models as Hugging Face's libraries save them, `TARGET/current` is a link to the one that
is served. The next step is written into `TARGET/.next`, from the weights of the served one. Once every chunk was
verified, `.next` gets the free name, and the link is replaced by one rename. Weights are not flushed to the disk: a
follower that starts verifies what the link names.

A folder of one tensor-parallel rank has the rank's shards in its safetensors, and in `.chunks` the chunks of which they
are parts, because a change is coded against all values of its chunk.
"""

import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from types import TracebackType

import numpy as np

from ckpt.following.decode import first_wrong_rank, write_state
from ckpt.following.shards import ALL_RANKS, ShardLayout, TensorParallelRank
from ckpt.following.source import FollowedStep, PublishedSource
from ckpt.following.state import State, StateLayout, other_model
from ckpt_formats.containers.safetensors import SUFFIX, TensorSlot, header_bytes
from ckpt_formats.containers.safetensors_shards import SAFETENSORS_INDEX
from ckpt_formats.containers.shard_index import index_text, numbered_names
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
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.text import format_nbytes, printable
from ckpt_formats.universal.published.model import PublishedModel, model_digest
from ckpt_formats.universal.published.records import MAX_RECORD, Head, RecordRef, StepRecord
from ckpt_formats.universal.published.route import Route, ref_of

CURRENT = "current"
RECORD = "published-step.json"
MAX_FILE_NBYTES = 5 * 10**9
"""Bytes of tensors in one file, as `save_pretrained` has it."""
_NAMES = ("a", "b")
_NEXT, _NEXT_LINK, _OLD, _LOCK = ".next", ".current", ".old", ".lock"
_ALIGNMENT = 64
"""Bytes: chunks begin at multiples, so that those of any dtype are aligned."""
_CHUNKS = ".chunks"
"""The arrays of a `ShardLayout`, one after another, then the digests of all chunks of the ranks that it needs."""
_INDEX = f"model{SAFETENSORS_INDEX}"


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


@dataclass(frozen=True)
class _WeightsFile:
    """A file of safetensors, and where each of its tensors begins."""

    name: str
    header: bytes
    slots: tuple[tuple[int, TensorSlot], ...]
    """The number of each tensor in the model."""

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(slot.nbytes for _, slot in self.slots)


@dataclass(frozen=True, eq=False)
class _MappedWeights:
    """A folder of weights that is mapped into memory."""

    layout: StateLayout
    files: Sequence[_WeightsFile]
    state: State
    shards: Sequence[Array] | None = None
    """Of a tensor-parallel rank: its shards, by the number of the tensor; the state has the chunks. None: all ranks."""
    digests: Array | None = None
    """With `shards`: (16 * chunks,) uint8, those of all chunks of each rank that is needed."""

    def write_shards(self, digests: Sequence[bytes]) -> None:
        """Write what is served of a state that was verified, and the digests by which."""
        if self.shards is None or self.digests is None:
            return
        self.digests[:] = np.frombuffer(b"".join(digests), np.uint8)
        for number, tensor in enumerate(self.layout.tensors):
            self.shards[number][...] = self.layout.values(number, self.state).reshape(-1).view(tensor.dtype)

    def digests_by_rank(self) -> list[bytes] | None:
        """The digests by rank: nothing for a rank that is not needed. None: the layout has all chunks."""
        if self.digests is None:
            return None
        ends = list(accumulate(_digests_nbytes(self.layout, rank) for rank in range(len(self.layout.model.pieces))))
        return [self.digests[a:b].tobytes() for a, b in zip([0, *ends], ends, strict=False)]


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
        self._current: _MappedWeights | None = None
        self._other: _MappedWeights | None = None
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
                for name in (_NEXT, _NEXT_LINK, _OLD):
                    _remove(self.target / name)
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
        data = {**self.source.files(record), **_index(files), RECORD: self.source.record_bytes(target)}
        written: _MappedWeights | None = None

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

    def _layout_of(self, record: StepRecord) -> tuple[StateLayout, Sequence[_WeightsFile]]:
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
                    f"has something else in it: {printable(path.name)!r}",
                    where=self.target,
                    hint="Choose an empty or new folder as TARGET.",
                )

    def _verify(self, folder: Path) -> None:
        """Take what is served for what it is. Raises `CorruptError`, `IncompleteError`, `OSError`."""
        data = read_whole(folder / RECORD, MAX_RECORD)
        record = StepRecord.from_bytes(data, folder / RECORD, self.source.signing_key)
        layout = self._part.layout_of(self.source, record)
        files = weights_files(layout, self._part)
        for name, content in {**self.source.files(record), **_index(files)}.items():
            if read_whole(folder / name, max(len(content), 1)) != content:
                raise CorruptError("is not the file that was published", where=folder / name)
        weights = _map(folder, layout, files, is_new=False)
        rank = first_wrong_rank(record, layout, weights.state, self.threads, weights.digests_by_rank())
        if rank is not None:
            raise CorruptError(f"the weights of rank {rank} are not those of step {record.name.step}", where=folder)
        for number, shard in enumerate([] if weights.shards is None else weights.shards):
            if layout.values(number, weights.state).tobytes() != shard.tobytes():
                raise CorruptError("a shard has other values than its chunks", where=folder)
        self._current = weights
        self.step = FollowedStep.of(record, ref_of(record.name, data))

    def _next_folder(self, layout: StateLayout, files: Sequence[_WeightsFile]) -> _MappedWeights:
        """The folder for the next step, mapped: what was served before, if it may be written in place, else new."""
        other, path = self.target / self._free_name(), self.target / _NEXT
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
            needed += _chunks_nbytes(layout)
        if needed > there:
            raise _full(needed, there, self.target)
        return _map(path, layout, files, is_new=True)

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


def weights_files(layout: StateLayout, part: TensorParallelRank) -> list[_WeightsFile]:
    """The files of safetensors for what is served: one, or several of at most 5 GB. Raises `UnsupportedError`."""
    groups, nbytes = list[list[int]](), 0
    for number, tensor in enumerate(layout.tensors):
        size = prod(tensor.shape) * tensor.dtype.itemsize
        if not groups or nbytes + size > MAX_FILE_NBYTES:
            groups.append([])
            nbytes = 0
        groups[-1].append(number)
        nbytes += size
    names = numbered_names(len(groups or [[]]))
    return [_weights_file(layout, part, name, group) for name, group in zip(names, groups or [[]], strict=True)]


def _weights_file(layout: StateLayout, part: TensorParallelRank, name: str, numbers: Sequence[int]) -> _WeightsFile:
    """A file with these tensors, those of the largest elements first: so each of them is aligned."""
    slots, at = list[tuple[int, TensorSlot]](), 0
    for number in sorted(numbers, key=lambda one: -layout.tensors[one].dtype.itemsize):
        tensor = layout.tensors[number]
        slot = TensorSlot(tensor.name, tensor.dtype, tensor.shape, at)
        slots.append((number, slot))
        at += slot.nbytes
    there = {slot.name for _, slot in slots}
    aliases = {alias: name for alias, name in layout.model.aliases.items() if name in there}
    own = {"tensor_parallel": str(part)} if part.ranks > 1 else {}
    header = header_bytes([slot for _, slot in slots], {"format": "pt", **own, **aliases})
    return _WeightsFile(name, header, tuple(slots))


def _index(files: Sequence[_WeightsFile]) -> dict[str, bytes]:
    """The index of several files, by its name; nothing for one file."""
    if len(files) == 1:
        return {}
    rows = [(file.name, {slot.name: slot.nbytes for _, slot in file.slots}) for file in files]
    return {_INDEX: index_text(rows).encode()}


def _check_names(model: PublishedModel, where: Path) -> None:
    """Raise `UnsafeError` if a file that belongs to the model would be taken for its weights, or replace them."""
    for name in model.files:
        if name in (RECORD, _INDEX) or name.endswith(SUFFIX):
            raise UnsafeError(f"a file of the model has the name of weights: {printable(name)!r}", where=where)


def _map(folder: Path, layout: StateLayout, files: Sequence[_WeightsFile], is_new: bool) -> _MappedWeights:
    """The weights in files that are mapped; with `is_new`, the files are created, with room for all of them.

    Raises `CorruptError` if a file does not begin as it should, `OSError`.
    """
    shown = dict[int, Array]()
    for file in files:
        path, start = folder / file.name, len(file.header)
        memory = _map_file(path, file.nbytes, is_new)
        if is_new:
            memory[:start] = np.frombuffer(file.header, np.uint8)
        elif memory[:start].tobytes() != file.header:
            raise CorruptError("does not begin with the header of its tensors", where=path)
        for number, slot in file.slots:
            begin = start + slot.offset
            shown[number] = memory[begin : begin + slot.nbytes].view(slot.dtype)
    tensors = [shown[number] for number in range(len(layout.tensors))]
    if not isinstance(layout, ShardLayout):
        return _MappedWeights(layout, files, tensors)
    memory, at, chunks = _map_file(folder / _CHUNKS, _chunks_nbytes(layout), is_new), 0, list[Array]()
    for size, dtype in layout.arrays():
        chunks.append(memory[at : at + size * dtype.itemsize].view(dtype))
        at += _aligned(size * dtype.itemsize)
    return _MappedWeights(layout, files, chunks, tensors, memory[at:])


def _map_file(path: Path, nbytes: int, is_new: bool) -> Array:
    """A file that is mapped: (nbytes,) uint8. Raises `CorruptError` if it has another size."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT | os.O_EXCL if is_new else 0)
    descriptor = os.open(path, flags, 0o644)
    try:
        if is_new:
            if nbytes:
                os.posix_fallocate(descriptor, 0, nbytes)  # so that no write into the map can find the disk full
        elif os.fstat(descriptor).st_size != nbytes:
            raise CorruptError("has another size than its tensors", where=path)
        return np.frombuffer(mmap.mmap(descriptor, nbytes), np.uint8) if nbytes else np.empty(0, np.uint8)
    finally:
        os.close(descriptor)


def _chunks_nbytes(layout: ShardLayout) -> int:
    """The bytes of the file of chunks and digests."""
    values = sum(_aligned(size * dtype.itemsize) for size, dtype in layout.arrays())
    return values + sum(_digests_nbytes(layout, rank) for rank in range(len(layout.model.pieces)))


def _digests_nbytes(layout: StateLayout, rank: int) -> int:
    return 16 * sum(layout.model.chunk_counts(rank)) if layout.chunks(rank) else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


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
        hint="Free space for two copies of the weights. The step before is served still.",
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
