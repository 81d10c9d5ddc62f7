"""A universal checkpoint in one file: the same values, readable by ranges, damage named, hostile files refused."""

import json
import os
import re
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import FileBlob, read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from ckpt_formats.universal.delta_format import Delta
from ckpt_formats.universal.single_file import last_entries
from damage import BROKEN, SAMPLES, UNSUPPORTED, ckpt
from held import array, checkpoint, contents, everything, flip, parameter

EFFORT = Execution(2, 1 << 20)
ZERO1 = next(SAMPLES.glob("deepspeed-*-zero1-bf16-dp2"))


def source() -> Checkpoint:
    """States of all kinds in several packs, some with lengths that are no multiple of 8."""
    odd = [
        parameter(f"odd{i}", {"model": array(np.dtype("float32"), (3, 5 + i)), "exp_avg": np.ones(3, np.int8)})
        for i in range(4)
    ]
    return checkpoint([*everything().parameters.values(), *odd], extras={"epoch": 2})


@pytest.mark.parametrize(
    "options", [{}, {"pack_nbytes": 1}, {"codec": "auto"}, {"codec": "auto", "pack_nbytes": 300}], ids=str
)
def test_single_file_has_the_values_of_the_folder(options: dict[str, object], tmp_path: Path) -> None:
    save(source(), tmp_path / "folder", Universal(**options), resources=EFFORT)
    save(source(), tmp_path / "one.ucp", Universal(**options), resources=EFFORT)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "one.ucp"]
    folder, one = open_checkpoint(tmp_path / "folder"), open_checkpoint(tmp_path / "one.ucp")
    assert contents(one) == contents(folder)
    assert (one.extras, one.groups, one.origin, one.aliases) == (
        folder.extras,
        folder.groups,
        folder.origin,
        folder.aliases,
    )
    assert {f.kind for f in find_problems(one, EFFORT)} <= {"copy"}
    save(one, tmp_path / "again", Universal(), resources=EFFORT)
    assert contents(open_checkpoint(tmp_path / "again")) == contents(folder)


def test_single_file_has_the_same_bytes_for_any_workers_and_packs(tmp_path: Path) -> None:
    for number, workers in enumerate((1, 2, 7)):
        save(
            source(),
            tmp_path / f"{number}.ucp",
            Universal(pack_nbytes=300),
            resources=Execution(workers, 1 << (10 + number)),
        )
    assert len({path.read_bytes() for path in tmp_path.iterdir()}) == 1


def test_any_reader_of_safetensors_sees_its_plain_states(tmp_path: Path) -> None:
    save(source(), tmp_path / "one.ucp", Universal(pack_nbytes=200), resources=EFFORT)
    one = open_checkpoint(tmp_path / "one.ucp")
    plain = {
        f"{name}/{to_stored(state)}": tensor
        for name, one in one.parameters.items()
        for state, tensor in one.states.items()
        if isinstance(tensor.fragments[0].blob, FileBlob)
    }
    with safe_open(tmp_path / "one.ucp", "pt") as opened:
        names = set(opened.keys())
        assert names - plain.keys() == {"ckpt.index", "ckpt.manifest"}
        for name, tensor in plain.items():
            values = opened.get_tensor(name)
            assert str(values.dtype) == f"torch.{tensor.dtype.name}"
            assert values.reshape(-1).view(torch.uint8).numpy().tobytes() == read(tensor).tobytes()


def test_states_of_whole_words_are_aligned(tmp_path: Path) -> None:
    save(source(), tmp_path / "one.ucp", Universal(pack_nbytes=200), resources=EFFORT)
    blobs = [
        t.fragments[0].blob
        for p in open_checkpoint(tmp_path / "one.ucp").parameters.values()
        for t in p.states.values()
    ]
    stored = [blob for blob in blobs if isinstance(blob, FileBlob)]
    assert any(blob.offset % 8 for blob in stored)
    assert all(blob.offset % 8 == 0 for blob in stored if np.prod(blob.shape) * blob.dtype.itemsize % 8 == 0)
    assert min(blob.offset for blob in stored) % 4096 == 0


def test_single_file_reads_a_state_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(source(), tmp_path / "one.ucp", Universal(), resources=EFFORT)
    reads = list[int]()
    preadv = os.preadv

    def counted(file: int, buffers: Any, offset: int) -> int:
        reads.append(offset)
        return preadv(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    one = Universal().read(tmp_path / "one.ucp", ReadOptions())
    assert reads == []  # nothing but its first bytes, the manifest and the index was read
    tensor = next(
        t
        for p in one.parameters.values()
        for t in p.states.values()
        if isinstance(t.fragments[0].blob, FileBlob) and t.nbytes
    )
    with Reader() as reader:
        read(tensor, reader)
    assert reads == [tensor.fragments[0].blob.offset]


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    path = tmp_path / "one.ucp"
    values = np.arange(3, dtype=np.float32)
    save(checkpoint([parameter("w", {"model": values, "exp_avg": values})]), path, Universal(), resources=EFFORT)
    nbytes, last = path.stat().st_size, last_entries(path)
    header = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
    for byte in [*range(250), *range(header - 8, nbytes)]:
        flip(path, byte, byte % 8)
        if header <= byte < last.begin:
            assert [(f.kind, f.tensors) for f in find_problems(open_checkpoint(path), EFFORT)] == [("checksum", ("w",))]
        elif byte >= last.begin:
            with pytest.raises(CorruptError):
                open_checkpoint(path)
        else:
            with suppress(CorruptError):  # what finds the index and the manifest
                assert [f.kind for f in find_problems(open_checkpoint(path), EFFORT)] == ["checksum"], byte
        flip(path, byte, byte % 8)
    assert find_problems(open_checkpoint(path), EFFORT) == []


def head(change: Callable[[str], str]) -> Callable[[bytes], bytes]:
    """Change the metadata of the header; its length stays."""

    def changed(data: bytes) -> bytes:
        (length,) = struct.unpack("<Q", data[:8])
        text = change(data[8 : 8 + length].decode().rstrip(" "))
        return data[:8] + text.encode().ljust(length) + data[8 + length :]

    return changed


def place(name: str, offset: int, nbytes: int) -> Callable[[bytes], bytes]:
    return head(lambda text: re.sub(rf'"{name}":"\d+ \d+"', f'"{name}":"{offset} {nbytes}"', text, count=1))


HOSTILE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "not a universal checkpoint in one file"),
    "cut": (lambda data: data[:-1], "truncated|describe"),
    "cut in half": (lambda data: data[: len(data) // 2], "describe"),
    "longer": (lambda data: data + b"x", "describe"),
    "no metadata": (head(lambda text: text.replace("ckpt", "ckqt", 1)), "not a universal checkpoint in one file"),
    "a manifest elsewhere": (place("manifest", 0, 100), "describe"),
    "a manifest of no length": (place("manifest", 5000, 0), "describe"),
    "an index elsewhere": (place("index", 1 << 61, 100), "describe"),
    "an index of an absurd length": (place("index", 4096, 1 << 61), "describe"),
    "a manifest of numbers without end": (place("manifest", 10**30, 1), "not a universal checkpoint in one file"),
    "another file of safetensors": (
        lambda data: struct.pack("<Q", 64) + b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.ljust(64) + b"x",
        "not a universal checkpoint in one file",
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_in_the_right_words(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "one.ucp"
    save(everything(), path, Universal(), resources=EFFORT)
    change, words = HOSTILE[kind]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(CorruptError, match=words):
        open_checkpoint(path)
    for command in (("inspect", path), ("verify", path), ("convert", path, tmp_path / "out")):
        done = ckpt(*command)
        assert done.code == BROKEN, done
        assert "Traceback" not in done.err
    assert [one.name for one in tmp_path.iterdir()] == ["one.ucp"]


def test_a_manifest_that_states_other_packs_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.ucp"
    save(everything(), path, Universal(), resources=EFFORT)
    data, last = path.read_bytes(), last_entries(path)
    fields = json.loads(last.manifest.read())
    del fields["checksum"]
    fields["packs"][0][0] += 8
    body = json.dumps(fields, separators=(",", ":")).encode().removeprefix(b"{")
    body = body.ljust(last.manifest.nbytes - len(b'{"checksum":"xxh3-128:",\n') - 32, b"\n")
    text = b'{"checksum":"xxh3-128:%s",\n' % xxhash.xxh3_128_hexdigest(body).encode() + body
    path.write_bytes(data[: last.manifest.offset] + text[: last.manifest.nbytes])
    with pytest.raises(CorruptError):
        open_checkpoint(path)


def test_single_file_refuses_more_states_than_a_header_can_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckpt_formats.universal.format.MAX_HEADER", 1000)
    with pytest.raises(UnsupportedError, match="one file cannot hold"):
        save(everything(), tmp_path / "one.ucp", Universal(), resources=EFFORT)
    assert list(tmp_path.iterdir()) == []


def test_single_file_refuses_a_delta(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="a delta is a folder"):
        Delta(stored_against=None).for_target(tmp_path / "delta.ucp").plan(everything())


def test_an_interrupted_job_goes_on_and_gives_the_same_bytes(tmp_path: Path) -> None:
    save(source(), tmp_path / "good.ucp", Universal(pack_nbytes=1), resources=EFFORT)

    def stop(done: int, total: int) -> None:
        if done > 0.95 * total:
            raise KeyboardInterrupt

    def interrupt() -> None:
        with pytest.raises(KeyboardInterrupt):
            save(source(), one, Universal(pack_nbytes=1), resources=Execution(1, 1 << 20), progress=stop)
        assert not one.exists()

    one, staged = tmp_path / "one.ucp", tmp_path / ".one.ucp.ckpt-partial" / "data" / "checkpoint.ucp"
    interrupt()
    resumed = save(source(), one, Universal(pack_nbytes=1), resources=EFFORT).resumed
    assert resumed > 0
    assert one.read_bytes() == (tmp_path / "good.ucp").read_bytes()
    one.unlink()
    interrupt()
    first = next(iter(open_checkpoint(tmp_path / "good.ucp").parameters.values())).states[MASTER].fragments[0].blob
    assert isinstance(first, FileBlob)
    with staged.open("r+b") as file:  # as after a crash of the machine, before this had reached the disk
        file.seek(first.offset)
        file.write(bytes(first.span))
    again = save(source(), one, Universal(pack_nbytes=1), resources=EFFORT)
    assert 0 < again.resumed < resumed
    assert one.read_bytes() == (tmp_path / "good.ucp").read_bytes()


def test_states_that_are_not_encoded_are_written_once(tmp_path: Path) -> None:
    """Packs that were put together would be written twice. The copies are rounded masters, which are not stored."""
    values = np.random.default_rng(1).standard_normal((8, 1 << 17), np.float32)
    save(
        checkpoint(
            parameter(f"p{i}", {MODEL: row.astype(DTYPES["bfloat16"]), MASTER: row, "exp_avg": row[::-1].copy()})
            for i, row in enumerate(values)
        ),
        tmp_path / "source",
        Universal(),
        resources=EFFORT,
    )
    before = _written()
    save(open_checkpoint(tmp_path / "source"), tmp_path / "one.ucp", Universal(pack_nbytes=1 << 20), resources=EFFORT)
    nbytes = (tmp_path / "one.ucp").stat().st_size
    assert nbytes > 2 * values.nbytes
    assert nbytes <= _written() - before < 1.02 * nbytes


def _written() -> int:
    """The bytes that this process has written, copies within the system counted."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def test_the_original_file_comes_back_from_it(tmp_path: Path) -> None:
    torch.save({"model": {"w": torch.arange(400.0)}, "epoch": 3}, tmp_path / "file.pt")
    assert ckpt("compress", tmp_path / "file.pt", tmp_path / "small.ucp").code == 0
    assert "ckpt.original" in (tmp_path / "small.ucp").read_bytes()[:2000].decode(errors="ignore")
    assert ckpt("decompress", tmp_path / "small.ucp", tmp_path / "again.pt").code == 0
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again["epoch"] == 3
    assert torch.equal(again["model"]["w"], torch.arange(400.0))


def test_commands_take_it_and_a_folder_of_its_name_is_refused(tmp_path: Path) -> None:
    one = tmp_path / "one.ucp"
    assert ckpt("convert", ZERO1, one).code == 0
    shown = json.loads(ckpt("inspect", one, "--json").out)
    assert [file["file"] for file in shown["files"]] == [str(one)]
    assert ckpt("verify", one).code == 0
    assert ckpt("diff", ZERO1, one).code == 0
    assert ckpt("convert", one, tmp_path / "hf", "--to", "safetensors").code == 0
    for step in (1, 2):
        assert ckpt("append", tmp_path / "run", one, "--step", step).code == 0
    (tmp_path / "folder.ucp").mkdir()
    assert ckpt("inspect", tmp_path / "folder.ucp").code != 0
    one.rename(tmp_path / "one.safetensors")
    done = ckpt("inspect", tmp_path / "one.safetensors")
    assert done.code == UNSUPPORTED
    assert ".ucp" in done.err
