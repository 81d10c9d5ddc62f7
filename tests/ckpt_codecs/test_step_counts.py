"""Counts of steps come from files: they bound neither memory nor time, and the factors have the bits of a loop."""

import tracemalloc

import numpy as np
import pytest

from ckpt_codecs.errors import CodecError
from ckpt_codecs.optimizers import MAX_COUNT, DeepSpeedCpuAdam, OptimizerStep, Sgd, States
from ckpt_codecs.optimizers.deepspeed_cpu_adam import rounded_power

MOST_MEMORY = 4 << 20


def _states() -> States:
    return {name: np.ones(4, np.float32) for name in ("param", "exp_avg", "exp_avg_sq")}


def _powers(beta: float, count: int) -> np.float32:
    """The product, step by step."""
    factors = np.full(count + 1, beta, np.float32)
    factors[0] = 1
    return np.float32(np.multiply.accumulate(factors)[-1])


@pytest.mark.parametrize("beta", [0.9, 0.999, 0.99999988, 0.0])
@pytest.mark.parametrize("count", [1, 2, 1000, (1 << 14) - 1, 1 << 14, (1 << 14) + 1, 200_000])
def test_powers_of_deepspeed_are_those_of_a_loop(beta: float, count: int) -> None:
    beta = float(np.float32(beta))
    assert rounded_power(beta, count, 0).tobytes() == _powers(beta, count).tobytes()


@pytest.mark.parametrize("count", [MAX_COUNT, 1 << 53])
@pytest.mark.parametrize("beta", [0.9, 0.99999988])
def test_deepspeed_steps_of_a_forged_count_take_no_memory(count: int, beta: float) -> None:
    step = DeepSpeedCpuAdam(lr=0.1, betas=(beta, beta))
    tracemalloc.start()
    try:
        if count > MAX_COUNT:
            with pytest.raises(CodecError, match=f"{count:,} steps are more than"):
                step.apply(_states(), np.ones(4, np.float32), count, 4)
        else:
            step.apply(_states(), np.ones(4, np.float32), count, 4)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def test_deepspeed_steps_after_loading_are_taken_at_any_count() -> None:
    states = _states()
    DeepSpeedCpuAdam(lr=0.1, powers_from=(1 << 53) - 9).apply(states, np.ones(4, np.float32), 1 << 53, 4)
    assert np.isfinite(states["param"]).all()


def test_steps_without_such_factors_have_any_count() -> None:
    states = {"param": np.ones(4, np.float32), "momentum_buffer": np.zeros(4, np.float32)}
    step: OptimizerStep = Sgd(0.1, 0.9, 0.0, 0.0, False)
    step.apply(states, np.ones(4, np.float32), 1 << 53, 4)
    assert np.isfinite(states["param"]).all()
