"""Bring a state forward along a route: fetch the objects of each rank, decode their chunks, and verify every one."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from ckpt.following.source import DamagedChunkError, FollowingStopped, PublishedSource
from ckpt.following.state import State, StateChunk, StateLayout
from ckpt_codecs.scratch import temporary_buffer
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.tensor import Array
from ckpt_formats.universal.published.records import StepRecord, hash_bytes
from ckpt_formats.universal.published.route import Route
from ckpt_formats.universal.published.share import (
    ShareHeader,
    decode_chunk,
    digest_of,
    header_nbytes,
    read_chunk_changes,
)

T = TypeVar("T")

_RANKS_AT_ONCE = 8
"""Ranks whose objects are fetched or decoded at the same time."""
_REQUESTS_AT_ONCE = 16
"""Objects, of all steps and ranks, that are fetched at the same time."""
_DENSE = 4
"""A chunk of which more than one value in so many changed is stored whole."""
_WHOLE_NBYTES = 1 << 20
"""Objects up to this size are fetched whole, also if not all of their chunks are needed."""
_GAP_NBYTES = 1 << 16
"""Two chunks are fetched by one request if no more bytes lie between them."""


@dataclass(frozen=True, eq=False)
class ChunkChange:
    """What a step changes in one chunk."""

    chunk: StateChunk
    positions: Array | None
    """Of the values that change: (n,) int64, rising. None: the chunk has new values everywhere."""
    values: Array
    """The values after: (n,) of the tensor's dtype."""

    def put(self, state: State) -> None:
        """Write the values after into a state."""
        if self.positions is None:
            self.chunk.put(state, self.values)
        elif self.chunk.first is not None:
            self.chunk.values(state)[self.positions] = self.values
        else:
            state[self.chunk.tensor][self.chunk.flat_indices(self.positions)] = self.values

    def values_before(self, state: State) -> Array:
        """The values of a state where these belong: (n,) of the tensor's dtype."""
        values = self.chunk.values(state)
        return values if self.positions is None else values[self.positions]


@dataclass(frozen=True)
class WrittenState:
    """What was read for a state."""

    digests: list[bytes]
    """Of each rank of which the layout has chunks, those of all of its chunks, 16 bytes each; else nothing."""
    nbytes: int
    """Of the objects, as far as they were fetched."""


def find_changes(
    source: PublishedSource, route: Route, layout: StateLayout, before: State, threads: int
) -> list[ChunkChange]:
    """What a route changes in a state, in the order of the ranks and of their chunks. The state stays as it is.

    Raises `CorruptError`, `MissingObjectError`, `UnsafeError`.
    """

    def compare(chunk: StateChunk, shares: Sequence[_FetchedShare]) -> ChunkChange | None:
        values = chunk.values(before)
        with temporary_buffer(values.nbytes) as buffer:
            after = buffer.view(values.dtype)
            if len(shares) == 1 and not shares[0].is_base and values.dtype.kind != "c":
                positions = shares[0].read_changes(chunk.number, values, after)
            else:
                _decode(chunk, shares, values, after)
                positions = positions_of_changes(values, after)
            if not len(positions):
                return None
            if len(positions) > chunk.size // _DENSE:
                return ChunkChange(chunk, None, after.copy())
            return ChunkChange(chunk, positions, after[positions])

    return [one for one in _each_chunk(source, route, layout, compare, threads)[0] if one is not None]


def write_state(
    source: PublishedSource,
    route: Route,
    layout: StateLayout,
    before: State | None,
    out: State,
    threads: int,
) -> WrittenState:
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

    return _each_chunk(source, route, layout, write, threads)[1]


def first_wrong_rank(
    record: StepRecord, layout: StateLayout, state: State, threads: int, digests: Sequence[bytes] | None = None
) -> int | None:
    """The first rank whose values are not those of the step; None if the state is that of the record.

    digests: those that `write_state` returned, which are believed only if the record states their hash; None: the
    layout has all chunks.
    """
    with ThreadPoolExecutor(threads, "ckpt-verify") as pool:
        for rank, share in enumerate(record.shares):
            chunks = layout.chunks(rank)
            digests_now = list(pool.map(lambda chunk: digest_of(chunk.values(state)), chunks))
            stated = b"".join(digests_now) if digests is None else digests[rank]
            is_right = all(
                stated[16 * chunk.number : 16 * chunk.number + 16] == digest
                for chunk, digest in zip(chunks, digests_now, strict=True)
            )
            if (len(chunks) or digests is None) and not (is_right and hash_bytes(stated) == share.state):
                return rank
    return None


@dataclass(frozen=True, eq=False)
class _FetchedShare:
    """The chunks of a rank's object: compared with its hash, or with their digests when they are decoded."""

    header: ShareHeader
    chunks: Mapping[int, memoryview]
    """By their numbers: those that are needed."""
    nbytes: int
    """What was fetched."""
    is_whole: bool
    is_base: bool
    where: Path

    def decode(self, chunk: int, before: Array | None, out: Array) -> None:
        """Fill `out` with the values of a chunk after the step. Raises `CorruptError` unless their digest fits."""
        with self._checked(chunk, out):
            decode_chunk(self.chunks[chunk], None if self.is_base else before, out, self.where)

    def read_changes(self, chunk: int, before: Array, out: Array) -> Array:
        """As `decode` for a delta. Returns where it changes values: (n,) int64, rising."""
        with self._checked(chunk, out):
            return read_chunk_changes(self.chunks[chunk], before, out, self.where)

    @contextmanager
    def _checked(self, chunk: int, out: Array) -> Iterator[None]:
        """Within, `out` is filled with a chunk. Raises `CorruptError` unless its digest fits then."""
        kind = CorruptError if self.is_whole else DamagedChunkError
        try:
            yield
        except CorruptError as error:
            raise kind(error.what, where=error.where) from None
        if digest_of(out) != self.header.digest(chunk):
            raise kind("the values of a chunk do not fit their checksum", where=self.where)


def _decode(chunk: StateChunk, shares: Sequence[_FetchedShare], before: Array | None, out: Array) -> None:
    """Fill `out` with the values of a chunk after all steps. `before`: None if the first one is a base."""
    for number, share in enumerate(shares):
        share.decode(chunk.number, before if number == 0 else out, out)


def _each_chunk(
    source: PublishedSource,
    route: Route,
    layout: StateLayout,
    use: Callable[[StateChunk, Sequence[_FetchedShare]], T],
    threads: int,
) -> tuple[list[T], WrittenState]:
    """What `use` returns for each chunk and the objects of its rank, in the order of ranks and chunks."""
    model = layout.model
    for record in route.records:
        if record.model != route.end.model or len(record.shares) != len(model.pieces):
            raise CorruptError("deltas between two models", where=source.where / record.key)
    errors, batches = list[BaseException](), layout.batches

    def of_batch(batch: Sequence[StateChunk], shares: Sequence[_FetchedShare]) -> list[T]:
        source.check_stop()
        if errors:
            raise FollowingStopped
        return [use(chunk, shares) for chunk in batch]

    with (
        ThreadPoolExecutor(threads, "ckpt-decode") as decoders,
        ThreadPoolExecutor(min(_RANKS_AT_ONCE, len(model.pieces)), "ckpt-fetch") as fetchers,
        ThreadPoolExecutor(_REQUESTS_AT_ONCE, "ckpt-request") as requests,
    ):

        def of_rank(rank: int) -> tuple[list[T], bytes, int]:
            pending = list[Future[list[T]]]()
            try:
                if errors:
                    raise FollowingStopped
                if not batches[rank] and sum(model.chunk_counts(rank)) > 0:
                    return [], b"", 0
                shares = list(requests.map(lambda record: _fetch(source, record, layout, rank), route.records))
                pending.extend(decoders.submit(of_batch, batch, shares) for batch in batches[rank])
                digests = shares[-1].header.digests if shares else b""
                used = [result for one in pending for result in one.result()]
                return used, digests, sum(one.nbytes for one in shares)
            except BaseException as error:
                errors.append(error)
                wait(pending)
                raise

        results = [fetchers.submit(of_rank, rank) for rank in range(len(model.pieces))]
        wait(results)
        for error in errors:
            raise error
        by_rank = [one.result() for one in results]
        written = WrittenState([digests for _, digests, _ in by_rank], sum(nbytes for _, _, nbytes in by_rank))
        return [one for of_one, *_ in by_rank for one in of_one], written


def _fetch(source: PublishedSource, record: StepRecord, layout: StateLayout, rank: int) -> _FetchedShare:
    share, model = record.shares[rank], layout.model
    needed, chunks, nbytes = layout.chunks(rank), sum(model.chunk_counts(rank)), share.object.nbytes
    where = source.where / share.object.key
    if nbytes < header_nbytes(chunks):
        raise CorruptError(f"{nbytes:,} bytes cannot be the {chunks:,} chunks of a rank", where=where)
    most = model.max_share_nbytes(rank)
    # A range is compared by XXH3 only, so what is signed is fetched whole.
    is_whole = len(needed) == chunks or nbytes <= _WHOLE_NBYTES or source.signing_key is not None
    if is_whole:
        data = source.fetch(record, share.object, most)
        header = ShareHeader.from_bytes(data, chunks, nbytes, share, where)
        offsets, parts, fetched = header.offsets(), {0: data}, nbytes
    else:
        [head] = source.fetch_ranges(record, share.object, most, [(0, header_nbytes(chunks))])
        header = ShareHeader.from_bytes(head, chunks, nbytes, share, where)
        offsets = header.offsets()
        ranges = _joined_ranges((int(offsets[one.number]), int(header.sizes[one.number])) for one in needed)
        content = source.fetch_ranges(record, share.object, most, ranges)
        parts = {at: data for (at, _), data in zip(ranges, content, strict=True)}
        fetched = len(head) + sum(map(len, content))
    begins = sorted(parts)
    of_chunk = dict[int, memoryview]()
    for one in needed:
        at, size = int(offsets[one.number]), int(header.sizes[one.number])
        begin = begins[max(bisect_right(begins, at) - 1, 0)] if begins else 0
        of_chunk[one.number] = parts[begin][at - begin : at - begin + size] if size else memoryview(b"")
    return _FetchedShare(header, of_chunk, fetched, is_whole, record.is_base, where)


def _joined_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Offsets and bytes of rising ranges, those near each other as one; empty ones are left out."""
    joined = list[tuple[int, int]]()
    for at, size in ranges:
        if size and joined and at <= sum(joined[-1]) + _GAP_NBYTES:
            joined[-1] = joined[-1][0], at + size - joined[-1][0]
        elif size:
            joined.append((at, size))
    return joined


def positions_of_changes(before: Array, after: Array) -> Array:
    """Where the bits of two arrays differ: (n,) int64, rising. before, after: (m,) of one dtype, contiguous."""
    size = before.dtype.itemsize
    if size <= 8:
        return np.flatnonzero(before.view(f"u{size}") != after.view(f"u{size}"))
    parts = before.view(np.uint64) != after.view(np.uint64)
    return np.flatnonzero(parts.reshape(len(before), -1).any(axis=1))
