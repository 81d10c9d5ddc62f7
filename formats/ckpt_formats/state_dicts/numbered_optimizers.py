"""Optimizers that number their parameters, several at once: which numbers mean which tensors of the model?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.values import Value
from ckpt_formats.state_dicts.leaves import Leaf
from ckpt_formats.state_dicts.parameter_order import (
    Assignment,
    NamedTensor,
    NumberedGroup,
    NumberedParameter,
    is_state_of,
    only_assignment,
)

Titles = dict[Value, str]
_MAX_PARTS = 5
"""Submodules and optimizers whose every pairing is tried."""


@dataclass(frozen=True)
class Numbered:
    """The numbers that the groups of one optimizer list, and the states by number."""

    members: Sequence[Sequence[Value]]
    states: Mapping[Value, Mapping[str, Value]]

    @property
    def count(self) -> int:
        return sum(map(len, self.members))


def match_numbers(optimizers: Mapping[int, Numbered], trainable: Sequence[NamedTensor]) -> dict[int, Titles | None]:
    """The tensors behind the numbers of each optimizer; None where there are none, or several ways.

    Optimizers mostly share a model without overlap: so all together are tried first, then each with one submodule
    that it has all of. If neither is one way, each is tried alone: then two may have the same tensors.
    """
    if not optimizers:
        return {}
    shapes = {one.tensor.shape for one in trainable}
    runs = {i: _runs(one, shapes) for i, one in optimizers.items()}
    together = _matched([run for own in runs.values() for run in own], trainable)
    if together is not None:
        return _apart(optimizers, together)
    if len(optimizers) == 1:
        return dict.fromkeys(optimizers)
    if (paired := _by_submodule(optimizers, runs, trainable)) is not None:
        return dict(paired)
    return {i: _titles(one, _matched(runs[i], trainable)) for i, one in optimizers.items()}


def _matched(runs: Sequence[NumberedGroup], trainable: Sequence[NamedTensor]) -> list[Assignment] | None:
    return only_assignment(runs, trainable)


def _apart(optimizers: Mapping[int, Numbered], matches: Sequence[Assignment]) -> dict[int, Titles | None]:
    owners = [(i, members) for i, one in optimizers.items() for members in one.members]
    titles: dict[int, Titles | None] = {}
    for i in optimizers:
        titles[i] = {members[m.start]: m.name for m in matches for j, members in (owners[m.run],) if j == i}
    return titles


def _titles(one: Numbered, matches: Sequence[Assignment] | None) -> Titles | None:
    return None if matches is None else {one.members[m.run][m.start]: m.name for m in matches}


def _by_submodule(
    optimizers: Mapping[int, Numbered], runs: Mapping[int, Sequence[NumberedGroup]], trainable: Sequence[NamedTensor]
) -> dict[int, Titles] | None:
    """Each optimizer has all of one submodule, if there is one such pairing; None if not."""
    parts: dict[str, list[NamedTensor]] = {}
    for one in trainable:
        parts.setdefault(one.name.partition(".")[0], []).append(one)
    if not len(optimizers) <= len(parts) <= _MAX_PARTS:
        return None
    fitting: dict[tuple[int, str], Titles] = {}
    for i, own in optimizers.items():
        for part, members in parts.items():
            titles = _titles(own, only_assignment(runs[i], members)) if own.count == len(members) else None
            if titles is not None:
                fitting[i, part] = titles
    chosen = (tuple(zip(optimizers, names, strict=True)) for names in permutations(parts, len(optimizers)))
    pairings = [pairs for pairs in chosen if all(pair in fitting for pair in pairs)]
    return {pair[0]: fitting[pair] for pair in pairings[0]} if len(pairings) == 1 else None


def _runs(one: Numbered, shapes: set[Shape]) -> list[NumberedGroup]:
    silent = _silent(one, shapes)
    slots = {
        key: NumberedParameter(
            None, {name: shape for name, shape in _shapes(one.states.get(key, {})).items() if name not in silent}
        )
        for members in one.members
        for key in members
    }
    return [NumberedGroup(tuple(slots[key] for key in members)) for members in one.members]


_SHAPELESS = frozenset(
    # Counters; tables and scales of bitsandbytes' 8-bit optimizers; of LBFGS, all parameters end to end.
    ("step", "qmap1", "qmap2", "absmax1", "absmax2", "d", "t", "prev_flat_grad", "H_diag")
)


def _silent(one: Numbered, shapes: set[Shape]) -> set[str]:
    """States whose shapes tell nothing of their parameter's: counters, tables, flat vectors of several parameters.

    That is what has, for some parameter, a shape that no tensor of the model could have such a state for, while
    other states of the same parameter could; and what is a lone number beside states that are none.
    """
    silent = set(_SHAPELESS)
    fits: dict[str, bool] = {}
    lone: dict[str, bool] = {}
    beside: set[str] = set()
    for state in one.states.values():
        shapes_of_state = {name: shape for name, shape in _shapes(state).items() if name not in silent}
        for name, shape in shapes_of_state.items():
            fits[name] = fits.get(name, True) and any(is_state_of(name, shape, whole) for whole in shapes)
            lone[name] = lone.get(name, True) and shape in ((), (1,))
        if any(shape not in ((), (1,)) for shape in shapes_of_state.values()):
            beside |= {name for name, shape in shapes_of_state.items() if shape in ((), (1,))}
    if any(fits.values()):
        silent |= {name for name, fit in fits.items() if not fit}
    return silent | {name for name in beside if lone[name]}


def _shapes(state: Mapping[str, Value]) -> dict[str, Shape]:
    return {str(key): value.shape for key, value in state.items() if isinstance(value, Leaf)}
