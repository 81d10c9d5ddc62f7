"""The model's tensors, from whichever files hold them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ckpt_formats.containers.safetensors_shards import listed, read_weights
from ckpt_formats.containers.shard_index import INDEX_SUFFIX, NO_INDEX, Index, one_set, read_index
from ckpt_formats.containers.torchfile import TorchFile, open_file
from ckpt_formats.core.checkpoint import Shard
from ckpt_formats.core.errors import Corrupt, Incomplete
from ckpt_formats.core.files import Seal
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.text import show
from ckpt_formats.core.values import Value
from ckpt_formats.engines.hf.folder import Container, Folder
from ckpt_formats.state_dicts.leaves import has_tensor


@dataclass(frozen=True)
class Model:
    """A state dict that may have come from several files."""

    state: dict[str, Value]
    """Tensors by name; in files of torch, other things may lie between them."""
    in_order: bool
    """Whether the names are in the model's own order, as those of one file of torch are."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    shards: tuple[Shard, ...] = ()
    seals: tuple[Seal, ...] = ()
    notices: tuple[Notice, ...] = ()


def read_model(folder: Folder) -> Model:
    """The model of a folder. Raises `Incomplete` if files or tensors are missing."""
    if folder.entry is None:
        raise Incomplete("there are no weights", where=folder.path)
    model = read_entry(folder.entry, folder.container)
    if not model.state:
        raise Incomplete("there are no tensors", where=folder.entry)
    if folder.by_ranks:
        _check_against_whole(folder, model)
    return model


def read_entry(entry: Path, container: Container) -> Model:
    """The model behind a file, an index or a folder of files."""
    return _safetensors(entry) if container == "safetensors" else _torch(entry)


def torch_shard(file: TorchFile, role: str) -> Shard:
    """A file of torch, as one of a checkpoint's."""
    return Shard(file.path, file.path.stat().st_size, role)


def _safetensors(entry: Path) -> Model:
    found = read_weights(*listed(entry))
    aliases = found.aliases()
    said = {key: value for key, value in found.metadata.items() if key not in aliases}
    return Model(dict(found.tensors), False, aliases, said, found.shards, (), found.notices)


def _torch(entry: Path) -> Model:
    if entry.is_dir():
        return _torch_files([open_file(path) for path in _numbered(entry)], None)
    if not entry.name.endswith(INDEX_SUFFIX):
        file = open_file(entry)
        return Model(_state(file), True, {}, {}, (torch_shard(file, "model"),), file.seals())
    index = read_index(entry)
    return _torch_files([open_file(path) for path in index.files()], index)


def _numbered(folder: Path) -> list[Path]:
    found = one_set(folder, ".bin", only_numbered=True)
    assert isinstance(found, list)  # an index would have been the entry
    return found


def _torch_files(files: Sequence[TorchFile], index: Index | None) -> Model:
    state: dict[str, Value] = {}
    where: dict[str, str] = {}
    for file in files:
        for name, value in _state(file).items():
            if name in state:
                raise Corrupt(f"tensor `{show(name)}` is in two files", where=file.path)
            state[name], where[name] = value, file.path.name
    shards = tuple(torch_shard(file, "model") for file in files)
    seals = tuple(seal for file in files for seal in file.seals())
    if index is None:
        return Model(state, False, {}, {}, shards, seals, (NO_INDEX,))
    index.check(where)
    return Model(state, False, {}, {}, (*shards, index.shard()), seals)


def _state(file: TorchFile) -> dict[str, Value]:
    if not isinstance(file.root, dict) or not has_tensor(file.root):
        raise Corrupt("is not a dict of tensors", where=file.path)
    state = {str(key): value for key, value in file.root.items()}
    if len(state) < len(file.root):
        raise Corrupt("two keys of the file differ only in their type", where=file.path)
    return state


def _check_against_whole(folder: Folder, model: Model) -> None:
    """Hold what ranks wrote against the whole files beside: the last rows of a lost shard are missed nowhere else."""
    entry, ranks = folder.path, folder.entry
    if entry == ranks or not (any(entry.glob("*.safetensors")) or any(entry.glob("*.safetensors.index.json"))):
        return
    whole = read_weights(*listed(entry)).tensors
    for name in {**whole, **model.state}:
        ours, theirs = model.state.get(name), whole.get(name)
        if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            said = "is not there" if ours is None else f"has the shape {list(ours.shape)}"
            other = "nothing" if theirs is None else f"the shape {list(theirs.shape)}"
            raise Incomplete(
                f"tensor `{show(name)}` {said} in the files of the ranks, but {other} in those beside",
                where=ranks,
                hint="Is a rank's file missing?",
            )
