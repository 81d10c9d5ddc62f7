"""Measure the values of a checkpoint: each is read once, in pieces that several threads share."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

from ckpt.compare.statistics.figures import PIECE, Figures, Measurement
from ckpt.compare.statistics.result import Stats, TensorStats
from ckpt.job import AnyProgress, count_to, load_kernels
from ckpt.pipeline import Resources, check_complete
from ckpt.pipeline.executors import batches, run_tasks
from ckpt.pipeline.interrupts import interruptible
from ckpt.pipeline.planned_reads import prefetched, ranges_together, reads_from_stores
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import NoMatchError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import slabs
from ckpt_formats.core.identity import check_unchanged
from ckpt_formats.core.name_patterns import search
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.prefetch import PlannedReads
from ckpt_formats.core.quantised.weights import quantised_weights
from ckpt_formats.core.rules import safe_pattern
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer


@dataclass(frozen=True)
class _Chosen:
    """A tensor that is measured."""

    name: str
    state: str
    tensor: Tensor
    scheme: str = ""


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor that one thread measures."""

    owner: int
    """The index of its tensor."""
    number: int
    """Its place among the pieces of the tensor."""
    tensor: Tensor


@checked
def stats(
    source: Checkpoint,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    states: Sequence[str] = (),
    *,
    resources: Resources | None = None,
    progress: AnyProgress | None = None,
) -> Stats:
    """The figures of all values of a checkpoint, of any format. Reads each byte once.

    `only` and `skip` are patterns of names, `states` names of states (`model`, `master`, `exp_avg`, ...). Tensors among
    the extras and the optimizer's counters are left out. Quantised weights are measured by value; `notices` names those
    of schemes that are not decoded, whose codes and scales are measured instead.

    Raises `NoMatchError` for a pattern or state that matches nothing, `IncompleteError` or `CorruptError` if the
    checkpoint is incomplete or damaged.
    """
    check_complete(source)
    every, notices = _tensors(source)
    chosen = _select(every, only, skip, states)
    figures = _measure([one.tensor for one in chosen], source, resources or Resources.of_machine(), progress)
    check_unchanged(source.identities)
    rows = (
        TensorStats(one.name, one.state, one.tensor.dtype.name, one.tensor.shape, own, one.scheme)
        for one, own in zip(chosen, figures, strict=True)
    )
    return Stats(tuple(rows), notices)


def _tensors(source: Checkpoint) -> tuple[list[_Chosen], tuple[Notice, ...]]:
    """All tensors that can be measured, with plain weights in the place of their parts, and what is to be said."""
    weights: dict[str, _Chosen] = {}
    unused: set[str] = set()
    notices: tuple[Notice, ...] = ()
    if quantised_weights(source):
        from ckpt_formats.core.quantised.plain import plain_model  # other models need no codecs

        model = plain_model(source)
        for one in model.weights:
            weights[one.parts[0]] = _Chosen(one.name, "model", one.tensor, one.scheme)
            unused.update(one.parts[1:])
        if model.failures:
            text = "quantised weights of schemes that ckpt does not decode: their codes and scales are measured"
            names = tuple(f"{module} {why}" for module, why in model.failures.items())
            notices = (Notice(text, names, Weight.UNSURE),)
    chosen: list[_Chosen] = []
    for parameter, state, tensor in source.tensors():
        name = parameter.name
        is_counter = state == "step" and tensor.size == 1
        if name in weights:
            chosen.append(weights[name])
        elif name not in unused and parameter.role != "extra" and not is_counter:
            chosen.append(_Chosen(name, state, tensor))
    return chosen, notices


def _select(every: list[_Chosen], only: Sequence[str], skip: Sequence[str], states: Sequence[str]) -> list[_Chosen]:
    names = {one.name for one in every}
    for pattern in (*only, *skip):
        safe_pattern(pattern, "only or skip (--only, --skip)")
        if not any(search(pattern, name) for name in names):
            raise NoMatchError(f"no parameter matches `{printable(pattern)}`", hint="`ckpt inspect` lists their names.")
    known = dict.fromkeys(one.state for one in every)
    for state in states:
        if state not in known:
            hint = f"Its states are {', '.join(map(printable, known))}."
            raise NoMatchError(f"no tensor has the state `{printable(state)}`", hint=hint)
    names = {
        name
        for name in names
        if (not only or any(search(pattern, name) for pattern in only))
        and not any(search(pattern, name) for pattern in skip)
    }
    return [one for one in every if one.name in names and (not states or one.state in states)]


def _measure(
    tensors: Sequence[Tensor], source: Checkpoint, resources: Resources, progress: AnyProgress | None
) -> list[Figures]:
    """The figures of each tensor."""
    load_kernels()
    own = resources.with_prefetch() if reads_from_stores(source.identities) else resources
    with interruptible(count_to(sum(tensor.nbytes for tensor in tensors), progress)) as count:
        work = list(batches((piece.tensor.nbytes, piece) for piece in _pieces(tensors)))

        def measure(task: tuple[list[_Piece], PlannedReads | None]) -> list[tuple[_Piece, Figures]]:
            batch, planned = task
            with (
                planned or nullcontext(),
                Reader(check=False, max_files=resources.files, planned=planned) as reader,
                Transfer(reader, own.slab, count) as transfer,
            ):
                return [(piece, _figures(piece.tensor, transfer)) for piece in batch]

        plan = [ranges_together(piece.tensor for piece in batch) for batch in work]
        with (
            prefetched(plan, source.identities, resources) as planned,
            ThreadPoolExecutor(resources.workers, "ckpt") as pool,
        ):
            tasks = zip(work, planned, strict=True)
            measured = [one for some in run_tasks(pool, measure, tasks, 2 * resources.workers) for one in some]
    totals = [Figures() for _ in tensors]
    for piece, figures in sorted(measured, key=lambda one: (one[0].owner, one[0].number)):
        totals[piece.owner] += figures
    return totals


def _pieces(tensors: Sequence[Tensor]) -> Iterator[_Piece]:
    for owner, tensor in enumerate(tensors):
        for number, box in enumerate(slabs(tensor.shape, PIECE)):
            yield _Piece(owner, number, tensor if box.shape == tensor.shape else tensor.crop(box))


def _figures(tensor: Tensor, transfer: Transfer) -> Figures:
    measurement = Measurement(tensor.dtype, tensor.size)
    for _, values in transfer.slabs(tensor):
        measurement.add(values)
    return measurement.figures()
