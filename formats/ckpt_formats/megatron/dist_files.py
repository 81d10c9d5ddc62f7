"""The files of a `torch_dist` iteration: a distributed checkpoint, `common.pt` and `metadata.json`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ckpt_formats.base import Shard
from ckpt_formats.dcp.folder import rank_of
from ckpt_formats.dcp.items import Block, Items, Seals
from ckpt_formats.dcp.metadata import Metadata, Stored, read_metadata
from ckpt_formats.dcp.objects import Objects
from ckpt_formats.errors import Corrupt, Incomplete, Unsupported
from ckpt_formats.files import Seal, read_whole
from ckpt_formats.megatron.arguments import Arguments, Parallel, arguments_of, parallel_of
from ckpt_formats.naming import show
from ckpt_formats.safetensors_file import parse_json_object
from ckpt_formats.tensor import Fragment, Tensor
from ckpt_formats.torchfile import TorchFile, open_file
from ckpt_formats.values import Value

_MOST_JSON = 1 << 20


@dataclass(frozen=True)
class Dist:
    """What one iteration's files hold: tensors and objects by key, and what all ranks have in common."""

    path: Path
    args: Arguments
    parallel: Parallel
    common: TorchFile
    tensors: Mapping[str, Tensor]
    objects: Mapping[str, Value]
    """Keys are as Megatron makes them: `rng_state/shard_0.1_2.2`."""
    seals: Seals
    shards: tuple[Shard, ...]

    @property
    def root(self) -> Mapping[str, Value]:
        found: Mapping[str, Value] = self.common.root
        return found


def open_dist(path: Path) -> Dist:
    """Open the files. Raises `Incomplete` if one is missing, `Unsupported` for containers other than torch_dist."""
    _check_container(path)
    common = open_file(path / "common.pt")
    if not isinstance(common.root, dict):
        raise Corrupt("it does not hold a mapping", where=common.path)
    args = arguments_of(common.root, common.path)
    metadata = read_metadata(path / ".metadata")
    shards = tuple(_shards(path, metadata, common))
    items, blocks = Items(path), list[Block]()
    tensors = {key: _tensor(key, stored, items, blocks) for key, stored in metadata.tensors.items()}
    objects: dict[str, Value] = {}
    seals: list[Seal] = [*common.seals()]
    reading = Objects(items)
    for key, item in metadata.objects.items():
        found = reading.read(key, item)
        # Megatron saves each object as a list of one.
        objects[key] = found.value[0] if isinstance(found.value, list) and len(found.value) == 1 else found.value
        seals += found.seals
    return Dist(path, args, parallel_of(args), common, tensors, objects, Seals(blocks, seals), shards)


def _check_container(path: Path) -> None:
    file = path / "metadata.json"
    said = parse_json_object(read_whole(file, _MOST_JSON), file)
    backend = said.get("sharded_backend")
    if backend != "torch_dist":
        raise Unsupported(
            f"its tensors are kept as {show(str(backend))[:40]!r}, which Megatron has given up",
            where=file,
            hint="Load it with an older Megatron and save with --ckpt-format torch_dist.",
        )


def _tensor(key: str, stored: Stored, items: Items, blocks: list[Block]) -> Tensor:
    held = []
    for box, item in stored.blocks:
        if item is None:
            raise Corrupt(
                f"`{show(key)}` has a block {box}, but .metadata does not say where it is", where=items.folder
            )
        held.append((box, Block(key, box, stored.dtype, item, items)))
    blocks += (block for _, block in held)
    return Tensor(stored.shape, stored.dtype, tuple(Fragment(box, block) for box, block in held))


def _shards(path: Path, metadata: Metadata, common: TorchFile) -> Iterator[Shard]:
    yield Shard(common.path, common.path.stat().st_size, "common")
    for name in (".metadata", "metadata.json"):
        yield Shard(path / name, (path / name).stat().st_size, "metadata")
    for file in metadata.files:
        try:
            size = (path / file).stat().st_size
        except (OSError, ValueError):
            raise Incomplete(
                f"{show(file)} is missing, which the metadata name", where=path, hint="Copy the files of all ranks."
            ) from None
        rank = rank_of(Path(file).name)
        yield Shard(path / file, size, "data", {} if rank is None else {"rank": rank})
