"""Whole parameters of a checkpoint of boxes: each tensor has a fragment for each block that a box has. Lazy."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, ErrorFigures, Parameter
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Blob, FileBlob, FlatRangeBlob, Fragment, Tensor
from ckpt_formats.universal.boxes.table import BoxPlace, BoxTable
from ckpt_formats.universal.error_figures import worst
from ckpt_formats.universal.index import Index
from ckpt_formats.universal.manifest import Manifest, PackFiles
from ckpt_formats.universal.shared_packs import manifest_of
from ckpt_formats.universal.stored import ReplayedParameters, StateDigests, StateKey, StoredParameters, state_errors


@dataclass(frozen=True, eq=False)
class WholeParameters(ReplayedParameters):
    """The parameters of a checkpoint of boxes by name. Each is created once, when it is looked up."""

    table: BoxTable
    entries: Index
    stored: Mapping[str, Parameter]
    """The boxes by their own names."""
    names: Collection[str]
    """The parameters that there are: of an ancestor only what is needed."""
    created: dict[str, Parameter] = field(default_factory=dict, repr=False)

    @property
    def before(self) -> Mapping[str, Parameter]:
        boxes = self.stored.parent if isinstance(self.stored, StoredBoxes) else None
        return boxes.parent if isinstance(boxes, ParentBoxes) else {}

    def __reduce__(self) -> tuple[object, ...]:
        """Without what was created."""
        return WholeParameters, (self.table, self.entries, self.stored, frozenset(self.names))

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.table.names if name in self.names)

    def __len__(self) -> int:
        return len(self.names)

    def create(self, name: str) -> Parameter:
        fragments: dict[str, list[Fragment]] = {}
        first: dict[str, tuple[BoxPlace, Tensor]] = {}
        rows = self.table.rows(self.table.numbers[name])
        for row in rows:
            for state, tensor in self.stored[self.entries.names[row]].states.items():
                place = self.table.place(row, tensor.shape)
                first.setdefault(state, (place, tensor))
                fragments.setdefault(state, []).extend(_fragments(place, tensor.fragments[0].blob))
        own = self.stored[self.entries.names[rows[0]]]
        states = {
            state: Tensor(place.shape, tensor.dtype, tuple(fragments[state]))
            for state, (place, tensor) in first.items()
        }
        return Parameter(name, own.role, states, own.values)


@dataclass(frozen=True, eq=False)
class StoredBoxes(StoredParameters):
    """The boxes of a checkpoint, as parameters of their own."""

    boxes: BoxTable = field(kw_only=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """Without what was created."""
        return partial(StoredBoxes, boxes=self.boxes), (self.files, self.index, frozenset(self.names), self.parent)

    def owner(self, box: str) -> str:
        """The name of the parameter of a box."""
        return self.boxes.names[self.boxes.owners[self.index.numbers[box]]]

    def split_copies(self) -> Iterator[Parameter]:
        """The whole parameters whose masters and models' copies are in different boxes."""
        columns, states = self.index.columns, {name: n for n, name in enumerate(self.index.tables.states)}
        if not {MASTER, MODEL} <= states.keys():
            return
        rows_of = [
            set(columns["state.parameter"][columns["state.name"] == states[name]].tolist()) for name in (MASTER, MODEL)
        ]
        owners = [{self.boxes.owners[box] for box in some} for some in (*rows_of, rows_of[0] & rows_of[1])]
        whole = WholeParameters(self.boxes, self.index, self, self.boxes.numbers.keys())
        for number in sorted((owners[0] & owners[1]) - owners[2]):
            yield whole[self.boxes.names[number]]


@dataclass(frozen=True, eq=False)
class ParentBoxes(Mapping[str, Parameter]):
    """What the deltas of boxes are against: the same elements of the parameters of the parent, by the name of a box.

    If the parent has the same box, its deltas are replayed chunk by chunk; else the elements are read as values.
    """

    table: BoxTable
    stated: Manifest
    parent: Mapping[str, Parameter]
    """The whole parameters of the parent."""

    def __getitem__(self, name: str) -> Parameter:
        row = self.stated.entries.numbers[name]
        whole = self.parent[self.table.names[self.table.owners[row]]]
        entry = self.stated.entries[row]
        needed = () if entry.delta is None else entry.delta.parent_states
        own = self.table.place(row, entry.states[needed[0]].shape) if needed else None
        if own is None:
            return whole
        same = self._same_box(whole.name, own, needed)
        if same is not None:
            return same
        there = {state: whole.states[state] for state in needed if state in whole.states}
        states = {state: _cut_out(tensor, own) for state, tensor in there.items() if tensor.shape == own.shape}
        return replace(whole, states=states) if states else whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.stated.entries.names)

    def __len__(self) -> int:
        return len(self.stated.entries)

    def _same_box(self, name: str, own: BoxPlace, needed: Collection[str]) -> Parameter | None:
        parent = self.parent
        if not isinstance(parent, WholeParameters):
            return None
        for row in parent.table.rows(parent.table.numbers[name]):
            entry = parent.entries[row]
            if all(state in entry.states for state in needed):
                places = [parent.table.place(row, entry.states[state].shape) for state in needed]
                if all(place == own for place in places):
                    return parent.stored[entry.name]
        return None


def whole_parameters(
    files: PackFiles, stated: Manifest, table: BoxTable, names: Collection[str], parent: Mapping[str, Parameter]
) -> WholeParameters:
    """The parameters of a checkpoint of boxes. `parent`: those of its parent, whole."""
    entries = stated.entries
    before = ParentBoxes(table, stated, parent)
    stored = StoredBoxes(files, entries, entries.numbers.keys(), before, boxes=table)
    return WholeParameters(table, entries, stored, names)


def box_errors(stated: Manifest, table: BoxTable) -> dict[StateKey, ErrorFigures]:
    """The figures of approximate states of whole parameters: the worst of their boxes."""
    figures: dict[StateKey, list[ErrorFigures]] = {}
    for (box, state), error in state_errors(stated.entries).items():
        name = table.names[table.owners[stated.entries.numbers[box]]]
        figures.setdefault((name, state), []).append(error)
    return {key: worst(of_state) for key, of_state in figures.items()}


def as_stored(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with its boxes in the place of whole parameters, and the checksums of their values.

    One without boxes is returned as it is.
    """
    parameters, stated = checkpoint.parameters, manifest_of(checkpoint)
    if not isinstance(parameters, WholeParameters) or stated is None:
        return checkpoint
    entries = stated.entries
    return replace(
        checkpoint,
        parameters=parameters.stored,
        groups=(),
        aliases={},
        extras={},
        digests=StateDigests(entries),
        errors=state_errors(entries),
    )


def with_stored(checkpoint: Checkpoint, stored: Mapping[str, Parameter]) -> Checkpoint:
    """The checkpoint with other parameters: those of `as_stored`, with the same values at other places."""
    parameters = checkpoint.parameters
    if isinstance(parameters, WholeParameters):
        return replace(checkpoint, parameters=replace(parameters, stored=stored, created={}))
    return replace(checkpoint, parameters=stored)


def _fragments(place: BoxPlace, blob: Blob) -> Iterator[Fragment]:
    if place.own == place.block.shape:
        if place.size:
            yield Fragment(place.block, blob)
        return
    at = 0
    for box in place.boxes():
        yield Fragment(box, part_of_vector(blob, at, box.shape))
        at += box.size


def part_of_vector(vector: Blob, at: int, shape: Shape) -> Blob:
    """Elements of a vector from `at` on, in another shape."""
    size = prod(shape)
    if isinstance(vector, FileBlob):
        return vector.flat(at, at + size).shaped(shape)
    if isinstance(vector, DerivedBlob):  # so that others see of what it is derived
        return DerivedBlob(vector.codec, part_of_vector(vector.base, at, shape), vector.dtype)
    from ckpt_formats.core.views import ReshapedBlob  # most states are not in boxes

    return ReshapedBlob(vector.crop(Box((at,), (at + size,))), shape, Box.whole(shape))


def _cut_out(tensor: Tensor, place: BoxPlace) -> Tensor:
    """The elements of a box of a whole tensor, in the shape of the box. Lazy, and never a replay of their own."""
    block = tensor.crop(place.block)
    if place.own == place.block.shape:
        return Tensor(place.own, tensor.dtype, (Fragment(Box.whole(place.own), block),))
    return Tensor.of(FlatRangeBlob(block, place.first, place.first + place.size))
