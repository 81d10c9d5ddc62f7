"""Models that are built on the meta device: their tensors get memory, and buffers that no checkpoint has get values.

`to_empty` of torch leaves garbage in such buffers, for example in the frequencies of rotary embeddings. A method of the
module or of its model can make them: `_init_weights` of transformers (checked with transformers 5.23, whose
`from_pretrained` itself builds models on the meta device), `reset_parameters` or `init_buffers` of others.
"""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from ckpt_training.engines.run import clean_name

_INITIALIZERS = ("reset_parameters", "_reset_parameters", "reset_buffers", "init_buffers")
"""The methods without arguments that make the values of a module."""
_GARBAGE = (0x55, 0xAA)
"""Two bytes of which no bit is the same: what a method does not write differs after it."""


def on_meta(model: nn.Module) -> bool:
    """Has the model any tensor on the meta device?"""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def materialize(model: nn.Module, device: torch.device) -> list[str]:
    """Give memory to all tensors on the meta device; the names of those that no checkpoint has and nobody has filled.

    Parameters remain the same objects, so that optimizers and ties refer to them as before. Parameters and persistent
    buffers have any values afterwards. A buffer that is not persistent counts as filled if a method of the module or
    of its model has written all of its bits; the names also have tensors that are plain attributes of modules.
    """
    absent = {id(tensor) for tensor in (*model.parameters(), *model.buffers()) if tensor.is_meta}
    unknown = [*_attributes(model)]
    buffers = [
        (prefix, module, [name for name, one in module._buffers.items() if _is_lost(module, name, one)])
        for prefix, module in model.named_modules()
    ]
    owners = {
        id(module): any(id(one) not in absent for one in (*module.parameters(), *_persistent(module)))
        for _, module, names in buffers
        if names
    }
    _give_memory(model, device)
    devices = [device] if device.type not in ("cpu", "meta") else []
    with torch.no_grad(), torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
        for prefix, module, names in buffers:
            initializers = [] if not names or owners[id(module)] else [*_initializers(model, prefix, module)]
            if names and not any(_fills(initialize, module, names) for initialize in initializers):
                unknown += [clean_name(f"{prefix}.{name}" if prefix else name) for name in names]
    return unknown


def _is_lost(module: nn.Module, name: str, buffer: torch.Tensor | None) -> bool:
    """Is it a buffer on the meta device that no checkpoint has?"""
    return buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set


def _persistent(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield buffer


def _attributes(model: nn.Module) -> Iterator[str]:
    """The names of tensors on the meta device that modules have as plain attributes."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor) and value.is_meta:
                yield clean_name(f"{prefix}.{name}" if prefix else name)


def _give_memory(model: nn.Module, device: torch.device) -> None:
    """Allocate all tensors on the meta device; shared ones once."""
    given = dict[int, torch.Tensor]()

    def give(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        return given.setdefault(id(tensor), torch.empty_like(tensor, device=device))

    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters remain the same objects
    try:
        model._apply(give)  # type: ignore[no-untyped-call]
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)


def _initializers(model: nn.Module, prefix: str, module: nn.Module) -> Iterator[Callable[[], Any]]:
    """What may make the buffers of a module: the innermost model of transformers around it, then its own methods."""
    transformers = sys.modules.get("transformers")
    if transformers is not None:
        ends = [len(prefix), *(n for n in range(len(prefix) - 1, -1, -1) if prefix[n] == "."), 0]
        around = (model.get_submodule(prefix[:end]) for end in ends)
        of_transformers = next((one for one in around if isinstance(one, transformers.PreTrainedModel)), None)
        if of_transformers is not None:
            yield partial(of_transformers._init_weights, module)
    for name in _INITIALIZERS:
        method = getattr(module, name, None)
        if callable(method):
            yield method


def _fills(initialize: Callable[[], Any], module: nn.Module, names: list[str]) -> bool:
    """Let a method make buffers, and check that it writes all their bits, whatever they were before."""
    results = []
    for byte in _GARBAGE:
        for name in names:
            _bytes_of(module._buffers[name]).fill_(byte)
        try:
            initialize()
        except Exception:
            return False
        results.append([_bytes_of(module._buffers[name]).clone() for name in names])
    return all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def _bytes_of(buffer: Any) -> torch.Tensor:
    """The memory of a buffer, (bytes,)."""
    return torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer.detach().untyped_storage())
