"""A single file of a checkpoint of several files, known by its name, by other files, or by an index."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import CkptError, IncompleteError, UnsupportedError
from ckpt_formats.core.folders import INDEX_SUFFIX, names_in, number_of, part_of_vllm
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record, Value, is_natural

_RANK_FILES = (
    (r"mp_rank_\d+_model_states\.pt|(bf16_)?zero_pp_rank_\d+_mp_rank_\d+_(model|optim)_states\.pt", "DeepSpeed"),
    (r"expp_rank_\d+_mp_rank_\d+_optim_states\.pt|layer_\d+_expert_\d+_mp_rank_\d+_model_states\.pt", "DeepSpeed"),
    (r"layer_\d+-model_\d+-model_states\.pt", "DeepSpeed's pipeline"),
    (r"mp_rank_\d+(_\d+){0,2}/(model_optim_rng|distrib_optim|model_rng|optim)\.pt", "Megatron"),
    (r"shard-\d+-model-\d+-of-\d+\.safetensors", "PyTorch's HuggingFaceStorageWriter"),
)
_META = re.compile(r"consolidated\.(\d\d)\.pth")
_RANK = re.compile(
    r"(.*[._-])?(ranks?|model[_-]?part|shard|[tpm]p|(tensor|model|pipeline)[_-]parallel)[_-]?\d+(\D.*)?", re.IGNORECASE
)
"""A file of one rank, or of one part, by its name."""
_ONE_OF = re.compile(r".*?\d+[_.-]?of[_.-]?(\d{1,6})(\D.*)?", re.IGNORECASE)
_WORLD = re.compile(r"(tp|pp|mp|(tensor|pipeline|model)(_model)?_parallel)(_world)?_(size|degree)")
"""What a script or an engine states of the ranks over which a model is split; not those that hold copies of it."""
_MAPPING = "mapping"
"""In config.json, the ranks of TensorRT-LLM, which has a file for each."""
_MAX_DEPTH = 4
_NUMBER = re.compile(r"\d+")
_MAX_INDICES = 16


def check_alone(path: Path) -> None:
    """Raise `UnsupportedError` for a file of one rank of several, which is not a checkpoint by itself."""
    named = f"{path.absolute().parent.name}/{path.name}"
    for pattern, engine in _RANK_FILES:
        if re.fullmatch(pattern, path.name) or re.fullmatch(pattern, named):
            folder = path.parent if "/" not in pattern else path.absolute().parent.parent
            raise UnsupportedError(
                f"one of several files of a checkpoint of {engine}",
                where=printable(str(path)),
                hint=f"Name the folder: {printable(str(folder))}",
            )
    if part_of_vllm(path.name) is not None:
        others = [name for name in names_in(path.parent) if part_of_vllm(name) is not None]
        if len(others) > 1 or path.name != "model-rank-0-part-0.safetensors":
            raise UnsupportedError(
                "one of several files of the sharded state of vLLM",
                where=printable(str(path)),
                hint=f"Name the folder: {printable(str(path.parent))}",
            )
    if _META.fullmatch(path.name):
        others = sorted(file.name for file in path.parent.glob("consolidated.*.pth") if _META.fullmatch(file.name))
        if others != ["consolidated.00.pth"]:
            raise UnsupportedError(
                f"one of {len(others)} files into which tensor parallelism split a model of Meta's",
                where=printable(str(path)),
                hint=f"Name the folder, which is read as one model: {printable(str(path.parent))}",
            )


def check_whole_of_meta(checkpoint: Checkpoint) -> None:
    """Raise `IncompleteError` for one of several files of a model of Meta's: its shapes contradict each other."""
    if not any(_META.fullmatch(shard.path.name) for shard in checkpoint.files):
        return
    embedding, norm = checkpoint.parameters.get("tok_embeddings.weight"), checkpoint.parameters.get("norm.weight")
    params = checkpoint.extras.get("hf/params.json")
    rows = params.get("vocab_size") if isinstance(params, dict) else None
    if embedding is None or norm is None or len(embedding.weight.shape) != 2 or len(norm.weight.shape) != 1:
        return
    is_narrow = embedding.weight.shape[1] < norm.weight.shape[0]
    if is_narrow or (isinstance(rows, int) and embedding.weight.shape[0] < rows):
        raise IncompleteError(
            f"one of several files into which tensor parallelism split a model of Meta's: `tok_embeddings.weight` has "
            f"the shape {list(embedding.weight.shape)}, `norm.weight` {list(norm.weight.shape)}",
            where=checkpoint.path,
            hint="Copy all files consolidated.*.pth into one folder, and name it.",
        )


def check_world(checkpoint: Checkpoint) -> None:
    """Raise `IncompleteError` for the file of one rank or part, if it or its name states that there are several.

    For formats that do not join files of ranks.
    """
    files = [file.path for file in checkpoint.files if file.role in ("model", "all")]
    of_a_rank = next((file for file in files if _RANK.fullmatch(file.name)), None)
    for file in files:
        match = None if number_of(file.name) else _ONE_OF.fullmatch(file.name)
        if match is not None and int(match[1]) > len(files):
            raise _one_of_several(file, f"by its name, there are {int(match[1])}")
    for place, ranks in _worlds(checkpoint.extras):
        if of_a_rank is not None or f"{_MAPPING}." in place:
            raise _one_of_several(of_a_rank or files[0], f"`{printable(place)}` is {ranks}")


def _one_of_several(file: Path, reason: str) -> IncompleteError:
    return IncompleteError(
        f"holds the part of one rank of several: {reason}",
        where=file,
        hint="ckpt does not join these files. Join them with the program that wrote them.",
    )


def _worlds(extras: Mapping[str, Value]) -> Iterator[tuple[str, int]]:
    """The places in the extras that state more than one rank over which a model is split."""
    pending: list[tuple[str, Value, int]] = [("", dict(extras), 0)]
    while pending:
        place, value, depth = pending.pop()
        inside = value.state if isinstance(value, Record) else value
        for key, item in inside.items() if isinstance(inside, dict) else ():
            if not isinstance(key, str):
                continue
            named = f"{place}.{key}" if place else key
            if _WORLD.fullmatch(key) and is_natural(item) and item > 1:
                yield named, item
            elif depth < _MAX_DEPTH and isinstance(item, (dict, Record)):
                pending.append((named, item, depth + 1))


def parts_unread(path: Path) -> Iterator[Notice]:
    """Notices for a file that can be read alone, although the checkpoint has further files."""
    number = number_of(path.name)
    if number is not None and number.total > 1:
        text = f"this is file {number.number} of {number.total} of a model; the tensors of the other files are not read"
        yield Notice(f"{text}. To read all, name the folder or its index", weight=Weight.LOST)
        return
    for index in sorted(path.parent.glob(f"*{INDEX_SUFFIX}"))[:_MAX_INDICES]:
        from ckpt_formats.containers.shard_index import read_index  # few files have an index beside them

        try:
            files = set(read_index(index).file_of.values())
        except CkptError:
            continue  # an index that cannot be read is no reason to refuse the file
        if path.name in files and len(files) > 1:
            named = printable(index.name)
            text = f"this is one of {len(files)} files of a model according to {named}; the others are not read"
            yield Notice(text, tuple(sorted(files - {path.name})), Weight.LOST)
            return
    if _RANK.fullmatch(path.name):
        name_pattern = _NUMBER.sub("0", path.name)
        others = [
            name for name in names_in(path.parent) if name != path.name and _NUMBER.sub("0", name) == name_pattern
        ]
        text = "by its name, one rank of several wrote this file; files of other ranks are not read"
        yield Notice(text, tuple(others), Weight.LOST if others else Weight.UNSURE)
