"""Where each rank's shard is in the full tensor. The same `Rule` merges and splits.

Patterns on parameter names state how tensors are sharded over tensor-parallel
ranks, as in Universal Checkpointing (arXiv 2406.18820). Rules are plain data;
`rules` reads them from TOML.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from ckpt_formats.core.arguments import Checked, Count, Positive
from ckpt_formats.core.computed_blobs import MeanBlob
from ckpt_formats.core.errors import InvalidArgumentError, RulesError
from ckpt_formats.core.formula import Formula, evaluate
from ckpt_formats.core.geometry import Box, Shape, slab
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.core.tensor import Fragment, Tensor, ZeroBlob, from_fragments, with_replicas

Partitioning = Literal["sharded", "replicated", "averaged", "first", "unique", "blocks"]
_COPIES = ("replicated", "averaged", "first")
"""With these, every rank has the full tensor."""
ParallelGroup = Literal["tensor", "expert"]
"""Over which ranks a tensor is sharded: the tensor-parallel ranks, or those that share an expert."""


@dataclass(frozen=True, slots=True)
class ShardBlock:
    """A block of a rank's shard, and the same block in the full tensor. Both have one shape."""

    shard: Box
    full: Box


@dataclass(frozen=True)
class Rule(Checked):
    """How the tensors whose names match `pattern` are sharded over tensor-parallel ranks.

    sharded     along `axis`. `fused` states the parts that are concatenated along that
                axis, each of which is split by itself: a count of equal parts (2 for
                SwiGLU's gate and up) or their full lengths (q, k, v). `widths` has the
                length of each part on each rank, if ranks differ.
    replicated  every rank has the full tensor; copies are compared
    averaged    every rank has the full tensor; the result is the mean
    first       every rank has the full tensor; the result is that of the first rank
    unique      every rank has a tensor of its own; the result has one more axis, the rank
    blocks      `blocks` lists the blocks of each rank; `shape` is the full shape

    `vocabulary` is the true number of rows of a table that is padded so that it divides
    by the number of ranks: a merge drops the other rows, a split adds zeros. `padded`
    states that a table is padded, if the true number is not known: a merge drops
    nothing, a split adds zeros.

    `length` is the length of the full tensor along `axis`. `units` is the number of
    indivisible units along it, such as attention heads. Both, and the lengths in
    `fused`, may be formulas of the model's sizes; `sized` replaces them by numbers.
    """

    pattern: str
    how: Partitioning = "sharded"
    axis: Count = 0
    fused: Positive | tuple[Formula, ...] = 1
    widths: tuple[tuple[int, ...], ...] = ()
    vocabulary: Count | None = None
    shape: Shape | None = None
    blocks: tuple[tuple[ShardBlock, ...], ...] = ()
    origin: str = "built in"
    length: Formula | None = None
    units: Formula | None = None
    padded: bool = False
    over: ParallelGroup = "tensor"
    when: str | None = None
    """A size of the model, such as `gated`: the rule only applies if it is not zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise InvalidArgumentError(f"{self.pattern[:60]!r} is not a regular expression: {error}") from None

    def matches(self, name: str) -> bool:
        """Whether the rule is for the parameter of this name."""
        from ckpt_formats.core.name_patterns import full_match  # most formats have no rules

        return full_match(self.pattern, name)

    def sized(self, sizes: Mapping[str, int]) -> "Rule":
        """The same rule with numbers for its formulas. Raises `RulesError` for a size that is not known."""
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
        fused = "" if self.fused == 1 else f", {self.fused} fused parts"
        padded = ", padded" if self.padded else ""
        padded = padded if self.vocabulary is None else f", {self.vocabulary} true rows"
        units = "" if self.units is None else f", {self.units} units"
        over = "" if self.over == "tensor" else f", over {self.over}-parallel ranks"
        return f"sharded along axis {self.axis}{fused}{units}{padded}{over}"


@dataclass(frozen=True)
class Layout:
    """The rules of one checkpoint, of which the first match applies, and the model's sizes by name."""

    rules: tuple[Rule, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)

    __repr__ = short_repr

    def rule(self, name: str) -> Rule:
        """The rule of a parameter. Raises `RulesError` if there is none: a layout is never guessed."""
        matching = self.matching(name)
        if matching:
            # The padding of a table may be stated by another rule than its sharding.
            first = matching[0].sized(self.sizes)
            rows = next((rule.vocabulary for rule in matching if rule.vocabulary is not None), None)
            return first if rows == first.vocabulary else replace(first, vocabulary=rows)
        raise RulesError(
            f"no rule states how tensor `{name}` is sharded over tensor-parallel ranks",
            hint=f"Give one with --rules FILE, for example:  [[rule]]  match = '{re.escape(name)}'  axis = 0",
        )

    def matching(self, name: str) -> list[Rule]:
        """All rules for a parameter, the one that applies first."""
        if name not in self._matching:
            self._matching[name] = [rule for rule in self.rules if rule.matches(name) and self._applies(rule)]
        return self._matching[name]

    @cached_property
    def _matching(self) -> dict[str, list[Rule]]:
        """Of the names that were looked up: every rank looks up each name."""
        return {}

    def check(self, name: str, shape: Shape) -> None:
        """Raise `RulesError` if the length of a full tensor contradicts the model's sizes."""
        if self.matching(name):
            _check_length(name, shape, self.rule(name), 1)

    def _applies(self, rule: Rule) -> bool:
        return rule.when is None or evaluate(rule.when, self.sizes, f"the rule for `{rule.pattern}`") != 0


def merge(name: str, shards: Sequence[Tensor], rule: Rule) -> Tensor:
    """The full tensor, from its shards by tensor-parallel rank. Lazy: no values are read.

    Raises `RulesError` if the shards' shapes contradict the rule.
    """
    if rule.how in ("replicated", "averaged", "first", "unique"):
        if any(shard.shape != shards[0].shape for shard in shards):
            raise RulesError(f"tensor `{name}` should be complete on every rank ({rule}), but its shapes differ")
        if rule.how == "replicated":
            merged = with_replicas(shards)
        elif rule.how == "unique":
            from ckpt_formats.core.views import stacked  # most layouts need no views

            return stacked(shards)
        else:
            merged = Tensor.of(MeanBlob(tuple(shards))) if rule.how == "averaged" else shards[0]
        _check_length(name, merged.shape, rule, 1)
    else:
        shape, blocks = _blocks_of(name, [shard.shape for shard in shards], rule)
        _check_length(name, shape, rule, len(shards))
        max_replicas = max(len(shard.replicas) for shard in shards)
        copies = (
            [(shard, *shard.replicas)[min(i, len(shard.replicas))] for shard in shards] for i in range(max_replicas + 1)
        )
        merged = with_replicas(
            [from_fragments(shape, _placed_fragments(copy, blocks), shards[0].dtype) for copy in copies]
        )
    if rule.vocabulary is None or not merged.shape:
        return merged
    if rule.vocabulary > merged.shape[0]:
        raise RulesError(f"tensor `{name}` has {merged.shape[0]} rows, fewer than its vocabulary of {rule.vocabulary}")
    return merged.crop(slab(merged.shape, 0, 0, rule.vocabulary))


def split(name: str, tensor: Tensor, rule: Rule, ranks: int, rows: int | None = None) -> list[Tensor]:
    """The shards of a full tensor by tensor-parallel rank: the inverse of `merge`. Lazy.

    `rows` is the number of rows of a vocabulary's table with its padding; None: the smallest
    number that divides. Raises `RulesError` if the tensor does not divide.
    """
    if rule.how == "unique":
        from ckpt_formats.core.views import unstacked

        _check_unique(name, tensor, ranks)
        return [unstacked(tensor, rank) for rank in range(ranks)]
    tensor = _with_padding(tensor, rule, ranks, rows)
    blocks = cuts(name, tensor.shape, rule, ranks)
    return [tensor] * ranks if rule.how in _COPIES else [_shard(tensor, placed) for placed in blocks]


def shard(name: str, tensor: Tensor, rule: Rule, ranks: int, rank: int, rows: int | None = None) -> Tensor:
    """The shard of one rank: `split(...)[rank]`, without the shards of the others."""
    if rule.how == "unique":
        from ckpt_formats.core.views import unstacked

        _check_unique(name, tensor, ranks)
        return unstacked(tensor, rank)
    tensor = _with_padding(tensor, rule, ranks, rows)
    if rule.how in _COPIES:
        _check_division(name, tensor.shape, rule, ranks)
        return tensor
    return _shard(tensor, _blocks_of_rank(name, tensor.shape, rule, ranks, rank))


def shard_blocks(name: str, shape: Shape, rule: Rule, ranks: int, rank: int) -> tuple[Shape, tuple[ShardBlock, ...]]:
    """The shape of `shard(...)` of a tensor of this shape, and its blocks that lie within the tensor.

    The rest of the shard is padding. Raises `RulesError` if the tensor does not divide.
    """
    padded = _padded_shape(shape, rule, ranks, None)
    blocks = _blocks_of_rank(name, padded, rule, ranks, rank)
    own = _shape_of(len(shape), blocks)
    whole, within = Box.whole(shape), list[ShardBlock]()
    for block in blocks:
        common = block.full & whole
        if common is not None:
            within.append(ShardBlock(common.within(block.full).shift(block.shard.start), common))
    return own, tuple(within)


def is_even(rule: Rule) -> bool:
    """Whether the shards of all ranks have the same shape."""
    return rule.how != "blocks" and not rule.widths


def cuts(name: str, shape: Shape, rule: Rule, ranks: int) -> list[tuple[ShardBlock, ...]]:
    """The blocks of each rank's shard of a tensor of this shape, padding included.

    Raises `RulesError` if the tensor does not divide.
    """
    _check_division(name, shape, rule, ranks)
    if rule.how in _COPIES:
        return [(ShardBlock(Box.whole(shape), Box.whole(shape)),)] * ranks
    if rule.how == "unique":
        raise RulesError(f"every rank has its own tensor `{name}`: their tensors are not blocks of one")
    if rule.how == "blocks":
        if rule.shape != shape or len(rule.blocks) != ranks:
            raise RulesError(f"tensor `{name}`: its rule is for {len(rule.blocks)} ranks and shape {rule.shape}")
        return list(rule.blocks)
    table = _widths(name, shape, rule, ranks)
    return [tuple(place(shape, rule.axis, table, rank)) for rank in range(ranks)]


def _check_unique(name: str, tensor: Tensor, ranks: int) -> None:
    if not tensor.shape or tensor.shape[0] != ranks:
        raise RulesError(f"tensor `{name}` of shape {list(tensor.shape)} is not one tensor for each of {ranks} ranks")


def _blocks_of_rank(name: str, shape: Shape, rule: Rule, ranks: int, rank: int) -> tuple[ShardBlock, ...]:
    """The blocks of one rank's shard of a tensor of this shape, padding included."""
    if rule.how != "sharded":
        return cuts(name, shape, rule, ranks)[rank]
    _check_division(name, shape, rule, ranks)
    return tuple(place(shape, rule.axis, _widths(name, shape, rule, ranks), rank))


def _with_padding(tensor: Tensor, rule: Rule, ranks: int, rows: int | None) -> Tensor:
    """A vocabulary's table with its padding; any other tensor unchanged."""
    shape = _padded_shape(tensor.shape, rule, ranks, rows)
    is_table = (rule.vocabulary is not None or rule.padded) and tensor.shape
    return _padded(tensor, shape[0]) if is_table else tensor


def _padded_shape(shape: Shape, rule: Rule, ranks: int, rows: int | None) -> Shape:
    if (rule.vocabulary is None and not rule.padded) or not shape:
        return shape
    rows = max(shape[0], rows or 0)
    return (rows if rule.how != "sharded" else -(-rows // ranks) * ranks, *shape[1:])


def _check_division(name: str, shape: Shape, rule: Rule, ranks: int) -> None:
    if rule.vocabulary is None and not rule.padded:
        _check_length(name, shape, rule, ranks)


def _widths(name: str, shape: Shape, rule: Rule, ranks: int) -> list[list[int]]:
    """The length of each fused part on each rank. Raises `RulesError` if the tensor does not divide."""
    if not 0 <= rule.axis < len(shape):
        raise RulesError(f"tensor `{name}` of shape {list(shape)} has no axis {rule.axis} to shard along")
    length = shape[rule.axis]
    # Widths are for one number of ranks; over another number, the same parts are split evenly.
    fused = tuple(sum(row) for row in rule.widths) or _fused_parts(name, rule)
    parts = [length // fused] * fused if isinstance(fused, int) else list(fused)
    fits_ranks = rule.widths and len(rule.widths[0]) == ranks
    table = (
        [list(row) for row in rule.widths]
        if fits_ranks
        else [[length_of_part // ranks] * ranks for length_of_part in parts]
    )
    if sum(parts) != length or [sum(row) for row in table] != parts:
        raise RulesError(
            f"tensor `{name}`: axis {rule.axis} of length {length} ({rule}) does not divide over {ranks} ranks"
        )
    return table


def lengths(name: str, rule: Rule, shard_lengths: Sequence[int]) -> list[list[int]]:
    """The length of each fused part on each rank, from the length of each rank's shard along the axis.

    Raises `RulesError` if they contradict the rule.
    """
    ranks, fused = len(shard_lengths), _fused_parts(name, rule)
    if rule.widths:
        table = [list(widths) for widths in rule.widths]
    elif isinstance(fused, int):
        if any(n % fused for n in shard_lengths):
            raise RulesError(
                f"tensor `{name}`: a shard of length {list(shard_lengths)} cannot hold {fused} equal parts"
            )
        table = [[n // fused for n in shard_lengths] for _ in range(fused)]
    else:
        if any(n % ranks for n in fused):
            raise RulesError(f"tensor `{name}`: parts of length {list(fused)} do not divide over {ranks} ranks")
        table = [[n // ranks] * ranks for n in fused]
    sums = [sum(column) for column in zip(*table, strict=True)] if all(len(row) == ranks for row in table) else None
    if sums != list(shard_lengths):
        raise RulesError(
            f"tensor `{name}`: shards of length {list(shard_lengths)} along axis {rule.axis} "
            f"contradict its rule ({rule})"
        )
    return table


def place(shape: Shape, axis: int, table: Sequence[Sequence[int]], rank: int) -> Iterator[ShardBlock]:
    """The blocks of one rank's shard, for parts of the lengths `table[part][rank]` along `axis`."""
    at, part_start = 0, 0
    for row in table:
        length, low = row[rank], part_start + sum(row[:rank])
        if length:
            shard_shape = (*shape[:axis], sum(r[rank] for r in table), *shape[axis + 1 :])
            yield ShardBlock(slab(shard_shape, axis, at, at + length), slab(shape, axis, low, low + length))
        at, part_start = at + length, part_start + sum(row)


def _fused_parts(name: str, rule: Rule) -> int | tuple[int, ...]:
    if isinstance(rule.fused, int):
        return rule.fused
    known = tuple(n for n in rule.fused if isinstance(n, int))
    if len(known) != len(rule.fused):
        raise RulesError(f"tensor `{name}`: its rule has formulas, but nothing states the sizes of the model ({rule})")
    return known


def _check_length(name: str, shape: Shape, rule: Rule, ranks: int) -> None:
    """Raise `RulesError` if the full tensor's length contradicts the model's sizes, or if a unit would be split."""
    if not 0 <= rule.axis < len(shape):
        return
    length, units = shape[rule.axis], rule.units
    if isinstance(rule.length, int) and rule.length != length:
        raise RulesError(
            f"tensor `{name}` has length {length} along axis {rule.axis}, but by the model's sizes it is {rule.length}",
            hint="The arguments in the checkpoint contradict its tensors, or the rule is wrong. "
            f"It is from {rule.origin}; your own rules, with --rules, come before it.",
        )
    if isinstance(units, int) and (units < 1 or length % units or (units % ranks and ranks % units)):
        raise RulesError(
            f"tensor `{name}`: {units} units (heads or groups of them) along axis {rule.axis} of length {length} "
            f"do not divide over {ranks} ranks",
            hint="Choose a degree that divides them.",
        )


def _blocks_of(name: str, shapes: Sequence[Shape], rule: Rule) -> tuple[Shape, list[tuple[ShardBlock, ...]]]:
    if rule.how == "blocks":
        if rule.shape is None or len(rule.blocks) != len(shapes):
            raise RulesError(f"tensor `{name}`: its rule lists {len(rule.blocks)} ranks, there are {len(shapes)}")
        return rule.shape, list(rule.blocks)
    axis = rule.axis
    rests = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
    if any(not 0 <= axis < len(shape) for shape in shapes) or len(rests) != 1:
        raise RulesError(
            f"tensor `{name}`: shards of shapes {[list(s) for s in shapes]} cannot be concatenated along axis {axis}"
        )
    table = lengths(name, rule, [shape[axis] for shape in shapes])
    full_shape = (*shapes[0][:axis], sum(map(sum, table)), *shapes[0][axis + 1 :])
    return full_shape, [tuple(place(full_shape, axis, table, rank)) for rank in range(len(shapes))]


def _shard(tensor: Tensor, blocks: Sequence[ShardBlock]) -> Tensor:
    shape = _shape_of(len(tensor.shape), blocks)
    return from_fragments(shape, (Fragment(p.shard, tensor.crop(p.full)) for p in blocks), tensor.dtype)


def _shape_of(axes: int, blocks: Sequence[ShardBlock]) -> Shape:
    return tuple(max((one.shard.stop[axis] for one in blocks), default=0) for axis in range(axes))


def _padded(tensor: Tensor, rows: int) -> Tensor:
    padding = slab((rows, *tensor.shape[1:]), 0, tensor.shape[0], rows)
    parts = (Fragment(Box.whole(tensor.shape), tensor), Fragment(padding, ZeroBlob(padding.shape, tensor.dtype)))
    return from_fragments((rows, *tensor.shape[1:]), parts, tensor.dtype)


def _placed_fragments(shards: Sequence[Tensor], blocks: Sequence[Sequence[ShardBlock]]) -> Iterator[Fragment]:
    for shard, placed in zip(shards, blocks, strict=True):
        for p in placed:
            yield from shard.placed(p.shard, p.full)
