"""Trees of all ranks -> one tree with whole tensors, as lazy as they were."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ckpt_formats.containers.torchfile import TensorRef
from ckpt_formats.containers.typed_json import same
from ckpt_formats.core.errors import Corrupt
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.fsdp_ranks.dtensor import DTensor
from ckpt_formats.engines.fsdp_ranks.leaves import Leaf, whole


@dataclass
class RankMerge:
    """One merging, and what it found on the way."""

    apart: dict[int, dict[str, Value]] = field(default_factory=dict)
    """What is no tensor and is not the same on all ranks: by rank, then by its place in the tree."""
    spread: dict[str, Mapping[int, Leaf]] = field(default_factory=dict)
    """Of the tensors that are not whole on each rank, what each rank holds."""
    _tied: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)

    def tree(self, held: Mapping[int, Value], place: str = "", *, strict: bool = False) -> Value:
        """The tree of which each rank holds its part.

        `strict`: what is no tensor must be the same on all ranks that have it. Raises
        `Corrupt` if it is not, or if the ranks contradict each other on a tensor.
        """
        if all(isinstance(value, dict) for value in held.values()):
            made = {}
            for key in dict.fromkeys(key for value in held.values() for key in value):
                inner = {rank: value[key] for rank, value in held.items() if key in value}
                merged = self.tree(inner, f"{place}.{key}" if place else str(key), strict=strict)
                if merged is not _APART:
                    made[key] = merged
            return made
        if any(isinstance(value, Leaf) for value in held.values()):
            return self._tensor(place, held)
        first = next(iter(held.values()))
        alike = all(isinstance(value, list) and len(value) == len(first) for value in held.values())
        if strict and alike and any(isinstance(item, (dict, list, Leaf)) for value in held.values() for item in value):
            return [
                self.tree({rank: value[i] for rank, value in held.items()}, f"{place}.{i}", strict=True)
                for i in range(len(first))
            ]
        return self._value(place, held, strict)

    def _tensor(self, place: str, values: Mapping[int, Value]) -> Tensor:
        """Names of the same stored elements on every rank get the same object, as tied tensors are."""
        held = {rank: value for rank, value in values.items() if isinstance(value, Leaf)}
        if len(held) < len(values):
            raise Corrupt(f"`{printable(place)}` is a tensor on some ranks, and something else on others")
        tensor = whole(place, held)
        if not isinstance(next(iter(held.values())), TensorRef):
            self.spread[place] = held
        mark = tuple((rank, *_stored(leaf)) for rank, leaf in held.items())
        return self._tied.setdefault((tensor.shape, *mark), tensor) if tensor.size else tensor

    def _value(self, place: str, held: Mapping[int, Value], strict: bool) -> Value:
        (first_rank, first), *others = held.items()
        differing = next((rank for rank, value in others if value is not first and not same(value, first)), None)
        if differing is None:
            return first
        if strict:
            raise Corrupt(
                f"`{printable(place)}` is {_short(first)} on rank {first_rank}, but {_short(held[differing])} on "
                f"rank {differing}",
                hint="Files of several steps or runs may be mixed: copy those of one step again.",
            )
        for rank, value in held.items():
            self.apart.setdefault(rank, {})[place] = value
        return _APART


_APART = object()


def _stored(leaf: Leaf) -> tuple[Value, ...]:
    """Which elements of its rank's file a leaf is."""
    if isinstance(leaf, TensorRef):
        refs = [leaf]
    elif isinstance(leaf, DTensor):
        refs = [leaf.local]
    else:
        refs = [ref for _, ref in leaf.held]
    return tuple((ref.storage.key, ref.offset, ref.shape, ref.strides) for ref in refs)


def _short(value: Value) -> str:
    return printable(str(value)[:60])
