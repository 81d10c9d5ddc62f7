"""Seal files: what `ckpt seal` writes is compared by everything that reads the checkpoint afterwards."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt as library
from ckpt.copying import sealing
from ckpt_formats.containers import safetensors, safetensors_shards
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, OutputError, UnsupportedError
from ckpt_formats.core.folders import SEAL_SUFFIX
from ckpt_formats.registry import seal_file
from ckpt_formats.registry.seal_file import SealedFile, to_bytes
from ckpt_formats.registry.seal_places import IN_FOLDER
from damage import ckpt
from lying_store import LyingStore, lying
from object_stores import BUCKET, reached

CONFIG = {"model_type": "llama", "hidden_size": 8, "vocab_size": 300}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder of Hugging Face's with two files of weights and a configuration."""
    folder = tmp_path / "model"
    folder.mkdir()
    rng = np.random.default_rng(1)
    weights = {f"w{i}": rng.standard_normal((30 + i, 8), np.float32) for i in range(6)}
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    where = {name: names[i // 3] for i, name in enumerate(weights)}
    for file in names:
        save_file({n: w for n, w in weights.items() if where[n] == file}, folder / file, {"format": "pt"})
    size = sum(w.nbytes for w in weights.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    save_file({f"w{i}": np.full((50, 9), i + 1, np.float32) for i in range(4)}, path)
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_sealed_checkpoint_is_read_as_before(model: Path, tmp_path: Path) -> None:
    before = {name: np.asarray(one) for name, one in library.open(model).items()}
    done = sealing.seal(model)
    assert (done.files, done.seal_file) == (4, model / IN_FOLDER)
    assert done.nbytes == sum(one.stat().st_size for one in model.iterdir()) - done.seal_file.stat().st_size
    opened = library.open(model)
    assert opened.notices == ()
    assert all(np.array_equal(np.asarray(opened[name]), values) for name, values in before.items())
    assert library.verify(opened) == []
    assert library.save(opened, tmp_path / "u").checksums == 2
    assert [one for one in library.open(tmp_path / "u").extras if "seal" in one] == []


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "config.json", "model.safetensors.index.json"])
def test_flip_of_any_byte_is_noticed_by_every_command(model: Path, tmp_path: Path, name: str) -> None:
    sealing.seal(model)
    size = (model / name).stat().st_size
    for at in {0, 7, size // 3, size // 2, size - 1}:
        flip(model / name, at)
        for arguments in (["verify", model], ["convert", model, tmp_path / "u"], ["copy", model, tmp_path / "c"]):
            result = ckpt(*arguments)
            assert result.code == 20, (at, arguments, result)
        assert not (tmp_path / "u").exists()
        assert not (tmp_path / "c").exists()
        flip(model / name, at)
    assert ckpt("verify", model).code == 0


def test_flip_in_a_file_is_noticed_wherever_it_is_opened(weights: Path, tmp_path: Path) -> None:
    sealing.seal(weights)
    assert weights.with_name(weights.name + SEAL_SUFFIX).is_file()
    size = weights.stat().st_size
    for at in range(8, size, size // 9):
        flip(weights, at)
        with pytest.raises(CkptError):
            library.save(library.open(weights), tmp_path / "u")
        with pytest.raises(CkptError):
            library.save(library.open(weights.parent), tmp_path / "u")
        flip(weights, at)
    assert not (tmp_path / "u").exists()
    library.save(library.open(weights), tmp_path / "u")


def test_part_of_a_tensor_is_checked_with_its_range_alone(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({name: np.ones((3 << 20,), np.float32) for name in ("a", "b")}, path)
    sealing.seal(path)
    flip(path, path.stat().st_size - 5)
    library.save(library.open(path).select(only=["^a$"]), tmp_path / "a.safetensors")
    with pytest.raises(CorruptError, match="crc32"):
        library.save(library.open(path).select(only=["^b$"]), tmp_path / "b.safetensors")


def test_copy_of_a_sealed_folder_has_its_seal(model: Path, tmp_path: Path) -> None:
    sealing.seal(model)
    library.copy(model, tmp_path / "c")
    assert (tmp_path / "c" / IN_FOLDER).read_bytes() == (model / IN_FOLDER).read_bytes()
    moved = shutil.move(tmp_path / "c", tmp_path / "elsewhere")
    flip(Path(moved) / "config.json", 5)
    assert ckpt("verify", moved).code == 20


def test_file_that_is_gone_or_longer_is_named(model: Path) -> None:
    sealing.seal(model)
    (model / "config.json").write_text((model / "config.json").read_text() + " ")
    with pytest.raises(CorruptError, match="when it was sealed"):
        library.open(model)
    (model / "config.json").unlink()
    with pytest.raises(IncompleteError, match=r"config\.json"):
        library.open(model)


def test_seal_refuses_what_is_sealed_damaged_or_has_checksums(model: Path, weights: Path, tmp_path: Path) -> None:
    sealing.seal(model)
    with pytest.raises(OutputError, match="sealed already"):
        sealing.seal(model)
    library.save(library.open(weights), tmp_path / "u")
    with pytest.raises(UnsupportedError, match="checksums of all its bytes already"):
        sealing.seal(tmp_path / "u")
    with pytest.raises(UnsupportedError, match="does not write to the Hugging Face Hub"):
        sealing.seal("hf://org/model")
    weights.write_bytes(weights.read_bytes()[:-7])
    with pytest.raises(CkptError):
        sealing.seal(weights)
    assert not weights.with_name(weights.name + SEAL_SUFFIX).exists()


HOSTILE: dict[str, Callable[[list[object]], list[object]]] = {
    "the folder above": lambda row: ["../w.safetensors", *row[1:]],
    "an absolute path": lambda row: ["/etc/passwd", *row[1:]],
    "a NUL": lambda row: ["a\0", *row[1:]],
    "no name": lambda row: ["", *row[1:]],
    "a number as name": lambda row: [5, *row[1:]],
    "no ends": lambda row: [row[0], None, row[2]],
    "ends that go back": lambda row: [row[0], [9, 5], "0" * 16],
    "an end of zero": lambda row: [row[0], [0], "0" * 8],
    "a negative end": lambda row: [row[0], [-1], "0" * 8],
    "a huge end": lambda row: [row[0], [1 << 63], "0" * 8],
    "a fraction": lambda row: [row[0], [1.5], "0" * 8],
    "too few checksums": lambda row: [row[0], row[1], ""],
    "checksums that are no numbers": lambda row: [row[0], row[1], "x" * len(str(row[2]))],
    "another form": lambda row: [row],
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_seal_file_is_refused(weights: Path, change: Callable[[list[object]], list[object]]) -> None:
    place = sealing.seal(weights).seal_file
    ((name, one),) = seal_file.read(place).items()
    row: list[object] = [name, list(one.ends), "".join(f"{crc:08x}" for crc in one.crcs)]
    rows = {"format": "ckpt-seal", "version": 1, "files": [change(row)]}
    place.write_bytes(seal_file.sealed_json.dump(rows))
    with pytest.raises(CorruptError):
        library.open(weights)


def test_seal_file_is_read_only_in_a_version_that_is_known(weights: Path) -> None:
    place = sealing.seal(weights).seal_file
    content = place.read_bytes()
    place.write_bytes(seal_file.sealed_json.dump({"format": "ckpt-seal", "version": 2, "files": []}))
    with pytest.raises(UnsupportedError, match="version 2"):
        library.open(weights)
    place.write_bytes(content[:-9])
    with pytest.raises(CorruptError):
        library.open(weights)


def test_ranges_cover_every_byte_and_no_tensor_crosses_a_border(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({f"w{i}": np.ones((i * 300_000 + 1,), np.float32) for i in range(9)}, path)
    ((_, one),) = seal_file.read(sealing.seal(path).seal_file).items()
    assert one.nbytes == path.stat().st_size
    assert 3 <= len(one.ends) <= 6
    assert all(raw.seal is not None for *_, tensor in library.open(path).tensors() for raw in tensor.sources())
    assert SealedFile((), ()).nbytes == 0
    assert to_bytes({"a": one}) == to_bytes({"a": one})


def test_seal_option_seals_what_a_command_writes(model: Path, tmp_path: Path) -> None:
    result = ckpt("convert", model, tmp_path / "w.safetensors", "--seal", "--json")
    assert json.loads(result.out)["seal_file"] == str(tmp_path / f"w.safetensors{SEAL_SUFFIX}")
    flip(tmp_path / "w.safetensors", (tmp_path / "w.safetensors").stat().st_size - 1)
    assert ckpt("verify", tmp_path / "w.safetensors").code == 20
    assert ckpt("convert", model, tmp_path / "hf", "--to", "hf", "--seal").code == 0
    assert "checksums" in ckpt("verify", tmp_path / "hf").out
    refused = ckpt("convert", model, tmp_path / "u", "--seal")
    assert refused.code == 2
    assert not (tmp_path / "u").exists()


def test_dry_run_of_seal_writes_nothing(weights: Path) -> None:
    before = sorted(weights.parent.iterdir())
    assert ckpt("seal", weights, "--dry-run").code == 0
    assert sorted(weights.parent.iterdir()) == before


# Single files, and stores


def test_copy_of_a_single_file_has_its_seal(weights: Path, tmp_path: Path) -> None:
    sealing.seal(weights)
    assert library.copy(weights, tmp_path / "c.safetensors").files == 2
    place = tmp_path / f"c.safetensors{SEAL_SUFFIX}"
    assert seal_file.read(place) == {
        "c.safetensors": seal_file.read(weights.with_name(weights.name + SEAL_SUFFIX))[weights.name]
    }
    flip(tmp_path / "c.safetensors", 900)
    assert ckpt("verify", tmp_path / "c.safetensors").code == 20
    with pytest.raises(OutputError, match="exists"):
        library.copy(weights, tmp_path / "c.safetensors")
    flip(weights, 900)
    with pytest.raises(CorruptError, match="crc32"):
        library.copy(weights, tmp_path / "d.safetensors")
    assert not list(tmp_path.glob("d.*"))


def test_copy_of_one_file_of_a_sealed_folder_has_its_seal(model: Path, tmp_path: Path) -> None:
    sealing.seal(model)
    name = "model-00001-of-00002.safetensors"
    library.copy(model / name, tmp_path / "one.safetensors")
    assert (
        seal_file.read(tmp_path / f"one.safetensors{SEAL_SUFFIX}")["one.safetensors"]
        == seal_file.read(model / IN_FOLDER)[name]
    )


def test_sealing_opens_the_checkpoint_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, headers = list[Path](), safetensors.read_header
    monkeypatch.setattr(safetensors_shards, "read_header", lambda path: opened.append(path) or headers(path))
    sealing.seal(model)
    assert len(opened) == 2


@pytest.fixture(scope="module")
def store() -> Iterator[LyingStore]:
    with lying() as running, reached(running.server):
        yield running


def test_checkpoint_in_a_store_is_sealed_by_one_object(model: Path, store: LyingStore) -> None:
    for path in model.iterdir():
        store.truth.put(f"run/{path.name}", path.read_bytes())
    store.truth.seen.clear()
    done = sealing.seal(f"s3://{BUCKET}/run")
    assert (str(done.seal_file), done.files) == (f"s3://{BUCKET}/run/{IN_FOLDER}", 4)
    assert [one.key for one in store.truth.seen if one.kind == "put"] == [f"run/{IN_FOLDER}"]
    assert library.verify(library.open(f"s3://{BUCKET}/run")) == []
    sealing.seal(model)
    assert store.truth.objects[f"run/{IN_FOLDER}"].data == (model / IN_FOLDER).read_bytes()
    with pytest.raises(OutputError, match="sealed already"):
        sealing.seal(f"s3://{BUCKET}/run")
    there = store.truth.objects["run/model-00001-of-00002.safetensors"].data
    store.truth.put("run/model-00001-of-00002.safetensors", there[:-3] + bytes([there[-3] ^ 1]) + there[-2:])
    assert ckpt("verify", f"s3://{BUCKET}/run").code == 20


@pytest.mark.parametrize("beside", [True, False])
def test_seal_of_a_single_object_is_compared(beside: bool, weights: Path, store: LyingStore, tmp_path: Path) -> None:
    """`beside`: the folder has other objects, so that its listing shows the seal file."""
    sealing.seal(weights)
    library.copy(weights, f"s3://{BUCKET}/one/w.safetensors")
    store.truth.objects.pop("one/other", None)
    if beside:
        store.truth.put("one/other", b"x")
    opened = library.open(f"s3://{BUCKET}/one/w.safetensors")
    assert len(opened.seals) == 1
    data = store.truth.objects["one/w.safetensors"].data
    store.truth.put("one/w.safetensors", data[:-3] + bytes([data[-3] ^ 1]) + data[-2:])
    assert ckpt("verify", f"s3://{BUCKET}/one/w.safetensors").code == 20
    with pytest.raises(CorruptError, match="crc32"):
        library.copy(f"s3://{BUCKET}/one/w.safetensors", tmp_path / "back.safetensors")
    store.truth.objects.clear()


def test_target_in_a_store_is_sealed(weights: Path, store: LyingStore) -> None:
    done = ckpt("convert", weights, f"s3://{BUCKET}/new/w.safetensors", "--seal")
    assert done.code == 0, done.err
    assert set(store.truth.objects) == {"new/w.safetensors", f"new/w.safetensors{SEAL_SUFFIX}"}
