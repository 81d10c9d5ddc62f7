"""Rename the parameters of a checkpoint, with all states, groups and error figures. A rename can split or join them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from ckpt_formats.core.checkpoint import Checkpoint, ErrorFigures, Group, Parameter
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.layout import Layout
from ckpt_formats.core.tensor import Tensor, with_replicas
from ckpt_formats.core.text import printable


@dataclass(frozen=True)
class TensorRename:
    """Parameters `old` become parameters `new`, which have the same elements in another form."""

    old: tuple[str, ...]
    new: tuple[str, ...]
    make: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    """The tensors of `new` from those of `old`. Only moves elements.

    Raises `CorruptError` or `UnsupportedError` for unsuitable shapes.
    """


def apply_renames(source: Checkpoint, changes: Iterable[TensorRename], order: Iterable[str] = ()) -> Checkpoint:
    """The checkpoint with all renames. Parameters that are not renamed come last, unchanged.

    The others are in the order of `order`, and then of the renames. A rename of which parameters are missing is
    ignored. Raises `UnsupportedError` if parameters that become one have different states, values or groups.
    """
    renames = [rename for rename in changes if all(name in source.parameters for name in rename.old)]
    parameters: dict[str, Parameter] = {}
    for change in renames:
        parameters |= _new_parameters(change, [source.parameters[name] for name in change.old])
    renamed = set(chain.from_iterable(rename.old for rename in renames))
    if twice := [name for name in parameters if name in source.parameters and name not in renamed]:
        raise UnsupportedError(f"two tensors would have the name `{printable(twice[0])}`")
    if len(parameters) < sum(len(rename.new) for rename in renames):
        raise UnsupportedError("two tensors of the source are the same tensor of the model, under two names")
    parameters = {name: parameters.pop(name) for name in order if name in parameters} | parameters
    parameters |= {name: parameter for name, parameter in source.parameters.items() if name not in renamed}
    by_old = {name: rename for rename in renames for name in rename.old}
    positions = {name: i for i, name in enumerate(parameters)}
    return replace(
        source,
        parameters=parameters,
        groups=tuple(_group(group, i, by_old, positions) for i, group in enumerate(source.groups)),
        # Checksums of decoded values and layout rules apply only to the old tensors.
        digests={},
        layout=Layout(),
        errors=dict(_renamed_errors(source, renames)),
    )


def _renamed_errors(
    source: Checkpoint, changes: Sequence[TensorRename]
) -> Iterator[tuple[tuple[str, str], ErrorFigures]]:
    """Error figures under the new names: a part has those of the full tensor, a joined tensor those of each part."""
    untouched = dict(source.errors)
    for change in changes:
        by_state: dict[str, dict[str, ErrorFigures]] = {}
        for name in change.old:
            for state in source.parameters[name].states:
                if (figures := untouched.pop((name, state), None)) is not None:
                    by_state.setdefault(state, {})[name] = figures
        for state, by_name in by_state.items():
            figures = next(iter(by_name.values())) if len(change.old) == 1 else by_name
            yield from (((name, state), figures) for name in change.new)
    yield from untouched.items()


def _new_parameters(change: TensorRename, parameters: Sequence[Parameter]) -> dict[str, Parameter]:
    first = parameters[0]
    for other in parameters[1:]:
        if (other.role, other.states.keys(), other.values) != (first.role, first.states.keys(), first.values):
            raise UnsupportedError(
                f"`{printable(first.name)}` and `{printable(other.name)}` become one tensor, but their "
                f"states or values differ: {_summary(first)} and {_summary(other)}"
            )
    states: dict[str, dict[str, Tensor]] = {name: {} for name in change.new}
    for state in first.states:
        tensors = _new_tensors(change, state, parameters)
        for name, new_tensor in zip(change.new, tensors, strict=True):
            states[name][state] = new_tensor
    return {name: Parameter(name, first.role, states[name], first.values) for name in change.new}


def _new_tensors(change: TensorRename, state: str, parameters: Sequence[Parameter]) -> tuple[Tensor, ...]:
    tensors = [parameter.states[state] for parameter in parameters]
    title = ", ".join(f"`{printable(name)}`" for name in change.old)
    if all(tensor.shape == () for tensor in tensors):  # a counter, such as Adam's step, must be equal
        return (with_replicas(tensors),) * len(change.new)
    if any(tensor.shape != one.weight.shape for tensor, one in zip(tensors, parameters, strict=True)):
        raise UnsupportedError(
            f"the state {printable(state)} of {title} has another shape than the weight: it cannot be changed with it",
            hint="Leave the optimizer out with --model-only.",
        )
    try:
        return change.make(tensors)
    except UnsupportedError as error:
        raise UnsupportedError(f"{title} ({printable(state)}): {error.what}", hint=error.hint) from error


def _group(group: Group, number: int, by_old: Mapping[str, TensorRename], place: Mapping[str, int]) -> Group:
    """The group with the new names, in the order of the new parameters, by which optimizers number them."""
    members = set(group.names)
    names: dict[str, None] = {}
    for name in group.names:
        change = by_old.get(name)
        if change is None:
            names[name] = None
            continue
        if outside := [other for other in change.old if other not in members]:
            raise UnsupportedError(
                f"`{printable(name)}` and `{printable(outside[0])}` become one tensor, but only the "
                f"first is in optimizer group {number}"
            )
        names |= dict.fromkeys(change.new)
    return replace(group, names=tuple(sorted(names, key=lambda name: place.get(name, len(place)))))


def _summary(parameter: Parameter) -> str:
    values = ", ".join(f"{key} {value}" for key, value in parameter.values.items())
    return printable(
        f"{parameter.role} with {', '.join(parameter.states) or 'nothing'}{f'; {values}' if values else ''}"
    )
