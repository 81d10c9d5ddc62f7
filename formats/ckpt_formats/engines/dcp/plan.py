"""Decide into which file each item is written: one file for each rank that writes something."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.format import FilePlan
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp.balance import BytesPerRank, RankGrid, blocks
from ckpt_formats.engines.dcp.entries import Entry, EntryLayouts, ItemsContent, block_of
from ckpt_formats.engines.dcp.folder import ACCELERATE as FOLDERS
from ckpt_formats.engines.dcp.metadata import Steps
from ckpt_formats.engines.dcp.nesting import flattened
from ckpt_formats.engines.dcp.options import RankOptions
from ckpt_formats.engines.dcp.read import PAIR
from ckpt_formats.state_dicts.keys import ACCELERATE, NESTED, STYLES, keys_of
from ckpt_formats.state_dicts.universal_info import ORIGIN, rules_of
from ckpt_formats.state_dicts.write import state_tree


def plan_files(source: Checkpoint, options: RankOptions) -> tuple[FilePlan, ...]:
    """The files to write. Raises `Unsupported` for what PyTorch cannot hold."""
    chosen = STYLES[options.keys] if isinstance(options.keys, str) else options.keys
    keys = chosen or keys_of(source.origin.layout.get("keys")) or NESTED
    pair = chosen == ACCELERATE or (chosen is None and source.origin.layout.get(PAIR) is True)
    tree = state_tree(source, keys, objects=True)
    placement = _Placement(source, mesh_of(source, options), _rules(source, options))
    if not pair:
        return tuple(placement.parts("", tree))
    optimizer = {key: value for key, value in tree.items() if key == keys.optimizer}
    rest = {key: value for key, value in tree.items() if key != keys.optimizer}
    trees = dict(zip(FOLDERS, (rest, optimizer), strict=True))
    return tuple(
        part for folder, subtree in trees.items() if subtree for part in placement.parts(f"{folder}/", subtree)
    )


def mesh_of(source: Checkpoint, options: RankOptions) -> RankGrid:
    """The ranks of the options; else as many as wrote the source, if it states them; else one."""
    tp = options.tp or 1
    world = source.origin.layout.get("world")
    return RankGrid(options.dp or (max(1, world // tp) if type(world) is int else 1), tp)


def _rules(source: Checkpoint, options: RankOptions) -> tuple[Rule, ...]:
    info = source.extras.get(ORIGIN)
    return (*options.rules, *(rules_of(info, source.path) if isinstance(info, dict) and info else ()))


@dataclass(frozen=True)
class _Placement:
    source: Checkpoint
    mesh: RankGrid
    rules: tuple[Rule, ...]

    def parts(self, prefix: str, tree: Mapping[str, Value]) -> Iterator[FilePlan]:
        """The files of one folder. Objects are in the first rank's file, before its tensors, as PyTorch writes them."""
        layouts, totals = EntryLayouts(), BytesPerRank(self.mesh.world)
        entries: list[list[Entry]] = [[] for _ in range(self.mesh.world)]
        sizes = [0] * self.mesh.world
        for entry, holders in self._entries(tree):
            size = layouts.of(entry).nbytes
            rank = totals.give(holders, size)
            entries[rank].append(entry)
            sizes[rank] += size
        for rank, of_rank in enumerate(entries):
            if of_rank:
                yield FilePlan(
                    f"{prefix}__{rank}_0.distcp",
                    self._parameters(of_rank),
                    ItemsContent(tuple(of_rank)),
                    sizes[rank],
                    "data",
                    {"rank": rank},
                    tuple(block_of(entry) for entry in of_rank if entry.box is not None),
                )

    def _entries(self, tree: Mapping[str, Value]) -> Iterator[tuple[Entry, Sequence[int]]]:
        """Every item, and the ranks that could write it."""
        leaves = [(number, *leaf) for number, leaf in enumerate(flattened(tree))]
        for number, name, path, value in leaves:
            if not isinstance(value, Tensor):
                yield Entry(name, path, number, value), (0,)
        for number, name, path, value in leaves:
            if isinstance(value, Tensor):
                for chunk, (box, holders) in enumerate(self._blocks(path, value.shape)):
                    yield Entry(name, path, number, value, box, chunk), holders

    def _blocks(self, path: Steps, shape: Shape) -> Iterator[tuple[Box, Sequence[int]]]:
        """The blocks of a tensor, and the ranks that have each. FSDP2 shards parameters; every rank has all buffers."""
        owner = self._owner(path)
        if owner is None or owner.role in ("buffer", "extra") or not prod(shape):
            yield Box.whole(shape), range(self.mesh.world)
            return
        rule = next((rule for rule in self.rules if rule.matches(owner.name)), None) if self.mesh.tp > 1 else None
        axis = rule.axis if rule is not None and rule.how == "sharded" and rule.axis < len(shape) else None
        yield from blocks(shape, self.mesh, axis)

    def _owner(self, path: Steps) -> Parameter | None:
        """The parameter to which a tensor of the state dict belongs."""
        parameters = self.source.parameters
        for step in path:
            if step in parameters:
                return parameters[str(step)]
        # In a flat optimizer, `state.<FQN>.<state>`.
        name = str(path[-1]).removeprefix("state.")
        while name and name not in parameters:
            name = name.rpartition(".")[0]
        return parameters.get(name)

    def _parameters(self, entries: Sequence[Entry]) -> tuple[Parameter, ...]:
        owners = (self._owner(entry.path) for entry in entries if entry.box is not None)
        return tuple({owner.name: owner for owner in owners if owner is not None}.values())
