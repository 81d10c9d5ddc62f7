"""What lossy delta codecs promise: bounds on every element, errors that do not add up, one result on every machine."""

import math
from functools import partial
from itertools import pairwise
from math import sqrt

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ckpt_codecs import NotApplicable
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StepInfo
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy import PRESETS, Excp, LcCheckpoint, Subspace, coarsest, measure
from ckpt_codecs.lossy import symbol_coder as symbols
from ckpt_codecs.lossy.basis import Basis
from ckpt_codecs.lossy.error_stats import ErrorStats
from ckpt_codecs.lossy.log_levels import HIGH, power
from ckpt_codecs.lossy.logarithm import log2
from ckpt_codecs.registry import delta_from_config, parse_delta
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import Array
from cpu_levels import LEVELS, at_level
from effort import examples
from held import bits
from lossy_states import BF16, F32, LOSSY, changes, training
from lossy_twins import twins_for_kernels

NAMES = [f"{i}-{codec.name}" for i, codec in enumerate(LOSSY)]
EACH = pytest.mark.parametrize("codec", LOSSY, ids=NAMES)
CHANGES = list(changes())
KERNELS = [*(partial(at_level, level) for level in LEVELS), twins_for_kernels]
"""Contexts in which codecs compute with the kernels of each level, and with what specifies them."""


def decoded(codec: DeltaCodec, data: bytes, change: StatePair) -> dict[str, Array]:
    shape = next(iter(change.after.values())).shape
    return codec.decode(data, change.before, shape, {n: a.dtype for n, a in change.after.items()})


def there_and_back(codec: DeltaCodec, change: StatePair) -> dict[str, Array]:
    return decoded(codec, codec.encode(change), change)


def same(a: States, b: States) -> bool:
    return a.keys() == b.keys() and all(bits(a[n]) == bits(b[n]) for n in a)


def test_levels_beyond_the_table_have_its_ends() -> None:
    """A damaged chunk may state any level."""
    ends = power(np.array([-(10**9), -2 * HIGH - 1, -2 * HIGH, 2 * HIGH, 2 * HIGH + 1, 10**9]))
    assert np.allclose(np.log2(ends), [-2 * HIGH / 64] * 3 + [2 * HIGH / 64] * 3)


def test_subspace_promises_every_bound() -> None:
    """And only of weights: moments have none."""
    codec = Subspace(max_abs_err=0.5, rel_error=0.25)
    form = {"fp32": F32, "exp_avg": F32}
    assert codec.promised("fp32", form) == {"promised_max_abs": 0.5, "promised_rel_change": 0.25}
    assert codec.promised("exp_avg", form) == {}


# --- for every codec


@EACH
@pytest.mark.slow
def test_kernels_of_each_level_and_their_twins_write_and_read_the_same(codec: DeltaCodec) -> None:
    for name, change in CHANGES[::7]:
        results = []
        for one in KERNELS:
            with one():
                data = codec.encode(change)
                results.append((data, decoded(codec, data, change)))
        assert all(data == results[0][0] and same(state, results[0][1]) for data, state in results), name
        assert [(n, a.shape, a.dtype) for n, a in results[0][1].items()] == [
            (n, a.shape, a.dtype) for n, a in change.after.items()
        ], name


@EACH
def test_lossy_codecs_return_nan_bit_for_bit_and_numbers_as_numbers(codec: DeltaCodec) -> None:
    for name, change in CHANGES:
        result = there_and_back(codec, change)
        for state, true in change.after.items():
            if not np.isfinite(true).all():
                assert bits(result[state]) == bits(true), (name, state)
            else:
                assert np.isfinite(result[state]).all(), (name, state)


@EACH
def test_integers_are_not_for_lossy_codecs(codec: DeltaCodec) -> None:
    steps = {"fp32": np.zeros((4, 4), F32), "step": np.arange(16).reshape(4, 4)}
    with pytest.raises(NotApplicable, match="step"):
        codec.encode(StatePair({}, steps))


# --- ours


@pytest.mark.parametrize("what", ["adam-(96, 64)", "adam-(500, 8)", "anchor-(24, 129)", "zero-columns", "adam-(300,)"])
def test_kernels_of_each_level_and_their_twins_write_the_same(what: str) -> None:
    written = []
    for one in KERNELS:
        with one():
            written.append(Subspace().encode(dict(CHANGES)[what]))
    assert len(set(written)) == 1


@given(
    st.floats(1e-7, 10),
    st.floats(-8, 4),
    st.sampled_from([(40, 48), (2000,), (7,), (64, 1), (3, 3)]),
    st.integers(0, 1000),
    st.sampled_from([F32, BF16]),
    st.booleans(),
)
def test_no_weight_is_farther_off_than_was_promised(
    bound: float, size: float, shape: tuple[int, ...], seed: int, dtype: np.dtype[np.float32], anchor: bool
) -> None:
    random = np.random.default_rng(seed)
    old = random.standard_t(2, shape)
    new = old + 10**size * random.standard_t(2, shape)
    with np.errstate(over="ignore"):
        change = StatePair({} if anchor else {"fp32": old.astype(dtype)}, {"fp32": new.astype(dtype)})
    result = there_and_back(Subspace(max_abs_err=bound), change)["fp32"]
    off = np.abs(result.astype(np.float64) - change.after["fp32"].astype(np.float64))
    assert off.max() <= bound


@pytest.mark.parametrize("codec", [Subspace(rel_error=0.1), Subspace(max_abs_err=1e-6)], ids=["relative", "absolute"])
def test_a_promise_that_is_broken_is_noticed(codec: Subspace) -> None:
    before, after = training((40, 48), 2, 1)
    change = StatePair(before, after)
    result = there_and_back(codec, change)
    assert codec.broken_promise(change, result) is None
    assert codec.broken_promise(change, {**result, "fp32": result["fp32"] + np.abs(result["fp32"]).max()}) is not None


def test_the_loss_of_every_state_is_measured() -> None:
    before, after = training((40, 48), 2, 1)
    assert measure(StatePair(before, after), before).keys() == after.keys()


@settings(max_examples=examples(40), deadline=None)
@given(st.floats(0.001, 2), st.sampled_from([(40, 48), (2000,), (7,), (96, 64)]), st.integers(0, 1000), st.booleans())
def test_no_chunk_of_weights_is_farther_off_than_was_promised_of_its_change(
    bound: float, shape: tuple[int, ...], seed: int, anchor: bool
) -> None:
    before, after = training(shape, 2, seed)
    change = StatePair({} if anchor else before, after)
    result = there_and_back(Subspace(rel_error=bound), change)
    assert measure(change, result)["fp32"].relative <= bound * (1 + 1e-9)


@pytest.mark.parametrize("octaves", [0.01, 0.5, 2.0, 4.0])
def test_second_moments_keep_within_their_factor_and_zeros_stay_zeros(octaves: float) -> None:
    before, after = training((96, 64), 2)
    after["exp_avg_sq"][:, 7] = 0
    after["exp_avg_sq"][11] = 0
    near = {
        **before,
        "exp_avg_sq": after["exp_avg_sq"] * np.exp(np.random.default_rng(5).normal(0, 1, (96, 64))).astype(F32),
    }
    for old in (before, near, {}):
        result = there_and_back(Subspace(second_octaves=octaves), StatePair(old, after))["exp_avg_sq"]
        true = after["exp_avg_sq"]
        assert np.array_equal(result == 0, true == 0)
        octaves_off = np.abs(np.log2(result[true > 0] / true[true > 0].astype(np.float64)))
        assert octaves_off.max() <= (8 * octaves + 3) / 16


@pytest.mark.parametrize("shape", [(300,), (1, 2000), (300, 1), (5, 5, 5), (64, 64)])
def test_second_moments_of_any_magnitude_keep_within_their_factor(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    before, true = (np.exp2(random.uniform(-120, 120, shape)).astype(F32) for _ in range(2))
    for old in (before, true * F32.type(1.1)):
        result = there_and_back(Subspace(), StatePair({"exp_avg_sq": old}, {"exp_avg_sq": true}))["exp_avg_sq"]
        assert np.abs(np.log2(result / true.astype(np.float64))).max() <= 35 / 16


@pytest.mark.parametrize(("dtype", "scale"), [("float16", 10.0), ("bfloat16", 1e-33)])
def test_second_moments_of_16_bits_that_are_denormal_do_not_become_zeros(dtype: str, scale: float) -> None:
    before, after = (one["exp_avg_sq"] * F32.type(scale) for one in training((96, 64), 2))
    change = StatePair(*({"exp_avg_sq": one.astype(DTYPES[dtype])} for one in (before, after)))
    result = there_and_back(Subspace(), change)["exp_avg_sq"]
    assert np.array_equal(result == 0, change.after["exp_avg_sq"] == 0)


def test_second_moments_keep_within_their_factor_where_they_exceed_float32_without_their_deviations() -> None:
    before, after = np.full((96, 64), 1e30, F32), np.full((96, 64), 1e37, F32)
    before[::7, ::5], after[::7, ::5], after[0, 0] = 1e25, 1e32, 3e38
    change = StatePair({"exp_avg_sq": before}, {"exp_avg_sq": after})
    result = there_and_back(Subspace(second_octaves=2.0), change)["exp_avg_sq"]
    assert np.abs(np.log2(result / after.astype(np.float64))).max() <= 19 / 16


def test_second_moments_that_deviate_as_before_take_next_to_nothing() -> None:
    """And the errors along a chain stay within the bound, though each state is predicted from a decoded one."""
    states, random = training((96, 64), 1)[0], np.random.default_rng(3)
    current, sizes = dict(states), []
    for _ in range(6):
        noise = np.exp(random.normal(0, 0.3, (96, 64)))
        after = {"exp_avg_sq": (states["exp_avg_sq"] * noise).astype(F32)}
        sizes.append(len(Subspace().encode(StatePair({"exp_avg_sq": current["exp_avg_sq"]}, after))))
        current = there_and_back(Subspace(), StatePair({"exp_avg_sq": current["exp_avg_sq"]}, after))
        assert np.abs(np.log2(current["exp_avg_sq"] / after["exp_avg_sq"].astype(np.float64))).max() <= 35 / 16
    assert max(sizes) < 0.5 * len(Subspace().encode(StatePair({}, after)))


@pytest.mark.parametrize("codec", [Subspace(), Subspace(step_size=4.0), Subspace(rank=0), LcCheckpoint(3)])
def test_errors_do_not_add_up_over_twenty_deltas(codec: DeltaCodec) -> None:
    """Each delta is against what was reconstructed, so that it makes good for the errors before it."""
    states = training((96, 64), 21)
    current, relative, added_up = dict(states[0]), [], np.zeros((96, 64))
    for before, after in pairwise(states):
        current = there_and_back(codec, StatePair(current, after))
        moved = np.linalg.norm(after["fp32"] - before["fp32"])
        relative.append(float(np.linalg.norm(current["fp32"] - after["fp32"]) / moved))
        added_up += there_and_back(codec, StatePair(before, after))["fp32"] - after["fp32"]
    assert max(relative) < 0.6 * getattr(codec, "step_size", 2.0)
    assert np.mean(relative[15:]) < 1.5 * np.mean(relative[5:10])
    assert np.linalg.norm(current["fp32"] - states[-1]["fp32"]) < np.linalg.norm(added_up)


def test_the_basis_saves_where_weights_move_in_few_directions() -> None:
    change = dict(CHANGES)["adam-(96, 64)"]
    flat, turned = (Subspace(rank=rank) for rank in (0, 32))
    sizes = [len(codec.encode(change)) for codec in (flat, turned)]
    errors = [measure(change, there_and_back(codec, change))["fp32"].relative for codec in (flat, turned)]
    assert sizes[1] < 0.75 * sizes[0]
    assert errors[1] < errors[0]


def test_vectors_are_finer_than_matrices_and_follow_the_step_size() -> None:
    change = dict(CHANGES)["adam-(2000,)"]
    codecs = {step_size: Subspace(step_size=step_size) for step_size in (1.0, 4.0)}
    sizes = [len(codec.encode(change)) for codec in codecs.values()]
    assert sizes[0] - sizes[1] > 2000 * 1.5 / 8  # of two bits a weight
    for step_size, codec in codecs.items():
        assert measure(change, there_and_back(codec, change))["fp32"].relative < 0.1 * step_size


def test_scale_is_one_for_the_whole_state() -> None:
    large, small = training((96, 64), 2), training((64, 48), 2, 1)
    still = [{n: a * np.float32(0.01) if n != "exp_avg_sq" else a for n, a in s.items()} for s in small]
    codec = Subspace().survey(((a["fp32"].size, StatePair(b, a)) for b, a in (large, still)), StepInfo())
    assert codec.rms is not None
    assert codec.fit(lambda: iter([StatePair(*still)]), StepInfo()) == codec
    result = there_and_back(codec, StatePair(*still))
    assert same({"fp32": result["fp32"]}, {"fp32": still[0]["fp32"]})  # so little of it is worth no bit
    assert not same(there_and_back(Subspace(), StatePair(*still)), result)


def test_first_moments_are_told_from_the_change() -> None:
    change = dict(CHANGES)["adam-(96, 64)"]
    sizes = {kind: len(Subspace(first_moments=kind).encode(change)) for kind in ("zero", "derived", "coarse", "exact")}
    assert sizes["zero"] < sizes["derived"] < sizes["zero"] + 8 < sizes["coarse"] < sizes["exact"]
    progress = measure(change, there_and_back(Subspace(), change))["exp_avg"]
    assert progress.error < np.square(change.after["exp_avg"], dtype=np.float64).sum() / 2


@pytest.mark.parametrize("drift", [0.03, 0.1, 1.0])
def test_derived_first_moments_have_the_drift_of_the_true_ones(drift: float) -> None:
    """Gradients are `drift` in each direction, and noise of variance 1: what goes on for ever is not to be lost."""
    random, shape = np.random.default_rng(0), (64, 128)
    states = {n: np.zeros(shape) for n in ("fp32", "exp_avg")}
    direction, change = random.choice([-drift, drift], shape), []
    for count in (40, 50):
        for _ in range(count):
            states["exp_avg"] = 0.9 * states["exp_avg"] + 0.1 * (direction + random.standard_normal(shape))
            states["fp32"] = states["fp32"] - 1e-3 * states["exp_avg"]
        change.append({n: a.astype(F32) for n, a in {**states, "exp_avg_sq": np.full(shape, 1 + drift**2)}.items()})
    result = there_and_back(Subspace(step_size=0.1), StatePair(*change))["exp_avg"]
    assert float((result * direction).mean()) == pytest.approx(drift**2, rel=0.15)


@settings(max_examples=examples(80), deadline=None)
@given(st.lists(st.integers(-(2**31) + 1, 2**31 - 1), max_size=40), st.integers(1, 17), st.integers(0, 31))
@example([-51, 19, *[0] * 11, -42, *[0] * 11, 59, 0, 0, 0], 13, 0)  # the last row is shorter
@example([2**31 - 1, 1 - 2**31, 0, 5, 0, 0, 0, 0, 0, 2**31 - 1, 0, 0], 3, 0)
def test_symbol_coder_returns_any_symbols(values: list[int], columns: int, shift: int) -> None:
    given_ = np.array([int(v / 2**shift) for v in values], np.int32)
    assert np.array_equal(symbols.decode(symbols.encode(given_, columns), given_.size, columns), given_)


def test_mostly_zeros_take_far_less_than_a_bit_each() -> None:
    rare = (np.random.default_rng(0).random(100_000) < 0.01).astype(np.int32)
    entropy = -100_000 * (0.01 * np.log2(0.01) + 0.99 * np.log2(0.99)) / 8
    assert len(symbols.encode(rare, 500)) < 1.2 * (entropy + 0.01 * 100_000 / 8)  # and a sign each


def test_a_basis_turns_without_stretching_and_back() -> None:
    change = training((96, 64), 1)[0]["exp_avg"]
    basis = Basis.of_change(change / np.abs(change).max(), 16)
    assert basis is not None
    values = np.random.default_rng(0).standard_normal((96, 64)).astype(F32)
    turned = values.copy()
    basis.rotate(turned)
    assert np.linalg.norm(turned) == pytest.approx(np.linalg.norm(values), rel=1e-5)
    assert np.abs(turned - values).max() > 1
    basis.rotate_back(turned)
    assert np.abs(turned - values).max() < 1e-4


# --- others


@pytest.mark.parametrize("width", [2, 3])
def test_lc_keeps_the_largest_exponents_and_stands_for_the_middle(width: int) -> None:
    delta = np.array([[8.0, 9.0, -8.5, 4.0, -5.0, 2.0, 1.5, 0.25, 0.0, -0.1]], F32)
    change = StatePair({"fp32": np.zeros_like(delta)}, {"fp32": delta})
    result = there_and_back(LcCheckpoint(width), change)["fp32"]
    expected = {2: [8.5, 8.5, -8.5, 4, 0, 0, 0, 0, 0, 0], 3: [8.5, 8.5, -8.5, 4, -5, 2, 1.5, 0.25, 0, 0]}
    assert result.tolist() == [expected[width]]


def test_lc_coders_give_the_same_and_the_published_one_needs_a_bit_for_each_weight() -> None:
    before, after = training((300, 200), 2)
    change = StatePair({"fp32": before["fp32"]}, {"fp32": after["fp32"]})
    codecs = [LcCheckpoint(2, coder=coder) for coder in ("huffman", "packed", "context")]
    sizes = [8 * len(codec.encode(change)) / 60_000 for codec in codecs]
    results = [there_and_back(codec, change) for codec in codecs]
    assert same(results[0], results[1])
    assert same(results[0], results[2])
    assert sizes[0] > 1 > max(sizes[1:])


def test_lc_has_one_table_for_the_state_if_asked() -> None:
    pairs = [training((40, 30), 2, seed) for seed in range(3)]
    codec = LcCheckpoint(3, "state").survey(((1200, StatePair(b, a)) for b, a in pairs), StepInfo())
    deltas = np.concatenate([(a["fp32"] - b["fp32"]).reshape(-1) for b, a in pairs])
    assert codec.table is not None
    assert codec.table[0][0] & 255 == np.abs(deltas).max().view(np.uint32) >> np.uint32(23)
    assert codec.fit(lambda: iter([StatePair(*pairs[0])]), StepInfo()) == codec


def test_excp_prunes_moments_where_it_prunes_weights() -> None:
    change = dict(CHANGES)["adam-(96, 64)"]
    result = there_and_back(Excp(alpha=1.0), change)
    moved = result["fp32"] != change.before["fp32"]
    assert 0 < moved.mean() < 0.2
    assert not result["exp_avg"][~moved].any()
    assert np.array_equal(result["exp_avg"] == 0, result["exp_avg_sq"] == 0)
    assert np.unique(result["exp_avg_sq"]).size <= 16


@pytest.mark.parametrize(("beta2", "warned"), [(0.95, False), (0.999, True), (None, True)])
def test_excp_warns_where_second_moments_live_long(beta2: float | None, warned: bool) -> None:
    warning = Excp().warning(StepInfo(options={} if beta2 is None else {"betas": [0.9, beta2]}))
    assert (warning is not None) == warned


# --- measures


def test_error_stats_add_up_over_chunks() -> None:
    change = dict(CHANGES)["adam-(96, 64)"]
    result = there_and_back(Subspace(), change)
    whole = measure(change, result)["fp32"]
    parts = [
        measure(
            StatePair(*({n: a[rows] for n, a in s.items()} for s in (change.before, change.after))),
            {n: a[rows] for n, a in result.items()},
        )["fp32"]
        for rows in (slice(0, 50), slice(50, None))
    ]
    summed = sum(parts, ErrorStats())
    true, old = (s["fp32"].astype(np.float64) for s in (change.after, change.before))
    assert summed.figures() == pytest.approx(whole.figures())
    assert whole.max_abs == np.abs(result["fp32"] - true).max()
    assert whole.relative == pytest.approx(np.linalg.norm(result["fp32"] - true) / np.linalg.norm(true - old))
    assert 0.5 < whole.progress < 1.2


def test_measure_finds_no_loss_of_an_exact_state() -> None:
    change = dict(CHANGES)["any-bits"]
    assert measure(change, change.after)["fp32"].figures() == {"max_abs": 0, "rel": 0, "progress": 1}


@pytest.mark.parametrize("limit", [0.001, 0.02, 0.5, 100])
def test_the_search_gives_the_coarsest_step_that_was_tried_and_accepted(limit: float) -> None:
    tried: dict[float, float] = {}

    def loss(step: float) -> float:
        tried[step] = step * step / 100
        return tried[step]

    result = coarsest(loss, limit)
    accepted = [step for step in tried if tried[step] <= limit]
    assert result == max(accepted, default=None)
    assert len(tried) <= 8
    if 100 * limit >= 8 * 8:
        assert result == 8
    elif result is not None:
        assert result > 0.93 * sqrt(100 * limit)


def test_presets_are_codecs_of_growing_steps() -> None:
    assert PRESETS["resume"].step_size < PRESETS["balanced"].step_size < PRESETS["archive"].step_size
    assert parse_delta("subspace:step_size=4") == PRESETS["archive"]


@pytest.mark.parametrize(
    "config",
    [
        {"step_size": 0},
        {"step_size": "2"},
        {"rank": -1},
        {"rank": 1000},
        {"rank": True},
        {"second_octaves": 99},
        {"first_moments": "some"},
        {"max_abs_err": -1},
        {"rel_error": float("nan")},
        {"rms": float("inf")},
    ],
)
def test_settings_that_mean_nothing_are_refused(config: dict[str, object]) -> None:
    with pytest.raises(CodecError):
        delta_from_config({"name": "subspace", **config})


def test_tables_that_mean_nothing_are_refused() -> None:
    for table in ([[600, 1.0]], [[1, float("nan")]], [[1]], "x", [[i, 1.0] for i in range(8)]):
        with pytest.raises(CodecError):
            delta_from_config({"name": "lc", "table": table})


@given(st.lists(st.floats(0, exclude_min=True, allow_infinity=False), min_size=1, max_size=40))
def test_log2_is_that_of_exact_arithmetic(values: list[float]) -> None:
    logarithms = log2(np.array(values))
    # x = m * 2^k with m from 1 to 2: the error is measured against k + log2(m), of which the second part is small.
    expected = [k - 1 + math.log2(2 * m) for m, k in map(math.frexp, values)]
    assert np.abs(logarithms - expected).max() <= 2e-13
    powers = np.exp2(np.arange(-1074.0, 1024))
    assert np.array_equal(log2(powers), np.arange(-1074, 1024))
    assert log2(np.zeros(2)).tolist() == [-np.inf, -np.inf]
