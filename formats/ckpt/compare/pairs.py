"""Pairs of tensors, one of each checkpoint, and their comparison.

Tensors are paired by parameter and state. What the optimizer updates is one
state: the `master` where either checkpoint has one, else the `model`. So a
checkpoint with masters is compared with one that has these weights alone.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import chain

import numpy as np

from ckpt.compare.result import Diff, TensorDiff
from ckpt.compare.sums import DiffSums, changed_codes, diff_sums
from ckpt.compare.tables import Key, TablePairs, TableTensors
from ckpt.compare.values import values
from ckpt.pipeline import CountBytes, Resources
from ckpt.pipeline.executors import batches, run_tasks
from ckpt.pipeline.interrupts import interruptible
from ckpt.pipeline.planned_reads import prefetched, ranges_together, reads_from_stores
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.errors import NoMatchError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.prefetch import PlannedReads
from ckpt_formats.core.quantised.weights import parts_of, quantised_weights
from ckpt_formats.core.state_names import renamed
from ckpt_formats.core.state_table import TabulatedParameters
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer


@dataclass(frozen=True)
class TensorPairs:
    """Two checkpoints, and the tensors of each that are to be compared."""

    first: Checkpoint
    second: Checkpoint
    first_tensors: Mapping[Key, Tensor]
    second_tensors: Mapping[Key, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes that the comparison reads."""
        first, second = self.first_tensors, self.second_tensors
        if isinstance(first, TableTensors) and isinstance(second, TableTensors):
            return TablePairs.of(first, second).nbytes
        both = ((first[key], second[key]) for key in first.keys() & second.keys())
        return sum(a.nbytes + b.nbytes for a, b in both if a.shape == b.shape)


def pair_tensors(first: Checkpoint, second: Checkpoint, states: Sequence[str] = ()) -> TensorPairs:
    """The tensors of both, all or those of some states. Raises `NoMatchError` for a state that neither has."""
    mastered = _mastered(first) | _mastered(second)
    first_tensors, second_tensors = _tensors(first, mastered), _tensors(second, mastered)
    known = {state for _, state in (*first_tensors, *second_tensors)}
    for state in states:
        if state not in known:
            hint = f"States are {', '.join(map(printable, sorted(known)))}."
            raise NoMatchError(renamed(state) or f"no tensor has the state `{printable(state)}`", hint=hint)
    if states:
        first_tensors, second_tensors = (_of_states(tensors, states) for tensors in (first_tensors, second_tensors))
    return TensorPairs(first, second, first_tensors, second_tensors)


def compare(
    both: TensorPairs,
    resources: Resources,
    count_bytes: CountBytes = lambda nbytes: None,
    tensors_only: bool = False,
    figures: bool = True,
) -> Diff:
    """Everything that differs. Reads each byte of both checkpoints once.

    Without `figures`, of tensors whose bits are all equal only the elements are counted.
    """
    first_tensors, second_tensors = both.first_tensors, both.second_tensors
    pairs = [
        TensorDiff(*key, "missing", _described(first_tensors[key]))
        for key in first_tensors
        if key not in second_tensors
    ]
    pairs += [
        TensorDiff(*key, "added", _described(second_tensors[key])) for key in second_tensors if key not in first_tensors
    ]
    with interruptible(count_bytes) as count:
        equal: dict[Key, int] = {}
        if not figures and isinstance(first_tensors, TableTensors) and isinstance(second_tensors, TableTensors):
            equal = TablePairs.of(first_tensors, second_tensors).equal(resources, count)
            pairs += [TensorDiff(*key, "equal", "", DiffSums(size)) for key, size in equal.items()]

        codes = {*parts_of(quantised_weights(both.first)), *parts_of(quantised_weights(both.second))}
        files = [*both.first.identities, *both.second.identities]
        own = resources.with_prefetch() if reads_from_stores(files) else resources

        def compared(task: tuple[list[tuple[Key, Tensor, Tensor]], PlannedReads | None]) -> list[TensorDiff]:
            batch, planned = task
            with (
                planned or nullcontext(),
                Reader(check=False, max_files=resources.files, planned=planned) as reader,
                Transfer(reader, own.slab, count) as transfer,
            ):
                return [_pair(*key, a, b, transfer, key[0] in codes) for key, a, b in batch]

        both_have = (key for key in first_tensors if key in second_tensors and key not in equal)
        tensors = ((key, first_tensors[key], second_tensors[key]) for key in both_have)
        work = list(batches((a.nbytes + b.nbytes, (key, a, b)) for key, a, b in tensors))
        plan = [chain.from_iterable(ranges_together((a, b)) for _, a, b in batch) for batch in work]
        with prefetched(plan, files, resources) as planned, ThreadPoolExecutor(resources.workers, "ckpt") as pool:
            tasks = zip(work, planned, strict=True)
            pairs += [pair for some in run_tasks(pool, compared, tasks, 2 * resources.workers) for pair in some]
    order = {key: number for number, key in enumerate(dict.fromkeys((*first_tensors, *second_tensors)))}
    pairs.sort(key=lambda pair: order[pair.name, pair.state])
    if tensors_only:
        return Diff(tuple(pairs), tensors_only=True)
    same_step = both.first.origin.step == both.second.origin.step
    return Diff(tuple(pairs), tuple(values(both.first, both.second)), same_step)


def _mastered(source: Checkpoint) -> set[str]:
    """The names of the parameters that have a master, with their aliases."""
    if isinstance(source.parameters, TabulatedParameters):
        table = source.parameters.table
        names = {table.names[number] for number in np.flatnonzero(table.rows_named(MASTER) >= 0).tolist()}
    else:
        names = {name for name, parameter in source.parameters.items() if MASTER in parameter.states}
    return names | {alias for alias, name in source.aliases.items() if name in names}


def _tensors(source: Checkpoint, mastered: Set[str]) -> Mapping[Key, Tensor]:
    """Every tensor by parameter and state, under names that do not depend on the engine; tied ones by each name.

    `mastered`: the names for which the tensor that the optimizer updates is called the master.
    """
    if isinstance(source.parameters, TabulatedParameters):
        return TableTensors.of(source.parameters, source.aliases, mastered)
    tensors: dict[Key, Tensor] = {}
    for name, parameter in source.parameters.items():
        tensors |= {(name, state): tensor for state, tensor in _states(parameter, name in mastered)}
    for alias, name in source.aliases.items():
        if name in source.parameters:
            tensors[alias, MASTER if alias in mastered else MODEL] = _weight(source.parameters[name])
    return tensors


def _of_states(tensors: Mapping[Key, Tensor], states: Sequence[str]) -> Mapping[Key, Tensor]:
    if isinstance(tensors, TableTensors):
        return tensors.of_states(states)
    return {key: tensor for key, tensor in tensors.items() if key[1] in states}


def _states(parameter: Parameter, mastered: bool) -> Iterator[tuple[str, Tensor]]:
    yield MASTER if mastered else MODEL, _weight(parameter)
    if MASTER in parameter.states and MODEL in parameter.states:
        yield MODEL, parameter.states[MODEL]
    for state, tensor in parameter.states.items():
        counter = state == "step" and tensor.shape == ()
        if state not in (MASTER, MODEL) and not counter:
            yield state, tensor


def _weight(parameter: Parameter) -> Tensor:
    return parameter.states.get(MASTER, parameter.weight)


def _described(tensor: Tensor) -> str:
    return f"{tensor.dtype.name} {list(tensor.shape)}"


def _pair(name: str, state: str, a: Tensor, b: Tensor, transfer: Transfer, are_codes: bool) -> TensorDiff:
    if a.shape != b.shape or (are_codes and a.dtype != b.dtype):
        return TensorDiff(name, state, "reshaped", f"{_described(a)} -> {_described(b)}")
    sums, total = changed_codes if are_codes else diff_sums, DiffSums()
    for box in transfer.boxes(a):
        total += sums(transfer.fetch(a, box, "first"), transfer.fetch(b, box, "second"))
    if a.dtype != b.dtype:
        return TensorDiff(name, state, "retyped", f"{a.dtype.name} -> {b.dtype.name}", total)
    return TensorDiff(name, state, "changed" if total.changed else "equal", "codes" if are_codes else "", total)
