"""The model of all ranks: whole tensors by name, whichever way FSDP saved them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.values import Value
from ckpt_formats.engines.fsdp_ranks.flat_parameter import FLAT, innermost, unflatten, units_of
from ckpt_formats.engines.fsdp_ranks.leaves import Leaf
from ckpt_formats.engines.fsdp_ranks.merge import RankMerge
from ckpt_formats.engines.fsdp_ranks.sharded_tensor import ShardedTensor

Trees = Mapping[int, Mapping[str, Value]]
"""A state dict for each rank."""


def merge_model(
    trees: Trees, merge: RankMerge, shapes: Mapping[str, Shape], listed: Sequence[str], where: Path
) -> dict[str, Value]:
    """The model's state dict. `shapes` and `listed` are needed only where parameters are flat: see `unflatten`."""
    names = dict.fromkeys(name for tree in trees.values() for name in tree)
    if not any(is_flat(name) for name in names):
        merged: dict[str, Value] = merge.tree(trees)
        return merged
    leaves = {name: held for name in names if (held := _leaves(name, trees))}
    units = units_of(leaves)
    found = unflatten(leaves, units, shapes, listed, where)
    merge.spread |= {name: units[prefix].held for name in found if (prefix := innermost(name, units)) is not None}
    flats = {prefix + FLAT for prefix in units}
    rest = {rank: {n: v for n, v in tree.items() if n not in flats and n not in found} for rank, tree in trees.items()}
    return {**found, **merge.tree(rest)}


def is_flat(name: Value) -> bool:
    """Is it what FSDP1 calls a flat parameter?"""
    return isinstance(name, str) and name.rpartition(".")[2] == FLAT


def shapes_stated(optimizers: Trees) -> dict[str, Shape]:
    """Shapes of the parameters whose states, by name, come in the parameters' shapes.

    FSDP1 reshapes whatever an optimizer keeps of a flattened parameter's elements to
    the parameter's shape, and saves it as a ShardedTensor.
    """
    found: dict[str, Shape] = {}
    for tree in optimizers.values():
        states = tree.get("state")
        for name, state in states.items() if isinstance(states, dict) else ():
            if isinstance(name, str) and name not in found and isinstance(state, dict):
                stated = {leaf.shape for leaf in state.values() if isinstance(leaf, ShardedTensor)}
                if len(stated) == 1:
                    found |= dict.fromkeys([name], *stated)
    return found


def shapes_in(checkpoint: Checkpoint | None) -> dict[str, Shape]:
    """The shapes of a checkpoint's parameters, under all names they have."""
    if checkpoint is None:
        return {}
    shapes = {p.name: p.weight.shape for p in checkpoint.parameters.values() if p.role != "extra"}
    return shapes | {alias: shapes[name] for alias, name in checkpoint.aliases.items() if name in shapes}


def _leaves(name: str, trees: Trees) -> dict[int, Leaf]:
    return {rank: tree[name] for rank, tree in trees.items() if isinstance(tree.get(name), Leaf)}
