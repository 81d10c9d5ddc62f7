"""Chunks that are mostly zeros: the gaps between the other values, and these values."""

from collections.abc import Callable

import numpy as np

from ckpt_codecs.base import Array, Bytes
from ckpt_codecs.chunk import streams
from ckpt_codecs.chunk.frame import MAX_ELEMENTS, MIN_ELEMENTS
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import ENTRY, SPARSE
from ckpt_codecs.gradients.chunk import append, put_number, take_number
from ckpt_codecs.native import gradients as kernels
from ckpt_codecs.native import lossless
from ckpt_codecs.scratch import thread_buffer

HEAD = 10
"""The bytes of the mode, the count of values, the count of bytes of gaps, and the shift."""
DENSE = 4
"""A chunk is dense if one value of this many, or more, is not zero."""


def encode_sparse(words: Array, level: str, out: Array, encode: Callable[[Array, Array], Bytes]) -> Bytes | None:
    """A sparse chunk of words, in `out`; None if the words are dense or all zero, or the chunk is not smaller.

    `words`: (n,) uint32. `out`: uint8. `encode` returns a chunk of float32 values, which it may write to its second
    argument.
    """
    if not MIN_ELEMENTS <= words.size <= MAX_ELEMENTS:
        return None
    count = kernels.count_words(words)
    if not count or DENSE * count >= words.size:
        return None
    shift = shift_of(words.size // count)
    values = thread_buffer("gradients-values", 4 * count).view(np.uint32)
    gaps = thread_buffer("gradients-gaps", count + words.size // kernels.LONG_GAP)
    lows = thread_buffer("gradients-lows", kernels.lows_bytes(count, shift))
    number = kernels.split_sparse(words, shift, gaps, lows, values)
    at = _append_stream(gaps[:number], level, out) + lows.size
    out[at - lows.size : at] = lows
    end = append(encode(values.view(np.float32), out[at:]), out, at)
    out[0] = SPARSE
    put_number(out, 1, count)
    put_number(out, 5, number)
    out[9] = shift
    return out[:end].data if end <= words.nbytes else None


def decode_sparse(data: Bytes, out: Array, decode: Callable[[Bytes, Array], None]) -> None:
    """Fill `out`, (n,) uint32, with words from a chunk of mode 9. Raises `CodecError` if the chunk is damaged.

    `decode` fills float32 values from a chunk of any other mode.
    """
    count, number, size = take_number(data, 1), take_number(data, 5), take_number(data, HEAD + 1)
    shift, begin = data[9], HEAD + ENTRY
    if count > out.size or number > count + out.size // kernels.LONG_GAP or shift > kernels.MAX_SHIFT:
        raise CodecError("a chunk states more gaps or values than it can have")
    middle = begin + size
    end = middle + kernels.lows_bytes(count, shift)
    if end > len(data):
        raise CodecError("a chunk ends inside its gaps")
    source = np.frombuffer(data, np.uint8)
    gaps = streams.read(source, [data[HEAD]], [begin, middle], [number], "gradients-gaps")[0]
    values = thread_buffer("gradients-values", 4 * count).view(np.uint32)
    decode(data[end:], values.view(np.float32))
    if not kernels.merge_sparse(gaps, shift, source[middle:end], values, out):
        raise CodecError("the gaps of a chunk do not fit its values")


def shift_of(mean: int) -> int:
    """The count of low bits of gaps that are noise, for gaps with this mean: all but three bits of the mean."""
    return min(max(mean.bit_length() - 3, 0), kernels.MAX_SHIFT)


def _append_stream(plane: Array, level: str, out: Array) -> int:
    """Write a stream and its entry of a directory after the head; return the offset of its end. `plane`: (n,) uint8."""
    area, coding = out[HEAD - 1 :], LEVELS[level]
    area[1 + ENTRY : 1 + ENTRY + plane.size] = plane
    return HEAD - 1 + lossless.write_streams([plane.size], [coding.max_ratio], [coding.sampled], area)
