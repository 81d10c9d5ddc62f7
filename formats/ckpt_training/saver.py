"""Saving a live job: a snapshot while training goes on, and a checkpoint that appears whole or not at all."""

import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from ckpt import DCP, Universal
from ckpt.chains.change import change
from ckpt.chains.write import DeltaPolicy
from ckpt.holding.peers import Peers, changed_states
from ckpt.pipeline import Execution
from ckpt.pipeline.targets import clean
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.arguments import Count, Positive, Range, checked
from ckpt_formats.core.encoding import AUTO
from ckpt_formats.core.errors import CkptError, InvalidArgumentError, OutputError, UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_names import MODEL, from_stored
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.tensor import read
from ckpt_formats.core.text import PARTIAL, STAGED
from ckpt_formats.parity.code import Parities
from ckpt_formats.state_dicts.keys import NESTED, STYLES, StateKeys
from ckpt_formats.stores.location import place_at, target_path
from ckpt_formats.universal.boxes import RankBox
from ckpt_formats.universal.chain import folder as chain_folder
from ckpt_formats.universal.gradients.noted_tensors import names_for_noted_tensors
from ckpt_training import ranks
from ckpt_training.engines.registry import check_initialized, tracked_run
from ckpt_training.engines.run import further_entries, with_extra_states
from ckpt_training.group_options import group_options
from ckpt_training.hooks import remove_all
from ckpt_training.plain_notes import OPTIMIZER_ENTRIES, extra_name, plain_note
from ckpt_training.random_states import RandomStates
from ckpt_training.run_shards import is_of_elements
from ckpt_training.save_plan import SavedShard, agree
from ckpt_training.snapshot import Snapshot, SnapshotContext, SnapshotThread
from ckpt_training.writing.rank_notes import RankNotes
from ckpt_training.writing.ring import Ring
from ckpt_training.writing.save_orders import BeginSave, DropSave, SaveSettings, is_chain, path_of_step, row_of_box
from ckpt_training.writing.then_job import ThenJob

_LOG = logging.getLogger("ckpt_training")
_SLOTS = 4
_LEAST_SLOT = 1 << 16


class SaverWarning(UserWarning):
    """A save failed that nobody waited for, or was skipped. Training goes on."""


@dataclass(frozen=True)
class SaveResult:
    """A save that has ended without an error.

    Attributes:
        step: The number of the step.
        path: The checkpoint; of a chain, its member.
        kind: `base` if it can be read without an earlier save, else `delta`; empty if it was skipped.
        nbytes: The bytes that this rank has stored.
        cpu_seconds: The CPU time of this rank's process from the beginning of the save to its end.
        skipped: Why nothing was saved (`when_slow="skip"`); None if it was.
    """

    step: int
    path: str
    kind: Literal["base", "delta", ""]
    nbytes: int = 0
    cpu_seconds: float = 0.0
    skipped: str | None = None


@dataclass(eq=False)
class JobState:
    """The job after a save. `ended` is set once `error` is known."""

    ended: threading.Event = field(default_factory=threading.Event)
    error: str | None = None

    def end(self, error: str | None) -> None:
        """Note how it ended. `error`: why it failed; None if it did not."""
        self.error = error
        self.ended.set()


class SaveHandle:
    """A save that may still be in progress. Threads may share it."""

    def __init__(
        self, step: int, snapshot: Snapshot | None, skipped: SaveResult | None = None, job: JobState | None = None
    ) -> None:
        self.step = step
        self._snapshot, self._skipped, self._job = snapshot, skipped, job
        self._was_raised = self._was_job_raised = False

    def done(self) -> bool:
        """Return whether the save has ended: published, failed or skipped."""
        return self._snapshot is None or self._snapshot.ended.is_set()

    def wait(self, timeout: float | None = None) -> SaveResult:
        """Wait until the save has ended on all ranks, at most `timeout` seconds, and return its result.

        Raises the `CkptError` of the rank that failed, and `TimeoutError`.
        """
        if self._snapshot is not None and not self._snapshot.ended.wait(timeout):
            raise TimeoutError(f"step {self.step} is still being saved after {timeout:g} s")
        result = self.result
        assert result is not None
        return result

    def wait_then(self, timeout: float | None = None) -> SaveResult:
        """Wait until the job that follows the save has ended, at most `timeout` seconds for each of both.

        Returns the result of the save. On other ranks than the first, and without `then`, it only waits for the save.

        Raises as `wait`, and `OutputError` if the job failed; the save is published then.
        """
        result = self.wait(timeout)
        if self._job is not None and not self._job.ended.wait(timeout):
            raise TimeoutError(f"the job after step {self.step} is still in progress after {timeout:g} s")
        error = self._job_error()
        if error is not None:
            self._was_job_raised = True
            raise error
        return result

    @property
    def result(self) -> SaveResult | None:
        """The result; None while the save is in progress. Raises the `CkptError` of the rank that failed."""
        if self._snapshot is None or not self._snapshot.ended.is_set():
            return self._skipped
        if self._snapshot.error is not None:
            self._was_raised = True
            raise self._snapshot.error
        fields = self._snapshot.result
        return SaveResult(self.step, fields["path"], fields["kind"], fields["nbytes"], fields["cpu"])

    def unseen_error(self) -> CkptError | None:
        """Return the error if nobody has seen it yet. From now on it counts as seen."""
        error = None if self._snapshot is None or not self._snapshot.ended.is_set() else self._snapshot.error
        is_new, self._was_raised = not self._was_raised, True
        if is_new and error is not None:
            return error
        of_job = self._job_error()
        is_new, self._was_job_raised = not self._was_job_raised, of_job is not None
        return of_job if is_new else None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will be known of it, or of the job after it."""
        is_published = self._snapshot is not None and self._snapshot.error is None
        return self.done() and not (is_published and self._job is not None and not self._job.ended.is_set())

    def _job_error(self) -> OutputError | None:
        """The error of the job after the save; None if it has not failed yet."""
        if self._snapshot is None or self._job is None or self._job.error is None:
            return None
        what = f"step {self.step} is saved, but the job after it failed: {self._job.error}"
        return OutputError(what, where=self._snapshot.result["path"])


class Saver(SnapshotContext):
    """Saves a run while it trains. A context manager, which waits for the last save at its end.

    Attributes:
        waited: Seconds for which updates have waited until the state before them was copied.
        writer_pid: The id of the process that writes this rank's share; None before it has started.
        peers: Of each host that should hold this rank's part of the last save: "holds all", or why it does not.
    """

    @checked
    def __init__(
        self,
        model: Any,
        optimizer: Any,
        target: str | os.PathLike[str],
        *,
        format: Universal | DCP | None = None,
        policy: DeltaPolicy | None = None,
        in_flight: Positive = 1,
        when_slow: Literal["wait", "skip"] = "wait",
        memory: Annotated[int, Range(_SLOTS * _LEAST_SLOT)] = 256 << 20,
        stall_seconds: Annotated[float, Range(0, above=True)] = 600.0,
        then: Callable[..., object] | None = None,
        protect: Parities | None = None,
        peers: Peers | None = None,
        **parts: Any,
    ) -> None:
        """Plan what each rank saves. All ranks must do so together.

        Args:
            model: The model: a module, or the result of DDP, FSDP, Accelerate or DeepSpeed, or Megatron's chunks.
            optimizer: Its optimizer, or a list of them; None for a DeepSpeed engine.
            target: A chain (`run.chain`), which gets a member for each save, or a folder, which gets a checkpoint
                `step-NNNNNNNN` for each. All ranks must see it under this path.
            format: How checkpoints in a folder are stored: `Universal()`, or `DCP()`, which torch's `dcp.load` reads,
                too. None: plain, `Universal()`.
            policy: How members of a chain are stored. No codec that loses values.
            in_flight: The number of saves that may be in progress. In a chain, the copy of a save begins when the one
                before is published.
            when_slow: If so many are in progress: `wait` for the first of them, or `skip` the save.
            memory: The bytes of memory for values on their way to the disk, on each rank.
            stall_seconds: How long a rank waits for another one before a save fails.
            then: A function of a module, or a `functools.partial` of one with keyword arguments that are plain. After
                each published save, a process beside rank 0 calls it with the path or URL of the save, one save after
                another. If it fails, `wait_then` of the handle raises the error, and the save stays as it is.
            protect: Write parity with each save, as `ckpt.protect(path, protect)` does: so many files of it may be
                lost or damaged. The process beside rank 0 reads the files of all ranks for it, before the save
                appears; `stall_seconds` must be enough for that.
            peers: The hosts whose memory holds each save, too, as `Recorder(peers=…)` names them. A save is sent once
                it is published, and no step waits for that; the attribute `peers` says how far the hosts are. Saves
                are universal, in a folder of the file system.
            parts: What else is saved, by name: anything with a `state_dict`, such as a scheduler or a loader, and plain
                values. A checkpoint has them as extras.

        Raises:
            UnsupportedError: The run cannot be saved: on all ranks; the message states why.
            InvalidArgumentError: An option has a value that it cannot have.
            OutputError: The target cannot be written.
        """
        self._target = target_path(os.path.abspath(target) if not _is_url(target) else os.fspath(target))
        _check_storage(format, policy, is_chain(self._target))
        if protect is not None and is_remote(self._target):
            raise UnsupportedError(
                "a save has parity in the file system only", hint="Leave out protect, and run `ckpt protect URL`."
            )
        _check_peers(peers, self._target, format)
        self._in_flight, self._when_slow, self._parts = in_flight, when_slow, parts
        self._handles: list[SaveHandle] = []
        self._logged: dict[str, str] = {}
        """What was logged of each host."""
        self._jobs: dict[int, JobState] = {}
        """Those of saves that have not ended, by step."""
        self._is_closed, self._random = False, RandomStates()
        rank, world = ranks.rank_and_world()
        if peers is not None:
            peers.host_of(rank, world)  # raises: the hosts do not fit the ranks
            peers.run_of(self._target.name)  # raises: no address has the name
        self._has_jobs = then is not None and rank == 0
        with ranks.together():
            job = None if then is None else ThenJob.of(then)
            check_initialized(model)
            self._run = tracked_run(model, optimizer, rank, is_recorded=False)
        self._plan = agree(self._run)
        with ranks.together():
            if rank == 0:
                _prepare(self._target)
        policy = policy or DeltaPolicy()
        in_chain = is_chain(self._target)
        self._stall_seconds = stall_seconds

        def settings(slot_nbytes: int, slots: int) -> SaveSettings:
            return SaveSettings(
                target=str(self._target),
                rank=rank,
                ranks=world,
                token=self._plan.token,
                codec=AUTO if in_chain else format.codec if isinstance(format, Universal) else None,
                dcp_keys=_keys_of(format).to_json() if isinstance(format, DCP) else None,
                then=None if job is None else [job.function, job.arguments],
                protect=protect,
                deltas=in_chain,
                base_every=policy.base_every,
                check=policy.check if in_chain else False,
                slot_nbytes=slot_nbytes,
                slots=slots,
                seconds=stall_seconds,
                peers=None if peers is None else asdict(peers),
            )

        device = next((one.tensor.device for one in self._run.tensors), torch.device("cpu"))
        ring = Ring(max(memory // _SLOTS, _LEAST_SLOT), _SLOTS)
        self._thread = SnapshotThread(
            settings, ring, device, answered=partial(_end_job, self._jobs), has_peers=peers is not None
        )
        self._unclosed = weakref.finalize(self, self._thread.close, 0.0)
        self._unclosed.atexit = False
        wait = self._thread.wait_copied
        self._hooks = [one.register_step_pre_hook(lambda *_: wait()) for one in self._run.optimizers]

    @checked
    def save(self, step: Count) -> SaveHandle:
        """Save the state after an update as `step`. All ranks must do so, without waiting for each other.

        Returns at once: the values are copied until the next update, and written in the background. If the run cannot
        be saved, training goes on, and the handles of all ranks have the error.

        Raises `InvalidArgumentError` for a step that is not a natural number, or after `close`.
        """
        if self._is_closed:
            raise InvalidArgumentError("the Saver is closed", where=str(self._target))
        self._warn_of_failures()
        for line, holds_all in changed_states(step, self.peers, self._logged):
            _LOG.log(logging.INFO if holds_all else logging.WARNING, line)
        pending = [one for one in self._handles if not one.done()]
        if len(pending) >= self._in_flight:
            if self._when_slow == "skip":
                return self._skipped(step, pending[0].step)
            with suppress(CkptError):
                pending[len(pending) - self._in_flight].wait()
            self._warn_of_failures()
        try:
            snapshot = self._snapshot(step)
        except CkptError as error:
            return self._refused(step, error)
        except Exception as error:  # whatever a state_dict of the user raises
            return self._refused(step, UnsupportedError(f"{type(error).__name__}: {error}"))
        job = self._jobs.setdefault(step, JobState()) if self._has_jobs else None
        self._thread.begin(snapshot)
        handle = SaveHandle(step, snapshot, job=job)
        self._handles.append(handle)
        return handle

    @property
    def peers(self) -> dict[str, str]:
        return self._thread.peers

    def close(self) -> None:
        """Wait for the saves in progress, and end the process. Warns of saves that failed."""
        if self._is_closed:
            return
        self._is_closed = True
        remove_all(self._hooks)
        self._unclosed.detach()
        if not self._thread.close(self._stall_seconds + 60.0):
            what = "the last save, or the job after it," if self._has_jobs else "the last save"
            warnings.warn(f"{self._target}: {what} is still in progress", SaverWarning, stacklevel=2)
        self._warn_of_failures()

    @torch.no_grad()
    def _snapshot(self, step: int) -> Snapshot:
        """What a save copies and notes, as it is now."""
        boxes, shards = self._plan.boxes(self._run)
        # Buffers change in the next forward pass, which waits for nothing.
        roles = [box.role for box in boxes]
        shards = [one if roles[one.box] != "buffer" else one.cloned() for one in shards]
        counts, values = self._optimizer_values()
        extras = self._extras()
        named = self._with_tensors(extras, boxes, shards) if ranks.rank_and_world()[0] == 0 else {}
        groups = (group for number in range(len(self._run.optimizers)) for group in self._run.groups_of(number))
        begin = BeginSave(step, [row_of_box(box) for box in boxes], counts, list(map(_numbers, groups)))
        return Snapshot(step, begin, shards, self._notes(step, values, extras, named).to_bytes())

    def _with_tensors(
        self, extras: Mapping[str, Any], boxes: list[RankBox], shards: list[SavedShard]
    ) -> dict[str, Any]:
        """The extras with names in the places of tensors, which are added to what this rank saves."""
        tensors: dict[str, Any] = dict.fromkeys(self._plan.names)
        named = {name: names_for_noted_tensors(value, name, tensors) for name, value in extras.items()}
        for name in [name for name, one in tensors.items() if one is not None]:
            weight = tensors[name].weight
            box = RankBox(name, "extra", weight.shape, Box.whole(weight.shape), {MODEL: weight.dtype.name})
            content = torch.frombuffer(bytearray(read(weight).tobytes()), dtype=torch.uint8) if weight.nbytes else None
            boxes.append(box)
            if content is not None:
                shards.append(SavedShard(len(boxes) - 1, name, MODEL, content))
        return named

    def _optimizer_values(self) -> tuple[dict[str, tuple[int, int]], dict[str, dict[str, Any]]]:
        """Of each parameter of this rank: the count of its steps with the number of its group, and its values."""
        counts: dict[str, tuple[int, int]] = {}
        values: dict[str, dict[str, Any]] = {}
        before = [0]
        for number in range(len(self._run.optimizers)):
            before.append(before[-1] + len(self._run.groups_of(number)))
        for one in self._run.tensors:
            state = self._run.optimizers[one.optimizer].state.get(one.tensor, {})
            own: dict[str, Any] = {}
            for key, value in state.items():
                if is_of_elements(one, key, value) or (isinstance(value, torch.Tensor) and value.dim()):
                    continue
                plain = value.item() if isinstance(value, torch.Tensor) else value
                if key == "step" and plain == plain // 1:
                    plain = int(plain)
                if plain is not None:
                    own[from_stored(str(key))] = encode(plain_note(plain))
            names = dict.fromkeys((*(part.name for part in one.all_parts), *one.names))
            for name in names if own else ():
                values[name] = own
                if isinstance(own.get("step"), int):
                    counts[name] = own["step"], before[one.optimizer] + one.group
        return counts, values

    def _extras(self) -> dict[str, Any]:
        """What this rank saves besides parameters, by the names of the extras."""
        run = self._run
        extras: dict[str, Any] = {extra_name(name): plain_note(part) for name, part in run.notes().items()}
        extras |= {extra_name(name): plain_note(part) for name, part in self._parts.items()}
        if entries := further_entries(run):
            extras[OPTIMIZER_ENTRIES] = plain_note(entries)
        for name, module in with_extra_states(run, "get_extra_state"):
            extras[name] = plain_note(module.get_extra_state())
        return extras

    def _notes(
        self, step: int, values: Mapping[str, Any], extras: Mapping[str, Any], named: Mapping[str, Any]
    ) -> RankNotes:
        rank, _ = ranks.rank_and_world()
        run, plan = self._run, self._plan
        encoded = {name: encode(value) for name, value in extras.items()}
        random = encode(self._random.values())
        if rank:
            return RankNotes(step, values=values, random_states=random, parts=encoded)
        options = [
            encode(group_options(optimizer, group))
            for number, optimizer in enumerate(run.optimizers)
            for group in run.groups_of(number)
        ]
        return RankNotes(
            step,
            engine="torch",
            version=torch.__version__,
            groups=list(zip(options, plan.group_names, strict=True)),
            aliases=plan.aliases,
            order=plan.names,
            values=values,
            random_states=random,
            parts=encoded,
            named={name: encode(value) for name, value in named.items()},
        )

    def _skipped(self, step: int, slow: int) -> SaveHandle:
        reason = f"the save of step {slow} is still in progress"
        warnings.warn(f"{self._target}: step {step} is not saved: {reason}", SaverWarning, stacklevel=3)
        self._thread.order(DropSave(step, f"skipped, because {reason}"), step)
        return SaveHandle(step, None, SaveResult(step, str(path_of_step(self._target, step)), "", skipped=reason))

    def _refused(self, step: int, error: CkptError) -> SaveHandle:
        """The handle of a save in which this rank cannot take part."""
        self._thread.order(DropSave(step, error.what if error.hint is None else f"{error.what} ({error.hint})"), step)
        snapshot = Snapshot(step, BeginSave(step, [], {}, []), [], b"")
        snapshot.end(type(error)(f"step {step} is not saved: {error.what}", where=error.where, hint=error.hint))
        handle = SaveHandle(step, snapshot)
        self._handles.append(handle)
        return handle

    def _warn_of_failures(self) -> None:
        """Warn of failed saves that nobody waited for, and forget those that have ended."""
        for one in [one for one in self._handles if one.done()]:
            if (error := one.unseen_error()) is not None:
                warnings.warn(str(error), SaverWarning, stacklevel=4)
            if one.is_over:
                self._handles.remove(one)


def _end_job(jobs: dict[int, JobState], fields: Mapping[str, Any]) -> None:
    """Take what the process reports of a job, or of a save after which none runs."""
    if "job_error" in fields or "error" in fields:
        job = jobs.pop(fields["step"], None)
        if job is not None:
            job.end(fields.get("job_error"))


def _is_url(target: str | os.PathLike[str]) -> bool:
    return "://" in os.fspath(target)


def _check_storage(format: Universal | DCP | None, policy: DeltaPolicy | None, in_chain: bool) -> None:
    if format is not None and in_chain:
        raise UnsupportedError(
            "members of a chain are stored as `policy` says",
            hint="Save into a folder with Universal() or DCP(), and convert what you need.",
        )
    if isinstance(format, DCP):
        if (format.dp, format.tp, format.rules) != (None, None, ()):
            raise InvalidArgumentError("the ranks of the run write what they have", hint="Leave out dp, tp and rules.")
        if format.keys == "accelerate" or _keys_of(format).megatron_fsdp:
            raise UnsupportedError(
                f"saves with keys={format.keys!r}", hint="Save with other keys, and convert what you need."
            )
    if policy is not None and not in_chain:
        raise InvalidArgumentError("`policy` is for chains", hint="Name a target that ends in .chain.")
    if policy is not None and (not policy.delta_codec.lossless or policy.evaluation or policy.partial or policy.tip):
        raise UnsupportedError("a live run is saved without loss, whole, and without a tip", where="policy")


def _check_peers(peers: Peers | None, target: Path, format: Universal | DCP | None) -> None:
    if peers is not None and (is_remote(target) or is_chain(target) or isinstance(format, DCP)):
        raise UnsupportedError(
            "the memory of peers holds universal saves that are in a folder of the file system",
            where="peers",
            hint="Save into a folder that is no chain, with Universal(), or leave out peers.",
        )


def _keys_of(format: DCP) -> StateKeys:
    return STYLES[format.keys] if isinstance(format.keys, str) else format.keys or NESTED


def _prepare(target: Any) -> None:
    """Make the folder, and remove what killed runs have left there. Raises `OutputError`, `LockedError`."""
    if not is_remote(target):
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"the folder cannot be made: {error.strerror}", where=target) from error
    if is_chain(target) and chain_folder.peek(target) is not None:
        with change(target, Execution(workers=1), wait=10.0) as place:
            place.remove_leftovers()
    for name in _names_with_notes(target):
        with suppress(CkptError):
            clean(target / name)


def _names_with_notes(target: Any) -> set[str]:
    """The saves at which processes have left notes: they were killed in front of the end, or right after it."""
    if is_remote(target):
        return {key.partition("/")[0] for key in place_at(target).list() if key.partition("/")[2].startswith(STAGED)}
    return {one.name[1 : -len(PARTIAL)] for one in target.glob(f".step-*{PARTIAL}")}


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group that are numbers, or lists of numbers: what helps to encode deltas."""
    numbers: dict[str, Any] = {}
    for name, value in group.items():
        plain = value.tolist() if isinstance(value, torch.Tensor) and value.dim() < 2 else value
        many = list(plain) if isinstance(plain, (list, tuple)) else [plain]
        if name != "params" and many and all(isinstance(one, (int, float)) for one in many):
            numbers[name] = many if isinstance(plain, (list, tuple)) else plain
    return numbers
