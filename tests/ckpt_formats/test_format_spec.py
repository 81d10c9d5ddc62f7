"""The universal format as docs/format.md has it: what ckpt writes is read by a reader that knows only the page."""

import base64
import math
import re
import struct
from pathlib import Path

import numpy as np
import pytest

from ckpt.job import save
from ckpt.pipeline import Resources
from ckpt_codecs import from_config
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, Parameter
from ckpt_formats.core.dtypes import DTYPES, SAFETENSORS_TAGS
from ckpt_formats.core.edits import cast
from ckpt_formats.core.tensor import ArrayBlob, Tensor, read
from ckpt_formats.core.values import Global, Record, Size, StdDict, TensorName
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from universal_reader import ITEMSIZE, TAGS, UniversalReader

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "format.md").read_text("utf-8")
SAMPLES = sorted(path for path in (ROOT / "sample_checkpoints").glob("deepspeed-*") if path.is_dir())


def tensor_of(array):
    return Tensor.of(ArrayBlob(array))


def universal(source, out):
    save(source, out, writable("universal"), Resources())
    return out


def example(folder):
    """The checkpoint that the page writes out in full."""
    master = np.array([0.5, -1.25], np.float32)
    states = {"fp32": master, "exp_avg": np.zeros(2, np.float32), "param": master.astype(DTYPES["bfloat16"])}
    w = Parameter("w", "parameter", {name: tensor_of(array) for name, array in states.items()}, {"step": 3})
    group = Group({"lr": 0.1, "betas": (0.9, 0.95)}, ("w",))
    return Checkpoint(folder, Origin("example", None, 3), {"w": w}, (group,), {"seed": 7}, {"tied.w": "w"})


def block(mark):
    return re.search(rf"<!-- example: {mark} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)[1]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_a_reader_of_the_page_reads_what_we_write(sample, tmp_path):
    source = open_checkpoint(sample)
    reader = UniversalReader(universal(source, tmp_path / "u"))
    assert list(reader.entries) == list(source.parameters)
    for parameter, state, tensor in source.tensors():
        assert reader.values(parameter.name, state) == read(tensor).tobytes(), f"{parameter.name}/{state}"
        assert reader.entries[parameter.name]["states"][state]["shape"] == list(tensor.shape)


def decode(codec, data, shape, dtype, base, base_dtype):
    below = None if base is None else np.frombuffer(base, DTYPES[base_dtype]).reshape(shape)
    return from_config(dict(codec)).decode(data, tuple(shape), DTYPES[dtype], below).tobytes()


@pytest.mark.quick(1)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.name)
def test_a_reader_of_the_page_reads_what_we_compress(sample, tmp_path):
    source = open_checkpoint(sample)
    random = np.random.default_rng(0)
    large = {
        "fp32": random.standard_normal((700, 400)).astype(np.float32),
        "exp_avg": random.standard_normal((700, 400)).astype(np.float32),
        "exp_avg_sq": random.standard_normal((700, 400)).astype(np.float32) ** 2,
    }
    large["param"] = large["fp32"].astype(DTYPES["bfloat16"])
    parameters = {
        **source.parameters,
        "large": Parameter("large", "parameter", {s: tensor_of(a) for s, a in large.items()}),
    }
    source = Checkpoint(source.path, source.origin, parameters, source.groups, source.extras, source.aliases)
    save(source, tmp_path / "u", writable("universal", codec="auto"), Resources())
    reader = UniversalReader(tmp_path / "u", decode)
    assert any("chunk" in state for entry in reader.entries.values() for state in entry["states"].values())
    for parameter, state, tensor in source.tensors():
        assert reader.values(parameter.name, state) == read(tensor).tobytes(), f"{parameter.name}/{state}"


def test_a_copy_in_half_precision_is_derived_as_the_page_says(tmp_path):
    source = example(tmp_path / "none")
    odd = np.array([1e-8, 1e6, -1e6, 65519.996, 65520, -0.0, 1 + 2**-11, 6.1e-5, np.inf], np.float32)
    wide = Parameter("w", "parameter", {"fp32": tensor_of(odd)})
    for dtype in ("fp16", "bf16"):
        halved = cast(Checkpoint(source.path, source.origin, {"w": wide}), dtype)
        reader = UniversalReader(universal(halved, tmp_path / dtype))
        assert "offset" not in reader.entries["w"]["states"]["param"]


def test_a_copy_that_differs_in_one_bit_is_stored(tmp_path):
    source = example(tmp_path / "none")
    other = np.array([0.5, -1.2578125], DTYPES["bfloat16"])
    states = {**source.parameters["w"].states, "param": tensor_of(other)}
    changed = Checkpoint(source.path, source.origin, {"w": Parameter("w", "parameter", states)})
    reader = UniversalReader(universal(changed, tmp_path / "u"))
    assert reader.values("w", "param") == other.tobytes()


def test_the_example_of_the_page_is_what_we_write(tmp_path):
    folder = universal(example(tmp_path / "none"), tmp_path / "u")
    written = (folder / "manifest.json").read_text("utf-8")
    shown = block("manifest")

    def without_writer(text):
        return re.sub(r'"written_by": ".*"', "", text[57:])

    assert without_writer(written) == without_writer(shown)
    (folder / "manifest.json").write_text(shown, "utf-8")
    UniversalReader(folder)
    length, header, _, *data = block("file").splitlines()
    padded = header.encode().ljust(struct.unpack("<Q", bytes.fromhex(length))[0])
    whole = bytes.fromhex(length) + padded + bytes.fromhex("".join(data))
    assert (folder / "parameters").iterdir().__next__().read_bytes() == whole


def test_names_and_texts_of_all_kinds_survive(tmp_path):
    names = ("", ".", "../../etc", "Größe/Ω", "a" * 300, "A", "\x00\n\u202e", "😀", "con", "-", "\u017f", "\ue000")
    one = tensor_of(np.zeros((), np.int16))
    parameters = {name: Parameter(name, "buffer", {"param": one}) for name in names}
    extras = {name: name for name in names}
    source = Checkpoint(tmp_path / "none", Origin("example"), parameters, (), extras)
    reader = UniversalReader(universal(source, tmp_path / "u"))
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
