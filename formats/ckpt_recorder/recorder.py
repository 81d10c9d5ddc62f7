"""The recorder in the trainer: hooks before each step of the optimizer record its gradients."""

import logging
import os
import time
import uuid
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ckpt_codecs.gradients import gradient_codec
from ckpt_formats.core.errors import CkptError, OutputError, UnsupportedError
from ckpt_formats.universal.gradients.layout import EXACTNESS, UPDATE, Exactness
from ckpt_recorder import open_recorders, segments
from ckpt_recorder.background_bases import BackgroundBases
from ckpt_recorder.base_check import differing_base
from ckpt_recorder.base_pieces import BaseSettings
from ckpt_recorder.base_schedule import BaseSchedule
from ckpt_recorder.between_steps import BetweenSteps, Moment
from ckpt_recorder.breakable_log import BreakableLog
from ckpt_recorder.holders import RankPart, contributions, differing_copy
from ckpt_recorder.intervals import RecorderIntervals
from ckpt_recorder.methods import find_methods, flushes_denormals, has_plain_gradients
from ckpt_recorder.options import RecorderOptions, RecorderWarning
from ckpt_recorder.probe import as_updates, class_name, flags_of
from ckpt_recorder.proof import begin_proof
from ckpt_recorder.prover import SegmentProof
from ckpt_recorder.recording import RankRecording, draft_layout
from ckpt_recorder.run_hooks import RunCalls, RunHooks
from ckpt_recorder.step_calls import StepCalls
from ckpt_recorder.watched_tensors import is_swapped
from ckpt_recorder.writer import WriterSettings
from ckpt_training import ranks
from ckpt_training.engines.registry import check_initialized, tracked_run
from ckpt_training.engines.run import TrackedRun, persistent_buffers, renamed
from ckpt_training.hooks import RunHook, is_running, step_frame
from ckpt_training.plain_notes import extra_name, plain_note
from ckpt_training.random_states import RandomStates
from ckpt_training.resumed_steps import last_step

_LOG = logging.getLogger("ckpt_recorder")
_PROOF_SECONDS = 60.0
"""The maximum time that the end of a recording waits for the proof of its last steps."""
_FIRST_PROOFS = 16
"""The number of first steps of an optimizer that are all proved."""


class Recorder:
    """Records each step of a run into a chain. A context manager, which closes the log at its end.

    Attributes:
        step: The number of the last step, or of the current one.
    """

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
        codec = gradient_codec(self.options.codec)
        self.chain = Path(chain).absolute()  # the loop may change its working directory
        self._bases: BaseSchedule | None = None
        """The bases that are copied in the background."""
        self._intervals = RecorderIntervals(self.options.bases.every, self.options.flush, self.options.mtbf)
        if self.options.bases.spread:
            self._bases = BaseSchedule(self.chain, self.options.bases, self._intervals, self._start_bases)
        self._log = BreakableLog(self.chain, self.options, lambda: self.step, self._end_dependents)
        self.is_in_block = False
        self._model, self._optimizer = model, optimizer
        self._pid = os.getpid()
        self._rank, self._world = ranks.rank_and_world()
        if self.options.peers is not None:
            self.options.peers.host_of(self._rank, self._world)  # raises: the hosts do not fit the ranks
            self.options.peers.run_of(self.chain.name)  # raises: no address has the name
        self._last_retry = -1
        self._buffers: dict[str, torch.Tensor] | None = None
        self._random = RandomStates()
        ranks.await_all(self.options.stall_seconds, _warn)
        check_initialized(model)
        self._is_attached = False
        """Is the run being recorded?"""
        self._run = self._tracked_run()
        self._replace_others()
        self._lossless = codec.lossless
        self._calls = StepCalls(len(self._run.optimizers), self._run.calls_per_step)
        self._between = BetweenSteps(self._log.record)
        self._noted: tuple[int, dict[str, Any]] = (-1, {})
        """The last step with notes, and its notes."""
        self._proof = SegmentProof(0)
        self._probed = find_methods(self._run)
        if self._bases is not None and self._has_updates:
            raise UnsupportedError(
                "the steps of this run cannot be replayed, which bases in the background need",
                where="bases.spread",
                hint="Let training stop for each base: Bases(every=1000, spread=0).",
            )
        if self.options.bases.spread > 1 and self.exactness == "approximate":
            raise UnsupportedError(
                "a replay of this run is approximate: it cannot bring the pieces of a base to one step",
                where="bases.spread",
                hint="Copy all of a base after one step: Bases(every=1000, spread=1).",
            )
        self.step = max(ranks.gather(last_step(self._run))) if step is None else step
        self._first = self.step
        begin = time.monotonic()
        self._begin()
        self._intervals.base_took(time.monotonic() - begin)
        self._hooks = self._attached()
        self._is_attached = True
        open_recorders.add(self)

    def __enter__(self) -> "Recorder":
        self.is_in_block = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def broken(self) -> str | None:
        """Why nothing is recorded at the moment; None if the recording works."""
        return self._log.broken

    @property
    def peers(self) -> dict[str, str]:
        """Of each host that should hold what this rank records: "holds all", or why it does not."""
        return self._log.peers

    @property
    def exactness(self) -> Exactness:
        """The exactness of a replay: "exact", "same library" or "approximate". See docs/recording.md."""
        if not self._lossless:
            return "approximate"
        return max((one.exactness for one in self._probed), key=EXACTNESS.index)

    @property
    def writer_pid(self) -> int | None:
        """The id of the writer process, if it has not ended."""
        return None if self._log.recording is None else self._log.recording.writer_pid

    def note(self, **items: Any) -> None:
        """Record other values that the run needs to resume after the last step, and the current random states.

        Args:
            items: Plain values, tensors, arrays, or anything with a `state_dict`, such as a scheduler or a loader. A
                restored checkpoint has them under these names.
        """
        notes = {extra_name(name): plain_note(item) for name, item in items.items()}
        self._noted = (self.step, {**(self._noted[1] if self._noted[0] == self.step else {}), **notes})
        self._observe("note")
        self._log.record(RankRecording.record_options, self.step)
        self._record_random_states(self.step)
        self._log.record(RankRecording.record_notes, self.step, notes)

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The innermost optimizers, whose steps are recorded."""
        return self._run.optimizers

    def release(self, reason: str) -> None:
        """Record nothing more, as if the recorder had been killed after the last step. `reason`: why.

        In a process that was forked from that of the run, this leaves the recording of the run alone.
        """
        self._hooks.remove()
        if os.getpid() == self._pid:
            self._log.end(reason)
        if self._bases is not None:
            self._bases.forget()
        self._log.forget(reason)

    def close(self) -> None:
        """Write and flush all records, and stop."""
        self._hooks.remove()
        open_recorders.remove(self)
        if self._calls.are_complete:
            self._record_last()
        was_working = self._log.broken is None
        bases, self._bases = self._bases, None
        self._log.end(None)
        if bases is not None:
            bases.close()
        if was_working and self._log.broken is not None:
            self._log.warn(self._log.broken, "")

    def _record_last(self) -> None:
        """Record the last state of a segment, and wait for its proof."""
        if self._observe("note"):
            self._record_fingerprint()
            if self._proof.has_process:
                self._log.record(RankRecording.wait_until_flushed)
                self._proof.wait_for(self.step, _PROOF_SECONDS)
        self._record_end()

    def _start_prover(self) -> None:
        """Start to replay the log beside the run, once it is long enough."""
        due = self.step - self._first == _FIRST_PROOFS and any(one.method != UPDATE for one in self._probed)
        if due and self._lossless and self.options.prove and self._log.recording is not None:
            try:
                self._proof.start(self._segment.path, self._rank)
            except OSError as error:
                _LOG.warning("the steps of the run are not proved: %s", error.strerror)

    def _tracked_run(self) -> TrackedRun:
        run = tracked_run(self._model, self._optimizer, self._rank, is_recorded=self._is_attached)
        return run if self.options.rename is None else renamed(run, self.options.rename)

    @property
    def _has_updates(self) -> bool:
        """Are the steps of an optimizer recorded as updates?"""
        return any(one.method == UPDATE for one in self._probed)

    def _begin(self, *, replaces: bool = False) -> None:
        """Start a segment with the current state of the run. All ranks must do so together."""
        run = self._run
        self._proof = SegmentProof(self.step)
        for call in self._calls.of:
            call.flags = None
        self._between.begin(run)
        shares = contributions(run, self._probed)
        if not replaces:
            self._check_base(shares[self._rank])
        self._has_copies, self._equal_at = any(share.copies for share in shares), self.step
        self._first = self.step
        if self._bases is not None:
            self._bases.restart(self.step)
        segment = self._on_rank_0(
            lambda: segments.begin(
                self.chain,
                draft_layout(self._probed, shares, uuid.uuid4().hex, self.step, self.options.codec),
                replaces=replaces,
            )
        )
        self._share, self._segment = shares[self._rank], segment
        problem = self._start(self._share, segment)
        problems = [one for one in ranks.gather(problem) if one is not None]
        if problems:
            self._log.end(str(problems[0]))
            ranks.gather(None)  # all writers have ended
            self._on_rank_0(lambda: segments.abandon(self.chain, segment))
            raise type(problems[0])(problems[0].what, where=segment.path, hint=problems[0].hint)
        try:
            self._on_rank_0(lambda: segments.publish(self.chain, segment))
        except CkptError as error:
            self._log.end(str(error))
            raise
        self._refresh_watch()

    def _check_base(self, share: RankPart) -> None:
        """Raise `UnsupportedError` if the chain has another state at this step: the log would begin with it."""
        reason = differing_base(self._run, share, self.chain, self.step)
        if reason is not None:
            raise UnsupportedError(
                f"the state that the chain has at step {self.step} is not that of the run: {reason}",
                where=self.chain,
                hint="Resume the run from this state, or record into another chain.",
            )

    def _start(self, share: RankPart, segment: segments.NewSegment) -> CkptError | None:
        """Record the start of the segment. Returns the error if it fails."""
        layout, options = segment.layout.ranks[self._rank], self.options
        settings = WriterSettings(
            folder=str(segment.path),
            rank=self._rank,
            codec=options.codec,
            slot_nbytes=max(layout.size, 1) * 4,
            slots=options.slots,
            flush_steps=self._intervals.flush_steps,
            flush_seconds=options.flush_seconds,
            peers=None if options.peers is None else asdict(options.peers),
        )
        try:
            recording = RankRecording(self._run, share, layout, settings, options.stall_seconds)
            self._log.begin(recording)
            if options.random_states:
                recording.record_random_states(self.step, self._random.return_to(self.step))
            recording.record_notes(self.step, self._noted[1] if self._noted[0] == self.step else {})
            recording.record_options(self.step)
            buffers = dict(persistent_buffers(self._run)) if self._buffers is None else self._buffers
            recording.record_tensors(self.step, "buffer", buffers)
            self._between.record_extra_states(self.step)
            updated = [n for n in range(len(self._run.tensors)) if not recording.is_replayed(n)]
            recording.record_live(self.step, updated)
            if segment.layout.parent is None:
                recording.record_start(self.step)
                recording.record_frozen(self.step)
            recording.record_fingerprint(self.step)
            recording.wait_until_flushed()
        except CkptError as error:
            return error
        except Exception as error:  # the other ranks wait for this result
            return OutputError(f"the log of gradients cannot be written: {error or type(error).__name__}")
        return None

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """The result of `work` on rank 0, for all ranks. Raises its error on all ranks."""
        result: Any = None
        if self._rank == 0:
            try:
                result = work()
            except CkptError as error:
                result = error
            except Exception as error:  # the other ranks wait for this result
                result = OutputError(f"the log of gradients cannot be started: {error}", where=self.chain)
        result = ranks.broadcast(result)
        if isinstance(result, CkptError):
            raise result
        return result

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
        self._calls = StepCalls(len(self._run.optimizers), self._run.calls_per_step)
        calls = RunCalls(
            self._before_step, self._after_step, self._before_any_step, self._before_forward, self._around_engine_step
        )
        return RunHooks(self._model, self._run, calls)

    def _around_engine_step(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The step method of an engine, after which its notes are recorded."""

        def step(*arguments: Any, **named: Any) -> Any:
            before, counted = self.step, self._run.counted
            total = counted() if counted is not None else 0
            result = method(*arguments, **named)
            if self.step == before and counted is not None and counted() != total:
                self.step += 1  # overflow of fp16: the engine counts the step, but its optimizer did nothing
                self._log.record(RankRecording.record_nothing, self.step)
                self._observe("forward")
            if self.step != before or counted is None:  # a step that is skipped, and not counted, is noted, too
                self.note(**self._run.notes())
            return result

        return step

    def _before_any_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> None:
        """Record an optimizer that the run has put in the place of those that it had."""
        if any(one is optimizer or self._calls.of[i].is_open for i, one in enumerate(self._run.optimizers)):
            return
        stepped = {id(one) for group in optimizer.param_groups for one in group["params"]}
        replaced = {one.optimizer for one in self._run.tensors if id(one.tensor) in stepped}
        if not replaced or self._log.recording is None:
            return
        _LOG.warning("step %d: the run steps its parameters with another %s", self.step + 1, class_name(optimizer))
        self._observe("forward")
        others = [one for i, one in enumerate(self._run.optimizers) if i not in replaced]
        self._hooks.remove()
        self._optimizer = [*others, optimizer]
        self._begin_again(tracks_again=True)
        self._hooks = self._attached()

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        """Look for changes since the last step before the forward pass of the next one makes its own."""
        may_be_inner = not self._hooks.forward.called(module) and self._between.has_seen_pass
        if torch.compiler.is_compiling() or may_be_inner or not torch.is_grad_enabled():
            return
        if not self._between.pass_begins(is_training=module.training):
            return
        for number, state in enumerate(self._calls.of):
            if state.is_open and not is_running(state.frame):
                self._cancel_call(number)
        if self._calls.are_complete and not self._calls.are_open and not is_swapped(self._run.model):
            self._observe("forward")
            self._between.in_iteration = module.training

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> Any:
        """Record the gradients, or wrap the closure that computes them, as Lightning's does."""
        number = self._number_of(optimizer)
        if self._calls.of[number].is_open:
            if is_running(self._calls.of[number].frame):
                return None  # the `step` of a subclass calls that of its base
            self._cancel_call(number)
        self._calls.of[number].frame = step_frame()
        closure = named.get("closure") or next((one for one in arguments[1:] if callable(one)), None)
        if closure is None or self._probed[number].method == UPDATE:
            self._record_call(optimizer)
            return None
        if self._calls.are_complete and not self._between.in_iteration:
            self._observe("forward")
            self._between.in_iteration = True  # whatever the closure changes is a part of the step
        self._calls.of[number].has_closure = True

        def run() -> Any:
            loss = closure()
            self._record_call(optimizer)
            return loss

        remaining = {key: value for key, value in named.items() if key != "closure"}
        return (arguments[0], run), remaining

    def _number_of(self, optimizer: torch.optim.Optimizer) -> int:
        return next(i for i, one in enumerate(self._run.optimizers) if one is optimizer)

    def _record_call(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a call of an optimizer, and wait for pieces of a base that it would change."""
        self._record_update(optimizer)
        if self._bases is not None and self._log.recording is not None:
            self._bases.wait(self._log.recording.tensors_of(optimizer))

    @torch.no_grad()
    def _record_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Record what a call of an optimizer is given, before it changes anything."""
        number = self._number_of(optimizer)
        state = self._calls.of[number]
        if state.is_open:  # the closure is called again in the same step
            state.is_repeated = True
            return
        found_inf = getattr(optimizer, "found_inf", None)
        state.is_skipped = found_inf is not None and bool(found_inf.item())
        if state.is_skipped:
            self._between.step_done()  # what the skipped iteration changed belongs to the last step
            self._observe("forward")
            self._log.record(RankRecording.record_skipped, self.step, number)
            return
        if self._calls.are_complete:
            self._begin_step(number)
            state = self._calls.of[number]
        state.is_open = True
        if self._probed[number].method == UPDATE:
            return
        call = self._calls.part(0)
        if self._calls.is_last:  # before the gradients, so that every complete step has them
            self._record_random_states(self.step + 1)
        self._log.record(RankRecording.record_gradients, self.step + 1, number, call)
        if state.proof_is_due and self._log.recording is not None:
            options = self._log.recording.options_of(number)
            state.proof = begin_proof(self._run, number, self._probed[number], options, state.count)
        if not self._calls.has_two_parts:
            self._complete_call()

    def _begin_step(self, number: int) -> None:
        """Before the first call of a step: record what changed since the last one, and what is due."""
        optimizer = self._run.optimizers[number]
        threads = self._probed[number].threads
        flags = [*(flags_of(group) for group in self._run.groups_of(number)), flushes_denormals()]
        flags += [] if threads is None else [torch.get_num_threads()]
        has_new_flags = self._calls.of[number].flags not in (None, flags)
        is_replayed = self._probed[number].method != UPDATE
        must_update = is_replayed and (flushes_denormals() or not has_plain_gradients(optimizer, threads is not None))
        if not self._observe("step") or must_update or has_new_flags:
            if must_update:
                self._probed[number] = as_updates(optimizer)
            self._begin_again(tracks_again=True)
        elif not self._between.is_ahead:
            self._store_due_base()
            self._record_due_fingerprint()
        self._between.is_ahead = False
        state = self._calls.of[number]
        state.count += 1
        hooks = list(optimizer._optimizer_step_pre_hooks.values())
        is_last = not hooks or isinstance(hooks[-1], RunHook)
        state.proof_is_due = self._lossless and (
            state.count <= _FIRST_PROOFS
            or state.count & (state.count - 1) == 0
            or (self.options.fingerprint > 0 and state.count % self.options.fingerprint == 0)
            or not is_last
            or (self._world == 1 and self._proof.difference is not None)
            or has_new_flags
        )
        state.flags = flags
        self._calls.has_two_parts = self._probed[number].method != UPDATE and (state.proof_is_due or state.has_closure)

    def _is_current(self) -> bool:
        """Have the model and the optimizers the tensors and groups that the segment began with?

        Modules of large models are searched only when steps are proved.
        """
        if any(map(self._is_new, self._run.optimizers)):
            return False
        is_due = self._between.is_complete or self._calls.are_proved
        return not is_due or self._between.has_same_modules

    def _is_new(self, optimizer: torch.optim.Optimizer) -> bool:
        """Does an optimizer have other tensors or groups than at the start of the segment?"""
        number = self._number_of(optimizer)
        if self._run.groups is not None:
            return False  # the engine shows its optimizer only one group at a time
        known = {id(one.tensor) for one in self._run.tensors if one.optimizer == number}
        current = {id(one) for group in optimizer.param_groups for one in group["params"]}
        return known != current or len(optimizer.param_groups) != len(self._run.group_names[number])

    def _complete_call(self) -> None:
        """Count a call that is recorded."""
        if not self._calls.end_one():
            return
        self.step += 1
        self._hooks.forward.step_done()
        if not self._between.in_iteration:
            self._hooks.forward.search()
        self._between.step_done()
        self._start_prover()
        waited = 0.0 if self._log.recording is None else self._log.recording.waited
        since = self.step - self._first if self._bases is None else self._bases.steps_since(self.step)
        if self._intervals.step_done(since, waited):
            self._log.record(RankRecording.set_flush_steps, self._intervals.flush_steps)

    @torch.no_grad()
    def _finish_call(self, number: int) -> None:
        """Record what a call of an optimizer did, if that is due, after it."""
        state, method = self._calls.of[number], self._probed[number]
        if not state.is_open:
            return
        reason: str | None = None
        if self._calls.has_two_parts or method.method == UPDATE:
            call, step = self._calls.part(1), self.step + 1
            if method.method == UPDATE:
                self._log.record(RankRecording.record_update, step, number)
                self._count_as_proved()
            else:
                reason = self._failed_proof(number)
                if reason is not None:
                    self._log.record(RankRecording.record_update, step, number)
            self._between.record_others(step)
            self._between.record_extra_states(step)
            if self._calls.is_last:
                self._record_random_states(step)
            self._log.record(RankRecording.record_nothing, step, number, call)
            self._complete_call()
        state.end()
        if reason is not None:
            self._fall_back(number, reason)

    @torch.no_grad()
    def _cancel_call(self, number: int) -> None:
        """Forget a call that an error has interrupted. What it changed is found as changed outside the optimizer."""
        state = self._calls.of[number]
        is_counted = self._probed[number].method != UPDATE and not self._calls.has_two_parts
        state.end()
        if is_counted:  # the log has the step already: its states are those that there are
            self._log.record(RankRecording.record_update, self.step, number)
            self._refresh_watch()
            self._between.is_known = False
        else:
            self._observe("note")

    def _failed_proof(self, number: int) -> str | None:
        """Why the method of an optimizer does not give what it did; None if it does. All ranks get the same answer."""
        state = self._calls.of[number]
        reason = "the closure was called several times in one step" if state.is_repeated else None
        if reason is None and state.proof is not None:
            reason = state.proof.difference()
            recording = self._log.recording
            if reason is None and recording is not None and not recording.has_logged_options(number):
                reason = "its step changes its own options"
            if reason is None and state.proof.is_complete:
                self._count_as_proved()
        if not state.proof_is_due:
            return reason
        reason = reason or self._proof.difference
        return next((one for one in ranks.gather(reason) if one is not None), None)

    def _count_as_proved(self) -> None:
        """Count the step that is being recorded as proved, if all steps before it are."""
        if self._calls.is_last and self._between.is_complete:
            self._proof.count(self.step + 1)

    def _fall_back(self, number: int, reason: str) -> None:
        """Record the steps of an optimizer as updates from now on, in a new segment."""
        method = self._probed[number]
        _LOG.warning(
            "step %d: the steps of %s cannot be replayed (%s); from here on the log has the states after each step",
            self.step,
            method.type,
            reason,
        )
        self._probed[number] = as_updates(self._run.optimizers[number])
        self._between.is_known = False  # the new segment begins with the next step

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> None:
        """Start a broken recording again, or copy pieces of a base. All states belong to one step here."""
        number = self._number_of(optimizer)
        frame = self._calls.of[number].frame
        if frame is not None and frame is not step_frame():
            return  # the `step` of a subclass goes on after that of its base
        self._calls.of[number].frame = None
        if self._calls.of[number].is_skipped:
            self._calls.of[number].is_skipped = False
        else:
            self._finish_call(number)
        if not self._calls.are_complete:
            return
        self._refresh_watch()
        done = self.step - self._first
        self._record_random_states(self.step)
        if _is_power_of_8(done):  # at each, all copies of all states are hashed
            self._check_copies()
        if self._bases is not None:
            self._continue_bases(self._bases)
        elif self._intervals.base_due(done):
            # The base is stored before the next step, after its forward pass, which changes buffers.
            self._buffers = {name: tensor.clone() for name, tensor in persistent_buffers(self._run)}
        self._retry(done)

    @torch.no_grad()
    def _check_copies(self) -> None:
        """Stop recording if ranks that began with equal tensors have different ones: they were no copies."""
        if not self._has_copies or self.step == self._equal_at:
            return
        problem = differing_copy(self._run, self._share)
        if problem is None:
            self._equal_at = self.step
        elif self._log.recording is not None:
            reason = f"{problem}; no step after {self._equal_at} can be trusted"
            self._log.end(reason)
            self._log.warn(reason, "; see `rename` if the ranks have parts of one model")

    @torch.no_grad()
    def _refresh_watch(self) -> None:
        """Take what all tensors are now as what they should be before the next step."""
        recording = self._log.working
        if recording is not None:
            is_early = self.step - self._first < _FIRST_PROOFS
            is_proved = self._calls.are_proved
            self._between.refresh(recording, self.step, complete=is_early or is_proved)

    @torch.no_grad()
    def _observe(self, moment: Moment) -> bool:
        """Record what was changed since the last look, outside the steps of the optimizers.

        Returns False if the log cannot go on from the last step, because the optimizer has other states now.
        """
        recording = self._log.working
        if recording is None or not self._calls.are_complete:
            return True
        if not self._is_current():
            self._begin_again(tracks_again=True, replaces=not self._between.in_iteration)
            return True
        # What a loop sets after its note is the next step's.
        if not self._between.in_iteration and self._noted[0] != self.step:
            self._log.record(RankRecording.record_options, self.step)
        return self._between.record_changes(recording, self.step, moment)

    def _store_due_base(self) -> None:
        """Store the state in a new segment, if a base is due. Here the notes of the last step are recorded."""
        if self._bases is not None or not self._intervals.base_due(self.step - self._first):
            return
        begin = time.monotonic()
        self._record_fingerprint()
        self._begin_again()
        self._buffers = None
        buffers = dict(persistent_buffers(self._run))
        self._log.record(RankRecording.record_tensors, self.step + 1, "buffer", buffers)
        self._intervals.base_took(time.monotonic() - begin)

    def _continue_bases(self, bases: BaseSchedule) -> None:
        """Copy bases in the background, as long as all steps are replayed."""
        if self._has_updates:
            bases.drop()
            self._bases = None
            _LOG.warning("step %d: no more bases in the background: the steps of the run cannot be replayed", self.step)
        else:
            bases.step_done(self.step)

    def _start_bases(self) -> BackgroundBases | None:
        """Start the process that makes bases; None if the recording is broken."""
        if self._log.working is None or self._bases is None:
            return None
        layout, path = self._segment.layout, self._segment.path

        def settings(nbytes: int, slots: int) -> BaseSettings:
            return BaseSettings(str(self.chain), path.name, self._rank, nbytes, slots, self.options.stall_seconds)

        rank_layout = layout.ranks[self._rank]
        offsets = [(number, part.offset) for number, part, _ in self._share.replayed]
        spread, memory = self._bases.spread, self.options.bases.memory
        return BackgroundBases(self._run, rank_layout, offsets, settings, layout.run, spread, memory)

    def _record_random_states(self, step: int) -> None:
        """Record the generators that changed: their states are those at `step`, unless they are recorded again."""
        if self.options.random_states and self._log.working is not None:
            states = self._random.changed(step)
            self._log.record(RankRecording.record_random_states, step, states)

    def _record_due_fingerprint(self) -> None:
        done, every = self.step - self._first, self.options.fingerprint
        if every and done and (done % every == 0 or not done & (done - 1)):  # after steps 1, 2, 4, 8, …
            self._record_fingerprint()

    def _record_fingerprint(self) -> None:
        """Record the hashes of all states, and what is proved of the steps before."""
        self._log.record(RankRecording.record_fingerprint, self.step, self._proof.so_far())

    def _record_end(self) -> None:
        """Record the end of a segment."""
        self._log.record(RankRecording.record_end, self.step, self._proof.so_far())

    def _end_dependents(self) -> None:
        """End what needs the writer: bases that are being copied, and the replay beside the run."""
        if self._bases is not None:
            self._bases.drop()
        self._proof.close()

    def _retry(self, done: int) -> None:
        """If it is time, start a broken recording again on all ranks; if that fails, continue without the log."""
        every = self.options.retry
        if not every or not done or done % every or self.step == self._last_retry:
            return
        self._last_retry = self.step  # only once, with several optimizers or a skipped step
        if not any(ranks.gather(self._log.broken is not None)):
            return
        self._log.end(None)
        try:
            self._begin()
        except CkptError as error:
            self._log.broken = str(error)
            self._first = self.step

    def _track_again(self) -> None:
        updated = [
            one for one, method in zip(self._run.optimizers, self._probed, strict=True) if method.method == UPDATE
        ]
        self._run = self._tracked_run()
        self._probed = [
            as_updates(one) if any(one is known for known in updated) else new
            for one, new in zip(self._run.optimizers, find_methods(self._run), strict=True)
        ]

    def _begin_again(self, *, tracks_again: bool = False, replaces: bool = False) -> None:
        """Start a new segment at the current step; if that fails, continue without the log.

        `tracks_again`: the optimizer has other tensors, groups or states. `replaces`: the segment before it does not
        have this state.
        """
        self._record_end()
        self._log.record(RankRecording.announce_next)
        self._log.end(None)
        try:
            if tracks_again:
                self._track_again()
            self._begin(replaces=replaces)
        except CkptError as error:
            self._log.broken, self._first = str(error), self.step
            self._log.warn(str(error), self._log.retries)


def _warn(text: str) -> None:
    warnings.warn(text, RecorderWarning, stacklevel=5)


def _is_power_of_8(number: int) -> bool:
    return number > 0 and not number & (number - 1) and number.bit_length() % 3 == 1
