"""The parts of a run that are recorded: the tensors of its optimizers, and the parameters that they contain."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.state_names import MODEL
from ckpt_training.local_shards import LocalPart, LocalShard, is_sharded, local_parts, local_shard, shard_of

Names = Mapping[torch.Tensor, str]


@dataclass(frozen=True)
class TrackedTensor:
    """A tensor that an optimizer of this rank steps."""

    tensor: torch.Tensor
    optimizer: int
    group: int
    parts: tuple[LocalPart, ...]
    """The parts of parameters that are in it, and that this rank records."""
    replica_parts: tuple[LocalPart, ...] = ()
    """Further parts that are in it: another rank has them too, and records them."""

    names: tuple[str, ...] = ()
    """The names of all parameters that it is made of, also of those of which this rank has no part; if they are known
    otherwise than from its parts."""

    @property
    def all_parts(self) -> tuple[LocalPart, ...]:
        return self.parts + self.replica_parts


@dataclass(frozen=True)
class TrackedRun:
    """What a rank of an engine has, and what the engine does: the facts that recording, loading and saving need."""

    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    """The innermost optimizers, whose `step` does the arithmetic."""
    tensors: tuple[TrackedTensor, ...]
    group_names: tuple[tuple[tuple[str, ...], ...], ...]
    """The names of the parameters in order, by optimizer and group."""
    aliases: Mapping[str, str]
    groups: tuple[list[dict[str, Any]], ...] | None = None
    """The parameter groups by optimizer, if the engine shows its optimizer only one group at a time."""
    was_loaded: bool = False
    """Did the engine load a checkpoint, without any step since?"""
    calls_per_step: int = 1
    """The number of calls of the optimizer in one step."""
    step: int | None = None
    """The number of the last step, if the engine counts steps."""
    notes: Callable[[], dict[str, Any]] = field(default=dict)
    """Returns other values that the engine needs to resume."""
    after_step: tuple[Any, str] | None = None
    """An object of the engine and the name of its method, after which a step is complete and `notes` belong to it."""
    counted: Callable[[], int] | None = None
    """Returns the engine's count of steps, which includes steps skipped because gradients were not finite."""
    rename: Callable[[str], str] = str
    """Returns the name in the log of a tensor of this rank's model, from its name there."""
    frozen: Callable[[], Iterator[tuple[str, torch.Tensor]]] | None = None
    """Yields the parameters that no optimizer steps, by their names in the model, if the engine has to gather them.
    Every rank must then go through all of them."""
    arrange: Callable[[int, str, torch.Tensor], torch.Tensor] = lambda number, name, state: state
    """Returns a state, by the number of its tensor and its name, with the elements in the order of the tensor's."""
    state_parts: Callable[[int, str], tuple[LocalPart, ...] | None] = lambda number, name: None
    """Returns the parts of which a state consists, by the number of its tensor and its name; None: as the tensor."""
    buffer_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtypes in checkpoints of the buffers that training has in another one, by their names in the log."""
    model_shards: Callable[[], Iterator[LocalShard]] | None = None
    """Yields this rank's memory of all parameters and persistent buffers that the model computes with; None: as
    `model_shards_of` gives it."""
    refresh: Callable[[], None] = lambda: None
    """Makes the model's copies of masters that have changed, as the engine does after a step. All ranks call it."""
    set_step: Callable[[int], None] = lambda step: None
    """Sets the engine's own counts of steps."""
    set_notes: Callable[[Mapping[str, Any]], Collection[str]] = lambda notes: ()
    """Takes those values of a step that `notes` returns, and returns the names of the values that it took."""
    unstated_notes: Callable[[Mapping[str, Any]], Collection[str]] = lambda notes: ()
    """Returns what of the engine such values do not state, so that it stays. Raises if `set_notes` could not take
    them. Changes nothing."""

    def groups_of(self, number: int) -> list[dict[str, Any]]:
        """The parameter groups of an optimizer, with their current options."""
        return self.optimizers[number].param_groups if self.groups is None else self.groups[number]

    def changed_by(self, number: int) -> list[int]:
        """The numbers of the tensors that a step of an optimizer changes: its own, also as another optimizer's."""
        own = {id(one.tensor) for one in self.tensors if one.optimizer == number}
        return [n for n, one in enumerate(self.tensors) if id(one.tensor) in own]

    def shares(self, number: int) -> bool:
        """Does an optimizer step a tensor that another one steps, too?"""
        return any(self.tensors[n].optimizer != number for n in self.changed_by(number))


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of a gradient, with the elements of its part of the parameter.

    A gradient may have other placements than its parameter: that of an embedding with cut rows is full on every rank.
    None if ranks would have to communicate to get the part.
    """
    gradient = parameter.grad
    assert gradient is not None
    if not is_sharded(gradient) or not is_sharded(parameter) or gradient.placements == parameter.placements:  # type: ignore[attr-defined]
        return local_shard(gradient)
    pairs = zip(gradient.placements, parameter.placements, strict=False)  # type: ignore[attr-defined]
    same_mesh = gradient.device_mesh == parameter.device_mesh  # type: ignore[attr-defined]
    if not same_mesh or any(one != other and not one.is_replicate() for one, other in pairs):
        return None
    return local_shard(gradient.redistribute(parameter.device_mesh, parameter.placements))  # type: ignore[attr-defined]


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside wrappers (DDP, torch.compile) that add prefixes to names."""
    while isinstance(model, nn.parallel.DistributedDataParallel) or type(model).__name__ == "OptimizedModule":
        inner = getattr(model, "_orig_mod", None)
        model = getattr(model, "module", model) if inner is None else inner
    return model


def names_of(model: nn.Module) -> tuple[dict[int, str], dict[str, str]]:
    """The name of each parameter by its id, and the names of tied parameters by their other names."""
    names: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        clean = clean_name(name)
        if id(parameter) in names:
            aliases[clean] = names[id(parameter)]
        else:
            names[id(parameter)] = clean
    return names, aliases


def renamed(run: TrackedRun, rename: Callable[[str], str]) -> TrackedRun:
    """The run with other names for its tensors, for ranks that have parts of one model.

    Raises `InvalidArgumentError` if two tensors would have the same name.
    """
    tensors = (*run.model.named_parameters(), *run.model.named_buffers())
    names = {run.rename(clean_name(name)) for name, _ in tensors}
    if len({rename(name) for name in names}) < len(names):
        first: dict[str, str] = {}
        one = next(name for name in sorted(names) if first.setdefault(rename(name), name) != name)
        raise InvalidArgumentError(
            f"`rename` gives `{first[rename(one)]}` and `{one}` the same name `{rename(one)}`",
            hint="Give each tensor of this rank a name of its own.",
        )
    return replace(
        run,
        tensors=tuple(
            replace(
                one,
                parts=tuple(replace(part, name=rename(part.name)) for part in one.parts),
                replica_parts=tuple(replace(part, name=rename(part.name)) for part in one.replica_parts),
                names=tuple(map(rename, one.names)),
            )
            for one in run.tensors
        ),
        group_names=tuple(tuple(tuple(map(rename, group)) for group in groups) for groups in run.group_names),
        aliases={rename(alias): rename(name) for alias, name in run.aliases.items()},
        rename=lambda name: rename(run.rename(name)),
        buffer_dtypes={rename(name): dtype for name, dtype in run.buffer_dtypes.items()},
        model_shards=None if run.model_shards is None else partial(_renamed_shards, run.model_shards, rename),
    )


def _renamed_shards(shards: Callable[[], Iterator[LocalShard]], rename: Callable[[str], str]) -> Iterator[LocalShard]:
    return (replace(one, part=replace(one.part, name=rename(one.name))) for one in shards())


@dataclass(frozen=True)
class FlatTensor:
    """A tensor of an optimizer that has parts of parameters."""

    names: tuple[str, ...]
    """The names of all parameters that it is made of, also of those of which this rank has no part."""
    parts: tuple[LocalPart, ...]
    replica_parts: tuple[LocalPart, ...] = ()
    """As in `TrackedTensor`."""


def plain_run(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    flat: Mapping[int, FlatTensor] | None = None,
    *,
    is_recorded: bool = False,
) -> TrackedRun:
    """A run of one process, of DDP, of FSDP2, or of pipeline stages, whose names may differ between ranks.

    `flat`: what is in those tensors of the optimizers, by id, that are no parameters of the model themselves.
    `is_recorded`: the run is being recorded. The model may have replaced tensors that its optimizers still step.

    Raises `InvalidArgumentError` if the optimizer is not that of the model, `UnsupportedError` as `Recorder`.
    """
    model = unwrap(model)
    reshard(model)
    names, aliases = names_of(model)
    tensors: list[TrackedTensor] = []
    group_names = []
    for number, optimizer in enumerate(optimizers):
        of_others = {id(one.tensor) for one in tensors}
        groups: list[tuple[str, ...]] = []
        for at, group in enumerate(optimizer.param_groups):
            group_members: list[str] = []
            for parameter in group["params"]:
                one = (flat or {}).get(id(parameter))
                if one is None:
                    name = names.get(id(parameter))
                    if id(parameter) in of_others or (name is None and is_recorded):
                        name = f"optimizer.{number}.{sum(map(len, groups)) + len(group_members)}"
                    if name is None:
                        raise InvalidArgumentError(
                            "the optimizer steps a tensor that is not a parameter of the model",
                            hint="Pass the model whose parameters the optimizer has to the recorder.",
                        )
                    one = FlatTensor((name,), tuple(local_parts(name, parameter)))
                tensors.append(TrackedTensor(parameter, number, at, one.parts, one.replica_parts, one.names))
                group_members += one.names
            groups.append(tuple(group_members))
        group_names.append(tuple(groups))
    return TrackedRun(model, tuple(optimizers), tuple(tensors), tuple(group_names), aliases)


def reshard(model: nn.Module) -> None:
    """Let modules of FSDP2 have their shards: after an evaluation, the outermost one still has full parameters."""
    for module in modules_of_fsdp2(model):
        module.reshard()


def modules_of_fsdp2(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if hasattr(module, "reshard") and hasattr(module, "unshard"))


def is_local(tensor: torch.Tensor) -> bool:
    """Does this rank have the full tensor?"""
    return not is_sharded(tensor) and not hasattr(tensor, "ds_numel")


def state_of(run: TrackedRun, number: int, name: str) -> torch.Tensor | None:
    """A state of a tracked tensor, (n,) on its device: `param` or one of the optimizer's; None if it is missing."""
    one = run.tensors[number]
    value = one.tensor if name == "param" else run.optimizers[one.optimizer].state.get(one.tensor, {}).get(name)
    return None if value is None else local_shard(value).detach().reshape(-1)


def state_names(run: TrackedRun, numbers: Iterable[int] | None = None) -> list[str]:
    """The names of all states with one number for each element, the weights first. `numbers`: of these tensors."""
    names: dict[str, None] = {"param": None}
    for one in run.tensors if numbers is None else map(run.tensors.__getitem__, numbers):
        state = run.optimizers[one.optimizer].state.get(one.tensor, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and name != "step" and value.shape == one.tensor.shape:
                names[name] = None
    return list(names)


def count_of(run: TrackedRun, number: int) -> int:
    """The number of steps of a tracked tensor."""
    one = run.tensors[number]
    state = run.optimizers[one.optimizer].state.get(one.tensor, {})
    if not state:
        return 0
    of_group = run.groups_of(one.optimizer)[one.group].get("step", 1)  # optimizers of Apex count the steps of groups
    step = state.get("step", of_group)  # SGD does not count; only its first step differs from the others
    return int(step.item() if isinstance(step, torch.Tensor) else step)


def further_entries(run: TrackedRun) -> dict[int, dict[str, Any]]:
    """What the state dicts of optimizers have besides the states of parameters and the groups, by optimizer.

    `state`: states under other keys than a parameter.
    """
    entries: dict[int, dict[str, Any]] = {}
    for number, optimizer in enumerate(run.optimizers):
        own: dict[str, Any] = {}
        if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
            own = {key: one for key, one in optimizer.state_dict().items() if key not in ("state", "param_groups")}
        if states := {key: one for key, one in optimizer.state.items() if not isinstance(key, torch.Tensor)}:
            own["state"] = states
        if own:
            entries[number] = own
    return entries


def persistent_buffers(run: TrackedRun) -> Iterator[tuple[str, torch.Tensor]]:
    """The persistent buffers of the model that are not sharded, by name."""
    for prefix, module in run.model.named_modules(remove_duplicate=False):
        for name, tensor in module._buffers.items():
            if tensor is not None and name not in module._non_persistent_buffers_set and not is_sharded(tensor):
                logged = run.rename(clean_name(f"{prefix}.{name}" if prefix else name))
                yield logged, as_saved(run, logged, tensor)


def buffer_shards(model: nn.Module, rename: Callable[[str], str] = str) -> Iterator[LocalShard]:
    """This rank's memory of the persistent buffers of a model. `rename`: gives the names in the log."""
    known = set[int]()
    for prefix, module in model.named_modules():
        for name, tensor in module._buffers.items():
            if tensor is None or name in module._non_persistent_buffers_set or id(tensor) in known:
                continue
            known.add(id(tensor))
            for part in local_parts(rename(clean_name(f"{prefix}.{name}" if prefix else name)), tensor):
                yield shard_of(local_shard(tensor).detach(), part, MODEL, "buffer")


def as_saved(run: TrackedRun, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A buffer, by its name in the log, in the dtype that it has in checkpoints."""
    return tensor.to(run.buffer_dtypes.get(name, tensor.dtype))


def frozen_tensors(run: TrackedRun) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that no optimizer steps, by name, in the same order on every rank that has them."""
    if run.frozen is not None:
        yield from ((run.rename(name), tensor) for name, tensor in run.frozen())
        return
    stepped = {name for groups in run.group_names for names in groups for name in names}
    for name, parameter in run.model.named_parameters():
        logged = run.rename(clean_name(name))
        if logged not in stepped:
            yield logged, parameter


def with_extra_states(
    run: TrackedRun, method: Literal["get_extra_state", "set_extra_state"]
) -> Iterator[tuple[str, nn.Module]]:
    """The modules that have a method of their own for values in state dicts, by the names of these values."""
    for prefix, module in run.model.named_modules():
        if getattr(type(module), method) is not getattr(nn.Module, method):
            yield run.rename(clean_name(f"{prefix}._extra_state" if prefix else "_extra_state")), module


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a shard. Every rank that has a shard must call it."""
    if hasattr(tensor, "full_tensor"):
        full: torch.Tensor = tensor.full_tensor()
        return full
    if hasattr(tensor, "ds_numel"):  # ZeRO 3 has split it
        from deepspeed import zero

        with zero.GatheredParameters([tensor]):
            return tensor.detach().clone()
    return tensor


def clean_name(name: str) -> str:
    """The name of a parameter without the parts that wrappers of modules add."""
    for wrapper in ("_checkpoint_wrapped_module.", "_orig_mod.", "_fsdp_wrapped_module."):
        name = name.replace(wrapper, "")
    return name


def last_in_memory(tensor: torch.Tensor, count: int) -> tuple[int, ...]:
    """The indices, in C order, of the last `count` elements in the memory of a tensor, in the order of memory."""
    size = tensor.numel()
    dims = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    in_memory = np.unravel_index(np.arange(max(size - count, 0), size), [tensor.shape[dim] for dim in dims])
    place = dict(zip(dims, in_memory, strict=True))
    index = np.ravel_multi_index([place[dim] for dim in range(tensor.dim())], tuple(tensor.shape))
    return tuple(index.tolist())


def content_of(tensor: torch.Tensor) -> bytes:
    """The values of a tensor of any shape as bytes, in C order."""
    return bytes(memory_of(tensor))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """The values of a tensor of any shape, in C order, without a copy if it is on the CPU and contiguous."""
    memory: memoryview = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy().data
    return memory
