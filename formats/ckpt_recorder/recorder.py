"""The recorder in the trainer: what a training loop calls, and the hooks by which the run calls it."""

import logging
import os
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ckpt_codecs.gradients import gradient_codec
from ckpt_formats.universal.gradients.layout import Exactness
from ckpt_recorder import open_recorders
from ckpt_recorder.intervals import RecorderIntervals
from ckpt_recorder.options import RecorderOptions, RecorderWarning
from ckpt_recorder.probe import class_name
from ckpt_recorder.recorded_run import RecordedRun
from ckpt_recorder.step_calls import StepCalls
from ckpt_recorder.step_recorder import StepRecorder
from ckpt_recorder.watched_tensors import is_swapped
from ckpt_training import ranks
from ckpt_training.engines.registry import check_initialized
from ckpt_training.engines.run import TrackedRun
from ckpt_training.hooks import ForwardHooks, RunHook, WrappedMethod, remove_all
from ckpt_training.plain_notes import extra_name, plain_note

_LOG = logging.getLogger("ckpt_recorder")
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


class Recorder:
    """Records each step of a run into a chain. A context manager, which closes the log at its end."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        chain: str | os.PathLike[str],
        *,
        step: int | None = None,
        **options: Any,
    ) -> None:
        """Start a segment of the log. All ranks must do so together.

        Args:
            model: The model: a module, or the result of DDP, FSDP2, Accelerate or DeepSpeed.
            optimizer: Its optimizer, or a list of them; None for a DeepSpeed engine.
            chain: The folder of the chain, on a file system that all ranks share. It is created if it does not exist.
            step: The number of the last step; None: the count of the engine or of the optimizer.
            options: The fields of `RecorderOptions`.

        Raises:
            UnsupportedError: The run cannot be recorded, or not all ranks construct a recorder; the message states why.
            InvalidArgumentError: An option has a value that it cannot have.
            OutputError: The chain cannot be written, or another run records into it.
        """
        self.options = RecorderOptions(**options)
        gradient_codec(self.options.codec)  # raises: there is no such codec
        self.chain = Path(chain).absolute()  # the loop may change its working directory
        intervals = RecorderIntervals(self.options.bases.every, self.options.flush, self.options.mtbf)
        self.is_in_block = False
        self._pid = os.getpid()
        if self.options.peers is not None:
            self.options.peers.host_of(*ranks.rank_and_world())  # raises: the hosts do not fit the ranks
            self.options.peers.run_of(self.chain.name)  # raises: no address has the name
        ranks.await_all(self.options.stall_seconds, _warn)
        check_initialized(model)
        self._run = RecordedRun(model, optimizer, self.chain, self.options, intervals)
        self._steps = StepRecorder(self._run, self.options, self._follow_modules)
        self._replace_others()
        self._run.start(step)
        self._hooks = self._attached()
        self._run.is_attached = True
        open_recorders.add(self)

    def __enter__(self) -> "Recorder":
        self.is_in_block = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def step(self) -> int:
        """The number of the last step, or of the current one."""
        return self._run.step

    @property
    def broken(self) -> str | None:
        """Why nothing is recorded at the moment; None if the recording works."""
        return self._run.log.broken

    @property
    def peers(self) -> dict[str, str]:
        """Of each host that should hold what this rank records: "holds all", or why it does not."""
        return self._run.log.peers

    @property
    def exactness(self) -> Exactness:
        """The exactness of a replay: "exact", "same library" or "approximate". See docs/recording.md."""
        return self._run.exactness

    @property
    def writer_pid(self) -> int | None:
        """The id of the writer process, if it has not ended."""
        recording = self._run.log.recording
        return None if recording is None else recording.writer_pid

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The innermost optimizers, whose steps are recorded."""
        return self._run.tracked.optimizers

    def note(self, **items: Any) -> None:
        """Record other values that the run needs to resume after the last step, and the current random states.

        Args:
            items: Plain values, tensors, arrays, or anything with a `state_dict`, such as a scheduler or a loader. A
                restored checkpoint has them under these names.
        """
        self._run.note({extra_name(name): plain_note(item) for name, item in items.items()})

    def release(self, reason: str) -> None:
        """Record nothing more, as if the recorder had been killed after the last step. `reason`: why.

        In a process that was forked from that of the run, this leaves the recording of the run alone.
        """
        self._hooks.remove()
        if os.getpid() == self._pid:
            self._run.log.end(reason)
        if self._run.bases is not None:
            self._run.bases.forget()
        self._run.log.forget(reason)

    def close(self) -> None:
        """Write and flush all records, and stop."""
        self._hooks.remove()
        open_recorders.remove(self)
        self._run.close()

    def _replace_others(self) -> None:
        """End the recorders that were not closed and would record the same run, as after a cell that ran again."""
        for other in open_recorders.replaced_by(self.chain, self.optimizers):
            other.release(f"another recorder records into {self.chain}")
            open_recorders.remove(other)
            warnings.warn(
                f"the recorder of {other.chain} was not closed and ends now, because a new one takes its place: "
                "use `with Recorder(...)`, or call `recorder.close()`",
                RecorderWarning,
                stacklevel=3,
            )

    def _attached(self) -> RunHooks:
        """The hooks in the run, which begins with its first call of an optimizer."""
        run = self._run.tracked
        self._run.calls = StepCalls(len(run.optimizers), run.calls_per_step)
        calls = RunCalls(
            self._steps.before_step,
            self._steps.after_step,
            self._before_any_step,
            self._before_forward,
            self._around_engine_step,
        )
        return RunHooks(self._run.model, run, calls)

    def _around_engine_step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The step method of an engine, after which its notes are recorded."""
        run = self._run

        def step(*arguments: Any, **named: Any) -> Any:
            before, counted = run.step, run.tracked.counted
            total = counted() if counted is not None else 0
            result = method(*arguments, **named)
            if run.step == before and (counted is None or counted() != total):  # fp16: gradients overflowed
                self._steps.engine_skipped(is_counted=counted is not None)
            if run.step != before or counted is None:  # a step that is skipped, and not counted, is noted, too
                self.note(**run.tracked.notes())
            return result

        return step

    def _before_any_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> None:
        """Record an optimizer that the run has put in the place of those that it had."""
        run = self._run
        if any(one is optimizer or run.calls.of[i].is_open for i, one in enumerate(run.tracked.optimizers)):
            return
        stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
        replaced = {one.optimizer for one in run.tracked.tensors if id(one.tensor) in stepped}
        if not replaced or run.log.recording is None:
            return
        _LOG.warning("step %d: the run steps its parameters with another %s", run.step + 1, class_name(optimizer))
        run.observe("forward")
        others = [one for i, one in enumerate(run.tracked.optimizers) if i not in replaced]
        self._hooks.remove()
        run.optimizer = [*others, optimizer]
        run.begin_again(tracks_again=True)
        self._hooks = self._attached()

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        """Look for changes since the last step before the forward pass of the next one makes its own."""
        run = self._run
        may_be_inner = not self._hooks.forward.called(module) and run.between.has_seen_pass
        if torch.compiler.is_compiling() or may_be_inner or not torch.is_grad_enabled():
            return
        if not run.between.pass_begins(is_training=module.training):
            return
        self._steps.cancel_interrupted()
        if run.calls.are_complete and not run.calls.are_open and not is_swapped(run.tracked.model):
            run.observe("forward")
            run.between.in_iteration = module.training

    def _follow_modules(self) -> None:
        """Leave hooks only in the modules that the loop calls; look for these again if it called none for this step."""
        self._hooks.forward.step_done()
        if not self._run.between.in_iteration:
            self._hooks.forward.search()


def _warn(text: str) -> None:
    warnings.warn(text, RecorderWarning, stacklevel=5)
