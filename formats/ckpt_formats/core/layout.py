"""Where each rank's shard lies in the whole tensor. One `Rule` both merges and splits.

This is the second half of Universal Checkpointing (arXiv 2406.18820): patterns
on parameter names say how tensors are cut over tensor-parallel ranks. Rules are
plain data; `rules` reads them from TOML.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ckpt_formats.core.errors import BadRules
from ckpt_formats.core.formula import Formula, evaluate
from ckpt_formats.core.geometry import Box, Shape, slab
from ckpt_formats.core.tensor import Fragment, MeanBlob, Tensor, ZeroBlob, from_fragments, with_replicas
from ckpt_formats.core.views import stacked, unstacked

Partitioning = Literal["sharded", "replicated", "averaged", "first", "unique", "blocks"]
_COPIES = ("replicated", "averaged", "first")
"""Every rank holds all of the tensor."""
ParallelGroup = Literal["tensor", "expert"]
"""Which group of ranks cuts a tensor: the tensor-parallel ranks, or those that share an expert."""


@dataclass(frozen=True, slots=True)
class ShardBlock:
    """A block of a rank's own shard, and the block of the whole tensor it is."""

    shard: Box
    full: Box


@dataclass(frozen=True)
class Rule:
    """How the tensors whose names match `pattern` are cut over tensor-parallel ranks.

    sharded     along `axis`. `fused` names pieces glued together along that axis,
                each of which is split on its own: a count of equal pieces (2 for
                SwiGLU's gate and up) or their whole lengths (q, k, v). `widths`
                gives the length of each piece on each rank where ranks differ.
    replicated  every rank holds all of it; copies are compared
    averaged    every rank holds all of it; the mean counts
    first       every rank holds all of it; the first rank's counts
    unique      every rank holds its own; the whole has an axis more, by rank
    blocks      `blocks` lists the blocks of each rank; `shape` is the whole shape

    `vocabulary` is the true number of rows of a table that is padded to suit the
    number of ranks: the rest is dropped when merging, and zeros when splitting.
    `padded` says that a table is so, where nobody knows the true number: nothing
    is dropped, and zeros are added when splitting.

    `length` is how long the whole tensor is along `axis`; `units` is how many
    things lie along it that are never cut, such as attention heads. Both, and the
    lengths in `fused`, may be formulas of the model's sizes, until `sized` knows these.
    """

    pattern: str
    how: Partitioning = "sharded"
    axis: int = 0
    fused: int | tuple[Formula, ...] = 1
    widths: tuple[tuple[int, ...], ...] = ()
    vocabulary: int | None = None
    shape: Shape | None = None
    blocks: tuple[tuple[ShardBlock, ...], ...] = ()
    origin: str = "built in"
    length: Formula | None = None
    units: Formula | None = None
    padded: bool = False
    over: ParallelGroup = "tensor"
    when: str | None = None
    """A size of the model that must not be zero for the rule to count, such as `gated`."""

    def matches(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None

    def sized(self, sizes: Mapping[str, int]) -> "Rule":
        """The same rule with numbers for its formulas. Raises `BadRules` for a size that is not known."""
        formulas = (self.length, self.units, *(() if isinstance(self.fused, int) else self.fused))
        if not any(isinstance(formula, str) for formula in formulas):
            return self

        def number(formula: Formula) -> int:
            return evaluate(formula, sizes, f"the rule for `{self.pattern}` ({self.origin})")

        return replace(
            self,
            fused=self.fused if isinstance(self.fused, int) else tuple(map(number, self.fused)),
            length=None if self.length is None else number(self.length),
            units=None if self.units is None else number(self.units),
        )

    def __str__(self) -> str:
        if self.how != "sharded":
            return self.how
        fused = "" if self.fused == 1 else f", {self.fused} fused pieces"
        padded = ", padded" if self.padded else ""
        padded = padded if self.vocabulary is None else f", {self.vocabulary} true rows"
        whole = "" if self.units is None else f", {self.units} units"
        over = "" if self.over == "tensor" else f", over {self.over}-parallel ranks"
        return f"sharded along axis {self.axis}{fused}{whole}{padded}{over}"


@dataclass(frozen=True)
class Layout:
    """The rules of one checkpoint, first match first, and the model's sizes, by the names that formulas use."""

    rules: tuple[Rule, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    def rule(self, name: str) -> Rule:
        """The rule of a parameter. Raises `BadRules` where there is none: we never guess."""
        matching = self.matching(name)
        if matching:
            # A table is padded however it is cut: the two are said by different rules.
            first = matching[0].sized(self.sizes)
            rows = next((rule.vocabulary for rule in matching if rule.vocabulary is not None), None)
            return first if rows == first.vocabulary else replace(first, vocabulary=rows)
        raise BadRules(
            f"no rule says how tensor `{name}` is cut over tensor-parallel ranks",
            hint=f"Give one with --rules FILE, for example:  [[rule]]  match = '{re.escape(name)}'  axis = 0",
        )

    def matching(self, name: str) -> list[Rule]:
        """All rules that speak of a parameter, the one that counts first."""
        return [rule for rule in self.rules if rule.matches(name) and self._counts(rule)]

    def check(self, name: str, shape: Shape) -> None:
        """Raises `BadRules` if a whole tensor is not as long as the model's sizes say."""
        if self.matching(name):
            _check_length(name, shape, self.rule(name), 1)

    def _counts(self, rule: Rule) -> bool:
        return rule.when is None or evaluate(rule.when, self.sizes, f"the rule for `{rule.pattern}`") != 0


def merge(name: str, shards: Sequence[Tensor], rule: Rule) -> Tensor:
    """The whole tensor, of its shards by tensor-parallel rank. Lazy: only fragments move.

    Raises `BadRules` if the shards' shapes contradict the rule.
    """
    if rule.how in ("replicated", "averaged", "first", "unique"):
        if any(shard.shape != shards[0].shape for shard in shards):
            raise BadRules(f"tensor `{name}` should be whole on every rank ({rule}), but its shapes differ")
        if rule.how == "replicated":
            whole = with_replicas(shards)
        elif rule.how == "unique":
            return stacked(shards)
        else:
            whole = Tensor.of(MeanBlob(tuple(shards))) if rule.how == "averaged" else shards[0]
        _check_length(name, whole.shape, rule, 1)
    else:
        shape, blocks = _blocks_of(name, [shard.shape for shard in shards], rule)
        _check_length(name, shape, rule, len(shards))
        most = max(len(shard.replicas) for shard in shards)
        copies = ([(shard, *shard.replicas)[min(i, len(shard.replicas))] for shard in shards] for i in range(most + 1))
        whole = with_replicas([from_fragments(shape, _moved(copy, blocks), shards[0].dtype) for copy in copies])
    if rule.vocabulary is None or not whole.shape:
        return whole
    if rule.vocabulary > whole.shape[0]:
        raise BadRules(f"tensor `{name}` has {whole.shape[0]} rows, fewer than its vocabulary of {rule.vocabulary}")
    return whole.crop(slab(whole.shape, 0, 0, rule.vocabulary))


def split(name: str, whole: Tensor, rule: Rule, ranks: int, rows: int | None = None) -> list[Tensor]:
    """The shards of a whole tensor, by tensor-parallel rank: what `merge` puts together. Lazy.

    `rows` is how many rows a vocabulary's table has with its padding; None means
    the least that divides. Raises `BadRules` if the tensor does not divide.
    """
    if rule.how == "unique":
        if not whole.shape or whole.shape[0] != ranks:
            raise BadRules(
                f"tensor `{name}` of shape {list(whole.shape)} is not what each of {ranks} ranks has of its own"
            )
        return [unstacked(whole, rank) for rank in range(ranks)]
    if (rule.vocabulary is not None or rule.padded) and whole.shape:
        rows = max(whole.shape[0], rows or 0)
        whole = _padded(whole, rows if rule.how != "sharded" else -(-rows // ranks) * ranks)
    blocks = cuts(name, whole.shape, rule, ranks)
    return [whole] * ranks if rule.how in _COPIES else [_shard(whole, placed) for placed in blocks]


def cuts(name: str, shape: Shape, rule: Rule, ranks: int) -> list[tuple[ShardBlock, ...]]:
    """The blocks of each rank's shard of a tensor of this shape, which has its padding already.

    Raises `BadRules` if the tensor does not divide.
    """
    if rule.vocabulary is None and not rule.padded:
        _check_length(name, shape, rule, ranks)
    if rule.how in _COPIES:
        return [(ShardBlock(Box.whole(shape), Box.whole(shape)),)] * ranks
    if rule.how == "unique":
        raise BadRules(f"tensor `{name}` is each rank's own: its shards are no blocks of it")
    if rule.how == "blocks":
        if rule.shape != shape or len(rule.blocks) != ranks:
            raise BadRules(f"tensor `{name}`: its rule is for {len(rule.blocks)} ranks and shape {rule.shape}")
        return list(rule.blocks)
    if not 0 <= rule.axis < len(shape):
        raise BadRules(f"tensor `{name}` of shape {list(shape)} has no axis {rule.axis} to cut along")
    length = shape[rule.axis]
    # Widths are those of one number of ranks; over another, the same pieces are divided evenly.
    fused = tuple(sum(row) for row in rule.widths) or _pieces(name, rule)
    pieces = [length // fused] * fused if isinstance(fused, int) else list(fused)
    given = rule.widths and len(rule.widths[0]) == ranks
    table = [list(row) for row in rule.widths] if given else [[piece // ranks] * ranks for piece in pieces]
    if sum(pieces) != length or [sum(row) for row in table] != pieces:
        raise BadRules(
            f"tensor `{name}`: axis {rule.axis} of length {length} ({rule}) does not divide over {ranks} ranks"
        )
    return [tuple(place(shape, rule.axis, table, rank)) for rank in range(ranks)]


def lengths(name: str, rule: Rule, local: Sequence[int]) -> list[list[int]]:
    """How long each fused piece is on each rank, given the length of each rank's shard along the axis."""
    ranks, fused = len(local), _pieces(name, rule)
    if rule.widths:
        table = [list(widths) for widths in rule.widths]
    elif isinstance(fused, int):
        if any(n % fused for n in local):
            raise BadRules(f"tensor `{name}`: a shard of length {list(local)} cannot hold {fused} equal pieces")
        table = [[n // fused for n in local] for _ in range(fused)]
    else:
        if any(n % ranks for n in fused):
            raise BadRules(f"tensor `{name}`: pieces of length {list(fused)} do not divide over {ranks} ranks")
        table = [[n // ranks] * ranks for n in fused]
    if any(len(row) != ranks for row in table) or [sum(column) for column in zip(*table, strict=True)] != list(local):
        raise BadRules(
            f"tensor `{name}`: shards of length {list(local)} along axis {rule.axis} contradict its rule ({rule})"
        )
    return table


def place(shape: Shape, axis: int, table: Sequence[Sequence[int]], rank: int) -> Iterator[ShardBlock]:
    """The blocks of one rank's shard, for pieces of the lengths `table[piece][rank]` along `axis`."""
    at, glued = 0, 0
    for row in table:
        length, low = row[rank], glued + sum(row[:rank])
        if length:
            local_shape = (*shape[:axis], sum(r[rank] for r in table), *shape[axis + 1 :])
            yield ShardBlock(slab(local_shape, axis, at, at + length), slab(shape, axis, low, low + length))
        at, glued = at + length, glued + sum(row)


def _pieces(name: str, rule: Rule) -> int | tuple[int, ...]:
    if isinstance(rule.fused, int):
        return rule.fused
    known = tuple(n for n in rule.fused if isinstance(n, int))
    if len(known) != len(rule.fused):
        raise BadRules(f"tensor `{name}`: its rule has formulas, but nothing says the sizes of the model ({rule})")
    return known


def _check_length(name: str, shape: Shape, rule: Rule, ranks: int) -> None:
    """The whole tensor is as long as the model's sizes say, and no unit of it is cut. Raises `BadRules`."""
    if not 0 <= rule.axis < len(shape):
        return
    length, units = shape[rule.axis], rule.units
    if isinstance(rule.length, int) and rule.length != length:
        raise BadRules(
            f"tensor `{name}` has length {length} along axis {rule.axis}, but by the model's sizes it is {rule.length}",
            hint="The arguments in the checkpoint contradict its tensors, or the rule is wrong. "
            f"It is of {rule.origin}; a rule of yours, with --rules, comes first.",
        )
    if isinstance(units, int) and (units < 1 or length % units or (units % ranks and ranks % units)):
        raise BadRules(
            f"tensor `{name}`: {units} units (heads or groups of them) along axis {rule.axis} of length {length} "
            f"do not divide over {ranks} ranks",
            hint="Choose a degree that divides them.",
        )


def _blocks_of(name: str, shapes: Sequence[Shape], rule: Rule) -> tuple[Shape, list[tuple[ShardBlock, ...]]]:
    if rule.how == "blocks":
        if rule.shape is None or len(rule.blocks) != len(shapes):
            raise BadRules(f"tensor `{name}`: its rule lists {len(rule.blocks)} ranks, there are {len(shapes)}")
        return rule.shape, list(rule.blocks)
    axis = rule.axis
    rests = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if any(not 0 <= axis < len(shape) for shape in shapes) or len(rests) != 1:
        raise BadRules(
            f"tensor `{name}`: shards of shapes {[list(s) for s in shapes]} cannot be joined along axis {axis}"
        )
    table = lengths(name, rule, [shape[axis] for shape in shapes])
    whole = (*shapes[0][:axis], sum(map(sum, table)), *shapes[0][axis + 1 :])
    return whole, [tuple(place(whole, axis, table, rank)) for rank in range(len(shapes))]


def _shard(whole: Tensor, blocks: Sequence[ShardBlock]) -> Tensor:
    shape = tuple(max((p.shard.stop[axis] for p in blocks), default=0) for axis in range(len(whole.shape)))
    return from_fragments(shape, (Fragment(p.shard, whole.crop(p.full)) for p in blocks), whole.dtype)


def _padded(whole: Tensor, rows: int) -> Tensor:
    padding = slab((rows, *whole.shape[1:]), 0, whole.shape[0], rows)
    parts = (Fragment(Box.whole(whole.shape), whole), Fragment(padding, ZeroBlob(padding.shape, whole.dtype)))
    return from_fragments((rows, *whole.shape[1:]), parts, whole.dtype)


def _moved(shards: Sequence[Tensor], blocks: Sequence[Sequence[ShardBlock]]) -> Iterator[Fragment]:
    for shard, placed in zip(shards, blocks, strict=True):
        for p in placed:
            yield from shard.placed(p.shard, p.full)
