"""What every codec keeps, stated once: each law is tried with chunks of all three registries."""

import json
import struct
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import FrozenInstanceError, fields, replace
from math import prod
from typing import Any

import numpy as np
import pytest

import codec_arrays
import delta_cases
from ckpt_codecs import Codec, CodecError, DeltaCodec, FirstMoment, Integers, Planes, Rounded, SecondMoment, Zstd
from ckpt_codecs.base import Array, DType, Shape, encode_bound
from ckpt_codecs.delta import StatePair, StepInfo
from ckpt_codecs.deltas.difference import Difference
from ckpt_codecs.gradients import GRADIENT_CODECS, gradient_codec
from ckpt_codecs.registry import (
    CODECS,
    DEFAULT_DELTA,
    DELTA_CODECS,
    delta_from_config,
    find,
    find_delta,
    from_config,
    parse,
    parse_delta,
)
from codec_arrays import BF16, CHUNKED, F32
from codec_chunks import ALL_CODECS, ARRAY, AnyCodec, Chunk, chunks, mutations, of_array
from gradient_arrays import gradients, largest, rounded
from held import bits
from lossy_states import LOSSY

LEVELS = [Planes("fast"), Planes("max"), FirstMoment("max"), SecondMoment("fast"), Integers("max"), Zstd(1)]
GRADIENTS = [gradient_codec(name) for name in GRADIENT_CODECS]
EACH_CHUNK = pytest.mark.parametrize("chunk", chunks(), ids=lambda chunk: chunk.name)
GROUPS: dict[str, list[Chunk]] = {}
"""The chunks of each codec by its name, those of lossy codecs by their options."""
for _chunk in chunks():
    GROUPS.setdefault(_chunk.name.rpartition(":")[0], []).append(_chunk)
EACH_CODEC = pytest.mark.parametrize("name", GROUPS)


def test_contract_covers_every_codec() -> None:
    names = {*CODECS, *DELTA_CODECS, *(codec.name for codec in GRADIENTS)}
    assert {chunk.codec.name for chunk in chunks()} == names - {Rounded.name}


# --- what comes back


@pytest.mark.parametrize("codec", [*CHUNKED, *LEVELS], ids=repr)
def test_codec_returns_every_bit(codec: Codec) -> None:
    for name, values, base in list(codec_arrays.cases())[:: 11 if codec in LEVELS else 1]:
        test_codec_returns_states_in_their_form(of_array(name, codec, values, base))


@pytest.mark.slow
@pytest.mark.parametrize("codec", delta_cases.DELTAS, ids=lambda codec: codec.name)
def test_delta_codec_returns_every_bit(codec: DeltaCodec) -> None:
    for name, change, step in delta_cases.cases():
        fitted = delta_cases.fitted(codec, change, step)
        test_codec_returns_states_in_their_form(Chunk(name, fitted, change.before, change.after))


@EACH_CHUNK
def test_codec_returns_states_in_their_form(chunk: Chunk) -> None:
    """By name and in order; if the codec is lossless, to the bit."""
    back = chunk.decoded(chunk.data)
    assert list(back) == list(chunk.after)
    assert chunk.survives(chunk.data)
    if chunk.codec.lossless:
        for state, values in chunk.after.items():
            assert bits(back[state]) == bits(values), state
    if isinstance(chunk.codec, Codec):
        assert len(chunk.data) <= chunk.nbytes + 1


def odd(values: Array, turn: int) -> Array:
    """The same values strided, unaligned or in another order, and read-only."""
    if turn == 0:
        there = np.repeat(values.reshape(-1), 2).reshape(*values.shape, 2)[..., 0]
    elif turn == 1:
        there = np.frombuffer(b"x" + values.tobytes(), np.uint8)[1:].view(values.dtype).reshape(values.shape)
    else:
        there = np.asfortranarray(values)
    there.flags.writeable = False
    return there


@EACH_CHUNK
def test_codec_takes_values_wherever_they_lie_in_memory(chunk: Chunk) -> None:
    plain = chunk.decoded(chunk.data)
    for turn in range(3):
        before = {name: odd(values, turn) for name, values in chunk.before.items()}
        assert chunk.encoded(before, {name: odd(values, turn) for name, values in chunk.after.items()}) == chunk.data
        back = chunk.decoded(chunk.data, before)
        assert all(bits(back[name]) == bits(plain[name]) for name in plain)


@EACH_CHUNK
def test_codec_never_touches_returned_arrays_again(chunk: Chunk) -> None:
    """Neither chunks nor values are scratch."""
    if isinstance(chunk.codec, Codec):
        data = chunk.codec.encode(chunk.after[ARRAY], chunk.before.get(ARRAY))
    else:
        data = chunk.codec.encode(StatePair(chunk.before, chunk.after))
    decoded = chunk.decoded(chunk.data)
    first = {name: bits(values) for name, values in decoded.items()}
    other = {name: values[::-1].copy() if values.ndim else values for name, values in chunk.after.items()}
    chunk.decoded(chunk.encoded(chunk.before, other))
    assert bytes(data) == chunk.data
    assert {name: bits(values) for name, values in decoded.items()} == first


@pytest.mark.slow
def test_codecs_share_no_scratch_among_threads() -> None:
    expected = [{name: bits(values) for name, values in one.decoded(one.data).items()} for one in chunks()]

    def is_same(number: int) -> bool:
        chunk = chunks()[number]
        data = chunk.encoded(chunk.before, chunk.after)
        decoded = {name: bits(values) for name, values in chunk.decoded(data).items()}
        return data == chunk.data and decoded == expected[number]

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(is_same, [*range(len(expected))] * 2))


@pytest.mark.parametrize("codec", [*CHUNKED, *GRADIENTS], ids=lambda codec: codec.name)
def test_codec_gives_the_same_in_memory_that_is_given(codec: Codec) -> None:
    """Packed or not, whatever was there before."""
    cases = [(values, base) for _, values, base in list(codec_arrays.cases())[::3]]
    if codec in GRADIENTS:
        cases = [(of(seed, n), None) for n in (0, 1, 15, 600, 5000) for seed, of in enumerate(GRADIENT_KINDS)]
    for values, base in cases:
        alone = bytes(codec.encode(values, base))
        for size in (encode_bound(values.nbytes), 3):
            assert bytes(codec.encode_into(values, base, np.full(size, 0xA5, np.uint8))) == alone
        packed = np.full(values.nbytes, 0xA5, np.uint8).view(values.dtype).reshape(values.shape)
        for out in (packed, np.empty((*values.shape, 2), values.dtype)[..., 0]):
            codec.decode_into(alone, out, base)
            assert bits(out.copy()) == bits(codec.decode(alone, values.shape, values.dtype, base))


GRADIENT_KINDS: list[Callable[[int, int], Array]] = [
    gradients,
    lambda seed, n: largest(gradients(seed, n), 0.1) if n else gradients(0, 0),
    lambda seed, n: rounded(gradients(seed, n)),
]


@pytest.mark.parametrize(
    "chunk", [chunk for chunk in chunks() if isinstance(chunk.own, DeltaCodec)], ids=lambda chunk: chunk.name
)
def test_delta_codec_returns_wanted_states_alone(chunk: Chunk) -> None:
    whole = chunk.decoded(chunk.data)
    for state in chunk.after:
        back = chunk.codec.decode(chunk.data, chunk.before, chunk.shape, chunk.dtypes, frozenset({state}))
        assert list(back) == [state]
        assert bits(back[state]) == bits(whole[state])


# --- what strangers wrote


@pytest.mark.quick(5)
@EACH_CHUNK
def test_codec_refuses_a_chunk_that_is_cut(chunk: Chunk) -> None:
    """At each byte; a large one at many."""
    data = chunk.data
    step = 1 if isinstance(chunk.codec, Codec) and len(data) < 30_000 else 97
    places = {*range(min(80, len(data))), *range(0, len(data), step), len(data) - 1}
    assert not any(chunk.survives(data[:at]) for at in places)


@EACH_CHUNK
def test_codec_refuses_a_chunk_that_goes_on(chunk: Chunk) -> None:
    assert not chunk.survives(chunk.data + b"\0")


@EACH_CHUNK
def test_codec_survives_other_shapes_dtypes_and_names(chunk: Chunk) -> None:
    size = prod(chunk.shape)
    shapes: list[Shape] = [(), (0,), (1,), (5,), (50,), (3, 1), (3, 64), (64, 96)]
    shapes += [chunk.shape, (2, size), (size + 1,), (max(size, 1) - 1,), (2 * size,)]
    forms: list[dict[str, DType]] = [dict(chunk.dtypes)]
    forms += [dict.fromkeys(chunk.after, dtype) for dtype in (F32, BF16, np.dtype(np.uint8), np.dtype(np.float64))]
    if isinstance(chunk.codec, DeltaCodec):
        forms.append({**chunk.dtypes, "exp_avg_sq": np.dtype(np.float64)})
        others = ["fp32"], ["other"], ["exp_avg", "fp32"], ["a", "b", "c"], ["exp_avg_sq", "max_exp_avg_sq", "param"]
        forms += [dict.fromkeys(names, F32) for names in others]
    for dtypes in forms:
        for shape in shapes:
            chunk.survives(chunk.data, {}, shape, dtypes)
            chunk.survives(chunk.data, {name: np.ones(shape, dtype) for name, dtype in dtypes.items()}, shape, dtypes)


@EACH_CHUNK
def test_codec_survives_other_states_before(chunk: Chunk) -> None:
    """Missing, zero, of another dtype or shape, or of random bits."""
    random = np.random.default_rng(0)
    zeros = {name: np.zeros_like(values) for name, values in chunk.after.items()}
    others = {name: values.astype(np.float64) for name, values in zeros.items()}
    flat = {name: values.reshape(-1) for name, values in zeros.items()}
    noise = {
        name: np.frombuffer(random.bytes(values.nbytes), values.dtype).reshape(values.shape)
        for name, values in chunk.before.items()
    }
    for before in ({}, zeros, others, flat, noise):
        chunk.survives(chunk.data, before)


@EACH_CHUNK
def test_codec_survives_a_chunk_of_another_codec(chunk: Chunk) -> None:
    for codec in ALL_CODECS:
        if isinstance(codec, Codec) == isinstance(chunk.codec, Codec):
            replace(chunk, own=codec, step=None).survives(chunk.data)


@pytest.mark.slow
@EACH_CODEC
def test_codec_survives_two_thousand_mutations(name: str) -> None:
    """Some are refused and some give arrays, so both ways are tried."""
    random, arrays = np.random.default_rng(1), 0
    for chunk in GROUPS[name]:
        source = mutations(chunk.data, random)
        arrays += sum(chunk.survives(next(source)) for _ in range(-(-2000 // len(GROUPS[name]))))
    assert 0 < arrays < 2000


LONG = b"\xff\xff\xff\xff\x0f"
HEADS = [b"\2" + LONG, b"\0" + LONG + bytes(20), b"\1" + LONG + b"\xff" * 50]
HEADS.append(bytes([3]) + b"".join(bytes([kind]) + b"\xff" * 4 for kind in (3, 5, 6, 4)) + bytes(100))
"""Chunks of few bytes that speak of large things."""


@pytest.mark.quick(12)
@EACH_CHUNK
def test_codec_takes_no_memory_for_lengths_that_lie(chunk: Chunk) -> None:
    data, shape = chunk.data, (10, 10) if isinstance(chunk.codec, Codec) else (20, 20)
    tracemalloc.start()
    for at in range(1, 40):
        chunk.survives(data[:at] + struct.pack("<I", 0xFFFFFFF0) + data[at + 4 :])
    for head in HEADS:
        assert not chunk.survives(head, {}, shape, dict.fromkeys(chunk.after, F32))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < (4 << 20) + 16 * chunk.nbytes


# --- names and configurations


ARRAY_REGISTRY = (find, from_config, parse)
DELTA_REGISTRY = (find_delta, delta_from_config, parse_delta)


@pytest.mark.parametrize("codec", [*ALL_CODECS, Rounded(), *LEVELS], ids=repr)
def test_codec_is_made_again_from_its_configuration(codec: AnyCodec) -> None:
    """As JSON and as text; options that it lacks are refused, and none changes."""
    find_class: Any
    find_class, make, read = ARRAY_REGISTRY if isinstance(codec, Codec) else DELTA_REGISTRY
    config = json.loads(json.dumps(codec.config()))
    assert config.pop("name") == codec.name
    left_out = {field.name: field.default for field in fields(codec) if field.name not in config}
    assert left_out == ({"speed": "default"} if isinstance(codec, Difference) else {})  # older releases do not know it
    assert type(codec)(**config) == codec
    for option in config:
        with pytest.raises(FrozenInstanceError):
            setattr(codec, option, None)
    if codec in GRADIENTS:
        return
    assert find_class(codec.name) is type(codec)
    assert make({"name": codec.name, **config}) == codec
    options = ",".join(f"{key}={json.dumps(value)}" for key, value in config.items() if not isinstance(value, list))
    assert read(f"{codec.name}:{options}") == codec
    for text in ("no_option=1", "=", "level", "level=best"):
        with pytest.raises(CodecError):
            read(f"{codec.name}:{text}")
    for wrong in ({"name": codec.name, "no_option": 1}, config, {"name": [codec.name]}, {"name": 1}):
        with pytest.raises(CodecError):
            make(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in GROUPS if not name.startswith("gradients")])
def test_fitted_codec_is_made_again_from_its_configuration(name: str) -> None:
    for chunk in GROUPS[name]:
        codec, make = chunk.codec, from_config if isinstance(chunk.codec, Codec) else delta_from_config
        if isinstance(codec, DeltaCodec):
            codec = delta_cases.fitted(codec, StatePair(chunk.before, chunk.after), StepInfo())
        assert make(json.loads(json.dumps(codec.config()))) == codec


def test_registries_list_each_codec_by_its_own_name() -> None:
    assert all(find(name).name == name for name in CODECS)
    assert all(find_delta(name).name == name for name in DELTA_CODECS)


def test_codecs_state_whether_they_are_lossless() -> None:
    assert find_delta(DEFAULT_DELTA).lossless
    assert all(codec.lossless for codec in (*CHUNKED, *delta_cases.DELTAS))
    assert not any(codec.lossless for codec in LOSSY)
    assert [codec.lossless for codec in GRADIENTS] == [True, False, False]
