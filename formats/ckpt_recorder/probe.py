"""Which arithmetic does the user's optimizer have? It steps random tensors, and so does every method that we know.

Libraries round differently, and one library differently by its flags and its machine; so nothing is believed that was
not tried on the machine of the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.stepping import OptimizerStep, whole_vectors
from ckpt_formats.errors import CkptError, Unsupported
from ckpt_formats.gradients.layout import Exactness, LoggedOptimizer
from ckpt_formats.gradients.optimizers import METHODS, step_of
from ckpt_formats.values import Value

SIZES = (1, 7, 8, 31, 65, 1003, 20_011)
"""Elements of the tensors that are tried: around whole SIMD vectors, and more than a thread's share."""
MATRIX = (13, 5)
"""One more, where the optimizer steps matrices: some do otherwise with those."""
STEPS = 5
_MOST_DIFFERENT = 1e-3
"""Of what the steps changed, that a method may differ by to be called approximate, and not another one."""
_RECORDABLE = "Adam, AdamW, SGD and whatever torch steps element by element can be recorded."
_PLAIN = (int, float, bool, str, type(None))


@dataclass(frozen=True)
class Probed:
    """What was found."""

    type: str
    method: str
    exactness: Exactness
    figures: Mapping[str, Value] = field(default_factory=dict)
    is_fused: bool = False
    """Does the method round the last elements of a vector differently?"""


def class_name(optimizer: torch.optim.Optimizer) -> str:
    """The full name of an optimizer's class."""
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"


def group_options(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Value]:
    """The options of a group as plain data: what the optimizer will use in its next step."""
    options: dict[str, Value] = {}
    for name, value in group.items():
        if name == "params":
            continue
        if isinstance(value, torch.Tensor):
            value = value.item()
        if isinstance(value, (tuple, list)):
            value = tuple(one.item() if isinstance(one, torch.Tensor) else one for one in value)
            if not all(isinstance(one, _PLAIN) for one in value):
                continue
        elif not isinstance(value, _PLAIN):
            continue
        options[name] = value
    if "betas" in options and "decoupled_weight_decay" not in options:  # torch before 2.7
        options["decoupled_weight_decay"] = type(optimizer).__name__ == "AdamW"
    return options


def probe(optimizer: torch.optim.Optimizer, device: torch.device) -> Probed:
    """How the optimizer's steps can be done again. Raises `Unsupported` if they cannot."""
    name = class_name(optimizer)
    truth = _trial(optimizer, device)
    best: tuple[float, Probed] | None = None
    for method in (*METHODS, "torch"):
        differing = _differing(LoggedOptimizer(name, method, "exact", {}, ()), truth)
        if differing is None:
            continue
        fraction, figures = differing
        if figures["relative"] > _MOST_DIFFERENT:
            continue
        if not fraction:
            sizes = (weight.size for weight in truth.weights)
            is_fused = method != "torch" and any(whole != size for size, whole in zip(sizes, truth.whole, strict=True))
            exactness: Exactness = "same library" if method == "torch" else "exact"
            return Probed(name, method, exactness, {"values": sum(SIZES) * STEPS}, is_fused)
        if best is None or fraction < best[0]:
            best = fraction, Probed(name, method, "approximate", figures, truth.is_fused)
    if best is None:
        raise Unsupported(
            f"{name} cannot be recorded: ckpt has no arithmetic for it, and torch cannot step it in pieces",
            hint=_RECORDABLE,
        )
    return best[1]


@dataclass(frozen=True)
class _Trial:
    """What the user's optimizer did to random tensors."""

    weights: tuple[Array, ...]
    gradients: tuple[tuple[Array, ...], ...]
    """By step and tensor."""
    options: tuple[dict[str, Value], ...]
    states: tuple[tuple[dict[str, Array], ...], ...]
    is_fused: bool

    @property
    def whole(self) -> tuple[int, ...]:
        return tuple(whole_vectors(one.size, 0, one.size, is_fused=self.is_fused) for one in self.weights)


def _trial(optimizer: torch.optim.Optimizer, device: torch.device) -> _Trial:
    generator = torch.Generator().manual_seed(5)
    group = optimizer.param_groups[0]
    known = signature(type(optimizer)).parameters
    shapes = [(size,) for size in SIZES]
    if any(parameter.dim() > 1 for one in optimizer.param_groups for parameter in one["params"]):
        shapes.append(MATRIX)
    weights = [torch.randn(shape, generator=generator) * 0.02 for shape in shapes]
    parameters = [torch.nn.Parameter(weight.clone().to(device)) for weight in weights]
    given = {key: value for key, value in group.items() if key in known and key != "params"}
    try:
        # `type(optimizer)` may have been wrapped by a library; the class is what steps.
        again: torch.optim.Optimizer = type(optimizer)(parameters, **given)
        gradients, options, states = [], [], []
        for step in range(STEPS):
            scale = 10 ** (torch.rand(max(SIZES), generator=generator) * 4 - 6)
            given_now = [torch.randn(one.shape, generator=generator) for one in weights]
            given_now = [one * scale[: one.numel()].reshape(one.shape) for one in given_now]
            for one in again.param_groups:
                lr = one["lr"]
                one["lr"] = type(lr)(lr * (1 + step / 7)) if isinstance(lr, float) else lr
            options.append(group_options(again, again.param_groups[0]))
            for parameter, gradient in zip(parameters, given_now, strict=True):
                parameter.grad = gradient.to(device)
            again.step()
            gradients.append(tuple(gradient.numpy().reshape(-1) for gradient in given_now))
            states.append(tuple(_states_of(again, parameter) for parameter in parameters))
    except (TypeError, ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        raise Unsupported(
            f"{class_name(optimizer)} cannot be recorded: another one of it, tried on random tensors, says: {error}",
            hint=_RECORDABLE,
        ) from None
    is_fused = bool(group.get("fused")) or not class_name(optimizer).startswith("torch.")
    return _Trial(
        tuple(weight.numpy().reshape(-1) for weight in weights),
        tuple(gradients),
        tuple(options),
        tuple(states),
        is_fused,
    )


def _states_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> dict[str, Array]:
    states = {"param": parameter.detach().cpu().numpy().reshape(-1).copy()}
    for name, value in optimizer.state[parameter].items():
        if name == "step" or value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            raise TypeError(f"{name!r} is not one number for each element")
        states[name] = value.detach().cpu().numpy().reshape(-1).copy()
    return states


def _differing(optimizer: LoggedOptimizer, truth: _Trial) -> tuple[float, dict[str, Value]] | None:
    """The part of values that differ, and figures of it; None if the method is for another optimizer."""
    total = differing = 0
    worst = error = change = 0.0
    try:
        steps: list[OptimizerStep] = [step_of(optimizer, options, Path()) for options in truth.options]
        names = set(steps[0].states)
        if any(set(states) != names for states in truth.states[0]):
            return None
        for number, weight in enumerate(truth.weights):
            mine = {name: np.zeros_like(weight) for name in names} | {"param": weight.copy()}
            whole = truth.whole[number]
            for index, step in enumerate(steps):
                # In two pieces, since replay cuts tensors too.
                middle = weight.size // 3
                for low, high in ((0, middle), (middle, weight.size)):
                    if low < high:
                        part = {name: array[low:high] for name, array in mine.items()}
                        gradients = truth.gradients[index][number][low:high]
                        step.apply(part, gradients, index + 1, min(max(whole - low, 0), high - low))
            for name, expected in truth.states[-1][number].items():
                unequal = mine[name].view(np.uint32) != expected.view(np.uint32)
                differing, total = differing + int(unequal.sum()), total + unequal.size
                worst = max(worst, float(np.abs(mine[name] - expected).max(initial=0)))
            after = truth.states[-1][number]["param"]
            error += float(np.square(mine["param"] - after, dtype=np.float64).sum())
            change += float(np.square(weight - after, dtype=np.float64).sum())
    except (CkptError, CodecError, KeyError, TypeError, ValueError):
        return None
    fraction, relative = differing / max(total, 1), (error / change) ** 0.5 if change else 0.0
    return fraction, {"differing": fraction, "max_abs": worst, "relative": relative, "steps": STEPS}
