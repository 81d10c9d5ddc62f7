"""Read a folder: the model's tensors, the optimizer's states under their names, all other files as extras."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_formats.containers.torchfile import open_file
from ckpt_formats.core.checkpoint import Checkpoint, Origin, Parameter, SourceFile
from ckpt_formats.core.errors import IncompleteError, form_of
from ckpt_formats.core.folders import TRAINER_STATE
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.engines.hf.components import (
    ComponentFiles,
    components_of,
    has_own_model,
    merge_models,
    read_components,
)
from ckpt_formats.engines.hf.folder import Folder, is_further, sort_files
from ckpt_formats.engines.hf.side_files import config_of, read_side_files
from ckpt_formats.engines.hf.weights import ModelFiles, read_entry, read_model, torch_shard
from ckpt_formats.names.config import configured_model
from ckpt_formats.state_dicts.extras import names_for_tensors
from ckpt_formats.state_dicts.read import training_state
from ckpt_formats.state_dicts.run_files import PREFIX

_RECIPE = "recipe_state/recipe_state.pt"
HAS_RECIPE = Notice(
    "torchtune's recipe_state.pt, with the optimizer, is next to this folder: name the parent folder to read it, too"
)
WITHOUT_BASE = "an adapter of PEFT, without its base model"
"""How the notice on an adapter begins."""
_NO_OPTIMIZER = Notice(
    "the folder belongs to a run, but has no file of the optimizer (optimizer.pt, optimizer.bin): no states are read",
    weight=Weight.UNSURE,
)


UNKNOWN_ORDER = (
    "the optimizer numbers its parameters, but their order is not known from the folder: its states are copied "
    "unchanged. Add the model's config.json to the folder, or name the parameters with --param-order"
)


def read_folder(path: Path, options: ReadOptions) -> Checkpoint:
    """The checkpoint in a folder, without reading tensors. Raises a suitable `CkptError`."""
    with form_of("a folder of Hugging Face's libraries", path):
        folder = sort_files(path)
        if not has_own_model(path):  # what lies beside the components is no part of them
            folder = replace(folder, entry=None, optimizer=None)
        return _read(folder, options)


def _read(folder: Folder, options: ReadOptions) -> Checkpoint:
    path = folder.path
    components = components_of(path)
    components_read = read_components(path, components) if components else ComponentFiles(ModelFiles({}, False))
    inner = _sharded_model(path, options) if folder.entry is None and not components else None
    side_files, shards, large = read_side_files(folder.side_files)
    states, training_shards, seals = _training(folder, {shard.path for shard in inner.files} if inner else set())
    files = {**side_files, **components_read.side_files, **states}
    extras: dict[str, Value] = {f"{PREFIX}{name}": value for name, value in files.items()}
    if inner is not None:
        checkpoint = _around(inner, extras)
    else:
        checkpoint = _with_model(folder, _model(folder, components_read), config_of(side_files), extras, options)
    step = (config_of(side_files, TRAINER_STATE) or {}).get("global_step")
    return replace(
        checkpoint,
        path=path,
        origin=replace(checkpoint.origin, step=step if is_natural(step) else checkpoint.origin.step),
        files=(*checkpoint.files, *shards, *components_read.shards, *training_shards),
        seals=(*checkpoint.seals, *seals),
        notices=(*checkpoint.notices, *components_read.notices, *_too_large(large), *_lacks(folder, checkpoint)),
    )


def _model(folder: Folder, components_read: ComponentFiles) -> ModelFiles:
    """The model of the folder and its components, as one. Raises `IncompleteError` if there is none."""
    own = ModelFiles({}, False) if folder.entry is None else read_model(folder)
    model = merge_models(own, components_read.model)
    if not model.state:
        raise IncompleteError("there are no weights", where=folder.path)
    return model


def _lacks(folder: Folder, checkpoint: Checkpoint) -> Iterator[Notice]:
    """Notices of parts that are missing in the folder or not read as states."""
    if folder.of_a_run and folder.optimizer is None and not checkpoint.groups and "optimizer" not in checkpoint.extras:
        yield _NO_OPTIMIZER
    if folder.entry is not None and folder.entry.name.startswith("adapter_model"):
        base = checkpoint.extras.get(f"{PREFIX}adapter_config.json")
        named = base.get("base_model_name_or_path") if isinstance(base, dict) else None
        which = f" ({printable(named)[:100]})" if isinstance(named, str) and named else ""
        yield Notice(f"{WITHOUT_BASE}{which}")
    further = [file.name for file in (*folder.models, *folder.training) if is_further(file.name)]
    if further:
        text = "further models and optimizers of the run, which are read as extras under the names of their files"
        yield Notice(text, tuple(further), Weight.LOST)
    # In a store, nothing next to the folder is requested: credentials may be for the folder alone.
    if not is_remote(folder.path) and (folder.path.absolute().parent / _RECIPE).is_file():
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
            notices = (Notice(UNKNOWN_ORDER, weight=Weight.LOST),)
    state_read = training_state(
        root, folder.path, options.order, options.orders, further_extras=extras, in_order=order is not None
    )
    if optimizer is not None and "optimizer" in state_read.extras:
        state_read.extras[key] = state_read.extras.pop("optimizer")
    metadata = {f"{PREFIX}__metadata__": dict(model.metadata)} if model.metadata else {}
    version = (config or {}).get("transformers_version")
    aliases = {**model.aliases, **state_read.aliases, **_tied(state_read.parameters, config)}
    return Checkpoint(
        path=folder.path,
        origin=Origin(
            "hf", version if isinstance(version, str) else None, state_read.step, {"keys": state_read.keys.to_json()}
        ),
        parameters=state_read.parameters,
        groups=state_read.groups,
        extras={**state_read.extras, **metadata},
        aliases=aliases,
        files=(*model.shards, *((torch_shard(optimizer, "optimizer"),) if optimizer else ())),
        seals=(*model.seals, *(optimizer.seals() if optimizer else ())),
        notices=(*model.notices, *state_read.notices, *notices),
    )


def _tied(parameters: Mapping[str, Parameter], config: Mapping[str, Any] | None) -> dict[str, str]:
    """The alias that files omit, if the model's configuration ties two tensors: {alias: name}."""
    configured = configured_model(config)
    tie = None if configured is None else configured.tie
    if tie is None or tie.name not in parameters or tie.alias in parameters:
        return {}
    return {tie.alias: tie.name}


def _training(folder: Folder, known: set[Path]) -> tuple[dict[str, Value], list[SourceFile], list[Seal]]:
    """The files that a run needs to continue, and further models: (values by file name, files, seals).

    Files in `known` are skipped.
    """
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


def _sharded_model(path: Path, options: ReadOptions) -> Checkpoint:
    """The checkpoint of a model in the folder that is split over ranks. Raises `IncompleteError` if there is none."""
    from ckpt_formats.engines.dcp import DCP
    from ckpt_formats.engines.fsdp_ranks import FsdpRanks

    for format in (DCP(), FsdpRanks()):
        if format.detect(path):
            return format.read(path, options)
    raise IncompleteError("there are no weights, only other files", where=path)


def _around(inner: Checkpoint, extras: Mapping[str, Value]) -> Checkpoint:
    """The checkpoint with these extras. Tensors in them become parameters."""
    parameters = dict(inner.parameters)
    named = {key: names_for_tensors(value, key, parameters) for key, value in extras.items()}
    return replace(inner, parameters=parameters, extras={**inner.extras, **named})


def _too_large(names: Sequence[str]) -> tuple[Notice, ...]:
    return (Notice("too large to copy, not read", tuple(names), Weight.LOST),) if names else ()


def numbered_only(optimizer: Value) -> bool:
    """True if the optimizer numbers its parameters and does not also name them."""
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        return False
    named = all(isinstance(group.get("param_names"), list) for group in groups)
    members = [group.get("params") for group in groups]
    return not named and any(isinstance(key, int) for keys in members if isinstance(keys, list) for key in keys)


def in_models_order(names: Sequence[str], config: Mapping[str, Any] | None) -> list[str] | None:
    """The names in the order in which the model registers its parameters; None if that is not known.

    Files of safetensors do not store an order. The alphabetical order is not that of the model: `layers.10` comes
    before `layers.2`.
    """
    configured = configured_model(config)
    expected = None if configured is None else configured.names("hf", names)
    if configured is None or expected is None:
        return None
    present, known = set(names), set(expected)
    order = [name for name in expected if name in present]
    remaining = [name for name in names if name not in known]
    tie, ignored = configured.tie, configured.family.ignored
    complete = known - present <= ({tie.alias} if tie else set())
    return [*order, *remaining] if complete and all(ignored.fullmatch(name) for name in remaining) else None
