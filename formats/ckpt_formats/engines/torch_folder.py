"""Read a plain folder of files of `torch.save`: a model, its optimizer, and other files of a script.

Files are classified by their content: a model has tensors, an optimizer has states and groups. All other files
(schedulers, random states, averaged weights) become extras under their file names. If there are several models, it is
an error, unless exactly one has a usual name of a model, or they are those of the ranks of a model of Meta's.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np

from ckpt_formats.containers.torchfile import STARTS, TensorRef, TorchFile, open_file, tensor_of
from ckpt_formats.core.checkpoint import Checkpoint, Origin, SourceFile
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, NotFoundError, UnsupportedError, form_of
from ckpt_formats.core.folders import names_in
from ckpt_formats.core.format import Format, ReadOptions
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.hf.side_files import read_side_files
from ckpt_formats.engines.meta_ranks import rank_of, read_ranks
from ckpt_formats.engines.torch_save import Torch
from ckpt_formats.state_dicts.extras import candidate_names, names_for_tensors
from ckpt_formats.state_dicts.modules import is_module
from ckpt_formats.state_dicts.objects import as_root
from ckpt_formats.state_dicts.optimizer_form import is_optimizer
from ckpt_formats.state_dicts.read import RESERVED, training_state
from ckpt_formats.state_dicts.run_files import PREFIX
from ckpt_formats.state_dicts.steps import step_of

Kind = Literal["model", "optimizer", "other"]

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pth.tar", ".pt.tar")
_SIDE_SUFFIXES = (".json", ".yaml", ".yml", ".toml", ".txt", ".model", ".jinja")
_MAX_FILES = 256
_MAX_LISTED = 8
_MAX_DEPTH = 8
_MAX_TREE_VALUES = 100_000
_USUAL = ("model", "pytorch_model", "model_state", "model_state_dict", "state_dict", "weights", "checkpoint", "module")
_NO_MODEL = re.compile(r"rng|random|sched|scaler|sampler|loader|args|config|hparams|trainer|metric|loss", re.IGNORECASE)
_OF_A_RANK = re.compile(r"(.*[._-])?ranks?[_-]?\d+(\D.*)?", re.IGNORECASE)
_OF_TORCHTUNE = re.compile(r"hf_model_\d+_\d+\.pt")
"""Files of old versions of torchtune. Their optimizer uses other names of parameters, and another order of rows."""
_NUMBERS = re.compile(r"\d{1,15}")


@dataclass(frozen=True)
class _File:
    content: TorchFile
    kind: Kind

    @property
    def path(self) -> Path:
        return self.content.path


class TorchFolder(Format):
    name = "torch-folder"
    summary = "a folder of files of torch.save: a model, its optimizer, schedulers, in a file each"
    joins_ranks = False
    files_are_checkpoints = True

    def detect(self, path: Path) -> bool:
        return path.is_dir() and any(map(_is_torch, (path / name for name in names_in(path))))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        paths = list(islice(filter(_is_torch, (path / name for name in names_in(path))), _MAX_FILES + 1))
        if len(paths) > _MAX_FILES:
            raise NotFoundError(f"has more than {_MAX_FILES} files of torch: {_listed(paths)}", where=path, hint=_NAME)
        with form_of("a folder of files of torch", path):
            files = [_File(file, _kind_of(file)) for file in map(open_file, paths)]
            return _checkpoint(path, files, options)


_NAME = "Name one of them."


def _checkpoint(path: Path, files: Sequence[_File], options: ReadOptions) -> Checkpoint:
    ranks = [file for file in files if file.kind == "model" and rank_of(file.path) is not None]
    model = ranks[0] if len(ranks) > 1 else _model(path, [file for file in files if file.kind == "model"], files)
    optimizers = [file for file in files if file.kind == "optimizer"]
    read = ranks if len(ranks) > 1 else [model]
    other_files = [file for file in files if file not in read and file not in optimizers]
    if len(ranks) > 1:
        checkpoint = read_ranks(path, [file.content for file in ranks], options)
    else:
        checkpoint = Torch().read(model.path, options)
    notices: list[Notice] = []
    if len(ranks) > 1 or not optimizers or checkpoint.groups or _OF_TORCHTUNE.fullmatch(model.path.name):
        other_files += optimizers
    else:
        checkpoint = _with_optimizers(model.content, optimizers, options)
    parameters, extras = dict(checkpoint.parameters), dict(checkpoint.extras)
    for file in other_files:
        key = next(key for key in candidate_names(_key(file.path)) if key not in extras)
        extras[key] = names_for_tensors(file.content.root, key, parameters)
    side_files, shards, large = read_side_files(path / name for name in names_in(path) if name.endswith(_SIDE_SUFFIXES))
    for name, value in side_files.items():
        extras[f"{PREFIX}{name}"] = names_for_tensors(value, f"{PREFIX}{name}", parameters)
    step = (
        checkpoint.origin.step
        if checkpoint.origin.step is not None
        else _step({_key(file.path): file for file in other_files}, side_files)
    )
    if further := [file.path.name for file in other_files if file.kind != "other"]:
        text = "further models and optimizers, which are read as extras under the names of their files"
        notices.append(Notice(text, tuple(further), Weight.LOST))
    if large:
        notices.append(Notice("too large to copy, not read", tuple(large), Weight.LOST))
    return replace(
        checkpoint,
        path=path,
        origin=replace(checkpoint.origin, engine="torch", step=step),
        parameters=parameters,
        extras=extras,
        files=(*checkpoint.files, *map(_shard, other_files), *shards),
        seals=(*checkpoint.seals, *(seal for file in other_files for seal in file.content.seals())),
        notices=(
            *checkpoint.notices,
            *notices,
        ),
        original=None,
    )


def _step(other_files: Mapping[str, _File], side_files: Mapping[str, Value]) -> int | None:
    """The step in a file other than the model's, or None."""
    values = {key: file.content.root for key, file in other_files.items()}
    values |= {name.removesuffix(".json"): value for name, value in side_files.items()}
    return step_of(values)


def _with_optimizers(model: TorchFile, optimizers: Sequence[_File], options: ReadOptions) -> Checkpoint:
    """The model with the states of its optimizers. If there are several, only those that match its parameters."""
    tree = _tree(model)
    root = dict(tree) if any(key in tree for key in RESERVED) else {"model": tree}
    for file in optimizers:
        key = "optimizer" if len(optimizers) == 1 else _key(file.path)
        root[key] = inner = _inner(file.content.root)
        if inner is not file.content.root:  # other values of the file, such as a seed
            other_values = {str(name): value for name, value in file.content.root.items() if value is not inner}
            root |= {
                next(free for free in candidate_names(name) if free not in root): value
                for name, value in other_values.items()
            }
    state_read = training_state(root, model.path.parent, options.order, options.orders)
    return Checkpoint(
        path=model.path.parent,
        origin=Origin("torch", None, state_read.step, {"keys": state_read.keys.to_json()}),
        parameters=state_read.parameters,
        groups=state_read.groups,
        extras=state_read.extras,
        aliases=state_read.aliases,
        files=(_shard(_File(model, "model")), *map(_shard, optimizers)),
        seals=tuple(seal for file in (model, *(file.content for file in optimizers)) for seal in file.seals()),
        notices=state_read.notices,
    )


def _model(path: Path, models: Sequence[_File], files: Sequence[_File]) -> _File:
    """The file of the model.

    Raises `NotFoundError` or `UnsupportedError` if there are several, `IncompleteError` if there is none.
    """
    if not models:
        arrays = [file for file in files if file.kind == "other" and _has_arrays(file.content.root)]
        if len(arrays) == 1:
            return arrays[0]  # as RLlib saves policies
        raise IncompleteError(
            f"no file contains a model, only {_listed([file.path for file in files])}",
            where=path,
            hint="Copy the model's file into the folder.",
        )
    paths = [file.path for file in models]
    if len(models) == 1:
        return models[0]
    if all(_OF_A_RANK.fullmatch(file.stem) for file in paths):
        raise UnsupportedError(
            f"files of several ranks, which cannot be merged: {_listed(paths)}", where=path, hint=_NAME
        )
    usual = [file for name in _USUAL for file in models if file.path.stem.lower() == name]
    forms = Counter(_form(file) for file in paths)
    if not usual or max(forms.values()) > 1:
        raise NotFoundError(f"has {len(models)} models: {_listed(paths)}", where=path, hint=_NAME)
    return usual[0]


def _kind_of(file: TorchFile) -> Kind:
    root = file.root
    if is_optimizer(_inner(root)):
        return "optimizer"
    if is_module(root):
        return "model"
    if not isinstance(root, dict) or _NO_MODEL.search(file.path.stem):
        return "other"
    return "model" if _has_weights(root) else "other"


def _inner(root: Value) -> Value:
    """The state dict of an optimizer if the file has one and no weights, with or without its own key; else `root`."""
    if isinstance(root, dict) and not is_optimizer(root):
        states = [value for value in root.values() if is_optimizer(value)]
        if len(states) == 1 and not _has_weights({key: one for key, one in root.items() if one is not states[0]}):
            return states[0]
    return root


def _has_weights(root: Value) -> bool:
    """True if there is a floating-point tensor with at least one axis, outside of optimizers.

    Also true if there are more values than the limit.
    """
    waiting: list[tuple[Value, int]] = [(root, 0)]
    for _ in range(_MAX_TREE_VALUES):
        if not waiting:
            return False
        value, depth = waiting.pop()
        if isinstance(value, TensorRef):
            tensor = tensor_of(value)
            if tensor.shape and is_float(tensor.dtype):
                return True
        elif depth < _MAX_DEPTH and isinstance(value, dict) and not is_optimizer(value):
            waiting += ((item, depth + 1) for item in value.values())
    return bool(waiting)


def _has_arrays(root: Value) -> bool:
    """Whether a file has weights as arrays of NumPy, at its top or in one of its dicts."""
    inner = (root, *root.values()) if isinstance(root, dict) else ()
    values = [value for one in inner if isinstance(one, dict) for value in islice(one.values(), _MAX_TREE_VALUES)]
    return any(isinstance(value, np.ndarray) and value.ndim > 0 and is_float(value.dtype) for value in values)


def _tree(file: TorchFile) -> dict[str, Value]:
    root, _ = as_root(file.root)
    tree = {str(key): value for key, value in root.items()}
    if len(tree) < len(root):
        raise CorruptError("two keys of the file differ only in their type", where=file.path)
    return tree


def _key(path: Path) -> str:
    return path.name if path.stem in RESERVED else path.stem


def _form(path: Path) -> str:
    return _NUMBERS.sub("0", path.name)


def _listed(paths: Iterable[Path]) -> str:
    """The names of at most 8 files, the newest last: by the numbers in their names, then by their times."""
    by_age = sorted(paths, key=_age)
    prefix = f"{len(by_age) - _MAX_LISTED:,} others, " if len(by_age) > _MAX_LISTED else ""
    return prefix + ", ".join(printable(path.name) for path in by_age[-_MAX_LISTED:])


def _age(path: Path) -> tuple[list[int], float, str]:
    return [int(number) for number in _NUMBERS.findall(path.stem)], path.stat().st_mtime, path.name


def _shard(file: _File) -> SourceFile:
    return SourceFile(file.path, file.path.stat().st_size, "other" if file.kind == "other" else file.kind)


def _is_torch(path: Path) -> bool:
    """True if its name and its first bytes are those of a file of `torch.save`. Never raises."""
    if not path.name.endswith(SUFFIXES) or path.name.startswith("."):
        return False
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(2)
    except CkptError:
        raise
    except OSError:
        return False
    return head.startswith(STARTS)
