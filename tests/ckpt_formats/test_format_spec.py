"""The universal format as docs/format.md has it: what ckpt writes is read by a reader that knows only the page."""

import base64
import json
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from ckpt.job import save
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, Parameter
from ckpt_formats.core.chunking import Chunking, chunk_sizes
from ckpt_formats.core.dtypes import DTYPES, SAFETENSORS_TAGS
from ckpt_formats.core.edits import cast
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import ArrayBlob, Tensor, read
from ckpt_formats.core.values import Global, Record, Size, StdDict, TensorName
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.index import TYPES
from ckpt_formats.universal.tables import Tables
from page_codecs import decode
from universal_decoder import UniversalDecoder
from universal_reader import CODED, DERIVED, ITEMSIZE, PLAIN, TAGS, UniversalReader, chunk_count, chunk_form

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "format.md").read_text("utf-8")
SAMPLES = sorted(path for path in (ROOT / "sample_checkpoints").glob("deepspeed-*") if path.is_dir())
RECORDED = ROOT / "sample_checkpoints" / "recorded-1" / "run.chain"
EVERY_SAMPLE = [
    RECORDED if path == RECORDED.parent else path
    for path in sorted((ROOT / "sample_checkpoints").iterdir())
    if (path.is_dir() or path.suffix == ".safetensors") and path.name not in ("damaged", "__pycache__")
]


def tensor_of(array):
    return Tensor.of(ArrayBlob(array))


def universal(source, out):
    save(source, out, writable("universal"))
    return out


def example(folder):
    """The checkpoint that the page writes out in full."""
    master = np.array([0.5, -1.25], np.float32)
    states = {"master": master, "exp_avg": np.zeros(2, np.float32), "model": master.astype(DTYPES["bfloat16"])}
    w = Parameter("w", "parameter", {name: tensor_of(array) for name, array in states.items()}, {"step": 3})
    group = Group({"lr": 0.1, "betas": (0.9, 0.95)}, ("w",))
    return Checkpoint(
        path=folder,
        origin=Origin("example", None, 3),
        parameters={"w": w},
        groups=(group,),
        extras={"seed": 7},
        aliases={"tied.w": "w"},
    )


def block(mark):
    return re.search(rf"<!-- example: {mark} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)[1]


def file_of(mark):
    """The bytes of a safetensors file that the page writes out: the header, then lines of a name and data in hex."""
    length, header, _, *lines = block(mark).splitlines()
    padded = header.encode().ljust(struct.unpack("<Q", bytes.fromhex(length))[0])
    return bytes.fromhex(length) + padded + b"".join(bytes.fromhex(line.partition(" ")[2]) for line in lines)


def plain_states(folder):
    """Every plain state of a universal checkpoint, as the reference library of safetensors reads it: its bytes."""
    opened, reader, values = {}, UniversalReader(folder), {}
    for pack in sorted((folder / "packs").glob("*")):
        with safe_open(pack, "pt") as file:
            opened |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - it is no mapping
    for name, entry in reader.entries.items():
        for state, row in entry["states"].items():
            if row["storage"] == PLAIN:
                tensor = opened[f"{name}/{state}".encode("utf-8", "backslashreplace").decode()]
                assert (str(tensor.dtype)[6:], list(tensor.shape)) == (row["dtype"], row["shape"])
                flat = tensor.reshape(-1)
                values[name, state] = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
                assert values[name, state] == reader.values(name, state)
    with safe_open(folder / "index.safetensors", "np") as file:
        assert len(file.keys()) == 23
    return values


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_a_reader_of_the_page_reads_what_we_write(sample, tmp_path):
    source = open_checkpoint(sample)
    reader = UniversalDecoder(universal(source, tmp_path / "u"))
    assert list(reader.entries) == list(source.parameters)
    for parameter, state, tensor in source.tensors():
        assert reader.values(parameter.name, to_stored(state)) == read(tensor).tobytes(), f"{parameter.name}/{state}"
        assert reader.entries[parameter.name]["states"][to_stored(state)]["shape"] == list(tensor.shape)


@pytest.mark.quick(5)
@pytest.mark.parametrize("sample", EVERY_SAMPLE, ids=lambda path: path.name)
def test_the_reference_library_reads_every_plain_state_of_what_we_convert(sample, tmp_path):
    source = open_checkpoint(sample)
    folder = universal(source, tmp_path / "u")
    values = plain_states(folder)
    for parameter, state, tensor in source.tensors():
        if (parameter.name, to_stored(state)) in values:
            assert values[parameter.name, to_stored(state)] == read(tensor).tobytes(), f"{parameter.name}/{state}"
        else:
            assert UniversalReader(folder).entries[parameter.name]["states"][to_stored(state)]["storage"] == DERIVED


@pytest.mark.quick(1)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_a_reader_of_the_page_reads_what_we_compress(sample, tmp_path):
    source = open_checkpoint(sample)
    random = np.random.default_rng(0)
    large = {
        "master": random.standard_normal((700, 400)).astype(np.float32),
        "exp_avg": random.standard_normal((700, 400)).astype(np.float32),
        "exp_avg_sq": random.standard_normal((700, 400)).astype(np.float32) ** 2,
    }
    large["model"] = large["master"].astype(DTYPES["bfloat16"])
    parameters = {
        **source.parameters,
        "large": Parameter("large", "parameter", {s: tensor_of(a) for s, a in large.items()}),
    }
    source = Checkpoint(
        path=source.path,
        origin=source.origin,
        parameters=parameters,
        groups=source.groups,
        extras=source.extras,
        aliases=source.aliases,
    )
    save(source, tmp_path / "u", writable("universal", codec="auto"))
    reader = UniversalDecoder(tmp_path / "u", decode)
    assert any(row["storage"] == CODED for entry in reader.entries.values() for row in entry["states"].values())
    for parameter, state, tensor in source.tensors():
        assert reader.values(parameter.name, to_stored(state)) == read(tensor).tobytes(), f"{parameter.name}/{state}"


def test_a_copy_in_half_precision_is_derived_as_the_page_says(tmp_path):
    source = example(tmp_path / "none")
    odd = np.array([1e-8, 1e6, -1e6, 65519.996, 65520, -0.0, 1 + 2**-11, 6.1e-5, np.inf], np.float32)
    wide = Parameter("w", "parameter", {"master": tensor_of(odd)})
    for dtype in ("fp16", "bf16"):
        halved = cast(Checkpoint(path=source.path, origin=source.origin, parameters={"w": wide}), dtype)
        reader = UniversalDecoder(universal(halved, tmp_path / dtype))
        assert reader.entries["w"]["states"]["param"]["storage"] == DERIVED


def test_a_copy_that_differs_in_one_bit_is_stored(tmp_path):
    source = example(tmp_path / "none")
    other = np.array([0.5, -1.2578125], DTYPES["bfloat16"])
    states = {**source.parameters["w"].states, "model": tensor_of(other)}
    changed = Checkpoint(path=source.path, origin=source.origin, parameters={"w": Parameter("w", "parameter", states)})
    reader = UniversalDecoder(universal(changed, tmp_path / "u"))
    assert reader.entries["w"]["states"]["param"]["storage"] == PLAIN
    assert reader.values("w", "param") == other.tobytes()


def test_the_example_of_the_page_is_what_we_write(tmp_path):
    folder = universal(example(tmp_path / "none"), tmp_path / "u")
    written = (folder / "manifest.json").read_text("utf-8")
    shown = block("manifest")

    def without_writer(text):
        return re.sub(r'"written_by": ".*"', "", text[57:])

    assert without_writer(written) == without_writer(shown)
    (folder / "manifest.json").write_text(shown, "utf-8")
    UniversalDecoder(folder)
    assert (folder / "index.safetensors").read_bytes() == file_of("index")
    assert [path.read_bytes() for path in (folder / "packs").iterdir()] == [file_of("pack")]
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "index.safetensors", "packs"}


def test_the_chunks_of_the_page_are_those_of_the_rule():
    table = PAGE.partition("| shape | a chunk | chunks |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\[.*?\])` \| (.*?) \| (\w[\w,]*)", table, re.MULTILINE)
    assert len(rows) == 8
    for text, form, count in rows:
        shape, words = json.loads(text), form.replace(",", "").split()
        chunk = (int(words[0]) * int(words[-1]), int(words[-1])) if "rows" in words else (int(words[0]), None)
        assert chunk_form(shape) == chunk, text
        assert chunk_count(shape) == (0 if count == "none" else int(count.rstrip(",").replace(",", ""))), text


@given(st.lists(st.one_of(st.integers(0, 5), st.integers(16_380, 16_390), st.integers(0, 2**21)), max_size=4))
def test_the_rule_of_the_page_is_that_of_the_code(shape):
    chunking = Chunking.default(tuple(shape))
    size, columns = chunk_form(shape)
    assert (size, chunk_count(shape)) == (chunking.chunk_size, chunking.count)
    assert columns == (None if len(chunking.chunk) == 1 else chunking.chunk[1])
    if math.prod(n or 1 for n in shape) < 2**62:
        elements, counts = chunk_sizes(np.array([len(shape)], np.uint8), np.array(shape, np.uint64))
        assert (elements.tolist(), counts.tolist()) == ([size], [chunking.count])


def test_the_page_names_every_column_and_every_table():
    section = PAGE.partition("## The index")[2].partition("## The manifest")[0]
    tags = {"u1": "U8", "<u2": "U16", "<u4": "U32", "<u8": "U64"}
    assert dict(re.findall(r"^\| `([\w.]+)` \| `(U\d+)`", section, re.MULTILINE)) == {
        name: tags[dtype] for name, dtype in TYPES.items()
    }
    tables = section.partition("**The tables**")[2]
    assert re.findall(r"^\| `(\w+)` \|", tables, re.MULTILINE) == list(Tables().to_json())
    fields = {
        "groups",
        "packs",
        "index",
        "content",
        "checksum",
        "written_by",
        "origin",
        "aliases",
        "extras",
        "original",
    }
    manifest = PAGE.partition("## The manifest")[2]
    assert all(f"| `{field}` |" in manifest for field in fields)


def test_names_and_texts_of_all_kinds_survive(tmp_path):
    names = ("", ".", "../../etc", "Größe/Ω", "a" * 300, "A", "\x00\n\u202e", "😀", "con", "-", "\u017f", "\ue000")
    one = tensor_of(np.zeros((), np.int16))
    parameters = {name: Parameter(name, "buffer", {"model": one}) for name in names}
    extras = {name: name for name in names}
    source = Checkpoint(
        path=tmp_path / "none", origin=Origin("example"), parameters=parameters, groups=(), extras=extras
    )
    reader = UniversalDecoder(universal(source, tmp_path / "u"))
    assert set(reader.entries) == set(names)
    assert reader.manifest["extras"] == extras


def test_the_page_names_every_element_type():
    assert {name: tag for name, tag in re.findall(r"`(\w+)` \| `(\w+)`", PAGE) if name in DTYPES} == SAFETENSORS_TAGS
    assert TAGS == SAFETENSORS_TAGS
    assert {name: DTYPES[name].itemsize for name in TAGS} == ITEMSIZE


def test_the_page_names_every_form_of_typed_json():
    cls = Global("m", "C")
    counted = StdDict(Global("collections", "Counter"), Global("builtins", "int"))
    counted.attrs = {"a": 1}
    values = [
        *(2**64, math.nan, 1j, b"\x00\x01", bytearray(b"\x00\x01"), (1,), {1}, frozenset({1}), Size((2, 3)), {1: 2}),
        *(np.zeros(2), np.float32(1), TensorName("t"), cls, counted),
        Record(cls, (1,), {"k": 1}, {"s": 1}, [1], [(1, 2)], True),
    ]
    forms = {form for value in values for form in encode(value)}
    assert forms == set(re.findall(r'`\{"(\$\w+)":', PAGE))
    fields = {*encode(values[-1])["$object"], *encode(counted)["$std"], "dtype", "data", "shape"}
    for field in fields:
        assert f"`{field}`" in PAGE or f'"{field}"' in PAGE, field
    assert encode(math.nan) == {"$float": "7ff8000000000000"}
    assert encode(b"\x00\x01") == {"$bytes": base64.b64encode(b"\x00\x01").decode()} == {"$bytes": "AAE="}
    assert encode(2**63) == 2**63
    assert encode(-(2**63) - 1) == {"$int": "-0x8000000000000001"}
    assert f'`{{"$int": "{hex(-(2**65))}"}}`' in PAGE
