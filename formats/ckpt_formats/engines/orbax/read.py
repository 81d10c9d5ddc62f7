"""Read a checkpoint of Orbax: its index, from metadata and from numbers of one element."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpt_formats.containers.safetensors import parse_json
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Group, Origin, Parameter, Role, SourceFile
from ckpt_formats.core.claims import MAX_SMALL_JSON
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.files import read_whole, unreadable
from ckpt_formats.core.folders import names_in
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.engines.orbax.aggregate import AGGREGATE, AggregatedLeaf, has_aggregate, read_aggregate
from ckpt_formats.engines.orbax.arrays import read_arrays
from ckpt_formats.engines.orbax.folder import StepFolder, find, is_tree
from ckpt_formats.engines.orbax.indexed import INDEX, has_index, read_indexed
from ckpt_formats.engines.orbax.metadata import (
    ARRAYS,
    COMMITTED,
    DATA,
    DICT,
    EMPTY,
    OF_PROCESS,
    PROCESSES,
    SEQUENCE,
    SHARDING,
    STEP,
    STRINGS,
    TREE,
    Leaf,
    random_keys,
    read_strings,
    read_tree,
)
from ckpt_formats.engines.orbax.tree import (
    BIASES,
    PARAMETERS,
    TORCH_NAMES,
    ModelPart,
    OptimizerPart,
    find_model,
    find_optimizer,
    in_collection,
    nested,
)
from ckpt_formats.engines.orbax.tree import Path as Keys
from ckpt_formats.state_dicts.extras import candidate_names, names_for_tensors

JSON_ITEM, METRICS, RANDOM_ITEM = "metadata", "metrics", "jax_random_key"
"""Files and folders in items: those of `JsonSave` and of the metrics of a step, the array of `JaxRandomKeySave`."""
_MAIN = ("", "default", "state", "train_state", "items", "pytree", "model", "params")
"""Names of items, of which the first one that is there has the model."""
_FILES = (TREE, STEP, SHARDING, COMMITTED, STRINGS)


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The index of the checkpoint at a path. Raises a subclass of `CkptError` if it cannot be read."""
    try:
        return _checkpoint(path)
    except CkptError:
        raise
    except OSError as error:
        raise unreadable(error, path) from error


@dataclass
class TreeLeaves:
    """The leaves of a tree: those with arrays, and plain values."""

    leaves: dict[Keys, Leaf] = field(default_factory=dict)
    arrays: dict[Keys, Tensor] = field(default_factory=dict)
    plain: dict[Keys, Value] = field(default_factory=dict)
    files: tuple[SourceFile, ...] = ()
    notices: list[Notice] = field(default_factory=list)
    random: dict[str, str] = field(default_factory=dict)

    def add(self, leaf: Leaf, value: Value) -> None:
        """Add the value of a leaf: an array of one element may be a number."""
        if not isinstance(value, Tensor):
            self.plain[leaf.path] = value
        elif leaf.value == "scalar" and value.size == 1:
            self.plain[leaf.path] = value[(0,) * len(value.shape)].item()
        else:
            self.arrays[leaf.path] = value


def _checkpoint(path: Path) -> Checkpoint:
    step_folder = find(path)
    if has_index(step_folder.folder):
        return _of_easydel(path, step_folder)
    trees: dict[str, TreeLeaves] = {}
    extras: dict[str, Value] = {}
    notices = list(step_folder.notices)
    files = [file for one in step_folder.shards or [step_folder.folder] for file in _metadata_files(one)]
    unread: list[str] = []
    for name, folder in step_folder.items.items():
        if is_tree(folder):
            trees[name] = _read_tree(folder, [f"{shard.name}/{name}/" for shard in step_folder.shards])
        elif (folder / RANDOM_ITEM).is_dir() and is_tree(folder / RANDOM_ITEM):
            trees[name] = _read_tree(folder / RANDOM_ITEM)
            kind = parse_json(read_whole(folder / f"{RANDOM_ITEM}_metadata" / JSON_ITEM, MAX_SMALL_JSON), folder)
            files += _metadata_files(folder / RANDOM_ITEM)
            extras[f"{name}.kind"] = kind
        elif (json := folder / json_file(name)).is_file():
            extras[name] = parse_json(read_whole(json, MAX_SMALL_JSON), json)
            files.append(SourceFile(json, json.stat().st_size, "metadata"))
        else:
            unread.append(printable(name))
        inside = [shard / name for shard in step_folder.shards] or [folder]
        files += [file for one in inside if name for file in _metadata_files(one)]
    if unread:
        notices.append(Notice("these items are in a form that is not read", tuple(unread), Weight.LOST))
    if not trees:
        raise UnsupportedError("no item has arrays that are read", where=step_folder.folder)
    tree, places = _joined(trees)
    json_items = [name for name in step_folder.items if name in extras] + [f"{name}.kind" for name in trees]
    items = {
        name: {
            "folder": "" if not name else f"{name}/" if f"{name}.kind" not in extras else f"{name}/{RANDOM_ITEM}/",
            "place": list(place),
        }
        for name, place in places.items()
    }
    files += [file for one in trees.values() for file in one.files]
    notices += [notice for one in trees.values() for notice in one.notices]
    layout: dict[str, Value] = {"items": items, "json": [name for name in json_items if name in extras]}
    return index_of(path, step_folder, tree, layout, extras, tuple(files), notices)


def _of_easydel(path: Path, step_folder: StepFolder) -> Checkpoint:
    """The checkpoint whose arrays an index of EasyDeL lists."""
    folder = step_folder.folder
    arrays = read_indexed(folder)
    tree = TreeLeaves(files=(*arrays.files, SourceFile(folder / INDEX, (folder / INDEX).stat().st_size, "metadata")))
    for name, tensor in arrays.tensors.items():
        keys = tuple(name.split("/"))
        kinds = tuple(SEQUENCE if key.isdecimal() else DICT for key in keys)
        tree.leaves[keys], tree.arrays[keys] = Leaf(keys, kinds, "jax.Array"), tensor
    notices = list(step_folder.notices)
    if others := [name for name in names_in(folder) if name.endswith(".json") and name != INDEX]:
        notices.append(Notice("files of EasyDeL beside the arrays are not read", tuple(sorted(others))))
    return index_of(path, step_folder, tree, {}, {}, tree.files, notices)


def json_file(item: str) -> str:
    """The name of the file of an item that is JSON."""
    return METRICS if item == METRICS else JSON_ITEM


def _metadata_files(folder: Path) -> list[SourceFile]:
    """The files beside the values: also nodes of earlier versions of the database, which no node names any more."""
    paths = [
        folder / name
        for name in (*_FILES, f"{RANDOM_ITEM}_metadata/{JSON_ITEM}", f"{RANDOM_ITEM}_metadata/{COMMITTED}")
    ]
    for name in names_in(folder):
        if name in (ARRAYS, DATA, PROCESSES) or name.startswith(OF_PROCESS):
            paths += sorted((folder / name).rglob("*"))
    return [SourceFile(path, path.stat().st_size, "metadata") for path in paths if path.is_file()]


def _joined(trees: Mapping[str, TreeLeaves]) -> tuple[TreeLeaves, dict[str, Keys]]:
    """One tree of all items: that of the main one, with the others under their names."""
    main = next((name for name in _MAIN if name in trees), next(iter(trees)))
    places: dict[str, Keys] = {}
    joined = TreeLeaves()
    for name, tree in trees.items():
        # An item that is called `params` is what others have under this key.
        place: Keys = () if name == main and name not in ("params", "model") else (name,)
        places[name] = place
        joined.leaves |= {(*place, *path): leaf for path, leaf in tree.leaves.items()}
        joined.arrays |= {(*place, *path): tensor for path, tensor in tree.arrays.items()}
        joined.plain |= {(*place, *path): value for path, value in tree.plain.items()}
        joined.random |= {".".join((*place, key)): kind for key, kind in tree.random.items()}
    joined.leaves = {
        path: Leaf(path, (*(DICT for _ in range(len(path) - len(leaf.path))), *leaf.kinds), leaf.value)
        for path, leaf in joined.leaves.items()
    }
    return joined, places


def _read_tree(folder: Path, parts: Sequence[str] = ()) -> TreeLeaves:
    """The leaves of the tree in a folder. Raises `IncompleteError` if a leaf has no array.

    `parts`: the folders of all processes that have a part of it, from two levels above.
    """
    metadata = read_tree(folder)
    where = folder.parent.parent if parts else folder
    arrays = read_arrays(where, metadata is not None and metadata.stores_fill_values, parts or ("",))
    tree = TreeLeaves(files=arrays.files, random=random_keys(folder))
    if arrays.filled:
        text = "chunks that are not stored have the fill value everywhere: this version of Orbax stores none of them"
        tree.notices.append(Notice(text, tuple(arrays.filled), Weight.UNSURE))
    aggregated: list[AggregatedLeaf] = []
    if has_aggregate(folder):
        aggregated, nbytes = read_aggregate(folder)
        tree.files = (*tree.files, SourceFile(folder / AGGREGATE, nbytes, "data"))
    if metadata is None and not aggregated:
        for name, tensor in arrays.tensors.items():
            keys = tuple(name.split("."))
            kinds = tuple(SEQUENCE if key.isdecimal() else DICT for key in keys)
            tree.leaves[keys], tree.arrays[keys] = Leaf(keys, kinds, "jax.Array"), tensor
        return tree
    strings = read_strings(folder)
    stored = {one.leaf.name: one for one in aggregated}
    missing: list[str] = []
    for leaf in metadata.leaves if metadata is not None else [one.leaf for one in aggregated]:
        tree.leaves[leaf.path] = leaf
        one = stored.get(leaf.name)
        if leaf.value in EMPTY:
            tree.plain[leaf.path] = EMPTY[leaf.value]
        elif leaf.value == "string" and leaf.name in strings:
            tree.plain[leaf.path] = strings[leaf.name]
        elif one is not None and one.stored is None:
            tree.add(leaf, one.value)
        elif (name := leaf.name if one is None or one.stored is None else one.stored) in arrays.tensors:
            tree.add(leaf, arrays.tensors[name])
        else:
            missing.append(printable(leaf.name))
    naming = AGGREGATE if metadata is None else TREE
    if missing:
        text = f"{list_names(missing)} is named in {naming}, but no array of this name is stored"
        raise IncompleteError(text, where=folder, hint="Copy all files of the checkpoint.")
    names = {leaf.name for leaf in tree.leaves.values()} | {one.stored for one in aggregated}
    if unnamed := [name for name in arrays.tensors if name not in names]:
        text = f"arrays that {naming} does not name: they are not read"
        tree.notices.append(Notice(text, tuple(unnamed), Weight.LOST))
    return tree


def index_of(
    path: Path,
    step_folder: StepFolder,
    tree: TreeLeaves,
    layout: dict[str, Value],
    extras: dict[str, Value],
    files: tuple[SourceFile, ...],
    notices: list[Notice],
    engine: str = "orbax",
) -> Checkpoint:
    """The checkpoint of a tree."""
    if _has_biases_of_training(tree):
        tree = _with_biases_in_collection(tree)
        layout |= {"auxiliary": True}
    model = find_model(tree.leaves, tree.arrays)
    parameters: dict[str, Parameter] = {}
    optimizers = find_optimizer(model, tree.arrays) if model is not None else []
    used: set[Keys] = set()
    if model is not None:
        layout |= {"params": list(model.prefix), "separator": model.separator}
        layout |= {"collections": True} if model.has_collections else {}
        used |= {(*model.prefix, *keys) for keys in model.names}
        parameters, groups, optimizer = _parameters(model, optimizers, tree, step_folder.folder)
        used |= optimizer
        layout |= {"optimizer": _optimizer_layout(optimizers, tree)} if optimizers else {}
        if sequences := _sequences(model, tree):
            layout["sequences"] = sequences
    else:
        groups = ()
    rest = {keys: tree.arrays.get(keys, tree.plain.get(keys)) for keys in tree.leaves if keys not in used}
    inside, lists = nested(tree.leaves, rest)
    layout |= {"lists": lists} if lists else {}
    for key, value in inside.items():
        free = next(name for name in candidate_names(key) if name not in extras)
        extras[free] = value
    named = {key: names_for_tensors(value, key, parameters) for key, value in extras.items()}
    layout |= {"random": dict(tree.random)} if tree.random else {}
    step = _step(tree, step_folder.step, path)
    return Checkpoint(
        path=path,
        origin=Origin(engine, step=step, layout=layout),
        parameters=parameters,
        groups=groups,
        extras=named,
        files=tuple({file.path: file for file in files}.values()),
        notices=tuple(notices),
    )


def _has_biases_of_training(tree: TreeLeaves) -> bool:
    """Whether the tree is that of a training of MaxText with biases that are no parameters, all of them arrays."""
    moved = [path for path in tree.leaves if in_collection(path) != path]
    is_maxtext = any(path[:2] == (PARAMETERS, PARAMETERS) for path in tree.arrays)
    return bool(moved) and is_maxtext and all(path in tree.arrays for path in moved) and _lacks_collection(tree)


def _lacks_collection(tree: TreeLeaves) -> bool:
    return not any(path[:2] == (PARAMETERS, BIASES) for path in tree.leaves)


def _with_biases_in_collection(tree: TreeLeaves) -> TreeLeaves:
    leaves = {
        in_collection(path): Leaf(in_collection(path), leaf.kinds, leaf.value) for path, leaf in tree.leaves.items()
    }
    return replace(tree, leaves=leaves, arrays={in_collection(path): one for path, one in tree.arrays.items()})


def _parameters(
    model: ModelPart, optimizers: list[OptimizerPart], tree: TreeLeaves, where: Path
) -> tuple[dict[str, Parameter], tuple[Group, ...], set[Keys]]:
    """The parameters with their states, the groups of optimizers, and the leaves that became states."""
    states: dict[Keys, dict[str, Tensor]] = {keys: {} for keys in model.names}
    values: dict[Keys, dict[str, Value]] = {keys: {} for keys in model.names}
    used: set[Keys] = set()
    groups = []
    for optimizer in optimizers:
        count = None
        if optimizer.count is not None:
            tensor = tree.arrays[optimizer.count]
            count = tensor[(0,) * len(tensor.shape)].item()
            if not is_natural(count):
                raise CorruptError(f"the optimizer states {count} as its number of steps", where=where)
            used.add(optimizer.count)
        members = dict.fromkeys(keys for own in optimizer.states.values() for keys in own)
        for name, own in optimizer.states.items():
            for keys, place in own.items():
                if TORCH_NAMES[name] in states[keys]:
                    raise UnsupportedError(
                        f"`{printable(model.names[keys])}` has states `{name}` of several optimizers", where=where
                    )
                states[keys][TORCH_NAMES[name]] = tree.arrays[place]
                used.add(place)
        if count is not None:
            for keys in members:
                values[keys]["step"] = count
        groups.append(Group({}, tuple(name for keys, name in model.names.items() if keys in members)))
    parameters = {}
    for keys, name in model.names.items():
        weight = tree.arrays[(*model.prefix, *keys)]
        role: Role = "parameter" if is_float(weight.dtype) or weight.dtype.kind == "c" else "buffer"
        if model.prefix[-1:] == ("batch_stats",) or keys[0] == "batch_stats":
            role = "buffer"
        if model.has_collections and keys[0] == BIASES and not states[keys]:
            role = "buffer"
        if optimizers and role == "parameter" and not states[keys]:
            role = "frozen"
        parameters[name] = Parameter(name, role, {**states[keys], MODEL: weight}, values[keys])
    return parameters, tuple(groups), used


def _optimizer_layout(optimizers: list[OptimizerPart], tree: TreeLeaves) -> list[Value]:
    """Where the states were, for writing them again: for each optimizer its path, names of states, and its count."""
    return [
        {
            "path": list(one.place),
            "kinds": list(tree.leaves[next(iter(next(iter(one.states.values())).values()))].kinds[: len(one.place)]),
            "states": {
                name: list(next(iter(own.values()))[len(one.place) + 1 : -len(next(iter(own)))])
                for name, own in one.states.items()
            },
            "count": None if one.count is None else tree.arrays[one.count].dtype.name,
        }
        for one in optimizers
    ]


def _sequences(model: ModelPart, tree: TreeLeaves) -> list[str]:
    """The names of parameters below lists, with the depth of each such key."""
    names = []
    for keys, name in model.names.items():
        kinds = tree.leaves[(*model.prefix, *keys)].kinds[len(model.prefix) :]
        if SEQUENCE in kinds:
            names.append(f"{name}:{','.join(str(i) for i, kind in enumerate(kinds) if kind == SEQUENCE)}")
    return names


def _step(tree: TreeLeaves, in_name: int | None, path: Path) -> int | None:
    """The step that the tree states, else that of the folder's name."""
    for keys in (("step",), ("state", "step")):
        value = tree.plain.get(keys)
        if (tensor := tree.arrays.get(keys)) is not None and tensor.size == 1 and tensor.dtype.kind in "iu":
            value = tensor[(0,) * len(tensor.shape)].item()
        if is_natural(value):
            return value
    return in_name
