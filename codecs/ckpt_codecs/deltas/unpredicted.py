"""Parts of states that are not predicted: chunks of the lossless codecs."""

from collections.abc import Callable

import numpy as np

from ckpt_codecs.base import Array, Bytes, Codec, DType, Shape
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.deltas.format_ids import UNPREDICTED
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import ROWS_AND_CONTEXT
from ckpt_codecs.lossless.candidates import candidate_codecs
from ckpt_codecs.lossless.float_planes import Planes
from ckpt_codecs.lossless.integers import Integers
from ckpt_codecs.lossless.moments import FirstMoment, SecondMoment
from ckpt_codecs.lossless.zstd import Zstd
from ckpt_codecs.native import lossless

CODECS_BY_ID: tuple[type[Codec], ...] = (Planes, FirstMoment, SecondMoment, Integers, Zstd)
"""The lossless codecs by their numbers in files."""
SAMPLE_RUNS, SAMPLE_RUN = 16, 256
"""A sample is at most 16 runs of 256 neighbours."""
ROW_SHARE, MIN_ROWS = 8, 16
"""One of 8 rows is encoded for an estimate, if these are at least 16."""


def encode_unpredicted(state: str, values: Array, level: str, context: Callable[[str], Array | None]) -> bytes:
    """Return a part of the first candidate codec of a state.

    Args:
        values: The state after the step: any shape and dtype.
        context: Returns another state of the same shape and any dtype, or None if it may not serve as base.
    """
    codec = candidate_codecs("parameter", state, values.dtype, level)[0]
    base = None if codec.context is None else context(codec.context)
    return bytes([UNPREDICTED, CODECS_BY_ID.index(type(codec))]) + codec.encode(values, base)


def decode_unpredicted(number: int, data: Bytes, shape: Shape, dtype: DType, context: Callable[[str], Array]) -> Array:
    """Return the values of a part: an array of this shape and dtype.

    Args:
        number: The index of the codec in `CODECS_BY_ID`.
        data: Untrusted bytes: a chunk of that codec.
        context: Returns another state after the step, of the same shape and any dtype.

    Raises:
        CodecError: The chunk is damaged, or there is no such codec.
    """
    if number >= len(CODECS_BY_ID):
        raise CodecError(f"there is no codec of number {number}")
    codec = CODECS_BY_ID[number]()
    base = context(codec.context) if codec.context is not None and data[:1] == bytes([ROWS_AND_CONTEXT]) else None
    return codec.decode(data, shape, dtype, base)


def estimate_unpredicted(values: Array) -> float:
    """Return how many bytes planes of the values, any shape and dtype, would take, estimated from a sample."""
    bits = sample_runs(as_uints(values))
    if not bits.size:
        return 0.0
    planes = lossless.split_planes(bits, values.dtype.kind in "fcV")
    return sum(map(lossless.estimate_bits, planes)) / 8 * values.size


def estimate_by_rows(state: str, values: Array, level: str, context: Callable[[str], Array | None]) -> float:
    """Return how many bytes an unpredicted part would take, estimated from some rows in the middle.

    0 if `values`, of any shape and dtype, is not a matrix, or has too few rows. `context`: as in `encode_unpredicted`.
    """
    count = values.shape[0] // ROW_SHARE if values.ndim == 2 else 0
    if count < MIN_ROWS:
        return 0.0
    rows = slice(values.shape[0] // 2, values.shape[0] // 2 + count)

    def context_rows(name: str) -> Array | None:
        state = context(name)
        return state[rows] if state is not None and state.shape == values.shape else None

    return len(encode_unpredicted(state, values[rows], level, context_rows)) * float(values.shape[0] / count)


def sample_runs(bits: Array) -> Array:
    """Return runs of neighbours from 16 places of `bits`, (n,) of any dtype: (m,) of the same dtype, m <= 4096."""
    stride = bits.size // SAMPLE_RUNS
    run = min(stride, SAMPLE_RUN)
    if not run:
        return bits
    return np.ascontiguousarray(bits[: SAMPLE_RUNS * stride].reshape(SAMPLE_RUNS, stride)[:, :run]).reshape(-1)
