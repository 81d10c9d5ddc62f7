"""A folder of several models: a pipeline of diffusers, a chain of sentence-transformers.

    model_index.json    diffusers: a folder for each component: unet/, vae/, text_encoder/, tokenizer/, scheduler/
    modules.json        sentence-transformers: the model itself, and folders of further modules: 2_Dense/

The tensors of a component are called by its folder and by their own names: `unet.conv_in.weight`. Those of a model
that lies in the folder itself keep their names. Sources: diffusers `DiffusionPipeline.save_pretrained`,
sentence_transformers `SentenceTransformer.save`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ckpt_formats.containers.safetensors import parse_json
from ckpt_formats.core.checkpoint import SourceFile
from ckpt_formats.core.errors import Corrupt, Incomplete, Unsafe
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.hf.folder import CONFIG, MODEL_INDEX, MODULES, sort_files
from ckpt_formats.engines.hf.side_files import read_side_files
from ckpt_formats.engines.hf.weights import ModelFiles, read_model

_MOST_JSON = 1 << 20
_MOST_COMPONENTS = 256
_WITHOUT_WEIGHTS = ("Pooling", "Normalize", "Dropout", "WhitespaceTokenizer", "WeightedLayerPooling", "Asym", "Router")
"""Modules of sentence-transformers that have a configuration, and no weights."""


@dataclass(frozen=True)
class Component:
    """One model of several, or something that comes with them: a tokenizer, a scheduler."""

    name: str
    """Of its folder."""
    kind: str
    """What its library calls its class."""


@dataclass(frozen=True)
class ComponentFiles:
    """What the components of a folder hold."""

    model: ModelFiles
    beside: Mapping[str, Value] = field(default_factory=dict)
    """Files by name, with the folder before it."""
    shards: tuple[SourceFile, ...] = ()
    """Of these files."""
    notices: tuple[Notice, ...] = ()


def components_of(path: Path) -> tuple[Component, ...]:
    """The components that lie in folders of their own. Raises `Corrupt` or `Unsafe` for a list that is none."""
    if (path / MODEL_INDEX).is_file():
        found = tuple(_of_pipeline(path / MODEL_INDEX))
    elif (path / MODULES).is_file():
        found = tuple(_of_modules(path / MODULES))
    else:
        return ()
    for one in found:
        if Path(one.name).name != one.name or one.name in (".", "..") or "\0" in one.name:
            raise Unsafe(f"names {printable(one.name)!r}, which is not a folder in it", where=path)
    if len(found) > _MOST_COMPONENTS:
        raise Unsafe(f"names {len(found):,} components", where=path)
    return found


def read_components(path: Path, components: tuple[Component, ...]) -> ComponentFiles:
    """The models of all components as one, and what lies beside them. Raises `Incomplete` if one is not there."""
    state: dict[str, Value] = {}
    aliases: dict[str, str] = {}
    found = ComponentFiles(ModelFiles(state, False, aliases))
    model, beside = found.model, dict[str, Value]()
    shards: list[SourceFile] = []
    notices: list[Notice] = []
    for one in components:
        folder = path / one.name
        if not folder.is_dir():
            raise Incomplete(f"the folder of the component {printable(one.name)!r} is missing", where=path)
        files = sort_files(folder)
        values, more, large = read_side_files(files.others)
        beside |= {f"{one.name}/{name}": value for name, value in values.items()}
        shards += more
        if large:
            notices.append(
                Notice(f"of {printable(one.name)}/, not read, being too large to carry", tuple(large), Weight.LOST)
            )
        if files.entry is None:
            if CONFIG in values and one.kind.rpartition(".")[2] not in _WITHOUT_WEIGHTS:
                raise Incomplete(f"the component {printable(one.name)!r} has no weights", where=folder)
            continue
        inner = read_model(files)
        state |= {f"{one.name}.{name}": value for name, value in inner.state.items()}
        aliases |= {f"{one.name}.{alias}": f"{one.name}.{name}" for alias, name in inner.aliases.items()}
        model = replace(
            model,
            metadata={**model.metadata, **inner.metadata},
            shards=(*model.shards, *inner.shards),
            seals=(*model.seals, *inner.seals),
            notices=(*model.notices, *inner.notices),
        )
    return ComponentFiles(model, beside, tuple(shards), tuple(notices))


def together(model: ModelFiles, components: ModelFiles) -> ModelFiles:
    """A model with those of its components. Raises `Corrupt` if two tensors have one name."""
    if twice := next((name for name in components.state if name in model.state), None):
        raise Corrupt(f"two components hold a tensor `{printable(twice)}`")
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
    said = parse_json(read_whole(index, _MOST_JSON), index)
    if not isinstance(said, dict):
        raise Corrupt("is not a list of components", where=index)
    for name, value in said.items():
        if not name.startswith("_") and _is_pair(value):
            yield Component(name, value[1])


def _is_pair(value: Any) -> bool:
    """Is it a library and a class? Of a component that was left out, both are null; all else is an option."""
    return isinstance(value, list) and len(value) == 2 and all(isinstance(one, str) for one in value)


def _of_modules(index: Path) -> Iterator[Component]:
    said = parse_json(read_whole(index, _MOST_JSON), index)
    if not isinstance(said, list) or not all(isinstance(one, dict) for one in said):
        raise Corrupt("is not a list of modules", where=index)
    for one in said:
        path, kind = one.get("path"), one.get("type")
        if not isinstance(path, str) or not isinstance(kind, str):
            raise Corrupt("has a module without a path or a type", where=index)
        if path:
            yield Component(path, kind)
