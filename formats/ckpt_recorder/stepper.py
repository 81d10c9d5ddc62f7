"""The replay of steps by torch's own optimizer, for optimizers that ckpt's own arithmetic does not reproduce.

The entry point `torch` of the group `ckpt.optimizers` provides it; only then does a replay need torch. torch computes
roots with functions of its library, so the bits are exact on a machine like that of the run.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from inspect import signature
from typing import Any, SupportsFloat

import numpy as np
import torch

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.optimizers import WEIGHTS, States, check_steps
from ckpt_formats.core.values import Value

MODULES = ("torch.optim.",)
"""The prefixes of the classes that may be imported because a log names them."""


@dataclass(frozen=True)
class TorchStep:
    """A step of one of torch's element-wise optimizers, which can be applied to parts of a tensor."""

    class_name: str
    options: Mapping[str, Value]
    dtype: str = "float32"
    """The dtype of the values that it steps: the arrays have them as float32."""
    threads: int | None = None
    """The number of threads with which it steps whole tensors; None: it steps parts of a tensor, with one thread."""

    @property
    def states(self) -> tuple[str, ...]:
        """The names of the states that the step changes, the weights first."""
        return (WEIGHTS, *_state_names(self.class_name, _flags(self.options), self.threads is not None))

    def apply(self, states: States, gradients: Array, count: int, vectors: int) -> None:
        """Step in place; see `OptimizerStep.apply`. `states`: each (n,) float32; `gradients`: (n,) float32.

        Whole tensors have their shapes. This step does not use `vectors`.
        """
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(self.threads or 1)  # for this thread: several threads step chunks
            with _codec_errors(self.class_name):
                self._apply(states, gradients, count)
        finally:
            torch.set_num_threads(threads)

    def _apply(self, states: States, gradients: Array, count: int) -> None:
        dtype = getattr(torch, self.dtype)
        weight = torch.nn.Parameter(torch.from_numpy(states[WEIGHTS]).to(dtype))
        optimizer = _construct(self.class_name, [weight], self.options)
        if count > 1:
            tensors = {name: torch.from_numpy(states[name]).to(dtype) for name in self.states if name != WEIGHTS}
            numbers = _numbers(self.class_name, self.options, count - 1)
            optimizer.state[weight] = {"step": _number(count - 1), **numbers, **tensors}
        weight.grad = torch.from_numpy(gradients).to(dtype)
        optimizer.step()
        for name in self.states:
            stepped = weight.detach() if name == WEIGHTS else optimizer.state[weight].get(name)
            if stepped is not None and stepped.data_ptr() != states[name].ctypes.data:
                states[name][:] = stepped.float().numpy()


def step_of(
    class_name: str, options: Mapping[str, Value], dtype: str = "float32", threads: int | None = None
) -> TorchStep:
    """The step of an optimizer class: the entry point. Raises `CodecError` if it cannot step parts of a tensor.

    `dtype`: the name of the dtype of the values. `threads`: as in `TorchStep`.
    """
    step = TorchStep(class_name, dict(options), dtype, threads)
    with _codec_errors(class_name):
        step.states  # noqa: B018  # constructs it
    return step


@contextmanager
def _codec_errors(class_name: str) -> Iterator[None]:
    """Raise a `CodecError` for every exception of torch, since a forged log may name any class and options."""
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
def _state_names(class_name: str, options: tuple[tuple[str, Value], ...], is_whole: bool) -> tuple[str, ...]:
    shape = (3, 3) if is_whole else (3,)  # some optimizers step matrices only
    weight = torch.nn.Parameter(torch.from_numpy(np.ones(shape, np.float32)))
    optimizer = _construct(class_name, [weight], dict(options))
    weight.grad = torch.from_numpy(np.ones(shape, np.float32))
    optimizer.step()
    names = []
    for name, value in optimizer.state[weight].items():
        if isinstance(value, torch.Tensor) and value.shape == weight.shape:
            names.append(name)
        elif name not in ("step", *_NUMBERS.get(class_name, ())) and value is not None:
            raise CodecError(f"{class_name} has the state {name!r}, which is not one number for each element")
    return tuple(names)


def _numbers(class_name: str, options: Mapping[str, Value], count: int) -> dict[str, torch.Tensor]:
    """The states that are one number for a tensor and depend only on the options and the count."""
    if class_name not in _NUMBERS:
        return {}
    check_steps(count)
    products = _mu_products(float(options["betas"][0]), float(options["momentum_decay"]))
    return {"mu_product": _number(products.after(count))}


def _number(value: SupportsFloat) -> torch.Tensor:
    """A state that is one number, whatever the program's default dtype and device are."""
    return torch.tensor(float(value), dtype=torch.float32, device="cpu")


_NUMBERS = {"torch.optim.nadam.NAdam": ("mu_product",)}


class _MuProducts:
    """NAdam's products of momentum factors, in float32 as in torch: the one after every `_BLOCK` steps is kept."""

    def __init__(self, beta1: float, momentum_decay: float) -> None:
        self._beta1, self._momentum_decay = beta1, momentum_decay
        self._ends = [np.float32(1)]

    def after(self, count: int) -> np.float32:
        """The product after `count` steps."""
        blocks, rest = divmod(count, _BLOCK)
        while len(self._ends) <= blocks and self._ends[-1]:
            self._ends.append(self._times(self._ends[-1], (len(self._ends) - 1) * _BLOCK, _BLOCK))
        if blocks >= len(self._ends):  # the product is zero, and stays so
            return self._ends[-1]
        return self._times(self._ends[blocks], blocks * _BLOCK, rest)

    def _times(self, product: np.float32, start: int, steps: int) -> np.float32:
        decays = (0.96 ** (number * self._momentum_decay) for number in range(start + 1, start + steps + 1))
        factors = [product, *(self._beta1 * (1.0 - 0.5 * decay) for decay in decays)]
        return np.float32(np.multiply.accumulate(np.array(factors, np.float32))[-1])


_BLOCK = 1 << 12
_mu_products = lru_cache(64)(_MuProducts)


def _construct(
    class_name: str, parameters: list[torch.nn.Parameter], options: Mapping[str, Value]
) -> torch.optim.Optimizer:
    if not class_name.startswith(MODULES):
        raise CodecError(f"{class_name} is not an optimizer of torch")
    module, _, name = class_name.rpartition(".")
    optimizer_class: Any = getattr(import_module(module), name, None)
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise CodecError(f"torch has no optimizer {class_name}")
    known = signature(optimizer_class).parameters
    arguments = {key: _plain(value) for key, value in options.items() if key in known and key != "params"}
    optimizer: torch.optim.Optimizer = optimizer_class(parameters, **arguments)
    return optimizer


def _plain(value: Value) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return torch.from_numpy(np.asarray(value)) if isinstance(value, np.ndarray) else value
