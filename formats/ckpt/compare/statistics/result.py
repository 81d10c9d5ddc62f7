"""What `stats` finds: the figures of each tensor, and of groups of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Literal, overload

from ckpt.compare.result import layer_of, role_of
from ckpt.compare.statistics.figures import Figures
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.short_repr import short_repr

Grouping = Literal["tensor", "layer", "role", "state"]


@dataclass(frozen=True)
class TensorStats:
    """One state of one parameter, and the figures of its values."""

    name: str
    state: str
    dtype: str
    shape: Shape
    figures: Figures
    scheme: str = ""
    """How the values are stored, if the weight is quantised: then the figures are those of its plain values."""

    __repr__ = short_repr


@dataclass(frozen=True, eq=False)
class Stats(Sequence[TensorStats]):
    """The figures of a checkpoint's tensors, in its order."""

    tensors: tuple[TensorStats, ...]
    notices: tuple[Notice, ...] = ()
    """What the user should know of the values, such as quantised weights."""

    @property
    def total(self) -> Figures:
        """The figures of all values together."""
        return sum((one.figures for one in self.tensors), Figures())

    def by(self, grouping: Grouping) -> dict[tuple[str, ...], Figures]:
        """The figures of groups, in the order of the checkpoint.

        By `tensor` and `layer`, the states of each are groups of their own: the keys are (name, state) and
        (layer, state). By `role` they are (role, state), and by `state` (state,).
        """
        groups: dict[tuple[str, ...], Figures] = {}
        for one in self.tensors:
            key = (one.state,) if grouping == "state" else (_PLACES[grouping](one.name), one.state)
            groups[key] = groups.get(key, Figures()) + one.figures
        return groups

    def __repr__(self) -> str:
        total = self.total
        strange = f"{total.nans:,} NaN, {total.infinities:,} infinite"
        return f"<Stats: {len(self.tensors):,} tensors, {total.values:,} values, {strange}>"

    @overload
    def __getitem__(self, index: int) -> TensorStats: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[TensorStats, ...]: ...

    def __getitem__(self, index: int | slice) -> TensorStats | tuple[TensorStats, ...]:
        return self.tensors[index]

    def __iter__(self) -> Iterator[TensorStats]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


_PLACES: dict[str, Callable[[str], str]] = {"tensor": str, "layer": layer_of, "role": role_of}


def figures_json(figures: Figures) -> dict[str, Any]:
    """Figures as plain data; null if one does not exist or exceeds float64."""
    return {
        "values": figures.values,
        "nan": figures.nans,
        "infinite": figures.infinities,
        "zero": figures.zeros,
        "min": figures.least,
        "max": figures.greatest,
        "mean": _finite(figures.mean),
        "norm": _finite(figures.norm),
        "histogram": {"lowest": figures.histogram.lowest, "counts": list(figures.histogram.counts)},
    }


def rows_json(tensors: Sequence[TensorStats]) -> list[dict[str, Any]]:
    """The tensors as plain data."""
    return [
        {
            "name": one.name,
            "state": one.state,
            "dtype": one.dtype,
            "shape": list(one.shape),
            "scheme": one.scheme or None,
            **figures_json(one.figures),
        }
        for one in tensors
    ]


def groups_json(groups: Mapping[tuple[str, ...], Figures], grouping: Grouping) -> list[dict[str, Any]]:
    """Groups of `Stats.by` as plain data: each with its layer or role, and its state."""
    names = ("state",) if grouping == "state" else (grouping, "state")
    return [{**dict(zip(names, key, strict=True)), **figures_json(one)} for key, one in groups.items()]


def _finite(figure: float | None) -> float | None:
    return figure if figure is not None and isfinite(figure) else None
