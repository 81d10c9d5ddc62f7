"""A folder as a checkpoint: the model's tensors, the optimizer told to their names, all else carried."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.torchfile import open_file
from ckpt_formats.core.checkpoint import Checkpoint, Origin, Parameter, SourceFile
from ckpt_formats.core.errors import Incomplete, form_of
from ckpt_formats.core.files import Seal
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp import DCP
from ckpt_formats.engines.fsdp_ranks import FsdpRanks
from ckpt_formats.engines.hf.components import ComponentFiles, components_of, read_components, together
from ckpt_formats.engines.hf.folder import TRAINER_STATE, Folder, is_further, sort_files
from ckpt_formats.engines.hf.parameter_order import UNTOLD, in_models_order, numbered_only
from ckpt_formats.engines.hf.side_files import PREFIX, config_of, read_side_files
from ckpt_formats.engines.hf.weights import ModelFiles, read_entry, read_model, torch_shard
from ckpt_formats.names import table_for
from ckpt_formats.state_dicts.extras import names_for_tensors
from ckpt_formats.state_dicts.read import training_state

_RECIPE = "recipe_state/recipe_state.pt"
HAS_RECIPE = Notice(
    "torchtune's recipe_state.pt, with the optimizer, is in the folder beside: name the folder above to read it, too"
)
_NO_OPTIMIZER = Notice(
    "the folder is of a run, but the optimizer's file (optimizer.pt, optimizer.bin) is not in it: no state is read",
    weight=Weight.UNSURE,
)


def read_folder(path: Path, options: ReadOptions) -> Checkpoint:
    """The index of a folder. Raises `CkptError` of the kind that fits."""
    with form_of("a folder of Hugging Face's libraries", path):
        return _read(sort_files(path), options)


def _read(folder: Folder, options: ReadOptions) -> Checkpoint:
    path = folder.path
    components = components_of(path)
    several = read_components(path, components) if components else ComponentFiles(ModelFiles({}, False))
    inner = _cut_model(path, options) if folder.entry is None and not components else None
    beside, shards, large = read_side_files(folder.others)
    states, more, seals = _training(folder, {shard.path for shard in inner.files} if inner else set())
    files = {**beside, **several.beside, **states}
    extras: dict[str, Value] = {f"{PREFIX}{name}": value for name, value in files.items()}
    if inner is not None:
        found = _around(inner, extras)
    else:
        found = _with_model(folder, _model(folder, several), config_of(beside), extras, options)
    step = (config_of(beside, TRAINER_STATE) or {}).get("global_step")
    return replace(
        found,
        path=path,
        origin=replace(found.origin, step=step if is_natural(step) else found.origin.step),
        files=(*found.files, *shards, *several.shards, *more),
        seals=(*found.seals, *seals),
        notices=(*found.notices, *several.notices, *_too_large(large), *_lacks(folder, found)),
    )


def _model(folder: Folder, several: ComponentFiles) -> ModelFiles:
    """The model of the folder, and those of its components. Raises `Incomplete` if there is none."""
    own = ModelFiles({}, False) if folder.entry is None else read_model(folder)
    model = together(own, several.model)
    if not model.state:
        raise Incomplete("there are no weights", where=folder.path)
    return model


def _lacks(folder: Folder, found: Checkpoint) -> Iterator[Notice]:
    """What belongs to the model, and is not in its folder."""
    if folder.of_a_run and folder.optimizer is None and not found.groups and "optimizer" not in found.extras:
        yield _NO_OPTIMIZER
    if folder.entry is not None and folder.entry.name.startswith("adapter_model"):
        base = found.extras.get(f"{PREFIX}adapter_config.json")
        named = base.get("base_model_name_or_path") if isinstance(base, dict) else None
        which = f" ({printable(named)[:100]})" if isinstance(named, str) and named else ""
        yield Notice(f"an adapter of PEFT, without the model that it adapts{which}")
    further = [file.name for file in (*folder.models, *folder.training) if is_further(file.name)]
    if further:
        text = "further models and optimizers of the run, which are carried as extras under the names of their files"
        yield Notice(text, tuple(further), Weight.LOST)
    if (folder.path.absolute().parent / _RECIPE).is_file():
        yield HAS_RECIPE


def _with_model(
    folder: Folder, model: ModelFiles, config: Mapping[str, Any] | None, extras: dict[str, Value], options: ReadOptions
) -> Checkpoint:
    order = in_models_order(list(model.state), config)
    state = {name: model.state[name] for name in order} if order else model.state
    optimizer = open_file(folder.optimizer) if folder.optimizer else None
    root: dict[str, Value] = {"model": state}
    notices: tuple[Notice, ...] = ()
    if optimizer is not None:
        key = f"{PREFIX}{optimizer.path.name}"
        if order or model.in_order or options.order or not numbered_only(optimizer.root):
            root["optimizer"] = optimizer.root
        else:
            extras[key] = optimizer.root
            notices = (Notice(UNTOLD, weight=Weight.LOST),)
    found = training_state(
        root, folder.path, options.order, options.orders, further_extras=extras, in_order=order is not None
    )
    if optimizer is not None and "optimizer" in found.extras:
        found.extras[key] = found.extras.pop("optimizer")
    metadata = {f"{PREFIX}__metadata__": dict(model.metadata)} if model.metadata else {}
    version = (config or {}).get("transformers_version")
    aliases = {**model.aliases, **found.aliases, **_tied(found.parameters, config)}
    return Checkpoint(
        folder.path,
        Origin("hf", version if isinstance(version, str) else None, found.step, {"keys": found.keys.to_json()}),
        found.parameters,
        found.groups,
        {**found.extras, **metadata},
        aliases,
        (*model.shards, *((torch_shard(optimizer, "optimizer"),) if optimizer else ())),
        (*model.seals, *(optimizer.seals() if optimizer else ())),
        (*model.notices, *found.notices, *notices),
    )


def _tied(parameters: Mapping[str, Parameter], config: Mapping[str, Any] | None) -> dict[str, str]:
    """The name that files leave out, of a model whose configuration ties two."""
    table = table_for(config or {})
    tie = table.tie(config) if table and config else None
    if tie is None or tie.name not in parameters or tie.alias in parameters:
        return {}
    return {tie.alias: tie.name}


def _training(folder: Folder, known: set[Path]) -> tuple[dict[str, Value], list[SourceFile], list[Seal]]:
    """What a run needs to go on, and further models, by file; but for files that are known already."""
    values: dict[str, Value] = {}
    shards: list[SourceFile] = []
    seals: list[Seal] = []
    for path in (path for path in folder.training if path not in known):
        file = open_file(path)
        values[path.name] = file.root
        shards.append(torch_shard(file, "other"))
        seals += file.seals()
    for path in folder.models:
        model = read_entry(path, "safetensors" if path.suffix == ".safetensors" else "torch")
        values[path.name] = model.state
        shards += model.shards
        seals += model.seals
    return values, shards, seals


def _cut_model(path: Path, options: ReadOptions) -> Checkpoint:
    """The model that lies in the folder cut over ranks, and what came with it. Raises `Incomplete` if there is none."""
    for format in (DCP(), FsdpRanks()):
        if format.detect(path):
            return format.read(path, options)
    raise Incomplete("there are no weights, only what lies beside them", where=path)


def _around(inner: Checkpoint, extras: Mapping[str, Value]) -> Checkpoint:
    parameters = dict(inner.parameters)
    lifted = {key: names_for_tensors(value, key, parameters) for key, value in extras.items()}
    return replace(inner, parameters=parameters, extras={**inner.extras, **lifted})


def _too_large(names: Sequence[str]) -> tuple[Notice, ...]:
    return (Notice("not read, being too large to carry", tuple(names), Weight.LOST),) if names else ()
