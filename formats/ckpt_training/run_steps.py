"""The steps of a run as they are done: after each, the model has the new weights, whichever engine makes them."""

from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from ckpt_training import ranks
from ckpt_training.engines import megatron
from ckpt_training.engines.run import TrackedRun
from ckpt_training.hooks import RunHook, WrappedMethod, is_running, remove_all, step_frame
from ckpt_training.resumed_steps import last_step, step_counts


class RunSteps:
    """Counts the steps of a run. A step is done once all optimizers have stepped.

    Micro-batches are no steps, and neither is a step that a gradient scaler skips. Where the engine counts steps itself
    (DeepSpeed), the number is the engine's, which counts skipped ones.

    Attributes:
        step: The number of the last step.
    """

    def __init__(
        self,
        run: TrackedRun,
        model: Any,
        optimizer: Any,
        step: int | None,
        before: Callable[[], None],
        done: Callable[[int], None],
    ) -> None:
        """Begin to count. Every rank must do so.

        Args:
            run: The run.
            model: The model, as the user has it.
            optimizer: The optimizer, or a list of them, as the user has it.
            step: The number of the last step; None: the count of the engine or of the optimizer.
            before: Called before an optimizer changes weights.
            done: Called with the number of each step, after it.
        """
        counts = [last_step(run)] if len(run.optimizers) < 2 or run.step is not None else step_counts(run)
        every = ranks.gather(counts)
        self.step = min(map(max, zip(*every, strict=True))) if step is None else step
        self._run, self._before, self._done = run, before, done
        self._begin = self.step - (0 if run.counted is None else run.counted())
        self._called = set[int]()
        """The optimizers that have stepped since the last step."""
        self._frames: dict[int, FrameType | None] = {}
        """By optimizer, the frame of the outermost `step` that runs now."""
        optimizers = _outer_optimizers(run, optimizer)
        self._count = len(optimizers)
        hooks = [RunHook(self._before_step), RunHook(self._after_step)]
        self._hooks: list[Any] = [one.register_step_pre_hook(hooks[0]) for one in optimizers]
        self._hooks += [one.register_step_post_hook(hooks[1]) for one in optimizers]
        self._optimizers = optimizers
        call = run.after_step
        if call is None and optimizer is not None and megatron.is_megatron(model, optimizer):
            call = optimizer, "step"  # the model's weights are made of the masters, and gathered
        self._is_wrapped = call is not None
        if call is not None:
            self._hooks.append(WrappedMethod(*call, self._around))

    def remove(self) -> None:
        """Count no more."""
        remove_all(self._hooks)

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> None:
        frame = self._frames.get(id(optimizer))
        if frame is None or not is_running(frame):  # else, the `step` of a subclass calls that of its base
            self._frames[id(optimizer)] = step_frame()
        self._before()

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> None:
        frame = self._frames.get(id(optimizer))
        if frame is not None and frame is not step_frame():
            return  # the `step` of a subclass goes on after that of its base
        self._frames.pop(id(optimizer), None)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf.item()):
            return
        self._called.add(id(optimizer))
        if not self._is_wrapped and len(self._called) == self._count:
            self._end()

    def _around(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **named: Any) -> Any:
            result = method(*arguments, **named)
            if self._called:
                self._end()
            return result

        return step

    def _end(self) -> None:
        self._called.clear()
        self.step = self.step + 1 if self._run.counted is None else self._begin + self._run.counted()
        self._done(self.step)


def _outer_optimizers(run: TrackedRun, optimizer: Any) -> list[torch.optim.Optimizer]:
    """The optimizers after whose steps the model has the new weights: those around others that only step a share."""
    given = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    outer = {id(one.optim): one for one in given if type(one).__name__ == "ZeroRedundancyOptimizer"}
    return [outer.get(id(one), one) for one in run.optimizers]
