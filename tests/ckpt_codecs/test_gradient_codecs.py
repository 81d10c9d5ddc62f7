"""Gradients come back to the bit, or as near as their codec promises, and hostile chunks end in a `CodecError`."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_codecs import Codec, CodecError, NotApplicable
from ckpt_codecs.base import Array, encode_bound
from ckpt_codecs.format_ids import BLOCKS, COLUMNS, FLOAT_PLANES, MAGNITUDES, MULTIPLES, RAW, SAME_VALUE, SPARSE
from ckpt_codecs.gradients import (
    GRADIENT_CODECS,
    Bfloat16Gradients,
    ExactGradients,
    Int8Gradients,
    encode_scaled,
    find_factor,
    gradient_codec,
)
from ckpt_codecs.gradients.exact import encode_magnitudes
from ckpt_codecs.native.gradients import BLOCK
from codec_chunks import of_array
from effort import examples
from gradient_arrays import AWKWARD, CHUNK, F32, U32, gradients, largest, rounded
from held import bits

EACH = pytest.mark.parametrize("codec", [codec() for codec in GRADIENT_CODECS.values()], ids=lambda codec: codec.name)


@st.composite
def chunks(draw: st.DrawFn, most: int = 1000) -> Array:
    """Any bits; gradients dense and sparse; multiples of a factor; with awkward values here and there."""
    random, n = np.random.default_rng(draw(st.integers(0, 1 << 32))), draw(st.integers(0, most))
    kind = draw(st.sampled_from(["bits", "dense", "scaled", "same"]))
    if kind == "bits":
        return random.integers(0, 1 << 32, n, U32).view(F32)
    factor = F32(draw(st.floats(2**-10, 2**10, width=32)))
    with np.errstate(all="ignore"):
        values = gradients(int(random.integers(1 << 32)), n) * F32(10.0 ** random.integers(-38, 39))
        if kind == "scaled":
            values = rounded(values) * factor
    if kind == "same":
        values[:] = random.choice([0, -0.0, 1, np.nan])
    if draw(st.booleans()):
        values[random.random(n) < random.choice([0.5, 0.8, 0.99])] = 0
    if draw(st.booleans()) and n:
        values[random.integers(0, n, 5)] = random.choice(AWKWARD, 5)
    return values


def decoded(codec: Codec, values: Array) -> Array:
    data = codec.encode(values, None)
    assert len(data) <= values.nbytes + 1
    return codec.decode(data, values.shape, values.dtype, None)


@settings(max_examples=examples(300), deadline=None)
@given(chunks(), st.sampled_from(["default", "max", "fast"]))
def test_exact_gradients_return_every_bit(values: Array, level: str) -> None:
    assert bits(decoded(ExactGradients(level), values)) == bits(values)


@given(st.lists(st.integers(0, (1 << 32) - 1), max_size=60), st.integers(1, 40))
def test_exact_gradients_return_any_bits(words: list[int], times: int) -> None:
    values = np.tile(np.array(words, U32), times).view(F32)
    assert bits(decoded(ExactGradients(), values)) == bits(values)


@settings(max_examples=examples(300), deadline=None)
@given(chunks())
def test_bf16_gradients_round_as_bfloat16(values: Array) -> None:
    assert bits(decoded(Bfloat16Gradients(), values)) == bits(rounded(values))


@settings(max_examples=examples(300), deadline=None)
@given(chunks())
def test_int8_gradients_are_as_near_as_promised(values: Array) -> None:
    near = decoded(Int8Gradients(), values)
    for begin in range(0, values.size, BLOCK):
        block, back = values[begin : begin + BLOCK], near[begin : begin + BLOCK]
        if not np.isfinite(block).all():
            assert bits(back) == bits(block)
            continue
        error = np.abs(back.astype(np.float64) - block)
        scale = float(np.abs(back).max()) / 127  # the one that is stored: the largest magnitude has the code 127
        assert (error <= scale / 2 * (1 + 1e-6)).all()
        wanted = float(np.abs(block).max()) / 127
        assert wanted * (1 - 2**-23) <= scale <= wanted * (1 + 2**-15)
        assert (back[block == 0] == 0).all()


def test_int8_gradients_round_ties_to_even() -> None:
    block = np.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -126.5, 3.49, 0] * 5, F32)
    assert decoded(Int8Gradients(), block)[:10].tolist() == [127, 0, 2, 2, 0, -2, 126, -126, 3, 0]


KINDS: list[tuple[str, Array]] = [
    ("dense", gradients()),
    ("bfloat16", rounded(gradients(1))),
    ("clipped", rounded(gradients(2)) * F32(0.0371)),
    ("sparse", largest(gradients(3), 0.01)),
    ("sparse-clipped", largest(rounded(gradients(4)), 0.01) * F32(0.77)),
    ("rare", largest(gradients(5), 1e-4)),
    ("one", np.eye(1, CHUNK, CHUNK - 1, dtype=F32)[0]),
    ("zero", np.zeros(CHUNK, F32)),
    ("awkward", np.concatenate([gradients(6, CHUNK - AWKWARD.size), AWKWARD])),
    ("clipped-but-one", np.concatenate([rounded(gradients(7, CHUNK - 1)) * F32(1.3), AWKWARD[7:8]])),
]


@pytest.mark.parametrize("values", [values for _, values in KINDS], ids=[name for name, _ in KINDS])
def test_gradient_codecs_return_whole_chunks(values: Array) -> None:
    assert bits(decoded(ExactGradients(), values)) == bits(values)
    assert bits(decoded(Bfloat16Gradients(), values)) == bits(rounded(values))
    near = decoded(Int8Gradients(), values)
    assert bits(np.isnan(near)) == bits(np.isnan(values))


@pytest.mark.parametrize(
    ("kind", "codec", "mode", "most"),
    [
        ("dense", "exact", FLOAT_PLANES, 3.43),
        ("dense", "bf16", MULTIPLES, 1.43),
        ("dense", "int8", BLOCKS, 0.83),
        ("bfloat16", "exact", MULTIPLES, 1.43),
        ("clipped", "exact", MULTIPLES, 1.43),
        ("sparse", "exact", SPARSE, 0.041),
        ("sparse", "bf16", SPARSE, 0.022),
        ("sparse", "int8", BLOCKS, 0.026),
        ("sparse-clipped", "exact", SPARSE, 0.022),
        ("rare", "exact", SPARSE, 0.0008),
        ("one", "exact", SPARSE, 0.0003),
        ("zero", "exact", SAME_VALUE, 0.0001),
        ("zero", "bf16", SAME_VALUE, 0.0001),
        ("zero", "int8", SAME_VALUE, 0.0001),
    ],
)
def test_gradient_codecs_reach_their_bytes_a_parameter(kind: str, codec: str, mode: int, most: float) -> None:
    """Bytes a parameter."""
    values = dict(KINDS)[kind]
    data = gradient_codec(codec).encode(values, None)
    assert data[0] == mode
    assert len(data) / values.size < most


@pytest.mark.parametrize(("rows", "share"), [(512, 0.95), (333.7, 0.95), (40, 0.995)], ids=["whole", "ragged", "few"])
def test_int8_gradients_of_a_matrix_are_smaller_with_its_columns(rows: float, share: float) -> None:
    """And the values are the same, in an array of the matrix or a range of its elements."""
    values = gradients(11, int(rows * 512))
    codec = Int8Gradients()
    plain = bytes(codec.encode(values, None))
    data = bytes(codec.encode_range(values, (1 << 20, 512), 512 * 7))
    later = bytes(codec.encode_range(values[300:], (1 << 20, 512), 300))
    assert plain[0] == BLOCKS
    assert data[0] == COLUMNS
    assert len(data) < share * len(plain)
    assert bits(codec.decode(data, values.shape, values.dtype)) == bits(codec.decode(plain, values.shape, values.dtype))
    assert bits(codec.decode(later, values[300:].shape, values.dtype)) == bits(decoded(codec, values[300:]))
    assert len(later) < share * len(codec.encode(values[300:], None))
    if values.size % 512 == 0:
        assert bytes(codec.encode(values.reshape(-1, 512), None)) == data


@pytest.mark.parametrize(
    ("values", "shape"),
    [
        (np.random.default_rng(0).normal(0, 1, CHUNK // 4).astype(F32), (512, 512)),
        (gradients(12), (CHUNK,)),
        (gradients(12), None),
        (gradients(12), (2, CHUNK // 2 + 1)),
        (largest(gradients(13), 0.002), (512, 512)),
    ],
    ids=["even-columns", "vector", "several", "one-row", "sparse"],
)
def test_int8_gradients_are_in_one_stream_where_columns_save_nothing(
    values: Array, shape: tuple[int, ...] | None
) -> None:
    assert bytes(Int8Gradients().encode_range(values, shape, 0)) == bytes(Int8Gradients().encode(values, None))


def test_a_sparse_chunk_keeps_negative_zeros() -> None:
    values = np.zeros(5000, F32)
    values[::50] = -0.0
    data = ExactGradients().encode(values, None)
    assert data[0] == SPARSE
    assert bits(ExactGradients().decode(data, values.shape, values.dtype)) == bits(values)


@given(st.integers(0, 1 << 32), st.integers(0, 3000))
def test_encode_magnitudes_returns_every_bit(seed: int, n: int) -> None:
    """Of values with any mantissa and either sign, over as many binades as fit and one more."""
    random = np.random.default_rng(seed)
    least, binades = random.integers(0, 225, dtype=U32), random.integers(1, 33)
    exponents = least + random.integers(0, binades, n, U32)
    values = (exponents << U32(23) | random.integers(0, 1 << 32, n, U32) & U32(0x807FFFFF)).view(F32)
    chunk = encode_magnitudes(values, "default")
    if n < 512 or np.ptp(values.view(U32) << U32(1) >> U32(21)) > 255:
        assert chunk is None
    else:
        assert chunk is not None
        assert chunk[0] == MAGNITUDES
        assert bits(ExactGradients().decode(bytes(chunk), values.shape, values.dtype)) == bits(values)


@given(st.floats(2**-20, 2**20, width=32), st.integers(0, 1 << 32))
def test_find_factor_finds_the_factor_that_multiplied(factor: float, seed: int) -> None:
    values = rounded(gradients(seed, 2000)) * F32(factor)
    factor_again = find_factor(values)
    assert factor_again is not None
    assert factor_again == np.frexp(F32(factor))[0] * 2
    out = np.empty(encode_bound(values.nbytes), np.uint8)
    data = encode_scaled(values, factor_again, out)
    assert data is not None
    assert bits(ExactGradients().decode(data, values.shape, values.dtype)) == bits(values)
    values[1234] = np.nextafter(values[1234], F32(np.inf))
    assert encode_scaled(values, factor_again, out) is None


def test_find_factor_finds_none_without_a_factor() -> None:
    assert find_factor(gradients()) is None
    assert find_factor(np.zeros(0, F32)) is None
    assert find_factor(AWKWARD[:8]) is None
    assert encode_scaled(gradients(), 1.5, np.empty(encode_bound(4 * CHUNK), np.uint8)) is None
    assert encode_scaled(gradients(), float("nan"), np.empty(encode_bound(4 * CHUNK), np.uint8)) is None


def test_no_byte_depends_on_denormals_being_switched_off() -> None:
    """As training does; chunks are read where they are not."""
    import torch

    random = np.random.default_rng(0)
    tiny = (random.integers(0, 1 << 26, 3000, U32) | random.integers(0, 2, 3000, U32) << U32(31)).view(F32)
    all_values = [tiny, np.concatenate([tiny[:10], gradients(0, 3000)]), largest(tiny, 0.1)]
    all_values += [(tiny.view(U32) & U32(0xFFFF0000)).view(F32), rounded(gradients(1, 3000)) * F32(1e-35)]
    codecs = [gradient_codec(name) for name in GRADIENT_CODECS]
    written = [bytes(codec.encode(values, None)) for codec in codecs for values in all_values]
    read = [bits(decoded(codec, values)) for codec in codecs for values in all_values]
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush denormals")
    try:
        again = [bytes(codec.encode(values, None)) for codec in codecs for values in all_values]
        reread = [bits(decoded(codec, values)) for codec in codecs for values in all_values]
    finally:
        torch.set_flush_denormal(False)
    assert again == written
    assert reread == read


# --- what a codec is given


@EACH
def test_gradient_codecs_take_float32_only(codec: Codec) -> None:
    for dtype in (np.float64, np.uint32, np.float16):
        with pytest.raises(NotApplicable):
            codec.encode(np.zeros(100, dtype), None)
        with pytest.raises(CodecError):
            codec.decode(codec.encode(gradients(0, 100), None), (100,), np.dtype(dtype), None)


def test_codecs_are_found_by_name() -> None:
    assert list(GRADIENT_CODECS) == ["exact", "bf16", "int8"]
    for name, kind in GRADIENT_CODECS.items():
        assert type(gradient_codec(name)) is kind
        assert kind.name == f"gradients-{name}"
    with pytest.raises(CodecError, match="there are: exact, bf16, int8"):
        gradient_codec("planes")
    with pytest.raises(CodecError):
        ExactGradients("best")


# --- what a stranger wrote


@settings(max_examples=examples(300), deadline=None)
@given(st.sampled_from(range(13)), st.binary(max_size=80), st.integers(0, 600))
def test_gradient_codecs_survive_any_bytes(mode: int, data: bytes, n: int) -> None:
    for name in GRADIENT_CODECS:
        of_array(name, gradient_codec(name), np.empty(n, F32), None).survives(bytes([mode]) + data)


def refused(data: bytes, n: int, codec: Codec | None = None) -> None:
    with pytest.raises(CodecError):
        (codec or ExactGradients()).decode(data, (n,), np.dtype(F32), None)


def sparse_chunk(count: int, gaps: bytes, shift: int, lows: bytes, inner: bytes, number: int | None = None) -> bytes:
    head = struct.pack("<BIIBBI", SPARSE, count, len(gaps) if number is None else number, shift, 0, len(gaps))
    return head + gaps + lows + inner


def test_multiples_are_what_the_specification_says() -> None:
    numbers = np.array([0x3F80, 0xBFC0, 0x8000, 0x0000, 0x4049], np.uint16)
    for factor in (1.0, 1.5, float(F32(1.1))):
        chunk = struct.pack("<BfB", MULTIPLES, factor, RAW) + numbers.tobytes()
        expected = np.array([1, -1.5, -0.0, 0, 3.140625], F32) * F32(factor)
        assert bits(ExactGradients().decode(chunk, (5,), np.dtype(F32))) == bits(expected)
    denormal_and_nans = np.array([1, 0x7F81, 0xFFFF], np.uint16)
    exact = ExactGradients().decode(
        struct.pack("<BfB", MULTIPLES, 1, RAW) + denormal_and_nans.tobytes(), (3,), np.dtype(F32)
    )
    assert exact.view(np.uint16).tolist() == [0, 1, 0, 0x7F81, 0, 0xFFFF]


def test_magnitudes_are_what_the_specification_says() -> None:
    values = gradients(0, 600)
    turned = [int(word) << 1 & 0xFFFFFFFF | int(word) >> 31 for word in values.view(U32)]
    least = min(word >> 21 for word in turned)
    result = [((word >> 21) - least) << 24 | (word >> 5 & 0xFFFF) << 8 | word & 31 for word in turned]
    planes = [bytes(word >> 8 * k & 255 for word in result) for k in range(4)]
    directory = b"".join(struct.pack("<BI", 0, len(plane)) for plane in planes)
    chunk = struct.pack("<BH", MAGNITUDES, least) + directory + b"".join(planes)
    assert bits(ExactGradients().decode(chunk, values.shape, values.dtype)) == bits(values)


def test_a_sparse_chunk_that_does_not_fit_is_refused() -> None:
    inner = bytes([RAW]) + np.array([1, 2], F32).tobytes()
    valid = sparse_chunk(2, b"\x03\x04", 0, b"", inner)
    expected = [0, 0, 0, 1, 0, 0, 0, 0, 2, 0]
    assert ExactGradients().decode(valid, (10,), np.dtype(F32)).tolist() == expected
    shifted = sparse_chunk(2, b"\x01\x02", 1, b"\x01", inner)
    assert ExactGradients().decode(shifted, (10,), np.dtype(F32)).tolist() == expected
    refused(valid, 8)
    refused(valid, 1)
    refused(sparse_chunk(2, b"\x03\x04\x00", 0, b"", inner), 1000)
    refused(sparse_chunk(2, b"\x03\xff", 0, b"", inner), 1000)
    refused(sparse_chunk(2, b"\x03", 0, b"", inner), 1000)
    refused(sparse_chunk(2, b"\x03\x04", 25, bytes(7), inner), 1000)
    refused(sparse_chunk(2, b"\x03\x04", 8, b"\x00", inner), 1000)
    refused(sparse_chunk(2, b"\x03\x04", 0, b"", inner, number=0xFFFFFFFF), 1000)
    refused(sparse_chunk(0xFFFFFFFF, b"\x03\x04", 0, b"", inner), 1000)
    for end in range(4):
        refused(bytes([MAGNITUDES, 0, 0, 0])[: end + 1], 10)
    refused(sparse_chunk(10, b"\x00" * 10, 0, b"", sparse_chunk(2, b"\x03\x04", 0, b"", inner)), 10)


@pytest.mark.parametrize("factor", [0, 0x3F7FFFFF, 0x40000000, 0x7FC00000, 0xBF800000, 0x7F800000])
def test_a_factor_that_nobody_writes_is_refused(factor: int) -> None:
    refused(struct.pack("<BIB", MULTIPLES, factor, RAW) + bytes(20), 10)


def test_blocks_that_do_not_fit_are_refused() -> None:
    codec = Int8Gradients()

    def chunk(scales: list[int], stored: bytes = b"", codes: bytes = bytes(600)) -> bytes:
        inner = bytes([RAW]) + np.array(scales, U32).tobytes()
        return struct.pack("<BBI", BLOCKS, 0, len(codes)) + codes + struct.pack("<I", len(inner)) + inner + stored

    one, nan = 0x3F800000, 0x7FC00000
    ones = codec.decode(chunk([one, one], codes=b"\x01" * 600), (600,), np.dtype(F32))
    assert (ones == 1).all()
    assert (codec.decode(chunk([one, nan], b"\x01" * 352), (600,), np.dtype(F32))[:512] == 0).all()
    for scale in (1, one | 1, one | 0x80000000, 0x7F800000, nan | 1, nan | 0x80000000):
        refused(chunk([one, scale]), 600, codec)
    for stored in (b"", bytes(351), bytes(353), bytes(2048)):
        refused(chunk([one, nan], stored), 600, codec)
    refused(chunk([one, one], b"\0"), 600, codec)
    refused(chunk([one]), 600, codec)
    refused(chunk([one, one, one]), 600, codec)
    refused(chunk([one, one], codes=bytes(599)), 600, codec)


def columns_chunk(
    columns: int, skipped: int, groups: bytes, planes: list[bytes], sizes: list[int] | None = None
) -> bytes:
    """Of one block, with the scale 1."""
    heads = b"".join(struct.pack("<BI", 0, size) for size in (sizes or map(len, planes)))
    scale = bytes([RAW]) + np.array([1], F32).tobytes()
    table = bytes([0b11_10_01_00, 0, 0b01_01_01_01]) + bytes(13)
    head = struct.pack("<BII", COLUMNS, columns, skipped) + table + groups + heads
    return head + b"".join(planes) + struct.pack("<I", len(scale)) + scale


GROUPS = bytes([0x02, 0x8B, 0x01, 0x00, 0x01])
"""Of the columns 2, 0, 3, 0 and 1, with bits that are ignored; and of the rows 0, 0, 1, 0, of which 1 is of class 1."""
ORDER = [(place // 5, place % 5) for place in range(1, 17)]
CLASSES = [1 if row == 2 else [2, 0, 3, 0, 1][column] for row, column in ORDER]
PLANES = [bytes(i + 1 for i, one in enumerate(CLASSES) if one == index) for index in range(4)]


def test_columns_are_what_the_specification_says() -> None:
    """A row without its first element, two rows, and two elements."""
    chunk = columns_chunk(5, 1, GROUPS, PLANES)
    assert Int8Gradients().decode(chunk, (16,), np.dtype(F32)).tolist() == list(range(1, 17))


def test_columns_that_do_not_fit_are_refused() -> None:
    codec, valid = Int8Gradients(), columns_chunk(5, 1, GROUPS, PLANES)
    for columns in (0, 4, 6, 17, 1 << 16, 1 << 31, 0xFFFFFFFF):
        refused(columns_chunk(columns, 0, GROUPS, PLANES), 16, codec)
    for skipped in (0, 2, 5, 0xFFFFFFFF):
        refused(columns_chunk(5, skipped, GROUPS, PLANES), 16, codec)
    refused(columns_chunk(5, 1, bytes(5), PLANES), 16, codec)
    for i in range(4):
        refused(columns_chunk(5, 1, GROUPS, [plane[i == j :] for j, plane in enumerate(PLANES)]), 16, codec)
        sizes = [0xFFFFFFFF if i == j else len(plane) for j, plane in enumerate(PLANES)]
        refused(columns_chunk(5, 1, GROUPS, PLANES, sizes), 16, codec)
    for n in (0, 4, 15, 17):
        refused(valid, n, codec)
    for end in range(1, len(valid)):
        refused(valid[:end], 16, codec)
    wide = np.zeros(300_000, F32)
    refused(columns_chunk(1 << 17, 0, bytes(1 << 16), [bytes(300_000), b"", b"", b""]), wide.size, codec)
