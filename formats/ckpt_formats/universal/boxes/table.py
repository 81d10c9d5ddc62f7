"""The table of boxes: which block of which tensor each box of a checkpoint has. See "Boxes" in docs/format.md.

In a checkpoint of boxes, the index has a row for each box where that of others has one for each parameter. The columns
here say to which parameter a box belongs, and which of its elements it has.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from ckpt_formats.core.geometry import Box, Shape, flat_boxes
from ckpt_formats.core.tensor import Array

TYPES = {
    "whole.names": "u1",
    "whole.ends": "<u8",
    "box.whole": "<u4",
    "box.rank": "u1",
    "box.first": "<u8",
    "box.dims": "<u8",
    "box.start": "<u8",
    "box.stop": "<u8",
}
"""The columns that a checkpoint of boxes has more than others, and the NumPy types of their numbers."""


@dataclass(frozen=True)
class BoxPlace:
    """Which elements of a tensor a box has: all of a block, or a range of its elements in C order."""

    shape: Shape
    """That of the full tensor."""
    block: Box
    first: int
    """The first element of the range, counted in the block."""
    own: Shape
    """The shape of the values: that of the block, or that of a vector."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.own)

    def boxes(self) -> Iterator[Box]:
        """The blocks of the full tensor that the elements are, in their order."""
        if self.size == self.block.size:
            if self.size:
                yield self.block
            return
        for box in flat_boxes(self.block.shape, self.first, self.first + self.size):
            yield box.shift(self.block.start)


@dataclass(frozen=True, eq=False)
class BoxTable:
    """The parameters of a checkpoint of boxes, and the place of each box."""

    columns: Mapping[str, Array]
    """By the names of `TYPES`; each is a vector."""

    def __len__(self) -> int:
        """The number of parameters."""
        return len(self.columns["whole.ends"])

    @cached_property
    def names(self) -> list[str]:
        """The names of the parameters, in the order of the model."""
        return [name.decode("utf-8", "surrogatepass") for name in self.encoded_names()]

    def encoded_names(self) -> list[bytes]:
        """The same, as they are stored."""
        blob, ends = self.columns["whole.names"].tobytes(), self.columns["whole.ends"].tolist()
        return [blob[a:b] for a, b in zip([0, *ends], ends, strict=False)]

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The number of each parameter by its name."""
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def owners(self) -> list[int]:
        """The number of the parameter of each box."""
        owners: list[int] = self.columns["box.whole"].tolist()
        return owners

    def rows(self, parameter: int) -> range:
        """The numbers of the boxes of a parameter."""
        return range(self._begins[parameter], self._begins[parameter + 1])

    def place(self, box: int, own: Shape) -> BoxPlace:
        """The place of a box whose values have the shape `own`."""
        axes = slice(int(self.axes[box]), int(self.axes[box + 1]))
        shape, start, stop = (tuple(self.columns[f"box.{key}"][axes].tolist()) for key in ("dims", "start", "stop"))
        return BoxPlace(shape, Box(start, stop), int(self.columns["box.first"][box]), own)

    @cached_property
    def _begins(self) -> list[int]:
        begins: list[int] = np.searchsorted(self.columns["box.whole"], np.arange(len(self) + 1)).tolist()
        return begins

    @cached_property
    def axes(self) -> Array:
        """Where the axes of each box begin in their columns, and where the last ones end: (boxes + 1,) int64."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.columns["box.rank"], dtype=np.int64)])


def table_of(names: Sequence[str], boxes: Sequence[tuple[int, BoxPlace]]) -> BoxTable:
    """The table of boxes that are in the order of their parameters. `boxes`: the number of the parameter, the place."""
    encoded = [name.encode("utf-8", "surrogatepass") for name in names]
    places = [place for _, place in boxes]
    rows: dict[str, object] = {
        "whole.ends": np.cumsum([len(name) for name in encoded]),
        "box.whole": [number for number, _ in boxes],
        "box.rank": [len(place.shape) for place in places],
        "box.first": [place.first for place in places],
        "box.dims": [length for place in places for length in place.shape],
        "box.start": [low for place in places for low in place.block.start],
        "box.stop": [high for place in places for high in place.block.stop],
    }
    columns = {name: np.array(column, TYPES[name]) for name, column in rows.items()}
    return BoxTable({"whole.names": np.frombuffer(b"".join(encoded), "u1"), **columns})
