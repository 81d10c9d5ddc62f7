"""The kernels of lossy codecs give the bits of their twins in `oracle`, at each level of CPU."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import oracle.moments
import oracle.symbol_coder
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy import log_levels as lattice
from ckpt_codecs.native import lossy
from ckpt_formats.core.tensor import Array
from cpu_levels import LEVELS, at_level
from effort import examples
from held import bits
from kernel_headers import read_prototypes
from lossy_twins import TWINS

F32, I32 = np.dtype(np.float32), np.dtype(np.int32)
MOST = 1 << 28
SIZELESS = {
    "symbols_scratch": (1,),
    "model_symbols": (None, 0, 1, 0, None, 0, None, 1 << 16),
    "code_decisions": (None, 0, None, 4),
    "decode_symbols": (None, 0, 1, 0, None, 0, None, 1 << 16),
    "multiply": (None, 0, 0, None, 0, None),
    "multiply_transposed": (None, 0, 0, None, 0, None),
    "subtract_product_scratch": (0,),
    "subtract_product": (None, 0, 0, None, 0, None, None, 0),
    "decompose_qr_scratch": (0, 0),
    "decompose_qr": (None, 0, 0, None, None, None, 0),
    "is_finite": (None, 0),
    "sum_rows_and_columns": (None, 0, 0, None, None, None),
    "sum_levels": (None, 0, 0, None, None),
    "encode_residuals": (None, 0, 0, None, None, 1, None, 4097, None),
    "decode_levels": (None, None, 0, 0, 1, None, None, None),
    "update_direction": (None, None, 0, 0, None, None, None),
    "derive_first_moment": (0.0, None, None, None, 0, None),
    "fit_first_moment_scratch": (0,),
    "fit_first_moment": (None, None, None, None, 0, 0, None, None, 0),
    "scale_change_scratch": (0,),
    "scale_change": (None, None, 0, 0, None, None, None, None, None, 0),
    "unscale_change": (None, 0, 0, None, None, None, None),
    "quantize": (None, 0, 1.0, 0.5, None, None, None),
    "dequantize": (None, 0, None, 1.0, None),
}
"""Arguments with which a kernel has nothing to do: None where an array would be."""
LENGTHS = {
    "model_symbols": (5, 7),
    "code_decisions": (3,),
    "decode_symbols": (1, 7),
    "subtract_product": (7,),
    "decompose_qr": (6,),
    "fit_first_moment": (8,),
    "scale_change": (9,),
}
"""Which of them are lengths of buffers that may be longer than they need be."""

shapes = st.tuples(st.integers(0, 20), st.integers(0, 40)) | st.sampled_from([(1, 1), (300, 5), (2, 300), (130, 48)])
widths = st.integers(1, 40) | st.sampled_from([64, 100])
seeds = st.integers(0, 1 << 32)
kinds = st.sampled_from(["normal", "any", "zeros", "few"])


@pytest.fixture(params=LEVELS, autouse=True, scope="module", ids=lambda level: f"v{level}")
def _level(request: pytest.FixtureRequest) -> Iterator[None]:
    with at_level(request.param):
        yield


def agree(name: str, inputs: Sequence[object], *outputs: Array, changed: bool = False) -> None:
    """The kernel and its twin, each on outputs of its own: the same result, and the same bits in every output.

    `changed`: the outputs come first, and are inputs as well.
    """
    results = []
    for function in (getattr(lossy, name), TWINS[name]):
        own = [out.copy() for out in outputs]
        result = function(*own, *inputs) if changed else function(*inputs, *own)
        results.append((repr(result), [bits(out) for out in own]))
    assert results[0] == results[1]


def room(*shape: int, dtype: object = F32) -> Array:
    """Full of what nothing computes."""
    return np.full(shape, -77, dtype)  # type: ignore[call-overload, no-any-return]


def numbers(kind: str, shape: tuple[int, ...], seed: int) -> Array:
    """Finite float32: ordinary ones, of any bits (denormals, -0, the largest), zeros, or zeros but for a few."""
    random = np.random.default_rng(seed)
    ordinary: Array = random.standard_normal(shape).astype(F32)
    if kind == "normal":
        return ordinary
    if kind != "any":
        return ordinary * (random.random(shape) < (0.1 if kind == "few" else 0)).astype(F32)
    words = random.integers(0, 1 << 32, shape, np.uint32)
    words[random.random(shape) < 0.2] &= np.uint32(0x807FFFFF)
    words[random.random(shape) < 0.1] &= np.uint32(0x80000000)
    values = words.view(F32)
    return np.where(np.isfinite(values), values, F32.type(1.5))


def scales(shape: tuple[int, int], seed: int) -> tuple[Array, Array]:
    """What rows and columns are multiplied with."""
    random = np.random.default_rng(seed)
    rows, columns = (lattice.power(random.integers(-200, 200, size)) for size in shape)
    return rows, columns


# --- the header


def test_each_kernel_of_the_header_is_compared_with_a_twin_and_given_wrong_sizes() -> None:
    names = set(read_prototypes("lossy"))
    assert names == set(SIZELESS)
    assert names == set(TWINS) | {f"{name}_scratch" for name in TWINS if f"{name}_scratch" in names} | {
        "symbols_scratch"
    }
    assert {f"test_{name}" for name in TWINS} <= set(globals())


@pytest.mark.parametrize("name", SIZELESS)
def test_lossy_kernels_refuse_wrong_sizes(name: str) -> None:
    """Each in turn is less than nothing, or more than any array of ours has."""
    memory = np.zeros((1 << 16) + 64, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 64
    kernel, arguments = getattr(lossy.kernels, name), [start if x is None else x for x in SIZELESS[name]]
    assert kernel(*arguments) >= 0
    for i, kind in enumerate(read_prototypes("lossy")[name].arguments):
        too_large = () if i in LENGTHS.get(name, ()) else (MOST + 1, 1 << 62)
        for size in (-1, -(1 << 62), *too_large) if kind == "i64" else ():
            with pytest.raises(CodecError, match="sizes"):
                kernel(*arguments[:i], size, *arguments[i + 1 :])


def test_lossy_kernels_refuse_scratch_that_is_too_small() -> None:
    x = np.ones((40, 40), F32)
    address, kernels = x.ctypes.data, lossy.kernels
    for name, arguments, size in [
        ("model_symbols", (address, 40, 40, 0, address, 3000), kernels.symbols_scratch(40)),
        ("decode_symbols", (address, 40, 40, 0, address, 40), kernels.symbols_scratch(40)),
        ("subtract_product", (address, 40, 40, address, 40, address), kernels.subtract_product_scratch(40)),
        ("decompose_qr", (address, 40, 40, address, address), kernels.decompose_qr_scratch(40, 40)),
        ("fit_first_moment", (address,) * 4 + (40, 40, address), kernels.fit_first_moment_scratch(40)),
        ("scale_change", (address, address, 40, 40) + (address,) * 4, kernels.scale_change_scratch(40)),
    ]:
        with pytest.raises(CodecError, match="sizes"):
            getattr(kernels, name)(*arguments, address, size - 1)


def test_lossy_kernels_refuse_shapes_that_do_not_fit() -> None:
    a, x, levels = room(4, 6), room(6, 8), np.zeros(4, np.int32)
    calls: list[Callable[[], object]] = [
        lambda: lossy.multiply(a, a, room(4, 6)),
        lambda: lossy.multiply(a, x, room(4, 7)),
        lambda: lossy.multiply_transposed(a, x, room(6, 8)),
        lambda: lossy.subtract_product(a, room(4, 3), room(3, 5)),
        lambda: lossy.decompose_qr(x.T.copy(), room(8, 6), room(8, 8)),
        lambda: lossy.decompose_qr(a, room(4, 6), room(6, 6)),  # more columns than rows
        lambda: lossy.sum_levels(a, np.zeros(4, np.int64), np.zeros(5, np.int64)),
        lambda: lossy.decode_levels(levels, levels, 1, None, None, a),
        lambda: lossy.decode_levels(levels, levels, 1, np.zeros((4, 5), np.int32), None, room(4, 4)),
        lambda: lossy.unscale_change(a, room(4), room(6), x, room(4, 6)),
        lambda: lossy.quantize(a, 1.0, 0.5, np.zeros((4, 6), np.int32), np.zeros(3), np.zeros(4, np.int64)),
        lambda: lossy.quantize(a, 1.0, 1.5, np.zeros((4, 6), np.int32), np.zeros(4), np.zeros(4, np.int64)),
        lambda: lossy.decode_levels(levels + (1 << 13), levels, 1, None, None, room(4, 4)),
        lambda: lossy.encode_residuals(
            room(4, 4), levels, levels + (1 << 13), 1, lattice.fine_levels(), np.zeros((4, 4), np.int32)
        ),
        lambda: lossy.encode_residuals(
            room(4, 4), levels, levels, 1, lattice.fine_levels()[1:], np.zeros((4, 4), np.int32)
        ),
        lambda: lossy.code_decisions(np.zeros(3, np.uint16), 4, np.zeros(99, np.uint8)),
        lambda: lossy.code_decisions(np.array([9, 0, 9], np.uint16), 3, np.zeros(99, np.uint8)),
        lambda: lossy.model_symbols(np.zeros(3, np.int32), 3, 0, np.zeros(20, np.uint16)),
    ]
    for call in calls:
        with pytest.raises(CodecError, match="fit"):
            call()


# --- symbols

magnitudes = st.sampled_from([0, 1, 2, 14, 15, 16, 100, 2**31 - 1]) | st.integers(0, 2**31 - 1)
symbols = st.lists(st.just(0) | st.integers(-2, 2) | st.builds(int.__mul__, magnitudes, st.sampled_from([-1, 1])))


@settings(max_examples=examples(150), deadline=None)
@given(symbols, st.integers(1, 40), st.integers(0, 24), st.integers(0, 30))
@example([-51, 19, *[0] * 11, -42, *[0] * 11, 59, 0, 0, 0], 13, 0, 0)  # the last row is shorter
@example([2**31 - 1, 1 - 2**31, 0, 5, 0, 0, 0, 0, 0, 2**31 - 1, 0, 0], 3, 0, 0)
@example([*[0] * 3000, 1, *[0] * 3000, -8] * 2, 2000, 0, 0)
def test_model_symbols(values: list[int], columns: int, shift: int, smaller: int) -> None:
    symbols = np.array([int(v / 2**smaller) for v in values], np.int32)
    decisions = np.full(symbols.size * 112 + 1024, 7, np.uint16)
    agree("model_symbols", (symbols, columns, shift), decisions)
    count = lossy.model_symbols(symbols, columns, shift, decisions)
    out = np.zeros(2 * count + 4, np.uint8)
    agree("code_decisions", (decisions, count), out)
    code = out[lossy.code_decisions(decisions, count, out) :]
    agree("decode_symbols", (code, columns, shift), np.zeros_like(symbols))
    decoded = np.zeros_like(symbols)
    assert lossy.decode_symbols(code, columns, shift, decoded)
    assert decoded.tolist() == symbols.tolist()


@settings(max_examples=examples(150), deadline=None)
@given(st.lists(st.integers(16, 32752), max_size=300), seeds)
@example([1, 32767] * 40, 0)  # the least and the largest share
@example([2, 3, 5, 32766] * 40, 1)
def test_code_decisions(chances: list[int], seed: int) -> None:
    ones = np.random.default_rng(seed).integers(0, 2, len(chances)) << 15
    decisions = (np.array(chances, np.int64) | ones).astype(np.uint16)
    agree("code_decisions", (decisions, decisions.size), np.zeros(2 * decisions.size + 4, np.uint8))


@pytest.mark.parametrize("share", [1, 2, 3, 5, 127, 4097, 21845, 32767])
def test_quotients_of_the_coder_are_exact(share: int) -> None:
    """States just below and at each multiple of a share, where a rounded quotient would be off by one first.

    One decision takes the state from 2^16 to any that a share allows; so random decisions before it reach all sizes.
    """
    random = np.random.default_rng(share)
    for _ in range(300):
        decisions = np.append(random.integers(1, 32768, 3) | random.integers(0, 2, 3) << 15, [share, share])
        decisions = np.roll(decisions, int(random.integers(0, 5))).astype(np.uint16)
        agree("code_decisions", (decisions, decisions.size), np.zeros(2 * decisions.size + 4, np.uint8))


def same_decoding(code: bytes, columns: int, shift: int, size: int) -> None:
    """Symbols are compared only where the code is one: what a refused code leaves behind nobody reads."""
    data, results = np.frombuffer(code, np.uint8), []
    for function in (lossy.decode_symbols, TWINS["decode_symbols"]):
        decoded = np.zeros(size, np.int32)
        results.append(decoded.tolist() if function(data, columns, shift, decoded) else None)
    assert results[0] == results[1]


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=60), st.integers(1, 20), st.integers(0, 24), st.integers(0, 60))
@example(b"\0\0\1\0", 1, 0, 0)
@example(b"", 1, 0, 0)
@example(b"\xff" * 40, 4, 0, 3)
@example(b"\xff" * 4, 4, 24, 3)
def test_decode_symbols(code: bytes, columns: int, shift: int, size: int) -> None:
    same_decoding(code, columns, shift, size)


@settings(max_examples=examples(100), deadline=None)
@given(symbols, st.integers(1, 20), st.integers(0, 3), st.integers(0, 10_000), st.integers(1, 255))
def test_decode_symbols_that_are_damaged(values: list[int], columns: int, shift: int, place: int, change: int) -> None:
    symbols = np.array(values, np.int32)
    decisions = np.zeros(symbols.size * 112 + 1024, np.uint16)
    count = lossy.model_symbols(symbols, columns, shift, decisions)
    out = np.zeros(2 * count + 4, np.uint8)
    code = out[lossy.code_decisions(decisions, count, out) :].copy()
    code[place % code.size] ^= change
    same_decoding(code.tobytes(), columns, shift, symbols.size)
    same_decoding(code[: place % code.size].tobytes(), columns, shift, symbols.size)


def test_a_magnitude_of_2_to_the_31_is_refused() -> None:
    """It takes one decision more than any int32: 2^31 = 14 + 1 followed by 30 bits + 2."""
    decisions = np.zeros(4096, np.uint16)
    symbols = np.array([2**31 - 1], np.int32)
    count = lossy.model_symbols(symbols, 1, 0, decisions)
    bits_of = decisions[:count] >> 15
    assert bits_of[-31:-1].tolist() == [1] * 26 + [0, 0, 0, 1]  # 2^30 - 15
    decisions[count - 31 : count - 1] |= 1 << 15
    out = np.zeros(2 * count + 4, np.uint8)
    code = out[lossy.code_decisions(decisions, count, out) :]
    assert not lossy.decode_symbols(code, 1, 0, np.zeros(1, np.int32))
    same_decoding(code.tobytes(), 1, 0, 1)


def test_chances_stay_within_their_bounds_unclipped() -> None:
    """As the compiled coder takes for granted: its twin clips them."""
    one, quick, slow = 2 * oracle.symbol_coder.HALF, oracle.symbol_coder.QUICK, oracle.symbol_coder.SLOW
    for bit in (0, 1):
        a = b = oracle.symbol_coder.HALF
        for _ in range(5000):
            a, b = (
                number - (number >> rate) if bit else number + ((one - number) >> rate)
                for number, rate in ((a, quick), (b, slow))
            )
            assert oracle.symbol_coder.LEAST <= (a + b) >> 1 <= one - oracle.symbol_coder.LEAST


# --- matrices


@given(shapes, widths, kinds, seeds)
def test_multiply(shape: tuple[int, int], width: int, kind: str, seed: int) -> None:
    n, m = shape
    with np.errstate(all="ignore"):
        agree("multiply", (numbers(kind, shape, seed), numbers("normal", (m, width), seed + 1)), room(n, width))


@given(shapes, widths, kinds, seeds)
def test_multiply_transposed(shape: tuple[int, int], width: int, kind: str, seed: int) -> None:
    n, m = shape
    with np.errstate(all="ignore"):
        inputs = numbers(kind, shape, seed), numbers("normal", (n, width), seed + 1)
        agree("multiply_transposed", inputs, room(m, width))


@given(shapes, widths, kinds, seeds)
def test_subtract_product(shape: tuple[int, int], width: int, kind: str, seed: int) -> None:
    n, m = shape
    y, a, b = numbers(kind, shape, seed), numbers("normal", (n, width), seed + 1), numbers("few", (width, m), seed + 2)
    with np.errstate(all="ignore"):
        agree("subtract_product", (a, b), y, changed=True)


@given(st.integers(0, 12) | st.sampled_from([16, 32, 40]), st.integers(0, 30) | st.just(300), kinds, seeds)
def test_decompose_qr(k: int, more: int, kind: str, seed: int) -> None:
    y = numbers(kind, (k + more, k), seed)
    y[:, k // 2 : k // 2 + 1] = 0  # a column without a direction
    agree("decompose_qr", (y,), room(k + more, k), room(k, k))


def test_reflections_turn_without_stretching() -> None:
    y, w, t = numbers("normal", (50, 8), 0), room(50, 8), room(8, 8)
    lossy.decompose_qr(y, w, t)
    turn = np.eye(50) - w @ t @ w.T
    assert np.abs(turn @ turn.T - np.eye(50)).max() < 1e-5
    rest = y - turn[:, :8] @ (turn[:, :8].T @ y)
    assert np.abs(rest).max() < 1e-5


# --- moments


@settings(deadline=None)
@given(shapes, kinds, seeds, st.sampled_from([0, np.nan, np.inf, -np.inf]))
def test_is_finite(shape: tuple[int, int], kind: str, seed: int, wrong: float) -> None:
    values = numbers(kind, shape, seed)
    agree("is_finite", (values,))
    if values.size:
        values.reshape(-1)[seed % values.size] = wrong
        agree("is_finite", (values,))
        assert lossy.is_finite(values) == (wrong == 0)


@settings(deadline=None)
@given(shapes, kinds, seeds)
def test_sum_rows_and_columns(shape: tuple[int, int], kind: str, seed: int) -> None:
    n, m = shape
    values = numbers(kind, shape, seed)
    agree("sum_rows_and_columns", (values,), room(n, dtype=np.float64), room(m, dtype=np.float64))


@settings(deadline=None)
@given(shapes, kinds, seeds)
def test_sum_levels(shape: tuple[int, int], kind: str, seed: int) -> None:
    n, m = shape
    agree("sum_levels", (numbers(kind, shape, seed),), room(n, dtype=np.int64), room(m, dtype=np.int64))


@settings(max_examples=examples(150), deadline=None)
@given(shapes, kinds, seeds, st.integers(1, 255) | st.sampled_from([1, 2, 16, 32]), st.sampled_from([0, 900, 8191]))
def test_encode_residuals(shape: tuple[int, int], kind: str, seed: int, step: int, spread: int) -> None:
    random = np.random.default_rng(seed)
    values = np.abs(numbers(kind, shape, seed))
    rows, columns = (random.integers(-spread, spread + 1, size, np.int32) for size in shape)
    agree("encode_residuals", (values, rows, columns, step, lattice.fine_levels()), room(*shape, dtype=I32))


@pytest.mark.parametrize("step", [1, 2, 3, 16, 32, 255])
def test_encode_residuals_next_to_where_they_change(step: int) -> None:
    """Values whose levels are half a step from a multiple, and the next float32 on both sides."""
    near = (np.exp2((np.arange(-300, 300) + 0.5) * step / 8 % 200 - 100)).astype(F32)
    values = np.stack([np.nextafter(near, F32.type(0)), near, np.nextafter(near, F32.type(np.inf))])
    for row in (-3, 0, 5):
        rows, columns = np.full(3, row, np.int32), np.full(values.shape[1], -row, np.int32)
        agree("encode_residuals", (values, rows, columns, step, lattice.fine_levels()), room(*values.shape, dtype=I32))


def test_residuals_are_the_nearest_multiples_of_the_logarithm() -> None:
    values, step = np.abs(numbers("any", (300, 40), 0)), 5
    values[values == 0] = 1
    residuals, levels = np.empty(values.shape, np.int32), [np.zeros(size, np.int32) for size in values.shape]
    lossy.encode_residuals(values, levels[0], levels[1], step, lattice.fine_levels(), residuals)
    assert np.abs(residuals * step - 8 * np.log2(values.astype(np.float64))).max() <= step / 2 + 1e-5


@settings(max_examples=examples(150), deadline=None)
@given(shapes, seeds, st.integers(0, 255), st.sampled_from([100, 5000, 2**31 - 1]), st.sampled_from([0, 900, 8191]))
def test_decode_levels(shape: tuple[int, int], seed: int, step: int, large: int, spread: int) -> None:
    random = np.random.default_rng(seed)
    rows, columns = (random.integers(-spread, spread + 1, size, np.int32) for size in shape)
    residuals = random.integers(-large - 1, large + 1, shape, np.int32)
    zeros = random.integers(0, 3, shape, np.int32)
    for coded, holed in product((True, False), repeat=2):
        given_ = rows, columns, step, residuals if coded else None, zeros if holed else None
        agree("decode_levels", given_, room(*shape))


def test_decode_levels_of_every_level() -> None:
    levels = np.arange(oracle.moments.LOWEST - 20, oracle.moments.HIGHEST + 21, dtype=np.int32)
    agree("decode_levels", (np.zeros(1, np.int32), levels, 0, None, None), room(1, levels.size))


@settings(deadline=None)
@given(shapes, kinds, kinds, seeds)
def test_update_direction(shape: tuple[int, int], kind: str, second: str, seed: int) -> None:
    moments = numbers(kind, shape, seed), numbers(second, shape, seed + 1)
    agree("update_direction", (*moments, *scales(shape, seed)), room(*shape))


factors = st.floats(-1e3, 1e3, width=32) | st.sampled_from([0.0, -0.0, 1e38, 1e-45])


@settings(deadline=None)
@given(shapes, kinds, seeds, factors, st.booleans())
def test_derive_first_moment(shape: tuple[int, int], kind: str, seed: int, factor: float, rooted: bool) -> None:
    after, before, second = (numbers(kind, shape, seed + i) for i in range(3))
    agree("derive_first_moment", (factor, after, before, second if rooted else None), room(*shape))


@settings(deadline=None)
@given(shapes, kinds, seeds, st.booleans())
def test_fit_first_moment(shape: tuple[int, int], kind: str, seed: int, rooted: bool) -> None:
    after, before, second, moment = (numbers(kind, shape, seed + i) for i in range(4))
    agree("fit_first_moment", (after, before, second if rooted else None, moment))


# --- weights


@settings(deadline=None)
@given(shapes, kinds, seeds, st.booleans())
def test_scale_change(shape: tuple[int, int], kind: str, seed: int, based: bool) -> None:
    after, before = numbers(kind, shape, seed), numbers(kind, shape, seed + 1)
    agree("scale_change", (after, before if based else None, *scales(shape, seed)), room(*shape))


@settings(deadline=None)
@given(shapes, kinds, seeds, st.booleans())
def test_unscale_change(shape: tuple[int, int], kind: str, seed: int, based: bool) -> None:
    values, before = numbers(kind, shape, seed), numbers(kind, shape, seed + 1)
    agree("unscale_change", (values, *scales(shape, seed), before if based else None), room(*shape))


@settings(max_examples=examples(150), deadline=None)
@given(shapes, kinds, seeds, st.sampled_from([1e-3, 0.4, 7.0, 1e38]), st.sampled_from([0.0, 0.4, 0.5, 1.0]))
def test_quantize(shape: tuple[int, int], kind: str, seed: int, step: float, offset: float) -> None:
    outputs = np.zeros(shape, np.int32), np.zeros(4), np.zeros(4, np.int64)
    values = numbers(kind, shape, seed)
    results = []
    for function in (lossy.quantize, TWINS["quantize"]):
        own = [out.copy() for out in outputs]
        results.append([bits(out) for out in own] if function(values, F32.type(step), F32.type(offset), *own) else None)
    assert results[0] == results[1]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, -1.1e6])
@pytest.mark.parametrize("place", [0, 300, 599])
def test_lossy_kernels_refuse_what_has_no_multiple(value: float, place: int) -> None:
    values = np.ones((2, 300), F32)
    values.reshape(-1)[place] = value
    for function in (lossy.quantize, TWINS["quantize"]):
        outputs = np.zeros(values.shape, np.int32), np.zeros(4), np.zeros(4, np.int64)
        assert not function(values, F32.type(1e-3), F32.type(0.5), *outputs)


@settings(deadline=None)
@given(shapes, seeds, st.sampled_from([1, 5, 2**31 - 1]), st.sampled_from([1e-3, 0.4, 1e38]))
def test_dequantize(shape: tuple[int, int], seed: int, large: int, step: float) -> None:
    codes = np.random.default_rng(seed).integers(-large, large + 1, shape, np.int32)
    near = np.array([0, 0.7, 1.6, 2.5], F32)
    agree("dequantize", (codes, near, F32.type(step)), room(*shape))
