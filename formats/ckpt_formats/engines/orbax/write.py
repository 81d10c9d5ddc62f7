"""Write a checkpoint: data files of chunks, and at the end the database, the metadata and the mark of a commit."""

import base64
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_formats.containers.ocdbt import MANIFEST, ValueRange
from ckpt_formats.containers.ocdbt_write import database
from ckpt_formats.containers.zarr_write import ChunkGrid
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.format import FilePlan, Receipt
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.orbax.metadata import (
    ARRAYS,
    COMMITTED,
    DATA,
    SHARDED_ARRAY,
    SHARDING,
    STEP,
    STRINGS,
    TREE,
    tree_json,
)
from ckpt_formats.engines.orbax.plan import ChunksContent, WrittenLeaf, items_of, json_items, tree_layout, tree_of
from ckpt_formats.engines.orbax.read import JSON_ITEM, RANDOM_ITEM, json_file

_NODES = f"{DATA}/{'f' * 32}"
_HANDLERS = "orbax.checkpoint._src.handlers"
_TREE_HANDLER = f"{_HANDLERS}.standard_checkpoint_handler.StandardCheckpointHandler"
_JSON_HANDLER = f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler"
_RANDOM_HANDLER = f"{_HANDLERS}.random_key_checkpoint_handler.JaxRandomKeyCheckpointHandler"
_ONE_DEVICE = json.dumps({"sharding_type": "SingleDeviceSharding", "device_str": "cpu:0"})
"""Where random keys are restored to, if the program does not say."""
_TIME = 1
"""When the save began and ended, in nanoseconds: equal checkpoints become equal bytes."""


def write_part(folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
    """Write one data file front to back. Its receipt has the key, offset and length of each chunk."""
    (folder / part.file).parent.mkdir(parents=True, exist_ok=True)
    content = part.content
    assert isinstance(content, ChunksContent)

    def stream() -> Iterator[bytes | memoryview]:
        for tensor, entry in zip(part.tensors, content.entries, strict=True):
            yield from transfer.chunks(tensor)
            for at in range(0, entry.padding, 1 << 20):
                yield bytes(min(1 << 20, entry.padding - at))

    seal = transfer.write_sealed(folder, part.file, stream())
    chunks, at = [], 0
    for tensor, entry in zip(part.tensors, content.entries, strict=True):
        nbytes = tensor.nbytes + entry.padding
        chunks.append([entry.key, at, nbytes])
        at += nbytes
    return Receipt(part.file, seal.nbytes, (seal,), {"chunks": chunks}, transfer.reader.evidence())


def write_metadata(folder: Path, source: Checkpoint, receipts: Sequence[Receipt], grid: ChunkGrid) -> None:
    """Write everything but the data files; last the marks by which the folder is a checkpoint."""
    handlers: dict[str, str] = {}
    random = tree_layout(source).get("random", {})
    for name, inside, place, leaves in items_of(source, tree_of(source)):
        handlers[name] = _RANDOM_HANDLER if inside.endswith(f"{RANDOM_ITEM}/") else _TREE_HANDLER
        _write_item(folder, inside, place, leaves, receipts, random if isinstance(random, dict) else {}, grid)
        if inside.endswith(f"{RANDOM_ITEM}/"):
            kind = source.extras.get(f"{name}.kind")
            _write(folder, f"{name}/{RANDOM_ITEM}_metadata/{JSON_ITEM}", json.dumps(kind).encode())
            _mark(folder, f"{name}/{RANDOM_ITEM}_metadata/")
            _mark(folder, f"{name}/")
        if inside:
            _mark(folder, inside)
    for name, value in json_items(source).items():
        handlers[name] = _JSON_HANDLER if not name.endswith(".kind") else ""
        if handlers[name]:
            _write(folder, f"{name}/{json_file(name)}", json.dumps(value).encode())
            _mark(folder, f"{name}/")
    handlers = {name: handler for name, handler in handlers.items() if handler}
    content = {
        "item_handlers": handlers.get("", handlers),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": _TIME,
        "commit_timestamp_nsecs": _TIME,
        "custom_metadata": {},
    }
    _write(folder, STEP, json.dumps(content).encode())
    _mark(folder, "")


def _write_item(
    folder: Path,
    inside: str,
    place: tuple[str, ...],
    leaves: Sequence[WrittenLeaf],
    receipts: Sequence[Receipt],
    random: dict[str, Any],
    grid: ChunkGrid,
) -> None:
    """Write the database and the metadata of the tree in a subfolder."""
    values: dict[str, ValueRange | bytes] = {}
    for receipt in receipts:
        if receipt.file.rpartition(f"{DATA}/")[0] == inside:
            file = receipt.file.removeprefix(inside)
            values |= {key: ValueRange(file, at, nbytes) for key, at, nbytes in receipt.entry["chunks"]}
    shapes: list[tuple[Any, Any]] = []
    arrays, shardings = [], {}
    for written in leaves:
        tensor, name = written.tensor, written.leaf.name
        chunk = None if tensor is None else grid.shape(tensor.shape, tensor.dtype.itemsize)
        key = random.get(".".join((*place, *written.leaf.path)))
        leaf = written.leaf if key is None else replace(written.leaf, value=SHARDED_ARRAY)
        shapes.append((leaf, chunk))
        if tensor is None or chunk is None:
            continue
        key_of_array, described = grid.metadata(tensor.shape, tensor.dtype, chunk)
        values[f"{name}/{key_of_array}"] = described
        if key is not None:
            entry = {"param_name": name, "write_shape": list(chunk), "chunk_shape": list(chunk)}
            arrays.append({"array_metadata": {**entry, "ext_metadata": {"random_key_impl": key}}})
            shardings[base64.b64encode(name.encode()).decode()] = _ONE_DEVICE
    nodes, manifest = database(values, _NODES)
    _write(folder, inside + _NODES, nodes)
    if arrays:
        _write(folder, f"{inside}{ARRAYS}/process_0", json.dumps({"array_metadatas": arrays}).encode())
        _write(folder, inside + SHARDING, json.dumps(shardings).encode())
    texts = {written.leaf.name: written.text for written in leaves if written.text is not None}
    if texts:
        _write(folder, inside + STRINGS, json.dumps(texts).encode())
    _write(folder, inside + TREE, tree_json(shapes, grid.zarr3))
    _write(folder, inside + MANIFEST, manifest)


def _mark(folder: Path, inside: str) -> None:
    _write(folder, inside + COMMITTED, b"Checkpoint commit was successful")


def _write(folder: Path, file: str, data: bytes) -> None:
    """Write a file, whole at any moment."""
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.tmp")
    with draft.open("wb") as out:
        out.write(data)
        out.flush()
        os.fsync(out.fileno())
    os.replace(draft, path)
