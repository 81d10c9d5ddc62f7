"""Write the golden universal checkpoint: `python sample_checkpoints/make_universal.py`. No engine is needed.

`universal-1-plain/` has states that are stored as they are, one of every kind. The expected values are next to it,
written without the code of ckpt: those of the tensors in `universal-1-plain.tensors.safetensors` (keys
`<parameter>/<state>`, written by the safetensors library), everything else in `universal-1-plain.expected.json`.
The script writes the same bytes each time. A golden file of a released version is never written again.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from ckpt.job import save

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "formats"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "codecs"))

from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, Parameter
from ckpt_formats.core.dtypes import DTYPES, SAFETENSORS_TAGS
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.tensor import Array, ArrayBlob, Tensor
from ckpt_formats.core.values import Global, Record, Size, StdDict, TensorName, Value
from ckpt_formats.universal import Universal

HERE = Path(__file__).resolve().parent
NAME = "universal-1-plain"
ODD = "odd/../name \N{LATIN SMALL LETTER E WITH ACUTE}\n\N{RIGHT-TO-LEFT OVERRIDE}"


def ramp(dtype: str, *shape: int) -> Array:
    """An array whose bytes are 0x00, 0x25, 0x4a, ...: bits that no arithmetic has changed."""
    kind = DTYPES[dtype]
    count = int(np.prod(shape, dtype=int)) * kind.itemsize
    raw = (np.arange(count) * 37 % 251).astype(np.uint8)
    return (raw & 1 if dtype == "bool" else raw).view(kind).reshape(shape)


def floats(*shape: int) -> Array:
    return (np.arange(int(np.prod(shape, dtype=int)), dtype=np.float32) / 7 - 1).reshape(shape)


def special(dtype: str) -> Array:
    """Both zeros, the smallest denormal, infinities, and NaNs of both signs with a payload."""
    kind = DTYPES[dtype]
    bits = {"float32": [0, 1 << 31, 1, 0x7F80_0000, 0xFF80_0000, 0x7FC0_0001, 0xFFA0_0001]}
    bits["bfloat16"] = [one >> 16 for one in bits["float32"][:2]] + [1, 0x7F80, 0xFF80, 0x7FC1, 0xFFA1]
    return np.array(bits[dtype], f"u{kind.itemsize}").view(kind)


def states() -> dict[str, tuple[str, dict[str, Array], dict[str, Value]]]:
    """Role, states and values of every parameter."""
    bfloat16 = DTYPES["bfloat16"]
    master, other = floats(4, 3), floats(5)
    differing = other.astype(bfloat16)
    differing[4] += bfloat16.type(1)
    result: dict[str, tuple[str, dict[str, Array], dict[str, Value]]] = {
        "derived": (
            "parameter",
            {"fp32": master, "param": master.astype(bfloat16), "exp_avg": floats(4, 3) * 2, "exp_avg_sq": master**2},
            {"step": 5},
        ),
        "differing": ("parameter", {"param": differing, "fp32": other, "exp_avg": special("float32")}, {"step": 5.0}),
        "derived.half": ("parameter", {"fp32": other, "param": other.astype(np.float16)}, {}),
        "derived.same": ("parameter", {"fp32": other, "param": other.copy()}, {}),
        "copy.of.another.shape": ("parameter", {"fp32": floats(6), "param": floats(2, 3)}, {}),
        "master.only": ("parameter", {"fp32": floats(2)}, {"step": None}),
        "frozen": ("frozen", {"param": special("bfloat16")}, {}),
        ODD: ("buffer", {"param": np.array([7], np.int64)}, {}),
        "scalar": ("parameter", {"fp32": np.array(0.1, np.float32), "param": np.array(0.1, bfloat16)}, {"step": 1}),
        "empty": ("buffer", {"param": np.zeros((0, 3), np.float32)}, {}),
        "empty.master": ("parameter", {"fp32": np.zeros((2, 0), np.float32), "param": np.zeros((2, 0), bfloat16)}, {}),
        "rng/cpu": ("extra", {"param": ramp("uint8", 16)}, {}),
        "lr": ("extra", {"param": np.array(0.001, np.float64)}, {}),
    }
    for dtype in SAFETENSORS_TAGS:
        result[f"types.{dtype}"] = ("buffer", {"param": ramp(dtype, 2, 3)}, {})
    return result


def extras() -> dict[str, Value]:
    """Every kind of value that typed JSON can express."""
    defaults = StdDict(Global("collections", "defaultdict"), Global("builtins", "int"))
    defaults["a"] = 1
    ordered = StdDict()
    ordered.update({"z": 1, "a": TensorName("rng/cpu")})
    ordered.attrs = {"_metadata": {"": {"version": 1}}}
    state = {"cur_scale": 65536.0, "rng": TensorName("rng/cpu")}
    return {
        "plain": [None, True, False, 0, -1, 2**63, -(2**63), 1.5, -0.0, 1e300, "text", "", "\ud800", {"a": {}}],
        "large integers": [2**64, -(2**100)],
        "strange floats": [
            float("inf"),
            float("-inf"),
            float("nan"),
            np.uint64(0x7FF8_0000_0000_0BAD).view(np.float64),
        ],
        "python float with a payload": float(np.uint64(0xFFF8_0000_0000_0BAD).view(np.float64)),
        "complex": 1.5 - 2j,
        "bytes": [b"", b"\x00\xff", bytearray(b"abc")],
        "tuples": ((), (1, (2,)), Size((3, 4))),
        "sets": [{1, 2, "a"}, frozenset({(1, 2)}), set()],
        "dicts": [{1: "a", None: "b", (1, 2): "c"}, {"$tuple": []}, {"$": 1, "a": 2}, {}],
        "standard": [ordered, defaults, StdDict(Global("collections", "Counter"))],
        "global": Global("torch", "bfloat16"),
        "object": Record(Global("megatron.optimizer", "Scaler"), (1, "a"), {"k": 2}, state, [1, 2], [("m", 3)], True),
        "bare object": Record(Global("argparse", "Namespace")),
        "arrays": [
            np.arange(6, dtype=np.int16).reshape(2, 3),
            np.zeros((0, 2), ">f4"),
            np.array(["ab", "c"]),
            np.array([1.5, 2], DTYPES["bfloat16"]),
            np.array(5, np.uint8),
        ],
        "numbers of numpy": [np.float32(0.1), np.int64(-3), np.bool_(True), np.str_("s"), DTYPES["bfloat16"].type(2)],
        "tensor": TensorName("lr"),
    }


def main() -> None:
    cases = states()
    parameters = {
        name: Parameter(
            name,
            role,
            {from_stored(state): Tensor.of(ArrayBlob(values)) for state, values in arrays.items()},
            values_of,
        )  # type: ignore[arg-type]
        for name, (role, arrays, values_of) in cases.items()
    }
    groups = (
        Group({"lr": 0.001, "betas": (0.9, 0.95), "weight_decay": 0.1}, ("derived", "differing", "master.only")),
        Group({"lr": TensorName("lr"), "foreach": None}, ("scalar",)),
        Group({}, ()),
    )
    aliases = {"head.weight": "derived", "another.head": "derived"}
    origin = Origin("deepspeed", "0.19.2", 5, {"zero_stage": 3, "dp": 4, "pieces": (1, 2)})
    source = Checkpoint(
        path=HERE / "made", origin=origin, parameters=parameters, groups=groups, extras=extras(), aliases=aliases
    )
    shutil.rmtree(HERE / NAME, ignore_errors=True)
    save(source, HERE / NAME, Universal(), resources=Execution(1))

    tensors = {
        f"{name}/{state}": _torch(values) for name, (_, arrays, _) in cases.items() for state, values in arrays.items()
    }
    save_file(tensors, HERE / f"{NAME}.tensors.safetensors")
    expected: dict[str, Any] = {
        "parameters": {
            name: {
                "role": role,
                "states": {s: [v.dtype.name, list(v.shape)] for s, v in arrays.items()},
                "values": values_of,
            }
            for name, (role, arrays, values_of) in cases.items()
        },
        "groups": [list(group.names) for group in groups],
        "aliases": aliases,
        "origin": {"engine": origin.engine, "version": origin.version, "step": origin.step},
        "derived": ["derived", "derived.half", "derived.same", "scalar", "empty.master"],
    }
    (HERE / f"{NAME}.expected.json").write_text(json.dumps(expected, indent=1) + "\n")


def _torch(values: Array) -> torch.Tensor:
    dtype = getattr(torch, values.dtype.name)
    if not values.size:
        return torch.zeros(values.shape, dtype=dtype)
    return torch.frombuffer(bytearray(values.tobytes()), dtype=dtype).reshape(values.shape)


if __name__ == "__main__":
    main()
