"""Bring a state forward along a route: fetch the objects of each rank, decode their chunks, and verify every one."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy as np

from ckpt.following.source import FollowingStopped, PublishedSource
from ckpt.following.state import State, StateChunk, chunks_of
from ckpt_codecs.scratch import temporary_buffer
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.tensor import Array
from ckpt_formats.universal.published.model import PublishedModel
from ckpt_formats.universal.published.records import StepRecord, hash_bytes
from ckpt_formats.universal.published.route import Route
from ckpt_formats.universal.published.share import ShareHeader, decode_chunk, digest_of, header_nbytes

T = TypeVar("T")

_RANKS_AT_ONCE = 8
"""Ranks whose objects are fetched or decoded at the same time."""
_DENSE = 4
"""A chunk of which more than one value in so many changed is stored whole."""


@dataclass(frozen=True, eq=False)
class ChunkChange:
    """What a step changes in one chunk."""

    chunk: StateChunk
    positions: Array | None
    """Of the values that change: (n,) int64, rising. None: the chunk has new values everywhere."""
    values: Array
    """The values after: (n,) of the tensor's dtype."""

    @property
    def indices(self) -> Array:
        """Where the values lie in the whole tensor: (n,) int64."""
        return self.chunk.flat_indices(np.arange(self.chunk.size) if self.positions is None else self.positions)

    def put(self, state: State) -> None:
        """Write the values after into a state."""
        if self.positions is None:
            self.chunk.put(state, self.values)
        elif self.chunk.first is not None:
            self.chunk.values(state)[self.positions] = self.values
        else:
            state[self.chunk.tensor][self.indices] = self.values

    def is_equal(self, one: State, other: State) -> bool:
        """Whether two states have the same values here."""
        values = [self.chunk.values(state) for state in (one, other)]
        if self.positions is not None:
            values = [of_chunk[self.positions] for of_chunk in values]
        return not len(positions_of_changes(*values))


def find_changes(
    source: PublishedSource, route: Route, model: PublishedModel, before: State, threads: int
) -> list[ChunkChange]:
    """What a route changes in a state, in the order of the ranks and of their chunks. The state stays as it is.

    Raises `CorruptError`, `MissingObjectError`, `UnsafeError`.
    """

    def compare(chunk: StateChunk, shares: Sequence[_FetchedShare]) -> ChunkChange | None:
        values = chunk.values(before)
        with temporary_buffer(values.nbytes) as buffer:
            after = buffer.view(values.dtype)
            _decode(chunk, shares, values, after)
            positions = positions_of_changes(values, after)
            if not len(positions):
                return None
            if len(positions) > chunk.size // _DENSE:
                return ChunkChange(chunk, None, after.copy())
            return ChunkChange(chunk, positions, after[positions])

    return [one for one in _each_chunk(source, route, model, compare, threads) if one is not None]


def write_state(
    source: PublishedSource,
    route: Route,
    model: PublishedModel,
    before: State | None,
    out: State,
    threads: int,
) -> None:
    """Fill `out` with the state at the end of a route that begins with a base, or at the state `before`.

    `before` may be `out`: then it is undefined after an error. Raises as `find_changes`.
    """

    def write(chunk: StateChunk, shares: Sequence[_FetchedShare]) -> None:
        values = None if before is None else chunk.values(before)
        if chunk.first is not None:
            _decode(chunk, shares, values, chunk.values(out))
            return
        after = np.empty(chunk.size, out[chunk.tensor].dtype)
        _decode(chunk, shares, values, after)
        chunk.put(out, after)

    _each_chunk(source, route, model, write, threads)


def first_wrong_rank(record: StepRecord, model: PublishedModel, state: State, threads: int) -> int | None:
    """The first rank whose values are not those of the step; None if the state is that of the record."""
    with ThreadPoolExecutor(threads, "ckpt-verify") as pool:
        for rank, share in enumerate(record.shares):
            digests = pool.map(lambda chunk: digest_of(chunk.values(state)), chunks_of(model, rank))
            if hash_bytes(b"".join(digests)) != share.state:
                return rank
    return None


@dataclass(frozen=True, eq=False)
class _FetchedShare:
    """The object of a rank, compared with its hash."""

    data: memoryview
    header: ShareHeader
    is_base: bool
    where: Path

    @cached_property
    def offsets(self) -> list[int]:
        offsets: list[int] = self.header.offsets().tolist()
        return offsets

    def decode(self, chunk: int, before: Array | None, out: Array) -> None:
        """Fill `out` with the values of a chunk after the step. Raises `CorruptError` unless their digest fits."""
        before = None if self.is_base else before
        begin = self.offsets[chunk]
        decode_chunk(self.data[begin : begin + int(self.header.sizes[chunk])], before, out, self.where)
        if digest_of(out) != self.header.digest(chunk):
            raise CorruptError("the values of a chunk do not fit their checksum", where=self.where)


def _decode(chunk: StateChunk, shares: Sequence[_FetchedShare], before: Array | None, out: Array) -> None:
    """Fill `out` with the values of a chunk after all steps. `before`: None if the first one is a base."""
    for number, share in enumerate(shares):
        share.decode(chunk.number, before if number == 0 else out, out)


def _each_chunk(
    source: PublishedSource,
    route: Route,
    model: PublishedModel,
    use: Callable[[StateChunk, Sequence[_FetchedShare]], T],
    threads: int,
) -> list[T]:
    """What `use` returns for each chunk and the objects of its rank, in the order of ranks and chunks."""
    for record in route.records:
        if record.model != route.end.model or len(record.shares) != len(model.pieces):
            raise CorruptError("deltas between two models", where=source.where / record.key)
    errors = list[BaseException]()

    def of_chunk(chunk: StateChunk, shares: Sequence[_FetchedShare]) -> T:
        source.check_stop()
        if errors:
            raise FollowingStopped
        return use(chunk, shares)

    with (
        ThreadPoolExecutor(threads, "ckpt-decode") as decoders,
        ThreadPoolExecutor(min(_RANKS_AT_ONCE, len(model.pieces)), "ckpt-fetch") as fetchers,
    ):

        def of_rank(rank: int) -> list[T]:
            pending = list[Future[T]]()
            try:
                if errors:
                    raise FollowingStopped
                chunks = list(chunks_of(model, rank))
                shares = [_fetch(source, record, model, rank, len(chunks)) for record in route.records]
                pending.extend(decoders.submit(of_chunk, chunk, shares) for chunk in chunks)
                return [one.result() for one in pending]
            except BaseException as error:
                errors.append(error)
                wait(pending)
                raise

        results = [fetchers.submit(of_rank, rank) for rank in range(len(model.pieces))]
        wait(results)
        for error in errors:
            raise error
        return [one for of_one in results for one in of_one.result()]


def _fetch(source: PublishedSource, record: StepRecord, model: PublishedModel, rank: int, chunks: int) -> _FetchedShare:
    share = record.shares[rank]
    where = source.where / share.object.key
    if share.object.nbytes < header_nbytes(chunks):
        raise CorruptError(f"{share.object.nbytes:,} bytes cannot be the {chunks:,} chunks of a rank", where=where)
    data = source.fetch(record, share.object, model.max_share_nbytes(rank))
    header = ShareHeader.from_bytes(data, chunks, share.object.nbytes, share, where)
    return _FetchedShare(data, header, record.is_base, where)


def positions_of_changes(before: Array, after: Array) -> Array:
    """Where the bits of two arrays differ: (n,) int64, rising. before, after: (m,) of one dtype, contiguous."""
    size = before.dtype.itemsize
    if size <= 8:
        return np.flatnonzero(before.view(f"u{size}") != after.view(f"u{size}"))
    parts = before.view(np.uint64) != after.view(np.uint64)
    return np.flatnonzero(parts.reshape(len(before), -1).any(axis=1))
