"""What the codecs of gradients share: checks of what they are given, and chunks inside chunks."""

import numpy as np

from ckpt_codecs.base import Array, Bytes, DType, encode_bound
from ckpt_codecs.chunk.codec import LeveledCodec
from ckpt_codecs.chunk.frame import MAX_ELEMENTS
from ckpt_codecs.errors import CodecError, NotApplicable

FLOAT32 = np.dtype(np.float32)


class GradientCodec(LeveledCodec):
    """A codec of float32 arrays, as chunks that `planes` or its own modes hold. No base is looked at."""

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        """A chunk of a float32 array of any shape, at most one byte longer than it.

        Raises:
            NotApplicable: The array is of another dtype, or has more than 2**28 values.
        """
        if array.dtype != FLOAT32 or array.size > MAX_ELEMENTS:
            raise NotApplicable(
                f"a chunk of gradients is float32, {MAX_ELEMENTS} values at most: {array.dtype}, {array.size}"
            )
        enough = encode_bound(array.nbytes)
        return self._encode(array, out if out.size >= enough else np.empty(enough, np.uint8))

    def _encode(self, array: Array, out: Array) -> Bytes:
        raise NotImplementedError

    def decode_into(self, data: Bytes, out: Array, base: Array | None) -> None:
        check_dtype(out.dtype)
        super().decode_into(memoryview(data), out, base)  # of which parts are no copies


def check_dtype(dtype: DType) -> None:
    """Raises `CodecError` if values of this dtype are no gradients."""
    if dtype != FLOAT32:
        raise CodecError(f"gradients are float32, not {dtype}")


def append(inner: Bytes, out: Array, at: int) -> int:
    """Put bytes at a place of `out`, uint8, unless they lie there already; returns where they end."""
    source = np.frombuffer(inner, np.uint8)
    end = at + source.size
    if source.ctypes.data != out.ctypes.data + at:
        out[at:end] = source
    return end


def take_number(data: Bytes, at: int) -> int:
    """An unsigned number of 4 bytes. Raises `CodecError` if the chunk ends in it."""
    if at + 4 > len(data):
        raise CodecError("a chunk ends in its head")
    return int.from_bytes(data[at : at + 4], "little")


def put_number(out: Array, at: int, number: int) -> None:
    out[at : at + 4] = np.frombuffer(number.to_bytes(4, "little"), np.uint8)
