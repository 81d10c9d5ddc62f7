"""Decide into which file each item is written: one file for each rank that writes something.

A file is planned by the number of its rank. Its items are listed when it is written.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np

from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.format import Counts, FileLayouts, FilePlan, TensorRanges
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp.balance import BlockRows, RankGrid, block_rows
from ckpt_formats.engines.dcp.entries import Entry, EntryLayouts, ItemsContent, block_of
from ckpt_formats.engines.dcp.folder import ACCELERATE as FOLDERS
from ckpt_formats.engines.dcp.megatron_fsdp import core_name, to_megatron_fsdp
from ckpt_formats.engines.dcp.metadata import Steps
from ckpt_formats.engines.dcp.nesting import flattened
from ckpt_formats.engines.dcp.options import RankOptions
from ckpt_formats.engines.dcp.read import PAIR
from ckpt_formats.state_dicts.keys import ACCELERATE, NESTED, STYLES, StateKeys, keys_of
from ckpt_formats.state_dicts.universal_info import ORIGIN, rules_of
from ckpt_formats.state_dicts.write import state_tree


def plan_files(source: Checkpoint, options: RankOptions) -> tuple[FilePlan, ...]:
    """The files to write. Raises `UnsupportedError` for what PyTorch cannot hold."""
    chosen = STYLES[options.keys] if isinstance(options.keys, str) else options.keys
    keys = _keys(source, chosen)
    pair = chosen == ACCELERATE or (chosen is None and source.origin.layout.get(PAIR) is True)
    tree = state_tree(source, keys, objects=True)
    if keys.megatron_fsdp:
        tree = to_megatron_fsdp(tree, source)
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


def _keys(source: Checkpoint, chosen: StateKeys | None) -> StateKeys:
    """The chosen keys, else those of the source. Raises `UnsupportedError` for keys that these names cannot have."""
    keys = chosen or keys_of(source.origin.layout.get("keys")) or NESTED
    if not keys.megatron_fsdp:
        return keys
    # Imported only here: it loads the tables of many models.
    from ckpt_formats.names.translate import naming_of

    if naming_of(source) == "megatron":
        return keys
    if chosen is None:
        return NESTED
    raise UnsupportedError(
        "Megatron-FSDP needs the names of Megatron core",
        where=source.path,
        hint="Choose them with --names megatron.",
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

    def block(self, chunk: int, box: Box) -> Entry:
        return Entry(self.name, self.path, self.number, self.tensor, box, chunk)


@dataclass(frozen=True)
class _Table:
    """Who writes what. Tensors that are sharded have one or more `BlockRows`, which are numbered in their order."""

    nbytes: Counts
    """Bytes of each rank's file: (dp, tp) int64."""
    items: Counts
    """Its number of items: (dp, tp) int64."""
    wholes: Counts
    """The rank that writes all of a tensor, or -1 if it is sharded: (tensors,) int64."""
    rows: tuple[BlockRows, ...]
    owners: Counts
    """The number of the tensor: (block rows,) int64."""
    counts: Counts
    """The number of blocks: (block rows,) int64."""
    columns: Counts
    """The column that writes all of them, or -1 if each row has another one: (block rows,) int64."""
    writers: Columns
    """For those: the column that writes the block of each row, (dp, block rows where `columns` is -1)."""

    def of_rank(self, row: int, column: int) -> tuple[Counts, Counts]:
        """The numbers of the tensors that a rank writes: those that it writes whole; and the numbers of block rows."""
        chosen = (self.counts > row) & ((self.columns == column) | (self.columns == -1))
        chosen[self.columns == -1] &= self.writers[row] == column
        return np.flatnonzero(self.wholes == row * self.nbytes.shape[1] + column), np.flatnonzero(chosen)


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
            place = {"rank": rank} | ({"tp": rank % self.grid.tp} if self.grid.tp > 1 else {})
            yield FilePlan(name, (), RankItems(rank), size, "data", place, (), self)

    def lay_out(self, file: FilePlan) -> FilePlan:
        assert isinstance(file.content, RankItems)
        objects = self._objects if file.content.rank == 0 else ()
        wholes, sharded = self._of_rank(file.content.rank)
        entries = {i: self._leaves[i].block(0, Box.whole(self._tensors[i].shape)) for i in wholes.tolist()}
        row = file.content.rank // self.grid.tp
        for k in sharded.tolist():
            rows, i = self._table.rows[k], int(self._table.owners[k])
            entries[i] = self._leaves[i].block(rows.first + row, rows.box(row))
        content = ItemsContent((*objects, *(entries[i] for i in sorted(entries))))
        parameters = tuple(self.source.parameters[name] for name in self.names(file))
        tensors = tuple(block_of(entry) for entry in content.entries[len(objects) :])
        return FilePlan(file.file, parameters, content, file.size, file.role, file.rank, tensors)

    def names(self, file: FilePlan) -> Sequence[str]:
        assert isinstance(file.content, RankItems)
        wholes, sharded = self._of_rank(file.content.rank)
        numbers = np.sort(np.concatenate([wholes, self._table.owners[sharded]]))
        key = numbers.tobytes()
        if key not in self._names:
            self._names.clear()
            owners = (self._leaves[i].owner for i in numbers.tolist())
            self._names[key] = list(dict.fromkeys(owner for owner in owners if owner is not None))
        return self._names[key]

    def ranges(self, file: FilePlan) -> Sequence[TensorRanges]:
        assert isinstance(file.content, RankItems)
        wholes, sharded = self._of_rank(file.content.rank)
        row, (partial, starts, lengths, ends) = file.content.rank // self.grid.tp, self._rows_in_order
        apart = sharded[~partial[sharded]]
        sharded = sharded[partial[sharded]]
        low, high = np.zeros((2, len(self._leaves)), np.int64)
        low[self._table.owners[sharded]] = starts[sharded] + row * lengths[sharded]
        high[self._table.owners[sharded]] = np.minimum(starts[sharded] + (row + 1) * lengths[sharded], ends[sharded])
        others = [self._tensors[i] for i in wholes.tolist()]
        for k in apart.tolist():
            rows, leaf = self._table.rows[k], self._leaves[int(self._table.owners[k])]
            others.append(block_of(leaf.block(rows.first + row, rows.box(row))))
        return [TensorRanges(self._tensors, low, high), TensorRanges.whole(others)]

    def _of_rank(self, rank: int) -> tuple[Counts, Counts]:
        return self._table.of_rank(*divmod(rank, self.grid.tp))

    @cached_property
    def _rows_in_order(self) -> tuple[Counts, Counts, Counts, Counts]:
        """Of all block rows: whether a block is a part of the tensor without holes between its elements; the first
        element, the elements of a block, and the end of the last one: 4 times (block rows,).
        """
        places = []
        for rows, owner in zip(self._table.rows, self._table.owners.tolist(), strict=True):
            shape = self._tensors[owner].shape
            size, block = prod(shape[1:]), rows.box(0).shape
            start, stop = rows.whole.start[0] * size, rows.whole.stop[0] * size
            places.append((rows.whole.shape[1:] == shape[1:] and block != shape, start, rows.length * size, stop))
        partial, starts, lengths, ends = np.array(places, np.int64).reshape(-1, 4).T
        return partial.astype(bool), starts, lengths, ends

    @cached_property
    def _names(self) -> dict[bytes, list[str]]:
        """The names that were looked up last, by the numbers of tensors: neighbours have the same."""
        return {}

    @cached_property
    def _table(self) -> _Table:
        """Who writes each block: of the ranks that have it, the one with the fewest bytes so far."""
        layouts = EntryLayouts()
        nbytes, items = np.zeros((2, self.grid.dp, self.grid.tp), np.int64)
        for entry in self._objects:
            nbytes[0, 0] += layouts.of(entry).nbytes
            items[0, 0] += 1
        wholes = np.full(len(self._leaves), -1)
        overlapping: list[tuple[int, BlockRows, int]] = []
        writers: list[Columns] = []
        sizes: dict[object, list[tuple[BlockRows, Counts]]] = {}
        for i, leaf in enumerate(self._leaves):
            axis = self._axis(leaf)
            if axis == "whole":
                rank = wholes[i] = nbytes.argmin()
                nbytes.flat[rank] += layouts.of(leaf.block(0, Box.whole(leaf.tensor.shape))).nbytes
                items.flat[rank] += 1
                continue
            kind = leaf.tensor.shape, leaf.tensor.dtype, axis
            if kind not in sizes:
                rows_of = block_rows(leaf.tensor.shape, self.grid, axis)
                sizes[kind] = [(rows, _sizes(layouts, leaf, rows)) for rows in rows_of]
            for rows, of_rows in sizes[kind]:
                column = rows.column or 0
                if rows.column is not None or self.grid.tp == 1:
                    nbytes[: rows.count, column] += of_rows
                    items[: rows.count, column] += 1
                else:
                    columns, every = nbytes[: rows.count].argmin(axis=1), np.arange(rows.count)
                    nbytes[every, columns] += of_rows
                    items[every, columns] += 1
                    writers.append(np.full(self.grid.dp, self.grid.tp, np.min_scalar_type(self.grid.tp)))
                    writers[-1][: rows.count] = columns
                    column = -1
                overlapping.append((i, rows, column))
        return _Table(
            nbytes,
            items,
            wholes,
            tuple(rows for _, rows, _ in overlapping),
            np.array([i for i, _, _ in overlapping], np.int64),
            np.array([rows.count for _, rows, _ in overlapping], np.int64),
            np.array([column for _, _, column in overlapping], np.int64),
            np.stack(writers, 1) if writers else np.zeros((self.grid.dp, 0), np.uint8),
        )

    @cached_property
    def _flattened(self) -> tuple[tuple[str, Steps, Value], ...]:
        return tuple(flattened(self.tree))

    @cached_property
    def _objects(self) -> tuple[Entry, ...]:
        values = enumerate(self._flattened)
        return tuple(Entry(name, path, i, value) for i, (name, path, value) in values if not isinstance(value, Tensor))

    @cached_property
    def _leaves(self) -> tuple[_Leaf, ...]:
        leaves = []
        for number, (name, path, value) in enumerate(self._flattened):
            if isinstance(value, Tensor):
                owner = self._owner(path)
                leaves.append(_Leaf(name, path, number, value, None if owner is None else owner.name))
        return tuple(leaves)

    @cached_property
    def _tensors(self) -> tuple[Tensor, ...]:
        return tuple(leaf.tensor for leaf in self._leaves)

    def _axis(self, leaf: _Leaf) -> int | Literal["whole"] | None:
        """The axis that tensor parallelism splits, None if there is none; or `whole` if one rank writes the tensor.

        FSDP2 shards parameters; every rank has all buffers.
        """
        owner, shape = self.source.parameters.get(leaf.owner or ""), leaf.tensor.shape
        if leaf.owner is None or owner is None or owner.role in ("buffer", "extra") or not prod(shape) or not shape:
            return "whole"
        rule = next((rule for rule in self.rules if rule.matches(owner.name)), None) if self.grid.tp > 1 else None
        return rule.axis if rule is not None and rule.how == "sharded" and rule.axis < len(shape) else None

    def _owner(self, path: Steps) -> Parameter | None:
        """The parameter to which a tensor of the state dict belongs."""
        parameters = self.source.parameters
        for step in path:
            name = core_name(step) if isinstance(step, str) and step not in parameters else step
            if name in parameters:
                return parameters[str(name)]
        # In a flat optimizer, `state.<FQN>.<state>`.
        name = str(path[-1]).removeprefix("state.")
        while name and name not in parameters:
            name = name.rpartition(".")[0]
        return parameters.get(name)


def _sizes(layouts: EntryLayouts, leaf: _Leaf, rows: BlockRows) -> Counts:
    """The bytes of the items of each row: (rows,) int64.

    Raises `UnsupportedError` for types that PyTorch does not have.
    """
    first, last = (layouts.of(leaf.block(0, rows.box(row))).nbytes for row in (0, rows.count - 1))
    return np.where(np.arange(rows.count) < rows.count - 1, first, last)
