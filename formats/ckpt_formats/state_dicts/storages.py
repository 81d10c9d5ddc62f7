"""Which tensors of a file of torch.save lie in one storage, and how to lay them so again.

Elsewhere a tensor is its values. That two share memory, or that one lies with its axes turned, is noted here: tensors
without holes that lie end to end are a run, and what lies within a run is a view of it. Elements of a storage that no
tensor shows are not kept.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import numpy as np

from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.torchfile import StorageView
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import FileBlob, FlatRangeBlob, Fragment, Tensor, c_strides, from_fragments
from ckpt_formats.core.values import Value
from ckpt_formats.core.views import permuted

_MAX_TURNED = 8 << 20
"""Bytes of a tensor that may lie with another axis first: all of it is read for each slab of such a one."""

Place = tuple[int, Shape, Shape, DType]
"""Of a tensor in its file: the first byte, the shape, strides in bytes and the element type."""


class TensorChanged(Exception):
    """A tensor is gone, or is not what it was."""


NOWHERE: Place = (-1, (), (), np.dtype(np.uint8))
"""Of a tensor that was put together from several places."""


def place(tensor: Tensor) -> Place:
    """Where a tensor is in its file."""
    blob = tensor.fragments[0].blob if len(tensor.fragments) == 1 else None
    return (blob.offset, blob.shape, blob.strides, blob.dtype) if isinstance(blob, FileBlob) else NOWHERE


def names_by_place(parameters: Iterable[Parameter]) -> tuple[dict[Place, str], list[str]]:
    """States of parameters by their places, called `state/parameter`, and those that lie where another does."""
    found: dict[Place, str] = {}
    twins: list[str] = []
    for parameter in parameters:
        for state, tensor in parameter.states.items():
            name, at = f"{state}/{parameter.name}", place(tensor)
            if state and "/" not in state and at != NOWHERE and found.setdefault(at, name) != name:
                twins.append(name)
    return found, twins


@dataclass
class _StorageRun:
    """Tensors without holes, one after another in a file."""

    start: int
    stop: int
    dtype: DType
    names: list[str]


def find_shared(named: Mapping[Place, str]) -> tuple[list[list[str]], dict[Place, dict[str, Value]]]:
    """The runs in which several tensors lie, and of each tensor how it lies, where that is not in C order and alone."""
    runs = _runs(named)
    starts = [run.start for run in runs]
    inside: dict[int, list[Place]] = {}
    lying: dict[Place, dict[str, Value]] = {}
    for at in named:
        offset, shape, strides, dtype = at
        number = bisect_right(starts, offset) - 1
        if number >= 0 and 0 not in shape and _lies_in(at, runs[number]):
            inside.setdefault(number, []).append(at)
        elif strides != c_strides(shape, dtype.itemsize) and _is_turned(at):
            lying[at] = {"strides": _elements(strides, dtype)}
    kept = [number for number, members in inside.items() if len(members) > 1]
    for index, number in enumerate(kept):
        for offset, shape, strides, dtype in inside[number]:
            view: dict[str, Value] = {"run": index, "at": (offset - runs[number].start) // dtype.itemsize}
            if strides != c_strides(shape, dtype.itemsize):
                view["strides"] = _elements(strides, dtype)
            lying[offset, shape, strides, dtype] = view
    return [runs[number].names for number in kept], lying


class StorageLayout:
    """The tensors of a checkpoint as they lay. Keeps which of them were asked for."""

    def __init__(self, source: Checkpoint, runs: Sequence[Sequence[str]], twins: Iterable[str]) -> None:
        self._source = source
        self._runs = runs
        self._bases: dict[Value, Tensor] = {}
        self._asked = set(twins)

    @property
    def is_all(self) -> bool:
        """Was every tensor of the checkpoint asked for?"""
        return self._asked >= {f"{state}/{parameter.name}" for parameter, state, _ in self._source.tensors()}

    def view(
        self,
        tensor: str,
        run: int | None = None,
        at: int = 0,
        strides: Sequence[int] | None = None,
        device: str = "cpu",
        requires_grad: bool = False,
        parameter: bool = False,
        attrs: Value = None,
    ) -> StorageView:
        """A tensor as it is to be written. Raises `TensorChanged`, or `ValueError` for one that cannot be."""
        own = self._tensor(tensor)
        if run is not None:
            base = self._base(run, lambda: _end_to_end([self._tensor(name) for name in self._runs[run]]))
        elif strides is not None:
            base = self._base((tensor, "turned"), lambda: _turned(own, strides))
        else:
            base = self._base(tensor, lambda: replace(own))
        if base.dtype != own.dtype:
            raise TensorChanged
        steps = c_strides(own.shape, 1) if strides is None else tuple(strides)
        last = at + sum((n - 1) * step for n, step in zip(own.shape, steps, strict=True))
        if not is_natural(at) or not all(map(is_natural, steps)) or (own.size and last >= base.size):
            raise ValueError(f"{tensor} does not lie in its storage")
        return StorageView(base, at, own.shape, steps, requires_grad, parameter, attrs, device)

    def _base(self, key: Value, make: Callable[[], Tensor]) -> Tensor:
        if key not in self._bases:
            self._bases[key] = make()
        return self._bases[key]

    def _tensor(self, name: str) -> Tensor:
        state, _, parameter = name.partition("/")
        found = self._source.parameters.get(parameter)
        if found is None or state not in found.states:
            raise TensorChanged
        self._asked.add(name)
        return found.states[state]


def _runs(named: Mapping[Place, str]) -> list[_StorageRun]:
    runs: list[_StorageRun] = []
    whole = [at for at in named if prod(at[1]) and at[2] == c_strides(at[1], at[3].itemsize)]
    for at in sorted(whole, key=lambda at: (at[0], -prod(at[1]) * at[3].itemsize)):
        offset, shape, _, dtype = at
        stop = offset + prod(shape) * dtype.itemsize
        if runs and runs[-1].stop == offset and runs[-1].dtype == dtype:
            runs[-1].stop = stop
            runs[-1].names.append(named[at])
        elif not runs or runs[-1].stop <= offset:
            runs.append(_StorageRun(offset, stop, dtype, [named[at]]))
    return runs


def _lies_in(at: Place, run: _StorageRun) -> bool:
    offset, shape, strides, dtype = at
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return dtype == run.dtype and (offset - run.start) % dtype.itemsize == 0 and last < run.stop


def _is_turned(at: Place) -> bool:
    """Does it lie without holes, but with its axes in another order?"""
    _, shape, strides, dtype = at
    order = _order(strides)
    turned = tuple(shape[axis] for axis in order)
    small = prod(shape) * dtype.itemsize <= _MAX_TURNED
    return tuple(strides[axis] for axis in order) == c_strides(turned, dtype.itemsize) and (small or order[0] == 0)


def _order(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])


def _turned(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    if len(strides) != len(tensor.shape):
        raise ValueError("as many strides as axes are needed")
    return permuted(tensor, _order(strides))


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return replace(tensors[0])
    if any(tensor.dtype != tensors[0].dtype for tensor in tensors):
        raise TensorChanged
    return from_fragments((sum(tensor.size for tensor in tensors),), _fragments(tensors), tensors[0].dtype)


def _fragments(tensors: Sequence[Tensor]) -> Iterator[Fragment]:
    stops = list(accumulate(tensor.size for tensor in tensors))
    for tensor, stop in zip(tensors, stops, strict=True):
        yield Fragment(Box((stop - tensor.size,), (stop,)), FlatRangeBlob(tensor, 0, tensor.size))


def _elements(strides: Shape, dtype: DType) -> list[int]:
    return [stride // dtype.itemsize for stride in strides]
