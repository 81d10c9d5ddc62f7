"""What a step changes, tensor by tensor, as those who hold the weights elsewhere apply it."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ckpt.following.decode import ChunkChange
from ckpt.following.state import State, StateLayout
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Array


@dataclass(frozen=True, eq=False)
class TensorChange:
    """The values of one tensor that a step changes."""

    name: str
    shape: Shape
    """That of the whole tensor, or of the shard of a tensor-parallel rank."""
    indices: Array | None
    """Where they lie in it in C order: (n,) int64, each once. None: these are all values."""
    values: Array
    """The new values: (n,), or all in the tensor's shape; in its dtype, of NumPy or `ml_dtypes`. Read-only."""

    @property
    def dtype(self) -> DType:
        return self.values.dtype

    @property
    def is_whole(self) -> bool:
        """Whether these are all values of the tensor."""
        return self.indices is None

    @property
    def bits(self) -> Array:
        """The bits of the values as unsigned integers of the same size: uint8 to uint64, of the same shape."""
        return self.values.view(f"u{self.dtype.itemsize}")


def whole_tensors(layout: StateLayout, state: State) -> Iterator[TensorChange]:
    """All tensors of a state, or shards of them."""
    for number, tensor in enumerate(layout.tensors):
        shown = layout.values(number, state).view()
        shown.flags.writeable = False
        yield TensorChange(tensor.name, tensor.shape, None, shown)


def changed_tensors(layout: StateLayout, changes: Sequence[ChunkChange]) -> Iterator[TensorChange]:
    """The changes of chunks, tensor by tensor, in the order of the model."""
    by_tensor = defaultdict[int, list[ChunkChange]](list)
    for change in changes:
        by_tensor[change.chunk.tensor].append(change)
    for number, of_tensor in sorted(by_tensor.items()):
        tensor = layout.tensors[number]
        located = [layout.indices(one.chunk, one.positions) for one in of_tensor]
        indices = np.concatenate([own for own, _ in located])
        pairs = zip(of_tensor, located, strict=True)
        values = np.concatenate([one.values if which is None else one.values[which] for one, (_, which) in pairs])
        if not len(indices):
            continue  # all of them are in other shards
        values.flags.writeable = indices.flags.writeable = False
        yield TensorChange(tensor.name, tensor.shape, indices, values)
