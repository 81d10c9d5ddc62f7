"""Models of llama.cpp: files as gguf-py writes them, both ways, and hostile."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt_codecs.quantised.gguf_blocks import GGUF_TYPES
from ckpt_formats.containers import gguf as container
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError, CorruptError, UnsafeError, UnsupportedError
from ckpt_formats.core.tensor import read
from damage import ckpt as command
from held import array, bits

gguf = pytest.importorskip("gguf")

PLAIN = ("float32", "float16", "float64", "int8", "int16", "int32", "int64")


def write(path: Path, tensors: dict[str, np.ndarray], **values: Any) -> Path:
    """What gguf-py writes: values of all types, and tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    for kind in gguf.GGUFValueType:
        key = f"value.{kind.name.lower()}"
        if kind == gguf.GGUFValueType.ARRAY:
            for name, items in {"texts": ["a", "", "größe"], "ints": [1, -2, 3], "bools": [True, False]}.items():
                writer.add_array(f"{key}.{name}", items)
        elif kind == gguf.GGUFValueType.STRING:
            writer.add_string(key, "größe")
        else:
            writer.add_key_value(key, 1, kind)
    for key, value in values.items():
        writer.add_uint32(key.replace("__", "."), value)
    for name, values_of in tensors.items():
        writer.add_tensor(name, values_of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {f"{name}.weight": array(DTYPES[name], (3, 5, 2)) for name in PLAIN}
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf", {**tensors, "vector": array(DTYPES["float32"], (7,))})


def test_gguf_reads_and_writes_the_bytes_of_gguf_py(whole: Path, tmp_path: Path) -> None:
    run = ckpt.open(whole)
    for name in PLAIN:
        assert bits(read(run[f"{name}.weight"].weight)) == bits(array(DTYPES[name], (3, 5, 2)))
    values = run.extras["gguf"]
    assert values["value.string"] == "größe"
    assert values["value.array.texts"] == ["a", "", "größe"]
    assert values["value.array.ints"].tolist() == [1, -2, 3]
    assert (values["value.uint8"].dtype, values["value.bool"]) == (np.uint8, True)
    ckpt.save(run, tmp_path / "universal")
    ckpt.save(ckpt.open(tmp_path / "universal"), tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == whole.read_bytes()


@pytest.mark.parametrize("alignment", [1, 8, 4096])
def test_gguf_keeps_the_alignment(alignment: int, tmp_path: Path) -> None:
    tensors = {"a": array(DTYPES["float32"], (3,)), "b": array(DTYPES["float16"], (5, 1))}
    values = {container.ALIGNMENT_KEY: np.uint32(alignment)}
    slots = container.placed([(n, container.TYPES_OF_DTYPES[t.dtype], t.shape) for n, t in tensors.items()], alignment)
    assert [one.offset for one in slots] == [0, -(-12 // alignment) * alignment]
    data = b"".join(t.tobytes() + bytes(container.padding(t.nbytes, alignment)) for t in tensors.values())
    (tmp_path / "x.gguf").write_bytes(container.header_bytes(values, slots) + data)
    run = ckpt.open(tmp_path / "x.gguf")
    assert {name: bits(read(run[name].weight)) for name in run} == {name: bits(t) for name, t in tensors.items()}
    ckpt.save(run, tmp_path / "y.gguf")
    assert (tmp_path / "y.gguf").read_bytes() == (tmp_path / "x.gguf").read_bytes()


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16"])
def test_gguf_rounds_matrices_only(outtype: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    matrix, router = rng.normal(size=(2, 4, 32)).astype(np.float32)
    tensors = {"blk.0.attn_q.weight": matrix, "blk.0.ffn_gate_inp.weight": router, "blk.0.attn_norm.weight": router[0]}
    source = ckpt.open(write(tmp_path / "a.gguf", tensors))
    ckpt.save(source, tmp_path / "b.gguf", ckpt.Gguf(outtype=outtype))  # type: ignore[arg-type]
    written = {one.name: one for one in gguf.GGUFReader(tmp_path / "b.gguf").tensors}
    assert [one.tensor_type.name for one in written.values()] == [outtype.upper(), "F32", "F32"]
    values = gguf.dequantize(written["blk.0.attn_q.weight"].data, written["blk.0.attn_q.weight"].tensor_type)
    dtype = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[outtype]
    assert values.reshape(4, 32).tobytes() == matrix.astype(DTYPES[dtype]).astype(np.float32).tobytes()
    assert written["blk.0.ffn_gate_inp.weight"].data.tobytes() == router.tobytes()


@pytest.mark.parametrize("name", [*GGUF_TYPES, "Q2_K"])
def test_gguf_reads_blocks_as_gguf_py_does_and_writes_them_as_they_are(name: str, tmp_path: Path) -> None:
    """Random bytes, so all codes; those of types that ckpt does not compute stay bytes."""
    kind = container.BLOCK_TYPES[name]
    raw = np.random.default_rng(0).integers(0, 256, (2, 3, 2 * kind.nbytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    run = ckpt.open(tmp_path / "a.gguf")
    if name not in GGUF_TYPES:
        assert read(run["w"].weight).tobytes() == raw.tobytes()
        return
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    assert bits(read(run["w"].weight)) == bits(expected)
    assert bits(run["w"][1, 1:, 5:70]) == bits(expected[1, 1:, 5:70])
    ckpt.save(run, tmp_path / "b.gguf")
    assert (tmp_path / "b.gguf").read_bytes() == (tmp_path / "a.gguf").read_bytes()


def test_gguf_quantises_as_gguf_py_does(tmp_path: Path) -> None:
    matrix = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    source = ckpt.open(write(tmp_path / "a.gguf", {"w": matrix, "ragged": matrix[:, :40]}))
    ckpt.save(source, tmp_path / "b.gguf", ckpt.Gguf(outtype="q8_0"))
    written = {one.name: one for one in gguf.GGUFReader(tmp_path / "b.gguf").tensors}
    assert written["w"].data.tobytes() == gguf.quantize(matrix, gguf.GGMLQuantizationType.Q8_0).tobytes()
    assert written["ragged"].data.tobytes() == matrix[:, :40].tobytes()
    assert command("convert", tmp_path / "a.gguf", tmp_path / "c.gguf", "--quantise", "q8_0").code == 0
    assert (tmp_path / "c.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_gguf_refuses_what_it_cannot_hold(whole: Path, tmp_path: Path) -> None:
    run = ckpt.open(whole)
    for name, message in (("x" * 64, "over 63 bytes"), ("\ud800", "surrogate")):
        with pytest.raises(UnsupportedError, match=message):
            ckpt.save(run.rename({"vector": name}), tmp_path / "out.gguf")
    with pytest.raises(UnsupportedError, match="no element type uint8"):
        ckpt.save(run.replace({"vector": np.zeros(7, np.uint8)}), tmp_path / "out.gguf")
    done = command("convert", whole, tmp_path / "out.gguf", "--dtype", "float8_e4m3fn", "--allow-overflow")
    assert "no element type float8_e4m3fn" in done.err
    assert not (tmp_path / "out.gguf").exists()


# Hostile files


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes = b"k", code: int = 4, value: bytes = bytes(4)) -> bytes:
    return text(key) + struct.pack("<I", code) + value


def info(name: bytes = b"w", shape: tuple[int, ...] = (8,), code: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, code, offset)


def file(values: list[bytes], tensors: list[bytes], data: int = 32, version: int = 3, claims: Any = None) -> bytes:
    """A file with these values and tensors; `claims`: how many of both it claims, if not as many as it has."""
    numbers = claims or (len(tensors), len(values))
    head = struct.pack("<4sIQQ", b"GGUF", version, *numbers) + b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQ", 4, 0)


HOSTILE = {
    "another magic": (b"GGUX" + file([], [info()])[4:], CorruptError, "does not begin"),
    "version 1": (file([], [info()], version=1), UnsupportedError, "version 1"),
    "big-endian": (file([], [info()], version=3 << 24), UnsupportedError, "big-endian"),
    "many tensors": (file([], [info()], claims=(1 << 60, 0)), CorruptError, "claims"),
    "many values": (file([], [info()], claims=(1, 1 << 60)), CorruptError, "claims"),
    "a long key": (file([struct.pack("<Q", 1 << 60) + b"k"], [info()]), CorruptError, "needs"),
    "an empty key": (file([entry(b"")], [info()]), CorruptError, "empty"),
    "a key that is not UTF-8": (file([entry(b"\xff")], [info()]), CorruptError, "UTF-8"),
    "a key twice": (file([entry(), entry()], [info()]), CorruptError, "twice"),
    "an unknown type of values": (file([entry(code=13)], [info()]), CorruptError, "unknown type 13"),
    "neither true nor false": (file([entry(code=7, value=b"\2")], [info()]), CorruptError, "neither true"),
    "a long array": (
        file([entry(code=9, value=struct.pack("<IQ", 4, 1 << 40))], [info()]),
        CorruptError,
        "claims",
    ),
    "a long array of texts": (
        file([entry(code=9, value=struct.pack("<IQ", 8, 1 << 40))], [info()]),
        CorruptError,
        "claims",
    ),
    "an array of an unknown type": (
        file([entry(code=9, value=struct.pack("<IQ", 77, 1) + bytes(8))], [info()]),
        CorruptError,
        "unknown type 77",
    ),
    "arrays in arrays": (file([entry(code=9, value=nested(3000))], [info()]), UnsafeError, "in each other"),
    "an alignment of no power of two": (
        file([entry(b"general.alignment", 4, struct.pack("<I", 24))], [info()]),
        CorruptError,
        "power of two",
    ),
    "an alignment of 0": (file([entry(b"general.alignment")], [info()]), CorruptError, "power of two"),
    "an alignment that is text": (
        file([entry(b"general.alignment", 8, text(b"32"))], [info()]),
        CorruptError,
        "a str",
    ),
    "many axes": (file([], [info(shape=(1, 1, 1, 1, 8))]), CorruptError, "5 axes"),
    "a large shape": (file([], [info(shape=(1 << 40, 1 << 40))]), CorruptError, "not a shape"),
    "a large empty shape": (file([], [info(shape=(1 << 40, 1 << 40, 0))]), CorruptError, "not a shape"),
    "an unknown type": (file([], [info(code=99)]), UnsupportedError, "unknown type 99"),
    "part of a block": (file([], [info(shape=(33,), code=8)], 64), CorruptError, "whole blocks of Q8_0"),
    "an offset that is not aligned": (file([], [info(offset=8)], 64), CorruptError, "begins at byte 8"),
    "an offset behind the end": (file([], [info(offset=1 << 62)]), CorruptError, "expected 0"),
    "overlap": (file([], [info(), info(b"v")]), CorruptError, "expected 32"),
    "a gap": (file([], [info(), info(b"v", offset=64)], 96), CorruptError, "expected 32"),
    "a tensor twice": (file([], [info(), info(offset=32)], 64), CorruptError, "twice"),
    "a name of a tensor that is empty": (file([], [info(b"")]), CorruptError, "empty"),
    "a cut tensor": (file([], [info(shape=(9,))]), CorruptError, "describes"),
}


def test_gguf_takes_no_part_of_a_model_for_infinitely_many(tmp_path: Path) -> None:
    infinite = entry(b"split.count", 6, struct.pack("<f", float("inf")))
    (tmp_path / "x.gguf").write_bytes(file([infinite], [info()]))
    assert list(ckpt.open(tmp_path / "x.gguf")) == ["w"]


def test_gguf_refuses_an_array_that_would_take_more_memory_than_the_file(tmp_path: Path) -> None:
    values = {"general.architecture": "llama", "llama.block_count": np.zeros(100_001, np.uint8)}
    slots = container.placed([("token_embd.weight", container.BLOCK_TYPES["F32"], (8, 8))], 32)
    (tmp_path / "x.gguf").write_bytes(container.header_bytes(values, slots) + bytes(256))
    with pytest.raises(UnsafeError, match="has 100,001 values"):
        ckpt.use_names(ckpt.open(tmp_path / "x.gguf"), "hf")


@pytest.mark.parametrize("what", HOSTILE)
def test_gguf_refuses_hostile_files(what: str, tmp_path: Path) -> None:
    content, error, message = HOSTILE[what]
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(error, match=message):
        ckpt.open(tmp_path / "x.gguf")


def test_gguf_reads_an_unharmed_file_of_the_same_making(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(file([entry()], [info(), info(b"v", (4, 2), 0, 32)], 64))
    assert {name: one.shape for name, one in ckpt.open(tmp_path / "x").items()} == {"w": (8,), "v": (2, 4)}
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes() + b"more")
    assert any("4 B follow the last tensor" in str(notice) for notice in ckpt.open(tmp_path / "x").notices)


def test_gguf_of_flipped_bytes_is_refused_or_has_values(whole: Path, tmp_path: Path) -> None:
    rng, good = np.random.default_rng(1), whole.read_bytes()
    refused = 0
    for _ in range(100):
        content = bytearray(good)
        for at in rng.integers(0, 1200, 2):
            content[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.integers(256)])
        (tmp_path / "x.gguf").write_bytes(content)
        try:
            run = ckpt.open(tmp_path / "x.gguf")
            for one in run.values():
                read(one.weight)
        except CkptError:
            refused += 1
    assert refused > 10


def test_gguf_of_several_files_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "model-00001-of-00002.gguf", {"w": np.zeros(4, np.float32)}, split__count=2)
    done = command("inspect", tmp_path / "model-00001-of-00002.gguf")
    assert "one of the 2 files of a model" in done.err
    assert "llama-gguf-split --merge" in done.err
