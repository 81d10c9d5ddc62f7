"""Open the files of a `torch_dist` iteration: a distributed checkpoint, `common.pt` and `metadata.json`."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.containers.torchfile import TorchFile, open_file
from ckpt_formats.core.checkpoint import SourceFile
from ckpt_formats.core.claims import MAX_SMALL_JSON
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.seals import Seal
from ckpt_formats.core.tensor import Fragment, Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.dcp.folder import rank_of
from ckpt_formats.engines.dcp.items import ItemBlob, ItemReader, ItemSeals, unnamed_bytes
from ckpt_formats.engines.dcp.metadata import Metadata, StoredTensor, read_metadata
from ckpt_formats.engines.dcp.objects import ObjectReader
from ckpt_formats.engines.megatron.shared.arguments import Arguments, Parallel, arguments_of, parallel_of
from ckpt_formats.engines.megatron.shared.folder import COMMON_FILE, CONTAINER_FILE, ITERATION_FOLDER, METADATA
from ckpt_formats.state_dicts.statements import Statement, check_agreement, step_in_name, whole

_SHARD = re.compile(r"(.+)/shard_(\d{1,9}(?:\.\d{1,9})*)_(\d{1,9}(?:\.\d{1,9})*)")


@dataclass(frozen=True)
class DistFiles:
    """The content of one iteration's files: tensors and objects by key, and the values that all ranks share."""

    path: Path
    args: Arguments
    parallel: Parallel
    common: TorchFile
    tensors: Mapping[str, Tensor]
    objects: Mapping[str, Value]
    """By Megatron's keys: `rng_state/shard_0.1_2.2`."""
    seals: ItemSeals
    shards: tuple[SourceFile, ...]
    notices: tuple[Notice, ...] = ()

    @property
    def root(self) -> Mapping[str, Value]:
        root: Mapping[str, Value] = self.common.root
        return root


def open_dist(path: Path) -> DistFiles:
    """Open the files.

    Raises `IncompleteError` if one is missing, `UnsupportedError` for containers other than torch_dist.
    """
    unknown = _check_container(path)
    common = open_file(path / COMMON_FILE)
    if not isinstance(common.root, dict):
        raise CorruptError("it does not contain a mapping", where=common.path)
    args = arguments_of(common.root, common.path)
    metadata = read_metadata(path / METADATA)
    shards = tuple(_shards(path, metadata, common))
    items, blocks = ItemReader(path, [metadata.items]), list[ItemBlob]()
    tensors = {key: _tensor(key, stored, items, blocks) for key, stored in metadata.tensors.items()}
    objects: dict[str, Value] = {}
    seals: list[Seal] = [*common.seals()]
    object_reader = ObjectReader(items)
    for key, item in metadata.objects.items():
        loaded = object_reader.read(key, item)
        # Megatron saves each object as a list of one.
        objects[key] = loaded.value[0] if isinstance(loaded.value, list) and len(loaded.value) == 1 else loaded.value
        seals += loaded.seals
    parallel = parallel_of(args)
    check_agreement(_statements(path, common, objects, parallel), path)
    sizes = {file: (path / file).stat().st_size for file in metadata.files}
    unnamed = unnamed_bytes(path, sizes, metadata.items)
    notices = (*unknown, *metadata.notices, *_absent(objects, path), *unnamed)
    return DistFiles(path, args, parallel, common, tensors, objects, ItemSeals(blocks, seals), shards, notices)


def _statements(path: Path, common: TorchFile, objects: Mapping[str, Value], parallel: Parallel) -> Iterator[Statement]:
    root, where = common.root, common.path.name
    yield Statement("the iteration", where, whole(root.get("iteration")))
    yield step_in_name(path, ITERATION_FOLDER, "the iteration")
    content, optimizer = root.get("content_metadata"), root.get("optimizer")
    encoding = "the encoding of the distributed optimizer"
    if isinstance(content, dict):
        yield Statement(encoding, f"`content_metadata` in {where}", content.get("distrib_optim_sharding_type"))
    if isinstance(optimizer, dict):
        parts = [part for key, part in optimizer.items() if type(key) is int and isinstance(part, dict)] or [optimizer]
        for part in parts:
            yield Statement(encoding, f"`optimizer` in {where}", part.get("param_state_sharding_type"))
    yield Statement("the number of ranks (pp, tp)", f"`args` in {where}", (parallel.pp, parallel.tp))
    for key in objects:
        if (shard := shard_of(key)) and shard[0] == "rng_state" and len(shard[2]) >= 2:
            yield Statement("the number of ranks (pp, tp)", f"the key `{printable(key)}`", shard[2][:2])


def _absent(objects: Mapping[str, Value], path: Path) -> Iterator[Notice]:
    """A notice of objects of which some parts are missing.

    Raises `IncompleteError` if ranks' random states are missing.
    """
    parts: dict[tuple[str, tuple[int, ...]], int] = {}
    for key in objects:
        if shard := shard_of(key):
            parts[shard[0], shard[2]] = parts.get((shard[0], shard[2]), 0) + 1
    for (key, counts), count in parts.items():
        if count < prod(counts) and key == "rng_state":
            raise IncompleteError(
                f"random states of {count} ranks are present, but `{key}` states {prod(counts)} ranks",
                where=path / METADATA,
                hint="Copy all files of the iteration again.",
            )
    if lacking := tuple(key for (key, counts), count in parts.items() if count < prod(counts)):
        yield Notice("some parts of these objects are missing", lacking, Weight.UNSURE)


def shard_of(key: str) -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """The name, the place and the number of places along each axis in an object's key;
    None for keys of another form."""
    match = _SHARD.fullmatch(key)
    if match is None:
        return None
    place, counts = (tuple(int(number) for number in part.split(".")) for part in match.groups()[1:])
    return match[1], place, counts


def _check_container(path: Path) -> tuple[Notice, ...]:
    file = path / CONTAINER_FILE
    fields = parse_json_object(read_whole(file, MAX_SMALL_JSON), file)
    backend = fields.get("sharded_backend")
    if backend != "torch_dist":
        raise UnsupportedError(
            f"its tensors are stored as {printable(str(backend))[:40]!r}, which Megatron no longer supports",
            where=file,
            hint="Load it with an older version of Megatron and save it with --ckpt-format torch_dist.",
        )
    version = fields.get("sharded_backend_version", 1)
    text = f"{CONTAINER_FILE} has the unknown version {printable(str(version))[:20]}: it is read as version 1"
    return () if version == 1 else (Notice(text, weight=Weight.UNSURE),)


def _tensor(key: str, stored: StoredTensor, items: ItemReader, blocks: list[ItemBlob]) -> Tensor:
    blobs = []
    for box, item in stored.blocks:
        if item is None:
            raise CorruptError(
                f"`{printable(key)}` has a block {box}, but .metadata does not state where it is stored",
                where=items.folder,
            )
        blobs.append((box, ItemBlob(key, box, stored.dtype, item, items)))
    blocks += (block for _, block in blobs)
    return Tensor(stored.shape, stored.dtype, tuple(Fragment(box, block) for box, block in blobs))


def _shards(path: Path, metadata: Metadata, common: TorchFile) -> Iterator[SourceFile]:
    yield SourceFile(common.path, common.path.stat().st_size, "common")
    for name in (".metadata", "metadata.json"):
        yield SourceFile(path / name, (path / name).stat().st_size, "metadata")
    for file in metadata.files:
        try:
            size = (path / file).stat().st_size
        except CkptError:
            raise
        except (OSError, ValueError):
            raise IncompleteError(
                f"{printable(file)} is missing, but .metadata names it", where=path, hint="Copy the files of all ranks."
            ) from None
        rank = rank_of(Path(file).name)
        yield SourceFile(path / file, size, "data", {} if rank is None else {"rank": rank})
