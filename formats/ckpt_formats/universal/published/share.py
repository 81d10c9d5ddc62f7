"""The object that one rank stores of a step: its chunks, one after another, and the digests of their values.

```text
8 bytes             CKPTSHR1
4 bytes             n, the number of chunks
4 bytes per chunk   its size; 0: its values are those of the parent
16 bytes per chunk  the XXH3-128 of its values after the step, highest byte first
the rest            the chunks, without gaps, as docs/delta-codecs.md has them, of one state called `param`
```
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from ckpt_codecs.deltas import single_state
from ckpt_codecs.errors import CodecError
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.tensor import Array
from ckpt_formats.universal.published.records import RankShare, hash_bytes

MAGIC = b"CKPTSHR1"
HEAD_NBYTES = len(MAGIC) + 4
_ROW_NBYTES = 4 + 16
_BATCH_NBYTES = 2 << 20
"""Bytes of values that a thread takes at once: to hand it a chunk takes as long as to code a small one."""


@dataclass(frozen=True, eq=False)
class ShareHeader:
    """Where the chunks of an object lie, and what their values are after the step."""

    sizes: Array
    """The bytes of each chunk: (chunks,) int64."""
    digests: bytes
    """16 bytes for each chunk."""

    @property
    def nbytes(self) -> int:
        """The bytes before the first chunk."""
        return header_nbytes(len(self.sizes))

    @property
    def state(self) -> str:
        """The hash of the rank's state after the step."""
        return hash_bytes(self.digests)

    def digest(self, chunk: int) -> bytes:
        """The XXH3-128 of the values of a chunk."""
        return self.digests[16 * chunk : 16 * chunk + 16]

    def offsets(self) -> Array:
        """Where each chunk begins in the object: (chunks,) int64."""
        return self.nbytes + np.cumsum(self.sizes) - self.sizes

    @classmethod
    def from_bytes(
        cls, data: bytes | memoryview, chunks: int, nbytes: int, share: RankShare, where: Path
    ) -> "ShareHeader":
        """The header in the first bytes of an object of `nbytes` bytes, which must have `chunks` chunks.

        Raises `CorruptError` if the header is not that of the share.
        """
        rows = memoryview(data)[HEAD_NBYTES : header_nbytes(chunks)]
        valid = bytes(data[: len(MAGIC)]) == MAGIC and len(rows) == chunks * _ROW_NBYTES
        if not valid or int.from_bytes(data[len(MAGIC) : HEAD_NBYTES], "little") != chunks:
            raise CorruptError(f"not the object of a rank with {chunks:,} chunks", where=where)
        header = cls(np.frombuffer(rows[: 4 * chunks], "<u4").astype(np.int64), bytes(rows[4 * chunks :]))
        if header.nbytes + int(header.sizes.sum()) != nbytes:
            raise CorruptError("its chunks are not as long as the object", where=where)
        if header.state != share.state:
            raise CorruptError("its digests are not those of the step's record", where=where)
        return header


def header_nbytes(chunks: int) -> int:
    """The bytes of a header."""
    return HEAD_NBYTES + chunks * _ROW_NBYTES


def share_bytes(chunks: Sequence[bytes], digests: Sequence[bytes]) -> bytes:
    """The object of a rank. `digests`: of the values of each chunk, 16 bytes each."""
    sizes = np.array([len(one) for one in chunks], "<u4").tobytes()
    return b"".join([MAGIC, len(chunks).to_bytes(4, "little"), sizes, *digests, *chunks])


def digest_of(values: Array) -> bytes:
    """The XXH3-128 of the values of a chunk: (n,) of any dtype, contiguous. 16 bytes."""
    return xxhash.xxh3_128_digest(values.view(np.uint8).data)


def encode_chunk(before: Array | None, after: Array) -> bytes:
    """A chunk against the values before, or alone if there are none; empty if nothing changed.

    before, after: (n,) of one dtype, contiguous.
    """
    data = single_state.encode_chunk(before, after)
    return b"" if before is not None and data == single_state.UNCHANGED_CHUNK else data


def decode_chunk(data: bytes | memoryview, before: Array | None, out: Array, where: Path) -> None:
    """Fill `out` with the values after the step: (n,) of its dtype, contiguous. It may be `before` itself.

    before: (n,) of the same dtype; None for a base. Raises `CorruptError` for bytes that are no chunk of these values.
    The caller compares the digest.
    """
    if not len(data):
        if before is None:
            raise CorruptError("a chunk of a base without bytes", where=where)
        if out is not before:
            out[...] = before
        return
    try:
        single_state.decode_chunk(data, before, out)
    except CodecError as error:
        raise CorruptError(f"a chunk cannot be decoded: {error}", where=where) from None


def read_chunk_changes(data: bytes | memoryview, before: Array, out: Array, where: Path) -> Array:
    """As `decode_chunk` of a delta, into another array than `before`. Returns where values change: (k,) int64, rising.

    Not of complex numbers. Raises as `decode_chunk`.
    """
    out[...] = before
    if not len(data):
        return np.empty(0, np.int64)
    try:
        indices, bits = single_state.read_changes(data, before)
    except CodecError as error:
        raise CorruptError(f"a chunk cannot be decoded: {error}", where=where) from None
    out.view(bits.dtype)[indices] = bits
    return indices


def batches_of(sizes: Sequence[int]) -> list[range]:
    """The numbers of chunks that threads take at once: neighbours of 2 MiB of values. `sizes`: the bytes of each."""
    batches, first, nbytes = list[range](), 0, 0
    for number, size in enumerate(sizes):
        nbytes += size
        if nbytes >= _BATCH_NBYTES or number == len(sizes) - 1:
            batches.append(range(first, number + 1))
            first, nbytes = number + 1, 0
    return batches
