"""A run as it is recorded: its step, the method of each optimizer, and its log, segment after segment."""

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ckpt_codecs.gradients import gradient_codec
from ckpt_formats.core.errors import CkptError, OutputError, UnsupportedError
from ckpt_formats.universal.gradients.layout import EXACTNESS, UPDATE, Exactness
from ckpt_recorder import segments
from ckpt_recorder.background_bases import BackgroundBases
from ckpt_recorder.base_check import differing_base
from ckpt_recorder.base_pieces import BaseSettings
from ckpt_recorder.base_schedule import BaseSchedule
from ckpt_recorder.between_steps import BetweenSteps, Moment
from ckpt_recorder.breakable_log import BreakableLog
from ckpt_recorder.holders import RankPart, contributions, differing_copy
from ckpt_recorder.intervals import RecorderIntervals
from ckpt_recorder.methods import find_methods
from ckpt_recorder.options import RecorderOptions
from ckpt_recorder.probe import ProbeResult, as_updates
from ckpt_recorder.prover import SegmentProof
from ckpt_recorder.recording import RankRecording, draft_layout
from ckpt_recorder.step_calls import StepCalls
from ckpt_recorder.writer import WriterSettings
from ckpt_training import ranks
from ckpt_training.engines.registry import tracked_run
from ckpt_training.engines.run import TrackedRun, persistent_buffers, renamed
from ckpt_training.random_states import RandomStates
from ckpt_training.resumed_steps import last_step

_LOG = logging.getLogger("ckpt_recorder")
_PROOF_SECONDS = 60.0
"""The maximum time that the end of a recording waits for the proof of its last steps."""
FIRST_PROOFS = 16
"""The number of first steps of an optimizer that are all proved."""


class RecordedRun:
    """A run on this rank, and its log, of which each segment begins with a whole state.

    Attributes:
        model: The model, as the user passed it.
        optimizer: The optimizer or optimizers that the run steps.
        tracked: The tensors and optimizers that the current segment has.
        methods: The method by which a replay steps each optimizer.
        step: The number of the last step, or of the current one.
        first: The step at which the current segment, or the pause after a failed start, began.
        calls: The calls of optimizers in the current step.
        log: What this rank records, as long as that works.
        between: What the run changes between two steps.
        proof: What is proved of the steps of the current segment.
        intervals: When bases and flushes are due.
        bases: The bases that are copied in the background; None if there are none.
        is_attached: Do the optimizers have the recorder's hooks?
    """

    methods: list[ProbeResult]
    _share: RankPart
    """What this rank records of the run."""
    _segment: segments.NewSegment

    def __init__(
        self, model: nn.Module, optimizer: Any, chain: Path, options: RecorderOptions, intervals: RecorderIntervals
    ) -> None:
        """Track the run and record nothing yet. Raises `UnsupportedError` if it cannot be recorded."""
        self.optimizer = optimizer
        self.is_attached = False
        self.step = self.first = 0
        self.model, self._chain, self._options, self.intervals = model, chain, options, intervals
        self._rank, self.world = ranks.rank_and_world()
        self.is_lossless = gradient_codec(options.codec).lossless
        self.bases: BaseSchedule | None = None
        if options.bases.spread:
            self.bases = BaseSchedule(chain, options.bases, intervals, self._start_bases)
        self.log = BreakableLog(chain, options, lambda: self.step, self._end_dependents)
        self.between = BetweenSteps(self.log.record)
        self.proof = SegmentProof(0)
        self._random = RandomStates()
        self._noted: tuple[int, dict[str, Any]] = (-1, {})
        """The last step with notes, and its notes."""
        self._buffers: tuple[int, dict[str, torch.Tensor]] | None = None
        """The last step after which a base was due, and the buffers that the run had then."""
        self._last_retry = -1
        self.tracked = self._tracked()
        self.calls = StepCalls(len(self.tracked.optimizers), self.tracked.calls_per_step)

    @property
    def has_updates(self) -> bool:
        """Are the steps of an optimizer recorded as updates?"""
        return any(one.method == UPDATE for one in self.methods)

    @property
    def exactness(self) -> Exactness:
        """The exactness of a replay of the log."""
        if not self.is_lossless:
            return "approximate"
        return max((one.exactness for one in self.methods), key=EXACTNESS.index)

    def start(self, step: int | None) -> None:
        """Find the methods, and start the log. `step`: the number of the last step; None: that of the run itself."""
        self.methods = find_methods(self.tracked)
        if self.bases is not None and self.has_updates:
            raise UnsupportedError(
                "the steps of this run cannot be replayed, which bases in the background need",
                where="bases.spread",
                hint="Let training stop for each base: Bases(every=1000, spread=0).",
            )
        if self._options.bases.spread > 1 and self.exactness == "approximate":
            raise UnsupportedError(
                "a replay of this run is approximate: it cannot bring the pieces of a base to one step",
                where="bases.spread",
                hint="Copy all of a base after one step: Bases(every=1000, spread=1).",
            )
        self.step = max(ranks.gather(last_step(self.tracked))) if step is None else step
        self.first = self.step
        begin = time.monotonic()
        self._begin()
        self.intervals.base_took(time.monotonic() - begin)

    def begin_again(self, *, tracks_again: bool = False, replaces: bool = False) -> None:
        """Start a new segment at the current step; if that fails, continue without the log.

        `tracks_again`: the optimizer has other tensors, groups or states. `replaces`: the segment before it does not
        have this state.
        """
        self._record_end()
        self.log.record(RankRecording.announce_next)
        self.log.end(None)
        try:
            if tracks_again:
                self._track_again()
            self._begin(replaces=replaces)
        except CkptError as error:
            self.log.broken, self.first = str(error), self.step
            self.log.warn(str(error), self.log.retries)

    def note(self, notes: dict[str, Any]) -> None:
        """Record plain notes of the last step, and the current random states."""
        self._noted = (self.step, {**(self._noted[1] if self._noted[0] == self.step else {}), **notes})
        self.observe("note")
        self.log.record(RankRecording.record_options, self.step)
        self.record_random_states(self.step)
        self.log.record(RankRecording.record_notes, self.step, notes)

    @torch.no_grad()
    def observe(self, moment: Moment) -> bool:
        """Record what was changed since the last look, outside the steps of the optimizers.

        Returns False if the log cannot go on from the last step, because the optimizer has other states now.
        """
        recording = self.log.working
        if recording is None or not self.calls.are_complete:
            return True
        if not self._is_current():
            self.begin_again(tracks_again=True, replaces=not self.between.in_iteration)
            return True
        # What a loop sets after its note is the next step's.
        if not self.between.in_iteration and self._noted[0] != self.step:
            self.log.record(RankRecording.record_options, self.step)
        is_known = self.between.record_changes(recording, self.step, moment)
        is_due = self._buffers is not None and self._buffers[0] == self.step
        if is_due and moment == "forward" and not self.between.in_iteration:
            self._copy_buffers()  # the loop may have changed them after the step
        return is_known

    @torch.no_grad()
    def refresh_watch(self) -> None:
        """Take what all tensors are now as what they should be before the next step."""
        recording = self.log.working
        if recording is not None:
            is_early = self.step - self.first < FIRST_PROOFS
            is_proved = self.calls.are_proved
            self.between.refresh(recording, self.step, complete=is_early or is_proved)

    def record_due(self) -> None:
        """Record what is due before a step: a base, or hashes. Here the notes of the last step are recorded."""
        self._store_due_base()
        done, every = self.step - self.first, self._options.fingerprint
        if every and done and (done % every == 0 or not done & (done - 1)):  # after steps 1, 2, 4, 8, …
            self._record_fingerprint()

    def count_step(self) -> None:
        """Count a step that is recorded."""
        self.step += 1
        self.between.step_done()
        self._start_prover()
        waited = 0.0 if self.log.recording is None else self.log.recording.waited
        since = self.step - self.first if self.bases is None else self.bases.steps_since(self.step)
        if self.intervals.step_done(since, waited):
            self.log.record(RankRecording.set_flush_steps, self.intervals.flush_steps)

    def end_step(self) -> None:
        """Start a broken recording again, or copy pieces of a base. All states belong to one step here."""
        self.refresh_watch()
        done = self.step - self.first
        self.record_random_states(self.step)
        if _is_power_of_8(done):  # at each, all copies of all states are hashed
            self._check_copies()
        if self.bases is not None:
            self._continue_bases(self.bases)
        elif self.intervals.base_due(done):
            # The base is stored before the next step, after its forward pass, which changes buffers.
            self._copy_buffers()
        self._retry(done)

    def _copy_buffers(self) -> None:
        """Copy the buffers of the last step, for the base that is due after it."""
        buffers = {name: tensor.clone() for name, tensor in persistent_buffers(self.tracked)}
        self._buffers = self.step, buffers

    def record_random_states(self, step: int) -> None:
        """Record the generators that changed: their states are those at `step`, unless they are recorded again."""
        if self._options.random_states and self.log.working is not None:
            states = self._random.changed(step)
            self.log.record(RankRecording.record_random_states, step, states)

    def close(self) -> None:
        """Record the last state, wait for its proof, and end the log."""
        if self.calls.are_complete:
            self.between.run_ends()
            if self.observe("note"):
                self._record_fingerprint()
                if self.proof.has_process:
                    self.log.record(RankRecording.wait_until_flushed)
                    self.proof.wait_for(self.step, _PROOF_SECONDS)
            self._record_end()
        was_working = self.log.broken is None
        bases, self.bases = self.bases, None
        self.log.end(None)
        if bases is not None:
            bases.close()
        if was_working and self.log.broken is not None:
            self.log.warn(self.log.broken, "")

    def _tracked(self) -> TrackedRun:
        run = tracked_run(self.model, self.optimizer, self._rank, is_recorded=self.is_attached)
        return run if self._options.rename is None else renamed(run, self._options.rename)

    def _track_again(self) -> None:
        updated = [
            one for one, method in zip(self.tracked.optimizers, self.methods, strict=True) if method.method == UPDATE
        ]
        self.tracked = self._tracked()
        self.methods = [
            as_updates(one) if any(one is known for known in updated) else new
            for one, new in zip(self.tracked.optimizers, find_methods(self.tracked), strict=True)
        ]

    def _is_current(self) -> bool:
        """Have the model and the optimizers the tensors and groups that the segment began with?

        Modules of large models are searched only when steps are proved.
        """
        if any(self._is_new(number, one) for number, one in enumerate(self.tracked.optimizers)):
            return False
        is_due = self.between.is_complete or self.calls.are_proved
        return not is_due or self.between.has_same_modules

    def _is_new(self, number: int, optimizer: torch.optim.Optimizer) -> bool:
        """Does an optimizer have other tensors or groups than at the start of the segment?"""
        if self.tracked.groups is not None:
            return False  # the engine shows its optimizer only one group at a time
        known = {id(one.tensor) for one in self.tracked.tensors if one.optimizer == number}
        current = {id(one) for group in optimizer.param_groups for one in group["params"]}
        return known != current or len(optimizer.param_groups) != len(self.tracked.group_names[number])

    def _begin(self, *, replaces: bool = False) -> None:
        """Start a segment with the current state of the run. All ranks must do so together."""
        run = self.tracked
        if self._buffers is not None and (replaces or self._buffers[0] != self.step):
            self._buffers = None
        self.proof = SegmentProof(self.step)
        for call in self.calls.of:
            call.flags = None
        self.between.begin(run)
        shares = contributions(run, self.methods)
        if not replaces:
            self._check_base(shares[self._rank])
        self._has_copies, self._equal_at = any(share.copies for share in shares), self.step
        self.first = self.step
        if self.bases is not None:
            self.bases.restart(self.step)
        segment = self._on_rank_0(
            lambda: segments.begin(
                self._chain,
                draft_layout(self.methods, shares, uuid.uuid4().hex, self.step, self._options.codec),
                replaces=replaces,
            )
        )
        self._share, self._segment = shares[self._rank], segment
        problem = self._record_start(self._share, segment)
        problems = [one for one in ranks.gather(problem) if one is not None]
        if problems:
            self.log.end(str(problems[0]))
            ranks.gather(None)  # all writers have ended
            self._on_rank_0(lambda: segments.abandon(self._chain, segment))
            raise type(problems[0])(problems[0].what, where=segment.path, hint=problems[0].hint)
        try:
            self._on_rank_0(lambda: segments.publish(self._chain, segment))
        except CkptError as error:
            self.log.end(str(error))
            raise
        if self._buffers is not None:  # the next step has changed them since
            self._buffers = None
            buffers = dict(persistent_buffers(self.tracked))
            self.log.record(RankRecording.record_tensors, self.step + 1, "buffer", buffers)
        self.refresh_watch()

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """Return the result of `work` on rank 0 to all ranks. Raises its error on all ranks."""
        result: Any = None
        if self._rank == 0:
            try:
                result = work()
            except CkptError as error:
                result = error
            except Exception as error:  # the other ranks wait for this result
                result = OutputError(f"the log of gradients cannot be started: {error}", where=self._chain)
        result = ranks.broadcast(result)
        if isinstance(result, CkptError):
            raise result
        return result

    def _check_base(self, share: RankPart) -> None:
        """Raise `UnsupportedError` if the chain has another state at this step: the log would begin with it."""
        reason = differing_base(self.tracked, share, self._chain, self.step)
        if reason is not None:
            raise UnsupportedError(
                f"the state that the chain has at step {self.step} is not that of the run: {reason}",
                where=self._chain,
                hint="Resume the run from this state, or record into another chain.",
            )

    def _record_start(self, share: RankPart, segment: segments.NewSegment) -> CkptError | None:
        """Record the start of the segment. Returns the error if it fails."""
        layout, options = segment.layout.ranks[self._rank], self._options
        settings = WriterSettings(
            folder=str(segment.path),
            rank=self._rank,
            codec=options.codec,
            slot_nbytes=max(layout.size, 1) * 4,
            slots=options.slots,
            flush_steps=self.intervals.flush_steps,
            flush_seconds=options.flush_seconds,
            peers=None if options.peers is None else asdict(options.peers),
        )
        try:
            recording = RankRecording(self.tracked, share, layout, settings, options.stall_seconds)
            self.log.begin(recording)
            if options.random_states:
                recording.record_random_states(self.step, self._random.return_to(self.step))
            recording.record_notes(self.step, self._noted[1] if self._noted[0] == self.step else {})
            recording.record_options(self.step)
            buffers = dict(persistent_buffers(self.tracked)) if self._buffers is None else self._buffers[1]
            recording.record_tensors(self.step, "buffer", buffers)
            self.between.record_extra_states(self.step)
            updated = [n for n in range(len(self.tracked.tensors)) if not recording.is_replayed(n)]
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

    def _start_prover(self) -> None:
        """Start to replay the log beside the run, once it is long enough."""
        due = self.step - self.first == FIRST_PROOFS and any(one.method != UPDATE for one in self.methods)
        if due and self.is_lossless and self._options.prove and self.log.recording is not None:
            try:
                self.proof.start(self._segment.path, self._rank)
            except OSError as error:
                _LOG.warning("the steps of the run are not proved: %s", error.strerror)

    @torch.no_grad()
    def _check_copies(self) -> None:
        """Stop recording if ranks that began with equal tensors have different ones: they were no copies."""
        if not self._has_copies or self.step == self._equal_at:
            return
        problem = differing_copy(self.tracked, self._share)
        if problem is None:
            self._equal_at = self.step
        elif self.log.recording is not None:
            reason = f"{problem}; no step after {self._equal_at} can be trusted"
            self.log.end(reason)
            self.log.warn(reason, "; see `rename` if the ranks have parts of one model")

    def _retry(self, done: int) -> None:
        """If it is time, start a broken recording again on all ranks; if that fails, continue without the log."""
        every = self._options.retry
        if not every or not done or done % every or self.step == self._last_retry:
            return
        self._last_retry = self.step  # only once, with several optimizers or a skipped step
        if not any(ranks.gather(self.log.broken is not None)):
            return
        self.log.end(None)
        try:
            self._begin()
        except CkptError as error:
            self.log.broken = str(error)
            self.first = self.step

    def _record_fingerprint(self) -> None:
        """Record the hashes of all states, and what is proved of the steps before."""
        self.log.record(RankRecording.record_fingerprint, self.step, self.proof.so_far())

    def _record_end(self) -> None:
        """Record the end of a segment."""
        self.log.record(RankRecording.record_end, self.step, self.proof.so_far())

    def _store_due_base(self) -> None:
        """Store the state in a new segment, if a base is due."""
        if self.bases is not None or not self.intervals.base_due(self.step - self.first):
            return
        begin = time.monotonic()
        self._record_fingerprint()
        self.begin_again()
        self.intervals.base_took(time.monotonic() - begin)

    def _continue_bases(self, bases: BaseSchedule) -> None:
        """Copy bases in the background, as long as all steps are replayed."""
        if self.has_updates:
            bases.drop()
            self.bases = None
            _LOG.warning("step %d: no more bases in the background: the steps of the run cannot be replayed", self.step)
        else:
            bases.step_done(self.step)

    def _start_bases(self) -> BackgroundBases | None:
        """Start the process that makes bases; None if the recording is broken."""
        if self.log.working is None or self.bases is None:
            return None
        layout, path = self._segment.layout, self._segment.path

        def settings(nbytes: int, slots: int) -> BaseSettings:
            return BaseSettings(str(self._chain), path.name, self._rank, nbytes, slots, self._options.stall_seconds)

        rank_layout = layout.ranks[self._rank]
        offsets = [(number, part.offset) for number, part, _ in self._share.replayed]
        spread, memory = self.bases.spread, self._options.bases.memory
        return BackgroundBases(self.tracked, rank_layout, offsets, settings, layout.run, spread, memory)

    def _end_dependents(self) -> None:
        """End what needs the writer: bases that are being copied, and the replay beside the run."""
        if self.bases is not None:
            self.bases.drop()
        self.proof.close()


def _is_power_of_8(number: int) -> bool:
    return number > 0 and not number & (number - 1) and number.bit_length() % 3 == 1
