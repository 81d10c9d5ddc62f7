"""The optimizer's files, as trees of values: the inverse of `zero12`, `zero3` and `stage0`."""

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

Local = Mapping[str, Parameter]
"""The parameters as one tensor-parallel rank has them."""

_SCALER = "deepspeed.runtime.fp16.loss_scaler"


def zero12_file(target: WriteLayout, local: Local, dp_rank: int, rank: str) -> dict[str, Value]:
    """Stages 1 and 2: this rank's equal part of every group's flat buffer."""
    stripped = not target.own_bf16  # DeepSpeed strips the tail's padding off the masters, but here
    state: dict[int, Value] = {}
    masters, paddings, mappings = [], [], []
    alignments = []
    for g, group in enumerate(target.source.groups):
        names = flat_order(target, group)
        members = [local[name] for name in names]
        aligned = alignment(target, members)
        begins = parameter_offsets([p.weight.shape for p in members], aligned)
        total = begins[-1]
        length = -(-total // (2 * target.dp)) * 2
        low, high = dp_rank * length, (dp_rank + 1) * length
        padding = length - min(max(total - low, 0), length)
        end = high - padding if stripped else high
        masters.append(_flat(members, MASTER, begins, low, end))
        whole = stripped and group.options.get("use_muon")
        cut = _touched if whole else _flat  # Muon's momentum is kept whole, since it is orthogonalised whole
        state[g] = {
            name: cut(members, name, begins, low, high) if name in vectors_of(members[0]) else value
            for name, value in state_of(members).items()
        }
        paddings.append(padding if stripped else target.dp * length - total)
        alignments.append(aligned)
        mappings.append(_mapping(names, members, begins, low, high))
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


def zero3_file(target: WriteLayout, local: Local, dp_rank: int, rank: str) -> dict[str, Value]:
    """Stage 3: this rank's slice of every parameter, those of a sub-group end to end."""
    state: dict[int, Value] = {}
    masters: list[Tensor] = []
    options = param_groups(target.source.groups)
    for group in options:
        group["params"] = []
    for g, members in sub_groups(target, local):
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


def stage0_entry(target: WriteLayout, local: Local) -> dict[str, Value]:
    """Stage 0: the `optimizer` entry of the model file, by number."""
    groups = param_groups(target.source.groups)
    fused = target.dtype.itemsize == 2 and _is_fused(target.config)
    state: dict[int, Value] = {}
    number = 0
    flats, lists = [], []
    for g, group in enumerate(target.source.groups):
        members = [local[name] for name in group.names]
        if fused:
            begins = parameter_offsets([p.weight.shape for p in members])
            flats.append(_flat(members, MASTER, begins, 0, begins[-1]))
            state[g] = {
                name: _flat(members, name, begins, 0, begins[-1]) if name in vectors_of(members[0]) else value
                for name, value in state_of(members).items()
            }
            continue
        groups[g]["params"] = list(range(number, number + len(members)))
        for one in members:
            states = unshare_states({s: t for s, t in one.states.items() if s not in (MASTER, MODEL)})
            if kept := {**states, **one.values}:
                state[number] = kept
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


def sub_groups(target: WriteLayout, local: Local) -> list[tuple[int, list[Parameter]]]:
    """The sub-groups of stage 3, each with its group: closed as soon as a rank's slices reach `sub_group_size`."""
    most = target.zero.get("sub_group_size")
    found: list[tuple[int, list[Parameter]]] = []
    for g, group in enumerate(target.source.groups):
        members = [local[name] for name in group.names]
        sizes = [chunk(p.weight.size, target.dp) for p in members]
        limit = most if isinstance(most, (int, float)) else 10**9
        held, current = 0, list[Parameter]()
        for one, size in zip(members, sizes, strict=True):
            current.append(one)
            held += size
            if held >= limit and limit < sum(sizes):
                found.append((g, current))
                held, current = 0, []
        if current:
            found.append((g, current))
    return found


def flat_order(target: WriteLayout, group: Group) -> list[str]:
    """The order of the flat buffer: as given, or dealt out to the ranks in turn with `round_robin_gradients`."""
    if not target.zero.get("round_robin_gradients") or target.own_bf16 or target.dp == 1:
        return list(group.names)
    return round_robin(group.names, target.dp)


def alignment(target: WriteLayout, members: Sequence[Parameter]) -> list[int]:
    """Zeros after each parameter: none, or up to 16 bytes with `parameter_alignment`, and none after the last."""
    if not target.zero.get("parameter_alignment") or target.own_bf16:
        return [0] * len(members)
    unit, at, zeros = 16 // target.dtype.itemsize, 0, []
    for one in members[:-1]:
        at += one.weight.size
        zeros.append(-at % unit)
        at += zeros[-1]
    return [*zeros, 0]


def ds_version(target: WriteLayout) -> str:
    """The version that the files claim: the source's own, else the one whose layout this is."""
    source = target.source.origin
    return source.version if source.engine == "deepspeed" and source.version else "0.19.8"


def clip_grad(target: WriteLayout) -> Value:
    """The gradient norm to clip at; 0 means none."""
    return _own(target).get("clip_grad", target.config.get("gradient_clipping", 0.0))


def with_others(target: WriteLayout, items: dict[str, Value], rank: str) -> dict[str, Value]:
    """The items, and whatever else the source's optimizer kept."""
    known = {*items, "loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad", *_SCALES}
    of_rank = target.of_rank(rank).get("optimizer")
    others = {**_own(target), **(of_rank if isinstance(of_rank, dict) else {})}
    carried = {
        key: tensors_for_names(value, target.source.parameters) for key, value in others.items() if key not in known
    }
    return {**items, **carried}


def _file(target: WriteLayout, items: dict[str, Value], rank: str) -> dict[str, Value]:
    return {
        "optimizer_state_dict": with_others(target, items, rank),
        "ds_config": dict(target.config),
        "ds_version": ds_version(target),
    }


def _own(target: WriteLayout) -> Mapping[str, Value]:
    found = target.source.extras.get("optimizer")
    return found if isinstance(found, dict) else {}


def param_groups(groups: Sequence[Group]) -> list[dict[str, Value]]:
    return [{**group.options, "params": [g]} for g, group in enumerate(groups)]


def vectors_of(parameter: Parameter) -> set[str]:
    """The states that have an element for each of the parameter's."""
    shape = parameter.weight.shape
    scalar = {s for s, t in parameter.states.items() if t.shape != shape or (shape == () and s == "step")}
    return set(parameter.states) - scalar - {MASTER, MODEL}


def state_of(members: Sequence[Parameter]) -> dict[str, Value]:
    """What the flattened optimizer keeps of a group; scalars must be the same for all, since it keeps one.

    Raises `Unsupported` if they are not, or if some parameters lack a state.
    """
    first = members[0]
    for one in members[1:]:
        if vectors_of(one) != vectors_of(first) or dict(one.values) != dict(first.values):
            raise Unsupported(
                f"parameters `{first.name}` and `{one.name}` are in one group but have other optimizer states",
                hint="ZeRO keeps one state for a whole group: divide the group.",
            )
    scalars = {s: t for s, t in first.states.items() if s not in (*vectors_of(first), MASTER, MODEL)}
    with Reader(check=False) as reader:
        for state, tensor in scalars.items():
            value = read(tensor, reader).tobytes()
            odd = next((one for one in members if read(one.states[state], reader).tobytes() != value), None)
            if odd is not None:
                raise Unsupported(f"`{first.name}` and `{odd.name}` are in one group, but their `{state}` differs")
    return {**unshare_states({s: t for s, t in first.states.items() if s not in (MASTER, MODEL)}), **first.values}


def _flat(members: Sequence[Parameter], state: str, begins: Sequence[int], low: int, high: int) -> Tensor:
    """Elements `low` to `high` of the group's flat buffer; zeros where no parameter is."""
    pieces: list[tuple[int, int, Tensor]] = []
    for one, begin in zip(members, begins, strict=False):
        tensor = one.states[state]
        pieces.append((begin, begin + tensor.size, tensor))
    return _vector(pieces, low, high, members[0].states[state].dtype)


def _touched(members: Sequence[Parameter], state: str, begins: Sequence[int], low: int, high: int) -> Tensor:
    """All of every parameter that has an element between `low` and `high`, end to end."""
    pieces: list[tuple[int, int, Tensor]] = []
    at = 0
    for one, begin in zip(members, begins, strict=False):
        tensor = one.states[state]
        if begin < high and low < begin + tensor.size:
            pieces.append((at, at + tensor.size, tensor))
            at += tensor.size
    return _vector(pieces, 0, at, members[0].states[state].dtype)


def _slices(members: Sequence[Parameter], state: str, dp: int, rank: int) -> Tensor:
    """This rank's slices of all parameters of a sub-group, each padded to the same length on every rank."""
    fragments, at = [], 0
    dtype = members[0].states[state].dtype
    for one in members:
        tensor = one.states[state]
        size = chunk(prod(tensor.shape), dp)
        piece = slice_of(tensor, size, rank)
        fragments += [Fragment(f.box.shift((at,)), f.blob) for f in piece.fragments]
        at += size
    return from_fragments((at,), fragments, dtype)


def slice_of(tensor: Tensor, size: int, rank: int) -> Tensor:
    """A rank's slice of a tensor in stage 3, padded to `size` elements."""
    return _vector([(0, tensor.size, tensor)], rank * size, (rank + 1) * size, tensor.dtype)


def _vector(pieces: Sequence[tuple[int, int, Tensor]], low: int, high: int, dtype: DType) -> Tensor:
    """A window of a line on which tensors lie, with zeros between them."""
    fragments, at = [], low
    for begin, end, tensor in pieces:
        a, b = max(begin, low), min(end, high)
        if a >= b:
            continue
        if at < a:
            fragments.append(Fragment(Box((at - low,), (a - low,)), ZeroBlob((a - at,), dtype)))
        fragments.append(Fragment(Box((a - low,), (b - low,)), FlatRangeBlob(tensor, a - begin, b - begin)))
        at = b
    if at < high:
        fragments.append(Fragment(Box((at - low,), (high - low,)), ZeroBlob((high - at,), dtype)))
    return Tensor((max(high - low, 0),), dtype, tuple(fragments))


def _mapping(names: Sequence[str], members: Sequence[Parameter], begins: Sequence[int], low: int, high: int) -> StdDict:
    mapping = StdDict()
    address = Global("deepspeed.utils.tensor_fragment", "fragment_address")
    for name, one, begin in zip(names, members, begins, strict=False):
        a, b = max(begin, low), min(begin + one.weight.size, high)
        if a < b:
            mapping[name] = Record(address, (b - a, a - low), new=True)
    return mapping


_SCALES = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")


def scaler_items(target: WriteLayout) -> dict[str, Value]:
    """The loss scaler as stages 1 to 3 keep it: an object."""
    own, state = _own(target), _scaling(target)
    scaler = own.get("loss_scaler")
    if not isinstance(scaler, Record):
        kind = "DynamicLossScaler" if state["dynamic"] else "LossScaler"
        if state["dynamic"]:
            asked = _fp16(target)
            shift = asked.get("hysteresis", 2)
            state |= {"min_scale": asked.get("min_loss_scale", 1), "delayed_shift": shift, "cur_hysteresis": shift}
            state |= {"consecutive_hysteresis": asked.get("consecutive_hysteresis", False)}
            state |= {"raise_error_at_min_scale": True, "dtype": Global("torch", target.dtype.name)}
        else:
            del state["cur_iter"]
        scaler = Record(Global(_SCALER, kind), (), state=state, new=True)
    return {
        "loss_scaler": scaler,
        "dynamic_loss_scale": bool(scaler.get("dynamic")),
        "overflow": own.get("overflow", False),
        "clip_grad": clip_grad(target),
    }


def _scale_items(target: WriteLayout) -> dict[str, Value]:
    """The loss scaler as stage 0 keeps it: its fields."""
    fields = _scaling(target)
    return {"dynamic_loss_scale": fields.pop("dynamic"), **fields}


def _scaling(target: WriteLayout) -> dict[str, Value]:
    """The fields of the loss scaler: as the source has them, at whichever stage it was, else as configured."""
    own, asked = _own(target), _fp16(target)
    scaler = own.get("loss_scaler")
    kept = {key: scaler.get(key) if isinstance(scaler, Record) else own.get(key) for key in _SCALES}
    dynamic = bool(own.get("dynamic_loss_scale", target.dtype.name == "float16" and not asked.get("loss_scale")))
    configured = {
        "cur_scale": 2.0 ** asked.get("initial_scale_power", 16) if dynamic else asked.get("loss_scale") or 1.0,
        "cur_iter": target.source.origin.step or 0,
        "last_overflow_iter": -1,
        "scale_factor": 2.0,
        "scale_window": asked.get("loss_scale_window", 1000),
    }
    fields = {key: configured[key] if kept[key] is None else kept[key] for key in _SCALES[: None if dynamic else 2]}
    return {"cur_scale": fields["cur_scale"], "dynamic": dynamic} | fields


def _fp16(target: WriteLayout) -> Mapping[str, Value]:
    """What the configuration says of the loss scaler, which only fp16 has."""
    section = target.config.get("fp16")
    return section if isinstance(section, dict) and target.dtype.name == "float16" else {}


def _is_fused(config: Mapping[str, Value]) -> bool:
    """Is the base optimizer DeepSpeed's fused Adam, whose stage 0 wrapper flattens the groups?"""
    optimizer = config.get("optimizer")
    if not isinstance(optimizer, dict) or str(optimizer.get("type")).lower() not in ("adam", "adamw"):
        return False
    params = optimizer.get("params")
    return not (isinstance(params, dict) and params.get("torch_adam"))
