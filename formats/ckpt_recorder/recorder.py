"""The trainer's side: a hook before the optimizer's step has its gradients recorded."""

import os
import uuid
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ckpt_codecs.gradients import gradient_codec
from ckpt_formats.core.errors import CkptError, OutputError, Unsupported
from ckpt_formats.universal.gradients.layout import EXACTNESS, Exactness
from ckpt_recorder import deepspeed, ranks, segments
from ckpt_recorder.link import WriterBroken
from ckpt_recorder.probe import probe
from ckpt_recorder.recording import RankPart, RankRecording, UnknownTensor, draft_layout, rank_part, without_copies
from ckpt_recorder.run import TrackedRun, count_of, plain_run
from ckpt_recorder.writer import WriterSettings

WhenBroken = Literal["warn", "raise"]


class RecorderWarning(UserWarning):
    """The recording has stopped, and training goes on."""


@dataclass(frozen=True)
class RecorderOptions:
    """How to record."""

    codec: str = "exact"
    """`exact`; or `bf16` or `int8`, which round what is stored: states that are restored are approximate then."""
    flush: int = 8
    """Steps after which what was written is brought to the disk. Only a dead machine loses those in between."""
    flush_seconds: float = 10.0
    """The same in seconds, where steps are long."""
    slots: int = 3
    """Steps that the writer may be behind before training waits for it. Each takes the memory of the gradients."""
    stall_seconds: float = 300.0
    """How long training waits for a writer that does not get on, as on a stuck file server. Then it is broken."""
    fingerprint: int = 100
    """Steps between hashes of the whole state, with which a replay is compared; 0: only at both ends."""
    random_states: bool = True
    """Store the states of all random number generators with each step."""
    when_broken: WhenBroken = "warn"
    """`raise` stops training where the log cannot be written; else it goes on without."""
    retry: int = 100
    """Steps after which a recording that broke begins anew."""


class Recorder:
    """Records each step of a run into a chain, from where it is entered to where it is left.

    Attributes:
        step: The number of the step that was done last, or is just being done.
        broken: Why nothing is recorded at the moment; None while all is well.
        exactness: How well steps can be done again: "exact", "same library" or "approximate". See docs/recording.md.
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
        """
        Args:
            model: What is trained: a module, or what DDP, FSDP2, Accelerate or DeepSpeed made of it.
            optimizer: Its optimizer, or a list of several; of a DeepSpeed engine, None will do.
            chain: The folder of the chain, on a file system that all ranks share. It is made if it is not there.
            step: The number of the step that was done last; None: what the engine or the optimizer counted.
            options: The fields of `RecorderOptions`.

        Raises:
            Unsupported: The run cannot be recorded; the message says why.
            OutputError: The chain cannot be written, or another run records into it.
        """
        self.options = RecorderOptions(**options)
        codec = gradient_codec(self.options.codec)
        self.chain = Path(chain)
        self.broken: str | None = None
        self._model, self._optimizer = model, optimizer
        self._rank, self._world = ranks.rank_and_world()
        self._recording: RankRecording | None = None
        self._hooks: list[Any] = []
        self._unwrap: Callable[[], None] | None = None
        self._call = 0
        self._last_retry = -1
        self._run = self._track_run()
        self._probed = [probe(one, _device(self._run, i)) for i, one in enumerate(self._run.optimizers)]
        self.exactness: Exactness = max((one.exactness for one in self._probed), key=EXACTNESS.index)
        if not codec.lossless:
            self.exactness = "approximate"
        self.step = self._first_step() if step is None else step
        self._first = self.step
        self._begin()
        self._attach()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def writer_pid(self) -> int | None:
        """The process that writes, if it has not ended."""
        return None if self._recording is None else self._recording.writer_pid

    def note(self, **items: Any) -> None:
        """Store what else resumes with the step that was done last.

        Args:
            items: Plain values, tensors, arrays, or anything with a `state_dict`, such as a scheduler or a loader. A
                restored checkpoint has them under these names.
        """
        notes = {name: _plain(item) for name, item in items.items()}
        self._guarded(lambda recording: recording.record_notes(self.step, notes))

    def close(self) -> None:
        """Write what was recorded, flush it, and stop."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if self._unwrap is not None:
            self._unwrap()
            self._unwrap = None
        if self._call == 0:
            self._guarded(lambda recording: recording.record_fingerprint(self.step))
            self._guarded(lambda recording: recording.record_end(self.step))
        was_well = self.broken is None
        self._end(None)
        if was_well and self.broken is not None:
            self._say_broken(self.broken, "")

    def _track_run(self) -> TrackedRun:
        if deepspeed.is_engine(self._model):
            return deepspeed.zero_run(self._model, self._rank, self._world)
        given = self._optimizer if isinstance(self._optimizer, (list, tuple)) else [self._optimizer]
        return plain_run(self._model, [_innermost(one) for one in given], self._rank, self._world)

    def _first_step(self) -> int:
        if self._run.step is not None:
            return self._run.step
        counts = [0 for _ in self._run.optimizers]
        for number, one in enumerate(self._run.tensors):
            counts[one.optimizer] = max(counts[one.optimizer], count_of(self._run, number))
        return sum(counts)  # each call of an optimizer is a step, as it is to Lightning

    def _begin(self) -> None:
        """Begin a segment with the state that the run has now. All ranks do so together."""
        run = self._run
        _check_types(run)
        shares = ranks.gather(rank_part(run, self._probed, self._world))
        if len({one.weights for one in shares}) > 1:
            raise Unsupported(
                "the ranks hold different weights under the same names: the run is not data parallel",
                hint="DDP, FSDP2 on meshes of any dimension, and ZeRO can be recorded.",
            )
        shares = without_copies(shares)
        self._first = self.step
        segment = self._on_rank_0(
            lambda: segments.begin(
                self.chain,
                draft_layout(run, self._probed, shares, uuid.uuid4().hex, self.step, self.options.codec),
            )
        )
        problem = self._start(shares[self._rank], segment)
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
        """Have the writer write where the segment begins. Returns why it cannot be done."""
        layout, options = segment.layout.ranks[self._rank], self.options
        settings = WriterSettings(
            *(str(segment.path), self._rank, options.codec, max(layout.size, 1) * 4, options.slots),
            *(options.flush, options.flush_seconds),
        )
        try:
            self._recording = RankRecording(*(self._run, share, layout, settings, self._rank, options.stall_seconds))
            self._recording.record_notes(self.step, {})
            self._recording.record_buffers(self.step)
            if segment.layout.parent is None:
                self._recording.record_start(self.step)
                self._recording.record_frozen(self.step)
            self._recording.record_fingerprint(self.step)
            self._recording.wait_until_flushed()
        except Exception as error:  # the other ranks wait to hear of it
            return str(error) or type(error).__name__
        return None

    def _on_rank_0(self, work: Callable[[], Any]) -> Any:
        """What rank 0 gets from `work`, on all ranks; or its error."""
        result: Any = None
        if self._rank == 0:
            try:
                result = work()
            except CkptError as error:
                result = error
            except Exception as error:  # the other ranks wait to hear of it
                result = OutputError(f"the log of gradients cannot be begun: {error}", where=self.chain)
        result = ranks.broadcast(result)
        if isinstance(result, CkptError):
            raise result
        return result

    def _attach(self) -> None:
        self._hooks = [one.register_step_pre_hook(self._before_step) for one in self._run.optimizers]
        self._hooks += [one.register_step_post_hook(self._after_step) for one in self._run.optimizers]
        if self._run.after_step is not None and self._unwrap is None:
            self._wrap_step(*self._run.after_step)

    def _wrap_step(self, engine: Any, name: str) -> None:
        """Note what the engine resumes with after each of its steps."""
        method, own = getattr(engine, name), vars(engine).get(name)

        def step(*arguments: Any, **named: Any) -> Any:
            before, counted = self.step, self._run.counted
            total = counted() if counted is not None else 0
            result = method(*arguments, **named)
            if self.step == before and counted is not None and counted() != total:
                self.step += 1  # fp16 overflowed: the engine counts the step, and its optimizer did nothing
                self._guarded(lambda recording: recording.record_nothing(self.step))
                self._guarded(lambda recording: recording.record_buffers(self.step))
            if self.step != before:
                self.note(**self._run.notes())
            return result

        def unwrap() -> None:
            if vars(engine).get(name) is not step:
                return  # somebody has wrapped it again: `step` does nothing more from now on
            if own is None:
                delattr(engine, name)
            else:
                setattr(engine, name, own)

        setattr(engine, name, step)
        self._unwrap = unwrap

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> Any:
        """Gradients are there now; or, as under Lightning, not before the closure has run: then that is wrapped."""
        closure = named.get("closure") or next((one for one in arguments[1:] if callable(one)), None)
        if closure is None:
            self._record_call(optimizer)
            return None

        def run() -> Any:
            loss = closure()
            self._record_call(optimizer)
            return loss

        rest = {key: value for key, value in named.items() if key != "closure"}
        return (arguments[0], run), rest

    @torch.no_grad()
    def _record_call(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a call of an optimizer, and count its steps."""
        number = next(i for i, one in enumerate(self._run.optimizers) if one is optimizer)
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and bool(found_inf.item()):
            self._guarded(lambda recording: recording.record_skipped(self.step, number))
            return
        call, count = self._call, self._run.calls_per_step
        if call == 0:
            self._record_due_fingerprint()
        is_last = call == count - 1
        random = is_last and self.options.random_states
        if is_last:  # before the gradients: a step that is there has its buffers
            self._guarded(lambda recording: recording.record_buffers(self.step + 1))
        try:
            self._guarded(lambda recording: recording.record_gradients(self.step + 1, number, (call, count), random))
        except UnknownTensor:
            self._renew()
            self._guarded(lambda recording: recording.record_gradients(self.step + 1, number, (call, count), random))
        self._call = (call + 1) % count
        if is_last:
            self.step += 1

    def _after_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: dict[str, Any]) -> None:
        """Begin anew where the recording broke, now that all states are those of one step."""
        done, every = self.step - self._first, self.options.retry
        if self._call or not every or not done or done % every or self.step == self._last_retry:
            return
        self._last_retry = self.step  # once, of several optimizers or a skipped step
        if any(ranks.gather(self.broken is not None)):
            self._retry()

    def _record_due_fingerprint(self) -> None:
        done, every = self.step - self._first, self.options.fingerprint
        if every and done and done % every == 0:
            self._guarded(lambda recording: recording.record_fingerprint(self.step))

    def _guarded(self, work: Callable[[RankRecording], None]) -> None:
        """Have something recorded, if recording goes on; if it breaks, say so once."""
        if self._recording is None or self.broken is not None:
            return
        try:
            work(self._recording)
        except WriterBroken as error:
            self._end(str(error))
            self._say_broken(str(error), f"; it is tried again every {self.options.retry} steps")

    def _say_broken(self, reason: str, again: str) -> None:
        if self.options.when_broken == "raise":
            raise OutputError(f"the log of gradients cannot be written: {reason}", where=self.chain)
        warnings.warn(
            f"step {self.step} and what follows is not recorded into {self.chain}: {reason}"
            + (again if self.options.retry else ""),
            RecorderWarning,
            stacklevel=3,
        )

    def _end(self, reason: str | None) -> None:
        """Let the writer end. `reason`: why the recording is broken, if it is."""
        recording, self._recording = self._recording, None
        late = recording.close() if recording is not None else None
        self.broken = reason or self.broken or late

    def _retry(self) -> None:
        """Begin anew, on all ranks; where that fails, go on without."""
        self._end(None)
        try:
            self._begin()
        except CkptError as error:
            self.broken = str(error)
            self._first = self.step

    def _renew(self) -> None:
        """Begin a new segment, since the optimizer has other tensors than before: groups were added."""
        self._end(None)
        try:
            self._run = self._track_run()
            self._begin()
        except CkptError as error:
            self.broken, self._first = str(error), self.step
            self._say_broken(str(error), f"; it is tried again every {self.options.retry} steps")


def _innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that does the arithmetic, beneath what Accelerate and others put around it."""
    while not isinstance(optimizer, torch.optim.Optimizer) or hasattr(optimizer, "optimizer"):
        inner = getattr(optimizer, "optimizer", None)
        if inner is None:
            raise Unsupported(f"{type(optimizer).__name__} is no optimizer of torch")
        optimizer = inner
    return optimizer


def _device(run: TrackedRun, number: int) -> torch.device:
    return next((one.tensor.device for one in run.tensors if one.optimizer == number), torch.device("cpu"))


def _check_types(run: TrackedRun) -> None:
    for one in run.tensors:
        if one.tensor.dtype != torch.float32:
            name = next((part.name for part in one.parts), "a parameter")
            raise Unsupported(
                f"the optimizer steps `{name}` in {str(one.tensor.dtype).removeprefix('torch.')}; steps are recorded "
                "where it steps weights in float32",
                hint="Train in mixed precision with float32 master weights.",
            )


def _plain(item: Any) -> Any:
    """A noted item as plain data."""
    if hasattr(item, "state_dict"):
        item = item.state_dict()
    if isinstance(item, torch.Tensor):
        array = item.detach().cpu().contiguous()
        if array.dtype == torch.bfloat16:
            return {"bfloat16": array.view(torch.int16).numpy()}
        return array.numpy()
    if isinstance(item, dict):
        return {key: _plain(value) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return type(item)(_plain(value) for value in item) if type(item) in (list, tuple) else list(map(_plain, item))
    if isinstance(item, (np.ndarray, np.generic, str, int, float, bool, bytes, type(None), complex, set, frozenset)):
        return item
    raise TypeError(f"note() takes plain values, tensors, arrays and what has a state_dict, not {type(item).__name__}")
