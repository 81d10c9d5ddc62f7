"""The kernels of optimizers' steps against their twins in NumPy, at every level that this CPU runs."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle.stepping
from ckpt_codecs import CodecError
from ckpt_codecs.base import Array
from ckpt_codecs.native import stepping
from kernel_trials import Engine, Trial, Trials

TRIALS = Trials(stepping, oracle.stepping)
PROTOTYPES, KERNELS = TRIALS.prototypes, TRIALS.kernels


def values(random: np.random.Generator, n: int) -> Array:
    """Ordinary numbers, or any bits: denormals, infinities and NaNs among them."""
    if random.random() < 0.5:
        return (random.normal(0, 1, n) * 10 ** random.uniform(-8, 0, n)).astype(np.float32)
    return random.integers(0, 1 << 32, n, np.uint32).view(np.float32)


def number(random: np.random.Generator) -> float:
    return float(random.choice([0.0, 1.0, 0.1, 0.5, 0.9, 1e-3, random.random()]))


def steps(name: str, states: int, optional: int, numbers: int, has_vectors: bool = True) -> None:
    """Register a step: so many states, of which the last ones may be missing, a gradient, and so many numbers."""

    @TRIALS.of(name)
    def make(random: np.random.Generator, n: int) -> Trial:
        arrays: list[Array | None] = [values(random, n) for _ in range(states)]
        for i in range(states - optional, states):
            arrays[i] = None if random.random() < 0.3 else arrays[i]
        gradients = values(random, n)
        vectors = [int(random.integers(0, n + 1))] if has_vectors else []
        others = [float(random.choice([1.0, -1.0])), *(number(random) for _ in range(numbers))]
        if name == "step_sgd":
            others[-1:-1] = [bool(random.random() < 0.3), bool(random.random() < 0.5)]
        if name == "step_adam_deepspeed":
            others[0] = stepping.Decaying(int(random.integers(0, 3)))

        def run(engine: Engine) -> Any:
            own = [None if array is None else array.copy() for array in arrays]
            getattr(engine, name)(*own, gradients, *vectors, *others)
            return [array for array in own if array is not None]

        return run


steps("step_adam", 4, 1, 8)
steps("step_sgd", 2, 1, 4)
steps("step_adam_deepspeed", 3, 0, 8)
steps("step_adagrad", 2, 0, 3, has_vectors=False)
steps("step_lion", 2, 0, 3, has_vectors=False)


def test_no_kernel_of_the_header_is_forgotten() -> None:
    assert list(TRIALS) == KERNELS == list(stepping.SIGNATURES)


@pytest.mark.parametrize("name", KERNELS)
@given(st.integers(0, 1 << 32), st.integers(0, 100))
def test_stepping_kernel_does_what_its_twin_does(name: str, seed: int, n: int) -> None:
    TRIALS.agree(name, seed, n)


@pytest.mark.parametrize("name", KERNELS)
def test_stepping_kernel_does_what_its_twin_does_with_a_large_chunk(name: str) -> None:
    for seed in range(4):
        TRIALS.agree(name, seed, (1 << 16) + 3)


@pytest.mark.parametrize("name", KERNELS)
def test_stepping_kernels_refuse_sizes_that_do_not_fit(name: str) -> None:
    TRIALS.refuse_bad_sizes(name)


def test_arrays_of_other_sizes_are_refused() -> None:
    eight, seven = np.zeros(8, np.float32), np.zeros(7, np.float32)
    for states in ([eight, eight, seven], [eight, seven, eight], [seven, eight, eight]):
        with pytest.raises(CodecError, match="one size"):
            stepping.step_adam(*states, None, eight, 8, *[1.0] * 9)
        with pytest.raises(CodecError, match="one size"):
            stepping.step_adam_deepspeed(*states, eight, 8, stepping.Decaying.NOTHING, *[1.0] * 8)
        for step in (stepping.step_adagrad, stepping.step_lion):
            with pytest.raises(CodecError, match="one size"):
                step(*states, *[1.0] * 4)
    with pytest.raises(CodecError, match="one size"):
        stepping.step_sgd(eight, seven, eight, 8, 1, 0, 0.9, 1, False, False, 0.1)
    with pytest.raises(CodecError, match="a kernel needs"):
        stepping.step_sgd(eight, None, eight.astype(np.float64), 8, 1, 0, 0.9, 1, False, False, 0.1)
