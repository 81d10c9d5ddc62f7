"""Publish a checkpoint of any format as the next step of a published chain."""

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpt.job import AnyProgress, count_to, load_kernels
from ckpt.pipeline import CountBytes, Execution, Resources
from ckpt.pipeline.interrupts import interruptible
from ckpt.publishing.publication import (
    LastStep,
    Publication,
    RunStart,
    is_base_due,
    last_step,
    open_publication,
)
from ckpt.publishing.published_objects import put_object
from ckpt.publishing.rank_buffers import EncodedShare, RankBuffers
from ckpt.publishing.retention import KeepSteps, remove_unneeded
from ckpt.publishing.source import ExportedModel, Names, exported_model
from ckpt.reading import Reading
from ckpt_formats.core.arguments import Count, StrPath, checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, CorruptError, LockedError, UnsafeError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.published.records import RankShare
from ckpt_formats.universal.published.route import Route

PublishedKind = Literal["base", "delta", "unchanged"]
"""How a step is published; `unchanged`: it was published before with this very state."""


@dataclass(frozen=True)
class PublishedCheckpoint:
    """A step as it is published."""

    path: Path
    """The chain."""
    epoch: int
    step: int
    kind: PublishedKind
    state: str
    """The hash of the state, as followers report it: 32 hexadecimal digits."""
    values: int
    """The number of values of the state."""
    changed: int
    """Of a delta: the number of values that differ from the step before; else 0."""
    raw_nbytes: int
    """The bytes of the state."""
    stored_nbytes: int
    """The bytes of the objects of this step."""
    removed: int
    """The objects of earlier steps that were removed."""
    seconds: float
    notices: tuple[Notice, ...] = ()

    __repr__ = short_repr


@dataclass(frozen=True)
class PublishPlan:
    """What would be published."""

    path: Path
    step: int
    kind: Literal["base", "delta", "base or unchanged"]
    """Whether an earlier or the same step is a base in a new epoch depends on its values, which are not read."""
    tensors: int
    raw_nbytes: int
    """The bytes of the state."""
    files: tuple[str, ...]
    """The files of the model."""
    notices: tuple[Notice, ...] = ()

    __repr__ = short_repr


@checked
def publish(
    checkpoint: Checkpoint,
    chain: StrPath,
    *,
    step: Count | None = None,
    names: Names = "hf",
    dtype: str | None = None,
    config: StrPath | None = None,
    before: Checkpoint | None = None,
    keep: KeepSteps | None = None,
    folds: bool = True,
    signing_key: bytes | None = None,
    resources: Resources | None = None,
    locks: bool = True,
    progress: AnyProgress | None = None,
) -> PublishedCheckpoint:
    """Publish the weights of a checkpoint as the next step of a chain, for all that follow it.

    The tensors and files are those that `save(checkpoint.cast(dtype), folder, "hf")` would write. The first step
    creates the chain. A later step is a delta against the last one, which is read from `before` if that has its
    values, else from the chain. A step that is not after the last one begins a new epoch, unless it is the last one
    with the same values: then nothing is written. If this fails, the chain is unchanged.

    Args:
        checkpoint: The checkpoint, of any format.
        chain: The folder or the URL of the chain.
        step: The number of the step; None: the checkpoint states it.
        names: `hf`: under the names of Hugging Face's libraries; `as-is`: under those of the checkpoint.
        dtype: The type to which floats are rounded, such as `bf16`; None: to none.
        config: The model's configuration, or its folder; None: that of the checkpoint.
        before: The checkpoint that was published last.
        keep: How many steps stay, such as `last:200`; None: all. What they do not need is removed, but not earlier
            than ten minutes after it was last needed.
        folds: Whether steps after a base are also stored as folds: each 4th one as a delta over 4 steps, each 16th
            one over 16 and over 48.
        signing_key: Signs what is published; followers that have the key refuse all else.
        resources: Threads; None: those of `Resources.of_machine()`.
        locks: False: you guarantee that nothing else writes the chain.
        progress: Called with the bytes of the state that are done, and with those of all.

    Raises:
        UnsupportedError: The chain has another model, or the checkpoint does not state what is needed.
        LockedError: Another process publishes into the chain.
        CorruptError: The checkpoint or the chain is damaged.
    """
    started = time.monotonic()
    run, execution = target_path(chain), Execution.of(resources, locks=locks)
    own_step = _step(checkpoint, step)
    load_kernels()
    source, _ = _source(checkpoint, run, names, dtype, config, signing_key)
    earlier, notes = None, tuple[Notice, ...]()
    if before is not None:
        try:
            earlier = exported_model(before, names, dtype, config).divided_as(source.model)
        except CkptError as error:  # it may have been removed meanwhile
            notes = (Notice(f"the values of the last step are read from the chain: {error}"),)
    with (
        interruptible(count_to(source.model.nbytes, progress)) as count,
        open_publication(
            run, source.model, signing_key, execution.locks, source.files, execution.read_back
        ) as publication,
    ):
        work = _Publishing(publication, source, earlier, execution)
        start = work.start(own_step)
        if start.is_published:
            assert publication.record is not None
            record, changed, kind, removed = publication.record, 0, "unchanged", 0
        else:
            is_base, parent = publication.needs_base(), publication.parent
            encoded, more = work.encode(publication.route_to(parent) if parent is not None else None, is_base, count)
            if encoded.bases:
                publication.commit(own_step, None, encoded.bases, encoded.deltas or None)
            else:
                publication.commit(own_step, parent, encoded.deltas)
            assert publication.record is not None
            record, changed, kind = publication.record, encoded.changed, "base" if encoded.bases else "delta"
            notes += (*more, *(work.fold() if folds else ()))
            removed, more = (0, ()) if keep is None else _removed(publication, keep)
            notes += more
    return PublishedCheckpoint(
        run,
        record.name.epoch,
        own_step,
        kind,  # type: ignore[arg-type]
        record.state,
        sum(tensor.size for tensor in source.tensors),
        changed,
        source.model.nbytes,
        0 if kind == "unchanged" else record.nbytes,
        removed,
        time.monotonic() - started,
        (*source.notices, *notes),
    )


@checked
def plan_publish(
    checkpoint: Checkpoint,
    chain: StrPath,
    *,
    step: Count | None = None,
    names: Names = "hf",
    dtype: str | None = None,
    config: StrPath | None = None,
    signing_key: bytes | None = None,
) -> PublishPlan:
    """What `publish` would do, without reading any tensor. Raises the errors that it raises before it writes."""
    run, own_step = target_path(chain), _step(checkpoint, step)
    source, last = _source(checkpoint, run, names, dtype, config, signing_key)
    kind: Literal["base", "delta", "base or unchanged"] = "base"
    if last is not None and own_step <= last.head.record.name.step:
        kind = "base or unchanged"
    elif last is not None and last.model == source.model and not is_base_due(last.head):
        kind = "delta"
    files = tuple(sorted(source.files))
    return PublishPlan(run, own_step, kind, len(source.tensors), source.model.nbytes, files, source.notices)


@dataclass
class EncodedStep:
    """What all ranks have stored of a step."""

    bases: list[RankShare]
    deltas: list[RankShare]
    changed: int = 0


class _Publishing:
    """The values of a checkpoint on their way into a chain, one share after another."""

    def __init__(
        self, publication: Publication, source: ExportedModel, before: ExportedModel | None, resources: Execution
    ) -> None:
        self._publication, self._source, self._before, self._resources = publication, source, before, resources

    def start(self, step: int) -> RunStart:
        """Decide how the chain goes on. Only of a step that is not after the last one, the values are read for that."""
        head, states = self._publication.head, list[str]()
        if head is not None and step <= head.record.name.step:
            with Reading(self._source.checkpoint, resources=self._resources) as reading:
                for rank in range(len(self._source.model.pieces)):
                    buffers = self._buffers(rank)
                    _fill(buffers, self._source, rank, reading)
                    states.append(buffers.state())
                reading.verify()
        return self._publication.start(step, states, has_values=True)

    def encode(self, route: Route | None, is_base: bool, count: CountBytes) -> tuple[EncodedStep, tuple[Notice, ...]]:
        """Store the objects of all shares: of a base, of deltas at the end of a route, or of both."""
        try:
            return self._encode(route, is_base, count), ()
        except CorruptError as error:
            where = error.where or ""
            if route is None or not where.startswith(self._publication.place.where()):
                raise
            notice = Notice(f"the last step cannot be read, so this one is a base: {error}", weight=Weight.UNSURE)
            return self._encode(None, True, lambda nbytes: None), (notice,)

    def _encode(self, route: Route | None, is_base: bool, count: CountBytes) -> EncodedStep:
        model, result = self._source.model, EncodedStep([], [])
        with ExitStack() as stack:
            reading = stack.enter_context(Reading(self._source.checkpoint, resources=self._resources))
            old = None
            if self._before is not None and route is not None:
                old = stack.enter_context(Reading(self._before.checkpoint, resources=self._resources))
            for rank in range(len(model.pieces)):
                buffers = self._buffers(rank)
                if route is not None and not self._has_before(buffers, rank, route.end.shares[rank], old):
                    self._replay(buffers, rank, route)
                _fill(buffers, self._source, rank, reading)
                if route is not None:
                    delta = self._put(buffers.encode(is_base=False))
                    result.deltas.append(delta.share)
                    result.changed += buffers.count_changes()
                if is_base or route is None:
                    result.bases.append(self._put(buffers.encode(is_base=True)).share)
                count(sum(piece.size * model.tensors[piece.tensor].dtype.itemsize for piece in model.pieces[rank]))
            reading.verify()
        return result

    def fold(self) -> tuple[Notice, ...]:
        """Store the folds that are due. The step is published: what fails is a notice."""
        publication, model = self._publication, self._source.model
        try:
            for parent in publication.due_folds():
                route, shares = publication.route_to(parent), list[RankShare]()
                with Reading(self._source.checkpoint, resources=self._resources) as reading:
                    for rank in range(len(model.pieces)):
                        buffers = self._buffers(rank)
                        self._replay(buffers, rank, route)
                        _fill(buffers, self._source, rank, reading)
                        shares.append(self._put(buffers.encode(is_base=False)).share)
                publication.add_fold(parent, shares)
        except LockedError:
            raise
        except (CkptError, OSError) as error:
            return (Notice(f"the step is published, but a fold that ends there is not: {error}", weight=Weight.UNSURE),)
        return ()

    def _put(self, encoded: EncodedShare) -> EncodedShare:
        put_object(self._publication.place, encoded.share.object, encoded.object, self._resources.scratch)
        return encoded

    def _buffers(self, rank: int) -> RankBuffers:
        is_signed = self._publication.model_ref.sha256 is not None
        return RankBuffers(self._source.model, rank, threads=self._resources.workers, is_signed=is_signed)

    def _has_before(self, buffers: RankBuffers, rank: int, share: RankShare, reading: Reading | None) -> bool:
        """Whether the checkpoint that was published last has the values before, which become the published ones."""
        if reading is None or self._before is None or self._before.model.pieces != self._source.model.pieces:
            return False
        try:
            _fill(buffers, self._before, rank, reading)
        except (CkptError, OSError):  # it was removed meanwhile
            return False
        if buffers.state() != share.state:
            return False
        buffers.accept()
        return True

    def _replay(self, buffers: RankBuffers, rank: int, route: Route) -> None:
        """Bring the published values of a rank to the end of a route, from its base on."""
        place, model = self._publication.place, self._source.model
        for record in route.records:
            share = record.shares[rank]
            path = self._publication.run / share.object.key
            read = None
            if share.object.nbytes <= model.max_share_nbytes(rank):
                with suppress(UnsafeError):  # it is larger than the record states
                    read = place.read(share.object.key, share.object.nbytes)
            if read is None:
                raise CorruptError("the object is missing, or has another size", where=path)
            buffers.apply(read[0], share, record.is_base, path)


def _removed(publication: Publication, keep: KeepSteps) -> tuple[int, tuple[Notice, ...]]:
    """Remove what is no longer needed. The step is published: what fails is a notice."""
    try:
        return remove_unneeded(publication, keep), ()
    except LockedError:
        raise
    except (CkptError, OSError) as error:
        text = f"the step is published, but what earlier ones need no longer was not removed: {error}"
        return 0, (Notice(text, weight=Weight.UNSURE),)


def _fill(buffers: RankBuffers, source: ExportedModel, rank: int, reading: Reading) -> None:
    """Fill the next values of a rank."""
    pieces = range(len(source.model.pieces[rank]))
    reading.fill(block for piece in pieces for block in source.blocks(rank, piece, buffers.piece(piece)))


def _source(
    checkpoint: Checkpoint,
    run: Path,
    names: Names,
    dtype: str | None,
    config: StrPath | None,
    signing_key: bytes | None,
) -> tuple[ExportedModel, LastStep | None]:
    """What is published, divided among ranks as the last step is, and that step."""
    source = exported_model(checkpoint, names, dtype, config, signing_key is not None)
    last = last_step(run, signing_key)
    return (source if last is None else source.divided_as(last.model)), last


def _step(checkpoint: Checkpoint, chosen: int | None) -> int:
    step = checkpoint.origin.step if chosen is None else chosen
    if step is None:
        raise UnsupportedError(
            "the checkpoint does not state its step", where=checkpoint.path, hint="State it with `step` (--step N)."
        )
    return step
