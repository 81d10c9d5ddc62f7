"""What a file is, its content says: the ending decides only where the content tells nothing."""

import bz2
import gzip
import io
import lzma
import os
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from damage import BROKEN, NOT_FOUND, UNSUPPORTED, ckpt

WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "a.bias": torch.arange(2.0)}


def saved() -> bytes:
    """The bytes of a file of torch.save."""
    stream = io.BytesIO()
    torch.save(WEIGHTS, stream)
    return stream.getvalue()


def tar() -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("empty.txt"))
    return stream.getvalue()


def zipped(*names: str, method: int = zipfile.ZIP_STORED) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name in names:
            archive.writestr(name, saved())
    return stream.getvalue()


CONTENTS = {
    "gzip": gzip.compress(saved()),
    "xz": lzma.compress(saved()),
    "bzip2": bz2.compress(saved()),
    "zstd": b"\x28\xb5\x2f\xfd" + bytes(40),
    "tar": tar(),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(100),
    "ONNX": b"\x08\x08\x12\x07pytorch\x1a\x052.1.0:\x10" + bytes(100),
    "array of NumPy": b"\x93NUMPY\1\0" + bytes(100),
    "arrays of NumPy": zipped("a.npy", method=zipfile.ZIP_BZIP2),
    "Stable-Baselines3": zipped("data", "policy.pth", "policy.optimizer.pth", method=zipfile.ZIP_DEFLATED),
    "zip archive of other files": zipped("model.pt"),
    "torch.package": zipped("p/.data/extern_modules", "p/model/model.pkl", "p/.data/version"),
}


@pytest.mark.parametrize("ending", [".pt", ".safetensors"])
@pytest.mark.parametrize("what", CONTENTS)
def test_a_foreign_file_is_named_by_its_content_whatever_its_ending(what: str, ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"model{ending}"
    path.write_bytes(CONTENTS[what])
    done = ckpt("verify", path)
    assert done.code == UNSUPPORTED
    assert what in done.err
    assert "copy or download it again" not in done.err


def test_an_archive_of_stable_baselines_is_named_under_its_own_ending(tmp_path: Path) -> None:
    (tmp_path / "model.zip").write_bytes(CONTENTS["Stable-Baselines3"])
    done = ckpt("verify", tmp_path / "model.zip")
    assert (done.code, "policy.pth" in done.err) == (UNSUPPORTED, True)


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_error_states_that_a_file_of_zeros_was_not_written(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(bytes(4096))
    done = ckpt("verify", tmp_path / name)
    assert done.code == BROKEN
    assert "begins with zeros" in done.err


@pytest.mark.parametrize("ending", [".pt", ".bin", ".ckpt", ".model"])
def test_safetensors_under_another_ending_are_read_with_a_note(ending: str, tmp_path: Path) -> None:
    save_file(WEIGHTS, tmp_path / "x.safetensors")
    path = tmp_path / f"model{ending}"
    os.replace(tmp_path / "x.safetensors", path)
    checkpoint = open_checkpoint(path)
    assert np.array_equal(read(checkpoint["a.weight"].weight), WEIGHTS["a.weight"].numpy())
    assert any("read as safetensors, by its content" in one for one in checkpoint.notices) == (ending != ".model")


@pytest.mark.parametrize("older", [False, True], ids=["zip", "older"])
def test_a_file_of_torch_called_safetensors_is_read_with_a_note(older: bool, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    torch.save(WEIGHTS, path, _use_new_zipfile_serialization=not older)
    checkpoint = open_checkpoint(path)
    assert np.array_equal(read(checkpoint["a.weight"].weight), WEIGHTS["a.weight"].numpy())
    assert any("read as torch, by its content" in one for one in checkpoint.notices)


@pytest.mark.parametrize(("name", "kind"), [("model.safetensors", "torch"), ("pytorch_model.bin", "safetensors")])
def test_a_folder_whose_model_has_the_other_ending_is_read_with_a_note(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "new"}')
    if kind == "torch":
        torch.save(WEIGHTS, tmp_path / name)
    else:
        save_file(WEIGHTS, tmp_path / "x.safetensors")
        os.replace(tmp_path / "x.safetensors", tmp_path / name)
    checkpoint = open_checkpoint(tmp_path)
    assert np.array_equal(read(checkpoint["a.weight"].weight), WEIGHTS["a.weight"].numpy())
    assert any(f"{name} is read as {kind}" in one for one in checkpoint.notices)


MSGPACK = {
    "a dict of numbers": b"\x82\xa1a\x01\xa1b\x02",
    "a record of Burn": b"\x82\xa8metadata\x81\xa5float\xa3f32\xa4item\x81\xa2id\xa1x",
}


@pytest.mark.parametrize("content", MSGPACK.values(), ids=MSGPACK)
@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_messagepack_without_an_array_is_no_checkpoint(command: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "model.msgpack").write_bytes(content)
    done = ckpt(command, tmp_path / "model.msgpack")
    assert (done.code, "no tensor" in done.err) == (NOT_FOUND, True)
