"""Decide what is written: the leaves of the tree of each item, and into which data file each chunk goes."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from ckpt_formats.containers.zarr_write import ChunkGrid
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.format import FilePlan, Plan
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import TensorName, Value
from ckpt_formats.engines.orbax.metadata import ARRAY, DATA, DICT, EMPTY, SEQUENCE, Leaf
from ckpt_formats.engines.orbax.tree import (
    BIASES,
    COUNT,
    PARAMETERS,
    TORCH_NAMES,
    Path,
    in_training,
    path_of,
)

_JAX_NAMES = {torch: jax for jax, torch in TORCH_NAMES.items()}
_SCALARS = {bool: "bool", int: "int64", float: "float64"}
_TRAIN_STATE: dict[str, Value] = {"path": ["opt_state", "0"], "kinds": [DICT, SEQUENCE], "count": "int32"}
"""Where `optax.adamw` keeps its moments in a `TrainState` of Flax."""
_MAXTEXT = "token_embedder.embedding"
"""A name of MaxText, whose `TrainState` has the parameters of its module one level further down."""
_EMPTY_STATES = (("opt_state", "1"), ("opt_state", "2"))
"""Of weight decay and of the learning rate: they have no arrays."""


@dataclass(frozen=True)
class WrittenLeaf:
    """A leaf of a tree: with an array, a text, or an empty value."""

    leaf: Leaf
    tensor: Tensor | None = None
    text: str | None = None


@dataclass
class WrittenTree:
    """All leaves by their paths, and what has no place among them."""

    leaves: dict[Path, WrittenLeaf] = field(default_factory=dict)
    dropped: list[Notice] = field(default_factory=list)

    def add(self, path: Path, kinds: tuple[int, ...], value: Value) -> None:
        """Add a leaf. Raises `UnsupportedError` for values that Orbax cannot hold, and for two in one place."""
        where = f"`{printable('.'.join(path))}`"
        if path in self.leaves:
            raise UnsupportedError(f"two values would both be {where} of the tree")
        if isinstance(value, Tensor):
            if not prod(value.shape):
                raise UnsupportedError(f"{where} has no elements: Orbax saves no such array")
            written = WrittenLeaf(Leaf(path, kinds, ARRAY), value)
        elif isinstance(value, str):
            written = WrittenLeaf(Leaf(path, kinds, "string"), text=value)
        elif type(value) in _SCALARS:
            number = _number(value, np.dtype(_SCALARS[type(value)]), where)
            written = WrittenLeaf(Leaf(path, kinds, "scalar"), number)
        else:
            kind = next((kind for kind, empty in EMPTY.items() if type(empty) is type(value) and empty == value), None)
            if kind is None:
                raise UnsupportedError(f"{where} is {printable(str(type(value).__name__))}, which Orbax cannot hold")
            written = WrittenLeaf(Leaf(path, kinds, kind))
        self.leaves[path] = written

    def check(self) -> None:
        """Raise `UnsupportedError` if a leaf would be a dict as well."""
        for path in self.leaves:
            for end in range(1, len(path)):
                if path[:end] in self.leaves:
                    raise UnsupportedError(
                        f"`{printable('.'.join(path[:end]))}` would be an array and a dict of arrays",
                        hint="Rename it.",
                    )
        names = {".".join(path) for path in self.leaves}
        if len(names) < len(self.leaves):
            raise UnsupportedError("two leaves of the tree would have the same name: keys contain dots")


@dataclass(frozen=True)
class ChunkEntry:
    """One chunk of an array: its key in the database, and how many zeros follow the values."""

    key: str
    padding: int


@dataclass(frozen=True)
class ChunksContent:
    """The chunks of a data file, in order: their values are the tensors of the `FilePlan`."""

    entries: tuple[ChunkEntry, ...]


def plan_files(source: Checkpoint, grid: ChunkGrid, file_nbytes: int) -> Plan:
    """The data files of all items. Raises `UnsupportedError` for what Orbax cannot hold."""
    tree = tree_of(source)
    files: list[FilePlan] = []
    for _, folder, _, leaves in items_of(source, tree):
        files += _data_files(folder, leaves, grid, file_nbytes)
    return Plan(tuple(files), tuple(tree.dropped))


def items_of(source: Checkpoint, tree: WrittenTree) -> Iterator[tuple[str, str, Path, list[WrittenLeaf]]]:
    """Each item with arrays: its name, its folder, its place in the tree of all, and its leaves.

    An item without a name is the checkpoint itself.
    """
    items = tree_layout(source).get("items")
    if not isinstance(items, dict) or not items:
        items = {"": {"folder": "", "place": []}}
    by_item: dict[str, list[WrittenLeaf]] = {name: [] for name in items}
    places = {name: tuple(item["place"]) for name, item in items.items()}
    for path, leaf in tree.leaves.items():
        name = max(
            (name for name, place in places.items() if path[: len(place)] == place),
            key=lambda name: len(places[name]),
        )
        cut = len(places[name])
        own = Leaf(path[cut:], leaf.leaf.kinds[cut:], leaf.leaf.value)
        by_item[name].append(WrittenLeaf(own, leaf.tensor, leaf.text))
    for name, leaves in by_item.items():
        yield name, items[name]["folder"], places[name], leaves


def tree_layout(source: Checkpoint) -> Mapping[str, Value]:
    """Where everything was in the tree that was read, of Orbax or of Flax; nothing for other checkpoints."""
    layout = source.origin.layout
    return layout if source.origin.engine in ("orbax", "flax") and "items" in layout else {}


def tree_of(source: Checkpoint) -> WrittenTree:
    """The tree of a checkpoint: as it was in Orbax, else a `TrainState` of Flax with optax's Adam."""
    layout = tree_layout(source)
    tree = WrittenTree()
    own = [parameter for parameter in source.parameters.values() if parameter.role != "extra"]
    layout = layout or (_maxtext_layout(source) if _MAXTEXT in source.parameters else {})
    if not any(set(one.states) - {MODEL, MASTER} for one in own):
        layout = {**layout, "auxiliary": False}  # weights alone are where the converter of MaxText has them
    prefix = tuple(layout.get("params", ["params"]))
    separator = layout.get("separator", ".")
    sequences = dict(item.rsplit(":", 1) for item in layout.get("sequences", []))
    paths: dict[str, Path] = {}
    for parameter in own:
        keys = path_of(parameter.name, separator, bool(layout.get("collections")))
        lists = {int(i) for i in sequences[parameter.name].split(",")} if parameter.name in sequences else set()
        kinds = tuple(SEQUENCE if i in lists else DICT for i in range(len(keys)))
        paths[parameter.name] = keys
        place = _place(layout, (*prefix, *keys))
        tree.add(place, (*(DICT for _ in prefix), *kinds), parameter.states.get(MASTER, parameter.weight))
    copies = [p.name for p in own if MASTER in p.states and MODEL in p.states]
    if copies:
        tree.dropped.append(Notice("the rounded copies beside masters: JAX rounds while it computes", tuple(copies)))
    _add_optimizers(tree, source, own, paths, layout)
    if "items" in layout:
        broken = set(layout.get("lists", []))
        for key, value in source.extras.items():
            if not _is_item(key, source):
                _add_extras(tree, source, (key,), (DICT,), value, broken)
    else:
        if source.step is not None:
            tree.add(("step",), (DICT,), _number(source.step, np.dtype(np.int32), "the step"))
        if extras := tuple(source.extras):
            tree.dropped.append(Notice("extras", extras, Weight.LOST))
    if source.aliases:
        tree.dropped.append(Notice("other names of tied tensors", tuple(source.aliases)))
    tree.check()
    return tree


def _maxtext_layout(source: Checkpoint) -> dict[str, Value]:
    """Where a `TrainState` of MaxText has its parameters: in a collection, beside which there may be others."""
    if not any(name.startswith(f"{BIASES}.") for name in source.parameters):
        return {"params": [PARAMETERS, PARAMETERS]}
    return {"params": [PARAMETERS], "collections": True, "auxiliary": True}


def json_items(source: Checkpoint) -> dict[str, Value]:
    """Items that are JSON, by name."""
    return {key: value for key, value in source.extras.items() if _is_item(key, source)}


def _is_item(key: str, source: Checkpoint) -> bool:
    items = tree_layout(source).get("json")
    return isinstance(items, list) and key in items


def _add_optimizers(
    tree: WrittenTree,
    source: Checkpoint,
    own: Iterable[Parameter],
    paths: Mapping[str, Path],
    layout: Mapping[str, Value],
) -> None:
    """Add the states: where they were in Orbax, else where `optax.adamw` has them."""
    parameters = [p for p in own if any(state not in (MODEL, MASTER) for state in p.states)]
    known = layout.get("optimizer", [])
    if known and (len(known) > 1 and len(source.groups) != len(known)):
        raise UnsupportedError("the tree had several optimizers, whose parameters are no longer known")
    other: set[str] = set()
    for i, place in enumerate(known or ([_TRAIN_STATE] if parameters else [])):
        members = set(source.groups[i].names) if len(known) > 1 else {p.name for p in parameters}
        path, kinds = tuple(place["path"]), tuple(place["kinds"])
        counts = set()
        for parameter in parameters:
            if parameter.name not in members:
                continue
            for state, tensor in parameter.states.items():
                if state in (MODEL, MASTER, "step"):
                    continue
                if state not in _JAX_NAMES:
                    other.add(state)
                    continue
                name = _JAX_NAMES[state]
                inner = tuple(place.get("states", {}).get(name, layout.get("params", ["params"])[1:]))
                keys = paths[parameter.name]
                leaf_kinds = (*kinds, DICT, *(DICT for _ in inner), *_kinds_of(tree, layout, keys))
                tree.add((*path, name, *inner, *keys), leaf_kinds, tensor)
            if (count := parameter.count) is not None:
                counts.add(count)
        if len(counts) > 1 or any(count != int(count) for count in counts):
            text = f"parameters have taken different numbers of steps: {', '.join(map(str, sorted(counts)[:4]))}"
            raise UnsupportedError(f"{text}; optax has one count for all")
        if counts and place["count"]:
            steps = _number(int(counts.pop()), DTYPES[place["count"]], "the optimizer's number of steps")
            tree.add((*path, COUNT), (*kinds, DICT), steps)
    if parameters and not known:
        for path in _EMPTY_STATES:
            tree.add(path, (DICT, SEQUENCE), None)
    if other:
        tree.dropped.append(Notice("states that optax's Adam does not have", tuple(sorted(other)), Weight.LOST))
    if any(group.options for group in source.groups):
        tree.dropped.append(Notice("options of the optimizer: optax has them in the program"))


def _number(value: float, dtype: DType, what: str) -> Tensor:
    """A number, as a tensor without axes. Raises `UnsupportedError` if an integer type is too small for it."""
    if dtype.kind in "iu" and not np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        raise UnsupportedError(f"{what} is {value}, which {dtype.name} does not hold")
    return Tensor.of(ArrayBlob(np.asarray(value, dtype)))


def _kinds_of(tree: WrittenTree, layout: Mapping[str, Value], keys: Path) -> tuple[int, ...]:
    prefix = tuple(layout.get("params", ["params"]))
    return tree.leaves[_place(layout, (*prefix, *keys))].leaf.kinds[len(prefix) :]


def _place(layout: Mapping[str, Value], path: Path) -> Path:
    """Where a parameter is written, by the path under which it is read."""
    return in_training(path) if layout.get("auxiliary") else path


def _add_extras(
    tree: WrittenTree, source: Checkpoint, path: Path, kinds: tuple[int, ...], value: Value, lists: set[str]
) -> None:
    if isinstance(value, TensorName):
        value = source.parameters[value.name].weight
    if isinstance(value, (list, tuple)) and value:
        for i, item in enumerate(value):
            _add_extras(tree, source, (*path, str(i)), (*kinds, SEQUENCE), item, lists)
    elif isinstance(value, dict) and value:
        kind = SEQUENCE if ".".join(path) in lists else DICT
        for key, item in value.items():
            _add_extras(tree, source, (*path, str(key)), (*kinds, kind), item, lists)
    else:
        tree.add(path, kinds, value)


def _data_files(folder: str, leaves: Iterable[WrittenLeaf], grid: ChunkGrid, file_nbytes: int) -> Iterator[FilePlan]:
    """The data files of one item: chunks in order, in each up to so many bytes, or one chunk."""
    entries: list[ChunkEntry] = []
    tensors: list[Tensor] = []
    nbytes = number = 0

    def file() -> FilePlan:
        name = f"{folder}{DATA}/{number:032x}"
        return FilePlan(name, (), ChunksContent(tuple(entries)), nbytes, "data", tensors=tuple(tensors))

    for leaf in leaves:
        if leaf.tensor is None:
            continue
        shape, itemsize = leaf.tensor.shape, leaf.tensor.dtype.itemsize
        chunk = grid.shape(shape, itemsize)
        size = prod(chunk) * itemsize
        for key, box in grid.boxes(shape, chunk):
            if entries and nbytes + size > file_nbytes:
                yield file()
                entries, tensors, nbytes, number = [], [], 0, number + 1
            entries.append(ChunkEntry(f"{leaf.leaf.name}/{key}", size - box.size * itemsize))
            tensors.append(leaf.tensor.crop(box))
            nbytes += size
    if entries:
        yield file()
