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


def nbytes_of(every: Sequence[TensorPairs]) -> int:
    """Bytes that `compare_each` reads: those of the first checkpoint once."""
    if len(every) == 1:
        return every[0].nbytes
    first = every[0].first_tensors
    total = 0
    for key, tensor in first.items():
        others = [both.second_tensors[key] for both in every if key in both.second_tensors]
        sizes = [other.nbytes for other in others if other.shape == tensor.shape]
        total += sum(sizes) + (tensor.nbytes if sizes else 0)
    return total


def pair_tensors(first: Checkpoint, second: Checkpoint, states: Sequence[str] = ()) -> TensorPairs:
    """The tensors of both, all or those of some states. Raises `NoMatchError` for a state that neither has."""
    return pair_with_each(first, [second], states)[0]


def pair_with_each(first: Checkpoint, others: Sequence[Checkpoint], states: Sequence[str] = ()) -> list[TensorPairs]:
    """The tensors of one and of each of several others, under names that are the same in all pairs.

    Raises `NoMatchError` for a state that none of them has.
    """
    checkpoints = (first, *others)
    mastered = set[str]().union(*map(mastered_names, checkpoints))
    tensors = [_tensors(one, mastered) for one in checkpoints]
    known = {state for own in tensors for _, state in own}
    for state in states:
        if state not in known:
            hint = f"States are {', '.join(map(printable, sorted(known)))}."
            raise NoMatchError(renamed(state) or f"no tensor has the state `{printable(state)}`", hint=hint)
    first_tensors, *rest = (_of_states(own, states) if states else own for own in tensors)
    return [TensorPairs(first, other, first_tensors, own) for other, own in zip(others, rest, strict=True)]


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
    return compare_each([both], resources, count_bytes, tensors_only, figures)[0]


def compare_each(
    every: Sequence[TensorPairs],
    resources: Resources,
    count_bytes: CountBytes = lambda nbytes: None,
    tensors_only: bool = False,
    figures: bool = True,
) -> list[Diff]:
    """Everything by which several checkpoints differ from one: in each of `every`, the first is the same.

    Reads each byte of the first once, whatever the number of others, and each byte of the others once. Without
    `figures`, of tensors whose bits are all equal in one pair of checkpoints only the elements are counted.
    """
    first, first_tensors = every[0].first, every[0].first_tensors
    pairs = [list(_unpaired(both)) for both in every]
    with interruptible(count_bytes) as count:
        equal: dict[Key, int] = {}
        second_tensors = every[0].second_tensors
        if not figures and len(every) == 1 and isinstance(first_tensors, TableTensors):
            if isinstance(second_tensors, TableTensors):
                equal = TablePairs.of(first_tensors, second_tensors).equal(resources, count)
            pairs[0] += [TensorDiff(*key, "equal", "", DiffSums(size)) for key, size in equal.items()]

        parts = parts_of(quantised_weights(first))
        codes = [{*parts, *parts_of(quantised_weights(both.second))} for both in every]
        files = [*first.identities, *(path for both in every for path in both.second.identities)]
        own = resources.with_prefetch() if reads_from_stores(files) else resources

        def compared(task: tuple[list[_Counterparts], PlannedReads | None]) -> list[list[tuple[int, TensorDiff]]]:
            batch, planned = task
            with (
                planned or nullcontext(),
                Reader(check=False, max_files=resources.files, planned=planned) as reader,
                Transfer(reader, own.slab, count) as transfer,
            ):
                return [_compare_one(one, codes, transfer) for one in batch]

        counterparts = (_Counterparts.of(key, every) for key in first_tensors if key not in equal)
        work = list(batches((one.nbytes, one) for one in counterparts if one.others))
        plan = [chain.from_iterable(ranges_together(one.tensors) for one in batch) for batch in work]
        with prefetched(plan, files, resources) as planned, ThreadPoolExecutor(resources.workers, "ckpt") as pool:
            tasks = zip(work, planned, strict=True)
            for some in run_tasks(pool, compared, tasks, 2 * resources.workers):
                for numbered in some:
                    for number, pair in numbered:
                        pairs[number].append(pair)
    return [_in_order(both, own_pairs, tensors_only) for both, own_pairs in zip(every, pairs, strict=True)]


@dataclass(frozen=True)
class _Counterparts:
    """A tensor of the first checkpoint, and those that are compared with it."""

    key: Key
    first: Tensor
    others: tuple[tuple[int, Tensor], ...]
    """Each with the number of its checkpoint."""

    @classmethod
    def of(cls, key: Key, every: Sequence[TensorPairs]) -> "_Counterparts":
        others = ((n, both.second_tensors[key]) for n, both in enumerate(every) if key in both.second_tensors)
        return cls(key, every[0].first_tensors[key], tuple(others))

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (self.first, *(tensor for _, tensor in self.others))

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def _unpaired(both: TensorPairs) -> Iterator[TensorDiff]:
    """The tensors that only one of the two has."""
    for key in both.first_tensors:
        if key not in both.second_tensors:
            yield TensorDiff(*key, "missing", _described(both.first_tensors[key]))
    for key in both.second_tensors:
        if key not in both.first_tensors:
            yield TensorDiff(*key, "added", _described(both.second_tensors[key]))


def _in_order(both: TensorPairs, pairs: list[TensorDiff], tensors_only: bool) -> Diff:
    """The pairs in the order of the checkpoints, with all other differences."""
    order = {key: number for number, key in enumerate(dict.fromkeys((*both.first_tensors, *both.second_tensors)))}
    pairs.sort(key=lambda pair: order[pair.name, pair.state])
    if tensors_only:
        return Diff(tuple(pairs), tensors_only=True)
    same_step = both.first.origin.step == both.second.origin.step
    return Diff(tuple(pairs), tuple(values(both.first, both.second)), same_step)


def mastered_names(source: Checkpoint) -> set[str]:
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


def _compare_one(one: _Counterparts, codes: Sequence[Set[str]], transfer: Transfer) -> list[tuple[int, TensorDiff]]:
    """The pairs of one tensor of the first checkpoint, each with the number of the other. Reads the first once."""
    (name, state), a = one.key, one.first
    numbered, totals = list[tuple[int, TensorDiff]](), dict[int, DiffSums]()
    comparable: list[tuple[int, Tensor]] = []
    for number, b in one.others:
        if a.shape != b.shape or (name in codes[number] and a.dtype != b.dtype):
            numbered.append((number, TensorDiff(name, state, "reshaped", f"{_described(a)} -> {_described(b)}")))
        else:
            comparable.append((number, b))
    for box in transfer.boxes(a) if comparable else ():
        values = transfer.fetch(a, box, "first")
        for number, b in comparable:
            sums = changed_codes if name in codes[number] else diff_sums
            totals[number] = totals.get(number, DiffSums()) + sums(values, transfer.fetch(b, box, "second"))
    for number, b in comparable:
        total = totals.get(number, DiffSums())
        if a.dtype != b.dtype:
            pair = TensorDiff(name, state, "retyped", f"{a.dtype.name} -> {b.dtype.name}", total)
        else:
            what = "codes" if name in codes[number] else ""
            pair = TensorDiff(name, state, "changed" if total.changed else "equal", what, total)
        numbered.append((number, pair))
    return numbered
