"""A part of a state, of which one of several shadows holds it: whole tensors, divided by their sizes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.universal.gradients.layout import SegmentLayout

MAX_PARTS = 1 << 16
"""The maximum number of parts of a state."""


@dataclass(frozen=True)
class StatePart:
    """Part `number` of `count`, from 1 on. The division depends on nothing but names and shapes in the layout.

    Tensors stay in their order, and each is in the part in which its middle is when all elements are divided evenly.
    """

    number: int
    count: int

    def __post_init__(self) -> None:
        """Raise `InvalidArgumentError` unless there is such a part."""
        if not 1 <= self.number <= self.count <= MAX_PARTS:
            raise InvalidArgumentError(f"there is no part {self.number} of {self.count}")

    def tensors(self, layout: SegmentLayout) -> frozenset[int]:
        """The numbers of the tensors in the layout that are in this part."""
        sizes = [prod(tensor.shape) for tensor in layout.tensors]
        total, before, own = max(1, sum(sizes)), 0, set[int]()
        for number, size in enumerate(sizes):
            middle = 2 * before + size
            if min(self.count - 1, self.count * middle // (2 * total)) == self.number - 1:
                own.add(number)
            before += size
        return frozenset(own)

    def chunks(self, layout: SegmentLayout) -> list[tuple[int, int]]:
        """The rank and index of all chunks that have an element of these tensors."""
        own = self.tensors(layout)
        return [
            (rank, index)
            for rank, one in enumerate(layout.ranks)
            for index in range(one.chunk_count)
            if any(each.part.tensor in own for each in one.ranges(index))
        ]

    def places(self, names: Iterable[str], layout: SegmentLayout, aliases: Mapping[str, str]) -> tuple[int, ...]:
        """Which of a checkpoint's parameters are in this part. What the log does not step is in part 1."""
        own = self.tensors(layout)
        part_of = {tensor.name: number in own for number, tensor in enumerate(layout.tensors)}
        is_first = self.number == 1
        return tuple(
            place for place, name in enumerate(names) if part_of.get(name, part_of.get(aliases.get(name, ""), is_first))
        )
