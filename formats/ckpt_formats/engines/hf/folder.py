"""Classify the files of a folder by their names, as transformers, its Trainer, Accelerate and PEFT write them.

    model.safetensors, or shards and an index    the model; also as pytorch_model.bin
    adapter_model.safetensors                    an adapter of PEFT
    pytorch_model_fsdp.bin                       the model, gathered by FSDP
    sharded/shard-00001-model-00001-of-00001...  the model, written by PyTorch's ranks
    optimizer.pt, scheduler.pt, rng_state.pth    what a run needs to continue (Accelerate: .bin, .pkl)
    config.json, tokenizer.json, ...             what a model needs in addition to its weights

Sources: transformers `Trainer._save_checkpoint`, accelerate `checkpointing`, peft `save_pretrained`.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ckpt_formats.core.files import unreadable
from ckpt_formats.core.folders import CONFIG, SEAL_SUFFIX, TRAINER_STATE, entries_of, is_torch_file_of_run

Container = Literal["safetensors", "torch"]

MODEL_INDEX = "model_index.json"
"""The list of components in a pipeline of diffusers."""
MODULES = "modules.json"
"""The list of modules in sentence-transformers."""

# In the order in which transformers tries them.
_ENTRIES: tuple[tuple[str, Container], ...] = (
    ("model.safetensors", "safetensors"),
    ("model.safetensors.index.json", "safetensors"),
    ("adapter_model.safetensors", "safetensors"),
    ("pytorch_model.bin", "torch"),
    ("pytorch_model.bin.index.json", "torch"),
    ("adapter_model.bin", "torch"),
    ("pytorch_model_fsdp.bin", "torch"),
    ("diffusion_pytorch_model.safetensors", "safetensors"),
    ("diffusion_pytorch_model.safetensors.index.json", "safetensors"),
    ("diffusion_pytorch_model.bin", "torch"),
    ("diffusion_pytorch_model.bin.index.json", "torch"),
)
_SHARD_OF_A_RANK = re.compile(r"shard-\d+-model-\d+-of-\d+\.safetensors")
_NUMBERED_TORCH = re.compile(r"(pytorch_model|adapter_model)-\d+-of-\d+\.bin")
_MODULE = re.compile(r"\d+_\w+")
_BY_RANKS = "sharded"
_OPTIMIZER = re.compile(r"optimizer\.(pt|bin)")
_DEEPSPEED = re.compile(r"latest|zero_to_(fp32|torch)\.py")
"""Files that DeepSpeed writes next to its own folders."""
_RANDOM = re.compile(r"random_states_\d+\.pkl")
_FURTHER_MODEL = re.compile(r"(model_\d+\.safetensors|pytorch_model_\d+\.bin)")
_OF_A_RUN = re.compile(r"trainer_state\.json|scheduler(_\d+)?\.(pt|bin)|rng_state(_\d+)?\.pth|random_states_\d+\.pkl")
_NOT_ALONE = re.compile(r"trainer_state\.json|training_args\.bin|random_states_\d+\.pkl|adapter_config\.json")
_SHARDED_PREFIX = "pytorch_model_fsdp_"
"""The prefix of files and folders of a model that is split over ranks: other formats read them."""
_WEIGHTS = (".safetensors", ".bin", ".h5", ".msgpack", ".gguf", ".onnx", ".ot", ".distcp")


@dataclass(frozen=True)
class Folder:
    """The files of a folder, by kind. Files whose names begin with a dot are ignored."""

    path: Path
    entry: Path | None
    """The model: a file, an index, or a folder of the ranks' files."""
    container: Container
    optimizer: Path | None
    training: tuple[Path, ...]
    """Other files of torch that a run needs to continue."""
    models: tuple[Path, ...]
    """Further models, if Accelerate saved several."""
    side_files: tuple[Path, ...]
    """Side files of a model: configurations, tokenizers, texts."""

    @property
    def by_ranks(self) -> bool:
        """True if each rank wrote its own file of the model."""
        return self.entry is not None and self.entry.is_dir() and self.container == "safetensors"

    @property
    def of_a_run(self) -> bool:
        """True if it is a checkpoint of a run, not only a model."""
        names = {file.name for file in (*self.training, *self.side_files)}
        return any(_OF_A_RUN.fullmatch(name) for name in names)


def is_training_file(name: str) -> bool:
    """True if a run needs this file to continue, but a model does not need it."""
    return name == TRAINER_STATE or is_torch_file_of_run(name) or _DEEPSPEED.fullmatch(name) is not None


def is_further(name: str) -> bool:
    """True if it is the second or a later model or optimizer of a run with several."""
    return re.fullmatch(r"(model|pytorch_model|optimizer)_\d+\.(safetensors|pt|bin)", name) is not None


def recognised(path: Path) -> bool:
    """True if this is a folder of these libraries, not only of safetensors files. Never raises."""
    names = set(_names(path))
    torch = any(container == "torch" and name in names for name, container in _ENTRIES) or _has_numbered(names)
    weights = any(name in names for name, _ in _ENTRIES) or any(name.endswith(".safetensors") for name in names)
    described = CONFIG in names or any(_NOT_ALONE.fullmatch(name) or is_torch_file_of_run(name) for name in names)
    composite = MODEL_INDEX in names or (MODULES in names and any(map(_MODULE.fullmatch, names)))
    return (
        torch or composite or (weights and described) or _is_around_sharded_model(names) or _of_ranks(path) is not None
    )


def _is_around_sharded_model(names: set[str]) -> bool:
    """True if another format reads the model, but the folder has more files that only this format reads."""
    sharded = [name for name in names if name.startswith(_SHARDED_PREFIX)]
    around = {name for name in names if is_training_file(name) or name == CONFIG}
    if all(name.endswith(".bin") for name in sharded):  # their format also reads the random states
        around = {name for name in around if not _RANDOM.fullmatch(name)}
    return bool(sharded and around)


def sort_files(path: Path) -> Folder:
    """The files of a folder by kind, from their names. No file is opened. Raises `CkptError` if it cannot be listed."""
    try:
        names = {entry.name for entry in entries_of(path) if entry.is_file()}
    except OSError as error:  # a link to itself, too
        raise unreadable(error, Path(error.filename or path)) from None
    entry, container = _entry(path, names)
    candidates = (path / name for name in sorted(names) if _OPTIMIZER.fullmatch(name))
    optimizer = next(candidates, None) if entry is not None else None
    training = [path / name for name in sorted(names) if is_torch_file_of_run(name)]
    models = [path / name for name in sorted(names) if _FURTHER_MODEL.fullmatch(name)]
    known = {entry, optimizer, *training, *models}
    visible = [path / name for name in sorted(names) if not name.startswith(".") and not name.endswith(SEAL_SUFFIX)]
    side_files = [file for file in visible if file not in known and not _is_weights(file.name)]
    return Folder(
        path,
        entry,
        container,
        optimizer,
        tuple(file for file in training if file != optimizer),
        tuple(models),
        tuple(side_files),
    )


def _entry(path: Path, names: set[str]) -> tuple[Path | None, Container]:
    if (ranks := _of_ranks(path)) is not None:
        return ranks, "safetensors"
    for name, container in _ENTRIES:
        if name in names:
            return path / name, container
    if any(name.endswith(".safetensors") for name in names):
        return path, "safetensors"
    return (path, "torch") if _has_numbered(names) else (None, "safetensors")


def _has_numbered(names: Iterable[str]) -> bool:
    """True if there are numbered files of torch, as from `save_pretrained`. Used when their index is missing."""
    return any(map(_NUMBERED_TORCH.fullmatch, names))


def _of_ranks(path: Path) -> Path | None:
    """The folder with files that each rank wrote: this one, or one inside it. None if there is none."""
    folders = (path / _BY_RANKS, path)
    return next((folder for folder in folders if any(map(_SHARD_OF_A_RANK.fullmatch, _names(folder)))), None)


def _names(folder: Path) -> list[str]:
    """The names in a folder; [] if it cannot be read."""
    try:
        return [entry.name for entry in entries_of(folder)]
    except OSError:
        return []


def _is_weights(name: str) -> bool:
    return name.endswith(_WEIGHTS) or ".index." in name
