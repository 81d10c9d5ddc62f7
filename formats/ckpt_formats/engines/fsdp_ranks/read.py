"""Read the files of all ranks -> one checkpoint."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint, Origin, SourceFile
from ckpt_formats.core.errors import CorruptError, UnsupportedError, form_of
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.identity import in_threads
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor, read
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.fsdp_ranks.folder import Folder, list_folder
from ckpt_formats.engines.fsdp_ranks.leaves import SharedLeaves
from ckpt_formats.engines.fsdp_ranks.merge import RankMerge
from ckpt_formats.engines.fsdp_ranks.mesh import Mesh
from ckpt_formats.engines.fsdp_ranks.model import is_flat, merge_model, shapes_in, stated_shapes
from ckpt_formats.engines.fsdp_ranks.optimizer import UNNAMED, matched_by_order, merge_optimizer, names_in_groups
from ckpt_formats.engines.fsdp_ranks.rank_file import RankFile, open_rank
from ckpt_formats.engines.fsdp_ranks.sections import Files, merged_extras, sorted_files
from ckpt_formats.state_dicts.extras import differing_items, with_ranks
from ckpt_formats.state_dicts.optimizer_form import is_optimizer
from ckpt_formats.state_dicts.parameter_order import BY_ORDER
from ckpt_formats.state_dicts.read import training_state

_WRAPPERS = frozenset({"_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module"})
_DDP = "module."


@dataclass(frozen=True)
class _WrapperNames:
    """A function that removes the components of wrappers from a name."""

    ddp: bool

    def __call__(self, name: Value) -> Value:
        if not isinstance(name, str):
            return name
        plain = ".".join(part for part in name.split(".") if part not in _WRAPPERS)
        return plain.removeprefix(_DDP) if self.ddp else plain

    def keys(self, tree: Mapping[Value, Value], where: Path) -> dict[Value, Value]:
        """The dict with unwrapped keys. Raises `CorruptError` if two keys become equal."""
        renamed: dict[Value, Value] = {}
        for key, value in tree.items():
            if self(key) in renamed:
                raise CorruptError(
                    f"two tensors are called `{printable(self(key))}` when wrappers are left out", where=where
                )
            renamed[self(key)] = value
        return renamed

    def optimizer(self, tree: Mapping[str, Value], where: Path) -> dict[str, Value]:
        """An optimizer's state dict, nested or flat, with unwrapped names."""
        renamed: dict[str, Value] = {}
        for key, value in self.keys(tree, where).items():
            if key == "state" and isinstance(value, dict):
                value = self.keys(value, where)
            elif key == "param_groups" and isinstance(value, list):
                value = [self._group(group) if isinstance(group, dict) else group for group in value]
            renamed[key] = value
        return renamed

    def _group(self, group: Mapping[str, Value]) -> dict[str, Value]:
        listed = {key: group[key] for key in ("params", "param_names") if isinstance(group.get(key), list)}
        return {**group, **{key: [self(name) for name in names] for key, names in listed.items()}}


def read_folder(path: Path, options: ReadOptions) -> Checkpoint:
    """The index of a checkpoint. Raises subclasses of `CkptError`."""
    if path.is_file():
        raise UnsupportedError(
            "is the file of one rank of several", where=path, hint=f"Name the folder: {printable(str(path.parent))}"
        )
    folder = list_folder(path)
    with form_of("an FSDP checkpoint", path):
        return _read(folder, options)


def _read(folder: Folder, options: ReadOptions) -> Checkpoint:
    known = SharedLeaves()
    opened = _opened(folder, known)
    files = sorted_files(opened)
    unwrap = _unwrapping(str(name) for file in files["model"].values() for name in file.root)
    models = {rank: unwrap.keys(file.root, file.path) for rank, file in files["model"].items()}
    optimizers = {rank: unwrap.optimizer(file.root, file.path) for rank, file in files.get("optimizer", {}).items()}
    notices = list(folder.notices)
    if any(models[rank].keys() != file.root.keys() for rank, file in files["model"].items()):
        notices.append(
            Notice(
                "names are without the prefixes of wrapped modules, such as `_fsdp_wrapped_module.` and `_orig_mod.`"
            )
        )
    shapes, listed = dict[str, Shape](), options.order
    if any(is_flat(name) for tree in models.values() for name in tree):
        shapes = stated_shapes(optimizers) | shapes_in(options.shapes)
        listed = listed or names_in_groups(optimizers)
    merge = RankMerge()
    model = merge_model(models, merge, shapes, listed, folder.path)
    root: dict[str, Value] = {"model": model}
    rest, shared = merged_extras(files.get("extra", {}))
    extra = _collected_extras(rest, merge.differing) | shared
    if optimizers:
        order = options.orders.get("optim", options.order)
        optimizer = merge_optimizer(optimizers, model, merge.sharded, order)
        if optimizer is None:
            notices.append(Notice(UNNAMED, weight=Weight.LOST))
            extra = _with_rank_items(extra, {rank: {"optim": tree} for rank, tree in optimizers.items()})
        else:
            root["optim"] = optimizer
            if not order and matched_by_order(optimizers, optimizer, model):
                notices.append(Notice(BY_ORDER, ("optim",), Weight.UNSURE))
            _check_one_step(optimizer, folder)
    state = training_state(root, folder.path, options.order, options.orders, further_extras=extra)
    mesh = max(known.meshes, key=lambda mesh: (len(mesh.ranks), len(mesh.shape)), default=None)
    return Checkpoint(
        path=folder.path,
        origin=Origin("fsdp", None, state.step, _layout(folder, mesh) | {"keys": state.keys.to_json()}),
        parameters=state.parameters,
        groups=state.groups,
        extras=state.extras,
        aliases=state.aliases,
        files=tuple(_shard(role, rank, path, mesh) for role, rank, path in folder.paths),
        seals=tuple(seal for ranks in opened.values() for one in ranks.values() for seal in one.file.seals()),
        notices=(*notices, *state.notices),
    )


def _collected_extras(files: Mapping[int, RankFile], differing: Mapping[int, Mapping[str, Value]]) -> dict[str, Value]:
    """The extras: the items of the first rank, and under `ranks` the items of other ranks that differ.

    `differing` are values in the ranks' models that are no tensors and not the same on all ranks.
    Raises `CorruptError` if the ranks' schedulers are at different steps.
    """
    _check_one_epoch(files)
    first_rank = min(files, default=0)
    first = _items(files[first_rank]) if files else {}
    ranks = {str(rank): differing_items(_items(file), first) for rank, file in files.items() if rank != first_rank}
    if any(key in ("model", "optim", "ranks") or is_optimizer(value) for key, value in first.items()):
        first = {"extra_state": first}
    models = {rank: {"model": dict(items)} for rank, items in differing.items()}
    return _with_rank_items(with_ranks(first, ranks), models)


def _with_rank_items(extras: Mapping[str, Value], ranks: Mapping[int, Mapping[str, Value]]) -> dict[str, Value]:
    """The extras with more items of ranks. `ranks` are the items by rank."""
    known = extras.get("ranks", {})
    added = {str(rank): {**known.get(str(rank), {}), **items} for rank, items in ranks.items()}
    return {**extras, "ranks": {**known, **added}} if ranks else dict(extras)


def _check_one_epoch(files: Mapping[int, RankFile]) -> None:
    seen: dict[str, tuple[Value, RankFile]] = {}
    for file in files.values():
        for key, value in file.root.items():
            epoch = value.get("last_epoch") if isinstance(value, dict) else None
            if isinstance(epoch, int):
                first, other = seen.setdefault(str(key), (epoch, file))
                if first != epoch:
                    raise CorruptError(
                        f"`{printable(str(key))}` counted to {first} in {other.path.name}, but to {epoch} here",
                        where=file.path,
                        hint="Files of several steps were mixed: copy all files of one step again.",
                    )


def _items(file: RankFile) -> dict[str, Value]:
    if file.path.name.startswith("random_states"):
        return {"random_states": file.root}
    return {str(key): value for key, value in file.root.items()}


def _layout(folder: Folder, mesh: Mesh | None) -> dict[str, Value]:
    if mesh is None:
        return {"world": folder.world}
    shape = dict(zip(mesh.names, mesh.shape, strict=True)) if mesh.names else list(mesh.shape)
    return {"world": folder.world, "mesh": shape}


def _opened(folder: Folder, known: SharedLeaves) -> Files:
    def opened(one: tuple[str, int, Path]) -> RankFile:
        role, rank, path = one
        return open_rank(path, role, rank, folder.world, known)

    files: Files = {}
    for (role, rank, _), file in zip(folder.paths, in_threads(opened, folder.paths), strict=True):
        files.setdefault(role, {})[rank] = file
    return files


def _check_one_step(optimizer: Value, folder: Folder) -> None:
    """Raise `CorruptError` if the step counts of the ranks differ. Reads one number of each."""
    states = optimizer.get("state")
    steps = (
        (state.get("step") for state in states.values() if isinstance(state, dict)) if isinstance(states, dict) else ()
    )
    step = next((one for one in steps if isinstance(one, Tensor) and one.size == 1), None)
    if step is None:
        return
    counts = {read(Tensor(one.shape, one.dtype, one.fragments)).item() for one in (step, *step.replicas)}
    if len(counts) > 1:
        raise CorruptError(
            f"the ranks' optimizers are at different steps: {sorted(counts)}",
            where=folder.path,
            hint="Files of several steps were mixed: copy all files of one step again.",
        )


def _shard(role: str, rank: int, path: Path, mesh: Mesh | None) -> SourceFile:
    place = {"rank": rank}
    if mesh is not None and mesh.names and rank in mesh.ranks:
        place |= zip(mesh.names, mesh.coordinate(rank), strict=True)
    return SourceFile(path, path.stat().st_size, role, place)


def _unwrapping(names: Iterable[str]) -> _WrapperNames:
    """The function for all names of a model. It removes `module.` only if every name begins with it."""
    plain = [_WrapperNames(ddp=False)(name) for name in names]
    return _WrapperNames(bool(plain) and all(name.startswith(_DDP) for name in plain))
