"""The optimizer states of one model-parallel rank's parameters: the types that all ZeRO stages share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ckpt_formats.containers.torchfile import TorchFile
from ckpt_formats.containers.typed_json import same
from ckpt_formats.core.checkpoint import Group
from ckpt_formats.core.coming_reads import requested
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import Tensor, read
from ckpt_formats.core.values import Value
from ckpt_formats.engines.deepspeed.lookups import is_tensor, tensor
from ckpt_formats.state_dicts.statements import MIXED

_HINT = MIXED
ELEMENTWISE = frozenset(
    [
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
        "momentum_buffer",
        "sum",
        "square_avg",
        "grad_avg",
        "acc_delta",
        "exp_inf",
    ]
)
"""States of well-known optimizers that have the shape of the parameter."""


@dataclass
class OptimizerStates:
    """Master, moments and plain numbers of each parameter, in the rank's shape; and the groups."""

    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, dict[str, Value]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    unplaced: dict[Path, dict[str, Value]] = field(default_factory=dict)
    """By file: states whose size is not that of the parameters, by group and name."""
    by_order: bool = False
    """Were numbers matched to the model's tensors by their order, because values and shapes do not identify them?"""


@dataclass(frozen=True)
class SplitState:
    """An optimizer's state of one group: vectors by rank, and the values that are the same on all ranks.

    Tensors have the library's names of states.
    """

    vectors: dict[str, list[Value]]
    scalars: dict[str, Tensor]
    values: dict[str, Value]


def split_state(states: Sequence[Mapping[Value, Value]], files: Sequence[TorchFile]) -> SplitState:
    """Separate vectors from scalars in the state of one group. `states` are those of all ranks.

    Raises `CorruptError` if ranks have different scalars or different names of states:
    then files of several steps are mixed.
    """
    for state, file in zip(states, files, strict=True):
        if state.keys() != states[0].keys():
            key = next(iter(state.keys() ^ states[0].keys()))
            has, lacks = (files[0], file) if key in states[0] else (file, files[0])
            raise CorruptError(
                f"the optimizer state `{key}` is in {has.path.name}, but not in {lacks.path.name}",
                where=file.path.parent,
                hint=_HINT,
            )
    vectors: dict[str, list[Value]] = {}
    scalars: dict[str, Tensor] = {}
    values: dict[str, Value] = {}
    for key, first in states[0].items():
        by_rank = [state.get(key) for state in states]
        name = str(key)
        if not is_tensor(first):
            if any(value != first for value in by_rank):
                raise ranks_disagree(name, files, [str(value) for value in by_rank])
            values[name] = first
        elif tensor(first, files[0].path).shape == ():
            tensors = [tensor(value, file.path) for value, file in zip(by_rank, files, strict=True)]
            _check_equal(name, tensors, files)
            scalars[from_stored(name)] = tensors[0]
        else:
            vectors[from_stored(name)] = by_rank
    return SplitState(vectors, scalars, values)


def options_of(group: Value, where: Path) -> dict[str, Value]:
    """The options of a parameter group, without its list of indices."""
    if not isinstance(group, dict):
        raise CorruptError("a parameter group is not a mapping", where=where)
    return {str(key): value for key, value in group.items() if key != "params"}


def check_options(options: Sequence[Mapping[str, Value]], files: Sequence[TorchFile], number: int) -> None:
    """Raise `CorruptError` if two ranks have different options of a group, such as `lr`. `options` are by rank."""
    for own, file in zip(options, files, strict=True):
        for key in dict.fromkeys((*options[0], *own)):
            one, other = options[0].get(key), own.get(key)
            if not has_tensor_in(one) and not has_tensor_in(other) and not same(one, other):
                raise ranks_disagree(f"{key} of group {number}", [files[0], file], [str(one), str(other)])


def has_tensor_in(value: Value) -> bool:
    """Is it a tensor, or a list with one in it?"""
    return is_tensor(value) or (isinstance(value, (list, tuple)) and any(map(is_tensor, value)))


def check_count(kind: str, count: int, expected: int, file: TorchFile) -> None:
    """Raise `CorruptError` if a file has another number of groups than the model's file lists. `kind` is for the
    message."""
    if count != expected:
        raise CorruptError(
            f"the optimizer has {kind} of {count} groups, but `param_shapes` lists {expected}",
            where=file.path,
            hint=_HINT,
        )


def _check_equal(name: str, tensors: Sequence[Tensor], files: Sequence[TorchFile]) -> None:
    with Reader(check=False) as reader:
        arrays = [read(one, reader) for one in requested(tensors, lambda tensor: (tensor,))]
    if any(array.tobytes() != arrays[0].tobytes() for array in arrays):
        raise ranks_disagree(name, files, [str(np.asarray(array).item()) for array in arrays])


def ranks_disagree(name: str, files: Sequence[TorchFile], values: Sequence[str]) -> CorruptError:
    """Return the error for a value that is another one in the file of another rank. `values`: as text, of each file."""
    value, file = next(pair for pair in zip(values, files, strict=True) if pair[0] != values[0])
    return CorruptError(
        f"ranks disagree: `{name}` is {values[0]} in {files[0].path.name} but {value} in {file.path.name}",
        where=files[0].path.parent,
        hint=_HINT,
    )
