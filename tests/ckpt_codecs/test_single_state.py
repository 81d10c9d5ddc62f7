"""Chunks of one state: what weight sync encodes, decodes in place, and lists the changes of."""

import struct
from typing import Any

import numpy as np
import pytest

from ckpt_codecs import CodecError, StatePair
from ckpt_codecs.deltas import format_ids as kinds
from ckpt_codecs.deltas.difference import Difference
from ckpt_codecs.deltas.single_state import UNCHANGED_CHUNK, decode_chunk, encode_chunk, read_changes
from ckpt_codecs.registry import delta_from_config, parse_delta
from ckpt_formats.core.tensor import Array
from cpu_levels import LEVELS, at_level
from delta_cases import BF16, F16, F32
from held import array, bits

CHUNK = 1 << 18
HALVES = pytest.mark.parametrize("dtype", [BF16, F16], ids=str)


def weights(dtype: np.dtype[Any], n: int, share: float = 0.01, seed: int = 0) -> tuple[Array, Array]:
    """Weights before and after a step of fp32 masters that changes about this share of them."""
    random = np.random.default_rng(seed)
    masters, updates = random.normal(0, 0.03, n), np.clip(random.normal(0, 0.6, n), -1.5, 1.5)
    rate = share * (6e-5 if dtype == BF16 else 8e-6)
    return masters.astype(F32).astype(dtype), (masters - rate * updates).astype(F32).astype(dtype)


def words_of(words: list[int], dtype: np.dtype[Any], n: int) -> Array:
    return np.resize(np.array(words, np.uint16), n).view(dtype)


def awkward(dtype: np.dtype[Any], n: int) -> dict[str, tuple[Array, Array]]:
    before, after = weights(dtype, n)
    last = before.copy()
    last[-1:].view(np.uint16)[:] += 1
    return {
        "few": (before, after),
        "last": (before, last),
        "first": (before, np.concatenate([last[-1:], before[1:]])),
        "none": (before, before.copy()),
        "all": (before, (before.view(np.uint16) + np.uint16(1)).view(dtype)),
        "others": (before, weights(dtype, n, seed=1)[0]),
        "zeros": (np.zeros(n, dtype), np.where(np.arange(n) % 9, 0, 1).astype(dtype)),
        "signs of zero": (words_of([0], dtype, n), words_of([0x8000] + [0] * 40, dtype, n)),
        "NaNs": (words_of([0x7FC1, 0xFFFF, 0x7F80, 0x7C01, 5], dtype, n), words_of([0x7FC2] + [5] * 12, dtype, n)),
        "infinities": (words_of([0x7F80, 0xFF80, 0x7C00, 1], dtype, n), words_of([0xFF80, 0x7F80, 0xFC00], dtype, n)),
        "one by 32,768": (before, np.concatenate([(before[:1].view(np.uint16) ^ 0x8000).view(dtype), before[1:]])),
    }


def comes_back(before: Array, after: Array) -> bytes:
    """Check every way of reading the chunk; return it."""
    data = encode_chunk(before, after)
    out = np.full(after.shape, 7, after.dtype)
    decode_chunk(memoryview(data), before, out)
    assert bits(out) == bits(after)
    in_place = before.copy()
    decode_chunk(data, in_place, in_place)
    assert bits(in_place) == bits(after)
    dtypes = {"param": after.dtype}
    assert bits(Difference().decode(data, {"param": before}, after.shape, dtypes)["param"]) == bits(after)
    indices, words = read_changes(data, before)
    word = np.dtype(f"u{after.itemsize // (2 if after.dtype.kind == 'c' else 1)}")
    old, new = (np.ascontiguousarray(values).reshape(-1).view(word) for values in (before, after))
    assert (indices.dtype, words.dtype) == (np.int64, word)
    assert indices.tolist() == np.flatnonzero(old != new).tolist()
    assert words.tolist() == new[indices].tolist()
    return data


@HALVES
@pytest.mark.parametrize("n", [0, 1, 15, 63, 64, 65, 1000, 20_001, CHUNK])
def test_chunk_of_one_state_comes_back_at_every_level(dtype: np.dtype[Any], n: int) -> None:
    for name, (before, after) in awkward(dtype, n).items():
        chunks = set()
        for level in LEVELS if n < CHUNK or name == "few" else LEVELS[-1:]:
            with at_level(level):
                chunks.add(comes_back(before, after))
        assert len(chunks) == 1, name
        assert (chunks == {UNCHANGED_CHUNK}) == (bits(before) == bits(after)), name


@HALVES
def test_few_changes_are_masked_steps_about_as_large_as_sparse_steps(dtype: np.dtype[Any]) -> None:
    for share in (0.005, 0.02):
        before, after = weights(dtype, CHUNK, share)
        fast = encode_chunk(before, after)
        assert fast[6] == kinds.MASKED_STEPS
        assert len(fast) <= 1.012 * len(sparse_steps(before, after))


def sparse_steps(before: Array, after: Array) -> bytes:
    data = Difference().encode(StatePair({"param": before}, {"param": after}))
    assert data[6] == kinds.SPARSE_STEPS
    return data


def test_very_few_changes_are_sparse_steps() -> None:
    before, after = weights(BF16, CHUNK, 1e-4)
    assert encode_chunk(before, after) == sparse_steps(before, after)


@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8", "int64", "bool", "complex64"])
def test_chunk_of_any_dtype_and_shape_comes_back(dtype: str) -> None:
    for shape in ((), (1,), (5, 40), (3, 0)):
        before, after = (array(np.dtype(dtype), shape, seed) for seed in (1, 2))
        comes_back(before, after)
        comes_back(before, before.copy())


@HALVES
def test_chunk_without_values_before_comes_back(dtype: np.dtype[Any]) -> None:
    for n in (0, 1, 700, CHUNK):
        after = weights(dtype, n)[0].reshape(-1, 1)
        out = np.empty_like(after)
        decode_chunk(encode_chunk(None, after), None, out)
        assert bits(out) == bits(after)


def test_values_that_are_not_aligned_are_decoded() -> None:
    before, after = weights(BF16, 30_000)
    memory = np.zeros(2 * before.size + 1, np.uint8)[1:].view(BF16)
    memory[:] = before
    assert not memory.flags.aligned
    data = encode_chunk(memory, after)
    decode_chunk(data, memory, memory)
    assert bits(memory) == bits(after)


def test_other_values_before_are_refused() -> None:
    before, after = weights(BF16, 9000, 0.1)
    data = encode_chunk(before, after)
    assert data[6] == kinds.MASKED_STEPS
    with pytest.raises(CodecError, match="same shape and dtype"):
        encode_chunk(before[1:], after)
    for other in (None, before[:8000], before.astype(F32)):
        with pytest.raises(CodecError):
            decode_chunk(data, other, np.empty(9000, BF16))
    with pytest.raises(CodecError, match="masked steps are damaged"):
        read_changes(data, before[:2000])
    with pytest.raises(CodecError, match="without gaps"):
        decode_chunk(data, before, np.empty(18_000, BF16)[::2])
    for cut in range(0, len(data), 7):
        with pytest.raises(CodecError):
            decode_chunk(data[:cut], before, np.empty(9000, BF16))


def test_masked_steps_are_read_wherever_16_bit_floats_are() -> None:
    before, after = weights(BF16, 9000, 0.1)
    data = bytearray(encode_chunk(before, after))
    with pytest.raises(CodecError, match="no residuals of form 19"):
        Difference().decode(bytes(data), {"param": before.view(np.uint16)}, (9000,), {"param": np.dtype(np.uint16)})
    data[1:5] = struct.pack("<I", 2)
    with pytest.raises(CodecError, match="masked steps are damaged"):
        decode_chunk(bytes(data[:7]), before, np.empty_like(before))


def test_speed_is_an_option_that_only_fast_chunks_state() -> None:
    fast = parse_delta("difference:speed=fast")
    assert fast == Difference(speed="fast") == delta_from_config(fast.config())
    assert Difference().config() == {"name": "difference", "level": "default"}
    with pytest.raises(CodecError, match="no speed 'slow'; there are: default, fast"):
        parse_delta("difference:speed=slow")
