"""All parameters of one model-parallel rank, under the names of the model, in the shapes of the rank."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpt_codecs import Rounded
from ckpt_formats.containers.torchfile import TorchFile
from ckpt_formats.core.checkpoint import MASTER, MODEL, Group, Parameter, Role
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Tensor, with_replicas
from ckpt_formats.core.values import Value
from ckpt_formats.engines.deepspeed.experts import is_expert
from ckpt_formats.engines.deepspeed.extras import BUFFERS, UNPLACED
from ckpt_formats.engines.deepspeed.lookups import get
from ckpt_formats.engines.deepspeed.optimizer_states import OptimizerStates
from ckpt_formats.engines.deepspeed.stage0 import read_numbered
from ckpt_formats.engines.deepspeed.step import OpenedStep
from ckpt_formats.engines.deepspeed.weights import (
    ModelTensors,
    differing_buffers,
    model_dtype,
    non_tensor_items,
    read_experts,
    read_layers,
    read_module,
    with_aliases,
)
from ckpt_formats.engines.deepspeed.zero3 import read_sub_groups
from ckpt_formats.engines.deepspeed.zero12 import mapped_names, read_groups, stated_shapes
from ckpt_formats.state_dicts.parameter_order import NamedTensor

Layers = Mapping[tuple[int, int], TorchFile]


@dataclass(frozen=True)
class RankState:
    """The parameters and other items of one model-parallel rank."""

    parameters: Mapping[str, Parameter]
    groups: tuple[Group, ...]
    aliases: Mapping[str, str]
    extra_items: Mapping[Path, Mapping[str, Value]] = field(default_factory=dict)
    """By file: items that are no tensors of the model."""
    unknown: tuple[str, ...] = ()
    """Names of tensors in files of layers that are in no optimizer."""
    by_order: bool = False
    """As in `OptimizerStates`."""


def read_ranks(step: OpenedStep, order: Sequence[str] = ()) -> list[RankState]:
    """The states of all model-parallel ranks, in order. `order` lists the names for an optimizer that numbers them."""
    modules = [read_module(step.models(mp), step.stage3) for mp in range(step.tp * step.pp)]
    experts = {key: step.files[path] for key, path in step.folder.experts.items()}
    layers = {key: step.files[path] for key, path in step.folder.layers.items()}
    optimized: list[OptimizerStates] = []
    for mp, module in enumerate(modules):
        module.tensors |= dict(read_experts(experts, mp))
        earlier_names = {name for other in optimized[mp % step.tp :: step.tp] for name in other.states}
        optimized.append(_optimizer(step, mp, module, layers, earlier_names, order))
    known = {name for one in optimized for name in one.states}
    unknown: list[tuple[str, ...]] = []
    for mp, module in enumerate(modules):
        tensors = read_layers(layers, mp % step.tp, sorted(known))
        unknown.append(tuple(n for n in tensors if mp < step.tp and n not in known))
        # A layer's file does not state its stage; the optimizer does. Tensors in no optimizer go to the first stage.
        own_names = optimized[mp].states.keys()
        module.tensors |= {n: t for n, t in tensors.items() if n in own_names or (mp < step.tp and n not in known)}
    return [
        replace(_rank(step, module, one), extra_items=_extra_items(step, mp, one, layers), unknown=unknown[mp])
        for mp, (module, one) in enumerate(zip(modules, optimized, strict=True))
    ]


def _extra_items(step: OpenedStep, mp: int, optimized: OptimizerStates, layers: Layers) -> dict[Path, dict[str, Value]]:
    """By file: the items of a rank that are neither tensors of the model nor parts of flat buffers."""
    files = step.models(mp)
    by_file: dict[Path, dict[str, Value]] = {path: {UNPLACED: states} for path, states in optimized.unplaced.items()}
    buffers = differing_buffers(files) if step.stage3 else {}
    for file in files:
        items = non_tensor_items(file)
        if file.path in buffers:
            items[BUFFERS] = buffers[file.path]
        by_file.setdefault(file.path, {}).update(items)
    experts = (step.files[path] for (rank, _, _), path in step.folder.experts.items() if rank == mp)
    of_layers = ((f"{n}.", file) for (n, tp), file in layers.items() if tp == mp and mp < step.tp)
    for prefix, file in (*((_EXPERT_PREFIX, file) for file in experts), *of_layers):
        by_file[files[0].path].update(non_tensor_items(file, prefix))
    return by_file


_EXPERT_PREFIX = "experts."


def _rank(step: OpenedStep, weights: ModelTensors, optimized: OptimizerStates) -> RankState:
    dtype = model_dtype(step.config)
    tensors = with_aliases(weights)
    parameters = {}
    for name in dict.fromkeys((*weights.order, *optimized.states, *tensors)):
        if name in optimized.states:
            states = dict(optimized.states[name])
            if name in tensors and MASTER not in states and tensors[name].dtype == DTYPES["float32"]:
                # Stage 0 in fp32: the optimizer updates the weights themselves.
                states = {
                    MASTER: tensors[name],
                    **states,
                    MODEL: Tensor.of(DerivedBlob(Rounded(), tensors[name], dtype)),
                }
            elif name in tensors:
                states[MODEL] = tensors[name]
            elif step.stage3:  # stage 3 stores no copy of the model: it is the rounded master
                states[MODEL] = Tensor.of(DerivedBlob(Rounded(), states[MASTER], dtype))
            else:
                raise IncompleteError(
                    f"the optimizer has `{name}`, but no model file does", where=step.folder.path, hint=_ALL
                )
            if MASTER in states and states[MASTER].shape != states[MODEL].shape:
                raise _contradiction(step, name, f"{list(states[MASTER].shape)} in the optimizer", states[MODEL].shape)
            parameters[name] = Parameter(name, "parameter", states, optimized.values[name])
        elif name in tensors and (name in weights.buffers or weights.may_be_frozen(name)):
            role: Role = "buffer" if name in weights.buffers else "frozen"
            parameters[name] = Parameter(name, role, {MODEL: tensors[name]})
        elif name not in weights.aliases:
            raise CorruptError(
                f"`{name}` is in the model, but it is neither trained nor frozen nor a buffer",
                where=step.folder.path,
                hint="Files of several runs may be mixed.",
            )
    return RankState(parameters, tuple(optimized.groups), weights.aliases, by_order=optimized.by_order)


_ALL = "Copy the files of all ranks into one folder."


def _contradiction(step: OpenedStep, name: str, stated: str, shape: Shape) -> CorruptError:
    message = f"`{name}` has the shape {stated}, but {list(shape)} in the model"
    return CorruptError(message, where=step.folder.path, hint="Files of several runs may be mixed.")


def _optimizer(
    step: OpenedStep,
    mp: int,
    module: ModelTensors,
    layer_files: Layers,
    earlier_names: Container[str],
    order: Sequence[str],
) -> OptimizerStates:
    model, optims = step.models(mp)[0], step.optims(mp)
    if step.stage3:
        return read_sub_groups(model, optims)
    if optims:
        return read_groups(_shapes(step, mp, layer_files), optims, step.config)
    if model.root.get("param_shapes") is not None:
        raise IncompleteError(
            "no optimizer file (*_optim_states.pt) is here, but the model file is of a ZeRO stage that has such files",
            where=step.folder.path,
            hint=_ALL,
        )
    layers = read_layers(layer_files, mp % step.tp, ())
    tensors = {
        n: t for n, t in (layers or module.tensors).items() if n not in module.buffers and n not in module.aliases
    }
    named = [NamedTensor(name, tensor) for name, tensor in tensors.items() if name not in earlier_names]
    if step.folder.expert_optim:
        return _by_expert_rank(step, mp, named, order)
    if model.root.get("optimizer") is None:
        return OptimizerStates()
    return read_numbered(model, get(model.root, "optimizer", dict, model.path), named, order=order, skips=not layers)


def _shapes(step: OpenedStep, mp: int, layer_files: Layers) -> list[dict[str, Shape]]:
    model, optims = step.models(mp)[0], step.optims(mp)
    if model.root.get("param_shapes") is not None:
        return [dict(shapes) for shapes in stated_shapes(model)]
    names = mapped_names(optims)
    layers = read_layers(layer_files, mp % step.tp, [name for group in names for name in group])
    return [{name: get(layers, name, Tensor, step.folder.path).shape for name in group} for group in names]


def _by_expert_rank(step: OpenedStep, mp: int, named: Sequence[NamedTensor], order: Sequence[str]) -> OptimizerStates:
    """Stage 0 with experts: the file of each expert-parallel rank has the common parameters and its own experts."""
    paths = [path for (rank, _), path in sorted(step.folder.expert_optim.items()) if rank == mp]
    common = [one for one in named if not is_expert(one.name)]
    experts = [one for one in named if is_expert(one.name)]
    layers: dict[str, dict[str, list[NamedTensor]]] = {}
    for one in experts:
        layer, _, rest = one.name.partition(".deepspeed_experts.")
        layers.setdefault(layer, {}).setdefault(rest.partition(".")[0], []).append(one)
    merged = OptimizerStates()
    for e, path in enumerate(paths):
        own: list[NamedTensor] = []
        for by_number in layers.values():
            numbers = sorted(by_number, key=int)
            count = len(numbers) // len(paths)
            own += [one for number in numbers[e * count : (e + 1) * count] for one in by_number[number]]
        file = step.files[path]
        optimizer = read_numbered(file, get(file.root, "optimizer", dict, path), [*common, *own], order=order)
        for name, states in optimizer.states.items():
            earlier = merged.states.get(name)
            merged.states[name] = {s: with_replicas([earlier[s], t]) for s, t in states.items()} if earlier else states
            merged.values.setdefault(name, optimizer.values[name])
        groups = zip(merged.groups or [Group(g.options, ()) for g in optimizer.groups], optimizer.groups, strict=True)
        merged.groups = [Group(a.options, tuple(dict.fromkeys((*a.names, *b.names)))) for a, b in groups]
    return merged
