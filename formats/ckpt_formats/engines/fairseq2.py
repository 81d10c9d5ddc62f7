"""Read the checkpoints of fairseq2's trainer: a folder for each step, and in it one for each part of the state.

    STEP/model/pp_00/tp_00/sdp_00.pt        a state dict; with FSDP, each file has rows of every tensor
    STEP/optimizer/pp_00/tp_00/sdp_00.pt    the state of the optimizer
    STEP/trainer/rank_00.pt                 counters, schedulers, random states, one file for each rank
    STEP/data_reader/dp_00.pt

Tensor-parallel files need the axes that only the model's code states. Source: fairseq2 0.8, `checkpoint.manager`,
`model_checkpoint.native`.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_formats.containers.torchfile import TensorRef, TorchFile, open_file, tensor_of
from ckpt_formats.core.checkpoint import Checkpoint, Origin, SourceFile
from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsupportedError, form_of
from ckpt_formats.core.folders import names_in
from ckpt_formats.core.format import Format, ReadOptions
from ckpt_formats.core.layout import Rule, merge
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor, with_replicas
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.state_dicts.read import training_state

_MODEL, _OPTIMIZER, _TRAINER, _READER = "model", "optimizer", "trainer", "data_reader"
_FIRST = "pp_00/tp_00"
_NUMBERED = re.compile(r"(pp|tp|sdp|dp|rank)_(\d{2,6})(\.pt)?")
_STEP = re.compile(r"step_(\d{1,15})")
_COUNT = "_step_nr"
_ROWS = Rule(".*", axis=0, origin="fairseq2")
_COPY = "Copy the files of all ranks."


class Fairseq2(Format):
    name = "fairseq2"
    summary = "fairseq2: the model, optimizer and trainer of a step, a folder for each"

    def detect(self, path: Path) -> bool:
        return (path / _MODEL / _FIRST).is_dir() or (path / _FIRST).is_dir()

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        with form_of("a checkpoint of fairseq2", path):
            return _read(path, options)


def _read(path: Path, options: ReadOptions) -> Checkpoint:
    step = path if (path / _MODEL / _FIRST).is_dir() else None
    stages = _stages(path / _MODEL if step else path)
    trees = [_joined(files) for files in stages]
    model: dict[str, Value] = {}
    for files, tree in zip(stages, trees, strict=True):
        if twice := model.keys() & tree.keys():
            raise CorruptError(f"`{printable(min(twice))}` is in two stages", where=files[0].path)
        model |= tree
    others = _others(step) if step else {}
    optimizers = others.pop(_OPTIMIZER, [])
    root: dict[str, Value] = {_MODEL: model}
    notices: list[Notice] = []
    read = [file for files in stages for file in files]
    is_whole = len(read) == 1
    if is_whole and optimizers:
        root[_OPTIMIZER] = optimizers[0].root
        read += optimizers
    elif optimizers:
        text = "the states of an optimizer that is sharded over ranks are not joined, and not read"
        notices.append(Notice(text, (f"{_OPTIMIZER}/",), Weight.LOST))
    extras: dict[str, Value] = {}
    for key, files in others.items():
        extras[key] = files[0].root if len(files) == 1 else {file.path.stem: file.root for file in files}
        read += files
    state = training_state(root, path, options.order, options.orders, further_extras=extras)
    degrees = {"pp": len(stages), "dp": max(map(len, stages))}
    return Checkpoint(
        path=path,
        origin=Origin(
            "fairseq2", None, _step_of(others, path), {key: ranks for key, ranks in degrees.items() if ranks > 1}
        ),
        parameters=state.parameters,
        groups=state.groups,
        extras=state.extras,
        aliases=state.aliases,
        files=tuple(SourceFile(file.path, file.path.stat().st_size, _role(file.path)) for file in read),
        seals=tuple(seal for file in read for seal in file.seals()),
        notices=(*state.notices, *notices),
    )


def _stages(folder: Path) -> list[list[TorchFile]]:
    """The files of the model: by pipeline stage, then by the rank that has these rows.

    Raises `IncompleteError` if one is missing, `UnsupportedError` if there are tensor-parallel ranks.
    """
    stages = []
    for stage in _numbered(folder, "pp"):
        parts = _numbered(stage, "tp")
        if len(parts) > 1:
            raise UnsupportedError(
                f"a model of fairseq2 over {len(parts)} tensor-parallel ranks, which only its code can join",
                where=folder,
                hint="Save it in fairseq2 without tensor parallelism, or export it with hg_export.",
            )
        stages.append([open_file(file) for part in parts for file in _numbered(part, "sdp")])
    counts = [len(files) for files in stages]
    if not counts or len(set(counts)) > 1 or not counts[0]:
        raise IncompleteError(f"the stages have {counts} files of the model", where=folder, hint=_COPY)
    return stages


def _numbered(folder: Path, kind: str) -> list[Path]:
    """The entries of a folder that are called `kind` and a number, from 0 on. Raises `IncompleteError` for a gap."""
    by_number = {}
    for name in names_in(folder):
        if (match := _NUMBERED.fullmatch(name)) and match[1] == kind:
            by_number[int(match[2])] = folder / name
    for number in range(len(by_number)):
        if number not in by_number:
            raise IncompleteError(f"{kind}_{number:02} is missing", where=folder, hint=_COPY)
    return [by_number[number] for number in range(len(by_number))]


def _joined(files: list[TorchFile]) -> dict[str, Value]:
    """The state dict of a stage: of several files, the rows of each tensor one after another."""
    trees: list[Mapping[str, Value]] = []
    for file in files:
        if not isinstance(file.root, dict):
            raise CorruptError("is not a dict of tensors, as the model of fairseq2 is", where=file.path)
        trees.append({str(key): value for key, value in file.root.items()})
    if len(trees) == 1:
        return dict(trees[0])
    result: dict[str, Value] = {}
    for name in trees[0]:
        parts = [_tensor(tree[name], name, file) for tree, file in zip(trees, files, strict=True) if name in tree]
        result[name] = merge(name, parts, _ROWS) if parts[0].shape else with_replicas(parts)
    if other := {name for tree in trees for name in tree} - result.keys():
        raise CorruptError(f"`{printable(min(other))}` is not in {files[0].path.name}", where=files[0].path)
    return result


def _tensor(value: Value, name: str, file: TorchFile) -> Tensor:
    if not isinstance(value, TensorRef):
        raise UnsupportedError(f"`{printable(name)}` is not a plain tensor", where=file.path)
    return tensor_of(value)


def _others(step: Path) -> dict[str, list[TorchFile]]:
    """The files of the other parts of the state, by part."""
    files_of = {
        _TRAINER: _numbered(step / _TRAINER, "rank"),
        _READER: _numbered(step / _READER, "dp"),
        _OPTIMIZER: [
            file
            for stage in _numbered(step / _OPTIMIZER, "pp")
            for part in _numbered(stage, "tp")
            for file in _numbered(part, "sdp")
        ],
    }
    return {key: list(map(open_file, files)) for key, files in files_of.items() if files}


def _step_of(others: Mapping[str, list[TorchFile]], path: Path) -> int | None:
    for file in others.get(_TRAINER, ()):
        step = file.root.get(_COUNT) if isinstance(file.root, dict) else None
        if isinstance(step, int) and is_natural(step):
            return step
    return next((int(match[1]) for match in _named_steps(path)), None)


def _named_steps(path: Path) -> Iterator[re.Match[str]]:
    for name in (path.absolute().name, path.absolute().parent.name):
        if match := _STEP.fullmatch(name):
            yield match


def _role(file: Path) -> str:
    part = next((name for name in reversed(file.parts) if name in (_MODEL, _OPTIMIZER)), None)
    return part or ("other" if file.name.startswith(("rank", "dp")) else _MODEL)
