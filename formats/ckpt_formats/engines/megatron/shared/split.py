"""Split a model into the ranks' parameters, under local names: the inverse of `merge` and `names`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.layout import split
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.shared.names import expert_of, in_expert, in_layer, is_expert, layer_of
from ckpt_formats.engines.megatron.shared.write_layout import WriteLayout, without_padding


@dataclass(frozen=True)
class RankCoords:
    """The coordinates of a rank: its number in each parallel group."""

    tp: int
    pp: int
    ep: int = 0
    etp: int = 0


@dataclass(frozen=True)
class LocalParameter:
    """A rank's shard of a parameter."""

    name: str
    """The name in the full model. A tied copy on the last stage has the head's name."""
    local: str
    """The name in its model chunk."""
    model_parameter: Parameter
    """The parameter of the full model."""
    states: Mapping[str, Tensor]

    @property
    def values(self) -> Mapping[str, Value]:
        return self.model_parameter.values


@dataclass(frozen=True)
class RankShards:
    """The parameters of each rank of a target. Shards are computed once for all ranks; no data is read."""

    target: WriteLayout

    def chunks(self, place: RankCoords) -> list[list[LocalParameter]]:
        """The parameters of each model chunk of a rank, in the order of its module."""
        return [self._chunk(place, chunk) for chunk in range(self.target.stages.chunks)]

    def _chunk(self, place: RankCoords, chunk: int) -> list[LocalParameter]:
        target = self.target
        layers = target.stages.layers(place.pp, chunk)
        own = range(place.ep * target.experts, (place.ep + 1) * target.experts)
        last = place.pp == target.parallel.pp - 1 and chunk == target.stages.chunks - 1
        names = [n for n in self._by_chunk[(place.pp, chunk)] if not is_expert(n) or expert_of(n) in own]
        parameters = [LocalParameter(n, local_name(n, layers.start, own.start), *self._shard(n, place)) for n in names]
        if last and target.parallel.pp > 1 and target.shared_table is not None:
            head, table = target.shared_table
            copy = LocalParameter(head, head, *self._shard(table, place))
            parameters.insert(0 if _is_first(head) else len(parameters), copy)
        return parameters

    def _shard(self, name: str, place: RankCoords) -> tuple[Parameter, dict[str, Tensor]]:
        rank = place.etp if is_expert(name) else place.tp
        return self.target.source.parameters[name], {s: shards[rank] for s, shards in self.shards[name].items()}

    @cached_property
    def shards(self) -> dict[str, dict[str, list[Tensor]]]:
        """The shards of each state, by parameter and state, in the order of the tensor-parallel ranks."""
        return {name: self._cut(parameter) for name, parameter in self._parameters.items()}

    def _cut(self, parameter: Parameter) -> dict[str, list[Tensor]]:
        target, name, shape = self.target, parameter.name, parameter.weight.shape
        degree = target.parallel.etp if is_expert(name) else target.parallel.tp
        known = bool(target.layout.matching(name))
        rule = target.layout.rule(name) if known or degree > 1 else None
        shards = {}
        for state, tensor in parameter.states.items():
            if rule is None or tensor.shape != shape:
                shards[state] = [tensor] * degree
                continue
            shards[state] = split(name, without_padding(target, name, tensor), rule, degree, target.rows)
        return shards

    @cached_property
    def _parameters(self) -> dict[str, Parameter]:
        return {name: p for name, p in self.target.source.parameters.items() if p.role != "extra"}

    @cached_property
    def _by_chunk(self) -> dict[tuple[int, int], list[str]]:
        """The names in each (stage, chunk), in the order of the module."""
        target = self.target
        names_by_chunk: dict[tuple[int, int], list[str]] = {
            (pp, v): [] for pp in range(target.parallel.pp) for v in range(target.stages.chunks)
        }
        of_layer = {layer: place for place in names_by_chunk for layer in target.stages.layers(*place)}
        for name in self._parameters:
            layer = layer_of(name)
            names_by_chunk[home(target, name) if layer is None else of_layer[layer]].append(name)
        return {place: _ordered(target, names) for place, names in names_by_chunk.items()}


def home(target: WriteLayout, name: str) -> tuple[int, int]:
    """The (stage, chunk) of a parameter that is not in a layer."""
    return (0, 0) if _is_first(name) else (target.parallel.pp - 1, target.stages.chunks - 1)


def _is_first(name: str) -> bool:
    return name.removeprefix("language_model.").startswith("embedding.")


def _ordered(target: WriteLayout, names: list[str]) -> list[str]:
    """The names in the order in which Megatron's modules register them.

    If that is not known, a source in the legacy layout gives the order within a layer.
    """
    try:
        return target.modules.ordered(names)
    except UnsupportedError:
        if target.source.origin.layout.get("container") != "torch":
            raise
        return sorted(names, key=_by_layer)


def _by_layer(name: str) -> tuple[int, int]:
    layer = layer_of(name)
    if layer is not None:
        return 1, layer
    return (0 if _is_first(name) else 2), 0


def local_name(name: str, first_layer: int, first_expert: int) -> str:
    """The local name for a name of the full model: with the numbers of layer and expert on their rank.

    >>> local_name("decoder.layers.12.mlp.experts.local_experts.5.linear_fc1.weight", 12, 4)
    'decoder.layers.0.mlp.experts.local_experts.1.linear_fc1.weight'
    """
    layer = layer_of(name)
    if layer is not None:
        name = in_layer(name, layer - first_layer)
    expert = expert_of(name)
    return name if expert is None else in_expert(name, expert - first_expert)
