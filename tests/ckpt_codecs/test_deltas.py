"""Every delta codec gives back every bit, whatever the two states have to do with each other."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_codecs import CodecError, DeltaCodec, candidate_codecs
from ckpt_codecs.delta import StatePair, StepInfo
from ckpt_codecs.deltas.residuals.choose import decode_residual
from ckpt_codecs.deltas.residuals.exponent_buckets import MANTISSA_BITS
from ckpt_codecs.deltas.residuals.float16 import encode_float16
from ckpt_codecs.deltas.residuals.second_moments import SecondMoments
from ckpt_codecs.deltas.unpredicted import estimate_unpredicted
from ckpt_codecs.registry import delta_from_config, parse_delta
from ckpt_formats.core.tensor import Array
from cpu_levels import LEVELS, at_level
from delta_cases import BF16, DELTAS, F16, F32, OPTIONS, adam, cases, decoded, few_changes, fitted, only
from effort import examples
from held import FLOATS, array, bits

EACH = pytest.mark.parametrize("codec", DELTAS, ids=lambda codec: codec.name)


def comes_back(codec: DeltaCodec, change: StatePair, step: StepInfo) -> None:
    fitted_codec = fitted(codec, change, step)
    back = decoded(fitted_codec, bytes(fitted_codec.encode(change)), change)
    assert list(back) == list(change.after)
    for state, values in change.after.items():
        assert bits(back[state]) == bits(values), state


@st.composite
def changes(draw: st.DrawFn) -> StatePair:
    """States of one shape, those before of other types or missing at times."""
    shape = draw(st.lists(st.integers(0, 40), max_size=3).map(tuple))
    names = draw(st.sets(st.sampled_from(["fp32", "param", "exp_avg", "exp_avg_sq", "momentum_buffer"]), min_size=1))
    before: dict[str, Array] = {}
    after: dict[str, Array] = {}
    for name in sorted(names):
        dtype = draw(st.sampled_from([F32, F32, F32, *FLOATS]))
        after[name] = array(dtype, shape, draw(st.integers(0, 9)))
        if draw(st.integers(0, 4)):
            before[name] = array(dtype, shape, draw(st.integers(0, 9)))
    return StatePair(before, after)


@settings(max_examples=examples(120), deadline=None)
@given(changes(), st.sampled_from(DELTAS), st.none() | st.integers(0, 5), st.none() | st.integers(0, 9))
def test_deltas_return_any_states(change: StatePair, codec: DeltaCodec, before: int | None, after: int | None) -> None:
    comes_back(codec, change, StepInfo(before, after, OPTIONS))


@given(
    st.sampled_from([BF16, F16]),
    st.sampled_from([16, 500, 9000]),
    st.sampled_from([0.0, 1e-3, 0.03, 0.3, 1.0]),
    st.integers(0, 15),
    st.integers(0, 99),
)
def test_halves_come_back_and_are_the_same_bytes_at_every_level(
    dtype: np.dtype[Any], size: int, share: float, octaves: int, seed: int
) -> None:
    """However many change, by steps of whatever size."""
    random = np.random.default_rng(seed)
    before = random.normal(0, 0.02, size).astype(dtype)
    steps = np.exp2(random.uniform(0, octaves, size)).astype(np.int64) * random.choice([-1, 1], size)
    after = before.view(np.uint16) + np.where(random.random(size) < share, steps, 0).astype(np.uint16)
    change = StatePair({"param": before}, {"param": after.view(dtype)})
    parts = set()
    for level in LEVELS:
        with at_level(level):
            parts.add(encode_float16(before.view(np.uint16), after, MANTISSA_BITS[dtype.name]))
    assert len(parts) == 1
    comes_back(DELTAS[0], change, StepInfo())


def test_residuals_of_halves_that_did_not_change_are_one_byte() -> None:
    same = np.arange(100, dtype=np.uint16)
    residuals = encode_float16(same, same.copy(), MANTISSA_BITS["bfloat16"])
    assert residuals == b"\0"
    assert decode_residual(residuals, same, BF16, SecondMoments(lambda: same, lambda: same)).tolist() == same.tolist()


@given(st.data())
def test_replay_is_lossless_for_any_step(data: st.DataObject) -> None:
    """What was fitted may be anything: it costs bytes, never exactness."""
    numbers = st.floats(allow_nan=False, allow_infinity=False)
    fields = ("weight_factor", "step_size", "eps", "beta1", "beta2", "grad_scale", "old_direction", "new_direction")
    fields += ("first_factor",)
    config = {name: data.draw(numbers | st.floats(-1, 1)) for name in fields}
    optimizers = ["adam-torch", "adam-fused", "adam-deepspeed-cpu", "adam-apex", "several-steps"]
    config["optimizer"] = data.draw(st.sampled_from(optimizers))
    config["first_form"], config["second_form"] = (data.draw(st.integers(0, 2)) for _ in range(2))
    if config["beta1"] == 1:
        return
    codec = delta_from_config({"name": "replay", **config})
    change = data.draw(st.sampled_from([adam((9, 80))[0], adam((9, 80), 5)[0]]))
    back = decoded(codec, codec.encode(change), change)
    assert all(bits(back[state]) == bits(values) for state, values in change.after.items())


@pytest.mark.quick(1)
@EACH
@pytest.mark.parametrize("level", ["default", "max"])
def test_deltas_take_no_more_than_the_plain_codec(codec: DeltaCodec, level: str) -> None:
    """But for the directory, and a hundredth where a sample decided."""
    for name, change, step in cases():
        delta = fitted(delta_from_config({"name": codec.name, "level": level}), change, step)
        plain = 0
        for state, values in change.after.items():
            best = candidate_codecs("parameter", state, values.dtype, level)[0]
            base = change.after.get(best.context or "")
            base = base if base is not None and base.shape == values.shape else None
            plain += len(best.encode(values, base)) + 6
        slack = 1.0 if level == "max" and codec.name == "difference" else 1.01
        assert len(delta.encode(change)) <= slack * plain + 1, name


def test_deltas_reach_their_bits_a_parameter() -> None:
    """Bits a parameter, all states together."""

    def cost(change: StatePair, step: StepInfo) -> float:
        codec = fitted(DELTAS[1], change, step)
        return 8 * len(codec.encode(change)) / next(iter(change.after.values())).size

    shape = (1024, 256)
    assert cost(*adam(shape)) < 27
    assert cost(*adam(shape, bf16=True)) < 12.5
    assert cost(*adam(shape, 10)) < 77
    assert cost(*adam(shape, 10, rate=1e-6)) < 65
    change, step = adam(shape)
    assert cost(only(change, "fp32"), step) < 21
    copies = StatePair({"param": change.before["fp32"].astype(BF16)}, {"param": change.after["fp32"].astype(BF16)})
    assert cost(copies, step) < 4.5
    assert cost(*few_changes(0)) < 0.4
    assert cost(StatePair(change.before, change.before), step) < 0.01


# --- names and configurations


@pytest.mark.parametrize(
    "text",
    [
        "difference:level=none",
        "replay:level=7",
        "replay:optimizer=adamw",
        "replay:beta1=1",
        "replay:bias2_root=0",
        "replay:step_size=x",
        "replay:step_size=true",
        "replay:second_form=3",
        "replay:first_form=1.0",
        "replay:weight_factor=NaN",
        "replay:eps=Infinity",
        "replay:eps=1" + "0" * 400,
        "replay:optimizer=[]",
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(CodecError):
        parse_delta(text)


def test_estimate_unpredicted_is_that_of_all_values() -> None:
    values = np.random.default_rng(0).integers(0, 256, 1 << 16, np.uint8)
    assert 0.95 * values.nbytes < estimate_unpredicted(values) < 1.05 * values.nbytes
    assert estimate_unpredicted(values[:0]) == 0
