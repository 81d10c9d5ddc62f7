"""Read a checkpoint: its index, from the metadata and the small items."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from ckpt_formats.core.checkpoint import Checkpoint, Origin, SourceFile
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.files import unreadable
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.layout import Rule, merge
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import Fragment, Tensor, with_replicas
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp.folder import ACCELERATE, FoundFolders, MetadataFolder, find, rank_of, stale_files
from ckpt_formats.engines.dcp.items import ItemBlob, ItemReader, ItemSeals, unnamed_bytes
from ckpt_formats.engines.dcp.megatron_fsdp import is_of_megatron_fsdp, to_core
from ckpt_formats.engines.dcp.metadata import ItemRange, Metadata, Steps, StoredTensor, read_metadata
from ckpt_formats.engines.dcp.nesting import nested
from ckpt_formats.engines.dcp.objects import ObjectReader, check_between
from ckpt_formats.state_dicts.extras import candidate_names
from ckpt_formats.state_dicts.keys import TORCHTITAN
from ckpt_formats.state_dicts.read import training_state
from ckpt_formats.state_dicts.statements import Statement, check_agreement, step_in_name

PAIR = "pair"
"""Key in the layout of an origin: model and optimizer have a folder each."""
RANKS = "ranks"
"""Key in the extras: values that ranks saved separately."""
DIFFERING = Notice(f"ranks saved different values under the same keys: carried under `{RANKS}`")
_COPIES = ("replicated", "averaged", "first")
"""Rules for complete copies. The other rules describe shards, whose blocks the metadata state."""

_MEGATRON = re.compile(r".+/shard_\d+(?:\.\d+)*_\d+(?:\.\d+)*")
"""Megatron's name of an object: its key, its index, and the number of such objects."""
_STEP_FOLDER = re.compile(r"(?:global[_-]?)?(?:step|iter|iteration|checkpoint)[_-]?0*(\d{1,15})")


def read(path: Path, options: ReadOptions) -> Checkpoint:
    """The index of the checkpoint at a path. Raises a subclass of `CkptError` if it cannot be read."""
    try:
        return _checkpoint(path, options)
    except CkptError:
        raise
    except OSError as error:
        raise unreadable(error, path) from error


def _checkpoint(path: Path, options: ReadOptions) -> Checkpoint:
    folders, parts = _complete(path, options)
    tree: dict[str, Value] = {}
    for part in parts:
        if duplicate := next((key for key in part.tree if key in tree), None):
            raise CorruptError(f"two folders contain a state dict called `{printable(duplicate)}`", where=path)
        tree |= part.tree
    is_fsdp = is_of_megatron_fsdp(tree)
    state = training_state(to_core(tree, path) if is_fsdp else tree, path, options.order, options.orders)
    keys = replace(state.keys, megatron_fsdp=True) if is_fsdp else state.keys
    _check_step(state.step, folders, path)
    step = folders.step if state.step is None else state.step
    ranks = [rank for part in parts for rank in part.ranks]
    layout = {
        "keys": keys.to_json(),
        "world": max(ranks, default=0) + 1,
        **({PAIR: True} if len(parts) > 1 else {}),
    }
    if state.origin is None:
        engine = "megatron-fsdp" if is_fsdp else "torchtitan" if keys == TORCHTITAN else "dcp"
        origin = Origin(engine, None, step, layout)
    else:
        stored = state.origin
        origin = replace(stored, step=step if stored.step is None else stored.step, layout={**stored.layout, **layout})
    return Checkpoint(
        path=path,
        origin=origin,
        parameters=state.parameters,
        groups=state.groups,
        extras=state.extras,
        aliases=state.aliases,
        files=tuple(shard for part in parts for shard in part.shards),
        seals=ItemSeals(
            [block for part in parts for block in part.blocks], [seal for part in parts for seal in part.seals]
        ),
        notices=(*folders.notices, *state.notices, *(n for part in parts for n in part.notices)),
    )


def _complete(path: Path, options: ReadOptions) -> tuple[FoundFolders, list["FolderContent"]]:
    """The folders of a checkpoint, and their contents: of several steps, the newest of which no file is missing."""
    incomplete: dict[Path, IncompleteError] = {}
    while True:
        try:
            folders = find(path, incomplete)
        except IncompleteError as error:
            raise next(iter(incomplete.values()), error) from None
        try:
            members = [(member, metadata_of(member)) for member in folders.members]
            return folders, [read_folder(*member, options.rules, options.missing_files) for member in members]
        except IncompleteError as error:
            if folders.chosen is None or options.missing_files:
                raise
            incomplete[folders.chosen] = error


@dataclass
class FolderContent:
    """The content of one folder."""

    tree: dict[str, Value]
    ranks: frozenset[int]
    shards: tuple[SourceFile, ...]
    by_rank: Sequence[Metadata]
    tensors: Mapping[str, Tensor]
    differing: Mapping[str, Mapping[str, Value]]
    """By rank, the objects that it saved otherwise than the first one that has them."""
    key_of_differing: str = RANKS
    """The key in `tree` under which they are carried."""
    blocks: list[ItemBlob] = field(default_factory=list)
    seals: list[Seal] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)


def metadata_of(member: MetadataFolder) -> list[Metadata]:
    """The metadata of each rank that saved its own, else those of all. Raises a subclass of `CkptError`."""
    return [_within(read_metadata(path), path.parent, member.folder) for path in member.metadata]


def read_folder(
    member: MetadataFolder, by_rank: Sequence[Metadata], rules: Sequence[Rule] = (), missing_files: bool = False
) -> FolderContent:
    """The content of one folder. Raises a subclass of `CkptError`; with `missing_files`, not if some are missing."""
    folder = member.folder
    _check_engine(folder, by_rank)
    sizes = _sizes(folder, by_rank, missing_files)
    ranks = frozenset(rank for file in sizes if (rank := rank_of(Path(file).name)) is not None)
    index = () if member.index is None else (member.index,)
    shards = [SourceFile(path, path.stat().st_size, "metadata") for path in (*member.metadata, *index)]
    shards += [SourceFile(folder / file, size, "data", _rank(file)) for file, size in sizes.items()]
    items = ItemReader(folder, [metadata.items for metadata in by_rank])
    blocks, seals = list[ItemBlob](), list[Seal]()
    tensors = dict(_tensors(by_rank, items, blocks, rules))
    values: dict[str, Value] = {**tensors}
    differing = _objects(by_rank, items, values, seals)
    ranks = ranks | frozenset(range(len(by_rank))) if len(by_rank) > 1 else ranks
    part = FolderContent({}, ranks, tuple(shards), by_rank, tensors, differing, blocks=blocks, seals=seals)
    paths: dict[str, Steps] = {}
    for metadata in by_rank:
        paths |= metadata.paths
        part.notices += (*metadata.notices, *metadata.nesting)
    part.notices += unnamed_bytes(folder, sizes, [item for metadata in by_rank for item in metadata.items])
    part.tree = nested(values, paths, folder)
    if differing:
        part.key_of_differing = next(key for key in candidate_names(RANKS) if key not in part.tree)
        part.tree[part.key_of_differing] = {rank: dict(own) for rank, own in differing.items()}
        part.notices.append(DIFFERING)
    if stale := [*member.stale_files, *stale_files(folder, sizes)]:
        text = f"{printable(folder.name)} has files of another save, which no metadata name"
        part.notices.append(Notice(text, tuple(stale), Weight.UNSURE))
    return part


def _within(metadata: Metadata, own: Path, folder: Path) -> Metadata:
    """The metadata of a rank; if they are in a folder of its own, their files are named from the checkpoint's."""
    if own == folder:
        return metadata
    for item in metadata.items:
        item.file = f"{own.name}/{item.file}"
    return replace(metadata, files=tuple(f"{own.name}/{file}" for file in metadata.files))


def _check_engine(folder: Path, by_rank: Sequence[Metadata]) -> None:
    """Raise `IncompleteError` if an object is Megatron's: then the files that identify Megatron's format are
    missing."""
    for metadata in by_rank:
        if name := next((name for name in metadata.objects if _MEGATRON.fullmatch(name)), None):
            raise IncompleteError(
                "common.pt and metadata.json, which Megatron writes with objects such as "
                f"`{printable(name)}`, are missing",
                where=folder,
                hint="Copy all files of the iteration's folder.",
            )


def _check_step(state_step: int | None, folders: FoundFolders, path: Path) -> None:
    """Raise `CorruptError` if the folder's name states another step than the training state in it."""
    first = folders.members[0].folder
    folder = first.parent if len(folders.members) > 1 else first
    if first.name in ACCELERATE:
        folder = first.parent
    stated = Statement("the step", "the training state that was saved", state_step)
    check_agreement((stated, step_in_name(folder, _STEP_FOLDER)), path)


def _tensors(
    by_rank: Sequence[Metadata], items: ItemReader, blocks: list[ItemBlob], rules: Sequence[Rule]
) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with its name, from the blocks of all ranks.

    Blocks that several ranks saved are replicas, unless a rule states which one is taken.
    """
    if len(by_rank) == 1:
        for name, stored in by_rank[0].tensors.items():
            yield name, _tensor(name, stored, stored.blocks, items, blocks)
        return
    for name in dict.fromkeys(name for metadata in by_rank for name in metadata.tensors):
        saved = [metadata.tensors[name] for metadata in by_rank if name in metadata.tensors]
        if any((one.shape, one.dtype) != (saved[0].shape, saved[0].dtype) for one in saved):
            raise CorruptError(f"ranks disagree on the shape or type of tensor `{printable(name)}`", where=items.folder)
        copies: dict[Box, list[ItemRange | None]] = {}
        for one in saved:
            for box, item in one.blocks:
                copies.setdefault(box, []).append(item)
        count = max(map(len, copies.values()), default=1)
        replicas = [
            [(box, stored_items[min(i, len(stored_items) - 1)]) for box, stored_items in copies.items()]
            for i in range(count)
        ]
        tensors = [_tensor(name, saved[0], one, items, blocks) for one in replicas]
        rule = next((rule for rule in rules if rule.matches(name)), Rule(name, "replicated"))
        yield name, merge(name, tensors, rule) if rule.how in _COPIES else with_replicas(tensors)


def _tensor(
    name: str,
    stored: StoredTensor,
    saved: Sequence[tuple[Box, ItemRange | None]],
    items: ItemReader,
    blocks: list[ItemBlob],
) -> Tensor:
    """A tensor. Blocks that no file contains are left out; the tensor's `problems` report them."""
    dtype = stored.dtype
    fragments = [Fragment(box, ItemBlob(name, box, dtype, item, items)) for box, item in saved if item is not None]
    blocks += [cast(ItemBlob, fragment.blob) for fragment in fragments]
    return Tensor(stored.shape, dtype, tuple(fragments))


def _objects(
    by_rank: Sequence[Metadata], items: ItemReader, values: dict[str, Value], seals: list[Seal]
) -> dict[str, dict[str, Value]]:
    """Add every object to the values. Returns, by rank, the values that differ from those of the first rank."""
    objects = ObjectReader(items)
    first: dict[str, ItemRange] = {}
    differing: dict[str, dict[str, Value]] = {}
    for rank, metadata in enumerate(by_rank):
        for name, item in metadata.objects.items():
            if name in first and objects.same(first[name], item):
                continue
            if name in values and name not in first:
                what = f"`{printable(name)}` is a tensor on one rank, and none on rank {rank}"
                raise CorruptError(what, where=items.folder)
            result = objects.read(name, item)
            if result.raw:
                check_between(item, metadata.items, items.folder)
            seals += result.seals
            if name in first:
                differing.setdefault(str(rank), {})[name] = result.value
            else:
                first[name], values[name] = item, result.value
    return differing


def _sizes(folder: Path, by_rank: Sequence[Metadata], missing_files: bool) -> dict[str, int]:
    """The size of every file that the metadata name. Raises `IncompleteError` if one is missing.

    With `missing_files`, a missing one has the size 0, but some must be there.
    """
    sizes: dict[str, int] = {}
    missing: list[str] = []
    for metadata in by_rank:
        for file in metadata.files:
            if file in sizes:
                continue
            try:
                sizes[file] = (folder / file).stat().st_size
            except CkptError:
                raise
            except (OSError, ValueError):
                missing.append(file)
        _check_serialization(folder, metadata)
    if missing and missing_files and sizes:
        _check_objects(folder, by_rank, frozenset(missing))
        return sizes | dict.fromkeys(missing, 0)
    if missing:
        message = f"{list_names(missing, printable)} is missing, but is named in the metadata"
        raise IncompleteError(message, where=folder, hint="Copy the files of all ranks.")
    return sizes


def _check_objects(folder: Path, by_rank: Sequence[Metadata], missing: frozenset[str]) -> None:
    """Raise `IncompleteError` if a missing file had values that are no tensors: nothing else has those of this step."""
    objects = [name for metadata in by_rank for name, item in metadata.objects.items() if item.file in missing]
    if objects:
        raise IncompleteError(
            f"a missing file had {len(objects)} values that are not tensors, such as `{printable(objects[0])}`",
            where=folder,
            hint="Copy that file; or take the full state of another step.",
        )


def _check_serialization(folder: Path, metadata: Metadata) -> None:
    """Refuse checkpoints of `SerializationFormat.SAFETENSORS`: torch writes wrong offsets into their metadata."""
    sizes: dict[int, int] = {}  # by the id of a box, which many tensors have in common
    for name, stored in metadata.tensors.items():
        for box, item in stored.blocks:
            size = sizes.get(id(box))
            if size is None:
                size = sizes[id(box)] = box.size
            if item is not None and not item.transforms and item.nbytes == size * stored.dtype.itemsize:
                raise UnsupportedError(
                    f"tensor `{printable(name)}` was saved with SerializationFormat.SAFETENSORS, for which torch "
                    "stores wrong offsets: nothing can read such items, not even torch",
                    where=folder,
                    hint="Save again with the default format, or with HuggingFaceStorageWriter.",
                )


def _rank(file: str) -> Mapping[str, int]:
    rank = rank_of(Path(file).name)
    return {} if rank is None else {"rank": rank}
