"""The states of all parameters of a checkpoint as columns: what concerns all of them at once is one sum, not a loop.

A format whose index is columns gives this table as it is, and makes no `Parameter` for it. For other formats, it is
computed from the parameters.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np

from ckpt_formats.core.checkpoint import MASTER, MODEL, Parameter, Role
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Array, Tensor
from ckpt_formats.core.values import Value

ROLES: tuple[Role, ...] = get_args(Role)
PLAIN = "none"
"""The name that stands for a codec if values are stored as they are."""
_MAX_SUM = 1 << 62


@dataclass(frozen=True, eq=False)
class Coding:
    """How the states of a table are stored."""

    nbytes: Array
    """The bytes that each state takes in its file: (states,) int64."""
    codec: Array
    """The number of each state's codecs in `codecs`: (states,) int64."""
    codecs: Sequence[tuple[str, ...]]
    """Names of codecs; of a state that is stored as it is, `PLAIN`."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where the states of a table lie that are stored as they are, and the checksums of all states."""

    files: Sequence[Path]
    file: Array
    """The number of each state's file in `files`; -1 for a state that is encoded, or not stored: (states,) int64."""
    offset: Array
    """Where each state begins in its file, in C order and little-endian: (states,) int64."""
    chunks: Array
    """How many chunks each state has, by the rule of `Chunking.default`: (states,) int64."""
    digests: Array
    """The promised checksums of the values of all chunks of all states: (chunks, 16) uint8."""


@dataclass(frozen=True, eq=False)
class StateTable:
    """All states of all parameters, in their order: a row for each parameter, and a row for each state.

    Numbers are int64, or Python's where a sum could pass 2^62.
    """

    names: Sequence[str]
    """Of parameters."""
    role: Array
    """The number of each parameter's role in `ROLES`: (parameters,)."""
    value: Array
    """The number of each parameter's values in `values`: (parameters,)."""
    values: Sequence[Mapping[str, Value]]
    first: Array
    """The first row of each parameter's states, and the number of all states: (parameters + 1,)."""
    state: Array
    """The number of each state's name in `states`: (states,)."""
    states: Sequence[str]
    dtype: Array
    """The number of each state's element type in `dtypes`: (states,)."""
    dtypes: Sequence[DType]
    rank: Array
    """The number of dimensions of each state: (states,)."""
    dims: Array
    """The sizes of all dimensions of all states, one after another."""
    fragments: Array
    """In how many blocks each state is stored: (states,)."""
    derived: Array
    """Whether each state is computed from another, and not stored: (states,) bool."""
    uses_codecs: Callable[[], bool]
    """Whether a state is stored encoded. One that is derived from its master is not."""
    code: Callable[[], Coding]
    """Computes `coding`."""

    def __len__(self) -> int:
        """How many states there are."""
        return len(self.state)

    @cached_property
    def coding(self) -> Coding:
        return self.code()

    @cached_property
    def dim_ends(self) -> Array:
        """Where the dimensions of each state begin in `dims`, and where the last ones end: (states + 1,) int64."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.rank, dtype=np.int64)])

    @cached_property
    def elements(self) -> Array:
        """The elements of each state: (states,) int64, or Python's integers where they may be larger."""
        begins, sizes = self.dim_ends[:-1], np.ones(len(self), self.dims.dtype)
        sizes = sizes.astype(object) if self.dims.dtype == object else sizes.astype(np.int64)
        for axis in range(int(self.rank.max(initial=0))):
            rows = np.flatnonzero(self.rank > axis)
            sizes[rows] *= self.dims[begins[rows] + axis].astype(sizes.dtype)
        return sizes

    @cached_property
    def nbytes(self) -> Array:
        """The bytes of the values of each state: (states,) int64, or Python's integers where they may be larger."""
        return self.elements * np.array([dtype.itemsize for dtype in self.dtypes] or [1], np.int64)[self.dtype]

    @cached_property
    def weight(self) -> Array:
        """The row of each parameter's weight, as `Parameter.weight` chooses it: (parameters,) int64."""
        first, master, copy = self.first[:-1].astype(np.int64), self.rows_named(MASTER), self.rows_named(MODEL)
        return np.where(copy >= 0, copy, np.where(master >= 0, master, first))

    @cached_property
    def owner(self) -> Array:
        """The number of the parameter of each state: (states,) int64."""
        return np.repeat(np.arange(len(self.names)), np.diff(self.first))

    def shape(self, row: int) -> Shape:
        """The shape of a state."""
        return tuple(self.dims[self.dim_ends[row] : self.dim_ends[row + 1]].tolist())

    def rows_named(self, name: str) -> Array:
        """The row of the state of this name of each parameter; -1 where there is none: (parameters,) int64."""
        rows = np.full(len(self.names), -1, np.int64)
        if name in self.states:
            own = np.flatnonzero(self.state == list(self.states).index(name))
            rows[self.owner[own]] = own
        return rows

    def of_parameters(self, column: Array) -> Array:
        """The sums of a column of states, (states,) of any dtype, for each parameter: (parameters,) of this dtype."""
        ends = np.concatenate([np.zeros(1, column.dtype), np.cumsum(column)])
        sums: Array = ends[self.first[1:]] - ends[self.first[:-1]]
        return sums

    def forms(self) -> Iterator[tuple[int, ...]]:
        """A number for each parameter and what it stands for: equal for equal roles, values and states.

        Each item is (form, number of the parameter).
        """
        known: dict[Any, int] = {}
        kinds = (self.state.astype(np.int64) * max(len(self.dtypes), 1) + self.dtype).astype("<u8")
        kinds += self.rank.astype("<u8") << np.uint64(56)
        states, dims = kinds.tobytes(), self.dims.tolist() if self.dims.dtype == object else None
        raw = b"" if dims is not None else self.dims.astype("<u8").tobytes()
        ends, first = self.dim_ends[self.first].tolist(), self.first.tolist()
        roles, values = self.role.tolist(), self.value.tolist()
        for number, (a, b) in enumerate(pairwise(first)):
            begin, end = ends[number], ends[number + 1]
            sizes: Any = raw[8 * begin : 8 * end] if dims is None else tuple(dims[begin:end])
            key = roles[number], values[number], states[8 * a : 8 * b], sizes
            yield known.setdefault(key, len(known)), number


class TabulatedParameters(Mapping[str, Parameter]):
    """The parameters of a checkpoint whose format has the table of their states. None is made before it is looked up.

    Each state is complete and without replicas.
    """

    @property
    @abstractmethod
    def table(self) -> StateTable:
        """The table of all states."""

    @abstractmethod
    def places(self) -> Places:
        """Where the states of the table lie."""

    @abstractmethod
    def check(self) -> None:
        """Raise what the first parameter raises that cannot be made, such as one with an unknown codec."""


def table_of(
    parameters: Iterable[Parameter],
    uses_codecs: Callable[[], bool],
    stored: Callable[[Tensor], tuple[int, tuple[str, ...]]],
) -> StateTable:
    """The table of these parameters. `stored`: the bytes that a tensor takes in its file, and its codecs."""
    every = list(parameters)
    tensors = [tensor for parameter in every for tensor in parameter.states.values()]
    states, dtypes, codecs = dict[str, int](), dict[DType, int](), dict[tuple[str, ...], int]()

    def coding() -> Coding:
        both = [stored(tensor) for tensor in tensors]
        numbers = [codecs.setdefault(names, len(codecs)) for _, names in both]
        return Coding(_numbers([nbytes for nbytes, _ in both]), _numbers(numbers), tuple(codecs))

    own = [states.setdefault(state, len(states)) for parameter in every for state in parameter.states]
    types = [dtypes.setdefault(tensor.dtype, len(dtypes)) for tensor in tensors]
    sizes = [size for tensor in tensors for size in tensor.shape]
    total = sum(tensor.nbytes for tensor in tensors)
    return StateTable(
        [parameter.name for parameter in every],
        _numbers([ROLES.index(parameter.role) for parameter in every]),
        np.arange(len(every)),
        [parameter.values for parameter in every],
        np.cumsum([0, *(len(parameter.states) for parameter in every)]),
        _numbers(own),
        tuple(states),
        _numbers(types),
        tuple(dtypes),
        _numbers([len(tensor.shape) for tensor in tensors]),
        np.array(sizes, object if max((total, *sizes)) >= _MAX_SUM else np.int64),
        _numbers([len(tensor.fragments) for tensor in tensors]),
        np.array([any(isinstance(f.blob, DerivedBlob) for f in tensor.examples()) for tensor in tensors], np.bool_),
        uses_codecs,
        coding,
    )


def _numbers(values: Sequence[int]) -> Array:
    return np.array(values, object if sum(values) >= _MAX_SUM else np.int64)
