"""Values reach torch and DLPack bit for bit and without a copy, and what is changed there never reaches a file."""

import sys
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import ckpt
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from held import checkpoint, parameter

SHAPES = [(), (0,), (3, 4)]
KEYS: list[Any] = [..., (), 1, (1, 2), (slice(None), -1), slice(1, None), (slice(None, None, 2), slice(0, 3))]


def values(dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """An array of any dtype: random bits, of `bool` zeros and ones."""
    count = int(np.prod(shape)) * DTYPES[dtype].itemsize
    data = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, count, np.uint8)
    return data.view(DTYPES[dtype]).reshape(shape)


def lazy(array: np.ndarray) -> Tensor:
    return Tensor.of(ArrayBlob(array))


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor in C order, as torch has them."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of safetensors with weights of three types."""
    path = tmp_path_factory.mktemp("mapped") / "a.safetensors"
    weights = [parameter(name, {"model": values(name, (3, 4))}) for name in ("float32", "bfloat16", "float8_e5m2")]
    ckpt.save(checkpoint(weights), path, ckpt.Safetensors())
    return path


# Bits


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_and_dlpack_get_the_bits_of_every_type_and_shape(dtype: str) -> None:
    for shape in SHAPES:
        array = values(dtype, shape)
        for tensor in (lazy(array).torch(), torch.from_dlpack(lazy(array))):
            assert tensor.dtype == getattr(torch, dtype)
            assert tensor.shape == shape
            assert tensor.is_contiguous()
            assert bits(tensor) == array.tobytes()


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_gets_the_blocks_of_numpy(mmap: bool, file: Path) -> None:
    for weight in ckpt.open(file).values():
        whole = np.asarray(weight)
        for key in KEYS:
            assert bits(weight.torch(key, mmap=mmap)) == whole[key].tobytes()
            assert weight.torch(key, mmap=mmap).shape == whole[key].shape
        with pytest.raises(IndexError):
            weight.torch(3, mmap=mmap)


def test_numpy_imports_what_dlpack_gives_it_and_refuses_bfloat16(file: Path) -> None:
    run = ckpt.open(file)
    assert np.from_dlpack(run["float32"]).tobytes() == np.asarray(run["float32"]).tobytes()
    assert run["float32"].__dlpack_device__() == (1, 0)
    with pytest.raises((BufferError, RuntimeError)):
        np.from_dlpack(run["bfloat16"])
    for options in ({"copy": False}, {"dl_device": (2, 0)}):
        for name in ("float32", "bfloat16"):
            with pytest.raises(BufferError):
                run[name].__dlpack__(**options)


# Memory


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_has_the_memory_that_was_read_into(dtype: str) -> None:
    tensor = lazy(np.zeros((1 << 18,), DTYPES[dtype]))
    for give in (tensor.torch, lambda: torch.from_dlpack(tensor)):
        tracemalloc.start()
        try:
            given = give()
            now, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        # Of NumPy: the one buffer, still there. Torch's own memory is not counted, so it has none if it keeps this one.
        assert tensor.nbytes <= now <= peak < 1.2 * tensor.nbytes
        assert given.is_contiguous()


def test_a_mapped_tensor_takes_no_memory_and_is_writable_without_changing_the_file(file: Path) -> None:
    before = file.read_bytes()
    run = ckpt.open(file)
    first, second = (run["bfloat16"].torch(mmap=True) for _ in range(2))
    assert str(file) in Path("/proc/self/maps").read_text()
    first.fill_(7)
    assert not torch.equal(first, second)
    assert file.read_bytes() == before
    assert np.asarray(run["bfloat16"]).tobytes() == np.asarray(ckpt.open(file)["bfloat16"]).tobytes()
    del first, second
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_values_in_pieces_are_read_although_a_mapping_is_wanted(file: Path) -> None:
    run = ckpt.open(file).cast("fp16")
    assert bits(run["float32"].torch(mmap=True)) == np.asarray(run["float32"]).tobytes()
    assert str(file) not in Path("/proc/self/maps").read_text()


# A model


class Model(torch.nn.Module):
    """Tied tables, buffers, a parameter of no dimension, an empty one, and bfloat16."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = torch.nn.Embedding(16, 8)
        self.norm = torch.nn.BatchNorm1d(8)
        self.layer = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        self.scale = torch.nn.Parameter(torch.rand(()))
        self.empty = torch.nn.Parameter(torch.empty(0, 3))
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.table(tokens)) * self.scale
        return self.head(self.layer(hidden.bfloat16()).float())


@pytest.mark.parametrize("mmap", [False, True])
def test_a_module_loads_the_state_dict_of_a_checkpoint(mmap: bool, tmp_path: Path) -> None:
    saved, loaded, tokens = Model(1), Model(2), torch.arange(16)
    saved(tokens)  # moves the statistics of the norm
    torch.save(saved.state_dict(), tmp_path / "model.pt")
    state = ckpt.open(tmp_path / "model.pt").state_dict(mmap=mmap)
    assert state["head.weight"] is state["table.weight"]
    assert loaded.load_state_dict(state, strict=True).missing_keys == []
    saved.eval(), loaded.eval()
    assert torch.equal(saved(tokens), loaded(tokens))


# Refusals


@pytest.mark.parametrize("mmap", [False, True])
def test_state_dict_refuses_a_file_that_was_replaced_or_truncated(mmap: bool, file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "a.safetensors"
    copy.write_bytes(file.read_bytes())
    run = ckpt.open(copy)
    copy.unlink()
    copy.write_bytes(file.read_bytes())
    with pytest.raises(ckpt.CorruptError, match="changed") as refused:
        run.state_dict(mmap=mmap)
    assert refused.value.where
    copy.write_bytes(file.read_bytes()[:-80])
    last = max(run, key=lambda name: next(run[name].weight.sources()).offset)
    with pytest.raises(ckpt.CorruptError, match="ends at byte"):
        run[last].torch(mmap=mmap)


def test_torch_refuses_big_endian_values() -> None:
    with pytest.raises(ckpt.UnsupportedError, match="big-endian"):
        lazy(np.zeros(3, ">f4")).torch()


def test_a_type_that_this_torch_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "float8_e8m0fnu")
    run = checkpoint([parameter("scales", {"model": np.ones(3, ml_dtypes.float8_e8m0fnu)})])
    with pytest.raises(ckpt.UnsupportedError, match=r"has no type float8_e8m0fnu") as refused:
        run.state_dict()
    assert refused.value.where == "tensor scales"


def test_a_machine_without_torch_is_an_error_with_a_hint(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ckpt.UnsupportedError, match="torch cannot be imported") as refused:
        ckpt.open(file)["float32"].torch()
    assert refused.value.hint
