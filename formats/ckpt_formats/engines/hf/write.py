"""A model as `save_pretrained` writes it: shards and their index, the configuration and the tokenizer beside."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_formats.containers.safetensors_shards import split_weights, weights_part, write_weights
from ckpt_formats.containers.shard_index import numbered_names
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Parameter
from ckpt_formats.core.dtypes import DTYPES, is_float
from ckpt_formats.core.errors import NotFound, Unsafe, Unsupported
from ckpt_formats.core.files import write_sealed
from ckpt_formats.core.format import FilePlan, Receipt
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import TensorName, Value
from ckpt_formats.engines.hf.config_check import check_fits
from ckpt_formats.engines.hf.folder import CONFIG, is_training_file, sort_files
from ckpt_formats.engines.hf.model_names import NameMatch, as_in_files, match_names
from ckpt_formats.engines.hf.remarks import remarks
from ckpt_formats.engines.hf.side_files import PREFIX, config_of, read_side_files

_ADAPTER = "adapter_config.json"
_METADATA = {"format": "pt"}


@dataclass(frozen=True)
class SideFile:
    """The text of a file next to the weights; None: its bytes are a tensor of the source."""

    text: str | None = None


def plan_files(
    source: Checkpoint, shard_nbytes: int, config_path: Path | None
) -> tuple[tuple[FilePlan, ...], tuple[str, ...]]:
    """The files to write, and what the user should know of them.

    Raises `Unsupported` for tensors that they cannot hold, `Unsafe` for names of files.
    """
    files = files_of_model(config_path) if config_path else carried_files(source)
    config = config_of(files)
    weights = [parameter for parameter in source.parameters.values() if parameter.role != "extra"]
    spelled = match_names([*(weight.name for weight in weights), *source.aliases], config)
    named = list(_named(weights, source.aliases, spelled))
    if config is not None:
        check_fits(spelled, named, config, source.is_partial)
    elif _ADAPTER not in files:
        raise Unsupported(
            "the source has no config.json, without which transformers cannot load a model",
            where=source.path,
            hint="Name the model's configuration with --config; or write the tensors alone, --to safetensors.",
        )
    said = list(remarks(spelled, named, config))
    files, changed = _with_dtype(files, named)
    groups = [sorted(group, key=_place_in_file) for group in split_weights(named, shard_nbytes)]
    names = numbered_names(len(groups), "adapter_model" if _ADAPTER in files and config is None else "model")
    held = [weights_part(name, group, _METADATA) for name, group in zip(names, groups, strict=True)]
    taken = {part.file for part in held}
    beside = [_beside(name, value) for name, value in files.items() if _free(name, taken)]
    return (*held, *beside), (*said, *changed)


def write_part(folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
    """Write one file: of weights, or of what lies beside them. The receipt of weights tells the bytes of each."""
    if not isinstance(part.content, SideFile):
        return write_weights(folder, part, transfer)
    pieces = [part.content.text.encode()] if part.content.text is not None else transfer.chunks(part.tensors[0])
    seal = write_sealed(folder, part.file, pieces)
    return Receipt(part.file, seal.nbytes, (seal,), {}, transfer.reader.evidence())


def carried_files(source: Checkpoint) -> dict[str, Value]:
    """The files of a model that came with the checkpoint, by name: what a run needs to go on is not among them."""
    files: dict[str, Value] = {}
    for key, value in source.extras.items():
        name = key.removeprefix(PREFIX)
        if not key.startswith(PREFIX) or is_training_file(name) or _is_of_a_component(name):
            continue
        if isinstance(value, TensorName):
            tensor = source.parameters[value.name].weight
            if tensor.dtype.name == "uint8" and len(tensor.shape) == 1:
                files[name] = tensor
        elif isinstance(value, dict) and name.endswith(".json") and _is_json(value):
            files[name] = value
    return files


def _is_of_a_component(name: str) -> bool:
    """Is it a file in a folder beside the model? Such folders are not written."""
    parts = name.split("/")
    return len(parts) > 1 and all(part not in ("", ".", "..") and "\\" not in part for part in parts)


def files_of_model(config: Path) -> dict[str, Value]:
    """The files of a model in a folder that the user names; or the configuration alone, if it is a file."""
    if config.is_dir():
        files, _, left = read_side_files(
            file for file in sort_files(config).side_files if not is_training_file(file.name)
        )
        if left:
            raise Unsupported(f"too large to lie beside a model: {', '.join(map(printable, left))}", where=config)
    elif config.is_file():
        values, _, _ = read_side_files([config])
        files = {CONFIG: values[config.name]}
    else:
        raise NotFound("there is no such file or folder", where=config)
    if config_of(files) is None:
        raise NotFound(f"holds no {CONFIG}", where=config)
    return files


def _named(weights: Sequence[Parameter], aliases: Mapping[str, str], spelled: NameMatch) -> Iterator[Parameter]:
    """The weights under the model's names; a tied one under each of its names, but for the one that files leave out."""
    others: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        others.setdefault(name, []).append(alias)
    tie = spelled.tie
    for weight in weights:
        names = [spelled.names[name] for name in (weight.name, *others.get(weight.name, ()))]
        if tie is not None and {tie.alias, tie.name} <= set(names):
            names.remove(tie.alias)
        for name in names:
            stack = spelled.stacks.get(name)
            files = (name,) if stack is None else stack.files
            made = (weight.weight,) if stack is None else as_in_files(weight.weight, stack)
            for file, tensor in zip(files, made, strict=True):
                yield replace(weight, name=file, states={MODEL: tensor}, values={})


def _with_dtype(files: Mapping[str, Value], named: Sequence[Parameter]) -> tuple[dict[str, Value], tuple[str, ...]]:
    """The files, with the weights' type in the configuration: transformers rounds what it loads to what that says."""
    config = config_of(files)
    found = {parameter.weight.dtype.name for parameter in named if is_float(parameter.weight.dtype)}
    key = next((key for key in ("dtype", "torch_dtype") if config and isinstance(config.get(key), str)), None)
    if config is None or key is None or len(found) != 1:
        return dict(files), ()
    (dtype,) = found
    if config[key] == dtype or config[key] not in DTYPES:
        return dict(files), ()
    said = f"config.json says {key} {dtype}, which the weights are, in the place of {config[key]}"
    return {**files, CONFIG: {**config, key: dtype}}, (said,)


def _place_in_file(parameter: Parameter) -> tuple[int, str]:
    """Wide elements come first, so that all are aligned; as the library of the format has them."""
    return -parameter.weight.dtype.itemsize, parameter.name


def _free(name: str, taken: set[str]) -> bool:
    """Is this the name of a file that may lie beside the weights? Raises `Unsafe` if it leads elsewhere."""
    if Path(name).name != name or name in ("", ".", "..") or "\0" in name:
        raise Unsafe(f"a carried file is called {printable(name)!r}, which leads out of its folder")
    return name not in taken and ".index." not in name


def _is_json(value: Value) -> bool:
    """Does it hold nothing that JSON cannot say? Extras are input from strangers."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            if not all(isinstance(key, str) for key in one):
                return False
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
        elif one is not None and not isinstance(one, (bool, int, float, str)):
            return False
    return True


def _beside(name: str, value: Value) -> FilePlan:
    if isinstance(value, Tensor):
        return FilePlan(name, (), SideFile(), value.nbytes, "other", tensors=(value,))
    text = json.dumps(value, indent=2) + "\n"
    return FilePlan(name, (), SideFile(text), len(text), "other")
