"""Join the metadata that ranks saved separately into one `.metadata`, with which torch loads and reshards their files.

Each block of a tensor is named once, in the file of the first rank that has it. Of an object that ranks saved
otherwise, the first rank's has the name; the others' are named `ranks.R.NAME`, which is where ckpt carries them, too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from ckpt_formats.core.errors import IncompleteError, UnsupportedError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.identity import Identities, recording
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.engines.dcp.folder import METADATA, MetadataFolder, find, index_id, stale_files
from ckpt_formats.engines.dcp.items import ItemBlob
from ckpt_formats.engines.dcp.metadata import EmptyBlock, ItemRange, Metadata, Steps
from ckpt_formats.engines.dcp.read import FolderContent, metadata_of, read_folder
from ckpt_formats.engines.dcp.write import Item, metadata_bytes


@dataclass(frozen=True, eq=False)
class JoinedRanks:
    """The `.metadata` that joins those of all ranks, before it is written."""

    folder: Path
    data: bytes | None = field(repr=False)
    """What is to be written; None if torch loads the folder as it is."""
    content: FolderContent = field(repr=False)
    identities: Identities = field(repr=False)
    """Those of all files on which it depends."""

    @property
    def file(self) -> Path:
        """Where it is, or will be."""
        return self.folder / METADATA

    @property
    def copied(self) -> list[tuple[str, Tensor]]:
        """The tensors that several ranks saved. To read one compares its copies."""
        return [(name, tensor) for name, tensor in self.content.tensors.items() if tensor.replicas]

    @property
    def differing(self) -> list[str]:
        """The names of the objects that ranks saved otherwise than the first one."""
        return list(dict.fromkeys(name for own in self.content.differing.values() for name in own))


def join_ranks(path: Path, rules: Sequence[Rule] = ()) -> list[JoinedRanks]:
    """What joins the metadata of all ranks of a checkpoint: one `.metadata`, or one for each of Accelerate's folders.

    All items are opened, and compared with the metadata. `rules` with `first` choose which of several copies is named.
    Raises `IncompleteError` if blocks, files or ranks are missing, `CorruptError`, `UnsupportedError`,
    `NotFoundError` if there are several checkpoints.
    """
    located = find(path)
    if located.chosen is not None:
        what = "holds the checkpoints of several steps"
        raise UnsupportedError(what, where=path, hint=f"Name one of them: {printable(str(located.chosen))}")
    return [_join(member, rules) for member in located.members]


def _join(member: MetadataFolder, rules: Sequence[Rule]) -> JoinedRanks:
    with recording() as identities:
        if member.stale_files:
            names = list_names(member.stale_files, printable)
            raise IncompleteError(
                f"there is {METADATA} already, which torch reads, beside {names}, which it does not join",
                where=member.folder,
                hint=f"If the files of the ranks are of a later save, remove {METADATA} and run it again.",
            )
        by_rank = metadata_of(member)
        _check_files(member, by_rank)
        content = read_folder(member, by_rank, rules)
        _check_tensors(member, content)
    is_joined = member.index is not None or not member.is_by_rank
    return JoinedRanks(member.folder, None if is_joined else _joined(member, content, rules), content, identities)


def _check_files(member: MetadataFolder, by_rank: Sequence[Metadata]) -> None:
    """Raise `IncompleteError` if a file is missing or cut short, or there is one that no rank's metadata name."""
    ends: dict[str, int] = {}
    for item in (item for metadata in by_rank for item in metadata.items):
        ends[item.file] = max(ends.get(item.file, 0), item.offset + item.nbytes)
    for name, end in ends.items():
        file = member.folder / name
        if file.is_file() and (size := file.stat().st_size) < end:
            affected = sum(
                item.file == name and item.offset + item.nbytes > size for one in by_rank for item in one.items
            )
            what = f"is cut short: {size:,} bytes, {end:,} expected; {affected} items are affected"
            raise IncompleteError(what, where=file, hint="Copy the file again, or take another checkpoint.")
    if not member.is_by_rank:
        return
    named = {file for metadata in by_rank for file in metadata.files}
    for folder in dict.fromkeys(path.parent for path in member.metadata):
        own = {name.rpartition("/")[2] for name in named if (member.folder / name).parent == folder}
        if strange := list(stale_files(folder, own)):
            raise IncompleteError(
                f"no rank's metadata name {list_names(strange, printable)}: the save of a rank was broken off, or "
                "these belong to another save",
                where=folder,
                hint="Copy the metadata of all ranks; or remove these files if they are of an earlier save.",
            )


def _check_tensors(member: MetadataFolder, content: FolderContent) -> None:
    """Raise `IncompleteError` if a tensor is not covered exactly once, or an item is not what the metadata state."""
    problems = [
        f"`{printable(name)}`: {problem}" for name, tensor in content.tensors.items() for problem in tensor.problems()
    ]
    if not problems:
        return
    hint = "Copy the files of all ranks into this folder."
    if not member.is_by_rank:
        hint = f"If each rank saved into a folder of its own, name {printable(str(member.folder.parent))}"
    raise IncompleteError(list_names(problems, str, separator="; "), where=member.folder, hint=hint)


def _joined(member: MetadataFolder, content: FolderContent, rules: Sequence[Rule]) -> bytes:
    paths: dict[str, Steps] = {}
    for metadata in reversed(content.by_rank):
        paths |= metadata.paths
    numbers = {name: number for number, name in enumerate(dict.fromkeys(_names(content.by_rank)))}
    transforms: dict[tuple[str, int], Sequence[str]] = {}
    items = list[tuple[str, Item]]()

    def add(name: str, path: Steps, number: int, item: ItemRange, *block: object) -> None:
        items.append((item.file, [number, name, list(path), item.offset, item.nbytes, *block]))
        if item.transforms:
            transforms[item.file, item.offset] = item.transforms

    empty: dict[str, dict[Shape, EmptyBlock]] = {}
    for one in (one for metadata in content.by_rank for one in metadata.empty):
        empty.setdefault(one.name, {}).setdefault(one.start, one)
    for name, tensor in content.tensors.items():
        about = (tensor.dtype.name, list(tensor.shape))
        for fragment in tensor.fragments:
            if not isinstance(fragment.blob, ItemBlob):
                what = f"a rule computes `{printable(name)}` from what ranks saved: no file has these values"
                hint = "Write them with `ckpt convert SRC DST --to dcp`."
                raise UnsupportedError(what, where=member.folder, hint=hint)
        blocks = {one.box.start: (one.box.shape, cast(ItemBlob, one.blob).item) for one in tensor.fragments}
        blocks = {**{start: (one.shape, one.item) for start, one in empty.get(name, {}).items()}, **blocks}
        for chunk, (start, (shape, item)) in enumerate(blocks.items()):
            add(name, paths[name], numbers[name], item, *about, chunk, list(start), list(shape))
    for name, item in _objects(content.by_rank):
        add(name, paths[name], numbers[name], item)
    for rank, own in content.differing.items():
        for name in own:
            path = (content.key_of_differing, rank, *paths[name])
            add(".".join(map(str, path)), path, len(numbers), content.by_rank[int(rank)].objects[name])
    return metadata_bytes(
        items,
        named=not any(metadata.nesting for metadata in content.by_rank),
        empty=[(name, paths[name], one.dtype.name, one.shape) for name, one in content.tensors.items() if not one.size],
        transforms=transforms,
        save_id=index_id(member.metadata),
    )


def _names(by_rank: Sequence[Metadata]) -> Iterator[str]:
    for metadata in by_rank:
        yield from metadata.paths


def _objects(by_rank: Sequence[Metadata]) -> Iterator[tuple[str, ItemRange]]:
    """Each object with the item of the first rank that saved it."""
    seen = set[str]()
    for metadata in by_rank:
        for name, item in metadata.objects.items():
            if name not in seen:
                seen.add(name)
                yield name, item
