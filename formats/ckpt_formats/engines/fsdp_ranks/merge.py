"""Merge the trees of all ranks into one tree with complete tensors. No values are read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_formats.containers.torchfile import TensorRef
from ckpt_formats.containers.typed_json import same
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.fsdp_ranks.dtensor import DTensor
from ckpt_formats.engines.fsdp_ranks.leaves import Leaf, merge_leaves


@dataclass
class RankMerge:
    """Merges trees, and records the values that differ and the tensors that are sharded."""

    differing: dict[int, dict[str, Value]] = field(default_factory=dict)
    """Values other than tensors that are not the same on all ranks: by rank, then by the path in the tree."""
    sharded: dict[str, Mapping[int, Leaf]] = field(default_factory=dict)
    """Tensors that are not complete on every rank: the leaves by path and rank."""
    _tied: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def tree(self, values: Mapping[int, Value], path: str = "", *, strict: bool = False) -> Value:
        """The merged tree. `values` are the trees by rank, `path` is their path in the complete tree.

        With `strict`, values other than tensors must be the same on all ranks that have them.
        Raises `CorruptError` if they are not, or if the ranks contradict each other on a tensor.
        """
        if all(isinstance(value, dict) for value in values.values()):
            merged_items = {}
            for key in dict.fromkeys(key for value in values.values() for key in value):
                inner = {rank: value[key] for rank, value in values.items() if key in value}
                merged = self.tree(inner, f"{path}.{key}" if path else str(key), strict=strict)
                if merged is not _DIFFERING:
                    merged_items[key] = merged
            return merged_items
        if any(isinstance(value, Leaf) for value in values.values()):
            return self._tensor(path, values)
        first = next(iter(values.values()))
        lists = all(isinstance(value, list) and len(value) == len(first) for value in values.values())
        if strict and lists and any(isinstance(i, (dict, list, Leaf)) for value in values.values() for i in value):
            return [
                self.tree({rank: value[i] for rank, value in values.items()}, f"{path}.{i}", strict=True)
                for i in range(len(first))
            ]
        return self._value(path, values, strict)

    def _tensor(self, path: str, values: Mapping[int, Value]) -> Tensor:
        """The merged tensor. Names that have the same stored elements on every rank (tied tensors) get one object."""
        leaves = {rank: value for rank, value in values.items() if isinstance(value, Leaf)}
        if len(leaves) < len(values):
            raise CorruptError(f"`{printable(path)}` is a tensor on some ranks, but not on others")
        tensor = merge_leaves(path, leaves)
        if not isinstance(next(iter(leaves.values())), TensorRef):
            self.sharded[path] = leaves
        stored = tuple((rank, *_stored(leaf)) for rank, leaf in leaves.items())
        return self._tied.setdefault((tensor.shape, *stored), tensor) if tensor.size else tensor

    def _value(self, path: str, values: Mapping[int, Value], strict: bool) -> Value:
        (first_rank, first), *remaining = values.items()
        differing = next((rank for rank, value in remaining if value is not first and not same(value, first)), None)
        if differing is None:
            return first
        if strict:
            raise CorruptError(
                f"`{printable(path)}` is {_short(first)} on rank {first_rank}, but {_short(values[differing])} on "
                f"rank {differing}",
                hint="Files of several steps or runs may be mixed: copy those of one step again.",
            )
        for rank, value in values.items():
            self.differing.setdefault(rank, {})[path] = value
        return _DIFFERING


_DIFFERING = object()


def _stored(leaf: Leaf) -> tuple[Value, ...]:
    """The positions of a leaf's elements in the file of its rank."""
    if isinstance(leaf, TensorRef):
        refs = [leaf]
    elif isinstance(leaf, DTensor):
        refs = [leaf.shard]
    else:
        refs = [ref for _, ref in leaf.shards]
    return tuple((ref.storage.key, ref.offset, ref.shape, ref.strides) for ref in refs)


def _short(value: Value) -> str:
    return printable(str(value)[:60])
