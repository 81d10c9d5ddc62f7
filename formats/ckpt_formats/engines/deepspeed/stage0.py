"""Read ZeRO stage 0: one file has the complete optimizer, with numbers instead of names."""

from collections.abc import Mapping, Sequence
from typing import Any

from ckpt_formats.containers.torchfile import TorchFile
from ckpt_formats.core.checkpoint import MASTER, Group
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Value
from ckpt_formats.engines.deepspeed.lookups import get, is_tensor, tensor, vector
from ckpt_formats.engines.deepspeed.optimizer_states import OptimizerStates, SplitState, options_of, split_state
from ckpt_formats.state_dicts.parameter_order import (
    Assignment,
    NamedTensor,
    NumberedGroup,
    NumberedParameter,
    by_values,
    has_equals,
    in_order,
    only_assignment,
)


def read_numbered(
    file: TorchFile,
    optimizer: Mapping[Value, Value],
    named: Sequence[NamedTensor],
    *,
    order: Sequence[str] = (),
    skips: bool = True,
) -> OptimizerStates:
    """The optimizer states under the names of `named`: assigned by `order`, or by the only assignment that fits.

    `skips`: may an assignment leave out tensors of `named`? Not for a pipeline stage, which gets
    the layers of later stages as well and takes tensors from the first one on.

    Raises: `UnsupportedError` if no assignment or more than one fits; `RulesError` if `order` does not fit.
    """
    inner = (
        get(optimizer, "optimizer_state_dict", dict, file.path) if "optimizer_state_dict" in optimizer else optimizer
    )
    listed = get(inner, "param_groups", list, file.path)
    groups = [_NumberedGroup(file, optimizer, inner, g, group) for g, group in enumerate(listed)]
    numbered = [group.numbered for group in groups]
    ordered = in_order(numbered, named, order, file.path, skips=skips) if order else None
    matches = ordered or only_assignment(numbered, named, skips=skips) or by_values(numbered, named)
    if matches is None:
        raise UnsupportedError(
            "stage 0 stores numbers instead of names of optimizer states, "
            "and there is not exactly one assignment of names that fits",
            where=file.path,
            hint="Name them, in the order of the optimizer's groups, with --param-order; "
            "or save from ZeRO stage 1, where names are stored.",
        )
    bare = any(run.flat is None and any(slot.master is None for slot in run.parameters) for run in numbered)
    result = OptimizerStates(by_order=not ordered and bare and has_equals((match.name for match in matches), named))
    shapes = {one.name: one.tensor for one in named}
    for match in matches:
        group = groups[match.group]
        result.states[match.name], result.values[match.name] = group.states(match, shapes[match.name])
    for g, group in enumerate(listed):
        names = tuple(match.name for match in matches if match.group == g)
        _use_one_step(result, names)
        result.groups.append(Group(options_of(group, file.path), names))
    return result


class _NumberedGroup:
    """One group of the optimizer, saved by the wrapper for low precision (flat or not) or by plain PyTorch."""

    def __init__(
        self, file: TorchFile, outer: Mapping[Value, Value], inner: Mapping[Value, Value], g: int, group: Value
    ) -> None:
        numbers = get(group, "params", list, file.path)
        states = get(inner, "state", dict, file.path)
        self._path = file.path
        if "fp32_groups_flat" in outer:
            flat = vector(get(get(outer, "fp32_groups_flat", list, file.path), g, object, file.path), file.path)
            self._sorted = [split_state([states.get(number, {})], [file]) for number in numbers[:1]]
            self.numbered = NumberedGroup(flat=flat)
            return
        masters: list[Value] = [None] * len(numbers)
        if "fp32_groups" in outer:
            masters = get(get(outer, "fp32_groups", list, file.path), g, list, file.path)
        self._sorted = [split_state([states.get(number, {})], [file]) for number in numbers]
        slots = (
            NumberedParameter(tensor(master, file.path) if is_tensor(master) else None, _shapes(one))
            for master, one in zip(masters, self._sorted, strict=True)
        )
        self.numbered = NumberedGroup(tuple(slots))

    def states(self, match: Assignment, model: Tensor) -> tuple[dict[str, Tensor], dict[str, Value]]:
        """The states and plain values of the parameter that the assignment names. `model` gives its shape."""
        if self.numbered.flat is None:
            slot, one = self.numbered.parameters[match.start], self._sorted[match.start]
            masters = {} if slot.master is None else {MASTER: slot.master}
            return {**masters, **self._vectors(one), **one.scalars}, dict(one.values)
        one = self._sorted[0]
        flats = {MASTER: self.numbered.flat} | {key: vector(value[0], self._path) for key, value in one.vectors.items()}
        tensors = {
            key: Tensor.of(flat.flat(match.start, match.stop).shaped(model.shape)) for key, flat in flats.items()
        }
        return {**tensors, **one.scalars}, dict(one.values)

    def _vectors(self, one: SplitState) -> dict[str, Tensor]:
        return {key: tensor(value[0], self._path) for key, value in one.vectors.items()}


def _shapes(one: SplitState) -> dict[str, Shape]:
    return {key: value[0].shape for key, value in one.vectors.items()}


def _use_one_step(optimizer: OptimizerStates, names: Sequence[str]) -> None:
    """Set one step for a group: DeepSpeed's fused Adam counts only at the last parameter and uses this for all."""
    counts: list[Any] = [optimizer.values[name].get("step") for name in names]
    if counts and all(isinstance(count, int) for count in counts) and len(set(counts)) > 1:
        for name in names:
            optimizer.values[name]["step"] = max(counts)
