"""Merge the model of all ranks: complete tensors by name, for every kind of state dict of FSDP."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.values import Value
from ckpt_formats.engines.fsdp_ranks.flat_parameter import innermost, unflatten, units_of
from ckpt_formats.engines.fsdp_ranks.leaves import Leaf
from ckpt_formats.engines.fsdp_ranks.lookups import FLAT
from ckpt_formats.engines.fsdp_ranks.merge import RankMerge
from ckpt_formats.engines.fsdp_ranks.sharded_tensor import ShardedTensor

Trees = Mapping[int, Mapping[str, Value]]
"""State dicts by rank."""


def merge_model(
    trees: Trees, merge: RankMerge, shapes: Mapping[str, Shape], listed: Sequence[str], where: Path
) -> dict[str, Value]:
    """The model's state dict. `shapes` and `listed` are needed only if parameters are flat: see `unflatten`."""
    names = dict.fromkeys(name for tree in trees.values() for name in tree)
    if not any(is_flat(name) for name in names):
        merged: dict[str, Value] = merge.tree(trees)
        return merged
    leaves = {name: by_rank for name in names if (by_rank := _leaves(name, trees))}
    units = units_of(leaves)
    parameters = unflatten(leaves, units, shapes, listed, where)
    prefixes = {name: prefix for name in parameters if (prefix := innermost(name, units)) is not None}
    merge.sharded |= {name: units[prefix].leaves for name, prefix in prefixes.items()}
    done = {*parameters, *(prefix + FLAT for prefix in units)}
    rest = {rank: {n: v for n, v in tree.items() if n not in done} for rank, tree in trees.items()}
    return {**parameters, **merge.tree(rest)}


def is_flat(name: Value) -> bool:
    """Is it the name of a flat parameter of FSDP1?"""
    return isinstance(name, str) and name.rpartition(".")[2] == FLAT


def stated_shapes(optimizers: Trees) -> dict[str, Shape]:
    """The shapes of parameters, from optimizer states that have names and are saved in these shapes.

    FSDP1 reshapes an optimizer's states of a flattened parameter to the shape of the
    parameter, and saves them as ShardedTensors.
    """
    shapes: dict[str, Shape] = {}
    for tree in optimizers.values():
        states = tree.get("state")
        for name, state in states.items() if isinstance(states, dict) else ():
            if isinstance(name, str) and name not in shapes and isinstance(state, dict):
                stated = {leaf.shape for leaf in state.values() if isinstance(leaf, ShardedTensor)}
                if len(stated) == 1:
                    shapes |= dict.fromkeys([name], *stated)
    return shapes


def shapes_in(checkpoint: Checkpoint | None) -> dict[str, Shape]:
    """The shapes of a checkpoint's parameters, under their names and aliases; empty without a checkpoint."""
    if checkpoint is None:
        return {}
    shapes = {p.name: p.weight.shape for p in checkpoint.parameters.values() if p.role != "extra"}
    return shapes | {alias: shapes[name] for alias, name in checkpoint.aliases.items() if name in shapes}


def _leaves(name: str, trees: Trees) -> dict[int, Leaf]:
    return {rank: tree[name] for rank, tree in trees.items() if isinstance(tree.get(name), Leaf)}
