"""Steps done again by the optimizer itself: for whatever torch can step and ckpt's own arithmetic does not meet.

An entry point (`ckpt.optimizers`, named `torch`) offers it to whoever replays a log; only then is torch needed. torch
rounds roots by its library's functions, so the bits are those of the run on a machine like the run's.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

import numpy as np
import torch

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.optimizers import WEIGHTS, States
from ckpt_formats.core.values import Value

MODULES = ("torch.optim.",)
"""Whose classes may be imported because a log names them."""


@dataclass(frozen=True)
class TorchStep:
    """A step of one of torch's optimizers, element by element alike, so that it may be done in pieces."""

    class_name: str
    options: Mapping[str, Value]

    @property
    def states(self) -> tuple[str, ...]:
        return (WEIGHTS, *_state_names(self.class_name, _flags(self.options)))

    def apply(self, states: States, gradients: Array, count: int, vectors: int) -> None:
        """Step in place; see `OptimizerStep.apply`. `vectors` is of no use to it."""
        with _refused(self.class_name):
            self._apply(states, gradients, count)

    def _apply(self, states: States, gradients: Array, count: int) -> None:
        torch.set_num_threads(1)  # of this thread: chunks are stepped by several
        weight = torch.nn.Parameter(torch.from_numpy(states[WEIGHTS]))
        optimizer = _construct(self.class_name, [weight], self.options)
        if count > 1:
            tensors = {name: torch.from_numpy(states[name]) for name in self.states if name != WEIGHTS}
            numbers = _numbers(self.class_name, self.options, count - 1)
            optimizer.state[weight] = {"step": torch.tensor(float(count - 1)), **numbers, **tensors}
        weight.grad = torch.from_numpy(gradients)
        optimizer.step()
        for name in self.states:
            stepped = weight.detach() if name == WEIGHTS else optimizer.state[weight].get(name)
            if stepped is not None and stepped.data_ptr() != states[name].ctypes.data:
                states[name][:] = stepped.numpy()


def step_of(class_name: str, options: Mapping[str, Value]) -> TorchStep:
    """What the entry point is. Raises `CodecError` for an optimizer that cannot be stepped in pieces."""
    step = TorchStep(class_name, dict(options))
    with _refused(class_name):
        step.states  # noqa: B018  # constructs it
    return step


@contextmanager
def _refused(class_name: str) -> Iterator[None]:
    """Whatever torch raises for a class or for options that a forged log names is a `CodecError`."""
    try:
        yield
    except CodecError:
        raise
    except Exception as error:
        raise CodecError(f"torch cannot step {class_name!r:.100}: {error!r:.200}") from None


def _flags(options: Mapping[str, Value]) -> tuple[tuple[str, Value], ...]:
    """The options on which the names of states may depend."""
    return tuple(sorted((k, v) for k, v in options.items() if isinstance(v, (bool, int, float, type(None)))))


@cache
def _state_names(class_name: str, options: tuple[tuple[str, Value], ...]) -> tuple[str, ...]:
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = _construct(class_name, [weight], dict(options))
    weight.grad = torch.ones(3)
    optimizer.step()
    names = []
    for name, value in optimizer.state[weight].items():
        if isinstance(value, torch.Tensor) and value.shape == weight.shape:
            names.append(name)
        elif name not in ("step", *_NUMBERS.get(class_name, ())) and value is not None:
            raise CodecError(f"{class_name} keeps {name!r}, which is not one number for each element")
    return tuple(names)


def _numbers(class_name: str, options: Mapping[str, Value], count: int) -> dict[str, torch.Tensor]:
    """States that are one number for a tensor, and follow from the options and the count alone."""
    if class_name not in _NUMBERS:
        return {}
    products = _MU_PRODUCTS.setdefault((options["betas"][0], options["momentum_decay"]), [torch.tensor(1.0)])
    while len(products) <= count:
        decay = 0.96 ** (len(products) * options["momentum_decay"])
        products.append(products[-1] * (options["betas"][0] * (1.0 - 0.5 * decay)))
    return {"mu_product": products[count].clone()}


_NUMBERS = {"torch.optim.nadam.NAdam": ("mu_product",)}
_MU_PRODUCTS: dict[tuple[float, float], list[torch.Tensor]] = {}
"""By beta1 and momentum decay: NAdam's products of momentum factors, by count, in float32 as torch has them."""


def _construct(
    class_name: str, parameters: list[torch.nn.Parameter], options: Mapping[str, Value]
) -> torch.optim.Optimizer:
    if not class_name.startswith(MODULES):
        raise CodecError(f"{class_name} is no optimizer of torch")
    module, _, name = class_name.rpartition(".")
    optimizer_class: Any = getattr(import_module(module), name, None)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise CodecError(f"torch has no optimizer {class_name}")
    known = signature(optimizer_class).parameters
    given = {key: _plain(value) for key, value in options.items() if key in known and key != "params"}
    optimizer: torch.optim.Optimizer = optimizer_class(parameters, **given)
    return optimizer


def _plain(value: Value) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return torch.from_numpy(np.asarray(value)) if isinstance(value, np.ndarray) else value
