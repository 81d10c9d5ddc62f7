"""Model weights in safetensors, against the library of the format: both ways, in one file and in many."""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file, save_model

from ckpt.job import save
from ckpt.pipeline import Execution, plan
from ckpt_formats.containers.safetensors import TensorSlot, header_bytes, read_header
from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.dtypes import SAFETENSORS_TAGS
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    NotFoundError,
    OutputError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.tensor import read
from ckpt_formats.engines.safetensors import INDEX, Safetensors
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from held import SHAPES, STORABLE, array, arrays, checkpoint, contents, everything, folder, parameter

EFFORT = Execution(2, 1 << 20)


def write(source: Checkpoint, target: Path, shard_nbytes: int = 5 << 30) -> Checkpoint:
    save(source, target, Safetensors(shard_nbytes=shard_nbytes), resources=EFFORT)
    return Safetensors().read(target, ReadOptions())


def raw(values: torch.Tensor) -> bytes:
    flat = values.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def to_torch(values: np.ndarray) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(values.tobytes() or b"\0" * 16), dtype=getattr(torch, values.dtype.name))
    return flat[: values.size].reshape(values.shape).clone()


def all_types() -> dict[str, np.ndarray]:
    return {f"{dtype.name}{shape}": array(dtype, shape) for dtype in STORABLE for shape in SHAPES}


def test_safetensors_reads_what_the_library_writes(tmp_path: Path) -> None:
    state = {name: to_torch(values) for name, values in all_types().items()}
    save_file(state, tmp_path / "theirs.safetensors", {"format": "pt", "note": "kept"})
    reopened = open_checkpoint(tmp_path / "theirs.safetensors")
    assert {n: v[2] for (n, _), v in contents(reopened).items()} == {n: raw(t) for n, t in state.items()}
    assert reopened.extras == {"note": "kept"}


def test_library_of_safetensors_reads_what_ckpt_writes(tmp_path: Path) -> None:
    source = checkpoint([parameter(name, {MODEL: values}) for name, values in all_types().items()])
    for target in (tmp_path / "file.safetensors", tmp_path / "folder"):
        reopened = write(source, target)
        assert contents(reopened) == contents(source)
        loaded = load_file(target if target.is_file() else target / "model.safetensors")
        for name, values in all_types().items():
            assert (str(loaded[name].dtype)[6:], tuple(loaded[name].shape)) == (values.dtype.name, values.shape)
            assert raw(loaded[name]) == values.tobytes()


@given(
    st.dictionaries(st.text(st.characters(exclude_categories=["Cs"]), max_size=9), arrays(), max_size=6),
    st.integers(1, 300),
)
def test_any_cut_into_shards_holds_everything_once(held: dict[str, np.ndarray], size: int) -> None:
    held.pop("__metadata__", None)
    source = checkpoint([parameter(name, {MODEL: values}) for name, values in held.items()])
    with folder() as at:
        reopened = write(source, at / "target", size)
        assert contents(reopened) == contents(source)
        files = sorted((at / "target").glob("*.safetensors"))
        loaded = [load_file(file) for file in files]
        assert {n: raw(t) for one in loaded for n, t in one.items()} == {n: v.tobytes() for n, v in held.items()}
        assert sum(map(len, loaded)) == len(held)
        for one in loaded:
            assert len(one) <= 1 or sum(len(raw(t)) for t in one.values()) <= size
        if len(files) > 1:
            index = json.loads((at / "target" / INDEX).read_text())
            assert index["weight_map"] == {n: f.name for f, one in zip(files, loaded, strict=True) for n in one}
            assert index["metadata"]["total_size"] == sum(v.nbytes for v in held.values())
            assert [f.name for f in files] == [
                f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)
            ]
        else:
            assert [f.name for f in files] == ["model.safetensors"]


def test_safetensors_target_has_the_tensors_of_the_model_and_notes_name_the_rest(tmp_path: Path) -> None:
    source = everything()
    reopened = write(source, tmp_path / "target")
    assert {n for n, _ in contents(reopened)} == {n for n, p in source.parameters.items() if p.role != "extra"}
    assert {n: v for (n, _), v in contents(reopened).items()} == {
        n: v for (n, s), v in contents(source).items() if s == "model" and source.parameters[n].role != "extra"
    }
    lost = " ".join(map(str, Safetensors().plan(source).dropped))
    assert all(word in lost for word in ("master", "exp_avg", "epoch", "note", "nested"))
    assert Safetensors().plan(reopened).dropped == ()


def test_safetensors_writes_masters_when_there_is_no_copy(tmp_path: Path) -> None:
    master = array(np.dtype("f4"), (3,))
    reopened = write(checkpoint([parameter("w", {"master": master, "exp_avg": master * 0})]), tmp_path / "target")
    assert read(reopened.parameters["w"].states[MODEL]).tobytes() == master.tobytes()


def test_tied_tensors_are_named_as_the_ecosystem_names_them(tmp_path: Path) -> None:
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    net["b"].weight = net["a"].weight
    save_model(net, str(tmp_path / "theirs.safetensors"))
    theirs = open_checkpoint(tmp_path / "theirs.safetensors")
    assert dict(theirs.aliases) in ({"b.weight": "a.weight"}, {"a.weight": "b.weight"})
    write(theirs, tmp_path / "ours.safetensors")
    fresh = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    fresh["b"].weight = fresh["a"].weight
    from safetensors.torch import load_model

    assert load_model(fresh, tmp_path / "ours.safetensors") == (set(), [])
    assert {n: raw(t) for n, t in fresh.state_dict().items()} == {n: raw(t) for n, t in net.state_dict().items()}
    assert open_checkpoint(tmp_path / "ours.safetensors").aliases == theirs.aliases


def test_safetensors_keeps_ties_in_shards(tmp_path: Path) -> None:
    reopened = write(everything(), tmp_path / "target", 40)
    assert len(reopened.files) > 1
    assert reopened.aliases == everything().aliases


def shards(at: Path) -> tuple[Path, dict[str, str]]:
    """A folder such as transformers saves, with other files in it."""
    held = {f"w{i}": torch.full((4,), float(i)) for i in range(6)}
    where = {}
    for i in range(3):
        name = f"model-{i + 1:05}-of-00003.safetensors"
        part = dict(list(held.items())[2 * i : 2 * i + 2])
        save_file(part, at / name, {"format": "pt"})
        where |= dict.fromkeys(part, name)
    (at / INDEX).write_text(json.dumps({"metadata": {"total_size": 96}, "weight_map": where}))
    (at / "tokenizer.json").write_text("{}")
    return at, where


@pytest.mark.parametrize("ask", [lambda at: at, lambda at: at / INDEX], ids=["folder", "index"])
def test_a_folder_of_shards_reads_by_itself_or_by_its_index(ask: Callable[[Path], Path], tmp_path: Path) -> None:
    at, where = shards(tmp_path)
    assert detect(ask(at)).name == "safetensors"
    reopened = open_checkpoint(ask(at))
    assert list(reopened.parameters) == list(where)
    assert [read(p.states[MODEL])[0] for p in reopened.parameters.values()] == list(range(6))
    assert [shard.role for shard in reopened.files] == ["model"] * 3 + ["index"]


def test_shard_is_read_alone_when_named(tmp_path: Path) -> None:
    at, _ = shards(tmp_path)
    assert list(open_checkpoint(at / "model-00002-of-00003.safetensors").parameters) == ["w2", "w3"]


def say(at: Path, fields: Any) -> None:
    (at / INDEX).write_text(fields if isinstance(fields, str) else json.dumps(fields))


INDEX_DAMAGE: dict[str, tuple[Callable[[Path, dict[str, str]], object], type[CkptError]]] = {
    "a shard is missing": (lambda at, where: (at / where["w5"]).unlink(), IncompleteError),
    "a shard is cut": (lambda at, where: os.truncate(at / where["w5"], 100), CorruptError),
    "a shard is empty": (lambda at, where: (at / where["w5"]).write_bytes(b""), CorruptError),
    "a shard is a folder": (
        lambda at, where: [(at / where["w5"]).unlink(), (at / where["w5"]).mkdir()],
        IncompleteError,
    ),
    "a tensor is elsewhere": (lambda at, where: say(at, {"weight_map": {**where, "w0": where["w5"]}}), IncompleteError),
    "a tensor is nowhere": (lambda at, where: say(at, {"weight_map": {**where, "w9": where["w5"]}}), IncompleteError),
    "a tensor is not listed": (
        lambda at, where: say(at, {"weight_map": {k: v for k, v in where.items() if k != "w0"}}),
        IncompleteError,
    ),
    "a tensor is in two files": (
        lambda at, where: save_file({"w0": torch.ones(4), "w5": torch.ones(4), "w4": torch.ones(4)}, at / where["w5"]),
        CorruptError,
    ),
    "a path out": (lambda at, where: say(at, {"weight_map": {**where, "w0": "../secret.safetensors"}}), UnsafeError),
    "an absolute path": (lambda at, where: say(at, {"weight_map": {**where, "w0": "/etc/passwd"}}), UnsafeError),
    "the folder": (lambda at, where: say(at, {"weight_map": {**where, "w0": "."}}), UnsafeError),
    "the folder above": (lambda at, where: say(at, {"weight_map": {**where, "w0": ".."}}), UnsafeError),
    "no name": (lambda at, where: say(at, {"weight_map": {**where, "w0": ""}}), IncompleteError),
    "a name with a null": (
        lambda at, where: say(at, {"weight_map": {**where, "w0": "a\0b"}}),
        (IncompleteError, UnsafeError),
    ),
    "a name of absurd length": (
        lambda at, where: say(at, {"weight_map": {**where, "w0": "a" * 5000}}),
        (IncompleteError, UnsafeError, NotFoundError),
    ),
    "half a character": (
        lambda at, where: say(at, {"weight_map": {**where, "w0": "\ud800"}}),
        (IncompleteError, UnsafeError),
    ),
    "the index itself": (lambda at, where: say(at, {"weight_map": {**where, "w0": INDEX}}), CorruptError),
    "a number": (lambda at, where: say(at, {"weight_map": {**where, "w0": 5}}), CorruptError),
    "a list": (lambda at, where: say(at, {"weight_map": list(where)}), CorruptError),
    "no map": (lambda at, where: say(at, {"metadata": {}}), CorruptError),
    "not an object": (lambda at, where: say(at, "[]"), CorruptError),
    "not JSON": (lambda at, where: say(at, "{"), CorruptError),
    "a key twice": (lambda at, where: say(at, '{"weight_map": {"a": "x", "a": "y"}}'), CorruptError),
    "nested without end": (lambda at, where: say(at, "[" * 100_000), CorruptError),
    "no index, and a shard is missing": (
        lambda at, where: [(at / INDEX).unlink(), (at / where["w5"]).unlink()],
        IncompleteError,
    ),
}


@pytest.mark.parametrize("kind", INDEX_DAMAGE)
def test_an_index_that_does_not_fit_its_files_is_refused(kind: str, tmp_path: Path) -> None:
    damage, expected = INDEX_DAMAGE[kind]
    at, where = shards(tmp_path)
    open_checkpoint(at)
    damage(at, where)
    with pytest.raises(expected):
        open_checkpoint(at)


def file_of(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {
        "dtype": dtype,
        "shape": list(shape) if isinstance(shape, tuple) else shape,
        "data_offsets": list(offsets) if isinstance(offsets, tuple) else offsets,
    }


HOSTILE: dict[str, tuple[bytes, type[CkptError]]] = {
    "nothing": (b"", CorruptError),
    "seven bytes": (b"\0" * 7, CorruptError),
    "a header of no bytes": (file_of(b""), CorruptError),
    "a header of one byte": (file_of(b"{"), CorruptError),
    "a header longer than the file": (file_of({}, length=1000), CorruptError),
    "a header of 2**63 bytes": (file_of({}, length=2**63), CorruptError),
    "a header of 2**64 - 1 bytes": (file_of({}, length=2**64 - 1), CorruptError),
    "a header that is a list": (file_of([]), CorruptError),
    "a header that is not JSON": (file_of(b"{]"), CorruptError),
    "a header that is no UTF-8": (file_of(b'{"\xff": 1}'), CorruptError),
    "a header with a byte order mark": (file_of(b"\xef\xbb\xbf{}"), CorruptError),
    "a key twice": (file_of(b'{"a":%b,"a":%b}' % ((json.dumps(entry()).encode(),) * 2), bytes(8)), CorruptError),
    "nested without end": (file_of(b'{"a":' * 50_000), CorruptError),
    "a number without end": (
        file_of(b'{"a":{"dtype":"F32","shape":[' + b"9" * 10_000 + b'],"data_offsets":[0,8]}}', bytes(8)),
        CorruptError,
    ),
    "metadata of numbers": (file_of({"__metadata__": {"a": 1}}), CorruptError),
    "metadata that is a list": (file_of({"__metadata__": ["a"]}), CorruptError),
    "an entry that is a list": (file_of({"a": [1]}), CorruptError),
    "an entry without shape": (file_of({"a": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), CorruptError),
    "an unknown type": (file_of({"a": entry("F128")}, bytes(8)), UnsupportedError),
    "a type that is a list": (file_of({"a": entry(["F32"])}, bytes(8)), UnsupportedError),
    "a type of less than a byte, cut within one": (file_of({"a": entry("F4", (3,), (0, 2))}, bytes(2)), CorruptError),
    "a shape below zero": (file_of({"a": entry(shape=(-2,))}, bytes(8)), CorruptError),
    "a shape of minus times minus": (file_of({"a": entry(shape=(-2, -1))}, bytes(8)), CorruptError),
    "a shape of fractions": (file_of({"a": entry(shape=[2.0])}, bytes(8)), CorruptError),
    "a shape of true": (file_of({"a": entry("F64", [True])}, bytes(8)), CorruptError),
    "a shape that is a number": (file_of({"a": entry(shape=2)}, bytes(8)), CorruptError),
    "a shape that overflows": (file_of({"a": entry(shape=(2**33, 2**33))}, bytes(8)), CorruptError),
    "a shape that overflows to zero": (file_of({"a": entry(shape=(2**32, 2**32), offsets=(0, 0))}), CorruptError),
    "a shape of a hundred axes": (file_of({"a": entry(shape=(1,) * 100, offsets=(0, 4))}, bytes(4)), CorruptError),
    "offsets below zero": (file_of({"a": entry(offsets=(-8, 0))}, bytes(8)), CorruptError),
    "offsets the wrong way round": (file_of({"a": entry(offsets=(8, 0))}, bytes(8)), CorruptError),
    "offsets beyond the file": (file_of({"a": entry(offsets=(8, 16))}, bytes(8)), CorruptError),
    "offsets of another size": (file_of({"a": entry(offsets=(0, 12))}, bytes(12)), CorruptError),
    "three offsets": (file_of({"a": entry(offsets=(0, 4, 8))}, bytes(8)), CorruptError),
    "an offset that is a text": (file_of({"a": entry(offsets=["0", 8])}, bytes(8)), CorruptError),
    "entries that overlap": (file_of({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), CorruptError),
    "entries in one place": (file_of({"a": entry(), "b": entry()}, bytes(8)), CorruptError),
    "a hole between entries": (file_of({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)), CorruptError),
    "a hole before": (file_of({"a": entry(offsets=(4, 12))}, bytes(12)), CorruptError),
    "an empty tensor beyond the end": (file_of({"a": entry(shape=(0,), offsets=(90, 90))}), CorruptError),
    "data cut short": (file_of({"a": entry()}, bytes(7)), CorruptError),
    "data appended": (file_of({"a": entry()}, bytes(9)), CorruptError),
    "data without entries": (file_of({}, bytes(5)), CorruptError),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_header_is_refused_in_the_right_words(kind: str, tmp_path: Path) -> None:
    content, expected = HOSTILE[kind]
    path = tmp_path / "file.safetensors"
    path.write_bytes(content)
    with pytest.raises(expected, match=r"file\.safetensors"):
        open_checkpoint(path)


@given(st.data())
def test_a_file_changed_anywhere_in_its_header_is_refused_or_still_safe(data: st.DataObject) -> None:
    """There is no checksum; but no byte of a header makes us read outside the file, or fail in other words."""
    with folder() as at:
        path = at / "file.safetensors"
        save_file({"a": torch.arange(4), "b": torch.ones(2, 3)}, path, {"format": "pt"})
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 3))):
            content[data.draw(st.integers(0, len(content) - 57))] = data.draw(st.integers(0, 255))
        path.write_bytes(bytes(content))
        try:
            reopened = open_checkpoint(path)
        except CkptError:
            return
        assert sum(len(v[2]) for v in contents(reopened).values()) == 32 + 24


def test_a_file_cut_at_any_byte_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.arange(4), "b": torch.ones(2, 3)}, path)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptError):
            open_checkpoint(path)


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    path.write_bytes(file_of({}))
    with pytest.raises(NotFoundError, match="no tensor"):
        open_checkpoint(path)
    assert load_file(path) == {}
    reopened = write(checkpoint([]), tmp_path / "ours.safetensors")
    assert reopened.parameters == {}
    assert load_file(tmp_path / "ours.safetensors") == {}


@pytest.mark.parametrize("names", [["__metadata__"], ["w\ud800"]])
def test_names_that_the_format_cannot_hold_are_refused_before_anything_is_written(
    names: list[str], tmp_path: Path
) -> None:
    source = checkpoint([parameter(name, {MODEL: np.zeros(2, np.float32)}) for name in names])
    with pytest.raises(UnsupportedError):
        plan(source, tmp_path / "target", Safetensors())
    held = checkpoint([parameter("w", {MODEL: np.zeros(2, np.complex128)})])
    with pytest.raises(UnsupportedError, match="complex128"):
        plan(held, tmp_path / "target", Safetensors())


def test_a_target_that_is_a_file_is_one_file_however_large(tmp_path: Path) -> None:
    reopened = write(everything(), tmp_path / "x.safetensors", 1)
    assert (tmp_path / "x.safetensors").is_file()
    assert contents(reopened).keys() == {(n, MODEL) for n, p in everything().parameters.items() if p.role != "extra"}
    with pytest.raises(OutputError):
        write(everything(), tmp_path / "x.safetensors")


@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=5), st.sampled_from(list(SAFETENSORS_TAGS))
        ),
        max_size=4,
        unique_by=lambda pair: pair[0],
    ),
    st.integers(0, 3000),
)
def test_a_header_keeps_the_room_it_was_given(pairs: list[tuple[str, str]], room: int) -> None:
    from ckpt_formats.core.dtypes import DTYPES

    slots = [TensorSlot(name, DTYPES[tag], (0,), 0) for name, tag in pairs if name != "__metadata__"]
    room = room // 64 * 64
    head = header_bytes(slots, {"a": "b"}, room)
    assert len(head) >= room
    assert len(head) % 64 == 0
    assert len(header_bytes(slots, {"a": "b"}, len(head))) == len(head)
    with folder() as at:
        (at / "f").write_bytes(head)
        header = read_header(at / "f")
        assert {n: t.dtype.name for n, t in header.tensors.items()} == {n: d for n, d in pairs if n != "__metadata__"}


def test_reading_a_file_opens_its_header_only(tmp_path: Path) -> None:
    """A sparse file of 64 GiB is read in no time."""
    path = tmp_path / "file.safetensors"
    head = file_of({"a": entry("U8", (1 << 36,), (0, 1 << 36))})
    path.write_bytes(head)
    os.truncate(path, len(head) + (1 << 36))
    reopened = open_checkpoint(path)
    assert reopened.parameters["a"].nbytes == 1 << 36
    assert replace(reopened, parameters={}).files[0].nbytes == len(head) + (1 << 36)
