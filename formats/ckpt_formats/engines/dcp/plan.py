"""Decide into which file each item is written: one file for each rank that writes something.

A file is planned by the number of its rank. Its items are listed when it is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.format import Counts, FileLayouts, FilePlan, TensorRanges
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp.balance import BlockRows, RankGrid, block_rows
from ckpt_formats.engines.dcp.entries import Entry, EntryLayouts, ItemsContent, block_of
from ckpt_formats.engines.dcp.folder import ACCELERATE as FOLDERS
from ckpt_formats.engines.dcp.metadata import Steps
from ckpt_formats.engines.dcp.nesting import flattened
from ckpt_formats.engines.dcp.read import PAIR
from ckpt_formats.state_dicts.keys import ACCELERATE, NESTED, STYLES, StateKeys, Style, keys_of
from ckpt_formats.state_dicts.universal_info import ORIGIN, rules_of
from ckpt_formats.state_dicts.write import state_tree


@dataclass(frozen=True, kw_only=True)
class RankOptions:
    """The ranks over which a checkpoint is laid out, and the keys of its state dicts. None: as in the source."""

    dp: int | None = None
    """The number of data-parallel ranks, over which the first axis of tensors is sharded."""
    tp: int | None = None
    """The number of tensor-parallel ranks; rules must state how tensors are sharded over them."""
    keys: Style | StateKeys | None = None
    """The keys of the state dicts; None: as in the source, else nested."""
    rules: tuple[Rule, ...] = ()
    """The user's rules, which come before those of the source."""


def plan_files(source: Checkpoint, options: RankOptions) -> tuple[FilePlan, ...]:
    """The files to write. Raises `Unsupported` for what PyTorch cannot hold."""
    chosen = STYLES[options.keys] if isinstance(options.keys, str) else options.keys
    keys = chosen or keys_of(source.origin.layout.get("keys")) or NESTED
    pair = chosen == ACCELERATE or (chosen is None and source.origin.layout.get(PAIR) is True)
    tree = state_tree(source, keys, objects=True)
    grid, rules = mesh_of(source, options), _rules(source, options)
    if not pair:
        return tuple(_Placement(source, grid, rules, "", tree).parts())
    optimizer = {key: value for key, value in tree.items() if key == keys.optimizer}
    rest = {key: value for key, value in tree.items() if key != keys.optimizer}
    trees = dict(zip(FOLDERS, (rest, optimizer), strict=True))
    return tuple(
        part
        for folder, subtree in trees.items()
        if subtree
        for part in _Placement(source, grid, rules, f"{folder}/", subtree).parts()
    )


def mesh_of(source: Checkpoint, options: RankOptions) -> RankGrid:
    """The ranks of the options; else as many as wrote the source, if it states them; else one."""
    tp = options.tp or 1
    world = source.origin.layout.get("world")
    return RankGrid(options.dp or (max(1, world // tp) if type(world) is int else 1), tp)


def _rules(source: Checkpoint, options: RankOptions) -> tuple[Rule, ...]:
    info = source.extras.get(ORIGIN)
    return (*options.rules, *(rules_of(info, source.path) if isinstance(info, dict) and info else ()))


Columns = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]


@dataclass(frozen=True)
class RankItems:
    """The items of one rank."""

    rank: int


@dataclass(frozen=True)
class _Leaf:
    """A tensor of the state dict."""

    name: str
    path: Steps
    number: int
    tensor: Tensor
    owner: str | None
    """The parameter to which it belongs."""
    columns: tuple[BlockRows, ...]
    """The blocks over which it is sharded; none if one rank writes all of it."""

    def block(self, chunk: int, box: Box) -> Entry:
        return Entry(self.name, self.path, self.number, self.tensor, box, chunk)


@dataclass(frozen=True)
class _Table:
    """Who writes what."""

    nbytes: Counts
    """Bytes of each rank's file: (dp, tp) int64."""
    items: Counts
    """Its number of items: (dp, tp) int64."""
    writers: tuple[Columns | int | None, ...]
    """For each tensor: the rank that writes all of it; or the column that writes each row of blocks, (rows,); None
    if each rank writes the block that it has."""


@dataclass(frozen=True)
class _Placement(FileLayouts):
    """The files of one folder: of which items each rank writes, it keeps what does not follow from the shape."""

    source: Checkpoint
    grid: RankGrid
    rules: tuple[Rule, ...]
    prefix: str
    tree: Mapping[str, Value]

    def parts(self) -> Iterator[FilePlan]:
        """The files. Objects are in the first rank's file, before its tensors, as PyTorch writes them."""
        for rank in np.flatnonzero(self._table.items).tolist():
            name, size = f"{self.prefix}__{rank}_0.distcp", int(self._table.nbytes.flat[rank])
            yield FilePlan(name, (), RankItems(rank), size, "data", {"rank": rank}, (), self)

    def lay_out(self, file: FilePlan) -> FilePlan:
        assert isinstance(file.content, RankItems)
        objects = self._objects if file.content.rank == 0 else ()
        pairs = [(leaf, leaf.block(*block)) for leaf, block in self._blocks(file.content.rank)]
        content = ItemsContent((*objects, *(entry for _, entry in pairs)))
        parameters = tuple(self.source.parameters[name] for name in self._names(leaf for leaf, _ in pairs))
        tensors = tuple(block_of(entry) for _, entry in pairs)
        return FilePlan(file.file, parameters, content, file.size, file.role, file.rank, tensors)

    def names(self, file: FilePlan) -> Sequence[str]:
        assert isinstance(file.content, RankItems)
        return self._names(leaf for leaf, _ in self._blocks(file.content.rank))

    def ranges(self, file: FilePlan) -> Sequence[TensorRanges]:
        assert isinstance(file.content, RankItems)
        starts, stops = np.zeros((2, len(self._leaves)), np.int64)
        others = []
        for i, (leaf, (chunk, box)) in self._numbered_blocks(file.content.rank):
            row = prod(box.shape[1:])
            if leaf.columns and row == prod(leaf.tensor.shape[1:]) and box.shape != leaf.tensor.shape:
                starts[i], stops[i] = box.start[0] * row, box.stop[0] * row
            else:
                others.append(block_of(leaf.block(chunk, box)))
        return [TensorRanges(self._tensors, starts, stops), TensorRanges.whole(others)]

    def _names(self, leaves: Iterator[_Leaf]) -> Sequence[str]:
        return list(dict.fromkeys(leaf.owner for leaf in leaves if leaf.owner is not None))

    def _blocks(self, rank: int) -> Iterator[tuple[_Leaf, tuple[int, Box]]]:
        return (pair for _, pair in self._numbered_blocks(rank))

    def _numbered_blocks(self, rank: int) -> Iterator[tuple[int, tuple[_Leaf, tuple[int, Box]]]]:
        """The blocks that a rank writes: number of the tensor, tensor, and number and place of the block."""
        row, column = divmod(rank, self.grid.tp)
        for i, (leaf, writers) in enumerate(zip(self._leaves, self._table.writers, strict=True)):
            if isinstance(writers, int):
                if writers == rank:
                    yield i, (leaf, (0, Box.whole(leaf.tensor.shape)))
                continue
            for rows in leaf.columns:
                if row < rows.count and rows.column in (None, column) and (writers is None or writers[row] == column):
                    yield i, (leaf, (rows.first + row, rows.box(row)))

    @cached_property
    def _table(self) -> _Table:
        """Who writes each block: of the ranks that have it, the one with the fewest bytes so far."""
        layouts = EntryLayouts()
        nbytes, items = np.zeros((2, self.grid.dp, self.grid.tp), np.int64)
        for entry in self._objects:
            nbytes[0, 0] += layouts.of(entry).nbytes
            items[0, 0] += 1
        writers: list[Columns | int | None] = []
        for leaf in self._leaves:
            writer: Columns | int | None = None
            if not leaf.columns:
                writer = int(nbytes.argmin())
                nbytes.flat[writer] += layouts.of(leaf.block(0, Box.whole(leaf.tensor.shape))).nbytes
                items.flat[writer] += 1
            for rows in leaf.columns:
                columns = np.full(rows.count, rows.column or 0)
                if rows.column is None and self.grid.tp > 1:
                    columns = nbytes[: rows.count].argmin(axis=1)
                    writer = columns.astype(np.min_scalar_type(self.grid.tp))
                first, last = (layouts.of(leaf.block(0, rows.box(row))).nbytes for row in (0, rows.count - 1))
                every = np.arange(rows.count)
                nbytes[every, columns] += np.where(every < rows.count - 1, first, last)
                items[every, columns] += 1
            writers.append(writer)
        return _Table(nbytes, items, tuple(writers))

    @cached_property
    def _objects(self) -> tuple[Entry, ...]:
        leaves = enumerate(flattened(self.tree))
        return tuple(Entry(name, path, i, value) for i, (name, path, value) in leaves if not isinstance(value, Tensor))

    @cached_property
    def _leaves(self) -> tuple[_Leaf, ...]:
        leaves = []
        for number, (name, path, value) in enumerate(flattened(self.tree)):
            if isinstance(value, Tensor):
                owner = self._owner(path)
                columns = self._columns(owner, value)
                leaves.append(_Leaf(name, path, number, value, None if owner is None else owner.name, columns))
        return tuple(leaves)

    @cached_property
    def _tensors(self) -> tuple[Tensor, ...]:
        return tuple(leaf.tensor for leaf in self._leaves)

    def _columns(self, owner: Parameter | None, tensor: Tensor) -> tuple[BlockRows, ...]:
        """The blocks over which a tensor is sharded. FSDP2 shards parameters; every rank has all buffers."""
        shape = tensor.shape
        if owner is None or owner.role in ("buffer", "extra") or not prod(shape) or not shape:
            return ()
        rule = next((rule for rule in self.rules if rule.matches(owner.name)), None) if self.grid.tp > 1 else None
        axis = rule.axis if rule is not None and rule.how == "sharded" and rule.axis < len(shape) else None
        return tuple(block_rows(shape, self.grid, axis))

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
