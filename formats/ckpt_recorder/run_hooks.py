"""The hooks by which a run calls its recorder: of its optimizers, of its model, and of the step of its engine."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt_training.engines.run import TrackedRun
from ckpt_training.hooks import ForwardHooks, RunHook, WrappedMethod, remove_all

_Call = Callable[..., Any]


@dataclass(frozen=True)
class RunCalls:
    """What a run calls, with the arguments of torch's hooks."""

    before_step: _Call
    """Before an optimizer of the run steps; the result replaces the arguments of its step, unless it is None."""
    after_step: _Call
    before_any_step: _Call
    """A method, before any optimizer of the process steps: one that has taken the place of another has no hooks."""
    before_forward: _Call
    """Before the forward pass of a module in the model."""
    around_engine_step: Callable[[_Call], _Call]
    """Returns what replaces the step method of the engine, which it is given."""


class RunHooks:
    """The hooks in a run. They are removed together."""

    def __init__(self, model: Any, run: TrackedRun, calls: RunCalls) -> None:
        before, after = RunHook(calls.before_step), RunHook(calls.after_step)
        handles: list[Any] = [one.register_step_pre_hook(before) for one in run.optimizers]
        handles += [one.register_step_post_hook(after) for one in run.optimizers]
        self.forward = ForwardHooks(model, calls.before_forward)
        handles.append(self.forward)
        if run.groups is None:
            method = weakref.WeakMethod(calls.before_any_step)  # the hook lives as long as the process

            def before_any_step(*arguments: Any) -> None:
                if (hook := method()) is not None:
                    hook(*arguments)

            handles.append(register_optimizer_step_pre_hook(before_any_step))
        if run.after_step is not None:
            handles.append(WrappedMethod(*run.after_step, calls.around_engine_step))
        self._handles = handles

    def remove(self) -> None:
        """Remove all hooks. The run no longer calls its recorder."""
        remove_all(self._handles)
