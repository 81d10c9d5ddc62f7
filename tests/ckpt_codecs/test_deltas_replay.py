"""Steps of real optimizers: what follows from the arithmetic is not stored, whichever kernel did it."""

import copy
from typing import Any

import numpy as np
import pytest

from ckpt_codecs.delta import StatePair, StepInfo
from ckpt_codecs.registry import delta_from_config
from ckpt_formats.core.tensor import Array
from delta_cases import decoded, fitted
from held import bits

torch = pytest.importorskip("torch")
REPLAY = delta_from_config({"name": "replay"})
SHAPE = (256, 120)


def states(weights: Any, optimizer: Any) -> dict[str, Array]:
    states = {name: value for name, value in optimizer.state[weights].items() if name != "step"}
    return {"fp32": weights.detach().numpy().copy(), **{n: v.numpy().copy() for n, v in states.items()}}


def stepped(kind: Any, steps: int = 1, bf16: bool = False, **options: Any) -> tuple[StatePair, StepInfo]:
    """A run of a dozen steps: the state before the last ones, and after."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(SHAPE) * 0.02)
    optimizer, scale = kind([weights], **options), torch.randn(SHAPE).exp() * 1e-3
    before: dict[str, Array] = {}
    for t in range(12):
        if t == 12 - steps:
            before = states(weights, optimizer)
        g = scale * torch.randn(SHAPE)
        weights.grad = g.bfloat16().float() * 0.4321 if bf16 else g
        optimizer.step()
    group = {n: v for n, v in optimizer.param_groups[0].items() if isinstance(v, int | float | tuple | bool)}
    return StatePair(before, states(weights, optimizer)), StepInfo(12 - steps, 12, copy.deepcopy(group))


def cost(change: StatePair, step: StepInfo) -> dict[str, float]:
    """Bits of each value of each state, which all come back."""
    codec = fitted(REPLAY, change, step)
    data = codec.encode(change)
    back = decoded(codec, data, change)
    assert all(bits(back[name]) == bits(values) for name, values in change.after.items())
    names = sorted(change.after)
    sizes = np.frombuffer(data[1 : 1 + 4 * len(names)], np.uint32)
    return {name: 8 * int(size) / change.after[name].size for name, size in zip(names, sizes, strict=True)}


@pytest.mark.parametrize("kernel", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_replay_predicts_weights_from_moments(kind: str, decay: float, kernel: dict[str, Any]) -> None:
    """But for the roots that a library takes on some processors, which are not always rounded as IEEE 754 has it."""
    actual = cost(*stepped(getattr(torch.optim, kind), lr=1e-3, betas=(0.9, 0.95), weight_decay=decay, **kernel))
    assert actual["fp32"] < (0.01 if "fused" in kernel else 0.5)
    assert actual["exp_avg_sq"] < 1
    assert actual["exp_avg"] < 26.5


@pytest.mark.parametrize("kind", ["Adam", "AdamW"])
def test_replay_stores_bfloat16_gradients_alone(kind: str) -> None:
    actual = cost(*stepped(getattr(torch.optim, kind), bf16=True, lr=1e-3, weight_decay=0.0))
    assert actual["fp32"] < 0.25
    assert actual["exp_avg_sq"] < 0.1
    assert actual["exp_avg"] < 12


def test_replay_predicts_amsgrad() -> None:
    actual = cost(*stepped(torch.optim.AdamW, lr=1e-3, amsgrad=True))
    assert actual["fp32"] < 0.25
    assert actual["max_exp_avg_sq"] < 0.1


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.01}, {"nesterov": True}, {"dampening": 0.5}], ids=str)
def test_replay_predicts_weights_from_momentum(options: dict[str, Any]) -> None:
    actual = cost(*stepped(torch.optim.SGD, lr=0.05, momentum=0.9, **options))
    assert actual["fp32"] < (2 if "nesterov" in options else 0.25)


@pytest.mark.parametrize("wrong", [{}, {"lr": 3e-3}, {"lr": 1e-3, "betas": (0.5, 0.7), "weight_decay": 9.0}], ids=str)
@pytest.mark.parametrize("rate", [1e-3, 3e-6])
def test_numbers_that_are_absent_or_wrong_are_found_in_the_values(rate: float, wrong: dict[str, Any]) -> None:
    change, _ = stepped(torch.optim.AdamW, lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    actual = cost(change, StepInfo(11, 12, wrong))
    assert actual["fp32"] < 0.5
    assert actual["exp_avg_sq"] < 0.7
    actual = cost(change, StepInfo(None, None, wrong))
    assert actual["fp32"] < 4  # the correction of the bias, and so the share of eps, cannot be known
    assert actual["exp_avg_sq"] < 0.7


def test_several_steps_cost_no_more_than_the_plain_codec() -> None:
    one, ten = (sum(cost(*stepped(torch.optim.AdamW, steps, lr=1e-3)).values()) for steps in (1, 10))
    assert one < 30
    assert ten < 78


def test_a_step_with_maximize_is_a_step() -> None:
    actual = cost(*stepped(torch.optim.AdamW, lr=1e-3, maximize=True))
    assert actual["fp32"] < 0.25
    assert actual["exp_avg_sq"] < 0.7
