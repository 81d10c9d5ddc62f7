"""The values of one rank: those that were published last and those of the next step, and the object of their delta."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np

from ckpt_formats.core.errors import CorruptError, InvalidArgumentError
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.core.tensor import Array
from ckpt_formats.universal.published.model import PublishedModel, TensorPiece
from ckpt_formats.universal.published.records import ObjectRef, RankShare, hash_bytes
from ckpt_formats.universal.published.share import (
    ShareHeader,
    batches_of,
    decode_chunk,
    digest_of,
    encode_chunk,
    share_bytes,
)

T = TypeVar("T")

_ALIGNMENT = 64
"""Bytes: pieces begin at multiples, so that chunks of any dtype are aligned."""


@dataclass(frozen=True, eq=False)
class PublishedValues:
    """The values of a rank at a published step, against which others are coded."""

    memory: Array
    digests: list[bytes]

    __repr__ = short_repr


@dataclass(frozen=True, eq=False)
class EncodedShare:
    """What one rank stores of a step."""

    object: bytes
    share: RankShare

    __repr__ = short_repr


class RankBuffers:
    """Two buffers of a rank's values: the published ones, and those of the next step.

    Fill all of the next ones, encode them, store the object; once the step is published, call `accept`. Only one
    thread may call the methods of an instance.
    """

    def __init__(
        self,
        model: PublishedModel,
        rank: int,
        buffers: tuple[Array, Array] | None = None,
        threads: int = 1,
        is_signed: bool = False,
    ) -> None:
        """Values of a rank.

        Args:
            model: What is published.
            rank: The rank, below `len(model.pieces)`.
            buffers: Two vectors of `nbytes_of(model, rank)` bytes (uint8), such as shared memory: that of the published
                values, and that of the next ones. None: memory of this process.
            threads: Threads that encode and decode.
            is_signed: Whether the records are signed, so that they state a SHA-256 of each object.
        """
        nbytes = self.nbytes_of(model, rank)
        if buffers is None:
            buffers = np.empty(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        if any(one.shape != (nbytes,) or one.dtype != np.uint8 for one in buffers):
            raise InvalidArgumentError(f"the buffers of rank {rank} must be two vectors of {nbytes:,} bytes (uint8)")
        self._published: Array = buffers[0]
        self._next: Array = buffers[1]
        self._pieces: Sequence[TensorPiece] = model.pieces[rank]
        self._dtypes = [model.tensors[piece.tensor].dtype for piece in self._pieces]
        self._offsets = _offsets(model, rank)
        self._threads, self._is_signed = threads, is_signed
        self._chunks = [
            (number, *piece.chunking.range(chunk))
            for number, piece in enumerate(self._pieces)
            for chunk in range(piece.chunking.count)
        ]
        sizes = [(stop - first) * self._dtypes[number].itemsize for number, first, stop in self._chunks]
        self._batches = batches_of(sizes)
        self._published_digests: list[bytes] | None = None
        self._next_digests: list[bytes] | None = None

    @staticmethod
    def nbytes_of(model: PublishedModel, rank: int) -> int:
        """The bytes of one buffer."""
        return _offsets(model, rank)[-1]

    @property
    def is_published(self) -> bool:
        """Whether there are published values, against which the next ones can be coded."""
        return self._published_digests is not None

    def piece(self, number: int) -> Array:
        """The next values of a piece, to be filled: (size,) of its dtype."""
        self._next_digests = None
        return self._view(self._next, number)

    def published_piece(self, number: int) -> Array:
        """The published values of a piece: (size,) of its dtype, read-only."""
        values = self._view(self._published, number)
        values.flags.writeable = False
        return values

    def fill(self, number: int, first_byte: int, data: bytes | memoryview) -> None:
        """Fill a range of bytes of the next values of a piece."""
        begin = self._offsets[number] + first_byte
        if first_byte < 0 or begin + len(data) > self._offsets[number] + self._nbytes(number):
            raise InvalidArgumentError(
                f"bytes {first_byte:,} to {first_byte + len(data):,} are not within piece {number}"
            )
        self._next_digests = None
        self._next[begin : begin + len(data)] = np.frombuffer(data, np.uint8)

    def state(self) -> str:
        """The hash of the next values: the `RankShare.state` of a step that has them."""
        return hash_bytes(b"".join(self._digests()))

    def encode(self, is_base: bool) -> EncodedShare:
        """The object of the next values: coded alone, or against the published ones."""
        earlier = None
        if not is_base:
            if self._published_digests is None:
                raise InvalidArgumentError(
                    "there are no published values to code against", hint="Publish a base first."
                )
            earlier = PublishedValues(self._published, self._published_digests)
        encoded, self._next_digests = self._encoded(earlier, self._next, self._next_digests)
        return encoded

    def _encoded(
        self, earlier: PublishedValues | None, values: Array, digests: list[bytes] | None
    ) -> tuple[EncodedShare, list[bytes]]:
        """The object of values, and the digests of their chunks, which are computed unless they are given."""

        def encode(chunk: int) -> tuple[bytes, bytes]:
            after = self._chunk(values, chunk)
            digest = digest_of(after) if digests is None else digests[chunk]
            if earlier is None:
                return encode_chunk(None, after), digest
            if earlier.digests[chunk] == digest:
                return b"", digest
            return encode_chunk(self._chunk(earlier.memory, chunk), after), digest

        chunks = self._each_chunk(encode)
        now = [digest for _, digest in chunks]
        data = share_bytes([one for one, _ in chunks], now)
        return EncodedShare(data, RankShare(ObjectRef.of(data, self._is_signed), hash_bytes(b"".join(now)))), now

    def count_changes(self) -> int:
        """The number of next values whose bits differ from the published ones."""
        earlier, digests = self._published_digests, self._digests()
        if earlier is None:
            raise InvalidArgumentError("there are no published values to compare with")

        def count(chunk: int) -> int:
            if earlier[chunk] == digests[chunk]:
                return 0
            return _count_changes(self._chunk(self._published, chunk), self._chunk(self._next, chunk))

        return sum(self._each_chunk(count))

    def copy_published(self, memory: Array) -> PublishedValues:
        """Copy the published values, for a fold. `memory`: (nbytes,) uint8, as many as `nbytes_of`, perhaps mapped."""
        if self._published_digests is None:
            raise InvalidArgumentError("there are no published values to copy")
        memory[...] = self._published
        return PublishedValues(memory, list(self._published_digests))

    def encode_fold(self, earlier: PublishedValues) -> EncodedShare:
        """The object of the published values against those of an earlier step."""
        if self._published_digests is None:
            raise InvalidArgumentError("there are no published values to encode")
        return self._encoded(earlier, self._published, self._published_digests)[0]

    def accept(self) -> None:
        """The next values are the published ones from now on."""
        self._published_digests = self._digests()
        self._published, self._next = self._next, self._published
        self._next_digests = None

    def apply(self, data: bytes | memoryview, share: RankShare, is_base: bool, where: Path) -> None:
        """Bring the published values to another step by its object, as the state's hash of the share shows.

        data: the bytes of the object. Raises `CorruptError` if they do not lead to this state; then no values count as
        published.
        """
        if not is_base and self._published_digests is None:
            raise InvalidArgumentError("there are no published values to apply a delta to")
        share.object.check(data, str(where))
        header = ShareHeader.from_bytes(data, len(self._chunks), len(data), share, where)
        self._published_digests = None
        view, offsets, sizes = memoryview(data), header.offsets(), header.sizes

        def decode(chunk: int) -> None:
            values = self._chunk(self._published, chunk)
            body = view[int(offsets[chunk]) : int(offsets[chunk] + sizes[chunk])]
            decode_chunk(body, None if is_base else values, values, where)
            if digest_of(values) != header.digest(chunk):
                raise CorruptError("the values of a chunk are not those that the object states", where=where)

        self._each_chunk(decode)
        self._published_digests = [header.digest(chunk) for chunk in range(len(self._chunks))]

    def _digests(self) -> list[bytes]:
        if self._next_digests is None:
            self._next_digests = self._each_chunk(lambda chunk: digest_of(self._chunk(self._next, chunk)))
        return self._next_digests

    def _chunk(self, buffer: Array, chunk: int) -> Array:
        number, first, stop = self._chunks[chunk]
        return self._view(buffer, number)[first:stop]

    def _view(self, buffer: Array, number: int) -> Array:
        begin = self._offsets[number]
        return buffer[begin : begin + self._nbytes(number)].view(self._dtypes[number])

    def _nbytes(self, number: int) -> int:
        return self._pieces[number].size * self._dtypes[number].itemsize

    def _each_chunk(self, work: Callable[[int], T]) -> list[T]:
        """What `work` returns for the number of each chunk; by threads if there are several."""

        def of_batch(batch: range) -> list[T]:
            return [work(chunk) for chunk in batch]

        if self._threads == 1 or len(self._batches) < 2:
            return list(chain.from_iterable(map(of_batch, self._batches)))
        with ThreadPoolExecutor(self._threads, "ckpt-publish") as pool:
            return list(chain.from_iterable(pool.map(of_batch, self._batches)))


def _count_changes(before: Array, after: Array) -> int:
    """How many values differ in their bits: (n,) of one dtype."""
    bits = np.dtype(f"u{before.dtype.itemsize}") if before.dtype.itemsize <= 8 else np.dtype("c16")
    return int(np.count_nonzero(before.view(bits) != after.view(bits)))


def _offsets(model: PublishedModel, rank: int) -> list[int]:
    """Where each piece begins in a buffer, and where the last one ends."""
    offsets = [0]
    for piece in model.pieces[rank]:
        nbytes = piece.size * model.tensors[piece.tensor].dtype.itemsize
        offsets.append(offsets[-1] + -(-nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets
