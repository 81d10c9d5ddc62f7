"""Checkpoints that Orbax saved are read bit for bit, and Orbax loads what ckpt writes into any mesh.

JAX runs in processes of its own, on eight devices of the processor (`tests/jobs/jax_jobs`).
"""

import importlib.util
import json
import random
import shutil
import time
import tracemalloc
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
import orbax_flips
import trained
from ckpt.errors import CkptError, CorruptError, IncompleteError, UnsafeError, UnsupportedError
from ckpt_formats.containers import ocdbt
from ckpt_formats.containers.crc32c import crc32c
from ckpt_formats.containers.ocdbt import MANIFEST, MANIFEST_MAGIC, NODE_MAGIC, ValueRange, read_database
from ckpt_formats.containers.ocdbt_write import database, file_table, framed, keys_of, varint
from ckpt_formats.containers.zarr import ArrayLayout, ChunkEncoding
from ckpt_formats.containers.zarr_chunks import ChunkBlob, ChunkReader
from ckpt_formats.containers.zarr_write import ChunkGrid
from ckpt_formats.core import files
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.tensor import Tensor, read
from jax_jobs.launch import load_all, save_all, save_by_processes
from object_stores import BUCKET, moto, reached

NEEDED = ("jax", "flax", "optax", "orbax.checkpoint", "tensorstore")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name.partition(".")[0]) is None]
with_jax = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")
pytestmark = [pytest.mark.slow]

HEADER = 18
"""Bytes of the longest header of a frame of zstd."""
MESHES = ("1", "2", "8", "4x2", "2x4")
STATES = (*(f"mesh-{mesh}" for mesh in MESHES), "zarr3", "plain", "plain-zarr3", "small-files", "run", "run/2/state")
STATES += ("v1", "aggregate", "aggregate-placeholders", "aggregate-metadata", "flax", "flax/checkpoint_900")
STATES += ("flax-chunked", "easydel", "easydel/run-3")
OF_OPTAX = {"model": "params.", "exp_avg": "opt_state.1.0.mu.", "exp_avg_sq": "opt_state.1.0.nu."}
Arrays = Mapping[str, np.ndarray[Any, Any]]


@pytest.fixture(scope="module")
def saved() -> Path:
    return trained.once("jax_jobs", "saved", save_all)


@pytest.fixture(scope="module")
def processes() -> Path:
    return trained.once("jax_jobs", "processes", save_by_processes)


def memory(path: Path) -> Arrays:
    """What a process of JAX had in memory, by names of leaves."""
    data = path.with_suffix(".bin").read_bytes()
    listed = json.loads(path.read_text())
    return {
        name: np.frombuffer(data, DTYPES[dtype], int(np.prod(shape)), offset).reshape(shape)
        for name, (dtype, shape, offset) in listed.items()
    }


def same_bits(one: Any, other: Any) -> bool:
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@with_jax
@pytest.mark.parametrize("name", STATES)
def test_state_of_flax_is_read_bit_for_bit(name: str, saved: Path) -> None:
    checkpoint, truth = ckpt.open(saved / name), memory(saved / "state.json")
    read = {f"{OF_OPTAX[state]}{p.name}": t for p, state, t in checkpoint.tensors() if p.role == "parameter"}
    assert set(read) == {key for key in truth if key.startswith(("params.", "opt_state.1.0."))} - {
        "opt_state.1.0.count"
    }
    assert all(same_bits(tensor, truth[key]) for key, tensor in read.items())
    assert {parameter.count for parameter in checkpoint.values()} == {int(truth["opt_state.1.0.count"])}
    assert checkpoint.step == int(truth["step"])
    kernel = truth["params.decoder.layers.kernel"]
    assert same_bits(checkpoint["decoder.layers.kernel"][3:14, 5:23], kernel[3:14, 5:23])
    assert checkpoint.notices == () or name in ("run", "flax", "flax-chunked")


@with_jax
@pytest.mark.parametrize("name", ["kinds", "kinds-zarr3"])
def test_every_type_and_shape_is_read_bit_for_bit(name: str, saved: Path) -> None:
    checkpoint, truth = ckpt.open(saved / name), memory(saved / "kinds.json")
    assert set(checkpoint) == set(truth)
    assert all(same_bits(checkpoint[key], values) for key, values in truth.items())


@with_jax
def test_values_beside_the_model_are_read_with_their_kinds(saved: Path) -> None:
    mixed = ckpt.open(saved / "mixed")
    assert {state for p in mixed.values() for state in p.states} == {"model", "momentum_buffer"}
    assert {key: mixed.extras[key] for key in ("n", "x", "text")} == {"n": 3, "x": 2.5, "text": "words"}
    assert mixed.extras["list"][1:] == [None, {}, ()]
    assert mixed.origin.layout["random"] == {"key": "threefry2x32"}
    run = ckpt.open(saved / "run")
    assert (run.extras["data"], run.extras["metrics"]) == ({"epoch": 3}, {"loss": 1 / 3})
    assert run.step == 3
    assert any("newest of 2" in str(notice) for notice in run.notices)


@with_jax
def test_orbax_loads_what_is_written_into_every_mesh(saved: Path, tmp_path: Path) -> None:
    for name in ("mesh-4x2", "kinds", "mixed", "run", "flax"):
        ckpt.save(ckpt.open(saved / name), tmp_path / name, ckpt.Orbax(chunk_nbytes=1000))
        assert ckpt.diff(ckpt.open(saved / name), ckpt.open(tmp_path / name)).same
    for name, state in (("third", "mesh-4x2"), ("third-kinds", "kinds")):
        ckpt.save(ckpt.open(saved / state), tmp_path / name, ckpt.Orbax(zarr3=True, parts_per_axis=2))
        assert ckpt.diff(ckpt.open(saved / state), ckpt.open(tmp_path / name)).same
    loads = [(tmp_path / "mesh-4x2", mesh, f"state-{mesh}") for mesh in (None, *MESHES)]
    loads += [(tmp_path / name, None, name.replace("/", "-")) for name in ("kinds", "mixed", "run/state", "flax")]
    loads += [(saved / "mixed", None, "mixed-before"), (tmp_path / "third", "4x2", "third")]
    loads += [(tmp_path / "third-kinds", None, "third-kinds")]
    load_all([{"path": path, "mesh": mesh, "out": tmp_path / f"{out}.json"} for path, mesh, out in loads], tmp_path)
    truths = {f"state-{mesh}": memory(saved / "state.json") for mesh in (None, *MESHES)}
    truths |= {"run-state": memory(saved / "state.json"), "flax": memory(saved / "state.json")}
    truths |= {"third": memory(saved / "state.json"), "third-kinds": memory(saved / "kinds.json")}
    truths |= {"kinds": memory(saved / "kinds.json")}
    truths |= {"mixed": memory(tmp_path / "mixed-before.json")}
    for name, truth in truths.items():
        prefix = "params." if "kinds" in name else ""
        loaded = {key.removeprefix(prefix): values for key, values in memory(tmp_path / f"{name}.json").items()}
        assert set(loaded) == set(truth), name
        assert all(same_bits(loaded[key], values) for key, values in truth.items()), name


@with_jax
def test_databases_of_processes_are_read_without_a_merged_one(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "mesh-8", tmp_path / "mesh-8")
    (tmp_path / "mesh-8" / MANIFEST).unlink()
    shutil.rmtree(tmp_path / "mesh-8" / "d")
    assert ckpt.diff(ckpt.open(saved / "mesh-8"), ckpt.open(tmp_path / "mesh-8")).same


@with_jax
def test_parts_on_disks_of_processes_are_read_together(processes: Path, tmp_path: Path) -> None:
    whole = ckpt.open(processes / "whole")
    with pytest.raises(IncompleteError, match="one of several processes"):
        ckpt.open(processes / "node-0" / "3")
    for node in (0, 1):
        shutil.copytree(processes / f"node-{node}" / "3", tmp_path / "3" / f"host-{node}")
    opened = ckpt.open(tmp_path / "3")
    assert ckpt.diff(whole, opened).same
    assert opened.notices == ()
    assert [path.name for path in ckpt.checkpoints(processes / "node-0")] == ["2", "3"]
    metadata = next((tmp_path / "3" / "host-1" / "state" / "ocdbt.process_1").rglob("manifest.ocdbt"))
    shutil.rmtree(metadata.parent)
    with pytest.raises(IncompleteError):
        ckpt.open(tmp_path / "3")


@with_jax
def test_arrays_that_flax_kept_beside_its_file_are_read(processes: Path, tmp_path: Path) -> None:
    assert ckpt.diff(ckpt.open(processes / "gda"), ckpt.open(processes / "whole")).same
    shutil.copytree(processes / "gda", tmp_path / "gda")
    arrays = tmp_path / "gda" / "checkpoint_3_gda"
    file = tmp_path / "gda" / "checkpoint_3"
    (arrays / "params" / "kernel" / "1.0").unlink()
    with pytest.raises(IncompleteError, match=r"chunk \[4:8, 0:24\] of `params/kernel` is missing"):
        ckpt.open(file)
    shutil.rmtree(arrays / "params")
    with pytest.raises(IncompleteError, match="params/kernel are missing"):
        ckpt.open(file)
    file.write_bytes(file.read_bytes().replace(b"params/kernel", b"../../../etcc"))
    with pytest.raises(UnsafeError):
        ckpt.open(file)


@with_jax
def test_state_of_easydel_becomes_one_of_orbax_and_is_refused_if_its_index_does_not_fit(
    saved: Path, tmp_path: Path
) -> None:
    source = ckpt.open(saved / "easydel")
    ckpt.save(source, tmp_path / "7", ckpt.Orbax())
    assert ckpt.diff(source, ckpt.open(tmp_path / "7"), tensors_only=True).same
    folder = tmp_path / "run-3"
    shutil.copytree(saved / "easydel" / "run-3", folder)
    index = folder / "tensorstore_index.json"
    stated = json.loads(index.read_text())
    first = stated["prefixes"]["model"][0]
    for change, error in (
        ({"shape": [3]}, CorruptError),
        ({"dtype": "float16"}, CorruptError),
        ({"dtype": "words"}, CorruptError),
        ({"path": stated["prefixes"]["model"][1]["path"]}, CorruptError),
        ({"path": f"{stated['prefixes']['model'][1]['path']}/0"}, CorruptError),
        ({"path": "../run-3/model"}, UnsafeError),
        ({"path": "/etc"}, UnsafeError),
        ({"path": 7}, UnsafeError),
        ({"path": "model/absent"}, IncompleteError),
    ):
        prefixes = {**stated["prefixes"], "model": [*stated["prefixes"]["model"][1:], {**first, **change}]}
        index.write_text(json.dumps({**stated, "prefixes": prefixes}))
        with pytest.raises(error):
            ckpt.open(folder)
    index.write_text(json.dumps(stated))
    (folder / first["path"] / "0").unlink()
    with pytest.raises(IncompleteError, match="chunk"):
        ckpt.open(folder)


def test_hostile_paths_in_an_index_are_refused_soon(tmp_path: Path) -> None:
    def stored(name: str) -> dict[str, Any]:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / ".zarray").write_text(json.dumps(METADATA))
        (folder / "0").write_bytes(bytes(16))
        return {"path": name, "shape": METADATA["shape"], "dtype": "float32"}

    good = [stored(name) for name in ("model/a", "model/b")]
    index = tmp_path / "tensorstore_index.json"
    index.write_text(json.dumps({"format": "tensorstore", "prefixes": {"model": good}}))
    (tmp_path / "manifest.ocdbt").write_bytes(b"of another checkpoint")
    assert [*ckpt.open(tmp_path)] == ["a", "b"]
    inner = stored("model/a/inner")
    with pytest.raises(CorruptError, match="model/a/inner` is an array inside an array"):
        ckpt.open(tmp_path)
    for more in ([inner], [stored("model/a/z/z")], [good[1]]):
        index.write_text(json.dumps({"format": "tensorstore", "prefixes": {"model": [*more, *good]}}))
        with pytest.raises(CorruptError, match="twice, or inside an array"):
            ckpt.open(tmp_path)
    long = {**inner, "path": "/".join(["a"] * 400_000)}
    index.write_text(json.dumps({"format": "tensorstore", "prefixes": {"model": [long, *good]}}))
    begin = time.process_time()
    with pytest.raises(CkptError):
        ckpt.open(tmp_path)
    assert time.process_time() - begin < 5


@with_jax
def test_state_of_flax_becomes_one_of_orbax(saved: Path, tmp_path: Path) -> None:
    ckpt.save(ckpt.open(saved / "flax"), tmp_path / "7", ckpt.Orbax())
    assert ckpt.diff(ckpt.open(saved / "mesh-8"), ckpt.open(tmp_path / "7")).same


@with_jax
def test_block_is_read_from_its_own_chunks_only(saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved / "plain", tmp_path / "plain")
    for chunk in (tmp_path / "plain" / "params.decoder.layers.kernel").glob("[1-3].*"):
        chunk.write_bytes(b"damaged")
    kernel = ckpt.open(tmp_path / "plain")["decoder.layers.kernel"]
    assert same_bits(kernel[0:4], memory(saved / "state.json")["params.decoder.layers.kernel"][0:4])
    with pytest.raises(CorruptError, match="cannot be decoded"):
        kernel[4:5]


@with_jax
def test_save_that_was_broken_off_is_refused(saved: Path, tmp_path: Path) -> None:
    def copy(name: str, source: str = "mesh-8") -> Path:
        shutil.copytree(saved / source, tmp_path / name)
        return tmp_path / name

    unfinished = copy("7.orbax-checkpoint-tmp-12")
    uncommitted = copy("uncommitted")
    step = json.loads((uncommitted / "_CHECKPOINT_METADATA").read_text())
    (uncommitted / "_CHECKPOINT_METADATA").write_text(json.dumps({**step, "commit_timestamp_nsecs": None}))
    lacking = copy("lacking")
    next(lacking.glob("d/*")).unlink()
    chunk = copy("chunk", "plain")
    (chunk / "params.embedding" / "3.0").unlink()
    array = copy("array", "plain")
    shutil.rmtree(array / "params.embedding")
    item = copy("item", "run/3")
    shutil.rmtree(item / "state")
    for path in (unfinished, uncommitted, lacking, chunk, array, item):
        with pytest.raises(IncompleteError):
            ckpt.open(path)
    run = copy("run", "run")
    (run / "3").rename(run / "3.orbax-checkpoint-tmp-5")
    assert [path.name for path in ckpt.checkpoints(saved / "run")] == ["2", "3"]
    opened = ckpt.open(run)
    assert opened.extras["data"] == {"epoch": 2}
    assert any("broken off" in str(notice) for notice in opened.notices)


@with_jax
def test_flipped_bits_are_refused_harmless_or_found_by_the_seal(saved: Path, tmp_path: Path) -> None:
    generator, seen = random.Random(5), Counter[str]()
    for one in orbax_flips.flips(tmp_path, ("mesh-8", "plain-zarr3", "flax/checkpoint_1000", "second")).values():
        for _ in range(3):
            seen += one.flip(generator)
    assert seen["refused"]
    assert seen["in what has no checksum"]


METADATA = {"shape": [4], "chunks": [4], "dtype": "<f4", "compressor": None, "fill_value": None, "order": "C"}
METADATA |= {"filters": None, "zarr_format": 2}


def write_tree(folder: Path, values: Mapping[str, ValueRange | bytes], leaf: str = "params.w") -> Path:
    """A tree with one leaf, in a database of these values."""
    (folder / "d").mkdir(parents=True)
    nodes, manifest = database(values, "d/nodes")
    (folder / "d/nodes").write_bytes(nodes)
    (folder / "d/data").write_bytes(bytes(range(64)))
    (folder / MANIFEST).write_bytes(manifest)
    keys = [{"key": key, "key_type": 2} for key in leaf.split(".")]
    value = {"value_type": "np.ndarray", "skip_deserialize": False}
    tree = {leaf: {"key_metadata": keys, "value_metadata": value}}
    (folder / "_METADATA").write_text(json.dumps({"tree_metadata": tree, "store_array_data_equal_to_fill_value": True}))
    return folder


def zarr3(codecs: list[dict[str, Any]]) -> bytes:
    """The metadata of four floats in one chunk."""
    grid = {"name": "regular", "configuration": {"chunk_shape": [4]}}
    content = {"zarr_format": 3, "node_type": "array", "shape": [4], "data_type": "float32", "chunk_grid": grid}
    return json.dumps({**content, "chunk_key_encoding": {"name": "default"}, "codecs": codecs}).encode()


HOSTILE: dict[str, tuple[dict[str, Any], Mapping[str, ValueRange | bytes], type[CkptError]]] = {
    "shape that no memory holds": ({"shape": [1 << 62], "chunks": [1 << 62]}, {}, UnsafeError),
    "chunks without elements": ({"chunks": [0]}, {}, UnsafeError),
    "chunks of other axes": ({"chunks": [2, 2]}, {}, CorruptError),
    "grid of more chunks than there are": ({"shape": [1 << 40], "chunks": [1]}, {}, IncompleteError),
    "negative shape": ({"shape": [-4]}, {}, CorruptError),
    "chunk outside the grid": ({}, {"params.w/1": ValueRange("d/data", 0, 16)}, CorruptError),
    "chunk of another size": ({}, {"params.w/0": ValueRange("d/data", 0, 12)}, CorruptError),
    "chunk beyond the file": ({}, {"params.w/0": ValueRange("d/data", 56, 16)}, CorruptError),
    "file outside": ({}, {"params.w/0": ValueRange("../data", 0, 16)}, UnsafeError),
    "absolute file": ({}, {"params.w/0": ValueRange("/etc/passwd", 0, 16)}, UnsafeError),
    "file that is missing": ({}, {"params.w/0": ValueRange("d/none", 0, 16)}, IncompleteError),
    "Fortran's order": ({"order": "F", "shape": [2, 2], "chunks": [2, 2]}, {}, UnsupportedError),
    "blosc": ({"compressor": {"id": "blosc"}}, {}, UnsupportedError),
    "filters": ({"filters": [{"id": "delta"}]}, {}, UnsupportedError),
    "big-endian": ({"dtype": ">f4"}, {}, UnsupportedError),
    "unknown type": ({"dtype": "int4"}, {}, UnsupportedError),
    "type that is no text": ({"dtype": [["a", "<f4"]]}, {}, CorruptError),
    "complex fill value that is none": ({"dtype": "<c8", "fill_value": ["x"]}, {}, CorruptError),
    "two fill values": ({"fill_value": [1, 2]}, {}, CorruptError),
    "many transposes": (
        {},
        {"params.w/zarr.json": zarr3([{"name": "transpose", "configuration": {"order": [0]}}] * 5000)},
        UnsupportedError,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_metadata_is_refused(name: str, tmp_path: Path) -> None:
    changes, values, error = HOSTILE[name]
    stored = {
        "params.w/.zarray": json.dumps({**METADATA, **changes}).encode(),
        "params.w/0": ValueRange("d/data", 0, 16),
    }
    with pytest.raises(error):
        ckpt.open(write_tree(tmp_path / "tree", {**stored, **values}))


@pytest.mark.parametrize(
    ("second", "error"),
    [
        ((8, 8), None),
        ((0xFFFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF), IncompleteError),
        ((0xFFFFFFFFFFFFFFFF, 9), CorruptError),
        ((44, 8), CorruptError),
        ((1, 1 << 63), CorruptError),
    ],
)
def test_shards_are_read_by_an_index_that_stays_inside(
    second: tuple[int, int], error: type[CkptError] | None, tmp_path: Path
) -> None:
    codec = {"name": "bytes"}
    sharding = {"chunk_shape": [2], "codecs": [codec], "index_codecs": [codec]}
    stored = {"params.w/zarr.json": zarr3([{"name": "sharding_indexed", "configuration": sharding}])}
    values = np.arange(4, dtype=np.float32)
    shard = values.tobytes() + np.array(((0, 8), second), "<u8").tobytes()
    tree = write_tree(tmp_path / "tree", {**stored, "params.w/c/0": ValueRange("d/shard", 0, len(shard))})
    (tree / "d/shard").write_bytes(shard)
    if error is None:
        np.testing.assert_array_equal(ckpt.open(tree)["w"][...], values)
        return
    with pytest.raises(error):
        ckpt.open(tree)["w"][...]


@pytest.mark.parametrize("compressor", ["zstd", "gzip"])
def test_chunk_that_decodes_to_more_than_its_shape_is_refused(compressor: str, tmp_path: Path) -> None:
    import gzip

    import zstandard

    bomb = bytes(1 << 26)
    data = zstandard.compress(bomb) if compressor == "zstd" else gzip.compress(bomb, 1)
    stored = {"params.w/.zarray": json.dumps({**METADATA, "compressor": {"id": compressor}}).encode()}
    tree = write_tree(tmp_path / "tree", {**stored, "params.w/0": data[: 1 << 20]})
    text = r"decodes to 67,108,864 bytes" if compressor == "zstd" else "decodes to 17 bytes or more"
    with pytest.raises(CorruptError, match=text):
        ckpt.open(tree)["w"][...]
    large = {"compressor": {"id": compressor}, "shape": [1 << 50], "chunks": [1 << 50]}
    stored = {"params.w/.zarray": json.dumps({**METADATA, **large}).encode()}
    tree = write_tree(tmp_path / "large", {**stored, "params.w/0": data[:1000]})
    with pytest.raises(UnsafeError, match="is in the database, in 1,000 bytes"):
        ckpt.open(tree)["w"][0:4]


@pytest.mark.parametrize(("elements", "log"), [(4, 24), (4, 27), (3 << 20, 28), (3 << 20, 31)])
def test_frame_that_needs_a_large_window_is_refused_before_memory_is_taken(
    elements: int, log: int, tmp_path: Path
) -> None:
    """Of a frame that states no size: the window is all that it needs memory for."""
    descriptor = bytes([0, (log - 10) << 3])  # neither a size nor a checksum; the window
    block = (3 | min(4 * elements, 1 << 17) << 3).to_bytes(3, "little")  # the last one: a byte that is repeated
    frame = b"\x28\xb5\x2f\xfd" + descriptor + block + bytes(1)
    layout = {**METADATA, "shape": [elements], "chunks": [elements], "compressor": {"id": "zstd"}}
    stored = {"params.w/.zarray": json.dumps(layout).encode(), "params.w/0": ValueRange("d/chunks", 0, len(frame))}
    (write_tree(tmp_path / "tree", stored) / "d/chunks").write_bytes(frame)
    tracemalloc.start()
    with pytest.raises(UnsafeError, match=f"too large a window: {1 << log:,} bytes"):
        ckpt.open(tmp_path / "tree")["w"][0:2]
    assert tracemalloc.get_traced_memory()[1] < 1 << 23
    tracemalloc.stop()


def test_streams_that_are_kept_open_have_windows_of_limited_size_together(tmp_path: Path) -> None:
    import zstandard

    length, window = 9 << 23, 1 << 26
    parameters = zstandard.ZstdCompressionParameters.from_level(1, window_log=26, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / "chunk").write_bytes(stream.compress(bytes(length)) + stream.flush())
    place = ValueRange("chunk", 0, (tmp_path / "chunk").stat().st_size)
    chunks, out = ChunkReader(tmp_path), memoryview(bytearray(16))
    with Reader(check=False) as reader:
        for offset in range(8 << 20, 0, -1 << 20):  # each one before those of the others
            frame = chunks.frame(place, length, "zstd", reader)
            frame.read_into(offset, out, reader)
            assert frame.window == window
            assert frame.open_nbytes <= 5 * window
    behind = zstandard.compress(b"first") + (tmp_path / "chunk").read_bytes()
    (tmp_path / "behind").write_bytes(behind)
    with Reader(check=False) as reader, pytest.raises(UnsafeError, match="too large a window"):
        chunks.frame(ValueRange("behind", 0, len(behind)), length, "zstd", reader).read_into(0, out, reader)


def test_checksum_of_a_plain_chunk_is_compared(tmp_path: Path) -> None:
    layout = ArrayLayout((6, 4), DTYPES["float32"], (6, 4), ".", "", ChunkEncoding(None, True), None, b"")
    values = np.arange(24, dtype=np.float32)
    for damage in (0, 1):
        data = values.tobytes() + (crc32c(values.tobytes()) ^ damage).to_bytes(4, "little")
        (tmp_path / f"{damage}").write_bytes(data)
        place = ValueRange(f"{damage}", 0, len(data))
        chunk = ChunkBlob(layout, place, ChunkReader(tmp_path), "w [0]", True, Box.whole((6, 4)))
        part = Tensor.of(chunk.crop(Box((2, 0), (3, 4))))
        if damage:
            with pytest.raises(CorruptError, match="does not fit its crc32c"):
                read(part)
        else:
            assert same_bits(read(part), values.reshape(6, 4)[2:3])


@pytest.mark.parametrize("compression", ["zstd", "gzip"])
def test_chunk_that_is_shorter_than_its_checksum_is_refused(compression: str, tmp_path: Path) -> None:
    elements = 3 << 20
    layout = ArrayLayout(
        (elements,), DTYPES["float32"], (elements,), ".", "", ChunkEncoding(compression, True), None, b""
    )
    (tmp_path / "chunk").write_bytes(b"ab")
    chunk = ChunkBlob(layout, ValueRange("chunk", 0, 2), ChunkReader(tmp_path), "w [0]", True, Box.whole((elements,)))
    with pytest.raises(CorruptError, match="has 2 bytes, fewer than its checksum"):
        read(Tensor.of(chunk.crop(Box((0,), (4,)))))


@pytest.mark.parametrize("stated", [True, False])
def test_frames_with_usual_windows_are_read(stated: bool, tmp_path: Path) -> None:
    import zstandard

    values = np.arange(600, dtype=np.float32)
    parameters = zstandard.ZstdCompressionParameters(window_log=23, write_content_size=stated)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    frame = stream.compress(values.tobytes()) + stream.flush()
    assert zstandard.get_frame_parameters(frame).window_size == 1 << 23
    layout = {**METADATA, "shape": [600], "chunks": [600], "compressor": {"id": "zstd"}}
    tree = write_tree(tmp_path / "tree", {"params.w/.zarray": json.dumps(layout).encode(), "params.w/0": frame})
    assert same_bits(ckpt.open(tree)["w"][...], values)


def test_chunks_of_prime_lengths_are_found_soon() -> None:
    begin = time.process_time()
    assert ChunkGrid(1 << 26, 1).shape(((1 << 31) - 1,), 4) == (1 << 24,)
    assert ChunkGrid(1 << 26, 2).shape((2 * ((1 << 31) - 1),), 4) == (1,)
    assert ChunkGrid(1 << 26, 1).shape((3 << 29, 1), 4) == (1 << 24, 1)
    assert time.process_time() - begin < 0.2


@pytest.mark.parametrize(
    ("shape", "parts", "nbytes", "chunk"),
    [
        ((8, 6), 1, 1 << 20, (8, 6)),
        ((8, 6), 2, 1 << 20, (4, 3)),
        ((8, 6), 4, 1 << 20, (2, 6)),
        ((64, 6), 2, 64, (4, 3)),
        ((14, 4), 2, 32, (1, 2)),
        ((), 2, 1, ()),
        ((5, 100), 1, 80, (1, 20)),
    ],
)
def test_chunks_never_reach_from_one_part_into_the_next(shape: Shape, parts: int, nbytes: int, chunk: Shape) -> None:
    grid = ChunkGrid(nbytes, parts)
    assert grid.shape(shape, 4) == chunk
    boxes = [box for _, box in grid.boxes(shape, chunk)]
    assert sum(box.size for box in boxes) == int(np.prod(shape))
    for n, axis in zip(shape, range(len(shape)), strict=True):
        part = n // parts if n % parts == 0 else n
        assert all(box.start[axis] // part == (box.stop[axis] - 1) // part for box in boxes)


@pytest.mark.parametrize(("beside", "cache_nbytes"), [(2, None), (6, None), (2, 1 << 20)])
def test_rows_across_chunks_decode_each_chunk_once_in_a_bounded_cache(
    beside: int, cache_nbytes: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import zstandard

    shape, chunk = (1024, beside, 3072), (512, 1, 3072)
    layout = {**METADATA, "shape": shape, "chunks": chunk, "compressor": {"id": "zstd"}}
    stored: dict[str, ValueRange | bytes] = {"params.w/.zarray": json.dumps(layout).encode()}
    data = bytearray()
    for at in np.ndindex(2, beside, 1):
        packed = zstandard.compress(np.full(chunk, sum(at), np.float32).tobytes())
        stored[f"params.w/{'.'.join(map(str, at))}"] = ValueRange("d/chunks", len(data), len(packed))
        data += packed
    tree = write_tree(tmp_path / "tree", stored)
    (tree / "d/chunks").write_bytes(data)
    opened = ckpt.open(tree)
    encoded = 0

    def counted(self: Any, path: Path, offset: int, out: memoryview, seal: Any = None) -> None:
        nonlocal encoded
        encoded += len(out) if len(out) != HEADER else 0  # read once more, for the window
        original(self, path, offset, out, seal)

    original = files.Reader.read_into
    monkeypatch.setattr(files.Reader, "read_into", counted)
    with files.Reader(cache_nbytes=cache_nbytes) as reader:
        for row in range(0, 1024, 16):
            block = opened["w"].weight.crop(Box((row, 0, 0), (row + 16, beside, 3072)))
            values = read(block, reader)
            assert (values == np.arange(beside)[:, None] + row // 512).all()
            assert reader._cached_nbytes <= (8 << 20 if cache_nbytes else 1 << 25)
    assert encoded == len(data)


def test_large_chunk_that_decodes_to_more_than_its_shape_is_refused(tmp_path: Path) -> None:
    import zstandard

    shape = (3 << 20,)
    packed = zstandard.compress(bytes((12 << 20) + 1))
    layout = {**METADATA, "shape": shape, "chunks": shape, "compressor": {"id": "zstd"}}
    stored = {"params.w/.zarray": json.dumps(layout).encode(), "params.w/0": ValueRange("d/chunks", 0, len(packed))}
    (write_tree(tmp_path / "tree", stored) / "d/chunks").write_bytes(packed)
    with pytest.raises(CorruptError, match="decode to more than"):
        ckpt.open(tmp_path / "tree")["w"][...]


def test_tree_of_many_keys_is_written_and_read_again(tmp_path: Path) -> None:
    values: dict[str, ValueRange | bytes] = {
        f"layer.{i // 50}.weight/{i % 50}.0": ValueRange("d/x", i * 8, 8) for i in range(99_999)
    }
    values["zeta/.zarray"] = b"{}"
    nodes, manifest = database(values, "d/nodes")
    (tmp_path / "d").mkdir()
    (tmp_path / "d/nodes").write_bytes(nodes)
    (tmp_path / MANIFEST).write_bytes(manifest)
    assert read_database(tmp_path) == dict(sorted(values.items()))


def test_node_that_is_named_many_times_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zstandard

    monkeypatch.setattr(ocdbt, "_MAX_NODES", 1 << 26)
    body = b"\0" + file_table([]) + varint(1, 1) + b"w" + varint(1 << 24) + b"\0" + bytes(1 << 24)
    packed = zstandard.compress(body)
    head = NODE_MAGIC.to_bytes(4, "big") + (len(packed) + 18).to_bytes(8, "little") + varint(0, 1)
    leaf = head + packed + crc32c(head + packed).to_bytes(4, "little")
    names = [f"{i:03}".encode() for i in range(100)]
    lengths, suffixes = keys_of(names)
    same = len(names)
    node = b"\1" + file_table(["d/nodes"]) + varint(same) + lengths + varint(*(3 for _ in names)) + suffixes
    node += varint(*([0] * same), *([0] * same), *([len(leaf)] * same), *([1] * 3 * same))
    root = framed(NODE_MAGIC, node)
    fields = bytes(16) + varint(0, 1024, 10**8) + b"\4" + varint(0) + file_table(["d/nodes"])
    fields += varint(1, 1) + b"\1" + varint(0, len(leaf), len(root), 1, 1, 1) + bytes(8) + varint(0)
    (tmp_path / "d").mkdir()
    (tmp_path / "d/nodes").write_bytes(leaf + root)
    (tmp_path / MANIFEST).write_bytes(framed(MANIFEST_MAGIC, fields))
    with pytest.raises(UnsafeError, match="decode to more than"):
        read_database(tmp_path)


def test_crc32c_is_that_of_the_standard() -> None:
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"") == 0
    data = bytes(range(256)) * 5000
    assert crc32c(data) != crc32c(data[:-1] + b"\0")


def test_tree_is_written_to_a_bucket_and_read_from_it(tmp_path: Path) -> None:
    values = {f"decoder.layers.{i}": np.arange(12.0, dtype=np.float32).reshape(3, 4) + i for i in range(3)}
    source = ckpt.from_state_dict(values)
    with moto() as server, reached(server):
        url = f"s3://{BUCKET}/runs/7"
        ckpt.save(source, url, ckpt.Orbax(chunk_nbytes=16))
        opened = ckpt.open(url)
        assert opened.step == 7
        assert all(same_bits(opened[name], values[name]) for name in values)
        ckpt.save(opened, tmp_path / "7", ckpt.Orbax())
        assert ckpt.diff(opened, ckpt.open(tmp_path / "7")).same
        ckpt.save(source, tmp_path / "part", ckpt.Orbax())
        (tmp_path / "part" / "commit_success.txt").unlink()
        server.put("runs/8", tmp_path / "part")
        with pytest.raises(IncompleteError, match="commit_success"):
            ckpt.open(f"s3://{BUCKET}/runs/8")


@with_jax
def test_chain_and_diff_take_states_of_orbax(saved: Path, tmp_path: Path) -> None:
    chain = ckpt.Chain(tmp_path / "run.chain")
    first = ckpt.open(saved / "mesh-8")
    later = replace(first, origin=replace(first.origin, step=4))
    for checkpoint in (first, later):
        chain.append(checkpoint)
    for step, checkpoint in ((3, first), (4, later)):
        ckpt.save(chain[step], tmp_path / str(step), ckpt.Orbax())
        restored = ckpt.open(tmp_path / str(step))
        for name in first:
            for state, tensor in checkpoint[name].states.items():
                assert same_bits(restored[name].states[state], tensor)
    ckpt.save(first, tmp_path / "x.pt", "torch")
    in_torch = ckpt.open(tmp_path / "x.pt")
    assert ckpt.diff(first, in_torch).same
    assert not ckpt.diff(first, ckpt.open(saved / "kinds")).same
