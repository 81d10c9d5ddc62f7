"""Build the model's files as trees of values: the inverse of `weights`."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ckpt_formats.core.checkpoint import MODEL, Parameter
from ckpt_formats.core.layout import shard
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Size, StdDict, Value
from ckpt_formats.engines.deepspeed.extras import BUFFERS
from ckpt_formats.engines.deepspeed.write_layout import WriteLayout
from ckpt_formats.engines.deepspeed.write_optimizer import (
    RankShards,
    SubGroup,
    ds_version,
    flat_order,
    slice_of,
    stage0_entry,
)
from ckpt_formats.state_dicts.extras import tensors_for_names
from ckpt_formats.state_dicts.universal_info import ORIGIN

_TP_SPECIFIC = ("affine_map", "sub_param_shard_widths")
"""Entries of the info that are valid only at the tensor-parallel degree of the source."""


def shards_of_ranks(target: WriteLayout) -> list[RankShards]:
    """The parameters of each tensor-parallel rank: each state is the rank's shard."""
    return [shards_of_rank(target, rank) for rank in range(target.tp)]


def shards_of_rank(target: WriteLayout, rank: int) -> dict[str, Parameter]:
    """The parameters of one tensor-parallel rank. Raises `RulesError`, on every rank, if a tensor does not divide."""
    shards: dict[str, Parameter] = {}
    for name, parameter in target.source.parameters.items():
        if parameter.role == "extra":
            continue
        rule, shape = target.rule(parameter), parameter.weight.shape
        if rule is None:
            shards[name] = parameter
            continue
        states = {
            state: shard(name, tensor, rule, target.tp, rank, target.padded_rows) if tensor.shape == shape else tensor
            for state, tensor in parameter.states.items()
        }
        shards[name] = replace(parameter, states=states)
    return shards


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


def model3_file(
    target: WriteLayout, shards: RankShards, groups: Sequence[SubGroup], dp_rank: int, rank: str
) -> dict[str, Value]:
    """The model file of one rank at stage 3: complete buffers, slices of frozen parameters, other tensors empty."""
    module = StdDict()
    empty = Tensor((0,), target.dtype, ())
    for name, parameter in shards.items():
        module[name] = parameter.states[MODEL] if parameter.role == "buffer" else empty
    aliases = {alias: name for alias, name in target.source.aliases.items() if name in shards}
    module.update((alias, empty) for alias in aliases)
    module.update({name: value for name, value in _own_buffers(target, rank).items() if name in module})
    module.update(_extra_states(target, rank))
    frozen = {name: p for name, p in shards.items() if p.role == "frozen"}
    slices = {n: slice_of(p.states[MODEL], target.dp, dp_rank) for n, p in frozen.items()}
    return {
        "module": module,
        "buffer_names": [name for name, p in shards.items() if p.role == "buffer"],
        "optimizer": None,
        "param_shapes": [_shapes(shards, [p.name for p in group.members]) for group in groups],
        "frozen_param_shapes": _shapes(frozen, frozen),
        "shared_params": aliases if dp_rank == 0 else {},
        "frozen_param_fragments": _ordered(slices),
        **_other_items(target, rank),
    }


def rank_items(target: WriteLayout, rank: str) -> dict[str, Value]:
    """The items of a model file that depend on the rank's own items in the source."""
    return {**_own_buffers(target, rank), **_extra_states(target, rank), **_other_items(target, rank)}


def _own_buffers(target: WriteLayout, rank: str) -> dict[str, Value]:
    """The buffers in which this rank of the source differs from the first one."""
    own = target.of_rank(rank).get(BUFFERS)
    items = own.items() if isinstance(own, dict) else ()
    return {str(name): tensors_for_names(value, target.source.parameters) for name, value in items}


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
