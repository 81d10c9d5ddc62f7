"""Updates of experts: all layouts of adapters, merged into all layouts of models, give the same bits."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from ckpt.combine import convert_lora, merge_lora
from ckpt.combine.lora_blob import matmul_in_order
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, InvalidArgumentError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape, slabs
from ckpt_formats.core.tensor import Array, FileBlob, Tensor, read
from held import bits, parameter
from held import checkpoint as held_checkpoint

EXPERTS, RANK, HIDDEN, FFN = 3, 2, 6, 4
ROOT = "model.layers.0.mlp.experts"
FEATURES = {"gate_proj": (FFN, HIDDEN), "up_proj": (FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
Arrays = dict[str, Array]


def checkpoint(arrays: Mapping[str, Array], path: str, extras: Mapping[str, Any]) -> Checkpoint:
    parameters = [parameter(name, {"model": values}) for name, values in arrays.items()]
    return held_checkpoint(parameters, extras=extras, path=Path(path))


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


WEIGHTS = {name: numbers(i, EXPERTS, *shape) for i, (name, shape) in enumerate(FEATURES.items())}
A = {name: numbers(10 + i, EXPERTS, RANK, shape[1]) for i, (name, shape) in enumerate(FEATURES.items())}
B = {name: numbers(20 + i, EXPERTS, shape[0], RANK) for i, (name, shape) in enumerate(FEATURES.items())}


def joined(gate: Array, up: Array, in_turn: bool) -> Array:
    """Rows of gate and up of all experts in one stack."""
    if in_turn:
        return np.stack([gate, up], 2).reshape(len(gate), -1, gate.shape[2])
    return np.concatenate([gate, up], 1)


def stored(weights: Mapping[str, Array], layout: str) -> Arrays:
    """The weights of experts as a model stores them."""
    if layout == "singles":
        return {f"{ROOT}.{e}.{name}.weight": one[e] for name, one in weights.items() for e in range(EXPERTS)}
    if layout == "stacks":
        return {f"{ROOT}.{name}": one for name, one in weights.items()}
    fused = {
        f"{ROOT}.gate_up_proj": joined(weights["gate_proj"], weights["up_proj"], layout == "gpt_oss"),
        f"{ROOT}.down_proj": weights["down_proj"],
    }
    return fused if layout == "out-in" else {name: one.swapaxes(1, 2).copy() for name, one in fused.items()}


MODELS = ("singles", "stacks", "out-in", "in-out", "gpt_oss")


def model(layout: str, weights: Mapping[str, Array] = WEIGHTS) -> Checkpoint:
    config = {"model_type": "gpt_oss" if layout == "gpt_oss" else "qwen3_moe"}
    return checkpoint({"head.weight": numbers(9, 2, 2), **stored(weights, layout)}, "model", {"hf/config.json": config})


def adapter(arrays: Arrays, **config: Any) -> Checkpoint:
    fields = {"peft_type": "LORA", "r": RANK, "lora_alpha": 3, **config}
    named = {f"base_model.model.{name}.weight": values for name, values in arrays.items()}
    return checkpoint(named, "adapter", {"hf/adapter_config.json": fields})


def flat(a: Array, b: Array) -> tuple[Array, Array]:
    """A and B as PEFT stores them, by definition: rank r of expert e is row e*R+r of A, and column r*E+e of B."""
    rows = np.array([a[e, r] for e in range(len(a)) for r in range(a.shape[1])])
    columns = np.array([b[e, :, r] for r in range(a.shape[1]) for e in range(len(a))]).T
    return rows, columns.copy()


def adapters(a: Arrays, b: Arrays) -> dict[str, Checkpoint]:
    """The same updates in each layout that names projections as the model does."""
    return {
        "per expert": adapter(
            {
                f"{ROOT}.{e}.{n}.lora_{x}": one[n][e]
                for n in a
                for e in range(EXPERTS)
                for x, one in (("A", a), ("B", b))
            }
        ),
        "stacked": adapter({f"{ROOT}.{n}.lora_{x}": one[n] for n in a for x, one in (("A", a), ("B", b))}),
        "peft": adapter(
            {
                f"{ROOT}{'.base_layer' * depth}.lora_{x}": one
                for depth, n in enumerate(reversed(a))
                for x, one in zip("AB", flat(a[n], b[n]), strict=True)
            },
            target_parameters=[f"mlp.experts.{n}" for n in a],
        ),
    }


def expected(a: Arrays, b: Arrays) -> Arrays:
    """The weights with updates, each by itself."""
    result = {}
    for name, weights in WEIGHTS.items():
        products = [
            matmul_in_order(y.astype(np.float64), x.astype(np.float64), DTYPES["float32"])
            for x, y in zip(a[name], b[name], strict=True)
        ]
        result[name] = np.stack(products) * np.float32(3 / a[name].shape[1]) + weights
    return result


def assert_merged(result: Checkpoint, arrays: Arrays) -> None:
    for name, values in arrays.items():
        tensor = result.parameters[name].weight
        assert bits(read(tensor)) == bits(values), name
        box = Box(tuple(n // 3 for n in values.shape), tuple(n - n // 4 for n in values.shape))
        assert bits(read(tensor.crop(box))) == bits(values[box.index]), name


@pytest.mark.parametrize("layout", MODELS)
def test_adapters_of_all_layouts_merge_to_the_same_bits(layout: str) -> None:
    merged = stored(expected(A, B), layout)
    for one in (adapters(A, B)["per expert"], adapters(A, B)["stacked"]):
        assert_merged(merge_lora(model(layout), one), merged)


@pytest.mark.parametrize("layout", MODELS)
def test_update_of_gate_and_up_in_one_matrix_shares_a(layout: str) -> None:
    """For models that store them apart, A is that of both, and B is split."""
    in_turn = layout == "gpt_oss"
    a = {"gate_up_proj": A["gate_proj"], "down_proj": A["down_proj"]}
    b = {"gate_up_proj": joined(B["gate_proj"], B["up_proj"], in_turn), "down_proj": B["down_proj"]}
    merged = stored(expected({**A, "up_proj": A["gate_proj"]}, B), layout)
    for one in adapters(a, b).values():
        assert_merged(merge_lora(model(layout), one), merged)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_shared_matrix_is_that_of_every_expert(first: bool, second: bool) -> None:
    a = {n: np.repeat(one[:1], EXPERTS, 0) if first else one for n, one in A.items()}
    b = {n: np.repeat(one[:1], EXPERTS, 0) if second else one for n, one in B.items()}
    arrays = {f"{ROOT}.{n}.lora_A": one[0] if first else one for n, one in a.items()}
    arrays |= {f"{ROOT}.{n}.lora_B": one[0] if second else one for n, one in b.items()}
    for layout in ("singles", "gpt_oss"):
        assert_merged(merge_lora(model(layout), adapter(arrays)), stored(expected(a, b), layout))


def test_experts_without_an_update_stay_as_they_are() -> None:
    arrays = {f"{ROOT}.1.up_proj.lora_A": A["up_proj"][1], f"{ROOT}.1.up_proj.lora_B": B["up_proj"][1]}
    weights = {name: one.copy() for name, one in WEIGHTS.items()}
    weights["up_proj"][1] = expected(A, B)["up_proj"][1]
    for layout in MODELS:
        assert_merged(merge_lora(model(layout), adapter(arrays)), stored(weights, layout))


def test_update_of_peft_is_read_once_for_all_experts(tmp_path: Path) -> None:
    """Although each number of an expert's B lies between those of others. The model is read slab after slab."""
    experts, rank, outputs, inputs = 16, 4, 64, 32
    base = checkpoint({f"{ROOT}.down_proj": numbers(1, experts, outputs, inputs)}, "model", {})
    shapes = {"A": (experts * rank, inputs), "B": (outputs, rank * experts)}
    parameters = {}
    for name, shape in shapes.items():
        values = numbers(2, *shape)
        (tmp_path / name).write_bytes(values.tobytes())
        stored_name = f"base_model.model.{ROOT}.lora_{name}.weight"
        blob = FileBlob.packed(tmp_path / name, 0, shape, values.dtype)
        parameters[stored_name] = Parameter(stored_name, "parameter", {"model": Tensor.of(blob)})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 3, "target_parameters": ["experts.down_proj"]}
    one = replace(checkpoint({}, "adapter", {"hf/adapter_config.json": config}), parameters=parameters)
    merged = merge_lora(base, one).parameters[f"{ROOT}.down_proj"].weight
    nbytes = dict.fromkeys(shapes, 0)

    def observe(path: Path, offset: int, content: memoryview) -> None:
        nbytes[path.name] += len(content)

    with Reader(check=False) as reader, reader.observed(observe):
        for box in slabs(merged.shape, 500):
            merged.crop(box).read_into(np.empty(box.shape, np.float32), reader)
    assert nbytes["B"] == 4 * prod(shapes["B"])
    assert nbytes["A"] <= 5 * 4 * prod(shapes["A"])  # for each slab of an expert


def test_rank_and_scale_of_a_parameter_follow_patterns() -> None:
    a, b = {"down_proj": numbers(30, EXPERTS, 1, FFN)}, {"down_proj": numbers(31, EXPERTS, HIDDEN, 1)}
    for one in adapters(a, b).values():
        config = {**one.extras["hf/adapter_config.json"], "rank_pattern": {"down_proj": 1}, "r": 7}
        result = merge_lora(model("out-in"), replace(one, extras={"hf/adapter_config.json": config}))
        changed = expected({**A, **a}, {**B, **b})["down_proj"]
        assert_merged(result, {f"{ROOT}.down_proj": changed})


def square(layout: str, **config: Any) -> tuple[Checkpoint, Checkpoint]:
    """A model whose down projections are square, and PEFT's update of these."""
    shapes = {"gate_up_proj": (EXPERTS, 2 * HIDDEN, HIDDEN), "down_proj": (EXPERTS, HIDDEN, HIDDEN)}
    arrays = {name: numbers(40, *shape) for name, shape in shapes.items()}
    base = {f"{ROOT}.{n}": x if layout == "out-in" else x.swapaxes(1, 2).copy() for n, x in arrays.items()}
    parts = {n: flat(numbers(41, EXPERTS, RANK, s[2]), numbers(42, EXPERTS, s[1], RANK)) for n, s in shapes.items()}
    tensors = {
        f"{ROOT}{depth}.lora_{x}": one
        for n, depth in (("gate_up_proj", ".base_layer"), ("down_proj", ""))
        for x, one in zip("AB", parts[n], strict=True)
    }
    targets = [f"mlp.experts.{name}" for name in shapes]
    return checkpoint(base, "model", {}), adapter(tensors, target_parameters=targets, **config)


@pytest.mark.parametrize("layout", ["out-in", "in-out"])
def test_axes_of_square_experts_are_those_of_their_module_or_stated(layout: str) -> None:
    base, both = square(layout)
    result = read(merge_lora(base, both).parameters[f"{ROOT}.down_proj"].weight)
    config = {**both.extras["hf/adapter_config.json"], "target_parameters": ["mlp.experts.down_proj"]}
    only = replace(both.select(skip=["base_layer"]), extras={"hf/adapter_config.json": config})
    with pytest.raises(UnsupportedError, match=r"are square: .* is unknown"):
        merge_lora(base, only)
    for axes in ("out-in", "in-out"):
        stated = read(merge_lora(base, only, expert_axes=axes).parameters[f"{ROOT}.down_proj"].weight)
        assert (bits(stated) == bits(result)) == (axes == layout)


def test_square_experts_that_are_stored_one_by_one_need_axes_for_an_update_of_peft() -> None:
    """Versions of PEFT read the stacks of such models in memory differently."""
    arrays = {f"{ROOT}.{e}.down_proj.weight": numbers(e, HIDDEN, HIDDEN) for e in range(EXPERTS)}
    a, b = {"down_proj": numbers(41, EXPERTS, RANK, HIDDEN)}, {"down_proj": numbers(42, EXPERTS, HIDDEN, RANK)}
    base, written = checkpoint(arrays, "model", {}), adapters(a, b)
    with pytest.raises(UnsupportedError, match=r"are square: .* is unknown"):
        merge_lora(base, written["peft"])
    plain = contents(merge_lora(base, written["per expert"]))
    assert contents(merge_lora(base, written["peft"], expert_axes="out-in")) == plain
    assert contents(merge_lora(base, written["peft"], expert_axes="in-out")) != plain
    assert contents(merge_lora(base, written["stacked"])) == plain


def test_square_update_of_gate_and_up_is_split_only_as_it_is_stored() -> None:
    shape = (HIDDEN // 2, HIDDEN)
    names = [f"{ROOT}.{e}.{name}.weight" for e in range(EXPERTS) for name in ("gate_proj", "up_proj")]
    base = checkpoint({name: numbers(i, *shape) for i, name in enumerate(names)}, "model", {})
    a, b = {"gate_up_proj": numbers(1, EXPERTS, RANK, HIDDEN)}, {"gate_up_proj": numbers(2, EXPERTS, HIDDEN, RANK)}
    one = adapters(a, b)
    with pytest.raises(UnsupportedError, match="is unknown"):
        merge_lora(base, one["peft"])
    with pytest.raises(UnsupportedError, match="cannot be split into gate and up"):
        merge_lora(base, one["peft"], expert_axes="in-out")
    assert contents(merge_lora(base, one["peft"], expert_axes="out-in")) == contents(merge_lora(base, one["stacked"]))


def without(one: Checkpoint, *names: str) -> Checkpoint:
    return one.select(skip=list(names))


def with_arrays(one: Checkpoint, arrays: Arrays) -> Checkpoint:
    changed = {name: parameter(name, {"model": values}) for name, values in arrays.items()}
    return replace(one, parameters={**one.parameters, **changed})


DOWN = f"base_model.model.{ROOT}.down_proj"
PEFT = f"base_model.model.{ROOT}"
REFUSED: dict[str, tuple[str, str, Callable[[Checkpoint], Checkpoint], type[CkptError], str]] = {
    "no-a": ("stacked", "out-in", lambda x: without(x, rf"{DOWN}.lora_A"), IncompleteError, "lacks lora_A"),
    "experts": (
        "stacked",
        "out-in",
        lambda x: with_arrays(x, {f"{DOWN}.lora_A.weight": A["down_proj"][:2]}),
        CorruptError,
        "not one of 3 experts",
    ),
    "rank": (
        "stacked",
        "out-in",
        lambda x: with_arrays(x, {f"{DOWN}.lora_A.weight": numbers(1, EXPERTS, 5, FFN)}),
        UnsupportedError,
        "has rank 5, but adapter_config.json states 2",
    ),
    "ranks": (
        "stacked",
        "out-in",
        lambda x: with_arrays(x, {f"{DOWN}.lora_B.weight": numbers(1, EXPERTS, HIDDEN, 5)}),
        UnsupportedError,
        r"update of \[6, 5\] times \[2, 4\]",
    ),
    "flat-rank": (
        "peft",
        "stacks",
        lambda _: with_arrays(
            adapters({"down_proj": A["down_proj"]}, B)["peft"], {f"{PEFT}.lora_A.weight": numbers(1, 5, FFN)}
        ),
        CorruptError,
        "not one of 3 experts",
    ),
    "shape": (
        "stacked",
        "out-in",
        lambda x: with_arrays(x, {f"{DOWN}.lora_A.weight": numbers(1, EXPERTS, RANK, FFN + 1)}),
        UnsupportedError,
        r"fits no weights of the model: experts have \[6, 4\] in",
    ),
    "projection": (
        "stacked",
        "out-in",
        lambda x: with_arrays(x, {f"{PEFT}.w9.lora_{k}.weight": v["up_proj"] for k, v in (("A", A), ("B", B))}),
        UnsupportedError,
        "w9` fits no weights of the model",
    ),
    "expert": (
        "per expert",
        "out-in",
        lambda x: with_arrays(x, {f"{PEFT}.7.up_proj.lora_{k}": v["up_proj"][0] for k, v in (("A", A), ("B", B))}),
        IncompleteError,
        "has 3 experts, but the adapter updates expert 7",
    ),
    "bias": (
        "stacked",
        "out-in",
        lambda x: with_arrays(x, {f"{DOWN}.lora_magnitude_vector": numbers(1, HIDDEN)}),
        UnsupportedError,
        "of experts has lora_magnitude_vector",
    ),
    "levels": ("peft", "stacks", lambda x: without(x, "base_layer"), UnsupportedError, "has 1 updates for its 3"),
    "many": (
        "peft",
        "stacks",
        lambda x: replace(
            x,
            extras={
                "hf/adapter_config.json": {
                    "peft_type": "LORA",
                    "target_parameters": [f"experts.p{i}" for i in range(9)],
                }
            },
        ),
        UnsupportedError,
        "updates 9 parameters of one module",
    ),
    "targets": (
        "peft",
        "stacks",
        lambda x: replace(x, extras={"hf/adapter_config.json": {"peft_type": "LORA", "target_parameters": [1]}}),
        CorruptError,
        "`target_parameters` is not a list of names",
    ),
    "two": (
        "stacked",
        "out-in",
        lambda x: with_arrays(
            x,
            {
                f"{PEFT}.gate_up_proj.lora_A": A["gate_proj"],
                f"{PEFT}.gate_up_proj.lora_B": joined(B["gate_proj"], B["up_proj"], False),
            },
        ),
        UnsupportedError,
        "two tensors of the adapter are meant for",
    ),
    "stack-of-one": (
        "per expert",
        "out-in",
        lambda x: with_arrays(x, {f"{PEFT}.0.up_proj.lora_A.weight": A["up_proj"]}),
        UnsupportedError,
        "has a stack for one expert",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_updates_that_do_not_fit_are_refused(case: str) -> None:
    layout, weights, change, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        merge_lora(model(weights), change(adapters(A, B)[layout]))


def test_order_of_gate_and_up_needs_the_type_of_the_model() -> None:
    base = replace(model("out-in"), extras={})
    with pytest.raises(UnsupportedError, match=r"in turn or as two halves is unknown: .* no config\.json"):
        merge_lora(base, adapters(A, B)["stacked"])
    fused = {"gate_up_proj": A["gate_proj"]}, {"gate_up_proj": joined(B["gate_proj"], B["up_proj"], False)}
    merge_lora(base, adapters(*fused)["stacked"])


def test_order_of_parameters_that_shapes_do_not_tell_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"could be of .* in several orders"):
        merge_lora(model("stacks"), adapters({n: A[n] for n in ("gate_proj", "up_proj")}, B)["peft"])


def test_other_axes_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="'out-in' or 'in-out'"):
        merge_lora(model("stacks"), adapters(A, B)["stacked"], expert_axes="both")  # type: ignore[arg-type]


# --- conversion ---

Layout = Literal["per-expert", "peft", "stacked", "shared"]
LAYOUTS: tuple[Layout, ...] = ("per-expert", "peft", "stacked")


def contents(one: Checkpoint) -> dict[str, tuple[str, Shape, bytes]]:
    return {name: bits(read(parameter.weight)) for name, parameter in one.parameters.items()}


def fused(in_turn: bool = False) -> tuple[Arrays, Arrays]:
    """A and B of the projections of PEFT: gate and up have one A."""
    b = {"gate_up_proj": joined(B["gate_proj"], B["up_proj"], in_turn), "down_proj": B["down_proj"]}
    return {"gate_up_proj": A["gate_proj"], "down_proj": A["down_proj"]}, b


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", ["per expert", "peft", "stacked"])
def test_converted_adapter_merges_to_the_same_bits(source: str, target: Layout, in_turn: bool) -> None:
    gate_up: Any = "in-turn" if in_turn else "halves"
    one = adapters(*fused(in_turn))[source]
    converted = convert_lora(one, target, gate_up)
    base = model("gpt_oss" if in_turn else "out-in")
    assert contents(merge_lora(base, converted)) == contents(merge_lora(base, one))
    for name, tensor in ((name, one.weight) for name, one in converted.parameters.items()):
        box = Box(tuple(n // 3 for n in tensor.shape), tuple(n - n // 4 for n in tensor.shape))
        assert bits(read(tensor.crop(box))) == bits(read(tensor)[box.index]), name
    again = convert_lora(converted, "peft", gate_up)
    assert contents(again) == contents(adapters(*fused(in_turn))["peft"])
    assert again.extras["hf/adapter_config.json"]["target_parameters"] == [
        f"{ROOT}.down_proj",
        f"{ROOT}.gate_up_proj",
    ]


def test_converted_layouts_are_those_of_their_definitions() -> None:
    a, b = fused()
    apart = {"gate_proj": a["gate_up_proj"], "up_proj": a["gate_up_proj"], "down_proj": a["down_proj"]}
    written = adapters(a, b)
    assert contents(convert_lora(written["peft"], "stacked")) == contents(written["stacked"])
    assert contents(convert_lora(written["stacked"], "peft")) == contents(written["peft"])
    assert contents(convert_lora(written["peft"], "per-expert", "halves")) == contents(adapters(apart, B)["per expert"])


@pytest.mark.parametrize("in_turn", [False, True])
def test_gate_and_up_with_different_a_are_joined_with_zeros_in_b(in_turn: bool) -> None:
    one = adapters(A, B)["per expert"]
    converted = convert_lora(one, "peft", "in-turn" if in_turn else "halves")
    config = converted.extras["hf/adapter_config.json"]
    assert config["rank_pattern"] == {f"{ROOT}.gate_up_proj": 2 * RANK}
    assert config["alpha_pattern"] == {f"{ROOT}.gate_up_proj": 6}
    assert converted.parameters[f"{PEFT}.base_layer.lora_A.weight"].weight.shape == (EXPERTS * 2 * RANK, HIDDEN)
    base = model("gpt_oss" if in_turn else "in-out")
    assert contents(merge_lora(base, converted)) == contents(merge_lora(base, one))


def test_shared_layout_stores_equal_matrices_once() -> None:
    a = {name: np.repeat(one[:1], EXPERTS, 0) for name, one in A.items()}
    one = adapters(a, B)["per expert"]
    converted = convert_lora(one, "shared")
    assert {name.rpartition("lora_")[2]: len(x.weight.shape) for name, x in converted.parameters.items()} == {
        "A.weight": 2,
        "B.weight": 3,
    }
    for base in (model("singles"), model("gpt_oss")):
        assert contents(merge_lora(base, converted)) == contents(merge_lora(base, one))
    assert contents(convert_lora(converted, "per-expert")) == contents(one)
    both = adapters(a, {name: np.repeat(one[:1], EXPERTS, 0) for name, one in B.items()})["stacked"]
    assert contents(merge_lora(model("singles"), convert_lora(both, "shared"))) == contents(
        merge_lora(model("singles"), both)
    )


def test_rank_and_scale_of_patterns_are_those_of_the_new_names() -> None:
    one = adapters(*fused())["peft"]
    config = one.extras["hf/adapter_config.json"]
    patterns = {"alpha_pattern": {r"experts\.gate_up_proj": 5}, "rank_pattern": {"gate_up_proj": RANK}, "r": 7}
    one = replace(one, extras={"hf/adapter_config.json": {**config, **patterns, "rank_pattern": {".*_proj": RANK}}})
    converted = convert_lora(one, "per-expert", "halves")
    assert contents(merge_lora(model("out-in"), converted)) == contents(merge_lora(model("out-in"), one))


def test_all_else_of_a_converted_adapter_stays() -> None:
    more = {
        "layers.0.q_proj.lora_A": numbers(1, 2, 2),
        "layers.0.q_proj.lora_B": numbers(2, 2, 2),
        "head": numbers(3, 2),
    }
    one = with_arrays(adapters(*fused())["peft"], {f"base_model.model.{name}.weight": x for name, x in more.items()})
    config = {**one.extras["hf/adapter_config.json"], "target_modules": ["q_proj", "down_proj"], "lora_dropout": 0.1}
    one = replace(one, extras={"hf/adapter_config.json": config})
    stacked = convert_lora(one, "stacked")
    assert {name for name in stacked.parameters if "experts" not in name} == {
        f"base_model.model.{name}.weight" for name in more
    }
    result = stacked.extras["hf/adapter_config.json"]
    assert (result["lora_dropout"], result["target_modules"]) == (0.1, ["q_proj", "down_proj", "gate_up_proj"])
    assert convert_lora(stacked, "peft").extras["hf/adapter_config.json"]["target_modules"] == ["q_proj"]


def test_conversion_refuses_what_it_would_have_to_guess() -> None:
    written, by_peft = adapters(A, B), adapters(*fused())["peft"]
    with pytest.raises(UnsupportedError, match="in turn or as two halves"):
        convert_lora(by_peft, "per-expert")
    with pytest.raises(UnsupportedError, match="in turn or as two halves"):
        convert_lora(written["stacked"], "peft")
    with pytest.raises(UnsupportedError, match="share neither A nor B"):
        convert_lora(written["stacked"], "shared")
    scaled = adapter({}, alpha_pattern={"gate_proj": 5}).extras
    with pytest.raises(UnsupportedError, match="gate and up have different A, and no update of rank 4"):
        convert_lora(replace(written["stacked"], extras=scaled), "peft", "halves")
    with pytest.raises(UnsupportedError, match="for some experts only"):
        convert_lora(without(written["per expert"], r"experts\.1\.up_proj"), "stacked")
    with pytest.raises(UnsupportedError, match="has one of gate_proj and up_proj"):
        convert_lora(without(written["stacked"], "up_proj"), "peft", "halves")
    with pytest.raises(UnsupportedError, match="is unknown"):
        convert_lora(adapters({n: A[n] for n in ("gate_proj", "up_proj")}, B)["peft"], "stacked")
    with pytest.raises(UnsupportedError, match="has no updates of experts"):
        convert_lora(adapter({"q_proj.lora_A": numbers(1, 2, 2), "q_proj.lora_B": numbers(2, 2, 2)}), "stacked")
    shared = {f"{ROOT}.w2.lora_A": A["down_proj"][0], f"{ROOT}.w2.lora_B": B["down_proj"][0]}
    with pytest.raises(UnsupportedError, match="do not state how many"):
        convert_lora(adapter(shared), "stacked")
    with pytest.raises(InvalidArgumentError, match="layout must be"):
        convert_lora(by_peft, "other")  # type: ignore[arg-type]
