"""What is recorded of each call of an optimizer: gradients before it; after it a proof, or the states themselves."""

import logging
from collections.abc import Callable
from typing import Any

import torch

from ckpt_formats.universal.gradients.layout import UPDATE
from ckpt_recorder.methods import flushes_denormals, has_plain_gradients
from ckpt_recorder.options import RecorderOptions
from ckpt_recorder.probe import as_updates, flags_of
from ckpt_recorder.proof import begin_proof
from ckpt_recorder.recorded_run import FIRST_PROOFS, RecordedRun
from ckpt_recorder.recording import RankRecording
from ckpt_training import ranks
from ckpt_training.hooks import RunHook, is_running, step_frame

_LOG = logging.getLogger("ckpt_recorder")


class StepRecorder:
    """Records the calls of optimizers that make up the steps of a run."""

    def __init__(self, run: RecordedRun, options: RecorderOptions, on_step: Callable[[], None]) -> None:
        """`on_step`: is called when a step is recorded, before it is counted."""
        self._run, self._options, self._on_step = run, options, on_step

    def before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> Any:
        """Record the gradients, or wrap the closure that computes them, as Lightning's does."""
        run, number = self._run, self._number_of(optimizer)
        state = run.calls.of[number]
        if state.is_open:
            if is_running(state.frame):
                return None  # the `step` of a subclass calls that of its base
            self._cancel(number)
        state.frame = step_frame()
        closure = named.get("closure") or next((one for one in arguments[1:] if callable(one)), None)
        if closure is None or run.methods[number].method == UPDATE:
            self._record_call(optimizer)
            return None
        if run.calls.are_complete and not run.between.in_iteration:
            run.observe("forward")
            run.between.in_iteration = True  # whatever the closure changes is a part of the step
        run.calls.of[number].has_closure = True

        def compute() -> Any:
            loss = closure()
            self._record_call(optimizer)
            return loss

        remaining = {key: value for key, value in named.items() if key != "closure"}
        return (arguments[0], compute), remaining

    def after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> None:
        """Record what the call did, if that is due; with the last call, the step ends."""
        run, number = self._run, self._number_of(optimizer)
        frame = run.calls.of[number].frame
        if frame is not None and frame is not step_frame():
            return  # the `step` of a subclass goes on after that of its base
        run.calls.of[number].frame = None
        if run.calls.of[number].is_skipped:
            run.calls.of[number].is_skipped = False
            if run.tracked.counted is not None:
                return  # it is recorded after the step of the engine
        else:
            self._finish(number)
        if run.calls.are_complete:
            run.end_step()

    def engine_skipped(self, *, is_counted: bool) -> None:
        """Record a step in which the engine called no optimizer, because gradients were not finite.

        `is_counted`: the engine counts it, so that it is a step of the log, in which its optimizer did nothing.
        """
        run = self._run
        if not run.calls.are_complete:
            return
        if not is_counted:
            self._skip(0)
            return
        self._record_changes()
        # As of every step: what else it changed comes first, so that the log has that if it has the step.
        run.record_random_states(run.step + 1)
        run.log.record(RankRecording.record_nothing, run.step + 1)
        self._on_step()
        run.count_step()
        run.end_step()

    def _skip(self, number: int) -> None:
        """Record that an optimizer skips a step: what its iteration changed belongs to the last step."""
        self._run.between.step_done()
        self._run.observe("forward")
        self._run.log.record(RankRecording.record_skipped, self._run.step, number)

    def cancel_interrupted(self) -> None:
        """Forget the calls that errors have interrupted."""
        for number, state in enumerate(self._run.calls.of):
            if state.is_open and not is_running(state.frame):
                self._cancel(number)

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int:
        return next(i for i, one in enumerate(self._run.tracked.optimizers) if one is optimizer)

    def _record_call(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a call of an optimizer, and wait for pieces of a base that it would change."""
        self._record_input(optimizer)
        if self._run.bases is not None and self._run.log.recording is not None:
            self._run.bases.wait(self._run.log.recording.tensors_of(optimizer))

    @torch.no_grad()
    def _record_input(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what a call of an optimizer is given, before it changes anything."""
        run, number = self._run, self._number_of(optimizer)
        state = run.calls.of[number]
        if state.is_open:  # the closure is called again in the same step
            state.is_repeated = True
            return
        found_inf = getattr(optimizer, "found_inf", None)
        state.is_skipped = found_inf is not None and bool(found_inf.item())
        if state.is_skipped:
            if run.tracked.counted is None:
                self._skip(number)
            return
        if run.calls.are_complete:
            self._begin_step(number)
        state.is_open = True
        if run.methods[number].method == UPDATE:
            return
        call = run.calls.part(0)
        if run.calls.is_last:  # before the gradients, so that every complete step has them
            run.record_random_states(run.step + 1)
        run.log.record(RankRecording.record_gradients, run.step + 1, number, call)
        if state.proof_is_due and run.log.recording is not None:
            options = run.log.recording.options_of(number)
            state.proof = begin_proof(run.tracked, number, run.methods[number], options, state.count)
        if not run.calls.has_two_parts:
            self._count_call()

    def _record_changes(self, *, begins_again: bool = False) -> None:
        """Before a step: record what changed since the last one, and what is due.

        `begins_again`: a new segment begins with the step.
        """
        run = self._run
        if not run.observe("step") or begins_again:
            run.begin_again(tracks_again=True)
        elif not run.between.is_ahead:
            run.record_due()
        run.between.is_ahead = False

    def _begin_step(self, number: int) -> None:
        """Before the first call of a step: record what changed since the last one, and what is due."""
        run = self._run
        optimizer = run.tracked.optimizers[number]
        threads = run.methods[number].threads
        flags = [*(flags_of(group) for group in run.tracked.groups_of(number)), flushes_denormals()]
        flags += [] if threads is None else [torch.get_num_threads()]
        has_new_flags = run.calls.of[number].flags not in (None, flags)
        is_replayed = run.methods[number].method != UPDATE
        must_update = is_replayed and (flushes_denormals() or not has_plain_gradients(optimizer, threads is not None))
        if must_update:
            run.methods[number] = as_updates(optimizer)
        self._record_changes(begins_again=must_update or has_new_flags)
        state = run.calls.of[number]
        state.count += 1
        hooks = list(optimizer._optimizer_step_pre_hooks.values())
        is_last = not hooks or isinstance(hooks[-1], RunHook)
        state.proof_is_due = run.is_lossless and (
            state.count <= FIRST_PROOFS
            or state.count & (state.count - 1) == 0
            or (self._options.fingerprint > 0 and state.count % self._options.fingerprint == 0)
            or not is_last
            or (run.world == 1 and run.proof.difference is not None)
            or has_new_flags
        )
        state.flags = flags
        run.calls.has_two_parts = run.methods[number].method != UPDATE and (state.proof_is_due or state.has_closure)

    def _count_call(self) -> None:
        """Count a call that is recorded."""
        if self._run.calls.end_one():
            self._on_step()
            self._run.count_step()

    @torch.no_grad()
    def _finish(self, number: int) -> None:
        """Record what a call of an optimizer did, if that is due, after it."""
        run, state, method = self._run, self._run.calls.of[number], self._run.methods[number]
        if not state.is_open:
            return
        reason: str | None = None
        if run.calls.has_two_parts or method.method == UPDATE:
            call, step = run.calls.part(1), run.step + 1
            if method.method == UPDATE:
                run.log.record(RankRecording.record_update, step, number)
                self._count_as_proved()
            else:
                reason = self._failed_proof(number)
                if reason is not None:
                    run.log.record(RankRecording.record_update, step, number)
            run.between.record_others(step)
            run.between.record_extra_states(step)
            if run.calls.is_last:
                run.record_random_states(step)
            run.log.record(RankRecording.record_nothing, step, number, call)
            self._count_call()
        state.end()
        if reason is not None:
            self._fall_back(number, reason)

    @torch.no_grad()
    def _cancel(self, number: int) -> None:
        """Forget a call that an error has interrupted. What it changed is found as changed outside the optimizer."""
        run, state = self._run, self._run.calls.of[number]
        is_counted = run.methods[number].method != UPDATE and not run.calls.has_two_parts
        state.end()
        if is_counted:  # the log has the step already: its states are those that there are
            run.log.record(RankRecording.record_update, run.step, number)
            run.refresh_watch()
            run.between.is_known = False
        else:
            run.observe("note")

    def _failed_proof(self, number: int) -> str | None:
        """Why the method of an optimizer does not give what it did; None if it does. All ranks get the same answer."""
        state = self._run.calls.of[number]
        reason = "the closure was called several times in one step" if state.is_repeated else None
        if reason is None and state.proof is not None:
            reason = state.proof.difference()
            recording = self._run.log.recording
            if reason is None and recording is not None and not recording.has_logged_options(number):
                reason = "its step changes its own options"
            if reason is None and state.proof.is_complete:
                self._count_as_proved()
        if not state.proof_is_due:
            return reason
        reason = reason or self._run.proof.difference
        return next((one for one in ranks.gather(reason) if one is not None), None)

    def _count_as_proved(self) -> None:
        """Count the step that is being recorded as proved, if all steps before it are."""
        if self._run.calls.is_last and self._run.between.is_complete:
            self._run.proof.count(self._run.step + 1)

    def _fall_back(self, number: int, reason: str) -> None:
        """Record the steps of an optimizer as updates from now on, in a new segment."""
        run = self._run
        _LOG.warning(
            "step %d: the steps of %s cannot be replayed (%s); from here on the log has the states after each step",
            run.step,
            run.methods[number].type,
            reason,
        )
        run.methods[number] = as_updates(run.tracked.optimizers[number])
        run.between.is_known = False  # the new segment begins with the next step
