"""Quantised weights: no command changes codes or scales alone. Each scheme is tried with each command and type.

The tiny checkpoints have the names, types and shapes that the libraries of each scheme write.
"""
# ruff: noqa: E501 -- a table is read along its lines

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckpt.combine import average, merge_lora
from ckpt.compare import diff
from ckpt.job import save
from ckpt_cli.main import USAGE
from ckpt_cli.options.source import QUANTISED
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.dtypes import SAFETENSORS_TAGS
from ckpt_formats.core.errors import CorruptError, InvalidArgumentError, NoMatchError, UnsupportedError
from ckpt_formats.core.quantised.quantise import GGUF_SCHEME, SCHEMES_TO_WRITE
from ckpt_formats.core.quantised.weights import quantised_weights
from ckpt_formats.registry.opening import open_checkpoint
from damage import UNSUPPORTED, ckpt

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
U8, I8, I32, I64 = np.uint8, np.int8, np.int32, np.int64
MODULE = "model.layers.0.self_attn.q_proj"

Layout = Mapping[str, tuple[tuple[int, ...], Any]]


@dataclass(frozen=True)
class Case:
    """How a library stores a weight of (64, 32): names in the module, with shapes and types; and its configuration."""

    layout: Layout
    config: Mapping[str, Any] | None
    module: str = MODULE
    values: Mapping[str, Any] = field(default_factory=dict)
    """Those of tensors that describe the weight."""
    plain: str = "weight"
    """The name of the plain weight in its module; empty: ckpt does not decode the scheme."""


def fp8_config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", **more}


def tensors_config(kind: str) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "format": kind}


def quant_state(kind: str, **more: Any) -> dict[str, Any]:
    text = json.dumps({"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [64, 32], **more})
    return {f"weight.quant_state.bitsandbytes__{kind}": np.frombuffer(text.encode(), U8)}


_STATES = {
    "nf4": quant_state("nf4"),
    "nf4-nested": quant_state("nf4", nested_blocksize=256, nested_offset=0.25, nested_dtype="float32"),
    "fp4": quant_state("fp4"),
}
_NF4 = {
    "weight": ((1024, 1), U8),
    "weight.absmax": ((32,), F32),
    "weight.quant_map": ((16,), F32),
    "weight.quant_state.bitsandbytes__nf4": ((80,), U8),
}
_NESTED = _NF4 | {
    "weight.absmax": ((32,), U8),
    "weight.nested_absmax": ((1,), F32),
    "weight.nested_quant_map": ((256,), F32),
}
_GPTQ = {"qweight": ((4, 64), I32), "qzeros": ((1, 8), I32), "scales": ((1, 64), F16), "g_idx": ((32,), I32)}
_PACKED = {"weight_packed": ((64, 4), I32), "weight_scale": ((64, 1), BF16), "weight_shape": ((2,), I64)}
_SHAPE = {"weight_shape": np.array([64, 32])}
_ONE_GROUP = {"g_idx": np.zeros(32, I32), "qzeros": np.full((1, 8), 0x12345678, I32)}
_HQQ = {"nbits": np.array([4]), "group_size": np.array([64]), "axis": np.array([0]), "shape": np.array([64, 32])}
_EXPERTS = "model.layers.0.mlp.experts"

CASES = {
    "fp8-blocks": Case({"weight": ((64, 32), E4M3), "weight_scale_inv": ((1, 1), F32)}, fp8_config(weight_block_size=[128, 128])),
    "fp8-e8m0": Case({"weight": ((64, 32), E4M3), "weight_scale_inv": ((1, 1), ml_dtypes.float8_e8m0fnu)}, fp8_config()),
    "fp8-experts": Case({"gate_up_proj": ((2, 64, 32), E4M3), "gate_up_proj_scale_inv": ((2, 1, 1), F32)}, fp8_config(), _EXPERTS, plain="gate_up_proj"),
    "fp8-deepseek": Case({"weight": ((64, 32), E4M3), "scale": ((1, 1), F32)}, None),
    "fp8-tensor": Case({"weight": ((64, 32), E4M3), "weight_scale": ((1,), F32), "input_scale": ((1,), F32)}, tensors_config("float-quantized")),
    "fp8-channel": Case({"weight": ((64, 32), E4M3), "weight_scale": ((64, 1), BF16)}, tensors_config("float-quantized")),
    "fp8-e5m2": Case({"weight": ((64, 32), E5M2), "weight_scale": ((64, 1), F32)}, None),
    "fp8-torchao": Case({"_weight_qdata": ((64, 32), E4M3), "_weight_scale": ((64, 1), F32)}, {"quant_method": "torchao"}),
    "fp8-stack": Case({"w13": ((2, 64, 32), E4M3), "w13_scale": ((2, 64, 1), F32)}, None, _EXPERTS, plain="w13"),
    "int8-torchao": Case({"_weight_qdata": ((64, 32), I8), "_weight_scale": ((64, 1), F32)}, {"quant_method": "torchao"}),
    "int8-channel": Case({"weight": ((64, 32), I8), "weight_scale": ((64, 1), F32)}, tensors_config("int-quantized")),
    "int4-groups": Case(_PACKED, tensors_config("pack-quantized"), values=_SHAPE),
    "int4-asymmetric": Case(_PACKED | {"weight_zero_point": ((8, 1), I32), "weight_g_idx": ((32,), I32)}, tensors_config("pack-quantized"), values=_SHAPE | {"weight_g_idx": np.zeros(32, I32)}),
    "awq": Case({"qweight": ((32, 8), I32), "qzeros": ((1, 8), I32), "scales": ((1, 64), F16)}, {"quant_method": "awq", "bits": 4}),
    "gptq": Case(_GPTQ, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}, values=_ONE_GROUP),
    "gptq-v2": Case(_GPTQ, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, values=_ONE_GROUP),
    "hqq": Case({"W_q": ((32, 32), U8), "scale": ((1, 32), F16), "zero": ((1, 32), F16)} | {key: ((len(v),), I64) for key, v in _HQQ.items()}, {"quant_method": "hqq"}, values=_HQQ),
    "nf4": Case(_NF4, {"quant_method": "bitsandbytes", "load_in_4bit": True}, values=_STATES["nf4"]),
    "nf4-nested": Case(_NESTED, {"quant_method": "bitsandbytes", "load_in_4bit": True}, values=_STATES["nf4-nested"]),
    "fp4": Case({key.replace("nf4", "fp4"): form for key, form in _NF4.items()}, None, values=_STATES["fp4"]),
    "int8-bitsandbytes": Case({"weight": ((64, 32), I8), "SCB": ((64,), F32), "weight_format": ((), U8)}, {"load_in_8bit": True}, values={"weight_format": np.zeros((), U8)}),
    "mxfp4": Case({"gate_up_proj_blocks": ((2, 64, 1, 16), U8), "gate_up_proj_scales": ((2, 64, 1), U8)}, {"quant_method": "mxfp4"}, _EXPERTS, plain="gate_up_proj"),
    "mxfp4-packed": Case({"weight_packed": ((64, 16), U8), "weight_scale": ((64, 1), U8)}, tensors_config("mxfp4-pack-quantized")),
    "nvfp4": Case({"weight_packed": ((64, 16), U8), "weight_scale": ((64, 2), E4M3), "weight_global_scale": ((1,), F32)}, tensors_config("nvfp4-pack-quantized")),
    "nvfp4-modelopt": Case({"weight": ((64, 16), U8), "weight_scale": ((64, 2), E4M3), "weight_scale_2": ((), F32), "input_scale": ((), F32)}, {"quant_algo": "NVFP4"}, plain=""),
    "quanto": Case({"weight._data": ((64, 32), I8), "weight._scale": ((64, 1), F32), "input_scale": ((), F32)}, None, plain=""),
    "vptq": Case({"indices": ((1, 8, 32), np.int16), "centroids": ((1, 256, 8), F16), "perm": ((32,), np.uint16)}, {"quant_method": "vptq"}, plain=""),
    "unknown": Case({"levels": ((64, 8), I32), "range": ((64, 1), F16)}, {"quant_method": "of-tomorrow"}, plain=""),
    "without-a-name": Case({"codes": ((64, 32), U8), "row_scale": ((64, 1), F16)}, None, plain=""),
}  # fmt: skip


def random_array(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    """Numbers of a type that no other type of floats holds exactly; codes of all bits."""
    random = np.random.default_rng([seed, *shape])
    kind = np.dtype(dtype)
    if kind in (np.dtype(F32), np.dtype(F16), np.dtype(BF16)):
        return (random.uniform(0.001, 0.002, shape)).astype(kind)
    raw = random.integers(1, 120, shape, np.uint8)
    return raw.view(kind) if kind.itemsize == 1 else raw.astype(kind)


def write_safetensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """A file of safetensors, of any element types."""
    header, data = {}, b""
    for name, values in tensors.items():
        header[name] = {
            "dtype": SAFETENSORS_TAGS[values.dtype.name],
            "shape": list(values.shape),
            "data_offsets": [len(data), len(data) + values.nbytes],
        }
        data += values.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def codes_of(case: Case) -> set[str]:
    return {f"{case.module}.{name}" for name in case.layout}


def model(folder: Path, case: Case, seed: int = 0, config: bool = True) -> Checkpoint:
    """A checkpoint of Hugging Face's: one quantised weight, its bias, and a plain norm."""
    folder.mkdir(parents=True)
    tensors = {
        f"{case.module}.{name}": case.values[name] if name in case.values else random_array(*form, seed)
        for name, form in case.layout.items()
    }
    tensors[f"{case.module}.bias"] = random_array((64,), F32, seed)
    tensors["model.norm.weight"] = random_array((32,), F32, seed)
    write_safetensors(folder / "model.safetensors", tensors)
    stated = {"quantization_config": case.config} if case.config is not None and config else {}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", **stated}))
    return open_checkpoint(folder)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    root = tmp_path_factory.mktemp("quantised")
    return {name: model(root / name, case) for name, case in CASES.items()}


def values(source: Checkpoint) -> dict[str, tuple[str, bytes]]:
    return {name: (p.dtype.name, np.asarray(p).tobytes()) for name, p in source.items()}


@pytest.mark.parametrize("scheme", CASES)
def test_codes_and_scales_are_recognised(scheme: str, models: Mapping[str, Checkpoint]) -> None:
    (weight,) = quantised_weights(models[scheme])
    assert set(weight.parts) == codes_of(CASES[scheme])


@pytest.mark.parametrize("scheme", [name for name in CASES if name not in ("vptq", "unknown")])
def test_known_schemes_are_recognised_without_a_configuration(scheme: str, tmp_path: Path) -> None:
    (weight,) = quantised_weights(model(tmp_path / "m", CASES[scheme], config=False))
    assert set(weight.parts) == codes_of(CASES[scheme])


@pytest.mark.parametrize("scheme", [name for name, case in CASES.items() if case.plain])
def test_cast_dequantises_and_says_so(scheme: str, models: Mapping[str, Checkpoint]) -> None:
    source, case = models[scheme], CASES[scheme]
    name = f"{case.module}.{case.plain}"
    for dtype in ("bfloat16", "float16", "float32", "float64"):
        result = source.cast(dtype)
        assert set(result) == {name, f"{case.module}.bias", "model.norm.weight"}
        assert {p.dtype.name for p in result.values()} == {dtype}
        assert sorted(result[name].shape[-2:]) == [32, 64]
        assert quantised_weights(result) == ()
        assert "quantization_config" not in json.dumps(result.extras["hf/config.json"])
        spoken = [notice for notice in result.notices if notice not in source.notices]
        assert [notice.names for notice in spoken if "dequantised from" in notice] == [(name,)]
        assert np.asarray(result[name]).shape == result[name].shape


@pytest.mark.parametrize("scheme", [name for name, case in CASES.items() if not case.plain])
def test_cast_refuses_schemes_that_are_not_decoded(scheme: str, models: Mapping[str, Checkpoint]) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot be dequantised.*" + CASES[scheme].module.replace(".", r"\.")):
        models[scheme].cast("bf16")


def test_values_of_fp8_blocks_are_codes_times_scales_rounded_once(tmp_path: Path) -> None:
    case = Case(
        {"weight": ((300, 200), E4M3), "weight_scale_inv": ((3, 2), F32)}, fp8_config(weight_block_size=[128] * 2)
    )
    source = model(tmp_path / "m", case)
    codes, scales = (np.asarray(source[f"{MODULE}.{own}"]).astype(F32) for own in case.layout)
    whole = codes * scales.repeat(128, 0)[:300].repeat(128, 1)[:, :200]
    weight = source.cast("bf16")[f"{MODULE}.weight"]
    assert np.array_equal(np.asarray(weight), whole.astype(BF16))
    assert np.array_equal(weight[130:260, 100:150], whole[130:260, 100:150].astype(BF16))
    assert np.array_equal(np.asarray(source.cast("fp32")[f"{MODULE}.weight"]), whole)


@pytest.mark.parametrize(
    ("scales", "block", "why"),
    [((2, 1), None, "may have blocks of 96 or of 128"), ((5, 1), None, "fits"), ((3,), None, "scales of the shape")],
)
def test_blocks_that_are_not_known_are_refused(scales: Any, block: Any, why: str, tmp_path: Path) -> None:
    case = Case({"weight": ((192, 64), E4M3), "weight_scale_inv": (scales, F32)}, fp8_config(weight_block_size=block))
    with pytest.raises(UnsupportedError, match=why):
        model(tmp_path / "m", case).cast("bf16")


@pytest.mark.parametrize("scheme", [name for name, case in CASES.items() if case.values])
def test_descriptions_of_weights_are_not_believed(scheme: str, tmp_path: Path) -> None:
    """A shape, a group or a state that does not fit the codes is refused before memory for it is allocated."""
    case, random = CASES[scheme], np.random.default_rng(3)
    for number in range(6):
        values = {key: np.array(value) for key, value in case.values.items() if key not in ("weight_format", "qzeros")}
        for key, value in values.items():
            raw = value.reshape(-1).view(U8).copy()
            raw[random.integers(0, raw.size, 1 + number)] ^= random.integers(1, 256, 1 + number).astype(U8)
            values[key] = raw.view(value.dtype).reshape(value.shape)
        source = model(tmp_path / str(number), replace(case, values={**case.values, **values}))
        try:
            weight = source.cast("fp32")[f"{MODULE}.weight"].weight
            assert weight.size <= 64 * 32
            np.asarray(weight)
        except (UnsupportedError, CorruptError):
            pass


@pytest.mark.parametrize(
    "case",
    [
        Case({"levels": ((64, 32), I8), "range": ((64, 1), F32)}, {"quant_method": "torchao"}),
        Case({"weight_packed": ((), U8), "weight_scale": ((), E4M3), "weight_global_scale": ((1,), F32)}, None),
        Case({**_PACKED, "weight_g_idx": ((32,), F32)}, None, values=_SHAPE),
        Case({"weight": ((1024,), E4M3), "weight_scale": ((3, 3), F32)}, None),
        Case({**_NF4, "weight": ((1024, 2), U8)}, None, values=_STATES["nf4"]),
        Case({**_GPTQ, "g_idx": ((16,), I32)}, {"quant_method": "gptq", "bits": 4}),
        Case(_GPTQ, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, values=_ONE_GROUP),
    ],
)
def test_parts_that_do_not_fit_are_refused(case: Case, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="cannot be dequantised"):
        model(tmp_path / "m", case).cast("bf16")


@pytest.mark.parametrize("scheme", CASES)
def test_average_refuses_quantised_weights(scheme: str, models: Mapping[str, Checkpoint]) -> None:
    with pytest.raises(UnsupportedError, match=r"quantised weight.* cannot be averaged"):
        average([models[scheme], models[scheme]])
    rest = models[scheme].select(only=["norm"])
    assert list(average([rest, rest])) == ["model.norm.weight"]


@pytest.mark.parametrize("scheme", CASES)
def test_select_keeps_codes_and_scales_together(scheme: str, models: Mapping[str, Checkpoint]) -> None:
    source, names = models[scheme], sorted(codes_of(CASES[scheme]))
    for name in names:
        with pytest.raises(UnsupportedError, match="together they are one quantised weight"):
            source.select(skip=[f"^{name}$".replace(".", r"\.")])
        with pytest.raises(UnsupportedError, match="together they are one quantised weight"):
            source.select(only=[f"^{name}$".replace(".", r"\.")])
    assert set(source.select(only=[CASES[scheme].module])) == {*names, f"{CASES[scheme].module}.bias"}


@pytest.mark.parametrize("scheme", CASES)
def test_replace_takes_all_parts_or_none(scheme: str, models: Mapping[str, Checkpoint]) -> None:
    source, codes = models[scheme], sorted(codes_of(CASES[scheme]))
    arrays = {name: np.asarray(source[name]) for name in codes}
    for name in codes:
        with pytest.raises(UnsupportedError, match="replaced without"):
            source.replace({name: arrays[name]})
    assert values(source.replace(arrays)) == values(source)


@pytest.mark.parametrize("scheme", [name for name in CASES if name not in ("vptq", "unknown", "without-a-name")])
def test_rename_leaves_parts_recognisable(scheme: str, models: Mapping[str, Checkpoint]) -> None:
    source, codes = models[scheme], sorted(codes_of(CASES[scheme]))
    moved = source.rename(lambda name: f"inner.{name}")
    assert {part for weight in quantised_weights(moved) for part in weight.parts} == {f"inner.{n}" for n in codes}
    with pytest.raises(UnsupportedError, match="no longer be known"):
        source.rename({name: f"tensor{number}.values" for number, name in enumerate(codes)})


def adapter(folder: Path, module: str, shape: tuple[int, int] = (64, 32)) -> Checkpoint:
    folder.mkdir()
    outputs, inputs = shape
    tensors = {
        f"base_model.model.{module}.lora_A.weight": random_array((2, inputs), F32, 1),
        f"base_model.model.{module}.lora_B.weight": random_array((outputs, 2), F32, 2),
    }
    write_safetensors(folder / "adapter_model.safetensors", tensors)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return open_checkpoint(folder)


@pytest.mark.parametrize("scheme", CASES)
def test_merge_lora_refuses_quantised_weights(scheme: str, models: Mapping[str, Checkpoint], tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"quantised weight.* cannot be merged"):
        merge_lora(models[scheme], adapter(tmp_path / "adapter", CASES[scheme].module))


@pytest.mark.parametrize("scheme", CASES)
def test_diff_compares_the_bits_of_codes_and_scales(
    scheme: str, models: Mapping[str, Checkpoint], tmp_path: Path
) -> None:
    other = model(tmp_path / "other", CASES[scheme], seed=5)
    result = diff(models[scheme], other)
    rows = {pair.name: pair.sums for pair in result.compared}
    codes = codes_of(CASES[scheme])
    assert {name for name, sums in rows.items() if not sums.is_measured} == codes
    assert all(sums.codes == sums.elements and not sums.squares for name, sums in rows.items() if name in codes)
    stated = {f"{CASES[scheme].module}.{own}" for own in CASES[scheme].values}
    assert all(rows[name].changed for name in codes - stated if rows[name].elements > 2)


@pytest.mark.parametrize("scheme", [name for name in CASES if name != "fp8-e8m0"])  # not every format has its type
def test_convert_carries_every_bit(scheme: str, models: Mapping[str, Checkpoint], tmp_path: Path) -> None:
    source, codes = models[scheme], codes_of(CASES[scheme])
    before = values(source)
    for target in ("out.safetensors", "out.pt", "universal"):
        save(source, tmp_path / target)
        back = values(open_checkpoint(tmp_path / target))
        assert {name: back[name] for name in codes} == {name: before[name] for name in codes}


@pytest.mark.parametrize("scheme", [name for name, case in CASES.items() if case.plain])
def test_diff_of_a_quantised_and_a_plain_model_compares_values(
    scheme: str, models: Mapping[str, Checkpoint], tmp_path: Path
) -> None:
    source, case = models[scheme], CASES[scheme]
    name = f"{case.module}.{case.plain}"
    for dtype in ("float64", "bfloat16"):
        rounded = source.cast(dtype).rename({name: name})
        for first, second in ((source, rounded), (rounded, source)):
            (pair,) = [one for one in diff(first, second, tensors_only=True).pairs if one.name == name]
            assert pair.kind in ("equal", "retyped")
            assert "dequantised from" in pair.what
            if dtype == "float64":
                assert not pair.sums.changed
            else:
                assert pair.sums.relative is None or pair.sums.relative < 0.005


def test_diff_of_two_schemes_compares_values(tmp_path: Path) -> None:
    blocks = Case({"weight": ((64, 32), E4M3), "weight_scale_inv": ((1, 1), F32)}, fp8_config())
    rows = Case({"weight": ((64, 32), E4M3), "weight_scale": ((64, 1), F32)}, tensors_config("float-quantized"))
    first, second = model(tmp_path / "a", blocks), model(tmp_path / "b", rows)
    (pair,) = [one for one in diff(first, second, tensors_only=True).pairs if one.name == f"{MODULE}.weight"]
    assert pair.sums.is_measured
    assert pair.sums.changed


def test_inspect_names_scheme_and_bits(models: Mapping[str, Checkpoint]) -> None:
    ran = ckpt("inspect", models["awq"].path)
    assert "AWQ or GPTQ, 4 bits: 1 weight, 2,048 elements, 4.0 KiB as bfloat16" in ran.out.replace("\xa0", " ")
    assert "model.layers.*.self_attn.q_proj.weight" in ran.out
    (own,) = (stated := json.loads(ckpt("inspect", models["awq"].path, "--json").out))["quantised"]
    assert (own["name"], own["bits"], own["shape"]) == (f"{MODULE}.weight", 4, [64, 32])
    assert set(own["parts"]) == codes_of(CASES["awq"])
    plain = 4 * (64 + 32)
    assert own["stored_nbytes"] == 32 * 8 * 4 + 8 * 4 + 64 * 2
    assert stated["bits_per_weight"] == pytest.approx(8 * (own["stored_nbytes"] + plain) / (64 * 32 + 64 + 32))
    assert "not decoded" in ckpt("inspect", models["vptq"].path).out
    stated = json.loads(ckpt("inspect", models["vptq"].path, "--json").out)
    assert (stated["quantised"][0]["bits"], stated["bits_per_weight"]) == (None, None)
    assert "does not decode" in stated["quantised"][0]["problem"]


def plain(*tensors: tuple[str, tuple[int, ...], Any]) -> Callable[[Path], Checkpoint]:
    def write(folder: Path) -> Checkpoint:
        folder.mkdir()
        write_safetensors(folder / "model.safetensors", {name: random_array(s, d, 3) for name, s, d in tensors})
        return open_checkpoint(folder)

    return write


PLAIN = {
    "swin": plain(("a.logit_scale", (2, 1, 1), F32), ("a.relative_position_index", (4, 4), I64)),
    "clip": plain(("logit_scale", (), F32), ("position_ids", (1, 8), I64), ("w.weight", (4, 4), F32)),
    "batch-norm": plain(("bn.weight", (4,), F32), ("bn.num_batches_tracked", (), I64), ("bn.scale", (4,), F32)),
    "causal-mask": plain(("attn.bias", (1, 1, 4, 4), U8), ("attn.c_attn.weight", (4, 4), F32)),
    "plain-fp8": plain(("a.weight", (4, 4), E4M3), ("b.weight", (4, 4), BF16)),
    "attention-of-its-own": plain(("attn.W_q", (4, 4), F32), ("attn.scale", (4,), F32)),
    "own-scale": plain(("a.weight", (4, 4), F32), ("a.weight_scale", (4,), F32)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_weights_beside_scales_and_integers_are_rounded(name: str, tmp_path: Path) -> None:
    source = PLAIN[name](tmp_path / "m")
    assert quantised_weights(source) == ()
    result = source.cast("fp16")
    assert {p.dtype.name for p in result.values() if p.dtype.kind not in "iub"} <= {"float16"}


def test_a_stated_quantisation_without_codes_is_spoken_of(tmp_path: Path) -> None:
    source = model(tmp_path / "m", Case({"weight": ((64, 32), F32)}, {"quant_method": "of-tomorrow"}))
    (spoken,) = [notice for notice in source.cast("bf16").notices if notice not in source.notices]
    assert "of-tomorrow" in spoken


def test_commands_speak_of_quantised_weights(models: Mapping[str, Checkpoint], tmp_path: Path) -> None:
    path = models["fp8-blocks"].path
    ran = ckpt("convert", path, tmp_path / "hf", "--to", "hf", "--dtype", "bf16", "--json")
    (spoken,) = [note for note in json.loads(ran.out)["notes"] if "dequantised" in note["text"]]
    assert spoken["names"] == [f"{MODULE}.weight"]
    written = open_checkpoint(tmp_path / "hf")
    assert values(written) == values(models["fp8-blocks"].cast("bf16"))
    assert "quantization_config" not in written.extras["hf/config.json"]
    for wrong in (["average", path, path, tmp_path / "a"], ["convert", path, tmp_path / "a", "--skip", "scale_inv"]):
        ran = ckpt(*wrong)
        assert ran.code == UNSUPPORTED
        assert "quantised weight" in ran.err
        assert not (tmp_path / "a").exists()


def test_quantise_writes_fp8_blocks_that_read_back(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    shapes = {f"{MODULE}.weight": (300, 200), "lm_head.weight": (64, 200), "model.norm.weight": (200,)}
    tensors = {name: random_array(shape, BF16, 1) for name, shape in shapes.items()}
    write_safetensors(tmp_path / "m" / "model.safetensors", tensors)
    (tmp_path / "m" / "config.json").write_text(json.dumps({"model_type": "own", "torch_dtype": "bfloat16"}))
    ran = ckpt("convert", tmp_path / "m", tmp_path / "fp8", "--to", "hf", "--quantise", "fp8-block", "--json")
    notes = [note["text"] for note in json.loads(ran.out)["notes"]]
    assert any("quantised to fp8-block" in text for text in notes)
    assert any("smaller blocks" in text for text in notes)
    written = open_checkpoint(tmp_path / "fp8")
    stated = written.extras["hf/config.json"]["quantization_config"]
    assert (stated["weight_block_size"], stated["modules_to_not_convert"]) == ([128, 128], ["lm_head"])
    plain = tensors[f"{MODULE}.weight"].astype(F32)
    largest = np.array([[np.abs(plain[i : i + 128, j : j + 128]).max() for j in (0, 128)] for i in (0, 128, 256)])
    scales = largest.astype(F32) / F32(448)
    spread = scales.repeat(128, 0)[:300].repeat(128, 1)[:, :200]
    assert np.array_equal(np.asarray(written[f"{MODULE}.weight_scale_inv"]), scales)
    codes = np.asarray(written[f"{MODULE}.weight"]).view(U8)
    assert np.array_equal(codes, (plain / spread).astype(E4M3).view(U8))
    assert np.asarray(written["lm_head.weight"]).tobytes() == tensors["lm_head.weight"].tobytes()
    again = written.cast("fp32").quantise("fp8-block")
    assert np.array_equal(np.asarray(again[f"{MODULE}.weight"]).view(U8), codes)
    assert np.array_equal(again[f"{MODULE}.weight"][100:290, 5:150].view(U8), codes[100:290, 5:150])


def mxfp4_by_definition(values: Any) -> tuple[Any, Any]:
    """Codes (n, m / 2) and scales (n, m / 32) of a matrix (n, m): a search for the nearest of 16 numbers, even at ties."""
    groups = values.astype(np.float64).reshape(len(values), -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    numbers = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    distances = np.abs(np.abs(groups / 2.0 ** exponents[..., None])[..., None] - numbers)
    sizes = np.argmin(distances + np.where(np.arange(8) % 2, 1e-12, 0), -1)  # even codes win ties
    codes = (sizes + 8 * np.signbit(groups)).astype(U8).reshape(len(values), -1)
    return codes[:, ::2] | codes[:, 1::2] << 4, (exponents + 127).astype(U8)


def test_quantise_writes_mxfp4_that_reads_back(tmp_path: Path) -> None:
    """Linear layers as compressed-tensors stores them; of GPT-OSS, the experts in the layout of their own."""
    random, folder = np.random.default_rng(5), tmp_path / "m"
    folder.mkdir()
    shapes = {"a.q_proj.weight": (70, 96), "a.k_proj.weight": (8, 40), "lm_head.weight": (64, 96)}
    shapes |= {f"mlp.experts.{own}": shape for own, shape in (("gate_up_proj", (2, 64, 24)), ("down_proj", (2, 32, 8)))}
    tensors = {name: random.normal(0, 0.02, shape).astype(BF16) for name, shape in shapes.items()}
    ties = np.array([0.25, -0.75, 1.25, 1.75, -2.5, 3.5, 5, 7], F32).astype(BF16)
    tensors["a.q_proj.weight"][0, 32:40] = ties
    write_safetensors(folder / "model.safetensors", tensors)
    for kind in ("own", "gpt_oss"):
        (folder / "config.json").write_text(json.dumps({"model_type": kind, "torch_dtype": "bfloat16"}))
        ran = ckpt("convert", folder, tmp_path / kind, "--to", "hf", "--quantise", "mxfp4", "--json")
        notes = {note["text"]: note["names"] for note in json.loads(ran.out)["notes"]}
        written = open_checkpoint(tmp_path / kind)
        stated, plain = written.extras["hf/config.json"]["quantization_config"], written.cast("bf16")
        if kind == "own":
            assert (stated["format"], stated["ignore"]) == (
                "mxfp4-pack-quantized",
                ["a.k_proj", "lm_head", "mlp.experts"],
            )
            assert notes["left plain, because their rows are not whole groups of 32 values"] == ["a.k_proj.weight"]
            assert sorted(notes["stacks of experts stay plain"]) == [
                "mlp.experts.down_proj",
                "mlp.experts.gate_up_proj",
            ]
            expected = {"a.q_proj.weight": (tensors["a.q_proj.weight"], "_packed", "_scale")}
        else:
            assert stated["quant_method"] == "mxfp4"
            assert "lm_head" in stated["modules_to_not_convert"]
            expected = {n: (tensors[n].swapaxes(1, 2), "_blocks", "_scales") for n in tensors if "experts" in n}
        for name, (values, *endings) in expected.items():
            codes, scales = mxfp4_by_definition(values.reshape(-1, values.shape[-1]))
            assert [np.asarray(written[name + end]).tobytes() for end in endings] == [codes.tobytes(), scales.tobytes()]
            assert np.abs(np.asarray(plain[name]).astype(F32) - tensors[name].astype(F32)).max() <= 1
        again = plain.quantise("mxfp4")
        for name in written:
            box = tuple(slice(n // 3, n - n // 4) for n in written[name].shape)
            assert again[name][box].tobytes() == np.asarray(written[name])[box].tobytes()
    with pytest.raises(UnsupportedError, match="stays plain beside"):
        open_checkpoint(folder).quantise("mxfp4", plain=[r"down_proj"])


def test_q8_0_is_a_type_of_gguf_alone(models: Mapping[str, Checkpoint], tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="gguf alone"):
        models["awq"].quantise("q8_0")
    (tmp_path / "m").mkdir()
    write_safetensors(tmp_path / "m" / "model.safetensors", {"a.q_proj.weight": np.ones((4, 64), F32)})
    for target, more in (("out", ()), ("out.gguf", ("--outtype", "f16")), ("b.gguf", ("--leave-plain", "a"))):
        ran = ckpt("convert", tmp_path / "m", tmp_path / target, "--quantise", "q8_0", *more)
        assert ran.code == USAGE
        assert not (tmp_path / target).exists()


def test_quantise_refuses_what_has_no_codes(models: Mapping[str, Checkpoint], tmp_path: Path) -> None:
    assert (*SCHEMES_TO_WRITE, GGUF_SCHEME) == QUANTISED
    with pytest.raises(UnsupportedError, match="cannot be quantised again"):
        models["awq"].quantise("fp8-block")
    (tmp_path / "m").mkdir()
    values = np.full((4, 4), np.nan, F32)
    write_safetensors(tmp_path / "m" / "model.safetensors", {"a.q_proj.weight": values})
    source = open_checkpoint(tmp_path / "m")
    with pytest.raises(UnsupportedError, match="NaN or infinite"):
        save(source.quantise("fp8-block"), tmp_path / "out.safetensors")
    with pytest.raises(UnsupportedError, match="no matrices"):
        source.quantise("fp8-block", plain=["q_proj"])
    with pytest.raises(NoMatchError):
        source.quantise("fp8-block", plain=["k_proj"])
