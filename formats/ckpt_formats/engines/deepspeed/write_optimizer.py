"""Build the optimizer's files as trees of values: the inverse of `zero12`, `zero3` and `stage0`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import numpy as np

from ckpt_formats.containers.torchfile_tree import unshare_states
from ckpt_formats.core.checkpoint import MASTER, MODEL, Group, Parameter
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import Counts
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import FlatRangeBlob, Fragment, Tensor, ZeroBlob, read
from ckpt_formats.core.values import Global, Record, StdDict, Value
from ckpt_formats.engines.deepspeed.flat_partitions import chunk, parameter_offsets, round_robin
from ckpt_formats.engines.deepspeed.write_layout import WriteLayout
from ckpt_formats.state_dicts.extras import tensors_for_names

RankShards = Mapping[str, Parameter]
"""The parameters of one tensor-parallel rank: each state is the rank's shard."""

_FRAGMENT_ADDRESS = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_SCALER = "deepspeed.runtime.fp16.loss_scaler"


@dataclass(frozen=True)
class FlatGroup:
    """A group of the optimizer at stages 1 and 2: what the files of all data-parallel ranks share."""

    members: tuple[Parameter, ...]
    """The parameters in the order of the flat buffer."""
    sizes: Counts
    """The number of elements of each parameter: (members,) int64."""
    paddings: tuple[int, ...]
    """The number of zero elements after each parameter."""
    offsets: Counts
    """The first element of each parameter in the flat buffer, and last its length: (members + 1,) int64."""
    state: Mapping[str, Value]
    """The optimizer's state of the first parameter."""
    vectors: frozenset[str]
    """The names of the states that have the shape of the parameter."""

    def within(self, low: int, high: int) -> range:
        """The parameters that may have an element from `low` to `high`, by number; of others, only empty ones."""
        first = int(np.searchsorted(self.offsets[1:], low, "right"))
        return range(first, max(first, int(np.searchsorted(self.offsets[:-1], high, "left"))))


def flat_groups(target: WriteLayout, shards: RankShards) -> list[FlatGroup]:
    """The groups at stages 1 and 2. Raises `UnsupportedError` if the parameters of one have different states."""
    groups = []
    for group in target.source.groups:
        members = tuple(shards[name] for name in flat_order(target, group))
        paddings = tuple(alignment(target, members))
        offsets = np.array(parameter_offsets([p.weight.shape for p in members], paddings), np.int64)
        sizes, state = np.array([p.weight.size for p in members], np.int64), state_of(members)
        groups.append(FlatGroup(members, sizes, paddings, offsets, state, frozenset(vectors_of(members[0]))))
    return groups


@dataclass(frozen=True)
class SubGroup:
    """A sub-group of stage 3, which has one vector for each state."""

    group: int
    """The number of its group of the optimizer."""
    members: tuple[Parameter, ...]
    state: Mapping[str, Value]
    """The optimizer's state of the first parameter."""
    vectors: frozenset[str]
    """The names of the states that have the shape of the parameter."""


Ranges = Literal["values", "lengths"]
"""Whether a file is laid out, or has only what differs between ranks in its size: its vectors have lengths alone."""


def zero12_file(
    target: WriteLayout, groups: Sequence[FlatGroup], dp_rank: int, rank: str, ranges: Ranges = "values"
) -> dict[str, Value]:
    """The optimizer file of one rank at stages 1 and 2: its equal part of the flat buffer of every group."""
    stripped = not target.own_bf16  # only `BF16_Optimizer` saves masters with the padding at the end of the buffer
    state: dict[int, Value] = {}
    masters, paddings, mappings = [], [], []
    for g, group in enumerate(groups):
        total = int(group.offsets[-1])
        length = -(-total // (2 * target.dp)) * 2
        low, high = dp_rank * length, (dp_rank + 1) * length
        padding = length - min(max(total - low, 0), length)
        masters.append(_flat(group, MASTER, low, high - padding if stripped else high, ranges))
        complete = stripped and target.source.groups[g].options.get("use_muon")
        # Each rank stores Muon's momentum of complete matrices, because Muon orthogonalises them.
        gather = _complete_tensors if complete else _flat
        state[g] = {
            to_stored(name): gather(group, name, low, high, ranges) if name in group.vectors else value
            for name, value in group.state.items()
        }
        paddings.append(padding if stripped else target.dp * length - total)
        mappings.append(_mapping(group, low, high))
    last = target.dp - 1
    common: dict[str, Value] = {
        "base_optimizer_state": {"state": state, "param_groups": param_groups(target.source.groups)},
        "single_partition_of_fp32_groups": masters,
        "group_paddings": paddings if stripped or dp_rank == last else [0] * len(paddings),
        "partition_count": [target.dp] * len(masters),
        "ds_version": ds_version(target),
        "param_slice_mappings": mappings,
    }
    if target.own_bf16:
        return _file(target, {"clip_grad": clip_grad(target), **common}, rank)
    stage = Record(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (target.stage,))
    alignments = [list(group.paddings) if ranges == "values" else [] for group in groups]
    items = {**scaler_items(target), **common, "zero_stage": stage, "param_alignment_paddings": alignments}
    return _file(target, items, rank)


def zero3_file(
    target: WriteLayout, groups: Sequence[SubGroup], dp_rank: int, rank: str, ranges: Ranges = "values"
) -> dict[str, Value]:
    """The optimizer file of one rank at stage 3: its slices of all parameters of a sub-group in one vector."""
    state: dict[int, Value] = {}
    masters: list[Tensor] = []
    options = param_groups(target.source.groups)
    for one in options:
        one["params"] = []
    for s, group in enumerate(groups):
        options[group.group]["params"].append(s)
        masters.append(_slices(group.members, MASTER, target.dp, dp_rank, ranges))
        state[s] = {
            to_stored(name): _slices(group.members, name, target.dp, dp_rank, ranges)
            if name in group.vectors
            else value
            for name, value in group.state.items()
        }
    stage = Record(Global("deepspeed.runtime.zero.config", "ZeroStageEnum"), (3,))
    items = {key: value for key, value in scaler_items(target).items() if key != "clip_grad"}
    inner = {"state": state, "param_groups": options}
    return _file(
        target,
        {
            "zero_stage": stage,
            **items,
            "partition_count": target.dp,
            "optimizer_state_dict": inner,
            "fp32_flat_groups": masters,
        },
        rank,
    )


def stage0_entry(target: WriteLayout, shards: RankShards) -> dict[str, Value]:
    """The `optimizer` entry of the model file at stage 0, where parameters are numbered."""
    groups = param_groups(target.source.groups)
    fused = target.dtype.itemsize == 2 and _is_fused(target.config)
    state: dict[int, Value] = {}
    number = 0
    flats, lists = [], []
    for g, group in enumerate(target.source.groups):
        members = [shards[name] for name in group.names]
        if fused:
            offsets = parameter_offsets([p.weight.shape for p in members])
            flats.append(_concatenated(members, MASTER, offsets))
            state[g] = {
                to_stored(name): _concatenated(members, name, offsets) if name in vectors_of(members[0]) else value
                for name, value in state_of(members).items()
            }
            continue
        groups[g]["params"] = list(range(number, number + len(members)))
        for one in members:
            states = unshare_states({to_stored(s): t for s, t in one.states.items() if s not in (MASTER, MODEL)})
            if entry := {**states, **one.values}:
                state[number] = entry
            number += 1
        lists.append([one.states[MASTER] for one in members])
    inner = {"state": state, "param_groups": groups}
    if target.dtype.itemsize != 2:
        return inner
    wrapped = {**_scale_items(target), "optimizer_state_dict": inner}
    return (
        {**wrapped, "fp32_groups_flat": flats, "clip_grad": clip_grad(target)}
        if fused
        else {**wrapped, "fp32_groups": lists}
    )


def sub_groups(target: WriteLayout, shards: RankShards) -> list[SubGroup]:
    """The sub-groups of stage 3. Raises `UnsupportedError` if the parameters of one have different states.

    A sub-group ends as soon as the slices of one rank reach `sub_group_size` elements.
    """
    configured = target.zero.get("sub_group_size")
    closed: list[tuple[int, list[Parameter]]] = []
    for g, group in enumerate(target.source.groups):
        members = [shards[name] for name in group.names]
        sizes = [chunk(p.weight.size, target.dp) for p in members]
        limit = configured if isinstance(configured, (int, float)) else 10**9
        total = sum(sizes)
        elements, current = 0, list[Parameter]()
        for one, size in zip(members, sizes, strict=True):
            current.append(one)
            elements += size
            if elements >= limit and limit < total:
                closed.append((g, current))
                elements, current = 0, []
        if current:
            closed.append((g, current))
    return [SubGroup(g, tuple(members), state_of(members), frozenset(vectors_of(members[0]))) for g, members in closed]


def flat_order(target: WriteLayout, group: Group) -> list[str]:
    """The names of a group in the order of the flat buffer: as given, or round robin with `round_robin_gradients`."""
    if not target.zero.get("round_robin_gradients") or target.own_bf16 or target.dp == 1:
        return list(group.names)
    return round_robin(group.names, target.dp)


def alignment(target: WriteLayout, members: Sequence[Parameter]) -> list[int]:
    """The number of zero elements after each parameter in the flat buffer.

    With `parameter_alignment`, every parameter but the first begins at a multiple of 16 bytes of the model's type.
    """
    if not target.zero.get("parameter_alignment") or target.own_bf16:
        return [0] * len(members)
    unit, at, zeros = 16 // target.dtype.itemsize, 0, []
    for one in members[:-1]:
        at += one.weight.size
        zeros.append(-at % unit)
        at += zeros[-1]
    return [*zeros, 0]


def ds_version(target: WriteLayout) -> str:
    """The version that the files state: that of the source, or the version whose layout we write."""
    source = target.source.origin
    return source.version if source.engine == "deepspeed" and source.version else "0.19.8"


def clip_grad(target: WriteLayout) -> Value:
    """The maximum norm of the gradient; 0 means no clipping."""
    return _optimizer_extras(target).get("clip_grad", target.config.get("gradient_clipping", 0.0))


def with_source_items(target: WriteLayout, items: dict[str, Value], rank: str) -> dict[str, Value]:
    """The items, and all other items that the source's optimizer stored."""
    known = {*items, "loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", *_SCALES}
    of_rank = target.of_rank(rank).get("optimizer")
    source_items = {**_optimizer_extras(target), **(of_rank if isinstance(of_rank, dict) else {})}
    remaining = {
        key: tensors_for_names(value, target.source.parameters)
        for key, value in source_items.items()
        if key not in known
    }
    return {**items, **remaining}


def rank_items(target: WriteLayout, rank: str) -> dict[str, Value]:
    """The items of an optimizer file at stage 3 that depend on the rank's own items in the source."""
    return with_source_items(target, {}, rank)


def _file(target: WriteLayout, items: dict[str, Value], rank: str) -> dict[str, Value]:
    return {
        "optimizer_state_dict": with_source_items(target, items, rank),
        "ds_config": dict(target.config),
        "ds_version": ds_version(target),
    }


def _optimizer_extras(target: WriteLayout) -> Mapping[str, Value]:
    items = target.source.extras.get("optimizer")
    return items if isinstance(items, dict) else {}


def param_groups(groups: Sequence[Group]) -> list[dict[str, Value]]:
    """`param_groups` of an optimizer that has one flat parameter for each group."""
    return [{**group.options, "params": [g]} for g, group in enumerate(groups)]


def vectors_of(parameter: Parameter) -> set[str]:
    """The names of the states, other than the weights, that have the shape of the parameter."""
    shape = parameter.weight.shape
    scalar = {s for s, t in parameter.states.items() if t.shape != shape or (shape == () and s == "step")}
    return set(parameter.states) - scalar - {MASTER, MODEL}


def state_of(members: Sequence[Parameter]) -> dict[str, Value]:
    """The optimizer's state of a group, from its first parameter.

    Scalars must be the same for all parameters of the group, because ZeRO stores one per group.
    Raises `UnsupportedError` if they are not, or if the parameters do not have the same states.
    """
    first = members[0]
    for one in members[1:]:
        if vectors_of(one) != vectors_of(first) or dict(one.values) != dict(first.values):
            raise UnsupportedError(
                f"parameters `{first.name}` and `{one.name}` are in one group but have different optimizer states",
                hint="ZeRO stores one state for each group: divide the group.",
            )
    scalars = {s: t for s, t in first.states.items() if s not in (*vectors_of(first), MASTER, MODEL)}
    with Reader(check=False) as reader:
        for state, tensor in scalars.items():
            value = read(tensor, reader).tobytes()
            differing = next((one for one in members if read(one.states[state], reader).tobytes() != value), None)
            if differing is not None:
                raise UnsupportedError(
                    f"`{first.name}` and `{differing.name}` are in one group, but their `{state}` differs"
                )
    return {**unshare_states({s: t for s, t in first.states.items() if s not in (MASTER, MODEL)}), **first.values}


def _flat(group: FlatGroup, state: str, low: int, high: int, ranges: Ranges) -> Tensor:
    """Elements `low` to `high` of the group's flat buffer, (high - low,), with zeros between parameters."""
    dtype = group.members[0].states[state].dtype
    if ranges == "lengths":
        return Tensor((max(high - low, 0),), dtype, ())
    spans: list[tuple[int, int, Tensor]] = []
    for i in group.within(low, high):
        tensor, offset = group.members[i].states[state], int(group.offsets[i])
        spans.append((offset, offset + tensor.size, tensor))
    return _vector(spans, low, high, dtype)


def _complete_tensors(group: FlatGroup, state: str, low: int, high: int, ranges: Ranges) -> Tensor:
    """One vector of all parameters that have an element between `low` and `high`, each of them complete."""
    spans: list[tuple[int, int, Tensor]] = []
    at = 0
    for i in group.within(low, high):
        tensor, offset = group.members[i].states[state], int(group.offsets[i])
        if offset < high and low < offset + tensor.size:
            spans.append((at, at + tensor.size, tensor))
            at += tensor.size
    dtype = group.members[0].states[state].dtype
    return Tensor((at,), dtype, ()) if ranges == "lengths" else _vector(spans, 0, at, dtype)


def _concatenated(members: Sequence[Parameter], state: str, offsets: Sequence[int]) -> Tensor:
    """One vector of all parameters."""
    tensors = [one.states[state] for one in members]
    spans = [(offset, offset + tensor.size, tensor) for tensor, offset in zip(tensors, offsets, strict=False)]
    return _vector(spans, 0, offsets[-1], tensors[0].dtype)


def _slices(members: Sequence[Parameter], state: str, dp: int, rank: int, ranges: Ranges) -> Tensor:
    """One vector of this rank's slices of all parameters of a sub-group, each as long as on all other ranks."""
    fragments: list[Fragment] = []
    at, dtype = 0, members[0].states[state].dtype
    for one in members:
        tensor = one.states[state]
        size = chunk(prod(tensor.shape), dp)
        if ranges == "values":
            _add_range(fragments, tensor, rank * size, (rank + 1) * size, at)
        at += size
    return Tensor((at,), dtype, tuple(fragments))


def slice_of(tensor: Tensor, size: int, rank: int) -> Tensor:
    """A rank's slice of a tensor at stage 3, (size,), padded with zeros."""
    return _vector([(0, tensor.size, tensor)], rank * size, (rank + 1) * size, tensor.dtype)


def _add_range(fragments: list[Fragment], tensor: Tensor, low: int, high: int, at: int) -> None:
    """Add elements `low` to `high` of a flattened tensor at element `at` of a vector, with zeros behind its end."""
    middle = max(low, min(high, tensor.size))
    end = at + middle - low
    if low < middle:
        fragments.append(Fragment(Box((at,), (end,)), FlatRangeBlob(tensor, low, middle)))
    if middle < high:
        fragments.append(Fragment(Box((end,), (at + high - low,)), ZeroBlob((high - middle,), tensor.dtype)))


def _vector(spans: Sequence[tuple[int, int, Tensor]], low: int, high: int, dtype: DType) -> Tensor:
    """Elements `low` to `high` of a flat buffer, (high - low,), with zeros between the tensors.

    `spans` are the tensors as (first element in the buffer, end, tensor), in this order.
    """
    fragments, at = [], low
    for offset, end, tensor in spans:
        a, b = max(offset, low), min(end, high)
        if a >= b:
            continue
        if at < a:
            fragments.append(Fragment(Box((at - low,), (a - low,)), ZeroBlob((a - at,), dtype)))
        fragments.append(Fragment(Box((a - low,), (b - low,)), FlatRangeBlob(tensor, a - offset, b - offset)))
        at = b
    if at < high:
        fragments.append(Fragment(Box((at - low,), (high - low,)), ZeroBlob((high - at,), dtype)))
    return Tensor((max(high - low, 0),), dtype, tuple(fragments))


def _mapping(group: FlatGroup, low: int, high: int) -> StdDict:
    """Where each parameter with elements from `low` to `high` is in the rank's vector: (start, length) by name."""
    mapping = StdDict()
    for i in group.within(low, high):
        one, offset = group.members[i], int(group.offsets[i])
        a, b = max(offset, low), min(offset + one.weight.size, high)
        if a < b:
            mapping[one.name] = Record(_FRAGMENT_ADDRESS, (b - a, a - low), new=True)
    return mapping


_SCALES = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


def scaler_items(target: WriteLayout) -> dict[str, Value]:
    """The loss scaler in the form of stages 1 to 3: an object."""
    extras, state = _optimizer_extras(target), _scaling(target)
    scaler = extras.get("loss_scaler")
    if not isinstance(scaler, Record):
        kind = "DynamicLossScaler" if state["dynamic"] else "LossScaler"
        if state["dynamic"]:
            config = _fp16(target)
            shift = config.get("hysteresis", 2)
            state |= {"min_scale": config.get("min_loss_scale", 1), "delayed_shift": shift, "cur_hysteresis": shift}
            state |= {"consecutive_hysteresis": config.get("consecutive_hysteresis", False)}
            state |= {"raise_error_at_min_scale": True, "dtype": Global("torch", target.dtype.name)}
        else:
            del state["cur_iter"]
        scaler = Record(Global(_SCALER, kind), (), state=state, new=True)
    return {
        "loss_scaler": scaler,
        "dynamic_loss_scale": bool(scaler.get("dynamic")),
        "overflow": extras.get("overflow", False),
        "clip_grad": clip_grad(target),
    }


def _scale_items(target: WriteLayout) -> dict[str, Value]:
    """The loss scaler in the form of stage 0: its fields."""
    fields = _scaling(target)
    return {"dynamic_loss_scale": fields.pop("dynamic"), **fields}


def _scaling(target: WriteLayout) -> dict[str, Value]:
    """The fields of the loss scaler: those of the source, of any stage; otherwise those of the configuration."""
    extras, config = _optimizer_extras(target), _fp16(target)
    scaler = extras.get("loss_scaler")
    stored = {key: scaler.get(key) if isinstance(scaler, Record) else extras.get(key) for key in _SCALES}
    dynamic = bool(extras.get("dynamic_loss_scale", target.dtype.name == "float16" and not config.get("loss_scale")))
    configured = {
        "cur_scale": 2.0 ** config.get("initial_scale_power", 16) if dynamic else config.get("loss_scale") or 1.0,
        "cur_iter": target.source.origin.step or 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": config.get("loss_scale_window", 1000),
    }
    fields = {key: configured[key] if stored[key] is None else stored[key] for key in _SCALES[: None if dynamic else 2]}
    return {"cur_scale": fields["cur_scale"], "dynamic": dynamic} | fields


def _fp16(target: WriteLayout) -> Mapping[str, Value]:
    """The options of the loss scaler in the configuration; only fp16 has one."""
    section = target.config.get("fp16")
    return section if isinstance(section, dict) and target.dtype.name == "float16" else {}


def _is_fused(config: Mapping[str, Value]) -> bool:
    """Is the base optimizer DeepSpeed's fused Adam? Its wrapper at stage 0 flattens the groups."""
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, dict) or str(optimizer.get("type")).lower() not in ("adam", "adamw"):
        return False
    params = optimizer.get("params")
    return not (isinstance(params, dict) and params.get("torch_adam"))
