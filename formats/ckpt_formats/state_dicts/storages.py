"""Which tensors of a file of torch.save share a storage, and how to restore that when the file is written again.

In a checkpoint, a tensor has only values. This module stores which tensors share memory, and which have permuted axes:
contiguous tensors that follow one another without gaps are a run, which becomes one storage, and a tensor inside a run
is a view of it. Elements of a storage that belong to no tensor are not stored.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

import numpy as np

from ckpt_formats.containers.torchfile import StorageView
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.state_names import from_stored, to_stored
from ckpt_formats.core.tensor import FileBlob, FlatRangeBlob, Fragment, Tensor, c_strides, from_fragments
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.core.views import permuted

_MAX_PERMUTED = 8 << 20
"""Limit in bytes of a tensor with another axis first: such a tensor is read completely for each slab."""

Place = tuple[int, Shape, Shape, DType]
"""Place of a tensor in its file: offset of the first byte, shape, strides in bytes, element type."""


class TensorChanged(Exception):
    """A tensor is missing, or has changed."""


NOWHERE: Place = (-1, (), (), np.dtype(np.uint8))
"""The place of a tensor that is assembled from several places."""


def place(tensor: Tensor) -> Place:
    """The place of a tensor in its file."""
    blob = tensor.fragments[0].blob if len(tensor.fragments) == 1 else None
    return place_of_blob(blob) if isinstance(blob, FileBlob) else NOWHERE


def place_of_blob(blob: FileBlob) -> Place:
    """The place of the values of a blob in their file."""
    return blob.offset, blob.shape, blob.strides, blob.dtype


def names_by_place(parameters: Iterable[Parameter]) -> tuple[dict[Place, str], list[str]]:
    """Place -> name `state/parameter` of the tensor there; and the names of further tensors at the same places."""
    names: dict[Place, str] = {}
    aliases: list[str] = []
    for parameter in parameters:
        for state, tensor in parameter.states.items():
            stored, at = to_stored(state), place(tensor)
            name = f"{stored}/{parameter.name}"
            if stored and "/" not in stored and at != NOWHERE and names.setdefault(at, name) != name:
                aliases.append(name)
    return names, aliases


@dataclass
class _StorageRun:
    """Contiguous tensors that follow one another in a file without gaps."""

    start: int
    stop: int
    dtype: DType
    names: list[str]


def find_shared(named: Mapping[Place, str]) -> tuple[list[list[str]], dict[Place, dict[str, Value]]]:
    """The runs that contain several tensors, and the layout of each tensor that is inside a run or not in C order."""
    runs = _runs(named)
    if len(runs) == len(named):  # each has a storage of its own, and is contiguous
        return [], {}
    starts = [run.start for run in runs]
    places_by_run: dict[int, list[Place]] = {}
    layouts: dict[Place, dict[str, Value]] = {}
    for at in named:
        offset, shape, strides, dtype = at
        number = bisect_right(starts, offset) - 1
        if number >= 0 and 0 not in shape and _is_inside(at, runs[number]):
            places_by_run.setdefault(number, []).append(at)
        elif strides != c_strides(shape, dtype.itemsize) and _is_permuted(at):
            layouts[at] = {"strides": _elements(strides, dtype)}
    shared_runs = [number for number, places in places_by_run.items() if len(places) > 1]
    for index, number in enumerate(shared_runs):
        for offset, shape, strides, dtype in places_by_run[number]:
            view: dict[str, Value] = {"storage": index, "offset": (offset - runs[number].start) // dtype.itemsize}
            if strides != c_strides(shape, dtype.itemsize):
                view["strides"] = _elements(strides, dtype)
            layouts[offset, shape, strides, dtype] = view
    return [runs[number].names for number in shared_runs], layouts


class StorageLayout:
    """Views of the tensors of a checkpoint with their original layout. Records which tensors were requested."""

    def __init__(self, source: Checkpoint, storages: Sequence[Sequence[str]], aliases: Iterable[str]) -> None:
        self._source = source
        self._storages = storages
        self._bases: dict[Value, Tensor] = {}
        self._requested = set(aliases)

    @property
    def is_all(self) -> bool:
        """True if every tensor of the checkpoint was requested."""
        return self._requested >= {
            f"{to_stored(state)}/{parameter.name}" for parameter, state, _ in self._source.tensors()
        }

    def view(
        self,
        tensor: str,
        storage: int | None = None,
        offset: int = 0,
        strides: Sequence[int] | None = None,
        device: str = "cpu",
        requires_grad: bool = False,
        parameter: bool = False,
        attrs: Value = None,
    ) -> StorageView:
        """A tensor as it is written. Raises `TensorChanged`, or `ValueError` for an impossible layout."""
        own = self._tensor(tensor)
        if storage is not None:
            base = self._base(storage, lambda: _concatenate([self._tensor(name) for name in self._storages[storage]]))
        elif strides is not None:
            base = self._base((tensor, "permuted"), lambda: _permuted(own, strides))
        else:
            base = self._base(tensor, lambda: replace(own))
        if base.dtype != own.dtype:
            raise TensorChanged
        steps = c_strides(own.shape, 1) if strides is None else tuple(strides)
        last = offset + sum((n - 1) * step for n, step in zip(own.shape, steps, strict=True))
        if not is_natural(offset) or not all(map(is_natural, steps)) or (own.size and last >= base.size):
            raise ValueError(f"{tensor} is not inside its storage")
        return StorageView(base, offset, own.shape, steps, requires_grad, parameter, attrs, device)

    def _base(self, key: Value, construct: Callable[[], Tensor]) -> Tensor:
        if key not in self._bases:
            self._bases[key] = construct()
        return self._bases[key]

    def _tensor(self, name: str) -> Tensor:
        stored, _, owner = name.partition("/")
        parameter, state = self._source.parameters.get(owner), from_stored(stored)
        if parameter is None or state not in parameter.states:
            raise TensorChanged
        self._requested.add(name)
        return parameter.states[state]


def _runs(named: Mapping[Place, str]) -> list[_StorageRun]:
    runs: list[_StorageRun] = []
    sizes = ((at, prod(at[1]) * at[3].itemsize) for at in named)
    contiguous = [(at, nbytes) for at, nbytes in sizes if nbytes and at[2] == c_strides(at[1], at[3].itemsize)]
    for at, nbytes in sorted(contiguous, key=lambda item: (item[0][0], -item[1])):
        offset, _, _, dtype = at
        stop = offset + nbytes
        if runs and runs[-1].stop == offset and runs[-1].dtype == dtype:
            runs[-1].stop = stop
            runs[-1].names.append(named[at])
        elif not runs or runs[-1].stop <= offset:
            runs.append(_StorageRun(offset, stop, dtype, [named[at]]))
    return runs


def _is_inside(at: Place, run: _StorageRun) -> bool:
    offset, shape, strides, dtype = at
    last = offset + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    return dtype == run.dtype and (offset - run.start) % dtype.itemsize == 0 and last < run.stop


def _is_permuted(at: Place) -> bool:
    """Whether the tensor has no gaps, but its axes are in another order."""
    _, shape, strides, dtype = at
    order = _order(strides)
    permuted_shape = tuple(shape[axis] for axis in order)
    if order[:1] != [0] and prod(shape) * dtype.itemsize > _MAX_PERMUTED:
        return False
    return tuple(strides[axis] for axis in order) == c_strides(permuted_shape, dtype.itemsize)


def _order(strides: Sequence[int]) -> list[int]:
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])


def _permuted(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    if len(strides) != len(tensor.shape):
        raise ValueError("the number of strides is not the number of axes")
    return permuted(tensor, _order(strides))


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
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
