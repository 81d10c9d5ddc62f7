"""Matches the numbered parameters of several optimizers to the tensors of one model."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import TypeAlias

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
_NamedShapes: TypeAlias = tuple[tuple[str, Shape], ...]
"""The shapes of one parameter's states, by their names. Most parameters have the same."""
_AVERAGE = re.compile(r"teacher|target(_\w+)?|(\w+_)?ema(_\w+)?|swa(_\w+)?")
"""The keys of models that no optimizer updates: averages of the trained one."""
_MAX_PAIRED = 5
"""Limit of submodules for which every pairing with optimizers is tried."""


@dataclass(frozen=True)
class Numbered:
    """The numbers that the groups of one optimizer list (`members`), and its states by number."""

    members: Sequence[Sequence[Value]]
    states: Mapping[Value, Mapping[str, Value]]

    @property
    def count(self) -> int:
        """Number of parameters."""
        return sum(map(len, self.members))


def match_numbers(optimizers: Mapping[int, Numbered], trainable: Sequence[NamedTensor]) -> dict[int, Titles | None]:
    """For each optimizer, the tensor names of its numbers; None if no assignment, or more than one, is possible.

    Optimizers usually share a model without overlap. So all are matched together first; then each to one complete
    submodule. If neither has exactly one solution, each is matched alone, and two may get the same tensors.
    """
    if not optimizers:
        return {}
    shapes = {one.tensor.shape for one in trainable}
    groups = {i: _groups(one, shapes) for i, one in optimizers.items()}
    assignments = only_assignment([group for own in groups.values() for group in own], trainable)
    if assignments is not None:
        return _titles_by_optimizer(optimizers, assignments)
    if len(optimizers) == 1:
        return dict.fromkeys(optimizers)
    if (by_submodule := _by_submodule(optimizers, groups, trainable)) is not None:
        return dict(by_submodule)
    return {i: _titles(one, only_assignment(groups[i], trainable)) for i, one in optimizers.items()}


def match_trained_model(optimizer: Numbered, trainable: Sequence[NamedTensor]) -> tuple[Titles, tuple[str, ...]] | None:
    """The tensor names of an optimizer's numbers, if a file has several models of which one is trained.

    By their names, the others are averages of it, such as a teacher. Also returns the keys of these. None if there are
    none, or if no model, or more than one, fits.
    """
    models: dict[str, list[NamedTensor]] = {}
    for one in trainable:
        models.setdefault(one.name.partition(".")[0], []).append(one)
    averages = tuple(key for key in models if _AVERAGE.fullmatch(key))
    trained = [own for key, own in models.items() if key not in averages]
    if not averages or len(trained) != 1:
        return None
    groups = _groups(optimizer, {one.tensor.shape for one in trained[0]})
    titles = _titles(optimizer, only_assignment(groups, trained[0]))
    return None if titles is None else (titles, averages)


def _titles_by_optimizer(optimizers: Mapping[int, Numbered], matches: Sequence[Assignment]) -> dict[int, Titles | None]:
    owners = [(i, members) for i, one in optimizers.items() for members in one.members]
    titles: dict[int, Titles | None] = {}
    for i in optimizers:
        titles[i] = {members[m.start]: m.name for m in matches for j, members in (owners[m.group],) if j == i}
    return titles


def _titles(optimizer: Numbered, matches: Sequence[Assignment] | None) -> Titles | None:
    return None if matches is None else {optimizer.members[m.group][m.start]: m.name for m in matches}


def _by_submodule(
    optimizers: Mapping[int, Numbered], groups: Mapping[int, Sequence[NumberedGroup]], trainable: Sequence[NamedTensor]
) -> dict[int, Titles] | None:
    """Each optimizer matched to one complete submodule; None unless exactly one such pairing exists."""
    parts: dict[str, list[NamedTensor]] = {}
    for one in trainable:
        parts.setdefault(one.name.partition(".")[0], []).append(one)
    if not len(optimizers) <= len(parts) <= _MAX_PAIRED:
        return None
    fitting: dict[tuple[int, str], Titles] = {}
    for i, own in optimizers.items():
        for part, members in parts.items():
            titles = _titles(own, only_assignment(groups[i], members)) if own.count == len(members) else None
            if titles is not None:
                fitting[i, part] = titles
    chosen = (tuple(zip(optimizers, names, strict=True)) for names in permutations(parts, len(optimizers)))
    pairings = [pairs for pairs in chosen if all(pair in fitting for pair in pairs)]
    return {pair[0]: fitting[pair] for pair in pairings[0]} if len(pairings) == 1 else None


def _groups(optimizer: Numbered, shapes: set[Shape]) -> list[NumberedGroup]:
    own_shapes = {key: _shapes(state) for key, state in optimizer.states.items()}
    distinct = set(own_shapes.values())
    uninformative = _uninformative_states(distinct, shapes)
    parameters = {
        own: NumberedParameter(None, {name: shape for name, shape in own if name not in uninformative})
        for own in (*distinct, ())
    }
    return [
        NumberedGroup(tuple(parameters[own_shapes.get(key, ())] for key in members)) for members in optimizer.members
    ]


_SHAPELESS = frozenset(
    # Counters; tables and scales of bitsandbytes' 8-bit optimizers; in LBFGS, all parameters in one vector.
    ("step", "qmap1", "qmap2", "absmax1", "absmax2", "d", "t", "prev_flat_grad", "H_diag")
)


def _uninformative_states(own_shapes: Iterable[_NamedShapes], shapes: set[Shape]) -> set[str]:
    """States whose shapes do not depend on their parameter's: counters, tables, flat vectors of several parameters.

    These are states whose shape, for some parameter, fits no tensor of the model, while another state fits; and
    states that are always a single number, if other states of the same parameter are not.
    """
    uninformative = set(_SHAPELESS)
    fits: dict[str, bool] = {}
    is_scalar: dict[str, bool] = {}
    scalar_names: set[str] = set()
    for own in own_shapes:
        shapes_of_state = {name: shape for name, shape in own if name not in uninformative}
        for name, shape in shapes_of_state.items():
            fits[name] = fits.get(name, True) and any(is_state_of(name, shape, tensor_shape) for tensor_shape in shapes)
            is_scalar[name] = is_scalar.get(name, True) and shape in ((), (1,))
        if any(shape not in ((), (1,)) for shape in shapes_of_state.values()):
            scalar_names |= {name for name, shape in shapes_of_state.items() if shape in ((), (1,))}
    if any(fits.values()):
        uninformative |= {name for name, fit in fits.items() if not fit}
    return uninformative | {name for name in scalar_names if is_scalar[name]}


def _shapes(state: Mapping[str, Value]) -> _NamedShapes:
    return tuple({str(key): value.shape for key, value in state.items() if isinstance(value, Leaf)}.items())
