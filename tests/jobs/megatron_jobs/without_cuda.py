"""What Megatron core takes from CUDA, answered by the CPU.

Megatron's own code runs as it is. It asks for the current device and puts its buffers there, and tells
low-precision parameters by the names of CUDA's tensor types: both are answered as a machine with GPUs would.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_TYPES = {f"torch.{name}Tensor": f"torch.cuda.{name}Tensor" for name in ("Float", "Half", "BFloat16")}


def _here(device: Any) -> Any:
    return CPU if str(device).startswith("cuda") else device


class OnCpu(TorchFunctionMode):
    """Puts on the CPU what is asked for on a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _here(kwargs["device"])
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = (args[0], *map(_here, args[1:]))
        result = func(*args, **kwargs)
        return _TYPES.get(result, result) if func is torch.Tensor.type and len(args) == 1 and not kwargs else result


def pretend() -> None:
    """From now on, and in processes that are forked."""
    torch.cuda.current_device = lambda: CPU  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda *_: None  # type: ignore[assignment]
    OnCpu().__enter__()
