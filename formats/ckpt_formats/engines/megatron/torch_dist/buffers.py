"""Flat buffers of a `torch_dist` checkpoint: which rank's they are, and the parameters in them.

Megatron itself can load them only at the same degrees of tensor and pipeline
parallelism. Here the model's tensors, the rules and the layout of stages say what each
rank had; the rest is as in `distrib_optim.pt`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_formats.core.errors import Corrupt, Incomplete, Unsupported
from ckpt_formats.core.layout import Layout, split
from ckpt_formats.core.tensor import Tensor, ZeroBlob, with_replicas
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.shared.arguments import Arguments, Parallel
from ckpt_formats.engines.megatron.shared.distributed_optimizer import (
    Buffer,
    buckets_of,
    buffers_of,
    is_tied,
    read_buffers,
)
from ckpt_formats.engines.megatron.shared.merge import LocalCopy, whole
from ckpt_formats.engines.megatron.shared.model_chunk import ModelChunk
from ckpt_formats.engines.megatron.shared.module_order import ModuleOrder
from ckpt_formats.engines.megatron.shared.names import HEAD, WORD_TABLE, expert_of, is_buffer, is_expert, layer_of
from ckpt_formats.engines.megatron.shared.optimizer_states import Key
from ckpt_formats.engines.megatron.shared.stages import Stages
from ckpt_formats.engines.megatron.torch_dist.optimizer import Group, SplitItems


@dataclass(frozen=True)
class BufferedModel:
    """What is known of the model whose optimizer is in the buffers."""

    args: Arguments
    parallel: Parallel
    stages: Stages
    layout: Layout
    weights: Mapping[str, Tensor]

    @property
    def tied_copy(self) -> bool:
        """Has the last stage a copy of the table that the checkpoint does not store?"""
        return is_tied(self.args) and self.parallel.pp > 1 and WORD_TABLE in self.weights and HEAD not in self.weights


@dataclass(frozen=True)
class ReplicaGroup:
    """A group of ranks with the same parameters: those that share their optimizer."""

    chain: int
    index: int
    """Among the groups, as keys have it."""
    pp: int
    cut: int
    """Among those that cut a tensor: the tensor-parallel rank, or that within an expert."""
    ep: int = 0


def states_of(model: BufferedModel, found: SplitItems) -> dict[str, dict[str, Tensor]]:
    """States of all parameters, whole, by name."""
    groups: dict[Group, object] = {**found.buckets, **{g: o for g, o in found.objects.items() if "param_state" in o}}
    apart = any(chain for chain, _ in groups)
    held: dict[str, dict[int, LocalCopy]] = {}
    copied: dict[int, LocalCopy] = {}
    for rank in _ranks(model.parallel, apart):
        group = (rank.chain, rank.index)
        if group not in groups:
            raise Incomplete(f"the optimizer's buffers of rank group {rank.index} are missing", where=model.args.where)
        chunks = [_chunk(model, rank, v, apart) for v in range(model.stages.chunks)]
        for (_, name), states in _read(model, rank, chunks, found, apart).items():
            target = copied if name == HEAD and model.tied_copy else held.setdefault(name, {})
            target[rank.cut] = LocalCopy(states)
    if odd := sorted(groups.keys() - {(rank.chain, rank.index) for rank in _ranks(model.parallel, apart)}):
        raise Corrupt(
            f"the optimizer has buffers of rank group {odd[0][1]}, but the arguments state tp {model.parallel.tp}, "
            f"pp {model.parallel.pp}, ep {model.parallel.ep}",
            where=model.args.where,
            hint="Files of several iterations or runs were mixed: copy all files of one iteration again.",
        )
    made = {name: _whole(name, shards, model.layout) for name, shards in held.items()}
    if copied:
        copy = _whole(WORD_TABLE, copied, model.layout)
        made[WORD_TABLE] = {state: with_replicas([one, copy[state]]) for state, one in made[WORD_TABLE].items()}
    return made


def _whole(name: str, shards: Mapping[int, LocalCopy], layout: Layout) -> dict[str, Tensor]:
    return dict(whole(name, [shards[i] for i in sorted(shards)], layout).states)


def _ranks(parallel: Parallel, apart: bool) -> Iterator[ReplicaGroup]:
    """The groups, as Megatron counts them: by tp first, then by stage; experts' by etp, ep, then by stage."""
    for pp in range(parallel.pp):
        for tp in range(parallel.tp):
            yield ReplicaGroup(0, pp * parallel.tp + tp, pp, tp)
    if apart:
        for pp in range(parallel.pp):
            for ep in range(parallel.ep):
                for etp in range(parallel.etp):
                    yield ReplicaGroup(1, (pp * parallel.ep + ep) * parallel.etp + etp, pp, etp, ep)


def _chunk(model: BufferedModel, rank: ReplicaGroup, chunk: int, apart: bool) -> ModelChunk:
    """What a rank holds of one model chunk, in its local shapes. No values: only shapes and types count."""
    layers = model.stages.layers(rank.pp, chunk)
    first = rank.pp == 0 and chunk == 0
    last = rank.pp == model.parallel.pp - 1 and chunk == model.stages.chunks - 1
    experts = model.args.number("num_experts", default=0) // model.parallel.ep
    own = range(rank.ep * experts, (rank.ep + 1) * experts)
    names = [n for n in model.weights if not is_buffer(n) and _is_here(n, layers, first, last)]
    if apart:
        names = [n for n in names if is_expert(n) == bool(rank.chain) and (not rank.chain or expert_of(n) in own)]
    if last and model.tied_copy:
        names.append(HEAD)
    fused = model.args.text("transformer_impl") not in ("local", None) and not model.args.flag("multi_latent_attention")
    modules = ModuleOrder(fused, model.args.flag("moe_grouped_gemm"))
    return ModelChunk({name: _local(model, name, rank.cut) for name in modules.ordered(names)}, {})


def _is_here(name: str, layers: range, first: bool, last: bool) -> bool:
    layer = layer_of(name)
    if layer is not None:
        return layer in layers
    if name.startswith("mtp."):
        raise Unsupported("the optimizer's states have no names, and the model predicts several tokens (mtp)")
    return first if name.startswith("embedding.") else last


def _local(model: BufferedModel, name: str, cut: int) -> Tensor:
    weight = model.weights[WORD_TABLE if name == HEAD and model.tied_copy else name]
    degree = model.parallel.etp if is_expert(name) else model.parallel.tp
    nothing = Tensor.of(ZeroBlob(weight.shape, weight.dtype))
    if degree == 1:
        return nothing
    return split(name, nothing, model.layout.rule(name), degree, weight.shape[0])[cut]


def _read(
    model: BufferedModel, rank: ReplicaGroup, chunks: Sequence[ModelChunk], found: SplitItems, apart: bool
) -> dict[Key, dict[str, Tensor]]:
    group = (rank.chain, rank.index)
    dp = model.parallel.expert_dp if rank.chain else model.parallel.dp
    buckets = buckets_of(model.args, model.parallel, rank.pp, dp, sum(chunk.numel for chunk in chunks))
    buffers: list[Buffer] = buffers_of(chunks, buckets.tied, None)
    if group not in found.buckets:
        return read_buffers(found.objects[group]["param_state"], buffers, buckets, model.args.where)
    saved: dict[Value, Value] = {}
    for number, states in found.buckets[group].items():
        lists = {state: [parts[i] for i in sorted(parts)] for state, parts in states.items()}
        if any(sorted(parts) != list(range(len(parts))) for parts in states.values()):
            raise Corrupt(f"a bucket of buffer {number} of rank group {rank.index} is missing", where=model.args.where)
        saved[number] = {"": lists}
    return read_buffers(saved, buffers, buckets, model.args.where)
