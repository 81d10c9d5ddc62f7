"""The tensors of a run between two steps: which only an optimizer should change, and which nothing should."""

from collections.abc import Iterator
from operator import is_not
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ckpt_training.composite_tensors import components
from ckpt_training.engines.run import (
    TrackedRun,
    clean_name,
    frozen_tensors,
    is_local,
    modules_of_fsdp2,
    with_extra_states,
)
from ckpt_training.local_shards import is_sharded, local_shard


class WatchedState(NamedTuple):
    """A state of a tracked tensor that only its optimizer should change."""

    number: int
    name: str

    def name_in(self, run: TrackedRun) -> str:
        """The name of the parameter, with that of the state if it is not the weights."""
        parts = run.tensors[self.number].parts
        name = parts[0].name if parts else f"tensor {self.number}"
        return name if self.name == "param" else f"{name}: {self.name}"


class WatchedTensor(NamedTuple):
    """A buffer, or a parameter that no optimizer steps."""

    role: Literal["buffer", "frozen", "extra"]
    """`extra`: one of those of which a frozen parameter consists."""
    name: str


def _structure(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """The identities of all modules, with those of their parameters, and the names of their buffers.

    Modules of FSDP2 have other parameters during a forward pass, so only the names of these count.
    """
    is_fsdp2 = any(True for _ in modules_of_fsdp2(model))
    for module in model.modules():
        buffers = (name for name, buffer in module._buffers.items() if buffer is not None)
        parameters = map(hash, module._parameters) if is_fsdp2 else map(id, module._parameters.values())
        yield id(module), *parameters, *map(hash, buffers)


class WatchedTensors:
    """All tensors of this rank that a step of an optimizer should leave as they are, or that only it should change.

    Modules are searched for them once; replaced buffers and new optimizer states are found at each look.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._states: list[tuple[tuple[Any, ...], dict[WatchedState | WatchedTensor, torch.Tensor]]] = [
            ((), {}) for _ in run.tensors
        ]
        self._buffers = [
            (WatchedTensor("buffer", run.rename(clean_name(f"{prefix}.{name}" if prefix else name))), module, name)
            for prefix, module in run.model.named_modules(remove_duplicate=False)
            for name in module._buffers.keys()  # noqa: SIM118 -- those of scripted modules cannot be iterated over
        ]
        self.with_extra_states = list(with_extra_states(run, "get_extra_state"))
        """The modules that add values of their own to the state dict, by the names of these values."""
        self._shapes = [(one.tensor.shape, one.tensor.dtype) for one in run.tensors]
        self._modules = list(_structure(run.model))
        self.frozen: dict[WatchedState | WatchedTensor, torch.Tensor] = {
            WatchedTensor("frozen" if inner == name else "extra", inner): one
            for name, tensor in frozen_tensors(run)
            if is_local(tensor)
            for inner, one in components(name, tensor)
        }

    @property
    def is_complete(self) -> bool:
        """Has the model the same modules, parameters and buffers as at the start, of the same shapes?"""
        shapes = ((one.tensor.shape, one.tensor.dtype) for one in self._run.tensors)
        return list(_structure(self._run.model)) == self._modules and list(shapes) == self._shapes

    def now(self) -> dict[WatchedState | WatchedTensor, torch.Tensor]:
        """The tensors as they are now."""
        return self.states() | self.others()

    def others(self) -> dict[WatchedState | WatchedTensor, torch.Tensor]:
        """Those that no optimizer steps: buffers and frozen parameters."""
        tensors: dict[WatchedState | WatchedTensor, torch.Tensor] = {}
        for key, module, name in self._buffers:
            tensor = module._buffers[name] if name in module._buffers else None  # noqa: SIM401 -- nor got
            if tensor is not None and name not in module._non_persistent_buffers_set and not is_sharded(tensor):
                tensors[key] = tensor
        return tensors | self.frozen

    def states(self) -> dict[WatchedState | WatchedTensor, torch.Tensor]:
        """The weights and states of the optimizers as they are now."""
        tensors: dict[WatchedState | WatchedTensor, torch.Tensor] = {}
        for number, one in enumerate(self._run.tensors):
            state = self._run.optimizers[one.optimizer].state.get(one.tensor, {})
            values, known = tuple(state.values()), self._states[number]
            if not known[1] or len(values) != len(known[0]) or any(map(is_not, values, known[0])):
                current: dict[WatchedState | WatchedTensor, torch.Tensor] = {}
                current[WatchedState(number, "param")] = local_shard(one.tensor)
                for name, value in state.items():
                    if isinstance(value, torch.Tensor):
                        inner = components(str(name), local_shard(value))
                        current |= {WatchedState(number, of): one for of, one in inner}
                self._states[number] = (values, current)
            tensors |= self._states[number][1]
        return tensors


def is_swapped(model: nn.Module) -> bool:
    """Are other tensors in the place of the parameters, as during `torch.func.functional_call`?"""
    values = (one for module in model.modules() for one in module._parameters.values())
    return any(one is not None and not isinstance(one, nn.Parameter) for one in values)
