"""Lossy chunks of strangers: an error or wrong numbers that a checksum finds, never a crash, no memory for free."""

import numpy as np
import pytest

from ckpt_codecs import CodecError
from ckpt_codecs.lossy import LcCheckpoint, Subspace, factors
from ckpt_codecs.lossy import symbol_coder as symbols
from ckpt_codecs.lossy.byte_reader import ByteReader, length_prefixed
from ckpt_codecs.lossy.subspace import FACTORS, RELATIVE_FACTORS
from codec_chunks import chunk_of
from lossy_states import F32


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"\x19" + bytes(8), b"\0\0\0", b"\0" + bytes(4), b"\0" + b"\xff" * 4, b"\0" + b"\xff" * 400],
    ids=["nothing", "no code", "a shift of 25", "half a state", "a state of 0", "ones", "many ones"],
)
def test_damaged_symbols_are_refused(data: bytes) -> None:
    with pytest.raises(CodecError):
        symbols.decode(data, 100, 10)


def test_pieces_without_end_are_refused() -> None:
    for data in (b"", b"\xff" * 9, b"\x80", b"\5abc", length_prefixed(b"abc")[:-1]):
        with pytest.raises(CodecError):
            ByteReader(data).part()
    assert ByteReader(length_prefixed(bytes(300))).part() == bytes(300)


def test_symbols_without_a_bucket_are_refused() -> None:
    delta = np.array([[1.0, -1.0, 2.0, 0.0] * 8], F32)
    before = {"fp32": np.zeros_like(delta)}
    codec = LcCheckpoint(3, coder="context", table=((127, 1.0), (383, -1.0), (128, 2.0)))
    data = codec._encode_buckets(delta)
    assert codec._decode_buckets(data, before["fp32"], delta.shape).tolist() == delta.tolist()
    fewer = bytes([1]) + data[1:5] + data[13:]
    with pytest.raises(CodecError, match="bucket"):
        codec._decode_buckets(fewer, before["fp32"], delta.shape)


def test_moments_that_were_not_there_are_asked_for() -> None:
    chunk = chunk_of(Subspace())
    with pytest.raises(CodecError, match="before"):
        chunk.decoded(chunk.data, {})


@pytest.mark.parametrize("flags", [8, 12, 16, 0xFF])
def test_flags_of_second_moments_that_mean_nothing_are_refused(flags: int) -> None:
    chunk = chunk_of(Subspace())
    predicted = factors.PredictedFactors.by(np.ascontiguousarray(chunk.before["exp_avg_sq"], F32))
    with pytest.raises(CodecError, match="flags"):
        factors.decode(bytes([flags]) + bytes(20), predicted, np.empty(chunk.shape, F32))


def test_second_moments_of_the_other_kind_are_refused() -> None:
    """Relative ones as plain ones would be read as other values."""
    chunk = chunk_of(Subspace())
    assert chunk.data[0] in (FACTORS, RELATIVE_FACTORS)
    data = bytes([FACTORS + RELATIVE_FACTORS - chunk.data[0]]) + chunk.data[1:]
    with pytest.raises(CodecError, match="unknown kind for exp_avg_sq"):
        chunk.decoded(data, chunk.before)


def test_states_of_another_shape_are_refused() -> None:
    """Kernels look at no more than the chunk's own."""
    chunk = chunk_of(Subspace())
    for name in chunk.after:
        before = {**chunk.before, name: chunk.before[name][:-1]}
        with pytest.raises(CodecError, match="shape"):
            chunk.decoded(chunk.data, before)
        with pytest.raises(CodecError, match="shape"):
            chunk.encoded(before, chunk.after)
        with pytest.raises(CodecError, match="shape"):
            chunk.encoded(chunk.before, {**chunk.after, name: chunk.after[name][:-1]})
