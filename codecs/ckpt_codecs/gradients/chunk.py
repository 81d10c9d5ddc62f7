"""The common base of gradient codecs: checks of dtypes, and chunks inside chunks."""

import numpy as np

from ckpt_codecs.base import Array, Bytes, DType, Shape, encode_bound
from ckpt_codecs.chunk.codec import LeveledCodec
from ckpt_codecs.chunk.frame import MAX_ELEMENTS
from ckpt_codecs.errors import CodecError, NotApplicable

FLOAT32 = np.dtype(np.float32)


class GradientCodec(LeveledCodec):
    """A codec of float32 arrays whose chunks have a mode of `planes` or one of its own. It ignores the base."""

    def encode_into(self, array: Array, base: Array | None, out: Array) -> Bytes:
        """A chunk of a float32 array of any shape, at most one byte longer than its values.

        Raises:
            NotApplicable: The array has another dtype, or more than 2**28 values.
        """
        return self._encode(array, chunk_buffer(array, out))

    def encode_range(self, array: Array, shape: Shape | None, start: int) -> Bytes:
        """A chunk of a range of the elements of a block, in C order, for which its shape may be of use.

        `array`: float32, any shape. `shape`: that of the block; None if the elements are of several. `start`: the
        element of the block with which the range begins.
        """
        return self.encode(array, None)

    def _encode(self, array: Array, out: Array) -> Bytes:
        """A chunk of `array`, float32, possibly in `out`, uint8, which has enough room."""
        raise NotImplementedError

    def decode_into(self, data: Bytes, out: Array, base: Array | None) -> None:
        """Fill `out`, float32 of any shape, from a chunk. Raises `CodecError` if the chunk is damaged."""
        check_dtype(out.dtype)
        super().decode_into(memoryview(data), out, base)  # slices of a memoryview are not copies


def chunk_buffer(array: Array, out: Array) -> Array:
    """`out` if a chunk of the array fits, else another buffer, (m,) uint8.

    Raises:
        NotApplicable: The array has another dtype, or more than 2**28 values.
    """
    if array.dtype != FLOAT32 or array.size > MAX_ELEMENTS:
        raise NotApplicable(f"a chunk of gradients is at most {MAX_ELEMENTS} float32, not {array.size} {array.dtype}")
    capacity = encode_bound(array.nbytes)
    return out if out.size >= capacity else np.empty(capacity, np.uint8)


def check_dtype(dtype: DType) -> None:
    """Raise `CodecError` unless the dtype is float32."""
    if dtype != FLOAT32:
        raise CodecError(f"gradients are float32, not {dtype}")


def append(inner: Bytes, out: Array, at: int) -> int:
    """Copy bytes to the offset `at` of `out`, (n,) uint8, unless they are there; return the offset of their end."""
    source = np.frombuffer(inner, np.uint8)
    end = at + source.size
    if source.ctypes.data != out.ctypes.data + at:
        out[at:end] = source
    return end


def take_number(data: Bytes, at: int) -> int:
    """The unsigned little-endian number of 4 bytes at an offset. Raises `CodecError` if the chunk is too short."""
    if at + 4 > len(data):
        raise CodecError("a chunk ends inside its head")
    return int.from_bytes(data[at : at + 4], "little")


def put_number(out: Array, at: int, number: int) -> None:
    """Write an unsigned little-endian number of 4 bytes at an offset of `out`, (n,) uint8."""
    out[at : at + 4] = np.frombuffer(number.to_bytes(4, "little"), np.uint8)
