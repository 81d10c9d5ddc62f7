"""A model in several files: how the files are numbered, and the index that says which tensor is in which."""

import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.containers.safetensors import is_natural, parse_json_object
from ckpt_formats.core.checkpoint import SourceFile
from ckpt_formats.core.errors import Corrupt, Incomplete, NotFound, Unsafe
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable

INDEX_SUFFIX = ".index.json"
_MAX_INDEX = 1 << 30
_NUMBERED = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})(\.[a-z]+)")


@dataclass(frozen=True)
class ShardIndex:
    """What an index file says: the file of every tensor, by name."""

    path: Path
    where: Mapping[str, str]
    total: int | None = None
    """Bytes of all tensors, as its metadata say."""

    def files(self) -> list[Path]:
        """The files it names, each once. Raises `Incomplete` if one is not there."""
        files = [self.path.parent / name for name in dict.fromkeys(self.where.values())]
        for file in files:
            if not os.path.isfile(file):  # unlike Path.is_file, it takes any name
                raise Incomplete(f"the index names {printable(file.name)!r}, which is not there", where=self.path)
        return files

    def shard(self) -> SourceFile:
        """The index itself, as a file of the checkpoint."""
        return SourceFile(self.path, self.path.stat().st_size, "index")

    def check(self, found: Mapping[str, str]) -> None:
        """Raises `Incomplete` unless the tensors are in the files that it says: `found` is what is where."""
        for name in (*self.where, *found):
            if self.where.get(name) != found.get(name):
                said, held = self.where.get(name, "no file"), found.get(name, "none")
                raise Incomplete(
                    f"the index says that tensor `{printable(name)}` is in {printable(said)}, but it is in "
                    f"{printable(held)}",
                    where=self.path,
                )

    def notices(self, nbytes: int) -> tuple[Notice, ...]:
        """What to tell of an index whose tensors take so many bytes together."""
        if self.total is None or self.total == nbytes:
            return ()
        text = f"{printable(self.path.name)} says that the tensors take {self.total:,} bytes, but they take {nbytes:,}"
        return (Notice(text, weight=Weight.UNSURE),)


def read_index(path: Path) -> ShardIndex:
    """An index whose names are all names of files beside it. Raises `Corrupt` or `Unsafe`."""
    said = parse_json_object(read_whole(path, _MAX_INDEX), path)
    where, metadata = said.get("weight_map"), said.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise Corrupt("the index has no weight_map of file names", where=path)
    for name in where.values():
        if Path(name).name != name or name in (".", ".."):
            raise Unsafe(f"the index names {printable(name)!r}, which is not a file beside it", where=path)
    return ShardIndex(path, where, total if is_natural(total, 1 << 62) else None)


@dataclass(frozen=True)
class ShardNumber:
    """What the name of a file says: `model-00002-of-00003.safetensors` is file 2 of 3 of `model`."""

    stem: str
    place: int
    count: int


def number_of(name: str) -> ShardNumber | None:
    """The number in a file's name; None if it has none."""
    match = _NUMBERED.fullmatch(name)
    return None if match is None else ShardNumber(match[1], int(match[2]), int(match[3]))


NO_INDEX = Notice(
    "the model's files are numbered, and all numbers are here, but the index that says which tensor is where is not",
    weight=Weight.UNSURE,
)


def one_set(folder: Path, suffix: str, only_numbered: bool = False) -> Path | list[Path]:
    """The index of the model in a folder; or its files, where it has no index: one, or all of those that are numbered.

    `only_numbered` leaves other files out. Raises `Incomplete` if a number is missing,
    `NotFound` if there are several models and none is called as libraries call theirs.
    """
    sets: dict[str, Path | list[Path]] = {}
    for file in sorted(folder.glob(f"*{suffix}")):
        number = number_of(file.name)
        if number is None and only_numbered:
            continue
        key = file.name.removesuffix(suffix) if number is None else _OF_A_RANK.sub("shard", number.stem)
        held = sets.setdefault(key, [])
        assert isinstance(held, list)  # indices come below
        held.append(file)
    for index in sorted(folder.glob(f"*{suffix}.index.*json")):
        stem, _, variant = index.name.removesuffix(".json").partition(f"{suffix}.index")
        sets[stem + variant] = (
            index  # `model.safetensors.index.fp16.json` is of `model.fp16-00001-of-00002.safetensors`
        )
    usual = next((name for name in _USUAL if name in sets), None)
    if len(sets) > 1 and usual is None:
        raise NotFound(
            f"holds {len(sets)} models, and no index says which files belong together: {_shown(sets.values())}",
            where=folder,
            hint="Name one of the files, or put each model into a folder of its own.",
        )
    found = sets[next(iter(sets)) if usual is None else usual] if sets else []
    return found if isinstance(found, Path) else all_numbered(found)


_USUAL = ("model", "adapter_model", "diffusion_pytorch_model", "pytorch_model", "consolidated")
"""What libraries call the files of the model that they load, in the order in which it counts."""
_OF_A_RANK = re.compile(r"shard-\d+-model")
_MAX_SHOWN = 8


def _shown(sets: Collection[Path | list[Path]]) -> str:
    names = [printable((one if isinstance(one, Path) else one[0]).name) for one in sets]
    more = f" and {len(names) - _MAX_SHOWN:,} more" if len(names) > _MAX_SHOWN else ""
    return ", ".join(names[:_MAX_SHOWN]) + more


def all_numbered(files: Sequence[Path]) -> list[Path]:
    """The files, if those that are called `NAME-00002-of-00003.SUFFIX` are all here. Raises `Incomplete`, `Corrupt`."""
    counts: dict[str, tuple[int, Path]] = {}
    for file in files:
        if number := number_of(file.name):
            count, first = counts.setdefault(number.stem, (number.count, file))
            if count != number.count:
                raise Corrupt(
                    f"{printable(first.name)} and {printable(file.name)} are of two ways to cut a model",
                    where=file.parent,
                    hint="Two models were saved into one folder: separate them.",
                )
    names = {file.name for file in files}
    for file in files:
        if match := _NUMBERED.fullmatch(file.name):
            stem, width, count, suffix = match[1], len(match[2]), int(match[3]), match[4]
            numbered = (f"{stem}-{i:0{width}}-of-{match[3]}{suffix}" for i in range(1, count + 1))
            if lacking := next((name for name in numbered if name not in names), None):
                raise Incomplete(f"{lacking} is missing", where=file.parent, hint="Copy all files into one folder.")
    return list(files)


def numbered_names(count: int, stem: str = "model", suffix: str = ".safetensors") -> list[str]:
    """What the files of a model are called: `model-00001-of-00002.safetensors`, or `model.safetensors` alone."""
    if count == 1:
        return [f"{stem}{suffix}"]
    return [f"{stem}-{i:05}-of-{count:05}{suffix}" for i in range(1, count + 1)]


def index_text(files: Iterable[tuple[str, Mapping[str, int]]], **more: int) -> str:
    """An index of files, each with the bytes of its tensors by name; `more` goes into its metadata."""
    files = list(files)
    total = sum(sum(sizes.values()) for _, sizes in files)
    where = {name: file for file, sizes in files for name in sizes}
    return json.dumps({"metadata": {**more, "total_size": total}, "weight_map": where}, indent=2) + "\n"
