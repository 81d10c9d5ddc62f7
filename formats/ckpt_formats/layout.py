"""Where each rank's shard lies in the whole tensor. One `Rule` both merges and splits.

This is the second half of Universal Checkpointing (arXiv 2406.18820): patterns
on parameter names say how tensors are cut over tensor-parallel ranks. Rules are
plain data; `rules` reads them from TOML.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ckpt_formats.errors import BadRules
from ckpt_formats.geometry import Box, Shape, slab
from ckpt_formats.tensor import Fragment, Mean, Tensor, Zeros, join, with_replicas

How = Literal["sharded", "replicated", "averaged", "first", "blocks"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A block of a rank's own shard, and the block of the whole tensor it is."""

    local: Box
    whole: Box


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
    blocks      `blocks` lists the blocks of each rank; `shape` is the whole shape

    `vocabulary` is the true number of rows of a table that is padded to suit the
    number of ranks: the rest is dropped when merging, and zeros when splitting.
    """

    pattern: str
    how: How = "sharded"
    axis: int = 0
    fused: int | tuple[int, ...] = 1
    widths: tuple[tuple[int, ...], ...] = ()
    vocabulary: int | None = None
    shape: Shape | None = None
    blocks: tuple[tuple[Placed, ...], ...] = ()
    origin: str = "built in"

    def matches(self, name: str) -> bool:
        return re.fullmatch(self.pattern, name) is not None

    def __str__(self) -> str:
        if self.how != "sharded":
            return self.how
        fused = "" if self.fused == 1 else f", {self.fused} fused pieces"
        padded = "" if self.vocabulary is None else f", {self.vocabulary} true rows"
        return f"sharded along axis {self.axis}{fused}{padded}"


@dataclass(frozen=True)
class Layout:
    """The rules of one checkpoint, first match first."""

    rules: tuple[Rule, ...] = ()

    def rule(self, name: str) -> Rule:
        """The rule of a parameter. Raises `BadRules` where there is none: we never guess."""
        matching = [rule for rule in self.rules if rule.matches(name)]
        if matching:
            # A table is padded however it is cut: the two are said by different rules.
            rows = next((rule.vocabulary for rule in matching if rule.vocabulary is not None), None)
            return matching[0] if rows == matching[0].vocabulary else replace(matching[0], vocabulary=rows)
        raise BadRules(
            f"no rule says how tensor `{name}` is cut over tensor-parallel ranks",
            hint=f"Give one with --rules FILE, for example:  [[rule]]  match = '{re.escape(name)}'  axis = 0",
        )


def merge(name: str, shards: Sequence[Tensor], rule: Rule) -> Tensor:
    """The whole tensor, of its shards by tensor-parallel rank. Lazy: only fragments move.

    Raises `BadRules` if the shards' shapes contradict the rule.
    """
    if rule.how in ("replicated", "averaged", "first"):
        if any(shard.shape != shards[0].shape for shard in shards):
            raise BadRules(f"tensor `{name}` should be whole on every rank ({rule}), but its shapes differ")
        if rule.how == "replicated":
            whole = with_replicas(shards)
        else:
            whole = Tensor.of(Mean(tuple(shards))) if rule.how == "averaged" else shards[0]
    else:
        shape, blocks = _blocks_of(name, [shard.shape for shard in shards], rule)
        most = max(len(shard.replicas) for shard in shards)
        copies = ([(shard, *shard.replicas)[min(i, len(shard.replicas))] for shard in shards] for i in range(most + 1))
        whole = with_replicas([join(shape, _moved(copy, blocks), shards[0].dtype) for copy in copies])
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
    if rule.vocabulary is not None and whole.shape:
        rows = max(whole.shape[0], rows or 0)
        whole = _padded(whole, rows if rule.how != "sharded" else -(-rows // ranks) * ranks)
    if rule.how in ("replicated", "averaged", "first"):
        return [whole] * ranks
    if rule.how == "blocks":
        if rule.shape != whole.shape or len(rule.blocks) != ranks:
            raise BadRules(f"tensor `{name}`: its rule is for {len(rule.blocks)} ranks and shape {rule.shape}")
        return [_shard(whole, blocks) for blocks in rule.blocks]
    if not 0 <= rule.axis < len(whole.shape):
        raise BadRules(f"tensor `{name}` of shape {list(whole.shape)} has no axis {rule.axis} to cut along")
    length = whole.shape[rule.axis]
    # Widths are those of one number of ranks; over another, the same pieces are divided evenly.
    fused = tuple(sum(row) for row in rule.widths) or rule.fused
    pieces = [length // fused] * fused if isinstance(fused, int) else list(fused)
    given = rule.widths and len(rule.widths[0]) == ranks
    table = [list(row) for row in rule.widths] if given else [[piece // ranks] * ranks for piece in pieces]
    if sum(pieces) != length or [sum(row) for row in table] != pieces:
        raise BadRules(
            f"tensor `{name}`: axis {rule.axis} of length {length} ({rule}) does not divide over {ranks} ranks"
        )
    return [_shard(whole, tuple(place(whole.shape, rule.axis, table, rank))) for rank in range(ranks)]


def lengths(name: str, rule: Rule, local: Sequence[int]) -> list[list[int]]:
    """How long each fused piece is on each rank, given the length of each rank's shard along the axis."""
    ranks = len(local)
    if rule.widths:
        table = [list(widths) for widths in rule.widths]
    elif isinstance(rule.fused, int):
        if any(n % rule.fused for n in local):
            raise BadRules(f"tensor `{name}`: a shard of length {list(local)} cannot hold {rule.fused} equal pieces")
        table = [[n // rule.fused for n in local] for _ in range(rule.fused)]
    else:
        if any(n % ranks for n in rule.fused):
            raise BadRules(f"tensor `{name}`: pieces of length {list(rule.fused)} do not divide over {ranks} ranks")
        table = [[n // ranks] * ranks for n in rule.fused]
    if any(len(row) != ranks for row in table) or [sum(column) for column in zip(*table, strict=True)] != list(local):
        raise BadRules(
            f"tensor `{name}`: shards of length {list(local)} along axis {rule.axis} contradict its rule ({rule})"
        )
    return table


def place(shape: Shape, axis: int, table: Sequence[Sequence[int]], rank: int) -> Iterator[Placed]:
    """The blocks of one rank's shard, for pieces of the lengths `table[piece][rank]` along `axis`."""
    at, glued = 0, 0
    for row in table:
        length, low = row[rank], glued + sum(row[:rank])
        if length:
            local_shape = (*shape[:axis], sum(r[rank] for r in table), *shape[axis + 1 :])
            yield Placed(slab(local_shape, axis, at, at + length), slab(shape, axis, low, low + length))
        at, glued = at + length, glued + sum(row)


def _blocks_of(name: str, shapes: Sequence[Shape], rule: Rule) -> tuple[Shape, list[tuple[Placed, ...]]]:
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


def _shard(whole: Tensor, blocks: Sequence[Placed]) -> Tensor:
    shape = tuple(max((p.local.stop[axis] for p in blocks), default=0) for axis in range(len(whole.shape)))
    return join(shape, (Fragment(p.local, whole.crop(p.whole)) for p in blocks), whole.dtype)


def _padded(whole: Tensor, rows: int) -> Tensor:
    padding = slab((rows, *whole.shape[1:]), 0, whole.shape[0], rows)
    parts = (Fragment(Box.whole(whole.shape), whole), Fragment(padding, Zeros(padding.shape, whole.dtype)))
    return join((rows, *whole.shape[1:]), parts, whole.dtype)


def _moved(shards: Sequence[Tensor], blocks: Sequence[Sequence[Placed]]) -> Iterator[Fragment]:
    for shard, placed in zip(shards, blocks, strict=True):
        for p in placed:
            yield from shard.placed(p.local, p.whole)
