"""Read a folder of several models: a pipeline of diffusers, a chain of sentence-transformers.

    model_index.json    diffusers: a folder for each component: unet/, vae/, text_encoder/, tokenizer/, scheduler/
    modules.json        sentence-transformers: the model itself, and folders of further modules: 2_Dense/

The name of a component's tensor begins with the name of its folder: `unet.conv_in.weight`. Tensors of a model in the
folder itself keep their names. Sources: diffusers `DiffusionPipeline.save_pretrained`,
sentence_transformers `SentenceTransformer.save`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_formats.containers.safetensors import parse_json
from ckpt_formats.core.checkpoint import SourceFile
from ckpt_formats.core.claims import MAX_SMALL_JSON
from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsafeError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.folders import CONFIG
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.hf.folder import MODEL_INDEX, MODULES, sort_files
from ckpt_formats.engines.hf.side_files import read_side_files
from ckpt_formats.engines.hf.weights import ModelFiles, read_model

_MAX_COMPONENTS = 256
_WITHOUT_WEIGHTS = ("Pooling", "Normalize", "Dropout", "WhitespaceTokenizer", "WeightedLayerPooling", "Asym", "Router")
"""Modules of sentence-transformers that have a configuration, but no weights."""


@dataclass(frozen=True)
class Component:
    """One of several models, or a part without weights: a tokenizer, a scheduler."""

    name: str
    """The name of its folder."""
    kind: str
    """The name of its class in its library."""


@dataclass(frozen=True)
class ComponentFiles:
    """The content of a folder's components."""

    model: ModelFiles
    side_files: Mapping[str, Value] = field(default_factory=dict)
    """Other files, by `folder/name`."""
    shards: tuple[SourceFile, ...] = ()
    """The records of `side_files`."""
    notices: tuple[Notice, ...] = ()


def has_own_model(path: Path) -> bool:
    """Whether the list of components names the folder itself, too. Without a list, the folder is a model."""
    if (path / MODEL_INDEX).is_file():
        return False
    return not (path / MODULES).is_file() or any(entry.get("path") == "" for entry in _modules(path / MODULES))


def components_of(path: Path) -> tuple[Component, ...]:
    """The components that have folders of their own.

    Raises `CorruptError` or `UnsafeError` if the list is not valid.
    """
    if (path / MODEL_INDEX).is_file():
        components = tuple(_of_pipeline(path / MODEL_INDEX))
    elif (path / MODULES).is_file():
        components = tuple(_of_modules(path / MODULES))
    else:
        return ()
    for component in components:
        if Path(component.name).name != component.name or component.name in (".", "..") or "\0" in component.name:
            raise UnsafeError(f"names {printable(component.name)!r}, which is not a folder inside it", where=path)
    if len(components) > _MAX_COMPONENTS:
        raise UnsafeError(f"names {len(components):,} components", where=path)
    return components


def read_components(path: Path, components: tuple[Component, ...]) -> ComponentFiles:
    """The models of all components as one, and their other files.

    Raises `IncompleteError` if a component is missing.
    """
    state: dict[str, Value] = {}
    aliases: dict[str, str] = {}
    model = ModelFiles(state, False, aliases)
    side_files: dict[str, Value] = {}
    shards: list[SourceFile] = []
    notices: list[Notice] = []
    for component in components:
        folder = path / component.name
        if not folder.is_dir():
            raise IncompleteError(f"the folder of the component {printable(component.name)!r} is missing", where=path)
        files = sort_files(folder)
        values, files_read, large = read_side_files(files.side_files)
        side_files |= {f"{component.name}/{name}": value for name, value in values.items()}
        shards += files_read
        if large:
            notices.append(
                Notice(f"too large to copy, not read, in {printable(component.name)}/", tuple(large), Weight.LOST)
            )
        if files.entry is None:
            if CONFIG in values and component.kind.rpartition(".")[2] not in _WITHOUT_WEIGHTS:
                raise IncompleteError(f"the component {printable(component.name)!r} has no weights", where=folder)
            continue
        inner = read_model(files)
        state |= {f"{component.name}.{name}": value for name, value in inner.state.items()}
        aliases |= {f"{component.name}.{alias}": f"{component.name}.{name}" for alias, name in inner.aliases.items()}
        model = replace(
            model,
            metadata={**model.metadata, **inner.metadata},
            shards=(*model.shards, *inner.shards),
            seals=(*model.seals, *inner.seals),
            notices=(*model.notices, *inner.notices),
        )
    return ComponentFiles(model, side_files, tuple(shards), tuple(notices))


def merge_models(model: ModelFiles, components: ModelFiles) -> ModelFiles:
    """The model of the folder and those of its components as one.

    Raises `CorruptError` if two tensors have one name.
    """
    if twice := next((name for name in components.state if name in model.state), None):
        raise CorruptError(f"two components have a tensor `{printable(twice)}`")
    return ModelFiles(
        {**model.state, **components.state},
        model.in_order,
        {**model.aliases, **components.aliases},
        {**components.metadata, **model.metadata},
        (*model.shards, *components.shards),
        (*model.seals, *components.seals),
        (*model.notices, *components.notices),
    )


def _of_pipeline(index: Path) -> Iterator[Component]:
    entries = parse_json(read_whole(index, MAX_SMALL_JSON), index)
    if not isinstance(entries, dict):
        raise CorruptError("is not a list of components", where=index)
    for name, value in entries.items():
        if not name.startswith("_") and _is_pair(value):
            yield Component(name, value[1])


def _is_pair(value: Any) -> bool:
    """True if it is [library, class]. Both are null if a component was left out; other values are options."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(item, str) for item in value)


def _modules(index: Path) -> list[dict[str, Any]]:
    entries = parse_json(read_whole(index, MAX_SMALL_JSON), index)
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CorruptError("is not a list of modules", where=index)
    return entries


def _of_modules(index: Path) -> Iterator[Component]:
    for entry in _modules(index):
        path, kind = entry.get("path"), entry.get("type")
        if not isinstance(path, str) or not isinstance(kind, str):
            raise CorruptError("has a module without a path or a type", where=index)
        if path:
            yield Component(path, kind)
