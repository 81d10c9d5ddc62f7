"""Archives of NumPy and of Stable-Baselines3, and tars: read by their members, whatever their ending; no pickle is."""

import io
import pickle
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckpt_formats.core.errors import CkptError, CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.registry import FORMATS
from ckpt_formats.registry.marks import PathMarks
from ckpt_formats.registry.opening import open_checkpoint
from damage import BROKEN, ckpt

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
def test_numpy_is_read_whatever_the_ending(name: str, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as file:
        np.savez(file, **ARRAYS)
    checkpoint = open_checkpoint(tmp_path / name)
    assert checkpoint.parameters.keys() == ARRAYS.keys()
    for key, expected in ARRAYS.items():
        values = read(checkpoint.parameters[key].weight)
        assert (values.dtype, values.shape, values.tolist()) == (expected.dtype, expected.shape, expected.tolist())
    noted = [one for one in checkpoint.notices if "read as numpy, by its content" in one.text]
    assert bool(noted) is name.endswith((".pt", ".safetensors"))
    assert PathMarks(tmp_path / name).has_any(FORMATS["numpy"].marks)


def test_convert_and_verify_compare_checksums_of_numpy(tmp_path: Path) -> None:
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
def test_numpy_refuses_arrays_that_are_not_plain(
    member: bytes, error: type[CkptError], words: str, tmp_path: Path
) -> None:
    (tmp_path / "a.npz").write_bytes(stored(w=GOOD, x=member))
    with pytest.raises(error, match=words):
        open_checkpoint(tmp_path / "a.npz")


def test_numpy_reads_compressed_arrays(tmp_path: Path) -> None:
    large = {"large": np.arange(200_000, dtype=np.float32).reshape(500, 400), "turned": np.ones((300, 200), order="F")}
    np.savez_compressed(tmp_path / "a.npz", **ARRAYS, **large)
    checkpoint = open_checkpoint(tmp_path / "a.npz")
    for key, expected in (ARRAYS | large).items():
        values = read(checkpoint[key].weight)
        assert (values.dtype, values.shape, values.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())
    assert checkpoint["large"][499, 3] == large["large"][499, 3]
    assert checkpoint["large"][2, :5].tolist() == large["large"][2, :5].tolist()
    assert "7 checksums" in ckpt("verify", tmp_path / "a.npz").out
    assert ckpt("convert", tmp_path / "a.npz", tmp_path / "out.safetensors").code == 0
    converted = open_checkpoint(tmp_path / "out.safetensors")
    assert all(read(converted[key].weight).tobytes() == one.tobytes() for key, one in (ARRAYS | large).items())


def deflated(data: bytes, change: tuple[str, int] = ("", 0), more: bytes = b"") -> bytes:
    """An archive with one compressed member, of whose directory and header a field is changed by a number."""
    inflater = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    packed = inflater.compress(data) + inflater.flush() + more
    fields = {"crc": zlib.crc32(data), "packed": len(packed), "nbytes": len(data)}
    if change[0]:
        fields[change[0]] += change[1]
    same = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 0, *fields.values(), 5, 0)
    local = b"PK\3\4" + same + b"w.npy" + packed
    central = b"PK\1\2" + struct.pack("<H", 20) + same + bytes(14) + b"w.npy"
    return local + central + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 1, 1, len(central), len(local), 0)


def test_numpy_reads_the_archive_that_is_forged(tmp_path: Path) -> None:
    (tmp_path / "a.npz").write_bytes(deflated(GOOD))
    assert open_checkpoint(tmp_path / "a.npz")["w"][:].tolist() == [0, 0]


@pytest.mark.parametrize(
    ("content", "error", "words"),
    [
        (deflated(GOOD, ("nbytes", 1)), CorruptError, "does not match its checksum"),
        (deflated(GOOD, ("crc", 1)), CorruptError, "does not match its checksum"),
        (deflated(GOOD, ("nbytes", -1)), UnsafeError, "decodes to more than 75"),
        (deflated(GOOD, ("nbytes", 1 << 30)), CorruptError, "a size that its compressed bytes cannot have"),
        (deflated(GOOD, more=b"x"), CorruptError, "goes on after the end of its compressed stream"),
        (deflated(GOOD, ("packed", -1)), CorruptError, "followed by bytes that belong to no member|longer or shorter"),
        (deflated(npy(F4, bytes(1 << 20))), CorruptError, "bytes of values"),
        (deflated(npy(F4.replace("<f4", "|O"), b"cposix")), UnsupportedError, "Python objects is a pickle"),
    ],
    ids=["longer", "another checksum", "a bomb", "too long to be true", "more", "cut", "more values", "objects"],
)
def test_numpy_refuses_compressed_arrays_that_lie(
    content: bytes, error: type[CkptError], words: str, tmp_path: Path
) -> None:
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(error, match=words):
        open_checkpoint(tmp_path / "a.npz")


def test_numpy_finds_a_flipped_bit_in_a_compressed_array(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, w=np.arange(3000.0))
    data = bytearray(path.read_bytes())
    for at in range(60, 4000, 400):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(CkptError):
            open_checkpoint(path)


@pytest.mark.parametrize("ending", [".zip", ".pt", ""])
def test_stable_baselines3_reads_a_model_with_its_optimizer(ending: str, tmp_path: Path) -> None:
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


def test_stable_baselines3_finds_flipped_bits(tmp_path: Path) -> None:
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


def test_stable_baselines3_gives_each_optimizer_its_parameters() -> None:
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


def weights_file(**tensors: torch.Tensor) -> bytes:
    stream = io.BytesIO()
    torch.save(tensors or {"w": torch.arange(60.0).reshape(5, 12), "b": torch.ones(3, dtype=torch.bfloat16)}, stream)
    return stream.getvalue()


def tarred(members: dict[str, bytes], format: int = tarfile.PAX_FORMAT) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:", format=format) as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return stream.getvalue()


NEMO = {"./model_config.yaml": b"lr: 1\n", "./model_weights.ckpt": weights_file(), "./tokenizer.model": bytes(9)}


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ["model.nemo", "model.tar", "model.pt"])
def test_tar_reads_a_file_of_torch_in_place(name: str, format: int, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(tarred(NEMO | {"a/" * 60 + "long.txt": b"x"}, format))
    checkpoint = open_checkpoint(tmp_path / name)
    assert read(checkpoint["w"].weight).tolist() == torch.arange(60.0).reshape(5, 12).tolist()
    assert read(checkpoint["b"].weight).dtype.name == "bfloat16"
    assert checkpoint.origin.engine == "nemo"
    assert dict(checkpoint.extras) == {"model_config.yaml": "lr: 1\n", "long.txt": "x"}
    assert any(one.names == ("./tokenizer.model",) for one in checkpoint.notices)
    assert any("read as tar, by its content" in one.text for one in checkpoint.notices) is name.endswith(".pt")


def _with_size(size: bytes, kind: bytes) -> bytes:
    """The archive whose first header states another size and kind, with a true checksum."""
    head = bytearray(tarred(NEMO)[:512])
    head[124:136], head[156:157], head[148:156] = size, kind, b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + tarred(NEMO)[512:]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (tarred({"a.yaml": b"x"}), UnsupportedError, "no file of torch.save"),
        (tarred({"a.pt": weights_file(), "b.pt": weights_file()}), UnsupportedError, "2 files of tensors"),
        (tarred(NEMO)[:2000], CorruptError, "ends after the end of the archive"),
        (_with_size(b"77777777777\0", b"x"), UnsafeError, "would exhaust memory"),
        (_with_size(b"77777777777\0", b"0"), CorruptError, "ends after the end of the archive"),
        (_with_size(b"\x80" + b"\xff" * 11, b"0"), CorruptError, "tar|ends after"),
        (tarred({"model_weights.ckpt": pickle.dumps(object())}), UnsupportedError, "no file of torch.save"),
    ],
    ids=["no-weights", "two", "cut", "huge-header", "huge-member", "size-in-binary", "a-pickle"],
)
def test_tar_refuses_archives_that_lie(content: bytes, error: type[CkptError], message: str, tmp_path: Path) -> None:
    (tmp_path / "m.nemo").write_bytes(content)
    with pytest.raises(error, match=message):
        open_checkpoint(tmp_path / "m.nemo")
