"""A model in several files: the numbers in the file names, and the index that states the file of every tensor."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.core.checkpoint import SourceFile
from ckpt_formats.core.claims import MAX_INDEX
from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError, UnsafeError, UnsupportedError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.folders import NUMBERED, number_of, part_of_vllm
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.values import is_natural


@dataclass(frozen=True)
class ShardIndex:
    """The content of an index file."""

    path: Path
    file_of: Mapping[str, str]
    """Tensor name -> file name."""
    total: int | None = None
    """Bytes of all tensors, as the metadata state."""

    def files(self) -> list[Path]:
        """The files that the index names, each once. Raises `IncompleteError` if one is missing."""
        files = [self.path.parent / name for name in dict.fromkeys(self.file_of.values())]
        for file in files:
            if not _is_file(file):
                raise IncompleteError(f"the index names {printable(file.name)!r}, which is missing", where=self.path)
        return files

    def shard(self) -> SourceFile:
        """The index itself, as a file of the checkpoint."""
        return SourceFile(self.path, self.path.stat().st_size, "index")

    def check(self, actual: Mapping[str, str]) -> None:
        """Raise `IncompleteError` unless `actual` (tensor name -> file name) matches the index."""
        for name in (*self.file_of, *actual):
            if self.file_of.get(name) != actual.get(name):
                stated_file, actual_file = self.file_of.get(name, "no file"), actual.get(name, "none")
                raise IncompleteError(
                    f"the index states that tensor `{printable(name)}` is in {printable(stated_file)}, but it is in "
                    f"{printable(actual_file)}",
                    where=self.path,
                )

    def notices(self, nbytes: int) -> tuple[Notice, ...]:
        """A notice if the index states another total size than `nbytes`."""
        if self.total is None or self.total == nbytes:
            return ()
        text = f"{printable(self.path.name)} states {self.total:,} bytes for all tensors, but they have {nbytes:,}"
        return (Notice(text, weight=Weight.UNSURE),)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # no file can have some names
        return False


def read_index(path: Path) -> ShardIndex:
    """Read an index. All file names in it are names of files in the same folder.

    Raises `CorruptError` or `UnsafeError`.
    """
    content = parse_json_object(read_whole(path, MAX_INDEX), path)
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    total_nbytes = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CorruptError("the index has no weight_map of file names", where=path)
    for name in weight_map.values():
        if Path(name).name != name or name in (".", ".."):
            raise UnsafeError(
                f"the index names {printable(name)!r}, which is not a file in the same folder", where=path
            )
    return ShardIndex(path, weight_map, total_nbytes if is_natural(total_nbytes, 1 << 62) else None)


NO_INDEX = Notice(
    "the model's files are numbered and complete, but there is no index that states the file of each tensor",
    weight=Weight.UNSURE,
)

NO_COUNT = Notice("the names of vLLM's files do not state how many there are", weight=Weight.UNSURE)


def one_set(folder: Path, suffix: str, only_numbered: bool = False) -> Path | list[Path]:
    """The index of the model in a folder; without an index, its files: one file, or all numbered files.

    `only_numbered` ignores files without a number. Raises `IncompleteError` if a number is missing,
    `NotFoundError` if there are several models and none has a standard name, `UnsupportedError` for files of ranks.
    """
    if (parts := _parts_of_vllm(folder, suffix)) is not None:
        return parts
    sets: dict[str, Path | list[Path]] = {}
    for file in sorted(folder.glob(f"*{suffix}")):
        number = number_of(file.name)
        if number is None and only_numbered:
            continue
        key = file.name.removesuffix(suffix) if number is None else _RANK_STEM.sub("shard", number.stem)
        files = sets.setdefault(key, [])
        assert isinstance(files, list)  # indices are added below
        files.append(file)
    for index in sorted(folder.glob(f"*{suffix}.index.*json")):
        stem, _, variant = index.name.removesuffix(".json").partition(f"{suffix}.index")
        sets[stem + variant] = (
            index  # `model.safetensors.index.fp16.json` is of `model.fp16-00001-of-00002.safetensors`
        )
    standard = next((name for name in _STANDARD_STEMS if name in sets), None)
    if len(sets) > 1 and standard is None:
        raise NotFoundError(
            f"holds {len(sets)} models, and no index states which files belong together: {_list_models(sets.values())}",
            where=folder,
            hint="Name one of the files, or put each model into a folder of its own.",
        )
    chosen = sets[next(iter(sets)) if standard is None else standard] if sets else []
    return chosen if isinstance(chosen, Path) else all_numbered(chosen)


def _parts_of_vllm(folder: Path, suffix: str) -> list[Path] | None:
    """The files of vLLM's sharded state, if a folder has no others, and one rank wrote them."""
    files = sorted(folder.glob(f"*{suffix}"))
    parts = {part: file for file in files if (part := part_of_vllm(file.name)) is not None}
    if not files or len(parts) < len(files):
        return None
    if ranks := sorted({rank for rank, _ in parts if rank}):
        raise UnsupportedError(
            f"the sharded state of vLLM over {ranks[-1] + 1} tensor-parallel ranks, which only vLLM's code can join",
            where=folder,
            hint="Save it with a tensor_parallel_size of 1, or take the model that vLLM loaded.",
        )
    if missing := next((number for number in range(len(parts)) if (0, number) not in parts), None):
        raise IncompleteError(f"part {missing} of rank 0 is missing", where=folder, hint="Copy all files.")
    return [parts[part] for part in sorted(parts)]


_STANDARD_STEMS = ("model", "adapter_model", "diffusion_pytorch_model", "pytorch_model", "consolidated")
"""The names that libraries use for the file of a model. Earlier ones take precedence."""
_RANK_STEM = re.compile(r"shard-\d+-model")
_MAX_SHOWN = 8


def _list_models(sets: Collection[Path | list[Path]]) -> str:
    names = [(one if isinstance(one, Path) else one[0]).name for one in sets]
    return list_names(names, printable, _MAX_SHOWN)


def all_numbered(files: Sequence[Path]) -> list[Path]:
    """The same files.

    Raises `IncompleteError` or `CorruptError` unless all of `NAME-00001-of-00003.SUFFIX`, ... are there.
    """
    counts: dict[str, tuple[int, Path]] = {}
    for file in files:
        if number := number_of(file.name):
            count, first = counts.setdefault(number.stem, (number.total, file))
            if count != number.total:
                raise CorruptError(
                    f"{printable(first.name)} and {printable(file.name)} state two different counts of files",
                    where=file.parent,
                    hint="Two models were saved into one folder. Move one of them to another folder.",
                )
    names = {file.name for file in files}
    for file in files:
        if match := NUMBERED.fullmatch(file.name):
            stem, width, count, suffix = match[1], len(match[2]), int(match[3]), match[4]
            numbered = (f"{stem}-{i:0{width}}-of-{match[3]}{suffix}" for i in range(1, count + 1))
            if missing := next((name for name in numbered if name not in names), None):
                raise IncompleteError(
                    f"{missing} is missing", where=file.parent, hint="Copy all files into one folder."
                )
    return list(files)


def numbered_names(count: int, stem: str = "model", suffix: str = ".safetensors") -> list[str]:
    """The names of a model's files: `model-00001-of-00002.safetensors` and so on, or one `model.safetensors`."""
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{i:05}-of-{count:05}{suffix}" for i in range(1, count + 1)]


def index_text(files: Iterable[tuple[str, Mapping[str, int]]], **metadata: int) -> str:
    """The text of an index. `files`: file name, and the bytes of each of its tensors; `metadata`: further metadata."""
    files = list(files)
    total = sum(sum(sizes.values()) for _, sizes in files)
    file_of = {name: file for file, sizes in files for name in sizes}
    return json.dumps({"metadata": {**metadata, "total_size": total}, "weight_map": file_of}, indent=2) + "\n"
