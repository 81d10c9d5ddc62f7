"""A plain folder of files of `torch.save`: a model, its optimizer, and what else a script saved beside them.

The files are known by what they hold: the model by its tensors, the optimizer by its states and groups. All else
(schedulers, random states, averaged weights) is carried under the names of its files. Which of several models is
meant, nobody knows: they are refused, unless one is called as models usually are.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Literal

from ckpt_formats.containers.torchfile import TensorRef, TorchFile, open_file, tensor_of
from ckpt_formats.containers.torchfile.reader import STARTS
from ckpt_formats.core.checkpoint import Checkpoint, Origin, SourceFile
from ckpt_formats.core.dtypes import is_float
from ckpt_formats.core.errors import Corrupt, Incomplete, NotFound, Unsupported, form_of
from ckpt_formats.core.format import Format, ReadOptions
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.detection.traces import names_in
from ckpt_formats.engines.hf.side_files import PREFIX, read_side_files
from ckpt_formats.engines.torch_save import Torch
from ckpt_formats.state_dicts.extras import candidate_names, names_for_tensors
from ckpt_formats.state_dicts.optimizer_form import is_optimizer
from ckpt_formats.state_dicts.read import RESERVED, training_state
from ckpt_formats.state_dicts.steps import step_of

Kind = Literal["model", "optimizer", "other"]

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pth.tar", ".pt.tar")
_BESIDE = (".json", ".yaml", ".yml", ".toml", ".txt", ".model", ".jinja")
_MOST_FILES = 256
_MOST_LISTED = 8
_MOST_DEPTH = 8
_MOST_VALUES = 100_000
_USUAL = ("model", "pytorch_model", "model_state", "model_state_dict", "state_dict", "weights", "checkpoint", "module")
_NO_MODEL = re.compile(r"rng|random|sched|scaler|sampler|loader|args|config|hparams|trainer|metric|loss", re.IGNORECASE)
_OF_A_RANK = re.compile(r"(.*[._-])?ranks?[_-]?\d+(\D.*)?", re.IGNORECASE)
_OF_META = re.compile(r"consolidated\.\d\d\.pth")
_OF_TORCHTUNE = re.compile(r"hf_model_\d+_\d+\.pt")
"""Old versions saved so: the optimizer beside knows the parameters by other names, and their rows in another order."""
_NUMBERS = re.compile(r"\d{1,15}")


@dataclass(frozen=True)
class _File:
    file: TorchFile
    kind: Kind

    @property
    def path(self) -> Path:
        return self.file.path


class TorchFolder(Format):
    name = "torch-folder"
    summary = "a folder of files of torch.save: a model, its optimizer, schedulers, in a file each"

    def detect(self, path: Path) -> bool:
        return path.is_dir() and any(map(_is_torch, (path / name for name in names_in(path))))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        paths = list(islice(filter(_is_torch, (path / name for name in names_in(path))), _MOST_FILES + 1))
        if len(paths) > _MOST_FILES:
            raise NotFound(f"holds more than {_MOST_FILES} files of torch: {_listed(paths)}", where=path, hint=_NAME)
        with form_of("a folder of files of torch", path):
            files = [_File(file, _kind_of(file)) for file in map(open_file, paths)]
            return _checkpoint(path, files, options)


_NAME = "Name one of them."


def _checkpoint(path: Path, files: Sequence[_File], options: ReadOptions) -> Checkpoint:
    model = _model(path, [one for one in files if one.kind == "model"], files)
    optimizers = [one for one in files if one.kind == "optimizer"]
    others = [one for one in files if one is not model and one not in optimizers]
    found = Torch().read(model.path, options)
    notices: list[Notice] = []
    if not optimizers or found.groups or _OF_TORCHTUNE.fullmatch(model.path.name):
        others += optimizers
    else:
        found = _with_optimizers(model.file, optimizers, options)
    parameters, extras = dict(found.parameters), dict(found.extras)
    for one in others:
        key = next(key for key in candidate_names(_key(one.path)) if key not in extras)
        extras[key] = names_for_tensors(one.file.root, key, parameters)
    beside, shards, large = read_side_files(path / name for name in names_in(path) if name.endswith(_BESIDE))
    for name, value in beside.items():
        extras[f"{PREFIX}{name}"] = names_for_tensors(value, f"{PREFIX}{name}", parameters)
    step = (
        found.origin.step if found.origin.step is not None else _step({_key(one.path): one for one in others}, beside)
    )
    if further := [one.path.name for one in others if one.kind != "other"]:
        text = "further models and optimizers, which are carried as extras under the names of their files"
        notices.append(Notice(text, tuple(further), Weight.LOST))
    if large:
        notices.append(Notice("not read, being too large to carry", tuple(large), Weight.LOST))
    return replace(
        found,
        path=path,
        origin=replace(found.origin, engine="torch", step=step),
        parameters=parameters,
        extras=extras,
        files=(*found.files, *map(_shard, others), *shards),
        seals=(*found.seals, *(seal for one in others for seal in one.file.seals())),
        notices=(
            *found.notices,
            *notices,
        ),
        original=None,
    )


def _step(others: Mapping[str, _File], beside: Mapping[str, Value]) -> int | None:
    """The step that a file beside the model's speaks of."""
    said = {key: one.file.root for key, one in others.items()}
    said |= {name.removesuffix(".json"): value for name, value in beside.items()}
    return step_of(said)


def _with_optimizers(model: TorchFile, optimizers: Sequence[_File], options: ReadOptions) -> Checkpoint:
    """The model with its optimizer's states; with several, those that find their parameters."""
    tree = _tree(model)
    root = dict(tree) if any(key in tree for key in RESERVED) else {"model": tree}
    for one in optimizers:
        key = "optimizer" if len(optimizers) == 1 else _key(one.path)
        root[key] = inner = _inner(one.file.root)
        if inner is not one.file.root:  # what else the file holds, such as a seed
            rest = {str(name): value for name, value in one.file.root.items() if value is not inner}
            root |= {
                next(free for free in candidate_names(name) if free not in root): value for name, value in rest.items()
            }
    found = training_state(root, model.path.parent, options.order, options.orders)
    return Checkpoint(
        model.path.parent,
        Origin("torch", None, found.step, {"keys": found.keys.to_json()}),
        found.parameters,
        found.groups,
        found.extras,
        found.aliases,
        (_shard(_File(model, "model")), *map(_shard, optimizers)),
        tuple(seal for file in (model, *(one.file for one in optimizers)) for seal in file.seals()),
        found.notices,
    )


def _model(path: Path, models: Sequence[_File], files: Sequence[_File]) -> _File:
    """The file of the model. Raises `NotFound` or `Unsupported` if there are several, `Incomplete` if there is none."""
    if not models:
        raise Incomplete(
            f"no file here holds a model, only {_listed([one.path for one in files])}",
            where=path,
            hint="Copy the model's file into the folder.",
        )
    paths = [one.path for one in models]
    if len(models) == 1:
        return models[0]
    if sum(1 for one in paths if _OF_META.fullmatch(one.name)) > 1:
        raise Unsupported(
            f"tensor parallelism cut a model of Meta's over {len(models)} files: {_listed(paths)}",
            where=path,
            hint="They are not joined here: transformers' convert_llama_weights_to_hf.py does.",
        )
    if all(_OF_A_RANK.fullmatch(one.stem) for one in paths):
        raise Unsupported(f"files of several ranks, which are not joined: {_listed(paths)}", where=path, hint=_NAME)
    usual = [one for name in _USUAL for one in models if one.path.stem.lower() == name]
    forms = Counter(_form(one) for one in paths)
    if not usual or max(forms.values()) > 1:
        raise NotFound(f"holds {len(models)} models: {_listed(paths)}", where=path, hint=_NAME)
    return usual[0]


def _kind_of(file: TorchFile) -> Kind:
    root = file.root
    if is_optimizer(_inner(root)):
        return "optimizer"
    if not isinstance(root, dict) or _NO_MODEL.search(file.path.stem):
        return "other"
    return "model" if _has_weights(root) else "other"


def _inner(root: Value) -> Value:
    """The state dict of an optimizer, if it is all that a file holds, under a key of its own or not."""
    if isinstance(root, dict) and not is_optimizer(root):
        states = [value for value in root.values() if is_optimizer(value)]
        if len(states) == 1 and not _has_weights({key: one for key, one in root.items() if one is not states[0]}):
            return states[0]
    return root


def _has_weights(root: Value) -> bool:
    """Is there a tensor of floating-point numbers with axes in it, outside of optimizers?"""
    waiting: list[tuple[Value, int]] = [(root, 0)]
    for _ in range(_MOST_VALUES):
        if not waiting:
            return False
        value, depth = waiting.pop()
        if isinstance(value, TensorRef):
            tensor = tensor_of(value)
            if tensor.shape and is_float(tensor.dtype):
                return True
        elif depth < _MOST_DEPTH and isinstance(value, dict) and not is_optimizer(value):
            waiting += ((item, depth + 1) for item in value.values())
    return bool(waiting)


def _tree(file: TorchFile) -> dict[str, Value]:
    tree = {str(key): value for key, value in file.root.items()}
    if len(tree) < len(file.root):
        raise Corrupt("two keys of the file differ only in their type", where=file.path)
    return tree


def _key(path: Path) -> str:
    return path.name if path.stem in RESERVED else path.stem


def _form(path: Path) -> str:
    return _NUMBERS.sub("0", path.name)


def _listed(paths: Iterable[Path]) -> str:
    """Names of files, the newest last: by the numbers in their names, then by their times."""
    by_age = sorted(paths, key=_age)
    more = f"{len(by_age) - _MOST_LISTED:,} others, " if len(by_age) > _MOST_LISTED else ""
    return more + ", ".join(printable(one.name) for one in by_age[-_MOST_LISTED:])


def _age(path: Path) -> tuple[list[int], float, str]:
    return [int(number) for number in _NUMBERS.findall(path.stem)], path.stat().st_mtime, path.name


def _shard(one: _File) -> SourceFile:
    return SourceFile(one.path, one.path.stat().st_size, "other" if one.kind == "other" else one.kind)


def _is_torch(path: Path) -> bool:
    """Is it, by its name and its first bytes, a file of `torch.save`? Never raises."""
    if not path.name.endswith(SUFFIXES) or path.name.startswith("."):
        return False
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(2)
    except OSError:
        return False
    return head.startswith(STARTS)
