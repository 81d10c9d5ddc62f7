"""Load a checkpoint of any format into a live model and optimizer, whichever engine shards them."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import nn

import ckpt
from ckpt.reading import Reading
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, IncompleteError
from ckpt_training import ranks
from ckpt_training.engines.meta_device import materialize, on_meta
from ckpt_training.engines.registry import check_initialized, tracked_run
from ckpt_training.engines.run import TrackedRun, clean_name, renamed
from ckpt_training.extras import Extras
from ckpt_training.filling import changing, fill, verify_together
from ckpt_training.group_options import GroupOptions
from ckpt_training.local_shards import LocalShard
from ckpt_training.matching import Matching, Rounding
from ckpt_training.mismatches import check_fit, listed
from ckpt_training.opening import open_together
from ckpt_training.optimizer_states import StatePlan, with_counts
from ckpt_training.replicas import Cooperate, Fill, replicas_of
from ckpt_training.resumed_steps import count_from
from ckpt_training.run_shards import masters_of, model_shards_of, names_of_run, names_with_master, ties_of

Names = Literal["hf", "megatron"]
_MANY = 1 << 30


@dataclass(frozen=True)
class Loaded:
    """What `load` did: the same on all ranks, but for `nbytes`, `seconds` and what `cast` has of local shards."""

    source: str
    """What was loaded, with the step of a chain: `run.chain@1234`."""
    step: int | None
    """The step of the checkpoint."""
    missing_keys: tuple[str, ...] = ()
    """Tensors of the model, and states of the optimizer in parentheses, that the checkpoint lacks: they stay."""
    unexpected_keys: tuple[str, ...] = ()
    """Tensors of the checkpoint, and states in parentheses, that the model and the optimizer lack."""
    mismatched_keys: Mapping[str, str] = field(default_factory=dict)
    """Tensors that have other shapes, with both: they stay."""
    cast: Mapping[str, str] = field(default_factory=dict)
    """Values that were stored in another dtype, with both dtypes."""
    unverified: tuple[str, ...] = ()
    """Checksums that were not compared, because the model lacks a part of what they cover."""
    verified: int = 0
    """The number of checksums that were compared."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """The values of the checkpoint that nothing took, by name: each is read when it is looked up."""
    passed_over: Mapping[str, str] = field(default_factory=dict)
    """Newer checkpoints of a folder that were not loaded, each with the reason."""
    notices: tuple[str, ...] = ()
    """What else the user should know."""
    nbytes: int = 0
    """The bytes that this rank has read from files."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    """The time of each stage on this rank."""


def load(
    source: str | os.PathLike[str] | Checkpoint,
    model: Any,
    optimizer: Any = None,
    *,
    strict: bool = True,
    names: Names | Mapping[str, str] | Callable[[str], str] | None = None,
    rename: Callable[[str], str] | None = None,
    rounding: Rounding = "weights",
    vocab_rows: int | None = None,
    random_states: bool = True,
    device: torch.device | str | None = None,
    cooperate: Cooperate = "auto",
    resources: ckpt.Resources | None = None,
    **parts: Any,
) -> Loaded:
    """Load a checkpoint of any format into a live run. All ranks of the process group call it together.

    Each rank reads the blocks that it has in memory, straight into that memory. Until all ranks know that everything
    fits, no value of the model, the optimizer or the parts changes. All checksums of the ranges that were read are
    compared, over all ranks, before `load` returns.

    Args:
        source: A path, a URL, a step of a chain (`run.chain@1234`), or a `ckpt.Checkpoint` after any edits. Of a folder
            with several checkpoints, the newest complete one.
        model: A module (plain, DDP, FSDP1, FSDP2 on any mesh, tensor-parallel DTensors), a DeepSpeed engine, or the
            list of Megatron's model chunks.
        optimizer: The optimizer, or the list of them; None: load no optimizer. A DeepSpeed engine has its own.
        strict: Raise if a name is missing, unexpected, or has another shape; else report it in the result.
        names: How tensors are called: `hf` or `megatron`, or a mapping or a function from stored names to the
            model's. None: as they are stored; if that does not fit, as `hf` or `megatron` call them, with a notice.
        rename: Gives the name in the full model of a tensor of this rank's model, for ranks with parts of one model.
        rounding: What may be rounded to the dtype of the memory, to nearest even: `weights`, `none`, or `all`.
        vocab_rows: The rows of the vocabulary without padding, if tables have more rows in one of both.
        random_states: Also restore this rank's random number generators, if the run stored them.
        device: Where tensors on the meta device get memory; None: on torch's default device.
        cooperate: Whether ranks with the same values read and replay a share each and exchange the shares. `auto`: if
            the checkpoint is in a store, steps or deltas are replayed, or the ranks are on several nodes.
        resources: The threads and the memory of each rank.
        parts: Other objects with `load_state_dict`, each by the name under which the checkpoint has its state.

    Raises:
        IncompleteError: The checkpoint lacks a tensor or a state that the run has.
        InvalidArgumentError: A name or shape does not fit.
        UnsupportedError: A dtype would be rounded, or the engine is not known.
        CorruptError: A checksum does not match, or a file was replaced meanwhile.
        CkptError: Others of `ckpt.open`. Every error is raised on all ranks. If it came after the first value was
            changed, it says so.
    """
    clock = _Clock()
    opened = open_together(source)
    with ranks.together():
        _give_memory(model, opened.checkpoint, device)
        check_initialized(model)
        run = tracked_run(model, optimizer, ranks.rank_and_world()[0], is_recorded=False)
        run = run if rename is None else renamed(run, rename)
        shards = list(model_shards_of(run))
        own, ties = names_of_run(run, shards), ties_of(run)
    named, notices = _with_names(opened.checkpoint, own, names)
    with Reading(named, resources=resources) as reading:
        with ranks.together():
            named = with_counts(named, [*own, *ties], reading) if run.optimizers else named
            matching = Matching(named, ties, rounding, vocab_rows)
            fills = [one for one in _model_fills(run, shards, matching) if one[0].memory.numel()]
            extras = Extras(named, run, parts, random_states)
            groups = GroupOptions(run, named)
            states = StatePlan(run, matching, groups, extras.values)
        unexpected = _unexpected(matching, states)
        missing = ranks.union([*matching.mismatches.missing, *extras.missing()])
        with ranks.together():
            check_fit(matching.mismatches, missing, unexpected, strict, named)
            notices = (*notices, *_notices(states, groups, extras))
        clock.note("plan")
        with changing("run"):
            with ranks.together(), torch.no_grad():
                fills += [one for one in states.create() if one[0].memory.numel()]
            replicas = replicas_of(fills, named, cooperate)
            with ranks.together(), torch.no_grad():
                fill(reading, ((piece.stored, piece.memory) for piece in replicas.share))
                reading.fill((one, np.empty(one.shape, one.dtype)) for one in states.read)
            replicas.exchange()
            clock.note("read")
            verified, unverified = verify_together(reading)
            clock.note("verify")
            with ranks.together(), torch.no_grad():
                run.refresh()
                groups.apply()
                if named.step is not None:
                    run.set_step(named.step)
                    for one in run.optimizers:
                        count_from(one, named.step)
                extras.give()
        clock.note("finish")
        return Loaded(
            opened.address,
            named.step,
            tuple(missing),
            tuple(unexpected),
            matching.mismatches.shapes,
            matching.mismatches.cast,
            unverified,
            verified,
            extras.others,
            opened.passed_over,
            notices,
            reading.nbytes,
            clock.seconds,
        )


class _Clock:
    """The seconds of each stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def note(self, stage: str) -> None:
        """End a stage."""
        now = time.perf_counter()
        self.seconds[stage], self._last = now - self._last, now


def _give_memory(model: Any, source: Checkpoint, device: torch.device | str | None) -> None:
    """Allocate tensors on the meta device, and those of lazy modules, which get their shapes from the checkpoint."""
    if not isinstance(model, nn.Module):
        return
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        full = clean_name(name)
        stored = source.parameters.get(source.aliases.get(full, full))
        if nn.parameter.is_lazy(tensor) and stored is not None:
            for problem in stored.weight.problems():  # before a file decides how much memory is allocated
                raise IncompleteError(str(problem), where=full)
            tensor.materialize(stored.shape)
    if not on_meta(model):
        return
    unfilled = materialize(model, torch.get_default_device() if device is None else torch.device(device))
    if unfilled:
        raise IncompleteError(
            f"the model is on the meta device, and nothing makes the values of {listed(unfilled)}, "
            "which no checkpoint has",
            hint="Build the model on the CPU, or give the module a method reset_parameters that makes them.",
        )


def _with_names(
    source: Checkpoint, own: Sequence[str], names: Names | Mapping[str, str] | Callable[[str], str] | None
) -> tuple[Checkpoint, tuple[str, ...]]:
    """The checkpoint under the names of the model, and a notice if ckpt has chosen them. All ranks agree on these.

    `own`: the names of this rank's tensors.
    """
    with ranks.together():
        if isinstance(names, str):
            return ckpt.use_names(source, names), ()
        if names is not None:
            return source.rename(names), ()
    lacking = ranks.total([_lacking(source, own)])[0]
    if not lacking:
        return source, ()
    for naming in get_args(Names):
        try:
            other, own_lacking = (renamed := ckpt.use_names(source, naming)), _lacking(renamed, own)
        except CkptError:
            other, own_lacking = source, _MANY
        if ranks.total([own_lacking])[0] == 0:
            return other, (f"the checkpoint's tensors are called as `{naming}` calls them",)
    return source, ()


def _lacking(source: Checkpoint, names: Iterable[str]) -> int:
    """How many names of the model the checkpoint lacks."""
    return sum(name not in source.parameters and name not in source.aliases for name in names)


def _model_fills(run: TrackedRun, shards: Sequence[LocalShard], matching: Matching) -> Iterator[Fill]:
    """The memory of the model and of the masters, with the stored values. What `refresh` makes is left out."""
    masters = list(masters_of(run, shards))
    derived_from_masters = names_with_master(run, shards) if masters else frozenset[str]()
    for shard in (*masters, *(one for one in shards if one.name not in derived_from_masters)):
        if (stored := matching.values(shard.part, shard.state, shard.memory.dtype)) is not None:
            yield shard, stored


def _unexpected(matching: Matching, states: StatePlan) -> list[str]:
    """What the checkpoint has and no rank uses. Every rank must call it."""
    names = [name for name, one in matching.source.parameters.items() if one.role != "extra"]
    counts = ranks.total([int(name in matching.used) for name in names])
    unused = [name for name, count in zip(names, counts, strict=True) if not count]
    return [*unused, *ranks.union(states.unused)]


def _notices(states: StatePlan, groups: GroupOptions, extras: Extras) -> Iterator[str]:
    if unstated := groups.unstated():
        yield f"the checkpoint does not state these options, which stay: {listed(unstated)}"
    if unstated := extras.unstated():
        yield f"the checkpoint does not state {' and '.join(unstated)}: the run's own stays"
    if states.fresh:
        names = listed(states.fresh)
        yield f"the checkpoint has no optimizer state of {names}: the run had not stepped them"
    if states.skipped:
        yield f"the optimizer keeps no such state: {listed(states.skipped)}"
