"""Write the tensors of a `torch_dist` checkpoint: the key of each, and the blocks that each rank writes.

    model                      <key>
    plain optimizer            optimizer.state.{fp32_param,exp_avg,exp_avg_sq,...}.<key>
    distributed optimizer      optimizer.state.{param,exp_avg,exp_avg_sq}.<key>     (`fully_reshardable`)

Some tensors are stored in parts, each under its own key.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from ckpt_formats.core.checkpoint import MASTER, MODEL, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box, slab
from ckpt_formats.core.layout import Rule, cuts, split
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.views import LayersBlob
from ckpt_formats.engines.dcp.entries import Entry
from ckpt_formats.engines.megatron.shared.arguments import Parallel
from ckpt_formats.engines.megatron.shared.names import expert_of, is_expert, layer_of
from ckpt_formats.engines.megatron.shared.split import LocalParameter, RankCoords, home
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout, is_padded, without_padding
from ckpt_formats.engines.megatron.shared.write_optimizer import WrittenOptimizer, computed_weight
from ckpt_formats.engines.megatron.torch_dist.keys import Key, Keys

_PART_NAMES = {
    r".*\.mixer\.in_proj\.weight": ("z", "x", "B", "C", "dt"),
    r".*\.mixer\.conv1d\.(?:weight|bias)": ("x", "B", "C"),
    r".*\.self_attention\.in_proj\.weight": ("query", "key", "value", "z", "beta", "alpha"),
    r".*\.self_attention\.conv1d\.(?:weight|bias)": ("query", "key", "value"),
}
_FLOAT = DTYPES["float32"]


@dataclass(frozen=True)
class KeyedShards:
    """A full tensor, its key, and the blocks that each rank writes, in the order of the ranks that split it."""

    key: Key
    tensor: Tensor
    blocks: tuple[tuple[Box, ...], ...]


@dataclass
class _Stack:
    """The stack of a key: the tensor at each place."""

    key: Key
    tensors: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @cached_property
    def tensor(self) -> Tensor:
        """The stacked tensor. Raises `UnsupportedError` if layers have different shapes or dtypes."""
        first = next(iter(self.tensors.values()))
        if odd := next((t for t in self.tensors.values() if (t.shape, t.dtype) != (first.shape, first.dtype)), None):
            raise UnsupportedError(
                f"`{printable(self.key.text)}` is {first.dtype.name} {list(first.shape)} in one layer, "
                f"{odd.dtype.name} {list(odd.shape)} in another: Megatron could not stack them"
            )
        return Tensor.of(LayersBlob(self.key.lengths, self.tensors)) if self.key.lengths else first


@dataclass(frozen=True)
class KeyedTensors:
    """All tensors of a target."""

    target: WriteLayout
    keys: Keys
    optimizer: WrittenOptimizer | None

    def entries(self) -> Iterator[tuple[RankCoords, Parameter, Entry]]:
        """Every block as (the rank that writes it, its parameter, its entry)."""
        stacks: dict[str, _Stack] = {}
        keyed: list[tuple[str, Parameter, KeyedShards]] = []
        for parameter in self.target.source.parameters.values():
            if parameter.role == "extra":
                continue
            for prefix, tensor in self._states(parameter):
                for shards in self._shards(parameter.name, tensor):
                    text = f"{prefix}{shards.key.text}"
                    stacks.setdefault(text, _Stack(shards.key)).tensors[shards.key.place] = shards.tensor
                    keyed.append((text, parameter, shards))
        chunks = dict.fromkeys(stacks, 0)
        numbers = {text: number for number, text in enumerate(stacks)}
        for text, parameter, shards in keyed:
            tensor, place = stacks[text].tensor, shards.key.place
            for rank, boxes in enumerate(shards.blocks):
                writer = self.writer(parameter.name, rank)
                for box in boxes:
                    at = Box((*place, *box.start), (*(i + 1 for i in place), *box.stop))
                    yield writer, parameter, Entry(text, (text,), numbers[text], tensor, at, chunks[text])
                    chunks[text] += 1

    def _states(self, parameter: Parameter) -> Iterator[tuple[str, Tensor]]:
        """The tensors to store for a parameter, each with the prefix of its key."""
        yield "", self._weight(parameter)
        if self.optimizer is None or parameter.name not in self.optimizer.trained:
            return
        distributed, weight = self.target.distributed, parameter.weight
        if distributed:
            yield "optimizer.state.param.", parameter.states.get(MASTER, weight)
        elif weight.dtype != _FLOAT:
            yield "optimizer.state.fp32_param.", parameter.states[MASTER]
        for state, tensor in parameter.states.items():
            if state not in (MODEL, MASTER, "step"):
                yield f"optimizer.state.{to_stored(state)}.", tensor

    def _weight(self, parameter: Parameter) -> Tensor:
        plain = self.optimizer is not None and not self.target.distributed
        return computed_weight(LocalParameter(parameter.name, parameter.name, parameter, parameter.states), plain=plain)

    def _shards(self, name: str, tensor: Tensor) -> Iterator[KeyedShards]:
        target = self.target
        degree = target.parallel.etp if is_expert(name) else target.parallel.tp
        rule = target.layout.rule(name) if target.layout.matching(name) or degree > 1 else Rule(".*", "replicated")
        key, tensor = self.keys.of(name), _padded(target, name, tensor, rule, degree)
        blocks = [tuple(placed.full for placed in boxes) for boxes in cuts(name, tensor.shape, rule, degree)]
        if rule.how not in ("sharded", "blocks"):
            blocks = blocks[:1]  # all ranks have the same tensor: the first rank writes it
        names = next((names for pattern, names in _PART_NAMES.items() if re.fullmatch(pattern, name)), None)
        if names is None:
            yield KeyedShards(key, tensor, tuple(blocks))
            return
        if not isinstance(rule.fused, tuple) or len(rule.fused) != len(names):
            raise UnsupportedError(
                f"`{printable(name)}` is stored in the parts {', '.join(names)}, but its rule is: {rule}"
            )
        lengths = [int(length) for length in rule.fused]
        for part, length, at in zip(names, lengths, accumulate(lengths, initial=0), strict=False):
            within = slab(tensor.shape, rule.axis, at, at + length)
            part_blocks = (
                tuple(common.within(within) for box in boxes if (common := box & within)) for boxes in blocks
            )
            yield KeyedShards(replace(key, text=f"{key.text}.{part}"), tensor.crop(within), tuple(part_blocks))

    def writer(self, name: str, rank: int = 0) -> RankCoords:
        """The rank that writes shard `rank` of a parameter: the first of those that have it."""
        parallel, expert = self.target.parallel, expert_of(name)
        first = 0 if expert is None else expert // self.target.experts * parallel.etp
        return place_of(parallel, self.stage_of(name), first + rank)

    def stage_of(self, name: str) -> int:
        """The pipeline stage of a parameter, or of a module's extra state."""
        layer = layer_of(name)
        return home(self.target, name)[0] if layer is None else self._stages[layer]

    @cached_property
    def _stages(self) -> Mapping[int, int]:
        stages = self.target.stages
        return {
            layer: pp for pp in range(stages.pp) for chunk in range(stages.chunks) for layer in stages.layers(pp, chunk)
        }


def place_of(parallel: Parallel, pp: int, within: int) -> RankCoords:
    """The coordinates of rank number `within` in a stage, where tensor-parallel ranks are counted first."""
    return RankCoords(within % parallel.tp, pp, within // parallel.etp, within % parallel.etp)


def _padded(target: WriteLayout, name: str, tensor: Tensor, rule: Rule, degree: int) -> Tensor:
    """A table of the vocabulary with the number of rows of the new run; any other tensor unchanged."""
    if not is_padded(target, name):
        return tensor
    tensor = without_padding(target, name, tensor)
    rows = -(-max(tensor.shape[0], target.rows or 0) // degree) * degree
    (padded,) = split(name, tensor, rule, 1, rows)
    return padded
