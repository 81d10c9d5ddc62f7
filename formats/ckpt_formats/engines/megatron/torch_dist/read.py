"""Read `torch_dist`: full tensors by key, the optimizer in one of five encodings, objects by rank."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path

from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Group, Parameter, Role
from ckpt_formats.core.claims import MAX_NUMBER
from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsafeError, UnsupportedError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.layout import Layout
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.core.views import concatenated, unstacked_all
from ckpt_formats.engines.megatron.shared.arguments import decayed_norms, sizes_of
from ckpt_formats.engines.megatron.shared.distributed_optimizer import is_tied
from ckpt_formats.engines.megatron.shared.extras import EXTRA_STATE, collect_extras, label, optimizer_items
from ckpt_formats.engines.megatron.shared.names import (
    HEAD,
    WORD_TABLE,
    Naming,
    is_buffer,
    is_expert,
    layer_of,
    other_model,
    unstack,
)
from ckpt_formats.engines.megatron.shared.optimizer_states import members, options_of, without_states
from ckpt_formats.engines.megatron.shared.origin import origin_of
from ckpt_formats.engines.megatron.shared.rules import rules_for, with_stored_sizes
from ckpt_formats.engines.megatron.shared.stages import Stages, stages_of
from ckpt_formats.engines.megatron.torch_dist.buffers import BufferedModel, states_of
from ckpt_formats.engines.megatron.torch_dist.files import DistFiles, open_dist, shard_of
from ckpt_formats.engines.megatron.torch_dist.optimizer import SplitItems, split_items, unflattened
from ckpt_formats.state_dicts.leaves import Leaf, tensor_leaf
from ckpt_formats.state_dicts.statements import MIXED, Statement, check_agreement

_PART_SUFFIXES = (("_w", "_v"), (".z", ".x", ".B", ".C", ".dt"), (".x", ".B", ".C"), (".query", ".key", ".value"))
_DELTA = (".query", ".key", ".value", ".z", ".beta", ".alpha")
_PART = re.compile(r"(.*\.(?:weight|bias)\d*)(_[wv]|\.(?:z|x|B|C|dt|query|key|value|beta|alpha))")
_SINGLE_EXPERT = re.compile(r"(.*\.experts)\.experts\.(\d+)(\..*)")


def read_dist(path: Path, folder: Path, options: ReadOptions) -> Checkpoint:
    """The checkpoint of one iteration, without reading data. `path` is the run or iteration that the user names."""
    dist = open_dist(folder)
    items = split_items(dist.tensors, dist.objects)
    weights = tensors_by_name(items.model)
    layout = Layout(rules_for(options.rules), _sizes(dist, weights))
    others = tuple(dict.fromkeys(other for name in weights if (other := other_model(name)) is not None))
    for name, tensor in weights.items():
        is_value_head = name == HEAD and tensor.shape[:1] == (1,)  # of a critic or a reward model
        if other_model(name) is None and not is_value_head:
            layout.check(name, tensor.shape)
    if others and items.flat:
        raise UnsupportedError(
            f"the optimizer is one buffer, and beside the model there is another one: {printable(others[0])}",
            where=folder,
            hint="Save with --dist-ckpt-optim-fully-reshardable, or read the weights of another checkpoint.",
        )
    _check_layers(dist, weights)
    stages = _stages(dist, items)
    states = _states(dist, items, layout, weights, stages)
    parameters: dict[str, Parameter] = {}
    groups, steps = _groups(dist, items, weights, states)
    for name, weight in weights.items():
        role: Role = "buffer" if is_buffer(name) else "parameter"
        values = steps.get(name, {}) if name in states else {}
        parameters[name] = Parameter(name, role, {MODEL: weight, **states.get(name, {})}, values)
    if unknown := sorted(states.keys() - weights.keys()):
        raise CorruptError(
            f"the optimizer has states of `{printable(unknown[0])}`, which the model lacks", where=folder
        )
    tied = is_tied(dist.args) and WORD_TABLE in weights and HEAD not in weights
    origin = origin_of(dist.args, dist.parallel, stages, dist.root, "torch_dist")
    return Checkpoint(
        path=path,
        origin=replace(origin, layout={**origin.layout, "wrapped": True}) if items.wrapped else origin,
        parameters=parameters,
        groups=groups,
        extras=_extras(dist, items, parameters),
        aliases={HEAD: WORD_TABLE} if tied else {},
        files=dist.shards,
        seals=dist.seals,
        notices=(*dist.notices, *_of_others(others), *without_states(parameters, groups)),
        layout=layout,
    )


def _sizes(dist: DistFiles, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """The model's sizes, from the arguments and the tensors."""
    sizes = with_stored_sizes(sizes_of(dist.args), ((name, tensor.shape) for name, tensor in weights.items()))
    if dist.parallel.tp == 1:
        return sizes
    shards = [
        (name, (block.stop[0] - block.start[0], *tensor.shape[1:]))
        for name, tensor in weights.items()
        if tensor.fragments and tensor.shape and (block := tensor.fragments[0].box)
    ]
    return with_stored_sizes(sizes, shards, dist.parallel.tp)


def _of_others(others: tuple[str, ...]) -> tuple[Notice, ...]:
    text = "the arguments do not state the sizes of further models in the checkpoint, so they are not checked"
    return (Notice(text, others, Weight.UNSURE),) if others else ()


def _check_layers(dist: DistFiles, weights: Mapping[str, Tensor]) -> None:
    """Raise `IncompleteError` or `CorruptError` if the model does not have the layers that the arguments state."""
    if any(
        name.startswith("encoder.") for name in weights
    ):  # there are two stacks of layers, which have separate numbers
        return
    layers = {layer for name in weights if name.startswith("decoder.") and (layer := layer_of(name)) is not None}
    stated = dist.args.optional("num_layers", "encoder_num_layers")
    if not layers or stated is None:
        return
    lacking = next((layer for layer in range(min(stated, len(layers) + 1)) if layer not in layers), None)
    if lacking is not None:
        raise IncompleteError(
            f"layer {lacking} is missing: `num_layers` is {stated}, but {len(layers)} layers are present",
            where=dist.path,
            hint="Copy all files of the iteration again.",
        )
    if len(layers) > stated:
        raise CorruptError(
            f"{len(layers)} layers are present, but `num_layers` is {stated}", where=dist.common.path, hint=MIXED
        )


def _stages(dist: DistFiles, items: SplitItems) -> Stages | None:
    """The run's stages; None if they are not known.

    Raises `UnsupportedError` if they are not known but needed, for buffers.
    """
    try:
        return stages_of(dist.args, dist.parallel.pp)
    except UnsupportedError:
        if items.flat:
            raise
        return None


def _states(
    dist: DistFiles, items: SplitItems, layout: Layout, weights: Mapping[str, Tensor], stages: Stages | None
) -> dict[str, dict[str, Tensor]]:
    """The full optimizer states of each parameter, by name and state."""
    states: dict[str, dict[str, Tensor]] = {}
    for state, by_key in items.states.items():
        shaped: dict[str, Tensor] = {}
        for key, tensor in by_key.items():
            weight = items.model.get(key)
            if weight is not None and len(tensor.shape) == len(weight.shape) + 1:
                tensor = unflattened(key, tensor, weight.shape)
            shaped[key] = tensor
        for name, tensor in tensors_by_name(shaped).items():
            if tensor.fragments or not tensor.size:  # the stack has no fragments of a frozen layer
                states.setdefault(name, {})[state] = tensor
    if items.flat and stages is not None:
        model = BufferedModel(dist.args, dist.parallel, stages, layout, weights)
        for name, buffer_states in states_of(model, items).items():
            states.setdefault(name, {}).update(buffer_states)
    return states


def _groups(
    dist: DistFiles, items: SplitItems, weights: Mapping[str, Tensor], states: Mapping[str, dict[str, Tensor]]
) -> tuple[tuple[Group, ...], dict[str, dict[str, Value]]]:
    """The parameter groups, and the step of each parameter."""
    trained = [name for name in weights if name in states]
    groups: list[Group] = []
    steps: dict[str, dict[str, Value]] = {}
    for experts, saved in _optimizers(dist, items):
        listed = saved.get("param_groups") or []
        common = (saved.get("state") or {}).get("common_step")
        keyed_shapes = [((0, n), weights[n].shape) for n in trained if experts is None or is_expert(n) == experts]
        for group, keys in zip(
            listed, members(listed, keyed_shapes, experts, dist.common.path, decayed_norms(dist.args)), strict=True
        ):
            options = options_of(group, dist.common.path)
            step = options.pop("step", common)
            names = tuple(name for _, name in keys)
            groups.append(Group(options, names))
            if isinstance(step, Leaf):  # PyTorch's own optimizers store it as a tensor
                for name in names:
                    states[name]["step"] = tensor_leaf(step)
            elif step is not None:
                steps |= {name: {"step": step} for name in names}
    return tuple(groups), steps


def _optimizers(dist: DistFiles, items: SplitItems) -> list[tuple[bool | None, Mapping[str, Value]]]:
    """The optimizers:
    whether each has the parameters of experts (True), of others (False) or all (None), and its state dict."""
    if items.objects:  # each rank group stores it, with equal values
        _check_rank_groups(dist, items)
        by_chain = {
            chain: group_objects["optimizer"]
            for (chain, _), group_objects in sorted(items.objects.items(), reverse=True)
            if "optimizer" in group_objects
        }
    else:
        saved = dist.root.get("optimizer")
        if not isinstance(saved, dict):
            return []
        by_chain = {key: value for key, value in saved.items() if type(key) is int} or {0: saved}
        by_chain = {key: value.get("optimizer", value) for key, value in by_chain.items()}
    separate = len(by_chain) > 1
    return [(bool(chain) if separate else None, by_chain[chain]) for chain in sorted(by_chain)]


def _check_rank_groups(dist: DistFiles, items: SplitItems) -> None:
    """Raise `CorruptError` if rank groups disagree on the options of a parameter group, such as its learning rate."""
    statements: list[Statement] = []
    for (chain, index), group_objects in sorted(items.objects.items()):
        optimizer = group_objects.get("optimizer")
        listed = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
        for number, group in enumerate(listed if isinstance(listed, list) else ()):
            for key, value in group.items() if isinstance(group, dict) else ():
                if isinstance(value, (bool, int, float, str)):
                    subject = f"`{printable(str(key))}` of optimizer group {number}{' of experts' if chain else ''}"
                    statements.append(Statement(subject, f"rank group {index}", value))
    check_agreement(statements, dist.path)


def _saved_by_optimizers(dist: DistFiles, items: SplitItems) -> Value:
    """The state dict of the optimizer, or those of several by number. Those of rank groups are equal."""
    by_chain = {chain: group_objects for (chain, _), group_objects in sorted(items.objects.items(), reverse=True)}
    saved = by_chain or dist.root.get("optimizer")
    return saved[0] if isinstance(saved, dict) and saved.keys() == {0} else saved


def _extras(dist: DistFiles, items: SplitItems, parameters: dict[str, Parameter]) -> dict[str, Value]:
    """The extras: the values that all ranks share, and each rank's own."""
    common = {str(key): value for key, value in dist.root.items() if key != "optimizer"}
    if other_items := optimizer_items(_saved_by_optimizers(dist, items)):
        common["optimizer"] = other_items
    by_rank: dict[str, dict[str, Value]] = {}
    states: dict[str, Value] = {}
    for key, value in items.other_values.items():
        shard = shard_of(key)
        if shard and shard[0] == "rng_state":
            place = shard[1]
            by_rank.setdefault(label(*place[:2][::-1], *place[2:]), {})["rng_state"] = value
        elif shard and shard[0].endswith("_extra_state"):
            states[_name_at(*shard)] = value
        else:
            common[key] = value
    if states:
        common[EXTRA_STATE] = states
    ranks = sorted(by_rank.items())
    first = ranks[0] if ranks else ("", {})
    return collect_extras([(first[0], {**common, **first[1]}), *ranks[1:]], parameters)


def _name_at(key: str, place: tuple[int, ...], lengths: tuple[int, ...]) -> str:
    """The name of a module's extra state, from its key and its place in the stack."""
    names = _names_by_place(key, lengths)
    axes = len(next(iter(names), ()))
    rest = place[axes:]
    if (name := names.get(place[:axes])) is not None:
        return name if not any(rest) else f"{name}/{'.'.join(map(str, rest))}"
    return f"{key}/{'.'.join(map(str, place))}"


@lru_cache(maxsize=16)  # the shards of one stack come together, and each asks for its name
def _names_by_place(key: str, lengths: tuple[int, ...]) -> Mapping[tuple[int, ...], str]:
    try:
        return {at: name for name, at in names_of(key, lengths)}
    except CorruptError:
        return {}


def tensors_by_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors by name. Raises `CorruptError` if parts of a tensor are missing, or two keys stand for one name."""
    by_name: dict[str, Tensor] = {}
    for key, tensor in _join_parts(tensors):
        for name, part in _unstack_key(key, tensor):
            if name in by_name:
                raise CorruptError(f"`{printable(name)}` is stored twice")
            by_name[name] = part
    return by_name


def names_of(key: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The names that a key stands for, each with its place along the stacked axes.

    Raises: CorruptError if the shape has too few axes, UnsafeError if the stack is too large.
    """
    single = _SINGLE_EXPERT.fullmatch(key)
    if single:
        key = f"{single[1]}.local_experts.{single[2]}{single[3]}"
    name, by_layer = unstack(key)
    axes = (*(("layer",) if by_layer else ()), *(("expert",) if "{expert}" in name else ()))
    if len(shape) < len(axes):
        raise CorruptError(f"`{printable(key)}` of shape {list(shape)} is not stacked")
    if prod(shape[: len(axes)]) > MAX_NUMBER:
        raise UnsafeError(f"`{printable(key)}` is a stack of {prod(shape[: len(axes)]):,} tensors")
    places: list[tuple[int, ...]] = [()]
    for length in shape[: len(axes)]:
        places = [(*place, i) for place in places for i in range(length)]
    for place in places:
        full_name = name
        for axis, number in zip(axes, place, strict=True):
            full_name = full_name.replace(f"{{{axis}}}", str(number), 1)
        yield Naming().plain(full_name), place


def _unstack_key(key: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    parts: dict[tuple[int, ...], Tensor] = {(): tensor}
    titles = list(names_of(key, tensor.shape))
    for _ in range(len(titles[0][1]) if titles else 0):
        parts = {(*place, i): part for place, stack in parts.items() for i, part in enumerate(unstacked_all(stack))}
    for name, place in titles:
        yield name, parts[place]


def _join_parts(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """All tensors; those that are stored in parts are concatenated along the first axis that is not stacked."""
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if match := _PART.fullmatch(key):
            parts.setdefault(match[1], {})[match[2]] = tensor
        else:
            yield key, tensor
    for key, by_suffix in parts.items():
        order = next((order for order in (_DELTA, *_PART_SUFFIXES) if set(order) == set(by_suffix)), None)
        if order is None:
            raise CorruptError(
                f"`{printable(key)}` is stored in parts, of which only {', '.join(by_suffix)} are present"
            )
        if unstack(key)[1]:
            raise CorruptError(f"`{printable(key)}` is stored in parts and stacked by layer, which Megatron never does")
        yield key, concatenated([by_suffix[suffix] for suffix in order])
