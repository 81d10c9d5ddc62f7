"""Chunks of one state, without the dictionaries of `DeltaCodec`: weight sync codes many in a second.

The bytes are those of the codec `difference` with `speed=fast` and a single state, so `Difference` reads them, too.
Kernels release the GIL: several threads may encode and decode at once, each its own chunks.
"""

from struct import Struct

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.delta import StatePair
from ckpt_codecs.deltas.difference import Difference
from ckpt_codecs.deltas.format_ids import MASKED_STEPS, PARTS, SPARSE_STEPS, UNCHANGED
from ckpt_codecs.deltas.residuals.exponent_buckets import MANTISSA_BITS
from ckpt_codecs.deltas.residuals.float16 import decode_float16, encode_float16_fast
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import deltas

HEAD = Struct("<BIBB")
"""Of a chunk of one state: PARTS, the size of its part, the kind of the prediction, the form of the residuals."""
_PART_START = HEAD.size - 2
UNCHANGED_CHUNK = HEAD.pack(PARTS, 2, UNCHANGED, 0)
"""The chunk of a state whose bits did not change."""
_CODEC = Difference(speed="fast")
_STATE = "param"


def encode_chunk(before: Array | None, after: Array) -> bytes:
    """Return a chunk of the values `after`, of any shape and dtype, relative to `before`, of the same.

    None for `before` encodes the values alone. Nothing changed: the chunk is `UNCHANGED_CHUNK`.
    """
    if before is None:
        return _CODEC.encode(StatePair({}, {_STATE: after}))
    if before.shape != after.shape or before.dtype != after.dtype:
        raise CodecError("values before and after a step have the same shape and dtype")
    mantissa_bits = MANTISSA_BITS.get(after.dtype.name)
    if mantissa_bits is not None:
        residuals = encode_float16_fast(as_uints(before), as_uints(after), mantissa_bits)
        if residuals is not None and len(residuals) < after.nbytes // 4:
            return HEAD.pack(PARTS, 1 + len(residuals), UNCHANGED, residuals[0]) + residuals[1:]
    return _CODEC.encode(StatePair({_STATE: before}, {_STATE: after}))


def decode_chunk(data: Bytes, before: Array | None, out: Array) -> None:
    """Decode a chunk of `encode_chunk` into `out`, which may be `before` itself.

    Args:
        data: Untrusted bytes.
        before: The values that the encoder was given: of the shape and dtype of `out`. None if it was given none.
        out: Any shape and dtype, those of the encoded values; C-contiguous and writable.

    Raises:
        CodecError: The bytes are damaged, or belong to other values. `out` is then undefined, and so is `before` if it
            is the same array.
    """
    if not out.flags.c_contiguous:
        raise CodecError("values are decoded into an array without gaps")
    mantissa_bits = _mantissa_bits(data, before, out)
    if data == UNCHANGED_CHUNK and _is_like(before, out):
        if before is not out:
            out[...] = before
    elif before is None or mantissa_bits is None or not out.flags.aligned:
        states = {} if before is None else {_STATE: before}
        out[...] = _CODEC.decode(bytes(data), states, out.shape, {_STATE: out.dtype})[_STATE]
    else:
        decode_float16(memoryview(data)[HEAD.size - 1 :], as_uints(before), mantissa_bits, as_uints(out))


def read_changes(data: Bytes, before: Array) -> tuple[Array, Array]:
    """Return where a chunk of `encode_chunk` changes `before`, and to what.

    Args:
        data: Untrusted bytes.
        before: The values that the encoder was given: any shape and dtype.

    Returns:
        Indices into the flat values in ascending order, (k,) int64; the bits of the values there after the step, (k,)
        uint8, uint16, uint32 or uint64, as wide as a value. A complex number is two values.

    Raises:
        CodecError: The bytes are damaged, or belong to other values.
    """
    words, mantissa_bits = as_uints(before), _mantissa_bits(data, before, before)
    if mantissa_bits is not None and data[HEAD.size - 1] == MASKED_STEPS:
        content = np.frombuffer(data, np.uint8, offset=HEAD.size)
        changes = deltas.list_masked_steps(content, words, mantissa_bits)
        if changes is None:
            raise CodecError("residuals of masked steps are damaged")
        return changes
    after = np.empty(before.shape, before.dtype)
    decode_chunk(data, before, after)
    words_after = as_uints(after)
    indices = np.flatnonzero(words != words_after)
    return indices, words_after[indices]


def _is_like(before: Array | None, out: Array) -> bool:
    return before is not None and before.shape == out.shape and before.dtype == out.dtype


def _mantissa_bits(data: Bytes, before: Array | None, out: Array) -> int | None:
    """Return those of 16-bit floats if `data` is a chunk of few changes of these; else None."""
    if len(data) < HEAD.size or not _is_like(before, out):
        return None
    kind, size, prediction, form = HEAD.unpack_from(data)
    if (kind, size, prediction) != (PARTS, len(data) - _PART_START, UNCHANGED):
        return None
    return MANTISSA_BITS.get(out.dtype.name) if form in (SPARSE_STEPS, MASKED_STEPS) else None
