"""Optimizer states that some parameters lack, though others of their group have them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ckpt_formats.core.checkpoint import MASTER, MODEL, Group, Parameter
from ckpt_formats.core.errors import Incomplete
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable

_BLOCKWISE = ("qmap", "absmax")
"""States that 8-bit optimizers keep of large parameters only begin so."""

_COMMON = frozenset(("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg"))
"""States that the optimizers which have them keep of every parameter."""

States = frozenset[str]

_OF_THE_MODEL = frozenset((MODEL, MASTER))


def check_states(
    parameters: Mapping[str, Parameter], groups: Sequence[Group], where: Path, *, even: bool
) -> Iterator[Notice]:
    """Raises `Incomplete` if a parameter lacks states that others of its group and its number of axes have.

    One without any state is only noticed, since an optimizer makes none for a parameter
    that never had a gradient; but where `even`, the engine keeps all states for all, so that is
    an error as well. Optimizers such as Adafactor have other states for vectors than for
    matrices, so that these are not compared.
    """
    without: list[str] = []
    for number, group in enumerate(groups):
        kinds: dict[bool, dict[str, States]] = {}
        for name in group.names:
            parameter = parameters.get(name)
            if parameter is not None and parameter.weight.size:
                kinds.setdefault(len(parameter.weight.shape) > 1, {})[name] = _states(parameter)
        for by_name in kinds.values():
            yield from _check_kind(by_name, number, where)
        if any(states for by_name in kinds.values() for states in by_name.values()):
            without += (name for by_name in kinds.values() for name, states in by_name.items() if not states)
    if without and even:
        raise Incomplete(
            f"the optimizer has no states of {_some(without)}, but of others in the same group",
            where=where,
            hint="Files were lost, or are of another save: copy all files of one step again.",
        )
    if without:
        text = "the optimizer has no state of these parameters: it never stepped them, or their states were lost"
        yield Notice(text, tuple(without), Weight.UNSURE)
    yield from _poorer_groups(parameters, groups)


def _poorer_groups(parameters: Mapping[str, Parameter], groups: Sequence[Group]) -> Iterator[Notice]:
    """Groups with the same kinds of options are of one optimizer, which as a rule keeps the same for all of them."""
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
            text = f"optimizer group {number} has not these states, which another group has"
            yield Notice(text, tuple(lacking), Weight.UNSURE)


def _check_kind(states_by_name: Mapping[str, States], number: int, where: Path) -> Iterator[Notice]:
    """Raises `Incomplete` for a state of every optimizer's kind, or one that most have; of others it is said."""
    counts = Counter(states for states in states_by_name.values() if states)
    holders = Counter(state for states in states_by_name.values() for state in states)
    names_by_lack: dict[str, list[str]] = {}
    for name, states in states_by_name.items():
        fuller = [other for other in counts if states < other and states]
        if not fuller:
            continue
        lacking = sorted(max(fuller, key=lambda other: counts[other]) - states)
        if all(state.startswith(_BLOCKWISE) for state in lacking):
            continue
        if any(state in _COMMON or 2 * holders[state] > len(states_by_name) for state in lacking):
            raise Incomplete(
                f"`{printable(name)}` has no {' and no '.join(f'`{printable(state)}`' for state in lacking)}, which "
                "other "
                f"parameters of optimizer group {number} have",
                where=where,
                hint="Files were lost, or are of another save: copy all files of one step again.",
            )
        names_by_lack.setdefault(", ".join(f"`{printable(state)}`" for state in lacking), []).append(name)
    for lacking_text, names in names_by_lack.items():
        text = f"these parameters of optimizer group {number} have no {lacking_text}, which others have"
        yield Notice(text, tuple(names), Weight.UNSURE)


def _states(parameter: Parameter) -> States:
    """What the optimizer keeps of it, whether as tensors or as plain values; a value of None is nothing."""
    values = [key for key, value in parameter.values.items() if value is not None]
    return frozenset((*parameter.states, *values)) - _OF_THE_MODEL


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{printable(name)}`" for name in names[:3])
    return f"{shown} and {len(names) - 3:,} more" if len(names) > 3 else shown
