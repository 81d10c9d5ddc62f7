"""Find optimizer states that some parameters lack and others of their group have."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from ckpt_formats.core.checkpoint import MASTER, MODEL, Group, Parameter
from ckpt_formats.core.errors import IncompleteError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import list_names, printable

_BLOCKWISE = ("qmap", "absmax")
"""How the names of states begin that 8-bit optimizers have only for large parameters."""

_COMMON = frozenset(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg"))
"""States that an optimizer has for every parameter, if it has them at all."""

States = frozenset[str]

_OF_THE_MODEL = frozenset((MODEL, MASTER))


def check_states(
    parameters: Mapping[str, Parameter], groups: Sequence[Group], where: Path, *, even: bool
) -> Iterator[Notice]:
    """Raise `IncompleteError` if a parameter lacks states that others of its group have; yield notices of what is
    unsure.

    A parameter without any state gives only a notice, because an optimizer makes no state
    for a parameter that never had a gradient. If `even`, the engine has all states for all
    parameters, so it is an error too. Vectors and matrices are not compared with each other:
    optimizers such as Adafactor have different states for them.
    """
    without: list[str] = []
    for number, group in enumerate(groups):
        kinds: dict[bool, dict[str, States]] = {}
        for name in group.names:
            parameter = parameters.get(name)
            if parameter is not None and (weight := parameter.weight).size:
                kinds.setdefault(len(weight.shape) > 1, {})[name] = _states(parameter)
        for by_name in kinds.values():
            yield from _check_kind(by_name, number, where)
        if any(states for by_name in kinds.values() for states in by_name.values()):
            without += (name for by_name in kinds.values() for name, states in by_name.items() if not states)
    if without and even:
        raise IncompleteError(
            f"the optimizer has no states of {list_names(without)}, but of others in the same group",
            where=where,
            hint="Files are missing, or belong to another save: copy all files of one step again.",
        )
    if without:
        text = "the optimizer has no state of these parameters: it never updated them, or their states are missing"
        yield Notice(text, tuple(without), Weight.UNSURE)
    yield from _poorer_groups(parameters, groups)


def _poorer_groups(parameters: Mapping[str, Parameter], groups: Sequence[Group]) -> Iterator[Notice]:
    """Notices of groups with fewer states than another group with the same options, probably of the same optimizer."""
    states_of_groups = [
        frozenset[str]().union(*(_states(parameters[name]) for name in group.names if name in parameters))
        for group in groups
    ]
    for number, (group, states) in enumerate(zip(groups, states_of_groups, strict=True)):
        fuller = [
            others
            for group_of_others, others in zip(groups, states_of_groups, strict=True)
            if states < others and group_of_others.options.keys() == group.options.keys()
        ]
        if states and fuller:
            lacking = sorted(max(fuller, key=len) - states)
            text = f"optimizer group {number} lacks these states, which another group has"
            yield Notice(text, tuple(lacking), Weight.UNSURE)


def _check_kind(states_by_name: Mapping[str, States], number: int, where: Path) -> Iterator[Notice]:
    """Raise `IncompleteError` for a missing state that is common or that most parameters have; else yield a notice."""
    counts = Counter(states for states in states_by_name.values() if states)
    holders: Counter[str] = Counter()
    for states, count in counts.items():
        holders.update(dict.fromkeys(states, count))
    names_by_lack: dict[str, list[str]] = {}
    poorer = {states for states in counts if any(states < other for other in counts)}
    for name, states in states_by_name.items() if poorer else ():
        fuller = [other for other in counts if states < other and states]
        if not fuller:
            continue
        lacking = sorted(max(fuller, key=lambda other: counts[other]) - states)
        if all(state.startswith(_BLOCKWISE) for state in lacking):
            continue
        if any(state in _COMMON or 2 * holders[state] > len(states_by_name) for state in lacking):
            raise IncompleteError(
                f"`{printable(name)}` has no {' and no '.join(f'`{printable(state)}`' for state in lacking)}, which "
                "other "
                f"parameters of optimizer group {number} have",
                where=where,
                hint="Files are missing, or belong to another save: copy all files of one step again.",
            )
        names_by_lack.setdefault(", ".join(f"`{printable(state)}`" for state in lacking), []).append(name)
    for lacking_text, names in names_by_lack.items():
        text = f"these parameters of optimizer group {number} have no {lacking_text}, which others have"
        yield Notice(text, tuple(names), Weight.UNSURE)


def _states(parameter: Parameter) -> States:
    """The names of its optimizer states, tensors and plain values. A value of None is no state."""
    values = tuple(key for key, value in parameter.values.items() if value is not None) if parameter.values else ()
    return _without_model((*parameter.states, *values))


@lru_cache(1 << 10)
def _without_model(states: tuple[str, ...]) -> States:
    return frozenset(states) - _OF_THE_MODEL
