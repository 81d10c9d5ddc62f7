"""How many requests, and how many bytes, parts of checkpoints take from a store."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt
from lying_store import Answer, LyingStore, Request, lying
from object_stores import BUCKET, reached

SHARDS, ROWS, COLUMNS = 24, 512, 512
MATRIX = ROWS * COLUMNS * 4
"""Bytes of a tensor: two are in a shard."""
BLOCK = 1 << 16
NAME = "layers.7.up.weight"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LyingStore]:
    """A folder of Hugging Face in 24 shards, and the same model as DCP of 2 ranks."""
    folder, files = tmp_path_factory.mktemp("requests"), dict[str, str]()
    (folder / "hf").mkdir()
    for number in range(SHARDS):
        tensors = {f"layers.{number}.{name}.weight": np.full((ROWS, COLUMNS), number, np.float32) for name in "ab"}
        tensors[f"layers.{number}.up.weight"] = tensors.pop(f"layers.{number}.b.weight")
        file = f"model-{number + 1:05d}-of-{SHARDS:05d}.safetensors"
        save_file(tensors, folder / "hf" / file, {"format": "pt"})
        files |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": SHARDS * 2 * MATRIX}, "weight_map": files}
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps(index))
    ckpt.save(ckpt.open(folder / "hf"), folder / "dcp", ckpt.DCP(dp=2))
    with lying() as running, reached(running.server):
        for path in (path for path in folder.rglob("*") if path.is_file()):
            running.truth.put(path.relative_to(folder).as_posix(), path.read_bytes())
        yield running


def received(store: LyingStore) -> tuple[int, int]:
    """The requests since the last call, and the bytes of objects in the answers to them."""
    seen, nbytes = list(store.truth.seen), 0
    store.truth.seen.clear()
    for request in seen:
        if request.kind == "get":
            length = len(store.truth.objects[request.key].data)
            first, _, last = request.headers.get("range", f"bytes=0-{length}").removeprefix("bytes=").partition("-")
            nbytes += min(int(last) + 1, length) - int(first)
    return len(seen), nbytes


def test_opening_shards_takes_64_kib_of_each(store: LyingStore) -> None:
    received(store)
    ckpt.open(f"s3://{BUCKET}/hf")
    assert all(f"{one.key or one.query['prefix']}/".startswith("hf/") for one in store.truth.seen)
    requests, nbytes = received(store)
    assert requests <= SHARDS + 2  # the listing, and the index
    assert nbytes <= SHARDS * BLOCK + (1 << 16)


@pytest.mark.parametrize(("folder", "most"), [("hf", 2), ("dcp", 8)])
def test_reading_a_tensor_requests_its_bytes_only(folder: str, most: int, store: LyingStore) -> None:
    run = ckpt.open(f"s3://{BUCKET}/{folder}")
    received(store)
    assert (run[NAME][:] == 7).all()
    requests, nbytes = received(store)
    assert requests <= most
    assert nbytes <= MATRIX + 8 * BLOCK


def test_rows_of_a_tensor_take_a_block_each(store: LyingStore) -> None:
    weight = ckpt.open(f"s3://{BUCKET}/hf")[NAME]
    received(store)
    assert all((weight[row : row + 1] == 7).all() for row in (500, 3, 250, 120))
    requests, nbytes = received(store)
    assert requests <= 4
    assert nbytes <= 4 * BLOCK


def test_a_selection_reads_its_tensors_alone(store: LyingStore, tmp_path: Path) -> None:
    run = ckpt.open(f"s3://{BUCKET}/hf").select(only=[f"^{NAME}$"])
    received(store)
    ckpt.save(run, tmp_path / "out.safetensors", ckpt.Safetensors())
    requests, nbytes = received(store)
    assert requests <= 2
    assert nbytes <= MATRIX + 2 * BLOCK


def test_all_of_dcp_is_read_once(store: LyingStore, tmp_path: Path) -> None:
    """Each item is opened for the plan, and this takes its ends, of several items at once."""
    run = ckpt.open(f"s3://{BUCKET}/dcp")
    received(store)
    ckpt.save(run, tmp_path / "out.safetensors", ckpt.Safetensors(), resources=ckpt.Resources(memory=16 << 20))
    nbytes = received(store)[1]
    assert nbytes <= SHARDS * 2 * (MATRIX + 2 * 2 * BLOCK)


def test_local_headers_of_a_torch_file_are_requested_at_once(store: LyingStore, tmp_path: Path) -> None:
    tensors = {f"w{number}": np.full(80_000 + number, number, np.float32) for number in range(96)}
    save_file(tensors, tmp_path / "model.safetensors")
    ckpt.save(ckpt.open(tmp_path / "model.safetensors"), tmp_path / "model.pt", ckpt.Torch())
    store.truth.put("torch/model.pt", (tmp_path / "model.pt").read_bytes())
    running, alone, lock = 0, 0, Lock()

    def slow(request: Request) -> Answer:
        nonlocal running, alone
        with lock:
            alone += running == 0
            running += 1
        time.sleep(0.003)
        with lock:
            running -= 1
        return store.truth.answer(request)

    store.handler = slow
    try:
        run = ckpt.open(f"s3://{BUCKET}/torch/model.pt")
        assert len(run.seals) > 96
    finally:
        store.be_honest()
    assert alone <= 20  # of about 110 requests
    assert (run["w30"][:] == 30).all()
