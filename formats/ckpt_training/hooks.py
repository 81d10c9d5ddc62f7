"""Hooks on modules and optimizers that leave copies and compiled code alone."""

import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer

_OPTIMIZER = optimizer.__file__


class RunHook:
    """A hook on a model or an optimizer. A copy of it is no part of the run: its hooks do nothing."""

    def __init__(self, hook: Callable[..., Any] | None = None, *, is_inner: bool = False) -> None:
        """`hook`: what is called. Compiled steps and forward passes do not trace it.

        `is_inner`: they do not call it either, because that would break their graph.
        """
        self._hook = None if hook is None else torch.compiler.disable(hook)  # type: ignore[no-untyped-call]
        self._is_inner = is_inner

    def __call__(self, *arguments: Any) -> Any:
        if self._hook is None or (self._is_inner and torch.compiler.is_compiling()):
            return None
        return self._hook(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> "RunHook":
        return RunHook()

    def __reduce__(self) -> tuple[type["RunHook"], tuple[()]]:
        return RunHook, ()


class ForwardHooks:
    """Hooks before the forward passes that are no part of another, whether of a model or only of modules inside it.

    All modules have one until a step has shown which of them the loop calls; then these have one, and those that are
    directly in the model, which the loop may call later. Modules inside a compiled one have none.
    """

    def __init__(self, model: Any, hook: Callable[..., Any]) -> None:
        self._outermost = list(_outermost(model))
        self._inner_hook = RunHook(hook, is_inner=True)
        outer = RunHook(hook)
        self._handles = {module: module.register_forward_pre_hook(outer) for module in self._outermost}
        self._parents: dict[nn.Module, nn.Module] = {}
        self._called: set[nn.Module] = set(self._outermost)
        """The modules that the loop calls, as far as that is known."""
        self._is_searching = False
        self.search()

    def search(self) -> None:
        """Find out with the next step which modules the loop calls."""
        if not self._is_searching:
            self._is_searching = True
            self._called.clear()
            for module in self._outermost:
                for parent, inner in _inside(module):
                    self._parents.setdefault(inner, parent)
                    if inner not in self._handles:
                        self._handles[inner] = inner.register_forward_pre_hook(self._inner_hook)

    def called(self, module: nn.Module) -> bool:
        """The forward pass of a module begins. Returns False if it may be a part of another."""
        if not self._is_searching:
            return module in self._called
        self._called.add(module)
        outer = self._parents.get(module)
        while outer is not None and outer not in self._called:
            outer = self._parents.get(outer)
        return outer is None

    def step_done(self) -> None:
        """Leave the hooks only where the loop calls modules, or may do so."""
        if not self._is_searching or not self._called:
            return
        self._is_searching = False
        self._called -= {inner for module in self._called for inner in module.modules() if inner is not module}
        self._called |= set(self._outermost)
        direct = {inner for inner, parent in self._parents.items() if parent in self._outermost}
        for module in self._handles.keys() - self._called - direct:
            self._handles.pop(module).remove()
        self._parents.clear()

    def remove(self) -> None:
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _outermost(model: Any) -> Iterator[nn.Module]:
    """The outermost modules with a forward pass of their own: those in a plain container."""
    if not isinstance(model, nn.Module) or not _can_be_hooked(model):
        return
    if type(model).forward is nn.Module.forward or isinstance(model, (nn.ModuleList, nn.ModuleDict)):
        for child in model.children():
            yield from _outermost(child)
    else:
        yield model


def _inside(module: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """All modules in a module whose forward passes Python runs, each after the one that it is directly in."""
    if not hasattr(module, "_orig_mod"):
        for child in filter(_can_be_hooked, module.children()):
            yield module, child
            yield from _inside(child)


def _can_be_hooked(module: nn.Module) -> bool:
    """Does Python run the module's forward pass? It does not if the module is scripted, or compiled in place."""
    return not isinstance(module, torch.jit.ScriptModule) and getattr(module, "_compiled_call_impl", None) is None


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


class WrappedMethod:
    """A method of an object that is replaced, until it is removed like a hook."""

    def __init__(self, owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """`around`: returns the new method from the one that the object has."""
        self._owner, self._name, self._before = owner, name, vars(owner).get(name)
        self._wrapped = around(getattr(owner, name))
        setattr(owner, name, self._wrapped)

    def remove(self) -> None:
        """Put the method back, unless somebody has wrapped it again since: then the new one has no effect from now."""
        if vars(self._owner).get(self._name) is not self._wrapped:
            return
        if self._before is None:
            delattr(self._owner, self._name)
        else:
            setattr(self._owner, self._name, self._before)


def remove_all(hooks: list[Any]) -> None:
    """Remove hooks of torch and wrapped methods, and empty the list."""
    for hook in hooks:
        hook.remove()
    hooks.clear()
