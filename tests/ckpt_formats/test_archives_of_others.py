"""Archives of NumPy (`.npz`) and of Stable-Baselines3: read by their members, whatever their ending; no pickle is."""

import io
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_formats.core.errors import CkptError, CorruptError, UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.marks import Place
from ckpt_formats.registry.opening import open_checkpoint
from damage import BROKEN, UNSUPPORTED, ckpt

AGENT = Path(__file__).parents[1] / "foreign_files" / "stable-baselines3-2.9.zip"
ARRAYS = {
    "layers.0/w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(24, dtype=np.int16).reshape(2, 3, 4)),
    "number": np.array(2.5),
    "flags": np.array([True, False]),
    "empty": np.zeros((0, 3), np.complex64),
}


def stored(**members: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return stream.getvalue()


def npy(header: str, values: bytes = b"", version: int = 1) -> bytes:
    text = header.encode("latin-1") + b"\n"
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H" if version == 1 else "<I", len(text)) + text + values


@pytest.mark.parametrize("name", ["arrays.npz", "arrays.pt", "arrays.safetensors", "arrays"])
def test_arrays_of_numpy_are_read_whatever_the_ending(name: str, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as file:
        np.savez(file, **ARRAYS)
    checkpoint = open_checkpoint(tmp_path / name)
    assert checkpoint.parameters.keys() == ARRAYS.keys()
    for key, expected in ARRAYS.items():
        values = read(checkpoint.parameters[key].weight)
        assert (values.dtype, values.shape, values.tolist()) == (expected.dtype, expected.shape, expected.tolist())
    noted = [one for one in checkpoint.notices if "read as numpy, by its content" in one.text]
    assert bool(noted) is name.endswith((".pt", ".safetensors"))
    assert Place(tmp_path / name).has_marks_of("numpy")


def test_arrays_are_converted_and_their_checksums_compared(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, **ARRAYS)
    assert ckpt("convert", path, tmp_path / "out.safetensors").code == 0
    assert "5 checksums" in ckpt("verify", path).out
    data = bytearray(path.read_bytes())
    data[data.index(ARRAYS["layers.0/w"].tobytes()) + 5] ^= 1
    path.write_bytes(data)
    assert ckpt("verify", path).code == BROKEN
    assert ckpt("convert", path, tmp_path / "other.safetensors").code == BROKEN


F4 = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"
GOOD = npy(F4, bytes(8))


@pytest.mark.parametrize(
    ("member", "error", "words"),
    [
        (npy(F4, bytes(7)), CorruptError, "has 7 bytes of values"),
        (npy(F4, bytes(8), 9), CorruptError, "malformed"),
        (npy(F4 + " or 1", bytes(8)), CorruptError, "malformed"),
        (npy("{'descr': __import__('os'), 'fortran_order': False, 'shape': (2,)}"), CorruptError, "malformed"),
        (npy(F4.replace("(2,)", f"({'9' * 5000},)")), CorruptError, "impossible shape"),
        (npy(F4.replace("(2,)", f"({'1, ' * 40})"), bytes(4)), CorruptError, "impossible shape"),
        (npy(F4.replace("(2,)", "(-1,)")), CorruptError, "malformed"),
        (npy(F4.replace("f4", "V2"), bytes(4)), UnsupportedError, "type '<V2' is not read"),
        (npy(F4.replace("<f4", ">f4"), bytes(8)), UnsupportedError, "type '>f4' is not read"),
        (npy(F4.replace("<f4", "|O"), b"cposix\nsystem\n"), UnsupportedError, "Python objects is a pickle"),
        (npy(F4.replace("'<f4'", "[('a', '<f4')]"), bytes(8)), UnsupportedError, "structured"),
        (GOOD[:8] + b"\xff\xff" + GOOD[10:], CorruptError, "the header of an array has"),
        (GOOD[:9], CorruptError, "malformed"),
        (b"", CorruptError, "malformed"),
    ],
)
def test_an_array_that_is_no_plain_one_is_refused(
    member: bytes, error: type[CkptError], words: str, tmp_path: Path
) -> None:
    (tmp_path / "a.npz").write_bytes(stored(w=GOOD, x=member))
    with pytest.raises(error, match=words):
        open_checkpoint(tmp_path / "a.npz")


def test_compressed_arrays_are_refused_for_what_they_are(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "a.npz", w=np.ones(3))
    done = ckpt("inspect", tmp_path / "a.npz")
    assert (done.code, "savez_compressed" in done.err) == (UNSUPPORTED, True)


@pytest.mark.parametrize("ending", [".zip", ".pt", ""])
def test_a_model_of_stable_baselines_is_read_with_its_optimizer(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"agent{ending}"
    path.write_bytes(AGENT.read_bytes())
    checkpoint = open_checkpoint(path)
    with zipfile.ZipFile(path) as archive:
        policy = torch.load(io.BytesIO(archive.read("policy.pth")), weights_only=True)
        optimizer = torch.load(io.BytesIO(archive.read("policy.optimizer.pth")), weights_only=True)
    assert list(checkpoint) == list(policy)
    assert all(np.array_equal(read(checkpoint[name].weight), one.numpy()) for name, one in policy.items())
    first = checkpoint["mlp_extractor.policy_net.0.weight"].states["exp_avg"]
    assert np.array_equal(read(first), optimizer["state"][0]["exp_avg"].numpy())
    assert (checkpoint.origin.engine, checkpoint.step) == ("stable-baselines3", 16)
    assert checkpoint.extras["data"]["n_steps"] == 16
    assert ckpt("verify", path).code == 0


def test_bits_of_a_model_of_stable_baselines_are_checked(tmp_path: Path) -> None:
    data: Any = bytearray(AGENT.read_bytes())
    at = data.index(read(open_checkpoint(AGENT)["action_net.weight"].weight).tobytes())
    data[at] ^= 1
    (tmp_path / "a.zip").write_bytes(data)
    assert ckpt("verify", tmp_path / "a.zip").code == BROKEN
    data = bytearray(AGENT.read_bytes())
    data[data.index(b'"num_timesteps": 16') + 18] ^= 1  # 17
    (tmp_path / "a.zip").write_bytes(data)
    with pytest.raises(CorruptError, match="do not match their checksum"):
        open_checkpoint(tmp_path / "a.zip")


def test_each_optimizer_of_an_agent_gets_the_parameters_that_it_numbers() -> None:
    path = AGENT.with_name("stable-baselines3-2.9-sac.zip")
    checkpoint = open_checkpoint(path)
    with zipfile.ZipFile(path) as archive:
        for part in ("actor", "critic"):
            states = torch.load(io.BytesIO(archive.read(f"{part}.optimizer.pth")), weights_only=True)["state"]
            names = [name for name in checkpoint if name.startswith(f"{part}.")]
            assert len(names) == len(states) > 5
            for number, name in enumerate(names):
                moment = read(checkpoint[name].states["exp_avg"])
                assert np.array_equal(moment, states[number]["exp_avg"].numpy())
    assert "ent_coef_optimizer" in checkpoint.extras
    assert not any("critic_target" in name for group in checkpoint.groups for name in group.names)
