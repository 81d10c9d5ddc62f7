"""What the optimizer holds of one model-parallel rank's parameters, whatever the stage: the common nouns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ckpt_formats.base import Group
from ckpt_formats.deepspeed.tree import is_tensor, tensor
from ckpt_formats.errors import Corrupt
from ckpt_formats.files import Reader
from ckpt_formats.tensor import Tensor, read
from ckpt_formats.torchfile import TorchFile
from ckpt_formats.values import Value

_HINT = "Files of several steps or runs were mixed: copy all files of one step again."


@dataclass
class Optimized:
    """Master, moments and plain numbers of each parameter, in its local shape; and the groups."""

    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, dict[str, Value]] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)


@dataclass(frozen=True)
class Sorted:
    """An optimizer's state of one group: vectors by rank, and what all ranks must agree upon."""

    vectors: dict[str, list[Value]]
    scalars: dict[str, Tensor]
    values: dict[str, Value]


def sort_state(states: Sequence[Mapping[Value, Value]], files: Sequence[TorchFile]) -> Sorted:
    """Tell vectors from scalars in the state of one group, as each rank has it.

    Raises `Corrupt` if ranks disagree on a scalar, or on which states there are:
    then files of several steps are mixed.
    """
    for state, file in zip(states, files, strict=True):
        if state.keys() != states[0].keys():
            key = next(iter(state.keys() ^ states[0].keys()))
            has, lacks = (files[0], file) if key in states[0] else (file, files[0])
            raise Corrupt(
                f"the optimizer state `{key}` is in {has.path.name}, but not in {lacks.path.name}",
                where=file.path.parent,
                hint=_HINT,
            )
    vectors: dict[str, list[Value]] = {}
    scalars: dict[str, Tensor] = {}
    values: dict[str, Value] = {}
    for key, first in states[0].items():
        every = [state.get(key) for state in states]
        name = str(key)
        if not is_tensor(first):
            if any(value != first for value in every):
                raise _mixed(name, files, [str(value) for value in every])
            values[name] = first
        elif tensor(first, files[0].path).shape == ():
            found = [tensor(value, file.path) for value, file in zip(every, files, strict=True)]
            _agree(name, found, files)
            scalars[name] = found[0]
        else:
            vectors[name] = every
    return Sorted(vectors, scalars, values)


def options_of(group: Value, where: Path) -> dict[str, Value]:
    """The options of a parameter group, without its list of indices."""
    if not isinstance(group, dict):
        raise Corrupt("a parameter group is not a mapping", where=where)
    return {str(key): value for key, value in group.items() if key != "params"}


def _agree(name: str, found: Sequence[Tensor], files: Sequence[TorchFile]) -> None:
    with Reader(check=False) as reader:
        arrays = [read(one, reader) for one in found]
    if any(array.tobytes() != arrays[0].tobytes() for array in arrays):
        raise _mixed(name, files, [str(np.asarray(array).item()) for array in arrays])


def _mixed(name: str, files: Sequence[TorchFile], said: Sequence[str]) -> Corrupt:
    other = next(i for i, value in enumerate(said) if value != said[0])
    return Corrupt(
        f"ranks disagree: `{name}` is {said[0]} in {files[0].path.name} but {said[other]} in {files[other].path.name}",
        where=files[0].path.parent,
        hint=_HINT,
    )
