"""What a checkpoint of a live run must contain, gathered from the engine's memory.

No file is read. The engines' own gathering functions are used for stage 3 only, where they are right; elsewhere the
low-precision parameters are views of one flat buffer, whose divided fp32 copy and moments have the same geometry, so
that the place of a parameter is the distance between two pointers. This holds whatever the order and the padding.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor, distributed, nn

from engines.cuts import AUTOTP, MEGATRON, Cut, cut_of
from engines.model import global_expert
from engines.run import Run

States = dict[str, Tensor]


@dataclass
class Group:
    """A parameter group of the optimizer: the states of its parameters, whole, and the step counts it holds."""

    members: list[tuple[nn.Parameter, States]] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def add(self, base: Any, master: Tensor, members: list[tuple[nn.Parameter, States]]) -> None:
        """Add parameters whose states the base optimizer keeps under `master`."""
        self.members += members
        step = base.state[master].get("step")
        if step is not None:
            self.steps.append(step.item() if isinstance(step, Tensor) else step)


def gather(run: Run) -> dict[str, Any] | None:
    """The truth on rank 0, None elsewhere; collective.

    `params` maps each name to its full logical tensors: `fp32`, the optimizer's states by their own names, and `lp`,
    the live copy in the model's precision. `tied` maps the other names of a parameter to its first. `step` counts the
    optimizer steps that took effect; `raw_step` lists, per parameter group, what the base optimizer's states hold.
    """
    base = _base(run)
    own = _own(run)
    is_copy = run.mesh.dp_rank > 0 and not run.kind.experts
    everyone = _gathered({**own, "params": {}, "frozen": {}, "buffers": {}} if is_copy else own)
    if not everyone:
        return None
    merged = _merge(run, everyone)
    groups = _union([rank["groups"] for rank in everyone])
    for group, names in zip(base.param_groups, groups, strict=True):
        options = {key: value for key, value in group.items() if key != "params"}
        merged.setdefault("param_groups", []).append({**options, "names": names})
    merged["step"] = run.engine.global_steps - run.engine.skipped_steps
    merged["raw_step"] = own["raw_step"]
    merged["tied"] = own["tied"]
    _check(run, merged)
    return merged


def _gathered(own: dict[str, Any]) -> list[dict[str, Any]]:
    """What all ranks have, on rank 0; nothing elsewhere. As one file each: torch pickles tensors one by one, slowly."""
    file = io.BytesIO()
    torch.save(own, file)
    files: list[Any] | None = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
    distributed.gather_object(file.getvalue(), files)
    return [torch.load(io.BytesIO(one), weights_only=False) for one in files or ()]


def differences(truth: dict[str, Any], actual: dict[str, Any]) -> dict[str, str]:
    """Where the tensors of two truths are not the same bits, by place."""
    out = {}
    flat, other = _flatten(truth), _flatten(actual)
    for place in sorted(flat.keys() | other.keys()):
        if place not in flat or place not in other:
            out[place] = "unexpected" if place in other else "absent"
            continue
        a, b = flat[place], other[place]
        if a.shape != b.shape:
            out[place] = f"{tuple(a.shape)} became {tuple(b.shape)}"
        elif not torch.equal(a.double(), b.double()):
            out[place] = f"off by {(a.double() - b.double()).abs().max().item():g}"
        elif a.dtype != b.dtype:
            out[place] = f"{a.dtype} became {b.dtype}, the values are the same"
    return out


def _flatten(truth: dict[str, Any]) -> States:
    out = {f"params/{name}/{key}": value for name, states in truth["params"].items() for key, value in states.items()}
    for part in ("frozen", "buffers"):
        out |= {f"{part}/{name}": value for name, value in truth[part].items()}
    return out


def _base(run: Run) -> Any:
    """The optimizer which DeepSpeed wraps, or which it left unwrapped."""
    return getattr(run.engine.optimizer, "optimizer", run.engine.optimizer)


def _own(run: Run) -> dict[str, Any]:
    """What this rank's model- and expert-parallel coordinates hold, whole along the data-parallel dimension."""
    module = run.engine.module
    groups = list(_groups(run))
    name = {key: global_expert(local, run.first_expert) for key, local in run.names.items()}
    params = {name[id(p)]: {**states, "lp": _whole(p)} for group in groups for p, states in group.members}
    frozen = {name[id(p)]: _whole(p) for p in module.parameters() if not p.requires_grad}
    saved = module.state_dict()
    return {
        "params": params,
        "frozen": frozen,
        "buffers": {key: value.clone() for key, value in module.named_buffers() if key in saved},
        "tied": {
            key: name[id(p)] for key, p in module.named_parameters(remove_duplicate=False) if key != run.names[id(p)]
        },
        "groups": [[name[id(p)] for p, _ in group.members] for group in groups],
        "raw_step": [group.steps for group in groups],
        "place": (run.mesh.pp_rank, run.mesh.dp_rank, run.mesh.tp_rank),
    }


def _groups(run: Run) -> Iterator[Group]:
    """The optimizer's parameter groups."""
    wrapper, base = run.engine.optimizer, _base(run)
    if run.kind.stage == 3:
        return _partitioned(wrapper, base)
    if hasattr(wrapper, "single_partition_of_fp32_groups"):
        flats = zip(
            wrapper.bit16_groups, wrapper.bit16_groups_flat, wrapper.single_partition_of_fp32_groups,
            wrapper.real_dp_process_group, wrapper.params_in_partition, strict=True,
        )  # fmt: skip
    elif hasattr(wrapper, "fp32_groups_flat_partition"):
        flats = zip(
            wrapper.bf16_groups, wrapper.bf16_groups_flat, wrapper.fp32_groups_flat_partition,
            wrapper.real_dp_process_group, wrapper.bf16_groups, strict=True,
        )  # fmt: skip
    elif hasattr(wrapper, "fp32_groups_flat"):
        groups = wrapper.fp16_groups
        flats = zip(
            groups, wrapper.fp16_groups_flat, wrapper.fp32_groups_flat, [None] * len(groups), groups, strict=True
        )  # fmt: skip
    else:
        return _separate(wrapper, base)
    return (_flat(base, *flat) for flat in flats)


def _separate(wrapper: Any, base: Any) -> Iterator[Group]:
    """Parameters which have states of their own, under themselves or under an fp32 copy."""
    groups = [group["params"] for group in base.param_groups]
    for params, masters in zip(getattr(wrapper, "fp16_groups", groups), groups, strict=True):
        group = Group()
        for param, master in zip(params, masters, strict=True):
            group.add(base, master, [(param, _states(base, master, lambda piece: piece.clone()))])
        yield group


def _flat(base: Any, params: Any, buffer: Tensor, master: Tensor, peers: Any, touched: Any) -> Group:
    """A group whose parameters are views of a flat buffer; the master is divided among the peers, if there are any.

    `touched` are the parameters of which this rank's part of the master holds anything.
    """

    def full(piece: Tensor) -> Tensor:
        if peers is None:
            return piece.detach()
        pieces = [torch.empty_like(piece) for _ in range(distributed.get_world_size(peers))]
        distributed.all_gather(pieces, piece.detach().contiguous(), group=peers)
        return torch.cat(pieces)

    states = _states(base, master, full)
    members = []
    for param in params:
        start = (param.data_ptr() - buffer.data_ptr()) // buffer.element_size()
        views = {key: flat[start : start + param.numel()] for key, flat in states.items()}
        members.append((param, {key: view.clone().reshape(param.shape) for key, view in views.items()}))
    group = Group()
    group.add(base, master, members)
    if "momentum_buffer" in base.state[master] and "momentum_buffer" not in states:
        _add_whole_momenta(group, base.state[master]["momentum_buffer"], touched, peers)
    return group


def _add_whole_momenta(group: Group, momentum: Tensor, touched: list[nn.Parameter], peers: Any) -> None:
    """Muon's momentum: of every parameter a rank touches, the whole, so that ranks share those at their borders."""
    places = {id(param): place for place, (param, _) in enumerate(group.members)}
    pieces = momentum.split([param.numel() for param in touched])
    mine = {places[id(param)]: piece.clone() for param, piece in zip(touched, pieces, strict=True)}
    everyone: list[Any] = [None] * distributed.get_world_size(peers)
    distributed.all_gather_object(everyone, mine, group=peers)
    for place, (param, states) in enumerate(group.members):
        copies = [theirs[place] for theirs in everyone if place in theirs]
        assert all(torch.equal(copies[0], copy) for copy in copies)
        states["momentum_buffer"] = copies[0].reshape(param.shape)


def _states(base: Any, master: Tensor, full: Callable[[Tensor], Tensor]) -> States:
    """The master and those of its states which have its shape."""
    states = {"fp32": full(master.detach())}
    for key, value in sorted(base.state[master].items()):
        if isinstance(value, Tensor) and value.shape == master.shape and key != "step":
            states[key] = full(value)
    return states


def _partitioned(wrapper: Any, base: Any) -> Iterator[Group]:
    """Stage 3; its sub-groups are joined again to the groups that the user gave."""
    groups = [Group() for _ in base.param_groups]
    for number, params in enumerate(wrapper.fp16_groups):
        flat = wrapper.fp32_partitioned_groups_flat[number]
        keys = [key for key, value in sorted(base.state[flat].items()) if isinstance(value, Tensor) and value.dim()]
        members = []
        for param in params:
            states = {"fp32": safe_get_full_fp32_param(param).clone()}
            for key in keys:
                # The engine gathers in the masters' precision, to which it widens Muon's momentum.
                states[key] = safe_get_full_optimizer_state(param, key).to(base.state[flat][key].dtype, copy=True)
            members.append((param, states))
        groups[wrapper.sub_group_to_group_id[number]].add(base, flat, members)
    return iter(groups)


def _whole(param: nn.Parameter) -> Tensor:
    """The live parameter, all of it; collective where stage 3 has partitioned it."""
    with deepspeed.zero.GatheredParameters([param], enabled=hasattr(param, "ds_id")):
        return param.detach().clone()


def _merge(run: Run, everyone: list[dict[str, Any]]) -> dict[str, Any]:
    """Join what the ranks hold: cuts by the rules of `cuts`, experts by number, stages side by side."""
    table = MEGATRON if run.kind.model == "megatron" else AUTOTP
    out: dict[str, Any] = {"params": {}, "frozen": {}, "buffers": {}}
    for stage in range(run.kind.pp):
        for dp_rank in range(run.kind.dp):
            row = [rank for rank in everyone if rank["place"][:2] == (stage, dp_rank)]
            row.sort(key=lambda rank: rank["place"][2])
            for name in row[0]["params"]:
                cut = cut_of(name, table)
                pieces = [rank["params"][name] for rank in row]
                joined = {key: _join(cut, [piece[key] for piece in pieces], name) for key in pieces[0]}
                # A tied table lives on the first and the last stage; the first is where it was saved for good.
                out["params"].setdefault(name, joined)
            for part in ("frozen", "buffers"):
                for name, value in row[0][part].items():
                    out[part].setdefault(name, value)
    return out


def _join(cut: Cut | None, pieces: list[Tensor], name: str) -> Tensor:
    if cut is not None:
        return cut.join(pieces).clone()
    assert all(torch.equal(pieces[0], piece) for piece in pieces), f"{name} differs between tensor-parallel ranks"
    return pieces[0]


def _union(groups: list[list[list[str]]]) -> list[list[str]]:
    """The names in each group over all ranks, in the order of the first rank which has them."""
    return [list(dict.fromkeys(name for rank in groups for name in rank[number])) for number in range(len(groups[0]))]


def _check(run: Run, truth: dict[str, Any]) -> None:
    """The law that makes a truth credible: rounding the master gives the weights that the model computes with."""
    for name, states in truth["params"].items():
        rounded = states["fp32"].to(states["lp"].dtype)
        assert torch.equal(rounded, states["lp"]), f"{run.kind.name}: {name} has another master"
    named = {name for group in truth["param_groups"] for name in group["names"]}
    assert named == truth["params"].keys(), sorted(named ^ truth["params"].keys())
