"""Tensors that consist of others, such as the quantised states of torchao: codes, scales and a table."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.values import Global

SEPARATOR = "/"
"""It separates the name of a tensor from that of one of which it consists; no name of a module has it."""
_CLASS = "tensor_class"
_MODULES = ("torchao.",)
"""The packages whose classes `from_value` imports because a file names them."""


def is_composite(tensor: torch.Tensor) -> bool:
    """Does a tensor consist of others, and is it no DTensor, whose one part is a shard?"""
    return is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "placements")


def components(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of which a tensor consists, each with its name; the tensor itself if it consists of no others."""
    if not is_composite(tensor):
        yield name, tensor
        return
    for inner in tensor.__tensor_flatten__()[0]:  # type: ignore[attr-defined]
        yield from components(f"{name}{SEPARATOR}{inner}", getattr(tensor, inner))


def as_value(tensor: torch.Tensor) -> dict[str, Any]:
    """A composite tensor as a value with its tensors, from which `from_value` makes it again."""
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    return {
        _CLASS: f"{type(tensor).__module__}.{type(tensor).__qualname__}",
        "context": _plain(context),
        "size": list(tensor.shape),
        "stride": list(tensor.stride()),
        "tensors": {name: getattr(tensor, name) for name in names},
    }


def is_value(value: Any) -> bool:
    """Is it a value of `as_value`?"""
    return isinstance(value, Mapping) and _CLASS in value


def from_value(value: Any) -> Any:
    """The inverse of `as_value`; any other value as it is. Raises `UnsupportedError` if the class is unknown."""
    if not is_value(value):
        return value
    module, _, name = str(value[_CLASS]).rpartition(".")
    if not f"{module}.".startswith(_MODULES):
        raise UnsupportedError(f"a state is a tensor of the class {value[_CLASS]!r:.100}, which is not of torchao")
    try:
        make = getattr(import_module(module), name).__tensor_unflatten__
        inner = {key: from_value(one) for key, one in value["tensors"].items()}
        return make(inner, value["context"], torch.Size(value["size"]), tuple(value["stride"]))
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedError(
            f"a state cannot become a tensor of the class {value[_CLASS]!r:.100}: {error!r:.200}",
            hint="Install the version of torchao that the run had.",
        ) from None


def _plain(context: Any) -> Any:
    if isinstance(context, torch.dtype):
        return Global("torch", str(context).removeprefix("torch."))
    if isinstance(context, Mapping):
        return {key: _plain(one) for key, one in context.items()}
    if isinstance(context, (list, tuple)):
        return [_plain(one) for one in context]
    if context is None or isinstance(context, (bool, int, float, str)):
        return context
    raise UnsupportedError(f"a tensor has a {type(context).__qualname__}: such tensors cannot be recorded")
