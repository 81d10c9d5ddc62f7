"""Hooks on modules and optimizers that leave copies and compiled code alone."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer

_OPTIMIZER = optimizer.__file__


class RecorderHook:
    """A hook of a recorder. A copy of the model or of the optimizer is not recorded: its hooks do nothing."""

    def __init__(self, hook: Callable[..., Any] | None = None) -> None:
        """`hook`: a method of the recorder. Compiled steps and forward passes do not trace it."""
        self._hook = None if hook is None else torch.compiler.disable(hook)  # type: ignore[no-untyped-call]

    def __call__(self, *arguments: Any) -> Any:
        return None if self._hook is None else self._hook(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RecorderHook":
        return RecorderHook()

    def __reduce__(self) -> tuple[type["RecorderHook"], tuple[()]]:
        return RecorderHook, ()


def callable_modules(model: Any) -> Iterator[nn.Module]:
    """The outermost modules with a forward pass of their own: those in a plain container."""
    if not isinstance(model, nn.Module) or getattr(model, "_compiled_call_impl", None) is not None:
        return
    if type(model).forward is nn.Module.forward or isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        for child in model.children():
            yield from callable_modules(child)
    else:
        yield model


def step_frame() -> FrameType | None:
    """The innermost frame in which torch calls the hooks of an optimizer's `step`; None in a compiled step."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (frame.f_code.co_name == "wrapper" and frame.f_code.co_filename == _OPTIMIZER):
        frame = frame.f_back
    return frame


def is_running(frame: FrameType | None) -> bool:
    """Is a frame among those that called this function?"""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
