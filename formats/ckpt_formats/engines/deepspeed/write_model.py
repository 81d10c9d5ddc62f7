"""Build the model's files as trees of values: the inverse of `weights`."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ckpt_formats.core.checkpoint import MODEL, Parameter
from ckpt_formats.core.layout import split
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Size, StdDict, Value
from ckpt_formats.engines.deepspeed.extras import BUFFERS
from ckpt_formats.engines.deepspeed.flat_partitions import chunk
from ckpt_formats.engines.deepspeed.write_layout import WriteLayout
from ckpt_formats.engines.deepspeed.write_optimizer import (
    RankShards,
    ds_version,
    flat_order,
    slice_of,
    stage0_entry,
    sub_groups,
)
from ckpt_formats.state_dicts.extras import tensors_for_names
from ckpt_formats.state_dicts.universal_info import ORIGIN

_TP_SPECIFIC = ("affine_map", "sub_param_shard_widths")
"""Entries of the info that are valid only at the tensor-parallel degree of the source."""


def shards_of_ranks(target: WriteLayout) -> list[dict[str, Parameter]]:
    """The parameters of each tensor-parallel rank: each state is the rank's shard."""
    ranks: list[dict[str, Parameter]] = [{} for _ in range(target.tp)]
    for name, parameter in target.source.parameters.items():
        if parameter.role == "extra":
            continue
        rule = target.rule(parameter)
        for state, tensor in parameter.states.items():
            if rule is None or tensor.shape != parameter.weight.shape:
                shards = [tensor] * target.tp
            else:
                shards = split(name, tensor, rule, target.tp, target.padded_rows)
            for rank, shard in enumerate(shards):
                rank_parameter = ranks[rank].setdefault(name, replace(parameter, states={}))
                ranks[rank][name] = replace(rank_parameter, states={**rank_parameter.states, state: shard})
    return ranks


def model_file(target: WriteLayout, shards: RankShards, rank: str) -> dict[str, Value]:
    """The model file of one model-parallel rank at stages 0 to 2. `rank` is its name in file names."""
    weights = {name: parameter.states[MODEL] for name, parameter in shards.items()}
    module = StdDict()
    module.update(weights)
    aliases = {alias: name for alias, name in target.source.aliases.items() if name in weights}
    module.update((alias, weights[name]) for alias, name in aliases.items())
    module.update(_extra_states(target, rank))
    partitioned = target.stage > 0
    frozen = {name: p for name, p in shards.items() if p.role == "frozen"} if target.stage == 2 else None
    shapes = [_shapes(shards, flat_order(target, group)) for group in target.source.groups]
    return {
        "module": module,
        "buffer_names": [name for name, p in shards.items() if p.role == "buffer"],
        "optimizer": None if partitioned else stage0_entry(target, shards),
        "param_shapes": shapes if partitioned else None,
        "frozen_param_shapes": None if frozen is None else _shapes(frozen, frozen),
        "shared_params": aliases if partitioned else None,
        "frozen_param_fragments": None if frozen is None else _ordered({n: p.states[MODEL] for n, p in frozen.items()}),
        **_other_items(target, rank),
    }


def model3_file(target: WriteLayout, shards: RankShards, dp_rank: int, rank: str) -> dict[str, Value]:
    """The model file of one rank at stage 3: complete buffers, slices of frozen parameters, other tensors empty."""
    module = StdDict()
    empty = Tensor((0,), target.dtype, ())
    for name, parameter in shards.items():
        module[name] = parameter.states[MODEL] if parameter.role == "buffer" else empty
    aliases = {alias: name for alias, name in target.source.aliases.items() if name in shards}
    module.update((alias, empty) for alias in aliases)
    own = target.of_rank(rank).get(BUFFERS)
    buffers = (
        {str(name): tensors_for_names(value, target.source.parameters) for name, value in own.items()}
        if isinstance(own, dict)
        else {}
    )
    module.update({name: value for name, value in buffers.items() if name in module})
    module.update(_extra_states(target, rank))
    frozen = {name: p for name, p in shards.items() if p.role == "frozen"}
    slices = {n: slice_of(p.states[MODEL], chunk(p.weight.size, target.dp), dp_rank) for n, p in frozen.items()}
    return {
        "module": module,
        "buffer_names": [name for name, p in shards.items() if p.role == "buffer"],
        "optimizer": None,
        "param_shapes": [_shapes(shards, [p.name for p in members]) for _, members in sub_groups(target, shards)],
        "frozen_param_shapes": _shapes(frozen, frozen),
        "shared_params": aliases if dp_rank == 0 else {},
        "frozen_param_fragments": _ordered(slices),
        **_other_items(target, rank),
    }


def _extra_states(target: WriteLayout, rank: str) -> dict[str, Value]:
    """The items that modules saved with `get_extra_state`. They are stored among the tensors."""
    items = {**target.source.extras, **target.of_rank(rank)}
    return {k: tensors_for_names(v, target.source.parameters) for k, v in items.items() if _is_extra_state(k)}


def _is_extra_state(key: str) -> bool:
    return key.endswith("._extra_state")


def _shapes(shards: RankShards, names: Iterable[str]) -> StdDict:
    return _ordered({name: Size(shards[name].weight.shape) for name in names})


def _ordered(items: Mapping[str, Value]) -> StdDict:
    ordered = StdDict()
    ordered.update(items)
    return ordered


def _other_items(target: WriteLayout, rank: str) -> dict[str, Value]:
    """Counters, schedulers and the training script's items, with the degrees of the new layout."""
    source = target.source
    extras = {key: value for key, value in source.extras.items() if key not in ("optimizer", "ranks")}
    extras |= {key: value for key, value in target.of_rank(rank).items() if key not in ("optimizer", BUFFERS)}
    if target.pipeline is None:
        extras = {key: value for key, value in extras.items() if not _is_extra_state(key)}
    info = extras.get(ORIGIN)
    if isinstance(info, dict) and target.tp != source.origin.layout.get("tp"):
        extras[ORIGIN] = {key: value for key, value in info.items() if key not in _TP_SPECIFIC}
    needed = {
        "lr_scheduler": None,
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": 0,
        "global_steps": source.origin.step or 0,
        "global_samples": 0,
    }
    return {
        **needed,
        "dp_world_size": target.dp,
        "mp_world_size": target.tp * target.pp,
        "checkpoint_parallel_dimensions": {"pp_degree": target.pp, "tp_degree": target.tp},
        "ds_version": ds_version(target),
        **{key: tensors_for_names(value, source.parameters) for key, value in extras.items()},
        "ds_config": dict(target.config),
    }
