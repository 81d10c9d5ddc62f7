"""Lossy chunks of strangers: an error or wrong numbers that a checksum finds, never a crash, no memory for free."""

import tracemalloc

import numpy as np
import pytest

from ckpt_codecs import CodecError
from ckpt_codecs.delta import StatePair
from ckpt_codecs.lossy import LcCheckpoint, Subspace
from ckpt_codecs.lossy import symbol_coder as symbols
from ckpt_codecs.lossy.byte_reader import ByteReader, length_prefixed
from lossy_fuzz import Seed, fuzz, of_seed, seeds, survives
from lossy_states import F32, LOSSY

SEEDS = seeds()
EACH = pytest.mark.parametrize("seed", SEEDS, ids=[f"{i}-{codec.name}" for i, (codec, _, _) in enumerate(SEEDS)])


@pytest.mark.quick(6)
@EACH
def test_a_chunk_cut_anywhere_is_refused(seed: Seed) -> None:
    data = seed[2]
    places = {*range(min(60, len(data))), *range(0, len(data), 97), len(data) - 1}
    assert not any(of_seed(seed, data[:at]) for at in places)


@EACH
def test_a_chunk_that_goes_on_is_refused(seed: Seed) -> None:
    assert not of_seed(seed, seed[2] + b"\0")


@EACH
def test_another_form_or_no_state_before_is_survived(seed: Seed) -> None:
    codec, change, data = seed
    form = {n: a.dtype for n, a in change.after.items()}
    for shape in ((), (0,), (1,), (50,), (64, 96), (3, 1), (6145,)):
        for states in (form, {**form, "exp_avg_sq": np.dtype(np.float64)}, {"fp32": F32}, {"other": F32}):
            before = {n: np.ones(shape, F32) for n in states}
            survives(codec, data, before, shape, states)
            survives(codec, data, {}, shape, states)


@EACH
def test_a_chunk_given_to_another_codec_is_survived(seed: Seed) -> None:
    _, change, data = seed
    for other in LOSSY:
        of_seed((other, change, data), data)


@EACH
def test_a_chunk_on_damaged_states_before_is_survived(seed: Seed) -> None:
    codec, change, data = seed
    random = np.random.default_rng(0)
    before = {
        n: random.integers(0, 256, a.nbytes, np.uint8).view(F32).reshape(a.shape) for n, a in change.before.items()
    }
    shape = next(iter(change.after.values())).shape
    survives(codec, data, before, shape, {n: a.dtype for n, a in change.after.items()})


def test_mutations_are_survived() -> None:
    given = fuzz(1, 120, SEEDS)
    assert 0 < given < 120 * len(SEEDS)


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


def test_no_memory_is_taken_for_the_asking() -> None:
    """A chunk of few bytes that speaks of large things."""
    form = {"fp32": F32, "exp_avg": F32, "exp_avg_sq": F32}
    long = b"\xff\xff\xff\xff\x0f"
    tracemalloc.start()
    for codec in LOSSY:
        for data in (b"\2" + long, b"\0" + long + bytes(20), b"\1" + long + b"\xff" * 50):
            assert not survives(codec, data, {}, (20, 20), form)
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


def test_moments_that_were_not_there_are_asked_for() -> None:
    codec, change, data = next(seed for seed in SEEDS if isinstance(seed[0], Subspace))
    form = {n: a.dtype for n, a in change.after.items()}
    with pytest.raises(CodecError, match="before"):
        codec.decode(data, {}, (96, 64), form)


def test_states_of_another_shape_are_refused() -> None:
    """Kernels look at no more than the chunk's own."""
    codec, change, data = next(seed for seed in SEEDS if isinstance(seed[0], Subspace))
    form = {n: a.dtype for n, a in change.after.items()}
    for name in form:
        before = {**change.before, name: change.before[name][:-1]}
        with pytest.raises(CodecError, match="shape"):
            codec.decode(data, before, (96, 64), form)
        with pytest.raises(CodecError, match="shape"):
            codec.encode(StatePair(before, change.after))
        with pytest.raises(CodecError, match="shape"):
            codec.encode(StatePair(change.before, {**change.after, name: change.after[name][:-1]}))
