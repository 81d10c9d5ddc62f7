"""Write a model as `save_pretrained` does: shards, their index, the configuration and the tokenizer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_formats.containers.safetensors_shards import split_weights, weights_part, write_weights
from ckpt_formats.containers.shard_index import numbered_names
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Parameter
from ckpt_formats.core.dtypes import DTYPES, is_float
from ckpt_formats.core.errors import NotFoundError, UnsafeError, UnsupportedError
from ckpt_formats.core.folders import CONFIG
from ckpt_formats.core.format import FilePlan, Receipt
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Value
from ckpt_formats.engines.hf.config_check import check_fits
from ckpt_formats.engines.hf.folder import is_training_file, sort_files
from ckpt_formats.engines.hf.model_names import NameMatch, match_names
from ckpt_formats.engines.hf.side_files import config_of, read_side_files
from ckpt_formats.state_dicts.run_files import PREFIX, SideFile, content_of, plan_side_file, write_side_file

ADAPTER = "adapter_config.json"
_METADATA = {"format": "pt"}


def plan_files(
    source: Checkpoint, shard_nbytes: int, config_path: Path | None
) -> tuple[tuple[FilePlan, ...], tuple[str, ...]]:
    """The files to write, and notes for the user. `shard_nbytes`: about the bytes of a file.

    Raises `UnsupportedError` for tensors that the format cannot hold, `UnsafeError` for a file name that leads out of
    the folder.
    """
    files = files_of_model(config_path) if config_path else files_of_source(source)
    config = config_of(files)
    weights = [parameter for parameter in source.parameters.values() if parameter.role != "extra"]
    matched = match_names([*(weight.name for weight in weights), *source.aliases], config)
    named = list(_named(weights, source.aliases, matched))
    if config is not None:
        check_fits(matched, named, config, source.is_partial)
    elif ADAPTER not in files:
        raise UnsupportedError(
            "the source has no config.json, without which transformers cannot load a model",
            where=source.path,
            hint="Give the model's configuration with --config; or write only the tensors, --to safetensors.",
        )
    notes = list(_remarks(matched, named, config))
    files, changed = _with_dtype(files, named)
    groups = [sorted(group, key=_place_in_file) for group in split_weights(named, shard_nbytes)]
    names = numbered_names(len(groups), "adapter_model" if ADAPTER in files and config is None else "model")
    weight_files = [weights_part(name, group, _METADATA) for name, group in zip(names, groups, strict=True)]
    taken = {part.file for part in weight_files}
    side_files = [plan_side_file(name, value) for name, value in files.items() if _free(name, taken)]
    return (*weight_files, *side_files), (*notes, *changed)


def write_part(folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
    """Write one file: of weights, or next to them. The receipt of weights has the bytes of each tensor."""
    if not isinstance(part.content, SideFile):
        return write_weights(folder, part, transfer)
    return write_side_file(folder, part, transfer)


def files_of_source(source: Checkpoint) -> dict[str, Value]:
    """The model's files in the source's extras, by name, without those that only a resumed run needs."""
    files: dict[str, Value] = {}
    for key, value in source.extras.items():
        name = key.removeprefix(PREFIX)
        if not key.startswith(PREFIX) or is_training_file(name) or _is_of_a_component(name):
            continue
        content = content_of(name, value, source.parameters)
        if content is not None:
            files[name] = content
    return files


def _is_of_a_component(name: str) -> bool:
    """Whether the file is in another folder next to the model. Such folders are not written."""
    parts = name.split("/")
    return len(parts) > 1 and all(part not in ("", ".", "..") and "\\" not in part for part in parts)


def files_of_model(config: Path) -> dict[str, Value]:
    """The model's files in a folder that the user names, by name; or only the configuration, if it is a file.

    Raises `NotFoundError` if there is no configuration, `UnsupportedError` if a file is too large.
    """
    if config.is_dir():
        files, _, too_large = read_side_files(
            file for file in sort_files(config).side_files if not is_training_file(file.name)
        )
        if too_large:
            raise UnsupportedError(
                f"too large for a file next to a model: {', '.join(map(printable, too_large))}", where=config
            )
    elif config.is_file():
        values, _, _ = read_side_files([config])
        files = {CONFIG: values[config.name]}
    else:
        raise NotFoundError("there is no such file or folder", where=config)
    if config_of(files) is None:
        raise NotFoundError(f"holds no {CONFIG}", where=config)
    return files


def _named(weights: Sequence[Parameter], aliases: Mapping[str, str], matched: NameMatch) -> Iterator[Parameter]:
    """The weights under the model's names. A tied one has all its names but the one that files leave out."""
    changes = {name: change for change in matched.in_files for name in change.old}
    aliases_of: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        aliases_of.setdefault(name, []).append(alias)
    tie = matched.tie
    in_memory: dict[str, Tensor] = {}
    for weight in weights:
        names = [matched.names[name] for name in (weight.name, *aliases_of.get(weight.name, ()))]
        if tie is not None and {tie.alias, tie.name} <= set(names):
            names.remove(tie.alias)
        for name in names:
            change = changes.get(name)
            if change is None:
                yield replace(weight, name=name, states={MODEL: weight.weight}, values={})
                continue
            in_memory[name] = weight.weight
            if all(old in in_memory for old in change.old):
                tensors = change.make([in_memory[old] for old in change.old])
                for file, tensor in zip(change.new, tensors, strict=True):
                    yield replace(weight, name=file, states={MODEL: tensor}, values={})


def _with_dtype(files: Mapping[str, Value], named: Sequence[Parameter]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """The files, with the weights' dtype in the configuration, to which transformers rounds weights."""
    config = config_of(files)
    dtypes = {parameter.weight.dtype.name for parameter in named if is_float(parameter.weight.dtype)}
    key = next((key for key in ("dtype", "torch_dtype") if config and isinstance(config.get(key), str)), None)
    if config is None or key is None or len(dtypes) != 1:
        return dict(files), ()
    (dtype,) = dtypes
    if config[key] == dtype or config[key] not in DTYPES:
        return dict(files), ()
    note = f"config.json states {key} {dtype}, the type of the weights, instead of {config[key]}"
    return {**files, CONFIG: {**config, key: dtype}}, (note,)


def _place_in_file(parameter: Parameter) -> tuple[int, str]:
    """The sort key of tensors in a file: wide elements first, so that all are aligned, as in safetensors itself."""
    return -parameter.weight.dtype.itemsize, parameter.name


def _free(name: str, taken: set[str]) -> bool:
    """Whether a file of this name may be next to the weights. Raises `UnsafeError` if it leads out of the folder."""
    if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
        raise UnsafeError(f"a file of the source is called {printable(name)!r}, which leads out of its folder")
    return name not in taken and ".index." not in name


def _remarks(match: NameMatch, named: Sequence[Parameter], config: Mapping[str, Any] | None) -> Iterator[str]:
    """The differences to the model, and what is changed to fit it. `named` are the tensors as they will be written."""
    names, tie = {parameter.name for parameter in named}, match.tie
    if config is not None and not match.known and "quantization_config" not in config:
        kind = config.get("model_type")
        yield f"the names of models of type {kind!r:.80} are not known: names stay unchanged"
    if changed := [(old, new) for old, new in match.names.items() if old != new]:
        yield f"names are changed to the model's own: `{changed[0][0]}` becomes `{changed[0][1]}`, and so on"
    if match.in_files:
        yield "tensors have the form of the model's files, not of the model in memory: stacks of experts are divided"
    if match.missing:
        yield f"tensors of the model are missing, and transformers will initialize them: {list_names(match.missing)}"
    if match.surplus:
        yield f"tensors are not in the model, and transformers will ignore them: {list_names(match.surplus)}"
    if tie is not None and match.known and {tie.alias, tie.name} <= names:
        yield (
            f"`{tie.alias}` is a separate tensor, but the configuration ties it to `{tie.name}`: transformers may "
            "use one of them for both"
        )
