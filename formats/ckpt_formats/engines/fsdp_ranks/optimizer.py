"""Merge the optimizer of all ranks.

States that FSDP's functions saved are DTensors or ShardedTensors and are merged like
the model. `optimizer.state_dict()` of FSDP1 contains slices of flattened parameters, by
number; a slice is missing if the rank has no element of the parameter.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from ckpt_formats.containers.torchfile import TensorRef
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Tensor, with_replicas
from ckpt_formats.core.values import Value
from ckpt_formats.engines.fsdp_ranks.flat_parameter import slices_of
from ckpt_formats.engines.fsdp_ranks.leaves import Leaf, copies_of, merge_leaves
from ckpt_formats.engines.fsdp_ranks.merge import RankMerge
from ckpt_formats.engines.fsdp_ranks.model import Trees
from ckpt_formats.state_dicts.parameter_order import NamedTensor, NumberedGroup, NumberedParameter, only_assignment
from ckpt_formats.state_dicts.read import role_of

ShardedLeaves = Mapping[str, Mapping[int, Leaf]]

UNNAMED = (
    "the optimizer's states are slices of FSDP1's flattened parameters, and the files do not name the parameters; the "
    "states are carried as each rank has them. With use_orig_params=True, list the parameters in the order of the "
    "module with --param-order; otherwise let the job save FSDP.optim_state_dict(model, optimizer)"
)
_WRONG_ORDER = (
    "Is --param-order right? With use_orig_params=False the states belong to complete units, which the files do not "
    "describe: let the job save FSDP.optim_state_dict(model, optimizer)."
)


def merge_optimizer(
    trees: Trees, model: Mapping[str, Tensor], sharded: ShardedLeaves, order: Sequence[str]
) -> dict[str, Value] | None:
    """The optimizer's state dict; None if its states are slices that cannot be matched to parameters.

    `sharded` has the leaves by rank of those tensors of the model that are not complete on every rank.
    Raises `CorruptError` if ranks contradict each other.
    """
    if sharded and any(_is_vector(value) for tree in trees.values() for own in _states(tree) for value in own.values()):
        return _of_slices(trees, model, sharded, order)
    merged: dict[str, Value] = RankMerge().tree(trees, strict=True)
    return merged


def names_in_groups(trees: Trees) -> tuple[str, ...]:
    """The names of the optimizer's parameters, in its order; empty if it has no names."""
    tree = next(iter(trees.values()), {})
    groups = tree.get("param_groups")
    listed = [group.get("params") for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    return tuple(name for names in listed if isinstance(names, list) for name in names if isinstance(name, str))


def matched_by_order(trees: Trees, merged: Mapping[str, Value], model: Mapping[str, Tensor]) -> bool:
    """Were numbered slices matched by order to tensors, some of which have the same number of elements?"""
    if not _numbers(next(iter(trees.values()), {})) or _numbers(merged):
        return False
    counts = Counter(tensor.size for tensor in model.values() if isinstance(tensor, Tensor))
    listed = (name for group in merged["param_groups"] for name in group["params"])
    return any(counts[model[name].size] > 1 for name in listed)


def _numbers(tree: Mapping[str, Value]) -> bool:
    """Does an optimizer have only numbers for its parameters?"""
    groups = tree.get("param_groups")
    listed = [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
    keys = [key for group in listed if "param_names" not in group for key in group.get("params", ())]
    return any(isinstance(key, int) for key in keys)


def _of_slices(
    trees: Trees, model: Mapping[str, Tensor], sharded: ShardedLeaves, order: Sequence[str]
) -> dict[str, Value] | None:
    """The merged state dict of slices. Vectors are slices, or replicas if all of them have the parameter's shape."""
    groups = RankMerge().tree({rank: tree["param_groups"] for rank, tree in trees.items()}, "param_groups", strict=True)
    keys = [key for group in groups for key in group["params"]]
    by_rank = {key: {rank: tree["state"][key] for rank, tree in trees.items() if key in tree["state"]} for key in keys}
    titles = _titles(keys, groups, by_rank, model, order)
    if titles is None or not set(titles.values()) <= model.keys():
        return None
    states = {
        titles[key]: {
            state: _merged(f"{titles[key]}.{state}", state, own, model[titles[key]].shape, sharded.get(titles[key], {}))
            for state in dict.fromkeys(state for one in own.values() for state in one)
        }
        for key, own in by_rank.items()
        if own
    }
    left_out = ("params", "param_names")
    named = [
        {**{k: v for k, v in group.items() if k not in left_out}, "params": [titles[key] for key in group["params"]]}
        for group in groups
    ]
    return {"state": states, "param_groups": named}


def _merged(
    name: str, state: str, states: Mapping[int, Mapping[str, Value]], shape: Shape, sharded: Mapping[int, Leaf]
) -> Value:
    values = {rank: state_of_rank[state] for rank, state_of_rank in states.items() if state in state_of_rank}
    refs = {rank: value for rank, value in values.items() if isinstance(value, TensorRef)}
    if len(refs) < len(values) or any(len(ref.shape) != 1 for ref in refs.values()):
        return RankMerge().tree(values, name, strict=True)
    if not sharded or all(ref.shape == shape for ref in refs.values()):
        return merge_leaves(name, refs)
    slices = [[refs[rank] for rank in ranks if rank in refs] for ranks in copies_of(sharded)]
    return with_replicas([slices_of(name, shape, of_copy, _WRONG_ORDER) for of_copy in slices if of_copy])


def _titles(
    keys: Sequence[Value],
    groups: Sequence[Mapping[str, Value]],
    states: Mapping[Value, Mapping[int, Mapping[str, Value]]],
    model: Mapping[str, Tensor],
    order: Sequence[str],
) -> dict[Value, str] | None:
    """The name of each key: the key, a name from the groups or from `order`, or the only assignment that fits sizes."""
    if all(isinstance(key, str) for key in keys):
        return {key: key for key in keys}
    listed = [name for group in groups for name in group.get("param_names", ())]
    if len(listed) == len(keys):
        return dict(zip(keys, listed, strict=True))
    if order:
        fit = all(isinstance(key, int) and 0 <= key < len(order) for key in keys)
        return {key: order[key] for key in keys} if fit else None
    flat = [NamedTensor(name, Tensor((tensor.size,), tensor.dtype, ())) for name, tensor in model.items()]
    trained = [one for one in flat if role_of(one) != "buffer"]
    runs = [NumberedGroup(tuple(_slot(states[key]) for key in group["params"])) for group in groups]
    matches = only_assignment(runs, trained) if trained else None
    return None if matches is None else {groups[m.group]["params"][m.start]: m.name for m in matches}


def _slot(states: Mapping[int, Mapping[str, Value]]) -> NumberedParameter:
    """A numbered parameter with the number of elements that all ranks together have of each state."""
    sizes: dict[str, int] = {}
    for state_of_rank in states.values():
        for state, value in state_of_rank.items():
            if isinstance(value, TensorRef) and len(value.shape) == 1:
                sizes[state] = sizes.get(state, 0) + value.size
    return NumberedParameter(None, {state: (size,) for state, size in sizes.items()})


def _states(tree: Mapping[str, Value]) -> Iterator[Mapping[str, Value]]:
    states = tree.get("state")
    for state in states.values() if isinstance(states, dict) else ():
        if isinstance(state, dict):
            yield state


def _is_vector(value: Value) -> bool:
    """Is it a plain tensor with one axis and not one element?"""
    return isinstance(value, TensorRef) and len(value.shape) == 1 and value.size != 1
