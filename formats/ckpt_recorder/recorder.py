"""The recorder in the trainer: hooks before each step of the optimizer record its gradients."""

import os
import time
import uuid
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ckpt_codecs.gradients import gradient_codec
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError, InvalidArgumentError, OutputError, UnsupportedError
from ckpt_formats.universal.gradients.layout import EXACTNESS, Exactness
from ckpt_formats.universal.gradients.noted_tensors import noted_tensor
from ckpt_recorder import deepspeed, megatron, open_recorders, ranks, segments
from ckpt_recorder.background_bases import BackgroundBases
from ckpt_recorder.base_pieces import BaseSettings
from ckpt_recorder.fsdp1 import fsdp1_run, is_fsdp1
from ckpt_recorder.holders import RankPart, contributions, differing_copy
from ckpt_recorder.intervals import RecorderIntervals
from ckpt_recorder.link import WriterBroken
from ckpt_recorder.probe import in_this_mode, probe
from ckpt_recorder.random_states import RandomStates
from ckpt_recorder.recording import RankRecording, UnknownTensor, draft_layout
from ckpt_recorder.resumed_steps import resumed_step
from ckpt_recorder.run import TrackedRun, count_of, dtype_name, persistent_buffers, plain_run, renamed
from ckpt_recorder.writer import WriterSettings
from ckpt_recorder.zero_redundancy import is_zero_redundancy, zero_redundancy_run

WhenBroken = Literal["warn", "raise"]


class RecorderWarning(UserWarning):
    """The recording has stopped, and training continues."""


@dataclass(frozen=True)
class RecorderOptions:
    """The options of a recorder."""

    codec: str = "exact"
    """`exact`; or `bf16` or `int8`, which round the gradients: restored states are then approximate."""
    base: int | Literal["auto", "rolling", "at once"] = 0
    """The number of steps between states that the log stores; 0: only the one at its start. `"auto"`: the number with
    the lowest waste for the times that the run measures, and `mtbf`. Training stops while such a state is stored.
    It goes on with `"rolling"` and `"at once"`, which copy the state in the background: piece by piece after several
    steps, or all of one step, for which the next update waits."""
    base_every: int | Literal["auto"] = 1000
    """The number of steps between bases that are copied in the background; `"auto"`: as for `base`."""
    base_spread: int = 100
    """The number of steps over which a rolling base is copied; at most `base_every`."""
    base_memory: int = 256 << 20
    """The maximum size in bytes of the buffer for pieces of such a base. It has room for four chunks in any case."""
    flush: int | Literal["auto"] = 8
    """The number of steps between flushes to the disk, or `"auto"`. Only a crash of the machine loses steps after the
    last flush."""
    mtbf: float | None = None
    """The mean seconds between failures of the whole job. `"auto"` needs it."""
    flush_seconds: float = 10.0
    """The maximum number of seconds between flushes."""
    slots: int = 3
    """The number of steps in the ring before training waits for the writer. Each takes the memory of the gradients."""
    stall_seconds: float = 300.0
    """The time that training waits for a writer without progress, before the recording counts as broken; and that a
    rank waits for the others at the start."""
    fingerprint: int = 100
    """The number of steps between hashes of the full state, which a replay compares; 0: only at both ends."""
    random_states: bool = True
    """Store the states of all random number generators with each step."""
    when_broken: WhenBroken = "warn"
    """`raise` stops training if the log cannot be written; `warn` continues without the log."""
    retry: int = 100
    """The number of steps after which a broken recording starts again; 0: never."""
    rename: Callable[[str], str] | None = None
    """Returns the name in the log of a parameter or buffer, from its name in this rank's model: for ranks that have
    parts of one model under the same names, such as stages of a pipeline."""


class Recorder:
    """Records each step of a run into a chain. A context manager, which closes the log at its end.

    Attributes:
        step: The number of the last step, or of the current one.
        broken: Why nothing is recorded at the moment; None if the recording works.
        exactness: The exactness of a replay: "exact", "same library" or "approximate". See docs/recording.md.
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
        base = self.options.base
        self._in_background = base in ("rolling", "at once")
        if base == "rolling" or base == "at once":
            self._intervals = RecorderIntervals(
                self.options.base_every, self.options.flush, self.options.mtbf, base_option="base_every"
            )
            _check_positive("base_spread", self.options.base_spread)
            _check_positive("base_memory", self.options.base_memory)
        else:
            self._intervals = RecorderIntervals(base, self.options.flush, self.options.mtbf)
        self._bases: BackgroundBases | None = None
        self._unused_bases: weakref.finalize[Any, Any] | None = None
        """Ends the process that makes bases if the recorder is collected before it is closed."""
        self._base_from = 0
        """The step from which the interval to the next base counts."""
        self._base_begun: int | None = None
        """The step after which this rank began a base that is not done."""
        self._base_steps_left = 0
        """The number of steps after which pieces of a base are still copied, the same on all ranks."""
        codec = gradient_codec(self.options.codec)
        self.chain = Path(chain).absolute()  # the loop may change its working directory
        self.broken: str | None = None
        self.is_in_block = False
        self._model, self._optimizer = model, optimizer
        self._pid = os.getpid()
        self._rank, self._world = ranks.rank_and_world()
        self._recording: RankRecording | None = None
        self._hooks: list[Any] = []
        self._unwrap: Callable[[], None] | None = None
        self._call = 0
        self._last_retry = -1
        self._buffers: dict[str, torch.Tensor] | None = None
        self._random = RandomStates()
        ranks.await_all(self.options.stall_seconds, _warn)
        self._run = self._track_run()
        self._replace_others()
        self._probed = [in_this_mode(probe(one, _device(self._run, i))) for i, one in enumerate(self._run.optimizers)]
        self.exactness: Exactness = max((one.exactness for one in self._probed), key=EXACTNESS.index)
        if not codec.lossless:
            self.exactness = "approximate"
        if base == "rolling" and self.exactness == "approximate":
            raise UnsupportedError(
                "a replay of this run is approximate: it cannot bring the pieces of a base to one step",
                where="base",
                hint='Use base="at once".',
            )
        self.step = max(ranks.gather(self._first_step())) if step is None else step
        self._first = self.step
        begin = time.monotonic()
        self._begin()
        self._intervals.base_took(time.monotonic() - begin)
        self._attach()
        open_recorders.add(self)

    def __enter__(self) -> "Recorder":
        self.is_in_block = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def writer_pid(self) -> int | None:
        """The id of the writer process, if it has not ended."""
        return None if self._recording is None else self._recording.writer_pid

    def note(self, **items: Any) -> None:
        """Record other values that the run needs to resume after the last step, and the current random states.

        Args:
            items: Plain values, tensors, arrays, or anything with a `state_dict`, such as a scheduler or a loader. A
                restored checkpoint has them under these names.
        """
        notes = {name: _plain(item) for name, item in items.items()}
        self._record_random_states(self.step)
        self._record(lambda recording: recording.record_notes(self.step, notes))

    @property
    def optimizers(self) -> tuple[torch.optim.Optimizer, ...]:
        """The innermost optimizers, whose steps are recorded."""
        return self._run.optimizers

    def release(self, reason: str) -> None:
        """Record nothing more, as if the recorder had been killed after the last step. `reason`: why.

        In a process that was forked from that of the run, this leaves the recording of the run alone.
        """
        self._detach()
        if os.getpid() == self._pid:
            self._end(reason)
        self._forget_bases()
        self.broken, self._recording, self._bases = reason, None, None

    def close(self) -> None:
        """Write and flush all records, and stop."""
        self._detach()
        open_recorders.remove(self)
        if self._call == 0:
            self._record(lambda recording: recording.record_fingerprint(self.step))
            self._record(lambda recording: recording.record_end(self.step))
        was_working = self.broken is None
        bases, self._bases = self._bases, None
        self._end(None)
        if bases is not None:
            bases.close(wait=True)
            self._warn_of_bases(bases)
        if was_working and self.broken is not None:
            self._warn_broken(self.broken, "")

    def _track_run(self) -> TrackedRun:
        if deepspeed.is_engine(self._model):
            run = deepspeed.deepspeed_run(self._model, self._rank)
        elif megatron.is_megatron(self._optimizer):
            run = megatron.megatron_run(self._model, self._optimizer)
        else:
            optimizers = self._optimizer if isinstance(self._optimizer, (list, tuple)) else [self._optimizer]
            run = _torch_run(self._model, [_innermost(one) for one in optimizers])
        return run if self.options.rename is None else renamed(run, self.options.rename)

    def _first_step(self) -> int:
        if self._run.step is not None:
            return self._run.step
        if (resumed := resumed_step(*self._run.optimizers)) is not None:
            return resumed
        counts = [0 for _ in self._run.optimizers]
        for number, one in enumerate(self._run.tensors):
            counts[one.optimizer] = max(counts[one.optimizer], count_of(self._run, number))
        return sum(counts)  # each call of an optimizer is a step, as in Lightning

    def _begin(self) -> None:
        """Start a segment with the current state of the run. All ranks must do so together."""
        run = self._run
        _check_types(run)
        shares = contributions(run, self._probed)
        self._has_copies, self._equal_at = any(share.copies for share in shares), self.step
        self._first = self._base_from = self.step
        self._base_steps_left = 0
        segment = self._on_rank_0(
            lambda: segments.begin(
                self.chain,
                draft_layout(self._probed, shares, uuid.uuid4().hex, self.step, self.options.codec),
            )
        )
        self._share, self._segment = shares[self._rank], segment
        problem = self._start(self._share, segment)
        problems = [one for one in ranks.gather(problem) if one is not None]
        if problems:
            self._end(problems[0])
            ranks.gather(None)  # all writers have ended
            self._on_rank_0(lambda: segments.abandon(self.chain, segment))
            raise OutputError(f"the log of gradients cannot be written: {problems[0]}", where=segment.path)
        try:
            self._on_rank_0(lambda: segments.publish(self.chain, segment))
        except CkptError as error:
            self._end(str(error))
            raise
        self.broken = None

    def _start(self, share: RankPart, segment: segments.NewSegment) -> str | None:
        """Record the start of the segment. Returns the error message if it fails."""
        layout, options = segment.layout.ranks[self._rank], self.options
        settings = WriterSettings(
            *(str(segment.path), self._rank, options.codec, max(layout.size, 1) * 4, options.slots),
            *(self._intervals.flush_steps, options.flush_seconds),
        )
        try:
            self._recording = RankRecording(self._run, share, layout, settings, options.stall_seconds)
            if options.random_states:
                self._recording.record_random_states(self.step, self._random.return_to(self.step))
            self._recording.record_notes(self.step, {})
            self._recording.record_buffers(self.step, self._buffers)
            if segment.layout.parent is None:
                self._recording.record_start(self.step)
                self._recording.record_frozen(self.step)
            self._recording.record_fingerprint(self.step)
            self._recording.wait_until_flushed()
        except Exception as error:  # the other ranks wait for this result
            return str(error) or type(error).__name__
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

    def _detach(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None

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

    def _attach(self) -> None:
        self._hooks = [one.register_step_pre_hook(self._before_step) for one in self._run.optimizers]
        self._hooks += [one.register_step_post_hook(self._after_step) for one in self._run.optimizers]
        if self._run.after_step is not None and self._unwrap is None:
            self._wrap_step(*self._run.after_step)

    def _wrap_step(self, engine: Any, name: str) -> None:
        """Wrap the step method of an engine, to record its notes after each step."""
        method, instance_attribute = getattr(engine, name), vars(engine).get(name)

        def step(*arguments: Any, **named: Any) -> Any:
            before, counted = self.step, self._run.counted
            total = counted() if counted is not None else 0
            result = method(*arguments, **named)
            if self.step == before and counted is not None and counted() != total:
                self.step += 1  # overflow of fp16: the engine counts the step, but its optimizer did nothing
                self._record(lambda recording: recording.record_nothing(self.step))
                self._record(lambda recording: recording.record_buffers(self.step))
            if self.step != before:
                self.note(**self._run.notes())
            return result

        def unwrap() -> None:
            if vars(engine).get(name) is not step:
                return  # somebody has wrapped it again: `step` has no effect from now on
            if instance_attribute is None:
                delattr(engine, name)
            else:
                setattr(engine, name, instance_attribute)

        setattr(engine, name, step)
        self._unwrap = unwrap

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> Any:
        """Record the gradients, or wrap the closure that computes them, as Lightning's does."""
        closure = named.get("closure") or next((one for one in arguments[1:] if callable(one)), None)
        if closure is None:
            self._record_call(optimizer)
            return None

        def run() -> Any:
            loss = closure()
            self._record_call(optimizer)
            return loss

        remaining = {key: value for key, value in named.items() if key != "closure"}
        return (arguments[0], run), remaining

    def _record_call(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a call of an optimizer, and wait for pieces of a base that it would change."""
        self._record_update(optimizer)
        if self._bases is not None and self._recording is not None and self._bases.is_copying:
            tensors = self._recording.tensors_of(optimizer)
            self._intervals.copy_waited(self._bases.wait(tensors))

    @torch.no_grad()
    def _record_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Record the gradients of a call of an optimizer, and count steps."""
        number = next(i for i, one in enumerate(self._run.optimizers) if one is optimizer)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf.item()):
            self._record(lambda recording: recording.record_skipped(self.step, number))
            return
        call, count = self._call, self._run.calls_per_step
        if call == 0:
            self._store_due_base()
            self._record_due_fingerprint()
        is_last = call == count - 1
        if is_last:  # before the gradients, so that every complete step has its buffers
            self._record_random_states(self.step + 1)
            self._record(lambda recording: recording.record_buffers(self.step + 1))
        try:
            self._record(lambda recording: recording.record_gradients(self.step + 1, number, (call, count)))
        except UnknownTensor:
            self._renew()
            if is_last:
                self._record_random_states(self.step + 1)
            self._record(lambda recording: recording.record_gradients(self.step + 1, number, (call, count)))
        self._call = (call + 1) % count
        if is_last:
            self.step += 1
            recording = self._recording
            waited = 0.0 if recording is None else recording.waited
            if self._intervals.step_done(self.step - self._base_from, waited):
                self._record(lambda recording: recording.set_flush_steps(self._intervals.flush_steps))

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> None:
        """Start a broken recording again, or copy pieces of a base. All states belong to one step here."""
        done, every = self.step - self._first, self.options.retry
        if not self._call:
            self._record_random_states(self.step)
        if not self._call and _is_power_of_8(done):  # at each, all copies of all states are hashed
            self._check_copies()
        if self._in_background:
            if not self._call:
                self._continue_bases()
        elif not self._call and self._intervals.base_due(done):
            # The base is stored before the next step, after its forward pass, which changes buffers.
            self._buffers = {name: tensor.clone() for name, tensor in persistent_buffers(self._run)}
        if self._call or not every or not done or done % every or self.step == self._last_retry:
            return
        self._last_retry = self.step  # only once, with several optimizers or a skipped step
        if any(ranks.gather(self.broken is not None)):
            self._retry()

    @torch.no_grad()
    def _check_copies(self) -> None:
        """Stop recording if ranks that began with equal tensors have different ones: they were no copies."""
        if not self._has_copies or self.step == self._equal_at:
            return
        problem = differing_copy(self._run, self._share)
        if problem is None:
            self._equal_at = self.step
        elif self._recording is not None:
            reason = f"{problem}; no step after {self._equal_at} can be trusted"
            self._end(reason)
            self._warn_broken(reason, "; see `rename` if the ranks have parts of one model")

    def _store_due_base(self) -> None:
        """Store the state in a new segment, if a base is due. Here the notes of the last step are recorded."""
        if self._in_background or not self._intervals.base_due(self.step - self._first):
            return
        begin = time.monotonic()
        self._record(lambda recording: recording.record_fingerprint(self.step))
        self._record(lambda recording: recording.record_end(self.step))
        self._begin_again()
        self._buffers = None
        self._intervals.base_took(time.monotonic() - begin)

    @torch.no_grad()
    def _continue_bases(self) -> None:
        """Begin a base if one is due, and copy the pieces of this step. All ranks do so at the same steps."""
        if self._bases is None:
            self._bases = self._start_bases()
        bases = self._bases
        if bases is not None:
            self._warn_of_bases(bases)
            if self._base_begun is not None and bases.is_ready:
                self._intervals.base_copied(bases.waited, self.step - self._base_begun)
                self._base_begun = None
        if not self._base_steps_left and self._intervals.base_due(self.step - self._base_from):
            self._begin_base()
        if self._base_steps_left:
            self._base_steps_left -= 1
            if self._bases is not None:
                self._bases.copy_next(self.step)

    def _begin_base(self) -> None:
        """Begin a base if the process of each rank is ready for it; if not, a little later."""
        bases = self._bases
        has_room = bases is not None and bases.has_room()
        if not all(ranks.gather(bases is not None and has_room and bases.is_ready)):
            self._base_from += max(1, self._intervals.base_steps // 16)
            if bases is not None and (bases.has_failed or not has_room):
                self._drop_bases()  # another one starts after the next step
            return
        assert bases is not None
        self._base_from = self._base_begun = self.step
        self._base_steps_left = self._base_spread
        bases.begin(self.step)

    @property
    def _base_spread(self) -> int:
        """The number of steps over which a base is copied, the same on all ranks."""
        every = self.options.base_every
        if self.options.base == "at once":
            return 1
        return self.options.base_spread if every == "auto" else min(self.options.base_spread, every)

    def _start_bases(self) -> BackgroundBases | None:
        """Start the process that makes bases; None if the recording is broken."""
        if self._recording is None or self.broken is not None:
            return None
        layout, path = self._segment.layout, self._segment.path

        def settings(nbytes: int, slots: int) -> BaseSettings:
            return BaseSettings(str(self.chain), path.name, self._rank, nbytes, slots, self.options.stall_seconds)

        rank_layout = layout.ranks[self._rank]
        offsets = [(number, part.offset) for number, part, _ in self._share.parts]
        bases = BackgroundBases(
            *(self._run, rank_layout, offsets, settings, layout.run, self._base_spread, self.options.base_memory)
        )
        self._unused_bases = weakref.finalize(self, bases.close, wait=False)
        self._unused_bases.atexit = False
        return bases

    def _warn_of_bases(self, bases: BackgroundBases) -> None:
        """Warn of bases that were not stored. Training and the log go on."""
        while bases.problems:
            warnings.warn(f"{self.chain}: {bases.problems.popleft()}", RecorderWarning, stacklevel=4)

    def _forget_bases(self) -> None:
        if self._unused_bases is not None:
            self._unused_bases.detach()
            self._unused_bases = None

    def _drop_bases(self) -> None:
        """End the process that makes bases. A base that is not complete is given up."""
        bases, self._bases = self._bases, None
        self._forget_bases()
        if bases is not None:
            bases.drop()
            bases.close(wait=False)
        self._base_begun = None

    def _record_random_states(self, step: int) -> None:
        """Record the generators that changed: their states are those at `step`, unless they are recorded again."""
        if self.options.random_states and self._recording is not None and self.broken is None:
            states = self._random.changed(step)
            self._record(lambda recording: recording.record_random_states(step, states))

    def _record_due_fingerprint(self) -> None:
        done, every = self.step - self._first, self.options.fingerprint
        if every and done and done % every == 0:
            self._record(lambda recording: recording.record_fingerprint(self.step))

    def _record(self, work: Callable[[RankRecording], None]) -> None:
        """Record with `work` unless the recording is broken; if it breaks now, warn once."""
        if self._recording is None or self.broken is not None:
            return
        try:
            work(self._recording)
        except WriterBroken as error:
            self._end(str(error))
            self._warn_broken(str(error), f"; the recorder tries again every {self.options.retry} steps")

    def _warn_broken(self, reason: str, again: str) -> None:
        if self.options.when_broken == "raise":
            raise OutputError(f"the log of gradients cannot be written: {reason}", where=self.chain)
        warnings.warn(
            f"step {self.step} and later steps are not recorded into {self.chain}: {reason}"
            + (again if self.options.retry else ""),
            RecorderWarning,
            stacklevel=3,
        )

    def _end(self, reason: str | None) -> None:
        """End the writer. `reason`: why the recording is broken, if it is."""
        self._drop_bases()
        recording, self._recording = self._recording, None
        late = recording.close() if recording is not None else None
        self.broken = reason or self.broken or late

    def _retry(self) -> None:
        """Start again on all ranks; if that fails, continue without the log."""
        self._end(None)
        try:
            self._begin()
        except CkptError as error:
            self.broken = str(error)
            self._first = self.step

    def _renew(self) -> None:
        """Start a new segment after groups were added to the optimizer."""
        self._begin_again(lambda: setattr(self, "_run", self._track_run()))

    def _begin_again(self, prepare: Callable[[], None] = lambda: None) -> None:
        """Start a new segment at the current step; if that fails, continue without the log."""
        self._end(None)
        try:
            prepare()
            self._begin()
        except CkptError as error:
            self.broken, self._first = str(error), self.step
            self._warn_broken(str(error), f"; the recorder tries again every {self.options.retry} steps")


def _torch_run(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> TrackedRun:
    """The run of optimizers of torch."""
    if is_fsdp1(model):
        return fsdp1_run(model, optimizers)
    if is_zero_redundancy(optimizers):
        return zero_redundancy_run(model, optimizers)
    return plain_run(model, optimizers)


def _warn(text: str) -> None:
    warnings.warn(text, RecorderWarning, stacklevel=5)


def _is_power_of_8(number: int) -> bool:
    return number > 0 and not number & (number - 1) and number.bit_length() % 3 == 1


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer inside the wrappers of Accelerate and others. Raises `InvalidArgumentError` if there is none."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise InvalidArgumentError(f"{type(optimizer).__name__} is not an optimizer of torch")
        optimizer = inner
    return optimizer


def _device(run: TrackedRun, number: int) -> torch.device:
    return next((one.tensor.device for one in run.tensors if one.optimizer == number), torch.device("cpu"))


def _check_positive(option: str, value: Any) -> None:
    if not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{value!r} cannot be `{option}`", where=option, hint="Give a number of at least 1.")


def _check_types(run: TrackedRun) -> None:
    for one in run.tensors:
        if one.tensor.dtype != torch.float32:
            name = next((part.name for part in one.parts), "a parameter")
            raise UnsupportedError(
                f"the optimizer steps `{name}` in {str(one.tensor.dtype).removeprefix('torch.')}; steps can "
                "be recorded only if it steps weights in float32",
                hint="Train in mixed precision with float32 master weights.",
            )


def _values(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The values of a tensor; NumPy itself lacks some types of torch."""
    values, name = tensor.detach().cpu().contiguous(), dtype_name(tensor.dtype)
    if name not in DTYPES:
        raise TypeError(f"note() cannot record a tensor of {tensor.dtype}")
    return values.reshape(-1).view(torch.uint8).numpy().view(DTYPES[name]).reshape(values.shape)


def _plain(item: Any) -> Any:
    """The item of a note as plain data."""
    if hasattr(item, "state_dict"):
        item = item.state_dict()
    if isinstance(item, torch.Tensor):
        return noted_tensor(_values(item))
    if isinstance(item, dict):
        return {key: _plain(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(_plain(value) for value in item) if type(item) in (list, tuple) else list(map(_plain, item))
    if isinstance(item, (np.ndarray, np.generic, str, int, float, bool, bytes, type(None), complex, set, frozenset)):
        return item
    raise TypeError(
        f"note() takes plain values, tensors, arrays and objects with a state_dict, not {type(item).__name__}"
    )
