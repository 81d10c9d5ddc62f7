"""Distributed checkpoints, damaged or hostile: named by `verify`, refused by `convert`, never obeyed."""

import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex

from ckpt.job import save as save_checkpoint
from ckpt.pipeline import Execution
from ckpt_formats.core.errors import CkptError
from ckpt_formats.engines.dcp import DCP
from ckpt_formats.registry.opening import open_checkpoint
from damage import SAMPLES, ckpt
from dcp_states import loaded, save, state
from held import contents

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

WEIGHT = "model.layers.0.w"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks."""
    folder = tmp_path_factory.mktemp("whole")
    source = open_checkpoint(save(state(), folder / "one"))
    save_checkpoint(source, folder / "two", DCP(dp=2), resources=Execution(1))
    return folder / "two"


@pytest.fixture
def damaged(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "saved"))


def metadata(folder: Path) -> Metadata:
    result: Metadata = pickle.loads((folder / ".metadata").read_bytes())
    return result


def change(folder: Path, how: Callable[[Metadata], object]) -> None:
    """Let torch's own classes write the metadata again, changed."""
    stated = metadata(folder)
    how(stated)
    (folder / ".metadata").write_bytes(pickle.dumps(stated))


def place(folder: Path, fqn: str, offset: tuple[int, ...] | None = None) -> _StorageInfo:
    return metadata(folder).storage_data[MetadataIndex(fqn, offset)]


def refused(folder: Path, code: int, *says: str) -> None:
    """Neither command makes anything of it, and both say why."""
    for command in (("convert", folder, folder.parent / "out"), ("verify", folder)):
        done = ckpt(*command)
        assert done.code == code, done
        assert "Traceback" not in done.err
        for text in says:
            assert text in done.err + done.out, done
    assert not (folder.parent / "out").exists()


def test_a_flipped_bit_is_named_and_refused_though_torch_loads_it(damaged: Path) -> None:
    at = place(damaged, WEIGHT, (3, 0))
    file = damaged / at.relative_path
    with file.open("r+b") as opened:
        opened.seek(at.offset + 704 + 5)
        byte = opened.read(1)[0]
        opened.seek(at.offset + 704 + 5)
        opened.write(bytes([byte ^ 1]))
    loaded(damaged)
    done = ckpt("verify", damaged)
    assert done.code == 20
    assert "`model.layers.0.w` [3:6, 0:4]: 48 bytes do not fit their crc32 checksum" in done.out
    refused(damaged, 20, "layers.0.w", at.relative_path)


def test_a_missing_chunk_is_refused_though_torch_fills_it_with_garbage(damaged: Path) -> None:
    change(damaged, lambda m: m.state_dict_metadata[WEIGHT].chunks.pop())
    loaded(damaged)
    refused(damaged, 20, "layers.0.w", "at [3, 0] is stored, but lists no such block")


def test_dcp_states_a_short_file_once_for_all_its_tensors(tmp_path: Path) -> None:
    folder = shutil.copytree(SAMPLES / "dcp-2.13-fsdp2-w2", tmp_path / "short")
    file = folder / "__0_0.distcp"
    nbytes = file.stat().st_size
    os.truncate(file, 100_000)
    for options in ((), ("--quick",)):
        (finding,) = json.loads(ckpt("verify", folder, "--json", *options).out)["findings"]
        count = len(set(finding["tensors"]))
        assert count > 20
        what = f"the file is cut short: 100,000 bytes, {nbytes:,} expected; {count} parameters affected"
        assert (finding["what"], finding["where"]) == (what, str(file))
    done = ckpt("convert", folder, tmp_path / "out")
    assert (done.code, done.err.count("cut short"), f"where: {file}" in done.err) == (20, 1, True)


def test_dcp_names_the_block_when_a_chunk_has_no_place(damaged: Path) -> None:
    change(damaged, lambda m: m.storage_data.pop(MetadataIndex(WEIGHT, (3, 0))))
    refused(damaged, 20, "layers.0.w", "no file holds block [3:6, 0:4]")


def test_dcp_refuses_chunks_that_overlap(damaged: Path) -> None:
    def overlapping(stated: Metadata) -> None:
        stated.state_dict_metadata[WEIGHT].chunks[1].offsets = torch.Size((2, 0))
        stated.storage_data[MetadataIndex(WEIGHT, (2, 0))] = stated.storage_data.pop(MetadataIndex(WEIGHT, (3, 0)))

    change(damaged, overlapping)
    refused(damaged, 20, "layers.0.w", "overlap")


def test_dcp_refuses_a_chunk_outside_of_its_tensor(damaged: Path) -> None:
    change(damaged, lambda m: setattr(m.state_dict_metadata[WEIGHT], "size", torch.Size((5, 4))))
    refused(damaged, 20, "layers.0.w", "lies outside the shape [5, 4]")


def test_dcp_names_a_missing_file(damaged: Path) -> None:
    (damaged / "__1_0.distcp").unlink()
    refused(damaged, 20, "__1_0.distcp is missing")


def test_dcp_refuses_items_that_were_swapped(damaged: Path) -> None:
    """Of another shape, that is: between two alike nothing in the files can tell."""

    def swapped(stated: Metadata) -> None:
        one, two = MetadataIndex(WEIGHT, (0, 0)), MetadataIndex("model.layers.0.b", (0,))
        places = stated.storage_data
        places[one], places[two] = places[two], places[one]

    change(damaged, swapped)
    refused(damaged, 20, "the item holds float32 [3], but .metadata states float32 [3, 4]")


@pytest.mark.parametrize(
    "file",
    ["../outside.distcp", "/etc/passwd", "a/../../b", "..", ".", "", "a\0b", "..\\b"],
    ids=["parent", "absolute", "inside", "dots", "itself", "nothing", "nul", "windows"],
)
def test_dcp_refuses_a_path_that_leads_elsewhere(file: str, damaged: Path) -> None:
    change(damaged, lambda m: setattr(m.storage_data[MetadataIndex(WEIGHT, (3, 0))], "relative_path", file))
    refused(damaged, 21, "not a file inside its folder")


@pytest.mark.parametrize(
    ("offset", "length"), [(1 << 62, 100), (0, 1 << 62), (-1, 100), (0, -1), (0, 0), (1 << 70, 5)], ids=str
)
def test_dcp_refuses_items_at_impossible_places(offset: int, length: int, damaged: Path) -> None:
    def moved(stated: Metadata) -> None:
        info = stated.storage_data[MetadataIndex(WEIGHT, (3, 0))]
        info.offset, info.length = offset, length

    change(damaged, moved)
    refused(damaged, 20)


@pytest.mark.parametrize("shape", [(1 << 61, 4), (1 << 40, 1 << 40), (1 << 62,), (2,) * 65], ids=str)
def test_dcp_refuses_absurd_shapes(shape: tuple[int, ...], damaged: Path) -> None:
    def absurd(stated: Metadata) -> None:
        stored = stated.state_dict_metadata[WEIGHT]
        stored.size, start = torch.Size(shape), (0,) * len(shape)
        stored.chunks = [ChunkStorageMetadata(torch.Size(start), torch.Size(shape))]
        stated.storage_data[MetadataIndex(WEIGHT, start)] = stated.storage_data.pop(MetadataIndex(WEIGHT, (3, 0)))

    change(damaged, absurd)
    refused(damaged, 20)


class Attack:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.canary}",)


def test_dcp_refuses_metadata_that_would_run_code(damaged: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    change(damaged, lambda m: setattr(m, "planner_data", Attack(canary)))
    refused(damaged, 21, "posix.system", "Nothing was run")
    assert not canary.exists()
    metadata(damaged)
    assert canary.exists(), "it does run where pickle is used"


@pytest.mark.parametrize("where", ["object", "tensor"])
def test_dcp_refuses_items_that_would_run_code(where: str, damaged: Path, tmp_path: Path) -> None:
    canary, item = tmp_path / "canary", io.BytesIO()
    torch.save(Attack(canary), item)
    fqn, offset = ("train_state.note", None) if where == "object" else (WEIGHT, (3, 0))
    (damaged / "more.distcp").write_bytes(item.getvalue())

    def planted(stated: Metadata) -> None:
        stated.storage_data[MetadataIndex(fqn, offset)] = _StorageInfo("more.distcp", 0, len(item.getvalue()))

    change(damaged, planted)
    refused(damaged, 21, "posix.system", "Nothing was run")
    assert not canary.exists()


def planted(folder: Path, fqn: str, offset: tuple[int, ...] | None, item: bytes, *transforms: str) -> None:
    """Put other bytes in the place of an item."""
    (folder / "more.distcp").write_bytes(item)
    info = _StorageInfo("more.distcp", 0, len(item), list(transforms) or None)
    change(folder, lambda m: m.storage_data.__setitem__(MetadataIndex(fqn, offset), info))


@pytest.mark.parametrize("fqn", [WEIGHT, "train_state.note"])
def test_dcp_refuses_items_that_decode_to_gigabytes(fqn: str, damaged: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    bomb = b"".join(compressor.compress(bytes(1 << 24)) for _ in range(64)) + compressor.flush()
    planted(damaged, fqn, (3, 0) if fqn == WEIGHT else None, bomb, "stream.zstd/1")
    refused(damaged, 21, "it would exhaust memory")


def test_dcp_refuses_a_stream_that_needs_a_huge_window(damaged: Path) -> None:
    pytest.importorskip("zstandard")
    # A frame with a window of 2^41 bytes and one empty block, by hand (RFC 8878, 3.1.1).
    planted(damaged, WEIGHT, (3, 0), b"\x28\xb5\x2f\xfd\x00\xf8\x01\x00\x00", "stream.zstd/1")
    refused(damaged, 21, "window")


def test_dcp_finds_damage_inside_a_compressed_item(damaged: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    item = io.BytesIO()
    torch.save(torch.ones(3, 4), item)
    data = bytearray(item.getvalue())
    data[704 + 7] ^= 1
    planted(damaged, WEIGHT, (3, 0), zstandard.compress(bytes(data)), "stream.zstd/1")
    refused(damaged, 20, "layers.0.w", "do not fit their crc32 checksum")
    planted(damaged, WEIGHT, (3, 0), zstandard.compress(item.getvalue())[:-9], "stream.zstd/1")
    refused(damaged, 20, "layers.0.w")


def test_dcp_refuses_unknown_transformations(damaged: Path) -> None:
    planted(damaged, WEIGHT, (3, 0), b"secret", "stream.aes@example/2")
    refused(damaged, 22, "stream.aes@example/2")


def test_dcp_refuses_items_of_another_kind(damaged: Path) -> None:
    item = io.BytesIO()
    with zipfile.ZipFile(item, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps([1]))
    planted(damaged, WEIGHT, (3, 0), item.getvalue())
    refused(damaged, 20, "the item holds no tensor")


def test_dcp_carries_objects_of_any_bytes(damaged: Path) -> None:
    planted(damaged, "train_state.note", None, b"neither an archive nor a pickle")
    assert open_checkpoint(damaged).extras["train_state"]["note"] == b"neither an archive nor a pickle"


def test_dcp_states_that_a_save_was_broken_off(damaged: Path) -> None:
    (damaged / ".metadata").rename(damaged / ".metadata.tmp")
    refused(damaged, 20, "the save was broken off: there is .metadata.tmp")
    (damaged / ".metadata.tmp").unlink()
    refused(damaged, 20, "the save was broken off: there are data, but no .metadata")


def test_dcp_states_that_a_later_save_was_broken_off(damaged: Path) -> None:
    """It has overwritten the data, perhaps with values of the same shapes: the old metadata seem to fit."""
    (damaged / ".metadata.tmp").write_bytes(b"half of")
    refused(damaged, 20, "a later save was broken off")


def test_dcp_names_leftovers_of_another_save(damaged: Path, whole: Path) -> None:
    shutil.copy(damaged / "__1_0.distcp", damaged / "__5_0.distcp")
    (damaged / "__6_0.distcp").touch()
    checkpoint = open_checkpoint(damaged)
    (notice,) = checkpoint.notices
    assert "__5_0.distcp" in notice
    assert "__6_0.distcp" not in notice
    assert contents(checkpoint) == contents(open_checkpoint(whole))


def test_dcp_refuses_serialization_as_safetensors(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.filesystem import SerializationFormat

    save({"model": {"w": torch.ones(3, 4)}}, tmp_path / "saved", serialization_format=SerializationFormat.SAFETENSORS)
    refused(tmp_path / "saved", 22, "SerializationFormat.SAFETENSORS")


@pytest.mark.parametrize(
    "how",
    [
        lambda m: setattr(m, "state_dict_metadata", 5),
        lambda m: setattr(m, "storage_data", None),
        lambda m: setattr(m, "storage_data", {"a": 1}),
        lambda m: m.state_dict_metadata.__setitem__("x", 1),
        lambda m: m.state_dict_metadata.__setitem__(3, m.state_dict_metadata[WEIGHT]),
        lambda m: setattr(m.state_dict_metadata[WEIGHT], "chunks", 5),
        lambda m: setattr(m.state_dict_metadata[WEIGHT], "chunks", [5]),
        lambda m: setattr(m.state_dict_metadata[WEIGHT], "size", [6, 4]),
        lambda m: setattr(m.state_dict_metadata[WEIGHT], "properties", 5),
        lambda m: setattr(m.state_dict_metadata[WEIGHT].chunks[0], "offsets", "ab"),
        lambda m: setattr(m.state_dict_metadata[WEIGHT].chunks[0], "sizes", (3,)),
        lambda m: m.planner_data.pop(WEIGHT),
        lambda m: m.planner_data.__setitem__(WEIGHT, ()),
        lambda m: m.planner_data.__setitem__(WEIGHT, (1.5,)),
        lambda m: m.planner_data.__setitem__(WEIGHT, ("model", "other")),
        lambda m: m.planner_data.__setitem__(WEIGHT, ("optim", "state")),
        lambda m: setattr(next(iter(m.storage_data.values())), "length", "many"),
        lambda m: setattr(next(iter(m.storage_data.values())), "relative_path", 5),
        lambda m: setattr(next(iter(m.storage_data.values())), "transform_descriptors", 5),
    ],
    ids=lambda how: str(how.__code__.co_firstlineno),
)
def test_dcp_refuses_metadata_that_make_no_sense(how: Callable[[Metadata], object], damaged: Path) -> None:
    change(damaged, how)
    refused(damaged, 20, ".metadata")


def test_dcp_refuses_a_list_with_a_huge_hole(tmp_path: Path) -> None:
    saved = save({"a": [torch.ones(2)]}, tmp_path / "saved")
    stated = metadata(saved)
    name = f"a.{1 << 40}"
    stated.planner_data = {name: ("a", 1 << 40)}
    stated.state_dict_metadata = {name: stated.state_dict_metadata["a.0"]}
    stated.storage_data = {MetadataIndex(name, (0,)): next(iter(stated.storage_data.values()))}
    (saved / ".metadata").write_bytes(pickle.dumps(stated))
    refused(saved, 20, "impossible places")


def test_dcp_refuses_a_pickle_of_something_else(damaged: Path) -> None:
    (damaged / ".metadata").write_bytes(pickle.dumps({"not": "metadata"}))
    with pytest.raises(CkptError, match="not the metadata of a distributed checkpoint"):
        open_checkpoint(damaged)
