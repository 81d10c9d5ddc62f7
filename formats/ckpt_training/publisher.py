"""Publishing a live run: after each step, its weights are in a chain that inference workers follow.

A thread copies this rank's share of the weights during the next forward pass, and a process without torch compares,
codes and stores it. The training waits for nothing but the copy. Which steps are published is decided by the process of
rank 0, and announced in advance (`writing.publish_process`), so that all ranks publish and skip the same steps.
"""

import json
import os
import re
import sys
import threading
import time
import uuid
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ckpt.publishing.retention import KeepSteps
from ckpt_formats.core.arguments import Count, checked
from ckpt_formats.core.dtypes import SHORT_NAMES
from ckpt_formats.core.errors import CkptError, IncompleteError, InvalidArgumentError, UnsupportedError
from ckpt_formats.names.tables import family_of
from ckpt_formats.universal.published.model import MAX_FILE
from ckpt_formats.universal.published.records import ObjectRef
from ckpt_training import ranks
from ckpt_training.engines import megatron
from ckpt_training.engines.registry import check_initialized, tracked_run
from ckpt_training.engines.run import TrackedRun, clean_name, renamed, reshard
from ckpt_training.published_weights import Names, agree_on_weights
from ckpt_training.run_steps import RunSteps
from ckpt_training.save_plan import SavedShard
from ckpt_training.snapshot import Snapshot, SnapshotContext, SnapshotTask, SnapshotThread
from ckpt_training.writing.publish_orders import MISSED, MODULE, BeginPublish, Mode, NoteOccasion, PublishSettings
from ckpt_training.writing.ring import Ring

_SLOTS = 4
_LEAST_SLOT = 1 << 16
_CONFIG, _GENERATION = "config.json", "generation_config.json"
_UNKNOWN = "the rank does not know which step is published next"


class PublisherWarning(UserWarning):
    """A step was not published. Training goes on, and later steps are tried."""


@dataclass(frozen=True)
class PublishResult:
    """A step that was published.

    Attributes:
        step: Its number.
        epoch: The epoch of the chain.
        kind: `base` or `delta`; `same` if the chain had this very state already.
        nbytes: The bytes that this rank has stored.
        seconds: The time from the update until it was published.
        cpu_seconds: The CPU time of this rank's process.
    """

    step: int
    epoch: int
    kind: str
    nbytes: int
    seconds: float
    cpu_seconds: float


class Publisher(SnapshotContext):
    """Publishes the weights of a run while it trains. A context manager, which waits for the last step at its end.

    Attributes:
        step: The number of the last step of the run.
        skipped: The number of steps that were due and not published, because an earlier one was on its way.
        published: The last published step; None: none yet.
        waited: Seconds for which updates have waited until the weights before them were copied.
        writer_pid: The id of the process that publishes this rank's share.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        chain: str | os.PathLike[str],
        *,
        dtype: str | None = "bf16",
        names: Names = "hf",
        every: int = 1,
        keep: KeepSteps | None = "last:200",
        folds: bool = True,
        step: int | None = None,
        rename: Any = None,
        files: Mapping[str, str | os.PathLike[str]] | None = None,
        signing_key: bytes | None = None,
        memory: int = 64 << 20,
        stall_seconds: float = 120.0,
    ) -> None:
        """Publish the weights as they are now, and after each step. All ranks must do so together.

        If the chain has a later step than the run, or another state of this one, a new epoch begins.

        Args:
            model: The model: a module, or the result of DDP, FSDP, Accelerate or DeepSpeed, or Megatron's chunks.
            optimizer: Its optimizer, or a list of them; None for a DeepSpeed engine, or if you call `publish` yourself.
            chain: The published chain (`policy.chain`), or its URL. It is created if it does not exist. All ranks must
                reach it under this name.
            dtype: The dtype of parameters in floating point, rounded to nearest even; None: their own.
            names: `hf`: the names that transformers has in files; `as-is`: those of the model.
            every: Publish each step of which the number since the start is a multiple.
            keep: How many steps stay in the chain, such as `last:200`; None: all.
            folds: Whether steps after a base are also stored as folds, for followers that were away: each 4th one as a
                delta over 4 steps, each 16th one over 16 and over 48. Each rank then has up to four copies of its
                values in temporary files.
            step: The number of the last step; None: the count of the engine or of the optimizer.
            rename: Gives the name in the full model of a tensor of this rank's model, for ranks with parts of one
                model.
            files: Files of the model for those that follow, by name, such as `tokenizer.json`. Those of transformers'
                configuration are written for its models.
            signing_key: Signs what is published; followers that have the key refuse all else.
            memory: The bytes of memory for values on their way to the process, on each rank.
            stall_seconds: How long a rank waits for another one before a step is not published.

        Raises:
            UnsupportedError: The run cannot be published: on all ranks; the message states why.
            InvalidArgumentError: An option has a value that it cannot have.
            OutputError: The chain cannot be written.
            LockedError: Another run publishes into the chain.
        """
        text = os.fspath(chain)
        self._chain = text if "://" in text else os.path.abspath(text)
        _check(every, memory, keep)
        self._every, self._stall_seconds = every, stall_seconds
        self._rank, self._world = ranks.rank_and_world()
        self._is_closed, self._has_warned = False, False
        with ranks.together():
            check_initialized(model)
            run = tracked_run(model, optimizer, self._rank, is_recorded=False)
            self._run = run if rename is None else renamed(run, rename)
            contents, paths = _files_of(self._run, dtype, files or {})
        config = json.loads(contents[_CONFIG]) if _CONFIG in contents else None
        with ranks.together():
            if names == "hf" and config is None and not megatron.is_megatron(model, optimizer):
                raise UnsupportedError(
                    f"the Hugging Face names of a {type(self._run.model).__name__} are not known",
                    hint='Pass names="as-is", or files={"config.json": PATH} with the configuration of its model.',
                )
            if names == "hf" and config is not None and family_of(config) is None:
                _check_conversions(self._run.model)
        self._weights = agree_on_weights(self._run, dtype, names, config)
        is_signed = signing_key is not None
        refs = {name: ObjectRef.of(one.encode(), is_signed) for name, one in contents.items()}
        refs |= {name: ObjectRef.of(Path(path).read_bytes(), is_signed) for name, path in paths.items()}
        described, token = (
            ranks.broadcast_bytes(one.encode()).decode()
            for one in (self._weights.model.with_files(refs).to_bytes().decode(), uuid.uuid4().hex)
        )

        def settings(slot_nbytes: int, slots: int) -> PublishSettings:
            is_first = self._rank == 0
            return PublishSettings(
                target=self._chain,
                rank=self._rank,
                ranks=self._world,
                token=token,
                model=described,
                slot_nbytes=slot_nbytes,
                slots=slots,
                seconds=stall_seconds,
                keep=keep,
                folds=folds,
                signing_key=None if signing_key is None else signing_key.hex(),
                files=contents if is_first else {},
                paths={name: str(path) for name, path in paths.items()} if is_first else {},
            )

        self._lock = threading.Lock()
        """For what the thread of the snapshots tells this one."""
        self._next: tuple[int, Mode] | None = (0, "start")
        """The next occasion that is published, and how; None: this rank does not know it yet, or any more."""
        self._announced = BeginPublish(0, 0, "start")
        """The last step that was announced to this rank."""
        self._occasion, self._calls, self._attempts = 0, 0, 0
        self._passed: dict[int, int] = {}
        """The steps of the occasions that this rank has skipped since the last one that it did not."""
        self._snapshot: Snapshot | None = None
        """The step on its way, or the last one that was."""
        self._update_time = time.monotonic()
        """When the update of that step ended."""
        self._answers: dict[str, Any] = {}
        self.skipped = 0
        self.published: PublishResult | None = None
        device = next((one.memory.device for one in self._weights.shards(self._run)), torch.device("cpu"))
        ring = Ring(max(memory // _SLOTS, _LEAST_SLOT), _SLOTS)
        task = SnapshotTask(MODULE, "the published steps", "published", _without_rank)
        self._thread = SnapshotThread(settings, ring, device, task, self._answered)
        self._unclosed = weakref.finalize(self, self._thread.close, 0.0)
        self._unclosed.atexit = False
        try:
            with ranks.together():
                if self._rank == 0:
                    self._open_chain()
            self._steps = RunSteps(self._run, model, optimizer, step, self._thread.wait_copied, self._step_done)
            self.step = self._steps.step
            self._take(BeginPublish(self.step, 0, "start"))
            self._thread.wait_copied()
        except BaseException:
            self._thread.close(0.0)
            raise

    def publish(self, step: int) -> None:
        """Publish the weights as they are now as `step`, unless an earlier step is on its way on some rank.

        For trainers whose optimizer ckpt cannot follow, which pass `optimizer=None`. All ranks must call it, without
        waiting for each other. It returns at once; the weights may change after `wait_copied`, or with the next step of
        an optimizer that the Publisher has.

        Raises `InvalidArgumentError` for a step that is not after the last one, or after `close`.
        """
        if self._is_closed:
            raise InvalidArgumentError("the Publisher is closed", where=self._chain)
        if isinstance(step, bool) or not isinstance(step, int) or step <= self.step:
            raise InvalidArgumentError(f"step {step!r:.40} is not a number after {self.step}, the last step")
        reshard(self._run.model)
        self._offer(step)

    def wait_copied(self) -> None:
        """Wait until the weights of the step that is being published are copied, and may change."""
        self._thread.wait_copied()

    def wait(self, step: int | None = None, timeout: float | None = None) -> PublishResult:
        """Wait until a step or a later one is published, and return the last published one. All ranks must call it.

        If the step was skipped, the weights as they are now are published as the last step of the run.

        Args:
            step: The number of a step that is done; None: the last one.
            timeout: Seconds to wait at most.

        Raises the `CkptError` of the rank that failed, `TimeoutError`, and `InvalidArgumentError` for a later step.
        """
        step = self.step if step is None else step
        if step > self.step:
            raise InvalidArgumentError(f"step {step} is not done yet: the last one is {self.step}")
        end = None if timeout is None else time.monotonic() + timeout
        for is_last in (False, True):
            self._await(end, step)
            if self._report_miss():
                self._await(end, step)
            own = self._progress(step)
            every = {json.loads(one) for one in ranks.gather_bytes(json.dumps(own).encode())}
            if every == {"published"}:
                break
            if "failed" in every or is_last:
                error = None if self._snapshot is None else self._snapshot.error
                ranks.raise_together(error if own == "failed" else None)
                raise IncompleteError(f"step {step} is not published on all ranks", where=self._chain)
            with self._lock:
                mode = None if self._next is None else self._next[1]
            modes = {json.loads(one) for one in ranks.gather_bytes(json.dumps(mode).encode())}
            self._attempts += 1
            reshard(self._run.model)
            agreed: Mode = modes.pop() if len(modes) == 1 and None not in modes else "start"
            self._take(BeginPublish(self.step, self._occasion, agreed, attempt=self._attempts))
        assert self.published is not None
        return self.published

    def close(self) -> None:
        """Wait for the step on its way, and end the process. Warns if it was not published."""
        if self._is_closed:
            return
        self._is_closed = True
        self._steps.remove()
        if self._world > 1 and self._snapshot is not None:
            self._snapshot.ended.wait(self._stall_seconds + 60.0)
            self._report_miss()
        self._unclosed.detach()
        if not self._thread.close(self._stall_seconds + 60.0):
            warnings.warn(f"{self._chain}: the last step is still on its way", PublisherWarning, stacklevel=2)
        self._warn_of_failure()

    def _step_done(self, step: int) -> None:
        """A step of the run is done."""
        self._calls += 1
        if self._calls % self._every == 0:
            self._offer(step)
        else:
            self.step = step

    def _offer(self, step: int) -> None:
        """Publish the state after a step if it is the one that all ranks publish next."""
        self._warn_of_failure()
        self.step = step
        self._occasion += 1
        with self._lock:
            following = self._next
        if self._snapshot is not None and not self._snapshot.ended.is_set():
            self._skip()
        elif self._world == 1:
            self._take(BeginPublish(step, self._occasion, "start" if following is None else following[1]))
        elif following is None:
            self._skip()
            self._take(replace(self._announced, reason=_UNKNOWN))
        elif self._occasion == following[0]:
            self._take(BeginPublish(step, *following))
        else:
            self._skip()
            self._report_miss()

    def _report_miss(self) -> bool:
        """If this rank has skipped the step that all ranks publish next, say so, so that none waits for it."""
        with self._lock:
            following = self._next
        if following is None or following[0] not in self._passed:
            return False
        self._take(BeginPublish(self._passed[following[0]], *following, reason=MISSED))
        return True

    def _skip(self) -> None:
        self.skipped += 1
        if self._world > 1:
            self._passed[self._occasion] = self.step
            if self._rank == 0:
                self._thread.order(NoteOccasion(self._occasion))

    @torch.no_grad()
    def _take(self, begin: BeginPublish) -> None:
        """Copy the state as it is now in the background, to be published. Only learn how the step ends if it cannot."""
        shards: list[SavedShard] = []
        if begin.reason is None and begin.mode != "open":
            try:
                shards = self._weights.shards(self._run)
            except CkptError as error:
                begin = replace(begin, reason=error.what if error.hint is None else f"{error.what} ({error.hint})")
        with self._lock:
            self._next = None
        self._announced, self._update_time = begin, time.monotonic()
        self._passed = {number: step for number, step in self._passed.items() if number > begin.occasion}
        self._snapshot = Snapshot(begin.step, begin, shards, b"")
        self._thread.begin(self._snapshot)

    def _answered(self, fields: Mapping[str, Any]) -> None:
        """What the process reports of a step. The thread of the snapshots calls it, before the step ends."""
        with self._lock:
            self._answers = dict(fields)
            if "next" in fields:
                self._next = fields["next"], fields["next_mode"]
            if fields.get("epoch"):
                kind = "same" if not fields["is_new"] else "delta" if fields["mode"] == "delta" else "base"
                seconds = time.monotonic() - self._update_time
                self.published = PublishResult(
                    fields["step"], fields["epoch"], kind, fields["nbytes"], seconds, fields["cpu"]
                )
                self._has_warned = False

    def _open_chain(self) -> None:
        """Let the process of rank 0 open the chain, and create it if it does not exist. Raises `CkptError`."""
        self._take(BeginPublish(0, 0, "open"))
        assert self._snapshot is not None
        self._snapshot.ended.wait()
        error = self._snapshot.error
        if error is not None:
            raise ranks.error_of(self._answers["refusal"]) if "refusal" in self._answers else error

    def _await(self, end: float | None, step: int) -> None:
        """Wait until the step on its way has ended. Raises `TimeoutError` after the time `end`."""
        seconds = None if end is None else max(end - time.monotonic(), 0.0)
        if self._snapshot is not None and not self._snapshot.ended.wait(seconds):
            raise TimeoutError(f"step {step} is still being published")

    def _progress(self, step: int) -> str:
        """How far a step is on this rank, once none is on its way."""
        if self.published is not None and self.published.step >= step:
            return "published"
        last = self._snapshot
        error = None if last is None or last.step < step or self._announced.reason is not None else last.error
        return "skipped" if error is None or MISSED in error.what else "failed"

    def _warn_of_failure(self) -> None:
        """Warn once of steps that are not published, until one is published again."""
        last = self._snapshot
        if last is None or not last.ended.is_set() or last.error is None or self._has_warned:
            return
        if self._announced.reason is None and MISSED not in last.error.what:
            self._has_warned = True
            warnings.warn(f"{last.error}; later steps are tried", PublisherWarning, stacklevel=4)


def _without_rank(snapshot: Snapshot, reason: str) -> BeginPublish:
    begin = snapshot.begin
    assert isinstance(begin, BeginPublish)
    return replace(begin, reason=reason)


@checked
def _check(every: Count, memory: Count, keep: KeepSteps | None) -> None:
    """Raise `InvalidArgumentError` for an option that has a value that it cannot have."""
    if every < 1:
        raise InvalidArgumentError("every=0: a step is published after one step, or after several")
    if memory < _SLOTS * _LEAST_SLOT:
        raise InvalidArgumentError(f"memory={memory}: publishing needs at least {_SLOTS * _LEAST_SLOT} bytes")


def _files_of(
    run: TrackedRun, dtype: str | None, files: Mapping[str, str | os.PathLike[str]]
) -> tuple[dict[str, str], dict[str, Path]]:
    """The files that followers get with the weights: contents as text, and paths of others. Raises `CkptError`."""
    paths = {name: Path(path).absolute() for name, path in files.items()}
    for name, path in paths.items():
        try:
            nbytes = path.stat().st_size
        except OSError as error:
            raise InvalidArgumentError(f"files: {name} cannot be read: {error.strerror}", where=path) from None
        if nbytes > MAX_FILE:
            raise InvalidArgumentError(
                f"files: {name} has {nbytes:,} bytes; at most {MAX_FILE:,} are possible", where=path
            )
    contents = {}
    for name, attribute in ((_CONFIG, "config"), (_GENERATION, "generation_config")):
        if name in paths:
            continue
        config: Any = getattr(run.model, attribute, None)
        if hasattr(config, "to_json_string") and type(config).__module__.startswith("transformers"):
            contents[name] = (
                _described(config.to_json_string(), run, dtype) if name == _CONFIG else config.to_json_string()
            )
    if _CONFIG in paths:
        contents[_CONFIG] = paths.pop(_CONFIG).read_text("utf-8")
    return contents, paths


def _check_conversions(model: Any) -> None:
    """Raise `UnsupportedError` if transformers stores tensors of a model in another form than it computes with."""
    library: Any = sys.modules.get("transformers.conversion_mapping")
    if not hasattr(library, "get_model_conversion_mapping") or not hasattr(model, "named_parameters"):
        return
    mapping = library.get_model_conversion_mapping(model, add_legacy=False)
    patterns = [one for entry in mapping if type(entry).__name__ == "WeightConverter" for one in entry.target_patterns]
    names = [clean_name(name) for name, _ in model.named_parameters()]
    converted = next((name for name in names if any(re.search(one, name) for one in patterns)), None)
    if converted is not None:
        raise UnsupportedError(
            f"transformers stores `{converted}` in another form than a {type(model).__name__} has it in memory",
            hint='Pass names="as-is": then followers get the tensors as they are in memory.',
        )


def _described(text: str, run: TrackedRun, dtype: str | None) -> str:
    """A configuration with the class and the dtype of what is published, as transformers' own files have them."""
    config = json.loads(text)
    config["architectures"] = [type(run.model).__name__.removeprefix("FSDP")]
    if dtype is not None:
        name = SHORT_NAMES.get(dtype, dtype)
        config |= {key: name for key in ("dtype", "torch_dtype") if key in config} or {"dtype": name}
    return json.dumps(config, indent=2, sort_keys=True) + "\n"
