"""Reading `torch_dist`: whole tensors by key, the optimizer in one of five encodings, objects by rank."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Group, Parameter, Role
from ckpt_formats.core.errors import Corrupt, Incomplete, Unsupported
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.layout import Layout
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.shared.arguments import decayed_norms, sizes_of
from ckpt_formats.engines.megatron.shared.distributed_optimizer import is_tied
from ckpt_formats.engines.megatron.shared.extras import EXTRA_STATE, collect_extras, label, optimizer_items
from ckpt_formats.engines.megatron.shared.names import HEAD, WORD_TABLE, is_buffer, is_expert, layer_of
from ckpt_formats.engines.megatron.shared.optimizer_states import members, options_of, without_states
from ckpt_formats.engines.megatron.shared.origin import origin_of
from ckpt_formats.engines.megatron.shared.rules import rules_for
from ckpt_formats.engines.megatron.shared.stages import Stages, stages_of
from ckpt_formats.engines.megatron.torch_dist.buffers import BufferedModel, states_of
from ckpt_formats.engines.megatron.torch_dist.files import DistFiles, open_dist, shard_of
from ckpt_formats.engines.megatron.torch_dist.model import named, names_of
from ckpt_formats.engines.megatron.torch_dist.optimizer import SplitItems, sort, unflattened
from ckpt_formats.state_dicts.leaves import Leaf, tensor_leaf
from ckpt_formats.state_dicts.statements import MIXED, Statement, check_agreement


def read_dist(path: Path, folder: Path, options: ReadOptions) -> Checkpoint:
    """The index of one iteration."""
    dist = open_dist(folder)
    layout = Layout(rules_for(options.rules), sizes_of(dist.args))
    found = sort(dist.tensors, dist.objects)
    weights = named(found.model)
    for name, tensor in weights.items():
        layout.check(name, tensor.shape)
    _check_layers(dist, weights)
    stages = _stages(dist, found)
    states = _states(dist, found, layout, weights, stages)
    parameters: dict[str, Parameter] = {}
    groups, steps = _groups(dist, found, weights, states)
    for name, weight in weights.items():
        role: Role = "buffer" if is_buffer(name) else "parameter"
        values = steps.get(name, {}) if name in states else {}
        parameters[name] = Parameter(name, role, {MODEL: weight, **states.get(name, {})}, values)
    if strangers := sorted(states.keys() - weights.keys()):
        raise Corrupt(f"the optimizer has states of `{printable(strangers[0])}`, which the model lacks", where=folder)
    tied = is_tied(dist.args) and WORD_TABLE in weights and HEAD not in weights
    origin = origin_of(dist.args, dist.parallel, stages, dist.root, "torch_dist")
    return Checkpoint(
        path,
        replace(origin, layout={**origin.layout, "wrapped": True}) if found.wrapped else origin,
        parameters,
        groups,
        _extras(dist, found, parameters),
        {HEAD: WORD_TABLE} if tied else {},
        dist.shards,
        dist.seals,
        (*dist.notices, *without_states(parameters, groups)),
        layout=layout,
    )


def _check_layers(dist: DistFiles, weights: Mapping[str, Tensor]) -> None:
    """Raises `Incomplete` or `Corrupt` if the model has not the layers that the arguments state."""
    if any(name.startswith("encoder.") for name in weights):  # two stacks of layers, which are counted apart
        return
    layers = {layer for name in weights if name.startswith("decoder.") and (layer := layer_of(name)) is not None}
    said = dist.args.optional("num_layers", "encoder_num_layers")
    if not layers or said is None:
        return
    lacking = next((layer for layer in range(min(said, len(layers) + 1)) if layer not in layers), None)
    if lacking is not None:
        raise Incomplete(
            f"layer {lacking} is missing: `num_layers` is {said}, but {len(layers)} layers are here",
            where=dist.path,
            hint="Copy all files of the iteration again.",
        )
    if len(layers) > said:
        raise Corrupt(f"{len(layers)} layers are here, but `num_layers` is {said}", where=dist.common.path, hint=MIXED)


def _stages(dist: DistFiles, found: SplitItems) -> Stages | None:
    """The run's stages. Only flat buffers need them; else it is no error if the arguments do not tell."""
    try:
        return stages_of(dist.args, dist.parallel.pp)
    except Unsupported:
        if found.flat:
            raise
        return None


def _states(
    dist: DistFiles, found: SplitItems, layout: Layout, weights: Mapping[str, Tensor], stages: Stages | None
) -> dict[str, dict[str, Tensor]]:
    """The optimizer's states of each parameter, whole."""
    states: dict[str, dict[str, Tensor]] = {}
    for state, by_key in found.states.items():
        shaped: dict[str, Tensor] = {}
        for key, tensor in by_key.items():
            weight = found.model.get(key)
            if weight is not None and len(tensor.shape) == len(weight.shape) + 1:
                tensor = unflattened(key, tensor, weight.shape)
            shaped[key] = tensor
        for name, tensor in named(shaped).items():
            if tensor.fragments or not tensor.size:  # of a layer that is frozen, its stack has nothing
                states.setdefault(name, {})[state] = tensor
    if found.flat and stages is not None:
        model = BufferedModel(dist.args, dist.parallel, stages, layout, weights)
        for name, held in states_of(model, found).items():
            states.setdefault(name, {}).update(held)
    return states


def _groups(
    dist: DistFiles, found: SplitItems, weights: Mapping[str, Tensor], states: Mapping[str, dict[str, Tensor]]
) -> tuple[tuple[Group, ...], dict[str, dict[str, Value]]]:
    """Parameter groups, and the step of each parameter."""
    trained = [name for name in weights if name in states]
    made: list[Group] = []
    steps: dict[str, dict[str, Value]] = {}
    for experts, saved in _optimizers(dist, found):
        listed = saved.get("param_groups") or []
        common = (saved.get("state") or {}).get("common_step")
        named = [((0, n), weights[n].shape) for n in trained if experts is None or is_expert(n) == experts]
        for group, keys in zip(
            listed, members(listed, named, experts, dist.common.path, decayed_norms(dist.args)), strict=True
        ):
            said = options_of(group, dist.common.path)
            step = said.pop("step", common)
            names = tuple(name for _, name in keys)
            made.append(Group(said, names))
            if isinstance(step, Leaf):  # PyTorch's own optimizers keep it as a tensor
                for name in names:
                    states[name]["step"] = tensor_leaf(step)
            elif step is not None:
                steps |= {name: {"step": step} for name in names}
    return tuple(made), steps


def _optimizers(dist: DistFiles, found: SplitItems) -> list[tuple[bool | None, Mapping[str, Value]]]:
    """Whose parameters each optimizer has (experts', others', all), and what it says of itself."""
    if found.objects:  # each rank group says it for itself, all the same
        _check_rank_groups(dist, found)
        by_chain = {
            chain: said["optimizer"]
            for (chain, _), said in sorted(found.objects.items(), reverse=True)
            if "optimizer" in said
        }
    else:
        saved = dist.root.get("optimizer")
        if not isinstance(saved, dict):
            return []
        by_chain = {key: value for key, value in saved.items() if type(key) is int} or {0: saved}
        by_chain = {key: value.get("optimizer", value) for key, value in by_chain.items()}
    apart = len(by_chain) > 1
    return [(bool(chain) if apart else None, by_chain[chain]) for chain in sorted(by_chain)]


def _check_rank_groups(dist: DistFiles, found: SplitItems) -> None:
    """Raises `Corrupt` if rank groups disagree on the options of a parameter group, such as its learning rate."""
    statements: list[Statement] = []
    for (chain, index), said in sorted(found.objects.items()):
        optimizer = said.get("optimizer")
        listed = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
        for number, group in enumerate(listed if isinstance(listed, list) else ()):
            for key, value in group.items() if isinstance(group, dict) else ():
                if isinstance(value, (bool, int, float, str)):
                    what = f"`{printable(str(key))}` of optimizer group {number}{' of experts' if chain else ''}"
                    statements.append(Statement(what, f"rank group {index}", value))
    check_agreement(statements, dist.path)


def _saved_by_optimizers(dist: DistFiles, found: SplitItems) -> Value:
    """What the optimizer says of itself, or each of several: for all ranks, or for each group of ranks the same."""
    by_chain = {chain: said for (chain, _), said in sorted(found.objects.items(), reverse=True)}
    saved = by_chain or dist.root.get("optimizer")
    return saved[0] if isinstance(saved, dict) and saved.keys() == {0} else saved


def _extras(dist: DistFiles, found: SplitItems, parameters: dict[str, Parameter]) -> dict[str, Value]:
    """All else: what ranks have in common, then what each has of its own."""
    common = {str(key): value for key, value in dist.root.items() if key != "optimizer"}
    if beside := optimizer_items(_saved_by_optimizers(dist, found)):
        common["optimizer"] = beside
    by_rank: dict[str, dict[str, Value]] = {}
    states: dict[str, Value] = {}
    for key, value in found.others.items():
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
    """The name of a module's extra state, of its key and its place in the stack."""
    for name, at in _small(key, lengths):
        if at == place[: len(at)]:
            return name if not any(place[len(at) :]) else f"{name}/{'.'.join(map(str, place[len(at) :]))}"
    return f"{key}/{'.'.join(map(str, place))}"


def _small(key: str, lengths: tuple[int, ...]) -> Sequence[tuple[str, tuple[int, ...]]]:
    try:
        return list(names_of(key, lengths))
    except Corrupt:
        return []
