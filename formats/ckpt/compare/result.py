"""What a comparison finds: pairs of tensors with their figures, sums over groups of them, and all other differences."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ckpt.compare.sums import DiffSums
from ckpt_formats.core.arguments import Checked
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.core.text import format_share
from ckpt_formats.core.values import brief

Kind = Literal["equal", "changed", "retyped", "reshaped", "missing", "added"]
"""`retyped`: of another element type, and compared by value. `missing` is in the first only, `added` in the second."""
COMPARED: tuple[Kind, ...] = ("equal", "changed", "retyped")
"""The kinds that have figures."""
_HEADS = ("changed", "largest", "relative", "cosine")


@dataclass(frozen=True)
class TensorDiff:
    """One state of one parameter, in either checkpoint or both."""

    name: str
    state: str
    kind: Kind
    what: str = ""
    """How types or shapes differ; `codes` if the numbers alone mean nothing, so that only bits are compared."""
    sums: DiffSums = field(default_factory=DiffSums)

    __repr__ = short_repr


@dataclass(frozen=True)
class ValueDiff:
    """A difference beside tensors: of a counter of parameters, an option of the optimizer, or an extra.

    `str` of it is a sentence.
    """

    kind: Literal["counter", "option", "extra"]
    name: str
    """Such as `step`, `lr`, or the path of an extra: `schedulers/1/last`."""
    first: Any
    """The value in the first checkpoint, as typed JSON (see docs/format.md); None if it has none."""
    second: Any
    """The value in the second checkpoint."""
    parameters: tuple[str, ...] = ()
    """Of a counter or an option: the parameters whose values these are."""
    only_in: Literal["first", "second"] | None = None
    """Of an extra that one checkpoint has not: the one that has it."""

    __repr__ = short_repr

    def __str__(self) -> str:
        count = len(self.parameters)
        if self.kind == "counter":
            head = f"{self.name} of {count} parameters, such as `{min(self.parameters)}`"
        elif self.kind == "option":
            head = f"option of the optimizer for {count} parameters, {self.name}"
        else:
            head = "/".join(("extras", self.name)).rstrip("/")
        if self.only_in is not None:
            value = self.first if self.only_in == "first" else self.second
            return f"{head}: only in the {self.only_in}, {brief(value)}"
        return f"{head}: {brief(self.first)} -> {brief(self.second)}"


@dataclass(frozen=True)
class Diff(Checked):
    """The pairs that were compared, and all other differences."""

    pairs: tuple[TensorDiff, ...]
    values: tuple[ValueDiff, ...] = ()
    """Differences of counters of parameters, options of groups, and extras."""
    same_step: bool = True
    tensors_only: bool = False
    """Only tensors were compared."""

    @property
    def same(self) -> bool:
        """Is every bit of every tensor equal, and everything else that was compared?"""
        return not self.values and self.same_step and all(pair.kind == "equal" for pair in self.pairs)

    @property
    def compared(self) -> tuple[TensorDiff, ...]:
        """The pairs that have figures."""
        return tuple(pair for pair in self.pairs if pair.kind in COMPARED)

    def __repr__(self) -> str:
        unequal = sum(pair.kind != "equal" for pair in self.pairs)
        return f"<Diff: {unequal:,} of {len(self.pairs):,} tensors differ, {len(self.values):,} other values>"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return _as_html(self)


GROUPINGS: dict[str, Callable[[TensorDiff], str]] = {
    "layer": lambda pair: layer_of(pair.name),
    "role": lambda pair: role_of(pair.name),
    "state": lambda pair: pair.state,
    "kind": lambda pair: pair.kind,
    "tensor": lambda pair: pair.name,
}

_LAYER = re.compile(r"(.*?(?:^|\.)\d{1,9})(?:\.|$)", re.DOTALL)
_NUMBER = re.compile(r"(?:^|(?<=\.))\d+(?=\.|$)")


def layer_of(name: str) -> str:
    """A name up to its first number, which counts the layers in nearly every model.

    >>> layer_of("model.layers.11.mlp.up.weight")
    'model.layers.11'
    """
    match = _LAYER.match(name)
    return match[1] if match else name.rpartition(".")[0] or name


def role_of(name: str) -> str:
    """What a tensor is in its layer: the rest of its name, or all of a name without a number.

    Further numbers, such as those of experts, count as one.

    >>> role_of("model.layers.11.mlp.experts.3.up.weight")
    'mlp.experts.*.up.weight'
    """
    match = _LAYER.match(name)
    return _NUMBER.sub("*", name[match.end() :]) if match else name


def grouped(pairs: Iterable[TensorDiff], by: Sequence[str]) -> list[tuple[tuple[str, ...], DiffSums]]:
    """Sums over groups of pairs, by the keys `by`. Norms and cosines are those of a group's tensors as one vector."""
    totals: dict[tuple[str, ...], DiffSums] = {}
    for pair in pairs:
        key = tuple(GROUPINGS[how](pair) for how in by)
        totals[key] = totals.get(key, DiffSums()) + pair.sums
    return list(totals.items())


def _as_html(diff: Diff) -> str:
    """The verdict, a row for each kind of state, and the tensors that changed most."""
    from ckpt_formats.core.notebook import folded, panel, table  # only notebooks show HTML

    compared = diff.compared
    differing = sorted(
        (pair for pair in compared if pair.kind != "equal"),
        key=lambda pair: (not pair.sums.not_finite, -(pair.sums.relative or 0)),
    )
    unpaired = [(pair.name, pair.state, pair.kind, pair.what) for pair in diff.pairs if pair.kind not in COMPARED]
    total = sum((pair.sums for pair in compared), DiffSums())
    facts = [f"{total.changed:,} of {total.elements:,} elements changed", f"{len(diff.values):,} other values differ"]
    if not diff.same_step:
        facts.append("of other steps")
    groups = [(key, *_figures(sums)) for (key,), sums in grouped(compared, ["state"])]
    parts = [table("By state", ("state", *_HEADS), groups)]
    if differing:
        rows = [(pair.name, pair.state, *_figures(pair.sums)) for pair in differing]
        most = table("", ("tensor", "state", *_HEADS), rows, (0, 1))
        parts.append(folded("Tensors that changed, the most changed first", most))
    if unpaired:
        heads = ("tensor", "state", "kind", "what")
        parts.append(folded("Tensors that cannot be compared", table("", heads, unpaired, (0, 1, 2, 3))))
    if diff.values:
        parts.append(folded("Other values", table("", ("value",), [(str(value),) for value in diff.values])))
    if diff.same:
        return panel("The same, bit for bit", facts, *parts)
    return panel(f"{len(differing):,} of {len(compared):,} tensors differ", facts, *parts)


def _figures(sums: DiffSums) -> tuple[str, str, str, str]:
    share = format_share(sums.changed, sums.elements)
    if not sums.is_measured:
        return share, f"{sums.not_finite:,} not finite" if sums.not_finite else "codes", "-", "-"
    relative = "-" if sums.relative is None else f"{sums.relative:.3g}"
    cosine = "-" if sums.cosine is None else f"{sums.cosine:.7f}"
    return share, f"{sums.largest:.3g}", relative, cosine
