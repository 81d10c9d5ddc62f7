"""Read the model's tensors from files of safetensors or torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ckpt_formats.containers.contents import other_ending
from ckpt_formats.containers.safetensors import is_safetensors
from ckpt_formats.containers.safetensors_shards import read_weights, shard_paths
from ckpt_formats.containers.shard_index import NO_INDEX, ShardIndex, one_set, read_index
from ckpt_formats.containers.torchfile import TorchFile, open_file
from ckpt_formats.core.checkpoint import SourceFile
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.folders import INDEX_SUFFIX
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.hf.folder import Container, Folder
from ckpt_formats.state_dicts.leaves import has_tensor


@dataclass(frozen=True)
class ModelFiles:
    """A state dict from one or several files."""

    state: dict[str, Value]
    """Tensors by name. Files of torch may also have other values."""
    in_order: bool
    """True if the names are in the model's own order, as in a single file of torch."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    shards: tuple[SourceFile, ...] = ()
    seals: Sequence[Seal] = ()
    notices: tuple[Notice, ...] = ()


def read_model(folder: Folder) -> ModelFiles:
    """The model of a folder. Raises `IncompleteError` if files or tensors are missing."""
    if folder.entry is None:
        raise IncompleteError("there are no weights", where=folder.path)
    model = read_entry(folder.entry, folder.container)
    if not model.state:
        raise IncompleteError("there are no tensors", where=folder.entry)
    if folder.by_ranks:
        _check_against_merged(folder, model)
    return model


def read_entry(entry: Path, container: Container) -> ModelFiles:
    """The model in a file, in the files of an index, or in a folder of files. A file is read by its content."""
    actual: Container = container
    if entry.is_file() and not entry.name.endswith(INDEX_SUFFIX):
        actual = "safetensors" if is_safetensors(entry) else "torch"
    model = _safetensors(entry) if actual == "safetensors" else _torch(entry)
    return model if actual == container else replace(model, notices=(*model.notices, other_ending(entry, actual)))


def torch_shard(file: TorchFile, role: str) -> SourceFile:
    """The record of a file of torch in a checkpoint."""
    return SourceFile(file.path, file.path.stat().st_size, role)


def _safetensors(entry: Path) -> ModelFiles:
    weights = read_weights(*shard_paths(entry))
    aliases = weights.aliases()
    metadata = {key: value for key, value in weights.metadata.items() if key not in aliases}
    return ModelFiles(dict(weights.tensors), False, aliases, metadata, weights.shards, (), weights.notices)


def _torch(entry: Path) -> ModelFiles:
    if entry.is_dir():
        return _torch_files([open_file(path) for path in _numbered(entry)], None)
    if not entry.name.endswith(INDEX_SUFFIX):
        file = open_file(entry)
        return ModelFiles(_state(file), True, {}, {}, (torch_shard(file, "model"),), file.seals())
    index = read_index(entry)
    return _torch_files([open_file(path) for path in index.files()], index)


def _numbered(folder: Path) -> list[Path]:
    paths = one_set(folder, ".bin", only_numbered=True)
    assert isinstance(paths, list)  # if there were an index, it would be the entry
    return paths


def _torch_files(files: Sequence[TorchFile], index: ShardIndex | None) -> ModelFiles:
    state: dict[str, Value] = {}
    where: dict[str, str] = {}
    for file in files:
        for name, value in _state(file).items():
            if name in state:
                raise CorruptError(f"tensor `{printable(name)}` is in two files", where=file.path)
            state[name], where[name] = value, file.path.name
    shards = tuple(torch_shard(file, "model") for file in files)
    seals = tuple(seal for file in files for seal in file.seals())
    if index is None:
        return ModelFiles(state, False, {}, {}, shards, seals, (NO_INDEX,))
    index.check(where)
    return ModelFiles(state, False, {}, {}, (*shards, index.shard()), seals)


def _state(file: TorchFile) -> dict[str, Value]:
    if not isinstance(file.root, dict) or not has_tensor(file.root):
        raise CorruptError("is not a dict of tensors", where=file.path)
    state = {str(key): value for key, value in file.root.items()}
    if len(state) < len(file.root):
        raise CorruptError("two keys of the file differ only in their type", where=file.path)
    return state


def _check_against_merged(folder: Folder, model: ModelFiles) -> None:
    """Raise `IncompleteError` if the ranks' files do not have the tensors of the merged files next to them.

    No other check finds the missing last rows of a tensor if a rank's file is missing.
    """
    entry, ranks = folder.path, folder.entry
    if entry == ranks or not (any(entry.glob("*.safetensors")) or any(entry.glob("*.safetensors.index.json"))):
        return
    merged_tensors = read_weights(*shard_paths(entry)).tensors
    for name in {**merged_tensors, **model.state}:
        of_ranks, merged = model.state.get(name), merged_tensors.get(name)
        if of_ranks is None or merged is None or of_ranks.shape != merged.shape or of_ranks.dtype != merged.dtype:
            stated = "is missing" if of_ranks is None else f"has the shape {list(of_ranks.shape)}"
            stated_merged = "is missing" if merged is None else f"has the shape {list(merged.shape)}"
            raise IncompleteError(
                f"tensor `{printable(name)}` {stated} in the ranks' files, but {stated_merged} in the merged files",
                where=ranks,
                hint="Is a rank's file missing?",
            )
