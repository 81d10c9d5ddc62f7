"""Steps of optimizers against torch's own: no differing bit, whatever the options, the sizes and the pieces."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_codecs import CodecError
from ckpt_codecs.base import Array
from ckpt_codecs.optimizers import (
    DEEPSPEED_VECTOR,
    Adagrad,
    Adam,
    DeepSpeedCpuAdam,
    Lion,
    OptimizerStep,
    Sgd,
    whole_vectors,
)
from engines.lion import Lion as LionOfTorch

SIZES = (1003, 64, 31, 7)
"""With whole vectors alone, with a rest, and with nothing else."""
LARGE = 70_003
"""So many that torch divides them among its threads."""
EVERY_SIZE = (*range(1, 34), 63, 100, 1003)
STEPS = 6


def gradient(random: torch.Generator, size: int) -> torch.Tensor:
    """Of many magnitudes, as those of a real model."""
    return torch.randn(size, generator=random) * 10 ** (torch.rand(size, generator=random) * 6 - 8)


def train(
    optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], step: OptimizerStep, size: int
) -> dict[str, tuple[Array, Array]]:
    """Each state after some steps whose rate grows: torch's, and that of `step`, which steps in pieces."""
    random = torch.Generator().manual_seed(size)
    weights = torch.nn.Parameter(torch.randn(size, generator=random) * 0.02)
    reference = optimizer([weights], **options)
    states = {name: np.full(size, options.get("initial_accumulator_value", 0), np.float32) for name in step.states}
    states["param"][:] = weights.detach().numpy()
    for count in range(1, STEPS + 1):
        weights.grad = gradient(random, size)
        gradients = weights.grad.numpy().copy()
        reference.param_groups[0]["lr"] = rate = options["lr"] * (1 + count / 7)
        reference.step()
        for start, stop in pairwise(sorted({0, size // 3, size - size % 5, size})):
            part = {name: state[start:stop] for name, state in states.items()}
            vectors = whole_vectors(size, start, stop, bool(options.get("fused")))
            replace(step, lr=rate).apply(part, gradients[start:stop], count, vectors)  # type: ignore[type-var]
    expected = {"param": weights.detach(), **reference.state[weights]}
    return {name: (expected[name].numpy(), state) for name, state in states.items()}


def differing(
    optimizer: type[torch.optim.Optimizer], options: Mapping[str, Any], step: OptimizerStep, size: int
) -> int:
    """How many values of all states differ after these steps."""
    return sum(differing_bits(*both) for both in train(optimizer, options, step, size).values())


def differing_bits(a: Array, b: Array) -> int:
    return int(np.count_nonzero(a.view(np.uint32) != b.view(np.uint32)))


ADAMS = {"Adam": (torch.optim.Adam, False), "AdamW": (torch.optim.AdamW, True)}
BETAS = [(0.9, 0.95), (0.9, 0.999), (0.5, 0.9), (0.3, 0.9)]
MOMENTA = [(0.0, 0.0, False), (0.9, 0.0, False), (0.9, 0.1, False), (0.9, 0.0, True)]
IMPLEMENTATIONS = [{"fused": True}, {"foreach": True}, {"foreach": False}]


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", ADAMS)
@pytest.mark.parametrize("betas", BETAS, ids=str)
def test_adam_has_the_bits_of_torchs_fused_kernel(name: str, betas: tuple[float, float]) -> None:
    optimizer, decoupled_weight_decay = ADAMS[name]
    for decay, amsgrad, maximize in product((0.0, 0.1), (False, True), (False, True)):
        options: dict[str, Any] = {"betas": betas, "weight_decay": decay, "amsgrad": amsgrad, "maximize": maximize}
        step = Adam(1e-3, decoupled_weight_decay=decoupled_weight_decay, **options)
        for size in SIZES:
            assert differing(optimizer, {"lr": 1e-3, "fused": True, **options}, step, size) == 0, (options, size)


@pytest.mark.quick(4)
@pytest.mark.parametrize("how", IMPLEMENTATIONS, ids=str)
@pytest.mark.parametrize(("momentum", "dampening", "nesterov"), MOMENTA)
def test_gradient_descent_has_the_bits_of_every_implementation_of_torchs(
    momentum: float, dampening: float, nesterov: bool, how: dict[str, bool]
) -> None:
    for decay, maximize in product((0.0, 0.1), (False, True)):
        options: dict[str, Any] = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        options |= {"weight_decay": decay, "maximize": maximize}
        for size in SIZES:
            given = {"lr": 1e-2, **how, **options}
            assert differing(torch.optim.SGD, given, Sgd(1e-2, **options), size) == 0, (options, size)


@pytest.mark.quick(2)
@pytest.mark.parametrize("lr_decay", [0.0, 0.1])
@pytest.mark.parametrize("initial", [0.0, 0.1])
def test_adagrad_has_the_bits_of_torchs_fused_kernel(lr_decay: float, initial: float) -> None:
    for (decay, eps), maximize in product(((0.0, 1e-10), (0.1, 1e-6)), (False, True)):
        options: dict[str, Any] = {"lr_decay": lr_decay, "weight_decay": decay, "eps": eps, "maximize": maximize}
        for size in SIZES if maximize else EVERY_SIZE:
            given = {"lr": 1e-2, "fused": True, "initial_accumulator_value": initial, **options}
            assert differing(torch.optim.Adagrad, given, Adagrad(1e-2, **options), size) == 0, (options, size)


@pytest.mark.quick(2)
@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.5, 0.3)], ids=str)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_has_the_bits_of_torchs_operations(betas: tuple[float, float], decay: float) -> None:
    options: dict[str, Any] = {"betas": betas, "weight_decay": decay}
    for size in EVERY_SIZE:
        assert differing(LionOfTorch, {"lr": 1e-4, **options}, Lion(1e-4, **options), size) == 0, (options, size)


def test_lion_moves_nothing_whose_direction_is_zero_or_no_number() -> None:
    weights = torch.nn.Parameter(torch.tensor([-0.0, 0.0, 2.0, -0.0, 1.0, -1.0, 3.0] * 3))
    weights.grad = torch.tensor([0.0, -0.0, 0.0, float("nan"), float("nan"), float("inf"), -float("inf")] * 3)
    states = {"param": weights.detach().numpy().copy(), "exp_avg": np.zeros(21, np.float32)}
    LionOfTorch([weights], lr=0.1, betas=(0.9, 0.99), weight_decay=0.0).step()
    Lion(0.1).apply(states, weights.grad.numpy(), 1, 21)
    assert differing_bits(weights.detach().numpy(), states["param"]) == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_large_tensor_has_the_same_bits_whatever_the_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for name, (optimizer, decoupled_weight_decay) in ADAMS.items():
            step = Adam(1e-3, weight_decay=0.1, decoupled_weight_decay=decoupled_weight_decay)
            options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}
            assert differing(optimizer, options, step, LARGE) == 0, name
        for how in IMPLEMENTATIONS:
            options = {"momentum": 0.9, "weight_decay": 0.1}
            assert differing(torch.optim.SGD, {"lr": 1e-2, **how, **options}, Sgd(1e-2, **options), LARGE) == 0, how
        options = {"lr": 1e-2, "weight_decay": 0.1}
        assert differing(torch.optim.Adagrad, {"fused": True, **options}, Adagrad(**options), LARGE) == 0
        options = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}
        assert differing(LionOfTorch, options, Lion(**options), LARGE) == 0
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}], ids=str)
def test_moments_of_adam_are_the_same_without_fusing_and_weights_nearly(how: dict[str, bool]) -> None:
    """torch takes roots by a function of vectors whose last bit is not IEEE 754's on every machine."""
    states = train(torch.optim.AdamW, {"lr": 1e-3, **how}, Adam(1e-3, weight_decay=0.01), 4096)
    assert differing_bits(*states["exp_avg"]) == 0
    expected, weights = states["param"]
    assert np.abs(expected - weights).max() < 1e-7


def test_optimizer_step_refuses_what_is_no_step() -> None:
    states = {name: np.zeros(8, np.float32) for name in Adam(1e-3, amsgrad=True).states}
    gradients = np.ones(8, np.float32)
    for step in (Adam(1e-3), Sgd(1e-3, momentum=0.9), Adagrad(1e-2), Lion(1e-4), DeepSpeedCpuAdam(1e-3)):
        with pytest.raises(CodecError, match="counted from 1"):
            step.apply(states, gradients, 0, 8)
        with pytest.raises(CodecError, match="needs the state"):
            step.apply({"param": states["param"]}, gradients, 1, 8)
    with pytest.raises(CodecError, match="one size"):
        Adam(1e-3).apply(states, gradients[:7], 1, 7)
    with pytest.raises(CodecError, match="do not fit"):
        Adam(1e-3).apply(states, gradients, 1, 9)
    with pytest.raises(CodecError, match="bias correction zero"):
        Adam(1e-3, (1.0, 0.9)).apply(states, gradients, 1, 8)
    with pytest.raises(CodecError, match="bias correction zero"):
        DeepSpeedCpuAdam(1e-3, (1.0, 0.9)).apply(states, gradients, 1, 8)
    for begin in (-1, 3):
        with pytest.raises(CodecError, match="cannot be computed from"):
            DeepSpeedCpuAdam(1e-3, powers_from=begin).apply(states, gradients, 2, 8)
    assert all(not state.any() for state in states.values())


@pytest.mark.parametrize("decoupled", [True, False])
def test_deepspeeds_adam_is_nearly_torchs_and_its_powers_begin_anew(decoupled: bool) -> None:
    """Its bits are those of its operator: `test_stepping_engine.py`."""
    options: dict[str, Any] = {"weight_decay": 0.1}
    optimizer = torch.optim.AdamW if decoupled else torch.optim.Adam
    step = DeepSpeedCpuAdam(1e-3, adamw_mode=decoupled, **options)
    for expected, state in train(optimizer, {"lr": 1e-3, **options}, step, 1003).values():
        np.testing.assert_allclose(state, expected, rtol=1e-4, atol=1e-6)
    ends = []
    for begin in (0, 1, 30):
        states = {name: np.full(3, 0.25, np.float32) for name in step.states} | {"param": np.zeros(3, np.float32)}
        replace(step, powers_from=begin).apply(states, np.ones(3, np.float32), 30, 0)
        ends.append(states["param"].tobytes())
    assert ends[0] == ends[1] != ends[2]


def test_vectors_are_counted_from_the_beginning_of_a_tensor_by_their_width() -> None:
    assert whole_vectors(37, 0, 37, is_fused=True, width=DEEPSPEED_VECTOR) == 32
    assert whole_vectors(37, 30, 37, is_fused=True, width=DEEPSPEED_VECTOR) == 2
    assert whole_vectors(15, 0, 15, is_fused=True, width=DEEPSPEED_VECTOR) == 0
