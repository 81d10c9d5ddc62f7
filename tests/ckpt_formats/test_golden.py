"""The golden checkpoint with plain states is read with the same values by each version of this program.

`sample_checkpoints/make_universal.py` wrote it; no test does.
"""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint, Origin
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.dtypes import DTYPES, SAFETENSORS_TAGS
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import Global, Record, Size, StdDict, TensorName, Value
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal, manifest
from held import plain

SAMPLES = Path(__file__).parents[2] / "sample_checkpoints"
GOLDEN = SAMPLES / "universal-1-plain"
CONTENT = "blake2b-256:915a3d5608bdee5a4c04a144366c2610510c4d5184d8ca56e087bd668a17b648"


@pytest.fixture(scope="module")
def golden() -> Checkpoint:
    return open_checkpoint(GOLDEN)


@pytest.fixture(scope="module")
def expected() -> Any:
    return json.loads(GOLDEN.with_suffix(".expected.json").read_text())


def std(
    cls: str, items: dict[str, Value], factory: Global | None = None, attrs: dict[str, Value] | None = None
) -> StdDict:
    result = StdDict(Global("collections", cls), factory)
    result.update(items)
    result.attrs = attrs or {}
    return result


def double(bits: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(bits))[0])


EXTRAS: dict[str, Value] = {
    "plain": [
        None,
        True,
        False,
        0,
        -1,
        9223372036854775808,
        -9223372036854775808,
        1.5,
        -0.0,
        1e300,
        "text",
        "",
        "\ud800",
        {"a": {}},
    ],
    "large integers": [18446744073709551616, -1267650600228229401496703205376],
    "strange floats": [
        double("7ff0000000000000"),
        double("fff0000000000000"),
        double("7ff8000000000000"),
        np.float64(double("7ff8000000000bad")),
    ],
    "python float with a payload": double("fff8000000000bad"),
    "complex": 1.5 - 2j,
    "bytes": [b"", b"\x00\xff", bytearray(b"abc")],
    "tuples": ((), (1, (2,)), Size((3, 4))),
    "sets": [{"a", 1, 2}, frozenset({(1, 2)}), set()],
    "dicts": [{1: "a", None: "b", (1, 2): "c"}, {"$tuple": []}, {"$": 1, "a": 2}, {}],
    "standard": [
        std("OrderedDict", {"z": 1, "a": TensorName("rng/cpu")}, attrs={"_metadata": {"": {"version": 1}}}),
        std("defaultdict", {"a": 1}, Global("builtins", "int")),
        std("Counter", {}),
    ],
    "global": Global("torch", "bfloat16"),
    "object": Record(
        Global("megatron.optimizer", "Scaler"),
        (1, "a"),
        {"k": 2},
        {"cur_scale": 65536.0, "rng": TensorName("rng/cpu")},
        [1, 2],
        [("m", 3)],
        True,
    ),
    "bare object": Record(Global("argparse", "Namespace")),
    "arrays": [
        np.array([[0, 1, 2], [3, 4, 5]], "<i2"),
        np.zeros((0, 2), ">f4"),
        np.array(["ab", "c"], "<U2"),
        np.array([1.5, 2.0], DTYPES["bfloat16"]),
        np.array(5, "u1"),
    ],
    "numbers of numpy": [np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("s"), DTYPES["bfloat16"].type(2)],
    "tensor": TensorName("lr"),
}


def test_golden_files_are_detected_by_content() -> None:
    assert detect(GOLDEN).name == "universal"


def test_every_bit_of_every_state_is_what_the_safetensors_library_says(golden: Checkpoint) -> None:
    truth = load_file(GOLDEN.with_suffix(".tensors.safetensors"))
    tensors = {f"{p.name}/{to_stored(state)}": tensor for p, state, tensor in golden.tensors()}
    assert tensors.keys() == truth.keys()
    for name, tensor in tensors.items():
        values = truth[name]
        assert (tensor.dtype.name, tensor.shape) == (str(values.dtype)[6:], tuple(values.shape)), name
        assert read(tensor).tobytes() == values.reshape(-1).view(torch.uint8).numpy().tobytes(), name


def test_golden_sample_has_the_recorded_names_roles_shapes_and_values(golden: Checkpoint, expected: Any) -> None:
    assert list(golden.parameters) == list(expected["parameters"])
    for name, fields in expected["parameters"].items():
        parameter = golden.parameters[name]
        assert (parameter.name, parameter.role) == (name, fields["role"])
        assert {to_stored(s): [t.dtype.name, list(t.shape)] for s, t in parameter.states.items()} == fields["states"]
        assert list(map(to_stored, parameter.states)) == list(fields["states"])
        assert plain(dict(parameter.values)) == plain(fields["values"])
    assert [list(group.names) for group in golden.groups] == expected["groups"]
    assert golden.aliases == expected["aliases"]


def test_golden_sample_has_its_extras_options_and_origin(golden: Checkpoint) -> None:
    assert plain(dict(golden.extras)) == plain(EXTRAS)
    assert [plain(dict(group.options)) for group in golden.groups] == [
        plain({"lr": 0.001, "betas": (0.9, 0.95), "weight_decay": 0.1}),
        plain({"lr": TensorName("lr"), "foreach": None}),
        plain({}),
    ]
    assert golden.origin == Origin("deepspeed", "0.19.2", 5, {"zero_stage": 3, "dp": 4, "pieces": (1, 2)})


def test_copies_that_are_their_masters_rounded_take_no_bytes(golden: Checkpoint, expected: Any) -> None:
    derived = {p.name for p, _, tensor in golden.tensors() if isinstance(tensor.fragments[0].blob, DerivedBlob)}
    assert derived == set(expected["derived"])
    for name in derived:
        (file,) = [shard.path for shard in golden.files if shard.path == _file(golden, name)]
        entries = load_file(file)
        assert f"{name}/fp32" in entries
        assert f"{name}/param" not in entries


def _file(golden: Checkpoint, name: str) -> Path:
    return next(raw.path for tensor in golden.parameters[name].states.values() for raw in tensor.sources())


def test_sample_has_one_of_everything(golden: Checkpoint) -> None:
    """Every element type, role and kind of value."""
    assert {t.dtype.name for _, _, t in golden.tensors()} == set(SAFETENSORS_TAGS)
    assert {p.role for p in golden.parameters.values()} == {"parameter", "frozen", "buffer", "extra"}
    kinds = set()

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            kinds.update(key for key in value if key.startswith("$") and len(value) == 1)
        for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            collect(inner)

    collect(json.loads((GOLDEN / manifest.NAME).read_text())["extras"])
    from ckpt_formats.containers.typed_json import READERS

    assert kinds == set(READERS)


def test_golden_sample_has_its_content_id() -> None:
    assert manifest.load(GOLDEN / manifest.NAME).content == CONTENT


def test_verify_finds_nothing_in_the_golden_sample(golden: Checkpoint) -> None:
    assert [(f.kind, f.tensors) for f in find_problems(golden, Execution(2))] == [("copy", ("differing",))]


def test_golden_sample_written_again_has_the_same_bytes(golden: Checkpoint, tmp_path: Path) -> None:
    """Today's writer gives the same bytes, except for its version in the manifest, and spaces there."""
    save(golden, tmp_path / "again", Universal(), resources=Execution(2))
    for path in sorted(GOLDEN.rglob("*.safetensors")):
        assert (tmp_path / "again" / path.relative_to(GOLDEN)).read_bytes() == path.read_bytes()
    written, stored = (json.loads((f / manifest.NAME).read_bytes()) for f in (tmp_path / "again", GOLDEN))
    assert list(written) == list(stored)
    differing = {key for key in written if json.dumps(written[key]) != json.dumps(stored[key])}
    assert differing <= {"checksum", "written_by"}
