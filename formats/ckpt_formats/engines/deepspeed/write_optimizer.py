"""Build the optimizer's files as trees of values: the inverse of `zero12`, `zero3` and `stage0`."""

from collections.abc import Mapping, Sequence
from math import prod

from ckpt_formats.containers.torchfile_tree import unshare_states
from ckpt_formats.core.checkpoint import MASTER, MODEL, Group, Parameter
from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import FlatRangeBlob, Fragment, Tensor, ZeroBlob, from_fragments, read
from ckpt_formats.core.values import Global, Record, StdDict, Value
from ckpt_formats.engines.deepspeed.flat_partitions import chunk, parameter_offsets, round_robin
from ckpt_formats.engines.deepspeed.write_layout import WriteLayout
from ckpt_formats.state_dicts.extras import tensors_for_names

RankShards = Mapping[str, Parameter]
"""The parameters of one tensor-parallel rank: each state is the rank's shard."""

_SCALER = "deepspeed.runtime.fp16.loss_scaler"


def zero12_file(target: WriteLayout, shards: RankShards, dp_rank: int, rank: str) -> dict[str, Value]:
    """The optimizer file of one rank at stages 1 and 2: its equal part of the flat buffer of every group."""
    stripped = not target.own_bf16  # only `BF16_Optimizer` saves masters with the padding at the end of the buffer
    state: dict[int, Value] = {}
    masters, paddings, mappings = [], [], []
    alignments = []
    for g, group in enumerate(target.source.groups):
        names = flat_order(target, group)
        members = [shards[name] for name in names]
        aligned = alignment(target, members)
        offsets = parameter_offsets([p.weight.shape for p in members], aligned)
        total = offsets[-1]
        length = -(-total // (2 * target.dp)) * 2
        low, high = dp_rank * length, (dp_rank + 1) * length
        padding = length - min(max(total - low, 0), length)
        end = high - padding if stripped else high
        masters.append(_flat(members, MASTER, offsets, low, end))
        complete = stripped and group.options.get("use_muon")
        # Each rank stores Muon's momentum of complete matrices, because Muon orthogonalises them.
        gather = _complete_tensors if complete else _flat
        state[g] = {
            name: gather(members, name, offsets, low, high) if name in vectors_of(members[0]) else value
            for name, value in state_of(members).items()
        }
        paddings.append(padding if stripped else target.dp * length - total)
        alignments.append(aligned)
        mappings.append(_mapping(names, members, offsets, low, high))
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
    items = {**scaler_items(target), **common, "zero_stage": stage, "param_alignment_paddings": alignments}
    return _file(target, items, rank)


def zero3_file(target: WriteLayout, shards: RankShards, dp_rank: int, rank: str) -> dict[str, Value]:
    """The optimizer file of one rank at stage 3: its slices of all parameters of a sub-group in one vector."""
    state: dict[int, Value] = {}
    masters: list[Tensor] = []
    options = param_groups(target.source.groups)
    for group in options:
        group["params"] = []
    for g, members in sub_groups(target, shards):
        s = len(masters)
        options[g]["params"].append(s)
        masters.append(_slices(members, MASTER, target.dp, dp_rank))
        state[s] = {
            name: _slices(members, name, target.dp, dp_rank) if name in vectors_of(members[0]) else value
            for name, value in state_of(members).items()
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
            flats.append(_flat(members, MASTER, offsets, 0, offsets[-1]))
            state[g] = {
                name: _flat(members, name, offsets, 0, offsets[-1]) if name in vectors_of(members[0]) else value
                for name, value in state_of(members).items()
            }
            continue
        groups[g]["params"] = list(range(number, number + len(members)))
        for one in members:
            states = unshare_states({s: t for s, t in one.states.items() if s not in (MASTER, MODEL)})
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


def sub_groups(target: WriteLayout, shards: RankShards) -> list[tuple[int, list[Parameter]]]:
    """The sub-groups of stage 3 as (number of the group, parameters).

    A sub-group ends as soon as the slices of one rank reach `sub_group_size` elements.
    """
    configured = target.zero.get("sub_group_size")
    closed: list[tuple[int, list[Parameter]]] = []
    for g, group in enumerate(target.source.groups):
        members = [shards[name] for name in group.names]
        sizes = [chunk(p.weight.size, target.dp) for p in members]
        limit = configured if isinstance(configured, (int, float)) else 10**9
        elements, current = 0, list[Parameter]()
        for one, size in zip(members, sizes, strict=True):
            current.append(one)
            elements += size
            if elements >= limit and limit < sum(sizes):
                closed.append((g, current))
                elements, current = 0, []
        if current:
            closed.append((g, current))
    return closed


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
    Raises `Unsupported` if they are not, or if the parameters do not have the same states.
    """
    first = members[0]
    for one in members[1:]:
        if vectors_of(one) != vectors_of(first) or dict(one.values) != dict(first.values):
            raise Unsupported(
                f"parameters `{first.name}` and `{one.name}` are in one group but have different optimizer states",
                hint="ZeRO stores one state for each group: divide the group.",
            )
    scalars = {s: t for s, t in first.states.items() if s not in (*vectors_of(first), MASTER, MODEL)}
    with Reader(check=False) as reader:
        for state, tensor in scalars.items():
            value = read(tensor, reader).tobytes()
            differing = next((one for one in members if read(one.states[state], reader).tobytes() != value), None)
            if differing is not None:
                raise Unsupported(
                    f"`{first.name}` and `{differing.name}` are in one group, but their `{state}` differs"
                )
    return {**unshare_states({s: t for s, t in first.states.items() if s not in (MASTER, MODEL)}), **first.values}


def _flat(members: Sequence[Parameter], state: str, offsets: Sequence[int], low: int, high: int) -> Tensor:
    """Elements `low` to `high` of the group's flat buffer, (high - low,), with zeros between parameters."""
    spans: list[tuple[int, int, Tensor]] = []
    for one, offset in zip(members, offsets, strict=False):
        tensor = one.states[state]
        spans.append((offset, offset + tensor.size, tensor))
    return _vector(spans, low, high, members[0].states[state].dtype)


def _complete_tensors(members: Sequence[Parameter], state: str, offsets: Sequence[int], low: int, high: int) -> Tensor:
    """One vector of all parameters that have an element between `low` and `high`, each of them complete."""
    spans: list[tuple[int, int, Tensor]] = []
    at = 0
    for one, offset in zip(members, offsets, strict=False):
        tensor = one.states[state]
        if offset < high and low < offset + tensor.size:
            spans.append((at, at + tensor.size, tensor))
            at += tensor.size
    return _vector(spans, 0, at, members[0].states[state].dtype)


def _slices(members: Sequence[Parameter], state: str, dp: int, rank: int) -> Tensor:
    """One vector of this rank's slices of all parameters of a sub-group, each as long as on all other ranks."""
    fragments, at = [], 0
    dtype = members[0].states[state].dtype
    for one in members:
        tensor = one.states[state]
        size = chunk(prod(tensor.shape), dp)
        part = slice_of(tensor, size, rank)
        fragments += [Fragment(f.box.shift((at,)), f.blob) for f in part.fragments]
        at += size
    return from_fragments((at,), fragments, dtype)


def slice_of(tensor: Tensor, size: int, rank: int) -> Tensor:
    """A rank's slice of a tensor at stage 3, (size,), padded with zeros."""
    return _vector([(0, tensor.size, tensor)], rank * size, (rank + 1) * size, tensor.dtype)


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


def _mapping(
    names: Sequence[str], members: Sequence[Parameter], offsets: Sequence[int], low: int, high: int
) -> StdDict:
    mapping = StdDict()
    address = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    for name, one, offset in zip(names, members, offsets, strict=False):
        a, b = max(offset, low), min(offset + one.weight.size, high)
        if a < b:
            mapping[name] = Record(address, (b - a, a - low), new=True)
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
