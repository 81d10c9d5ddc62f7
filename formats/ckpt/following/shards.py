"""Follow for one tensor-parallel rank: its shards of the tensors, and the chunks that have values of them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from ckpt.following.source import PublishedSource
from ckpt.following.state import State, StateChunk, StateLayout, chunks_of
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import InvalidArgumentError, RulesError
from ckpt_formats.core.folders import CONFIG
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.layout import Layout, Rule, ShardBlock, shard_blocks
from ckpt_formats.core.rules import rule_set
from ckpt_formats.core.tensor import Array
from ckpt_formats.universal.published.model import PublishedModel, PublishedTensor
from ckpt_formats.universal.published.records import StepRecord

_SHIPPED = "hf-llama"
"""The rules for the names of Hugging Face, after those of the user."""
_HEADS = (("q_proj", ("num_attention_heads",)), ("[kv]_proj", ("num_key_value_heads", "num_attention_heads")))
"""Which entries of a configuration have the number of heads of a tensor: the first that is there."""


@dataclass(frozen=True)
class TensorParallelRank:
    """Whose shards are followed: the rank, of how many, and the rules by which tensors are split."""

    ranks: int
    rank: int
    rules: tuple[Rule, ...] = ()
    """Those of the user, which apply before the shipped ones."""

    def __post_init__(self) -> None:
        if self.rank >= self.ranks:
            raise InvalidArgumentError(
                f"rank {self.rank} does not exist: there are {self.ranks} ranks", hint="They begin with 0."
            )

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.ranks}"

    def layout_of(self, source: PublishedSource, record: StepRecord) -> StateLayout:
        """What the rank has of the model of a step. Raises as `layout`, and as `PublishedSource.model`."""
        model = source.model(record)
        config = source.file(record, CONFIG) if self.ranks > 1 else None
        return self.layout(model, config)

    def layout(self, model: PublishedModel, config: bytes | None = None) -> StateLayout:
        """What the rank has of a model. `config`: the content of the model's `config.json`, if it has one.

        Raises `RulesError` if no rule matches a tensor, or a tensor or its heads do not divide.
        """
        if self.ranks == 1:
            return StateLayout(model)
        layout = Layout((*self.rules, *rule_set(_SHIPPED)))
        heads = _heads(config)
        shards = list[tuple[Shape, tuple[ShardBlock, ...]]]()
        for tensor in model.tensors:
            rule = layout.rule(tensor.name)
            if rule.origin.startswith(f"set {_SHIPPED}"):
                _check_heads(tensor.name, heads, self.ranks)
            shards.append(shard_blocks(tensor.name, tensor.shape, rule, self.ranks, self.rank))
        return ShardLayout(model, shards)


ALL_RANKS = TensorParallelRank(1, 0)
"""Whole tensors."""


class ShardLayout(StateLayout):
    """The shards of one rank. Its state has an array for each chunk that has values of them.

    A change is coded against all values of its chunk, so the state has whole chunks, also those that lie only partly in
    a shard: tensors that are split along another axis than the first.
    """

    def __init__(self, model: PublishedModel, shards: Sequence[tuple[Shape, tuple[ShardBlock, ...]]]) -> None:
        """`shards`: the shape and the blocks of each tensor."""
        super().__init__(model)
        self._blocks = [blocks for _, blocks in shards]
        self.tensors = tuple(
            PublishedTensor(tensor.name, tensor.dtype, shape)
            for tensor, (shape, _) in zip(model.tensors, shards, strict=True)
        )

    @cached_property
    def _chunks(self) -> Sequence[Sequence[StateChunk]]:
        numbers, result = 0, list[tuple[StateChunk, ...]]()
        for rank in range(len(self.model.pieces)):
            own = list[StateChunk]()
            for one in chunks_of(self.model, rank):
                if self._touches(one):
                    own.append(StateChunk(one.number, one.piece, one.start, one.stop, numbers))
                    numbers += 1
            result.append(tuple(own))
        return result

    def _touches(self, chunk: StateChunk) -> bool:
        blocks = self._blocks[chunk.tensor]
        return any(box & block.full is not None for box in chunk.boxes() for block in blocks)

    @cached_property
    def _of_tensor(self) -> list[list[StateChunk]]:
        result: list[list[StateChunk]] = [[] for _ in self.tensors]
        for one in chain.from_iterable(self._chunks):
            result[one.tensor].append(one)
        return result

    def arrays(self) -> Iterator[tuple[int, DType]]:
        for one in chain.from_iterable(self._chunks):
            yield one.size, self.model.tensors[one.tensor].dtype

    def can_continue(self, other: StateLayout) -> bool:
        return self.model.pieces == other.model.pieces and self.model.tensors == other.model.tensors

    def in_order(self, state: State, other: StateLayout) -> State:
        return state

    def values(self, number: int, state: State) -> Array:
        """A shard, (shape) of its dtype, put together. Padding is zero."""
        shard = np.zeros(self.tensors[number].shape, self.tensors[number].dtype)
        self.put_shard(number, state, shard)
        return shard

    def put_shard(self, number: int, state: State, out: Array) -> None:
        """Write the values of a shard, without its padding, into `out`, (shape) of its dtype."""
        for chunk in self._of_tensor[number]:
            values, at = chunk.values(state), 0
            for box in chunk.boxes():
                own = values[at : at + box.size].reshape(box.shape)
                at += box.size
                for block in self._blocks[number]:
                    common = box & block.full
                    if common is not None:
                        target = common.within(block.full).shift(block.shard.start)
                        out[target.index] = own[common.within(box).index]

    def indices(self, chunk: StateChunk, positions: Array | None) -> tuple[Array, Array | None]:
        positions = np.arange(chunk.size) if positions is None else positions
        axes, shape = chunk.coordinates(positions), self.tensors[chunk.tensor].shape
        indices, chosen = list[Array](), list[Array]()
        for block in self._blocks[chunk.tensor]:
            inside = np.ones(len(positions), bool)
            for axis, low, high in zip(axes, block.full.start, block.full.stop, strict=True):
                inside &= (axis >= low) & (axis < high)
            which = np.flatnonzero(inside)
            by = tuple(b - a for a, b in zip(block.full.start, block.shard.start, strict=True))
            own = tuple(axis[which] + shift for axis, shift in zip(axes, by, strict=True))
            flat = np.ravel_multi_index(own, shape) if shape else np.zeros(len(which), np.int64)
            indices.append(np.asarray(flat, np.int64))
            chosen.append(which)
        return _joined(indices), _joined(chosen)


def _joined(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _heads(config: bytes | None) -> dict[str, int]:
    """The numbers of heads in a configuration, as far as it states them."""
    if config is None:
        return {}
    try:
        fields: Any = json.loads(config)
    except (ValueError, RecursionError):
        return {}
    names = {name for _, entries in _HEADS for name in entries}
    return {name: fields[name] for name in names if isinstance(fields, dict) and isinstance(fields.get(name), int)}


def _check_heads(name: str, heads: dict[str, int], ranks: int) -> None:
    """Raise `RulesError` if a rank would get a part of a head."""
    for projection, entries in _HEADS:
        stated = next((heads[one] for one in entries if one in heads), None)
        if stated is not None and stated % ranks and Rule(rf".*\.{projection}\.(?:weight|bias)").matches(name):
            raise RulesError(
                f"tensor `{name}`: its {stated} heads do not divide over {ranks} ranks",
                where=CONFIG,
                hint="Choose a degree that divides them, or say with --rules FILE how the tensor is split.",
            )
