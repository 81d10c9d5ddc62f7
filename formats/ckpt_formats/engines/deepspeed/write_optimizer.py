"""Build the optimizer's files as trees of values: the inverse of `zero12`, `zero3` and `stage0`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from ckpt_formats.containers.torchfile_tree import unshare_states
from ckpt_formats.core.checkpoint import MASTER, MODEL, Group, Parameter
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import Counts
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import Tensor, read
from ckpt_formats.core.values import Global, Record, StdDict, Value
from ckpt_formats.core.views import flat_vector
from ckpt_formats.engines.deepspeed.flat_partitions import chunk, parameter_offsets, round_robin
from ckpt_formats.engines.deepspeed.write_layout import WriteLayout
from ckpt_formats.state_dicts.extras import tensors_for_names

RankShards = Mapping[str, Parameter]
"""The parameters of one tensor-parallel rank: each state is the rank's shard."""

_FRAGMENT_ADDRESS = Global("deepspeed.utils.tensor_fragment", "fragment_address")
_SCALER = "deepspeed.runtime.fp16.loss_scaler"


Ranges = Literal["values", "lengths"]
"""Whether a file is laid out, or has only what differs between ranks in its size: its vectors have lengths alone."""


@dataclass(frozen=True, eq=False)
class FlatRows:
    """A vector in a file: which elements of which flattened tensors are in it, and where. All else is zeros."""

    tensors: Sequence[Tensor]
    """Of one dtype."""
    starts: Counts
    """The first element of each tensor that is in the vector: (tensors,) int64."""
    stops: Counts
    """The element after the last one; equal to `starts` for a tensor that is not in it: (tensors,) int64."""
    places: Counts
    """Where the elements of each tensor begin in the vector, in ascending order: (tensors,) int64."""
    length: int

    @classmethod
    def sliced(cls, tensors: Sequence[Tensor], sizes: Counts, dp: int, rank: int) -> "FlatRows":
        """A rank's slice of each tensor, each as long as on all other ranks, as ZeRO-3 has them.

        sizes: the number of elements of each tensor, (tensors,) int64.
        """
        lengths = -(-sizes // dp)
        starts = np.minimum(rank * lengths, sizes)
        stops = np.minimum(starts + lengths, sizes)
        return cls(tensors, starts, stops, np.cumsum(lengths) - lengths, int(lengths.sum()))

    @property
    def present(self) -> list[int]:
        """The numbers of the tensors that have elements in the vector."""
        numbers: list[int] = np.flatnonzero(self.starts < self.stops).tolist()
        return numbers

    def vector(self, ranges: Ranges = "values") -> Tensor:
        """The vector, (length,)."""
        if ranges == "lengths":
            return Tensor((self.length,), self.tensors[0].dtype, ())
        places = ((i, int(self.starts[i]), int(self.stops[i]), int(self.places[i])) for i in self.present)
        parts = ((self.tensors[i], start, stop, place) for i, start, stop, place in places)
        return flat_vector(parts, self.length, self.tensors[0].dtype)


@dataclass(frozen=True, eq=False)
class _MemberGroup:
    """Parameters whose states lie in the same vectors: what the files of all data-parallel ranks share."""

    members: tuple[Parameter, ...]
    """In the order of the vectors."""
    sizes: Counts
    """The number of elements of each parameter: (members,) int64."""
    state: Mapping[str, Value]
    """The optimizer's state of the first parameter."""
    vectors: frozenset[str]
    """The names of the states that have the shape of the parameter."""

    @cached_property
    def tensors(self) -> Mapping[str, Sequence[Tensor]]:
        """The tensors of the masters and of each such state."""
        return {state: [p.states[state] for p in self.members] for state in (MASTER, *sorted(self.vectors))}

    def entry(self, rows: Mapping[str, FlatRows], ranges: Ranges) -> dict[str, Value]:
        """The optimizer's state in a file whose vectors have these rows."""
        return {
            to_stored(name): rows[name].vector(ranges) if name in self.vectors else value
            for name, value in self.state.items()
        }


@dataclass(frozen=True, eq=False)
class FlatGroup(_MemberGroup):
    """A group of the optimizer at stages 1 and 2."""

    paddings: tuple[int, ...]
    """The number of zero elements after each parameter."""
    offsets: Counts
    """The first element of each parameter in the flat buffer, and last its length: (members + 1,) int64."""

    def part_length(self, dp: int) -> int:
        """The number of elements of each rank's part, with the padding at the end of the buffer: an even number."""
        return -(-int(self.offsets[-1]) // (2 * dp)) * 2

    def rows(self, low: int, high: int) -> FlatRows:
        """Elements `low` to `high` of the flat buffer of masters."""
        begins = self.offsets[:-1]
        starts, stops = np.clip(low - begins, 0, self.sizes), np.clip(high - begins, 0, self.sizes)
        return FlatRows(self.tensors[MASTER], starts, stops, np.maximum(begins - low, 0), high - low)

    def complete(self, part: FlatRows) -> FlatRows:
        """All parameters that have an element in a part of the buffer, each of them complete."""
        sizes = np.where(part.starts < part.stops, self.sizes, 0)
        return FlatRows(part.tensors, np.zeros_like(sizes), sizes, np.cumsum(sizes) - sizes, int(sizes.sum()))


def flat_groups(target: WriteLayout, shards: RankShards) -> list[FlatGroup]:
    """The groups at stages 1 and 2. Raises `UnsupportedError` if the parameters of one have different states."""
    groups = []
    for group in target.source.groups:
        members = tuple(shards[name] for name in flat_order(target, group))
        paddings = tuple(alignment(target, members))
        offsets = np.array(parameter_offsets([p.weight.shape for p in members], paddings), np.int64)
        sizes, state = np.array([p.weight.size for p in members], np.int64), state_of(members)
        groups.append(FlatGroup(members, sizes, state, frozenset(vectors_of(members[0])), paddings, offsets))
    return groups


@dataclass(frozen=True, eq=False)
class SubGroup(_MemberGroup):
    """A sub-group of stage 3, which has one vector for each state."""

    group: int
    """The number of its group of the optimizer."""

    def rows(self, dp: int, rank: int) -> dict[str, FlatRows]:
        """The vectors of a rank: its slices of the masters and of each state."""
        rows = FlatRows.sliced(self.tensors[MASTER], self.sizes, dp, rank)
        return {state: replace(rows, tensors=tensors) for state, tensors in self.tensors.items()}


def partition(target: WriteLayout, groups: Sequence[FlatGroup], dp_rank: int) -> list[dict[str, FlatRows]]:
    """The vectors of a rank at stages 1 and 2: for each group, its part of the masters and of each state."""
    stripped = not target.own_bf16  # only `BF16_Optimizer` saves masters with the padding at the end of the buffer
    result = []
    for g, group in enumerate(groups):
        total, length = int(group.offsets[-1]), group.part_length(target.dp)
        low, high = dp_rank * length, (dp_rank + 1) * length
        part = group.rows(low, high)
        # Each rank stores Muon's momentum of complete matrices, because Muon orthogonalises them.
        complete = stripped and target.source.groups[g].options.get("use_muon")
        rows = group.complete(part) if complete else part
        by_state = {state: replace(rows, tensors=group.tensors[state]) for state in sorted(group.vectors)}
        length = min(max(total - low, 0), length) if stripped else length
        result.append({MASTER: replace(part, length=length), **by_state})
    return result


def zero12_file(
    target: WriteLayout, groups: Sequence[FlatGroup], dp_rank: int, rank: str, ranges: Ranges = "values"
) -> dict[str, Value]:
    """The optimizer file of one rank at stages 1 and 2: its equal part of the flat buffer of every group."""
    stripped = not target.own_bf16
    state: dict[int, Value] = {}
    masters, paddings, mappings = [], [], []
    for g, (group, rows) in enumerate(zip(groups, partition(target, groups, dp_rank), strict=True)):
        total, length = int(group.offsets[-1]), group.part_length(target.dp)
        masters.append(rows[MASTER].vector(ranges))
        state[g] = group.entry(rows, ranges)
        paddings.append(length - rows[MASTER].length if stripped else target.dp * length - total)
        mappings.append(_mapping(group, rows[MASTER]))
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
        rows = group.rows(target.dp, dp_rank)
        masters.append(rows[MASTER].vector(ranges))
        state[s] = group.entry(rows, ranges)
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
            one_group = _sub_group(g, members)
            rows = one_group.rows(1, 0)
            flats.append(rows[MASTER].vector())
            state[g] = one_group.entry(rows, "values")
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
    return [_sub_group(g, members) for g, members in closed]


def _sub_group(group: int, members: Sequence[Parameter]) -> SubGroup:
    sizes, vectors = np.array([p.weight.size for p in members], np.int64), frozenset(vectors_of(members[0]))
    return SubGroup(tuple(members), sizes, state_of(members), vectors, group)


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


def slice_of(tensor: Tensor, dp: int, rank: int) -> Tensor:
    """A rank's slice of a tensor at stage 3, padded with zeros."""
    return FlatRows.sliced([tensor], np.array([tensor.size], np.int64), dp, rank).vector()


def _mapping(group: FlatGroup, rows: FlatRows) -> StdDict:
    """Where each parameter is in the rank's vector: (start, length) by name."""
    mapping = StdDict()
    for i in rows.present:
        length, place = int(rows.stops[i] - rows.starts[i]), int(rows.places[i])
        mapping[group.members[i].name] = Record(_FRAGMENT_ADDRESS, (length, place), new=True)
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
