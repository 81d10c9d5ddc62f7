"""Runs of Megatron core, whose inner optimizers step float32 parameters: whole, or flat shards of them.

A tensor has the name and the place that ckpt gives it in Megatron's checkpoints. This module reads private fields of
Megatron core. It was checked with version 0.16: `core/optimizer/optimizer.py` and `distrib_optimizer.py`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from ckpt_formats.core.errors import CorruptError, RulesError, UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.layout import Layout, ShardBlock, lengths, place
from ckpt_formats.core.state_names import MODEL
from ckpt_formats.core.values import Global, Record
from ckpt_formats.engines.megatron.shared.arguments import Arguments, sizes_of
from ckpt_formats.engines.megatron.shared.names import HEAD, TIED, Naming, is_expert, layer_of
from ckpt_formats.engines.megatron.shared.rules import rules_for
from ckpt_training.engines.run import FlatTensor, TrackedRun, buffer_shards, clean_name, count_of, plain_run
from ckpt_training.local_shards import LocalPart, LocalShard, dtype_name, shard_of


def is_megatron(model: object, optimizer: object) -> bool:
    """Is the optimizer one of Megatron core, or several in a chain; or without one, is the model of Megatron core?"""
    if optimizer is not None:
        return any(one.__module__.startswith("megatron.core.optimizer") for one in type(optimizer).__mro__)
    inner = _inner_module(next(iter(model), None) if isinstance(model, (list, tuple)) else model)
    return any(one.__module__.startswith("megatron.core.transformer") for one in type(inner).__mro__)


def megatron_run(model: Any, optimizer: Any) -> TrackedRun:
    """The run of a model, or of a list of its chunks, with the optimizer of `get_megatron_optimizer`, or without any.

    Raises `UnsupportedError` if the optimizer steps no copies in float32, or if it is not known how a tensor is split.
    """
    chunks = [_inner_module(one) for one in (model if isinstance(model, (list, tuple)) else [model])]
    every = [] if optimizer is None else getattr(optimizer, "chained_optimizers", [optimizer])
    wrappers = [one for one in every if not _is_stub(one)]
    if optimizer is not None and not wrappers:
        raise UnsupportedError(
            "Megatron's optimizer steps no parameter on this rank",
            hint="Give each pipeline stage parameters that are not frozen.",
        )
    together = nn.ModuleList(chunks)
    names = _Names(tuple(chunks))
    parameters = {clean_name(name): parameter for name, parameter in together.named_parameters()}
    places = {
        id(parameter): _ParameterPlace(names.full(name), parameter, names.chunk_of(name))
        for name, parameter in parameters.items()
    }
    flat: dict[int, FlatTensor] = {}
    for wrapper in wrappers:
        for tensor, parameter, start, stop in _stepped_tensors(wrapper):
            one = places[id(parameter)]
            parts = tuple(one.parts(start, stop))
            flat[id(tensor)] = FlatTensor((), (), parts) if one.is_copy else FlatTensor((one.name,), parts)
    run = plain_run(together, [one.optimizer for one in wrappers], flat)
    frozen = {name: places[id(one)] for name, one in parameters.items() if not one.requires_grad}
    return replace(
        run,
        aliases={HEAD: TIED[HEAD]} if any(one.is_copy for one in places.values()) else {},
        calls_per_step=max(len(wrappers), 1),
        step=max((count_of(run, number) for number in range(len(run.tensors))), default=0),
        rename=names.full,
        frozen=lambda: ((name, one.gathered()) for name, one in frozen.items() if not one.is_copy),
        model_shards=lambda: _model_shards(together, list(places.values()), wrappers, names.full),
        refresh=lambda: _refresh(wrappers),
        notes=lambda: _scaler_notes(every),
        after_step=(optimizer, "step") if any(_dynamic_scaler(one) is not None for one in every) else None,
        set_notes=lambda notes: _set_scalers(every, notes),
        unstated_notes=lambda notes: _unstated_scalers(every, notes),
    )


def _model_shards(
    model: nn.Module, places: Sequence["_ParameterPlace"], wrappers: Sequence[Any], rename: Callable[[str], str]
) -> Iterator[LocalShard]:
    """This rank's parameters, frozen ones and the copy of a tied table included, and the buffers."""
    for chunk in _distributed_chunks(wrappers):
        for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
            if group.param_gather_handle is not None:  # what it gathers would overwrite what is written
                group.finish_param_sync(skip_next_bucket_dispatch=True)
    for one in places:
        values = one.parameter.detach()
        if type(values) is not torch.Tensor or not values.is_contiguous():
            raise UnsupportedError(
                f"`{one.name}` is a {type(values).__name__}, not a plain tensor", hint="Turn fp8 off."
            )
        for part in one.parts(0, values.numel()):
            yield shard_of(values, part, MODEL, "parameter" if one.parameter.requires_grad else "frozen")
    yield from buffer_shards(model, rename)


def _refresh(wrappers: Sequence[Any]) -> None:
    """Make the parameters from the masters, and gather those that other ranks step, as after a step."""
    with torch.no_grad():
        for wrapper in wrappers:
            if hasattr(wrapper, "_copy_main_params_to_model_params"):
                wrapper._copy_main_params_to_model_params()
        for chunk in _distributed_chunks(wrappers):
            chunk.start_param_sync(force_sync=True)


_ITEMS, _SCALER = "optimizer", "grad_scaler"
"""The extra with what Megatron's checkpoints have of an optimizer besides states and groups, and the scaler in it."""


def _dynamic_scaler(wrapper: Any) -> Any:
    """The loss scaler of an optimizer for fp16, if training changes it; else None."""
    scaler = getattr(wrapper, _SCALER, None)
    return scaler if scaler is not None and scaler.state_dict() else None


def _scaler_notes(wrappers: Sequence[Any]) -> dict[str, Any]:
    """The loss scalers as Megatron's checkpoints have them: of several optimizers in a list."""
    scalers = [_dynamic_scaler(one) for one in wrappers]
    items = [{} if one is None else {_SCALER: one.state_dict()} for one in scalers]
    return {_ITEMS: items[0] if len(items) == 1 else items} if any(items) else {}


def _stored_scalers(wrappers: Sequence[Any], notes: Mapping[str, Any]) -> Iterator[tuple[Any, dict[str, Any] | None]]:
    """Each dynamic loss scaler of the run with its stored state; None if the notes have none.

    If the run that was saved had more or fewer optimizers, all of them get the state of its first scaler.
    Raises `CorruptError` if a state is not one of Megatron's scalers.
    """
    scalers = [_dynamic_scaler(one) for one in wrappers]
    if not any(one is not None for one in scalers):
        return
    items = notes.get(_ITEMS)
    every = [one.get(_SCALER) if isinstance(one, Mapping) else None for one in _listed(items)]
    first = next((one for one in every if one), None)
    for number, scaler in enumerate(scalers):
        own = every[number] if len(every) == len(scalers) else None
        if scaler is not None:
            yield scaler, _checked_scaler(own or first)


def _listed(items: Any) -> Sequence[Any]:
    return items if isinstance(items, (list, tuple)) else [items]


def _checked_scaler(stored: Any) -> dict[str, Any] | None:
    if not stored:
        return None
    get = stored.get if isinstance(stored, Mapping) else lambda name: None
    scale, counts = get("scale"), {name: get(name) for name in ("growth_tracker", "hysteresis_tracker")}
    is_scale = (
        isinstance(scale, torch.Tensor)
        and scale.shape == (1,)
        and scale.dtype == torch.float32
        and 0 < float(scale) < float("inf")
    )
    if not is_scale or any(type(one) is not int for one in counts.values()):
        raise CorruptError(
            "the stored state of the loss scaler is not one of Megatron's",
            where=_ITEMS,
            hint="Load an earlier checkpoint.",
        )
    return {"scale": scale, **counts}


def _set_scalers(wrappers: Sequence[Any], notes: Mapping[str, Any]) -> Collection[str]:
    """Take the loss scalers, as Megatron's own load does. Returns the names of the notes that are taken whole."""
    states = [state for scaler, state in _stored_scalers(wrappers, notes) if state is not None]
    for scaler, state in _stored_scalers(wrappers, notes):
        if state is not None:
            scaler.load_state_dict(state)
    is_whole = states and all(isinstance(one, Mapping) and set(one) <= {_SCALER} for one in _listed(notes[_ITEMS]))
    return {_ITEMS} if is_whole else ()


def _unstated_scalers(wrappers: Sequence[Any], notes: Mapping[str, Any]) -> Collection[str]:
    return ["the loss scaler"] if any(state is None for _, state in _stored_scalers(wrappers, notes)) else []


def _distributed_chunks(wrappers: Sequence[Any]) -> Iterator[Any]:
    """Megatron's DDP of each chunk whose parameters are stepped by several ranks, each its own range of a bucket."""
    chunks = {id(chunk): chunk for wrapper in wrappers for chunk in getattr(wrapper, "model_chunks", ())}
    return (chunk for chunk in chunks.values() if chunk.ddp_config.use_distributed_optimizer)


def _inner_module(model: Any) -> nn.Module:
    """The model inside Megatron's wrappers: DDP, and Float16Module."""
    while isinstance(getattr(model, "module", None), nn.Module):
        model = model.module
    inner: nn.Module = model
    return inner


def _is_stub(wrapper: Any) -> bool:
    """Does it have nothing to step? Raises `UnsupportedError` if it does not step float32 copies."""
    if getattr(wrapper, "is_stub_optimizer", False) or wrapper.optimizer is None:
        return True
    config, inner = wrapper.config, wrapper.optimizer
    if getattr(getattr(wrapper, "ddp_config", None), "use_megatron_fsdp", False):
        reason, hint = "Megatron-FSDP", "Use the distributed optimizer, or FSDP2."
    elif getattr(config, "use_precision_aware_optimizer", False):
        reason, hint = "the precision-aware optimizer of Megatron", "Set use_precision_aware_optimizer=False."
    elif not isinstance(inner, torch.optim.Optimizer) or hasattr(inner, "sub_optimizers"):
        reason, hint = f"Megatron's {type(inner).__name__}", "Set optimizer_cpu_offload=False."
    else:
        return False
    raise UnsupportedError(f"{reason} cannot be recorded", hint=hint)


def _stepped_tensors(wrapper: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Each tensor of an inner optimizer, its parameter, and the range of that parameter's elements in it."""
    if hasattr(wrapper, "shard_fp32_from_float16_groups"):  # the distributed optimizer
        for models, shards in (
            (wrapper.model_fp32_groups, wrapper.shard_fp32_groups),
            (wrapper.model_float16_groups, wrapper.shard_fp32_from_float16_groups),
        ):
            for parameter, shard in _pairs(models, shards):
                elements = wrapper._get_model_param_range_map(parameter)["param"]
                yield shard, parameter, elements.start, elements.end
        return
    if hasattr(wrapper, "fp32_from_float16_groups"):
        for parameter, master in _pairs(wrapper.float16_groups, wrapper.fp32_from_float16_groups):
            yield master, parameter, 0, parameter.numel()
        for parameter, _ in _pairs(wrapper.fp32_from_fp32_groups, wrapper.fp32_from_fp32_groups):
            yield parameter, parameter, 0, parameter.numel()
        return
    for group in wrapper.optimizer.param_groups:
        yield from ((parameter, parameter, 0, parameter.numel()) for parameter in group["params"])


def _pairs(models: Any, tensors: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for group, own in zip(models, tensors, strict=True):
        yield from zip(group, own, strict=True)


@dataclass(frozen=True)
class _Names:
    """The names in the full model of the tensors of this rank's chunks, which begin with the number of the chunk."""

    chunks: tuple[Any, ...]

    def chunk_of(self, name: str) -> Any:
        return self.chunks[int(name.partition(".")[0])]

    def full(self, name: str) -> str:
        """The name in the full model. Raises `UnsupportedError` if a tensor has several experts."""
        number, _, local = name.partition(".")
        if not local:
            return name  # the list of the chunks itself
        full = self._naming[int(number)].plain(local)
        if full.endswith((".experts.weight1", ".experts.weight2")):
            raise UnsupportedError(
                f"`{local}` has the weights of several experts, which cannot be recorded",
                hint="Use SequentialMLP, or TEGroupedMLP (moe_use_legacy_grouped_gemm=False).",
            )
        return full

    @cached_property
    def _naming(self) -> list[Naming]:
        return [Naming(_first_layer(chunk), *_experts(chunk)) for chunk in self.chunks]


def _first_layer(chunk: Any) -> int:
    """The number in the full model of the first layer of a chunk."""
    for name, module in chunk.named_modules():
        if layer_of(f"{name}.weight") == 0 and hasattr(module, "layer_number"):
            return int(module.layer_number) - 1
    return 0


def _experts(chunk: Any) -> tuple[int, int]:
    """The number in the full model of this rank's first expert, and the number of its experts."""
    experts = chunk.config.num_moe_experts
    if not experts:
        return 0, 0
    from megatron.core import parallel_state

    own = experts // parallel_state.get_expert_model_parallel_world_size()
    return parallel_state.get_expert_model_parallel_rank() * own, own


@dataclass(frozen=True)
class _ParameterPlace:
    """A parameter of this rank, and its place in the full model."""

    stage_name: str
    """The name that it has in its stage, with the numbers of the full model's layers and experts."""
    parameter: torch.Tensor
    chunk: Any

    @property
    def is_copy(self) -> bool:
        """Is it the last stage's copy of a tied table, which the first stage records?"""
        return self.stage_name == HEAD and getattr(self.parameter, "shared", False)

    @property
    def name(self) -> str:
        """The name in the full model."""
        return TIED[HEAD] if self.is_copy else self.stage_name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    def parts(self, start: int, stop: int) -> Iterator[LocalPart]:
        """The parts in a vector with a range of this rank's elements. Raises `UnsupportedError`."""
        full, by_rank = self._blocks
        row = prod(self.shape[1:])
        for block in by_rank[self._group[0]]:
            if block.shard.shape[1:] != self.shape[1:]:
                raise UnsupportedError(
                    f"`{self.name}` is split along axis 1 in several parts, which cannot be recorded",
                    hint="Set tensor_model_parallel_size=1.",
                )
            first = block.shard.start[0] * row if block.shard.start else 0
            low, high = max(start, first), min(stop, first + block.shard.size)
            if low < high:
                yield LocalPart(
                    self.name,
                    full,
                    dtype_name(self.parameter.dtype),
                    block.full,
                    low - first,
                    high - first,
                    low - start,
                )

    def gathered(self) -> torch.Tensor:
        """The full tensor. Every rank of the group must call it."""
        full, by_rank = self._blocks
        if len(by_rank) == 1:
            return self.parameter.detach()
        shards = [torch.empty_like(self.parameter) for _ in by_rank]
        distributed.all_gather(shards, self.parameter.detach().contiguous(), group=self._group[2])
        gathered = self.parameter.new_empty(full)
        for shard, blocks in zip(shards, by_rank, strict=True):
            for block in blocks:
                gathered[block.full.index] = shard[block.shard.index]
        return gathered

    @cached_property
    def _group(self) -> tuple[int, int, Any]:
        """This rank's number in the group over which the parameter is split, the size of the group, and the group."""
        if not getattr(self.parameter, "tensor_model_parallel", False):
            return 0, 1, None
        from megatron.core import parallel_state

        kind = "expert_tensor" if is_expert(self.name) else "tensor_model"
        rank, size, group = (
            getattr(parallel_state, f"get_{kind}_parallel_{what}") for what in ("rank", "world_size", "group")
        )
        return rank(), size(), group()

    @cached_property
    def _blocks(self) -> tuple[tuple[int, ...], list[tuple[ShardBlock, ...]]]:
        """The shape of the full tensor, and the blocks of it that each rank of the group has."""
        size = self._group[1]
        if size == 1:
            whole = Box.whole(self.shape)
            return self.shape, [(ShardBlock(whole, whole),)]
        axis = int(self.parameter.partition_dim)  # type: ignore[attr-defined]
        layout = Layout(rules_for(), _sizes(self.chunk))
        try:
            rule = layout.rule(self.name)
            if rule.how != "sharded" or rule.axis != axis:
                raise RulesError(f"the rule for `{self.name}` ({rule}) does not split it along axis {axis}")
            table = lengths(self.name, rule, [self.shape[axis]] * size)
        except RulesError as error:
            if getattr(self.parameter, "partition_stride", 1) != 1 or layout.matching(self.name):
                raise UnsupportedError(f"{error}", hint="Set tensor_model_parallel_size=1.") from None
            table = [[self.shape[axis]] * size]
        full = (*self.shape[:axis], sum(map(sum, table)), *self.shape[axis + 1 :])
        return full, [tuple(place(full, axis, table, rank)) for rank in range(size)]


def _sizes(chunk: Any) -> Mapping[str, int]:
    """The model's sizes, by the names that the formulas of rules use."""
    config = chunk.config
    stated = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, (int, bool)) or name == "num_moe_experts"
    }
    stated |= {
        "num_experts": config.num_moe_experts,
        "group_query_attention": config.num_query_groups != config.num_attention_heads,
        "padded_vocab_size": getattr(chunk, "vocab_size", None),
        "transformer_impl": "transformer_engine",
    }
    return sizes_of(Arguments(Record(Global("argparse", "Namespace"), state=stated), Path()))
