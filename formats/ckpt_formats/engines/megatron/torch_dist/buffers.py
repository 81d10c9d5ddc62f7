"""Read the flat buffers of a `torch_dist` checkpoint: find the rank of each buffer, and the parameters in it.

Megatron itself can load them only at the same degrees of tensor and pipeline parallelism. Here the parameters of each
rank are computed from the model's tensors, the layout rules and the stages. The rest is as in `distrib_optim.pt`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.layout import Layout, split
from ckpt_formats.core.tensor import Tensor, ZeroBlob, with_replicas
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.shared.arguments import Arguments, Parallel, has_mtp
from ckpt_formats.engines.megatron.shared.distributed_optimizer import (
    Buffer,
    buckets_of,
    buffers_of,
    is_tied,
    read_buffers,
)
from ckpt_formats.engines.megatron.shared.merge import LocalCopy, merge_shards
from ckpt_formats.engines.megatron.shared.model_chunk import ModelChunk
from ckpt_formats.engines.megatron.shared.module_order import ModuleOrder
from ckpt_formats.engines.megatron.shared.names import HEAD, WORD_TABLE, expert_of, is_buffer, is_expert, layer_of
from ckpt_formats.engines.megatron.shared.optimizer_states import Key
from ckpt_formats.engines.megatron.shared.stages import Stages
from ckpt_formats.engines.megatron.torch_dist.optimizer import Group, SplitItems


@dataclass(frozen=True)
class BufferedModel:
    """The model whose optimizer states are in the buffers."""

    args: Arguments
    parallel: Parallel
    stages: Stages
    layout: Layout
    weights: Mapping[str, Tensor]

    @property
    def copy_name(self) -> str | None:
        """The last stage's name of its copy of the word table, which the checkpoint does not store; None: no copy."""
        if self.parallel.pp == 1 or WORD_TABLE not in self.weights:
            return None
        if has_mtp(self.args):
            return WORD_TABLE
        return HEAD if is_tied(self.args) and HEAD not in self.weights else None


@dataclass(frozen=True)
class ReplicaGroup:
    """A group of ranks with the same parameters, which share the optimizer states of these."""

    chain: int
    """The number of the optimizer: 0, or 1 for the experts' own."""
    index: int
    """The number of the group, as in the checkpoint's keys."""
    pp: int
    shard: int
    """The number of the shard: the tensor-parallel rank, or the expert-tensor-parallel rank."""
    ep: int = 0


def states_of(model: BufferedModel, items: SplitItems) -> dict[str, dict[str, Tensor]]:
    """The full states of all parameters, by name.

    Raises: IncompleteError or CorruptError if buffers are missing or do not match the arguments, UnsupportedError if
    the order of the parameters in the buffers is not known.
    """
    groups: dict[Group, object] = {**items.buckets, **{g: o for g, o in items.objects.items() if "param_state" in o}}
    separate_experts = any(chain for chain, _ in groups)
    shards: dict[str, dict[int, LocalCopy]] = {}
    copied: dict[int, LocalCopy] = {}
    for rank in _ranks(model.parallel, separate_experts):
        group = (rank.chain, rank.index)
        if group not in groups:
            raise IncompleteError(
                f"the optimizer's buffers of rank group {rank.index} are missing", where=model.args.where
            )
        chunks = [model_chunk(model, rank, v, separate_experts) for v in range(model.stages.chunks)]
        for (_, name), rank_states in _read(model, rank, chunks, items, separate_experts).items():
            is_copy = name == model.copy_name and rank.pp == model.parallel.pp - 1
            target = copied if is_copy else shards.setdefault(name, {})
            target[rank.shard] = LocalCopy(rank_states)
    if odd := sorted(groups.keys() - {(rank.chain, rank.index) for rank in _ranks(model.parallel, separate_experts)}):
        raise CorruptError(
            f"the optimizer has buffers of rank group {odd[0][1]}, but the arguments state tp {model.parallel.tp}, "
            f"pp {model.parallel.pp}, ep {model.parallel.ep}",
            where=model.args.where,
            hint="Files of several iterations or runs were mixed: copy all files of one iteration again.",
        )
    states = {name: _merged_states(name, by_rank, model.layout) for name, by_rank in shards.items()}
    if copied:
        copy = _merged_states(WORD_TABLE, copied, model.layout)
        states[WORD_TABLE] = {
            state: with_replicas([tensor, copy[state]]) for state, tensor in states[WORD_TABLE].items()
        }
    return states


def _merged_states(name: str, shards: Mapping[int, LocalCopy], layout: Layout) -> dict[str, Tensor]:
    return dict(merge_shards(name, [shards[i] for i in sorted(shards)], layout).states)


def _ranks(parallel: Parallel, separate_experts: bool) -> Iterator[ReplicaGroup]:
    """The groups in Megatron's order: by tp, then by stage. If `separate_experts`, then the experts':
    by etp, ep, stage."""
    for pp in range(parallel.pp):
        for tp in range(parallel.tp):
            yield ReplicaGroup(0, pp * parallel.tp + tp, pp, tp)
    if separate_experts:
        for pp in range(parallel.pp):
            for ep in range(parallel.ep):
                for etp in range(parallel.etp):
                    yield ReplicaGroup(1, (pp * parallel.ep + ep) * parallel.etp + etp, pp, etp, ep)


def model_chunk(model: BufferedModel, rank: ReplicaGroup, chunk: int, separate_experts: bool) -> ModelChunk:
    """One model chunk of a rank, in local shapes. The values are zeros, because only shapes and dtypes are needed."""
    layers = model.stages.layers(rank.pp, chunk)
    first = rank.pp == 0 and chunk == 0
    last = rank.pp == model.parallel.pp - 1 and chunk == model.stages.chunks - 1
    experts = model.args.number("num_experts", default=0) // model.parallel.ep
    own = range(rank.ep * experts, (rank.ep + 1) * experts)
    names = [n for n in model.weights if not is_buffer(n) and _is_in_chunk(n, layers, first, last)]
    if separate_experts:
        names = [n for n in names if is_expert(n) == bool(rank.chain) and (not rank.chain or expert_of(n) in own)]
    if last and model.copy_name is not None and not rank.chain:
        names.append(model.copy_name)
    fused = model.args.text("transformer_impl") not in ("local", None)
    latent = model.args.flag("multi_latent_attention")
    modules = ModuleOrder(fused, model.args.flag("moe_grouped_gemm"), latent)
    return ModelChunk({name: _local(model, name, rank.shard) for name in modules.ordered(names)}, {})


def _is_in_chunk(name: str, layers: range, first: bool, last: bool) -> bool:
    layer = layer_of(name)
    if layer is not None:
        return layer in layers
    return first if name.startswith("embedding.") else last


def _local(model: BufferedModel, name: str, shard: int) -> Tensor:
    weight = model.weights[WORD_TABLE if name == model.copy_name else name]
    degree = model.parallel.etp if is_expert(name) else model.parallel.tp
    nothing = Tensor.of(ZeroBlob(weight.shape, weight.dtype))
    if degree == 1:
        return nothing
    return split(name, nothing, model.layout.rule(name), degree, weight.shape[0])[shard]


def _read(
    model: BufferedModel, rank: ReplicaGroup, chunks: Sequence[ModelChunk], items: SplitItems, separate_experts: bool
) -> dict[Key, dict[str, Tensor]]:
    group = (rank.chain, rank.index)
    dp = model.parallel.expert_dp if rank.chain else model.parallel.dp
    buckets = buckets_of(model.args, model.parallel, rank.pp, dp, sum(chunk.numel for chunk in chunks))
    buffers: list[Buffer] = buffers_of(chunks, buckets.shared, None)
    if group not in items.buckets:
        return read_buffers(items.objects[group]["param_state"], buffers, buckets, model.args.where)
    buckets_saved: dict[Value, Value] = {}
    for number, states in items.buckets[group].items():
        lists = {state: [parts[i] for i in sorted(parts)] for state, parts in states.items()}
        if any(sorted(parts) != list(range(len(parts))) for parts in states.values()):
            raise CorruptError(
                f"a bucket of buffer {number} of rank group {rank.index} is missing", where=model.args.where
            )
        buckets_saved[number] = {"": lists}
    return read_buffers(buckets_saved, buffers, buckets, model.args.where)
