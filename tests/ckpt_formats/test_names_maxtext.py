"""Names of MaxText: its own models' names and shapes, its own converter's values, and all bits back."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckpt
from ckpt.rename import use_names
from ckpt_formats.containers.zarr import ArrayLayout, ChunkEncoding
from ckpt_formats.containers.zarr_chunks import ChunkBlob, ChunkReader
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import Array, ArrayBlob, Tensor, read
from ckpt_formats.core.value_changes import totals
from ckpt_formats.engines.orbax.tree import find_model, path_of
from ckpt_formats.names.config import CONFIG, configured_model
from ckpt_formats.names.packings import stored_shape
from ckpt_formats.names.scanned import ALL, scan_of
from ckpt_formats.names.scanned import one_by_one as one_by_one_of_scan
from ckpt_formats.names.translate import naming_of
from held import bits, checkpoint, contents, parameter
from jax_jobs.maxtext_models import CONFIGS, config_of, weight

TRUTH: Mapping[str, dict[str, list[Any]]] = json.loads(
    (Path(__file__).parents[1] / "jobs" / "jax_jobs" / "maxtext.json").read_text()
)
"""By model and layers: for each name of MaxText 0.2.5 its shape, and if its converter knows the model, digests of the
values in float32 and bfloat16. Written by `tests/jobs/jax_jobs/maxtext_truth.py`."""
BIAS = "mlp.gate.e_score_correction_bias"
ROUNDED = ("gemma", "gemma2", "gemma3")
"""Models whose norms MaxText stores with one added."""


@cache
def model(name: str, dtype: str = "float32", *, moments: bool = True, **entries: Any) -> Checkpoint:
    """A model of transformers, with Adam's moments of each weight."""
    config = {**config_of(name), **entries}
    configured = configured_model(config)
    assert configured is not None
    known = configured.model
    tie = known.tie("hf")
    parameters = []
    for one in known.stored("hf"):
        if one.is_copy or (tie and tie.alias in one.names):
            continue
        shape = stored_shape(one.packing, one.scope, known.shape)
        states = {"model": weight(one.names[0], shape).astype(DTYPES[dtype])}
        if moments and not one.names[0].endswith(BIAS):
            states["exp_avg"] = weight(f"{one.names[0]} first", shape)
            states["exp_avg_sq"] = np.abs(weight(f"{one.names[0]} second", shape))
        parameters.append(parameter(one.names[0], states))
    return checkpoint(parameters, (), {CONFIG: config})


def values(source: Checkpoint, name: str, state: str = "model") -> Array:
    return read(source.parameters[name].states[state])


def one_by_one(renamed: Checkpoint, name: str) -> Checkpoint:
    """The layers of a scanned model as MaxText stores them with `scan_layers=False`, by the names of its own model."""
    parameters = {}
    layers = config_of(name)["num_hidden_layers"]
    for own, scanned in renamed.parameters.items():
        for new, index in _unscanned(own, layers):
            states = {state: read(tensor) for state, tensor in scanned.states.items()}
            at = (index,) if own.startswith("MoEBiasVar.") else (slice(None), index)
            parameters[new] = parameter(
                new, {state: array if index is None else array[at] for state, array in states.items()}
            )
    return replace(renamed, parameters=parameters)


def _unscanned(name: str, layers: int) -> list[tuple[str, int | None]]:
    """The names of a tensor's layers, and their places in the stack; None: it is no stack."""
    head, separator, rest = name.partition("layers.")
    if match := re.fullmatch(r"decoder\.layers_remainder\.layers_(\d)\.(.+)", name):
        return [(f"decoder.layers_{layers // 6 * 6 + int(match[1])}.{match[2]}", None)]
    if not separator:
        return [(name, None)]
    if match := re.fullmatch(r"layers_(\d)\.(.+)", rest):
        cycle = 6 if layers == 8 else 2
        return [(f"{head}layers_{i * cycle + int(match[1])}.{match[2]}", i) for i in range(layers // cycle)]
    count = {"decoder.dense_": 1, "decoder.moe_": layers - 1}.get(head.removeprefix("MoEBiasVar."), layers)
    count = count // 2 if "_local." in rest or "_global." in rest else count
    return [(f"{head}layers_{i}.{rest}", i) for i in range(count)]


@pytest.mark.parametrize("name", CONFIGS)
def test_names_shapes_and_values_are_those_of_maxtext(name: str) -> None:
    renamed = {
        dtype: use_names(model(name, dtype, moments=False), "maxtext", allow_rounding=name in ROUNDED)
        for dtype in ("float32", "bfloat16")
    }
    for layers in ("scanned", "one by one"):
        own = {dtype: one if layers == "scanned" else one_by_one(one, name) for dtype, one in renamed.items()}
        expected = TRUTH[f"{name} {layers}"]
        assert own["float32"].parameters.keys() == expected.keys()
        for key, (shape, *digests) in expected.items():
            for dtype, digest in zip(own, digests, strict=False):
                array = values(own[dtype], key)
                assert list(array.shape) == shape, key
                assert sha256(array.tobytes()).hexdigest()[:8] == digest, (key, dtype)
            assert list(own["float32"].parameters[key].weight.shape) == shape, key


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ROUNDED])
def test_every_bit_returns_from_scanned_layers_and_from_layers_one_by_one(name: str) -> None:
    source = model(name)
    renamed = use_names(source, "maxtext")
    assert naming_of(renamed) == naming_of(one_by_one(renamed, name)) == "maxtext"
    assert contents(use_names(renamed, "hf")) == contents(source)
    assert contents(use_names(one_by_one(renamed, name), "hf")) == contents(source)


@pytest.mark.parametrize("name", ROUNDED)
def test_gemma_needs_rounding_which_is_refused_unless_it_is_allowed(name: str) -> None:
    source = model(name)
    with pytest.raises(UnsupportedError, match="with one added"):
        use_names(source, "maxtext")
    renamed = use_names(source, "maxtext", allow_rounding=True)
    with pytest.raises(UnsupportedError, match="with one added"):
        use_names(renamed, "hf")
    for one in (renamed, one_by_one(renamed, name)):
        back = use_names(one, "hf", allow_rounding=True)
        for own in source:
            np.testing.assert_allclose(values(back, own), values(source, own), atol=2e-7)
            if "norm" in own:  # a gradient does not change with what is added
                assert bits(values(back, own, "exp_avg")) == bits(values(source, own, "exp_avg"))


def test_moments_are_scaled_against_their_weights() -> None:
    """A quarter of a weight has four times its gradient."""
    source = model("llama2")
    renamed = use_names(source, "maxtext")
    for state, factor in (("model", 0.25), ("exp_avg", 4.0), ("exp_avg_sq", 16.0)):
        own = values(source, "model.layers.1.self_attn.q_proj.weight", state)
        stored = values(renamed, "decoder.layers.self_attention.query.kernel", state)[:, 1]
        assert bits(stored.reshape(64, 64).T.copy()) == bits(own * np.float32(factor))
    for one, text in ((renamed, "MaxText's AdamW"), (use_names(renamed, "hf"), "torch's AdamW")):
        rate = "0.25" if one is renamed else "4"
        assert any(text in notice and f"these is multiplied by {rate}," in notice for notice in one.notices)


def test_factors_that_are_no_powers_of_two_are_refused_or_rounded() -> None:
    source = model("llama2", head_dim=8)
    with pytest.raises(UnsupportedError, match=r"divided by 2\.82843") as caught:
        use_names(source, "maxtext")
    assert "allow_rounding" in (caught.value.hint or "")
    renamed = use_names(source, "maxtext", allow_rounding=True)
    stored = values(renamed, "decoder.layers.self_attention.query.kernel")[:, 0].reshape(64, -1).T
    expected = values(source, "model.layers.0.self_attn.q_proj.weight") * np.float32(1 / np.sqrt(8))
    assert bits(stored.copy()) == bits(expected)
    squares = values(renamed, "decoder.layers.self_attention.query.kernel", "exp_avg_sq")[:, 0].reshape(64, -1).T
    expected = values(source, "model.layers.0.self_attn.q_proj.weight", "exp_avg_sq") * np.float32(8)
    np.testing.assert_allclose(squares, expected, rtol=2e-7)


@pytest.mark.parametrize(("value", "state"), [(1e-45, "model"), (3e38, "exp_avg")])
def test_values_that_lose_bits_are_refused_when_they_are_read(value: float, state: str) -> None:
    source = model("llama2")
    name = "model.layers.1.self_attn.q_proj.weight"
    states = {key: read(tensor) for key, tensor in source.parameters[name].states.items()}
    states[state] = states[state].copy()
    states[state][3, 5] = value
    changed = replace(source, parameters={**source.parameters, name: parameter(name, states)})
    renamed = use_names(changed, "maxtext")
    with pytest.raises(UnsupportedError, match=r"layers\.1\.self_attn\.q_proj\.weight.*lose bits"):
        values(renamed, "decoder.layers.self_attention.query.kernel", state)


def test_values_that_overflow_or_underflow_are_counted_if_rounding_is_allowed() -> None:
    source = model("llama2")
    name = "model.layers.1.self_attn.q_proj.weight"
    states = {key: read(tensor).copy() for key, tensor in source.parameters[name].states.items()}
    states["model"][3, 5:7] = 1e-45
    states["exp_avg"][60, 0] = 3e38
    changed = replace(source, parameters={**source.parameters, name: parameter(name, states)})
    query = use_names(changed, "maxtext", allow_rounding=True).parameters["decoder.layers.self_attention.query.kernel"]
    with Reader(check=False) as reader:
        for tensor in query.states.values():
            read(tensor, reader)
        counts = {one.name: (one.overflows, one.underflows) for one in totals(reader.changes.seen())}
    assert counts == {f"{name} (model)": (0, 2), f"{name} (exp_avg)": (1, 0)}


def test_states_that_do_not_follow_gradients_are_refused() -> None:
    source = model("llama2")
    name = "model.layers.0.self_attn.q_proj.weight"
    states = {key: read(tensor) for key, tensor in source.parameters[name].states.items()}
    changed = parameter(name, {**states, "momentum_buffer": states["exp_avg"]})
    with pytest.raises(UnsupportedError, match="momentum_buffer"):
        use_names(replace(source, parameters={**source.parameters, name: changed}), "maxtext")


@pytest.mark.slow
def test_balance_biases_are_read_where_each_version_of_maxtext_has_them(tmp_path: Path) -> None:
    """In a collection beside `params`, in `params`, and, of a training, among the variables that are no parameters."""
    source = model("deepseek_v3")
    renamed = use_names(source, "maxtext")
    name = "MoEBiasVar.decoder.moe_layers.DeepSeekMoeBlock_0.MoeBlock_0.gate.bias"
    stack = values(renamed, name)
    assert bits(stack[1].copy()) == bits(values(source, f"model.layers.2.{BIAS}"))
    parameters = {key: one for key, one in renamed.parameters.items() if key != name}
    within = name.removeprefix("MoEBiasVar.")
    earlier = replace(renamed, parameters={**parameters, within: parameter(within, {"model": stack.T.copy()})})
    assert contents(use_names(earlier, "hf")) == contents(source)
    assert contents(use_names(earlier, "maxtext")) == contents(renamed)

    config = config_of("deepseek_v3")
    for one, place in ((renamed, "nnx_aux.model.decoder"), (renamed.weights_only(), "params.MoEBiasVar.decoder")):
        ckpt.save(replace(one, extras={}), tmp_path / place, "orbax")
        keys = json.loads((tmp_path / place / "_METADATA").read_text())["tree_metadata"]
        leaves = [".".join(entry["key"] for entry in leaf["key_metadata"]) for leaf in keys.values()]
        assert f"{place}.{within.removeprefix('decoder.')}" in leaves
        assert sum(leaf.startswith("params.params.decoder.") for leaf in leaves) == len(parameters) - 1
        opened = ckpt.open(tmp_path / place)
        assert opened.parameters.keys() - {"step"} == renamed.parameters.keys()
        assert opened.parameters[name].role == "buffer"
        back = use_names(replace(opened, extras={CONFIG: config}), "hf")
        expected = contents(source if one is renamed else source.weights_only())
        assert {key: value for key, value in contents(back).items() if key in expected} == expected
        ckpt.save(opened, tmp_path / f"{place} again", "orbax")
        assert json.loads((tmp_path / f"{place} again" / "_METADATA").read_text())["tree_metadata"] == keys
    ckpt.save(ckpt.open(tmp_path / "nnx_aux.model.decoder").weights_only(), tmp_path / "weights", "orbax")
    weights = json.loads((tmp_path / "weights" / "_METADATA").read_text())["tree_metadata"]
    assert weights.keys() == keys.keys() - {"('step',)"}


@pytest.mark.parametrize(
    "more", ["params.other", "params.params.MoEBiasVar.b", "params.params", "params.params.MoEBiasVar.a"]
)
def test_collections_are_part_of_all_names_where_some_would_not_tell_theirs(more: str) -> None:
    paths = [tuple(name.split(".")) for name in ("params.params.a", "params.MoEBiasVar.a")]
    array = Tensor.of(ArrayBlob(np.zeros(2, np.float32)))
    model_part = find_model({}, dict.fromkeys(paths, array))
    assert model_part is not None
    assert [*model_part.names.values()] == ["a", "MoEBiasVar.a"]
    paths.append(tuple(more.split(".")))
    model_part = find_model({}, dict.fromkeys(paths, array))
    assert model_part is not None
    assert not model_part.has_collections
    assert [(*model_part.prefix, *path_of(name, ".", False)) for name in model_part.names.values()] == paths


@pytest.mark.parametrize(
    ("compression", "rows", "is_noted"), [("zstd", 1 << 16, True), ("zstd", 64, False), (None, 1 << 16, False)]
)
def test_layers_in_compressed_chunks_that_no_cache_holds_are_noted(
    compression: Any, rows: int, is_noted: bool, tmp_path: Path
) -> None:
    shape = (rows, 4, 48)
    layout = ArrayLayout(shape, DTYPES["float32"], shape, ".", "", ChunkEncoding(compression), None, bytes(4))
    chunk = ChunkBlob(layout, b"", ChunkReader(tmp_path), "chunk", True, Box.whole(shape))
    name = "decoder.layers.mlp.wo.kernel"
    stack = Parameter(name, "parameter", {"model": Tensor.of(chunk)})
    source = one_by_one_of_scan(checkpoint([stack]), scan_of(ALL, 4, None))
    assert source.parameters["decoder.layers_3.mlp.wo.kernel"].weight.shape == (rows, 48)
    assert [notice for notice in source.notices if "decoded once for each layer" in notice] == (
        list(source.notices) if is_noted else []
    )
    assert len(source.notices) == is_noted


@pytest.mark.slow
def test_layers_that_predict_further_tokens_are_refused() -> None:
    source = model("deepseek_v3", num_nextn_predict_layers=1)
    with pytest.raises(UnsupportedError, match="multi-token prediction") as caught:
        use_names(source, "maxtext")
    assert r"--skip 'layers\.(3)\.'" in (caught.value.hint or "")
    assert contents(use_names(use_names(source.select(skip=[r"layers\.3\."]), "maxtext"), "hf")).items() <= (
        contents(source).items()
    )


def test_layers_that_maxtext_cannot_scan_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="experts in some layers only"):
        use_names(model("qwen3_moe", decoder_sparse_step=2), "maxtext")
    with pytest.raises(UnsupportedError, match="pairs of layers"):
        use_names(model("gemma2", num_hidden_layers=3), "maxtext", allow_rounding=True)
    with pytest.raises(UnsupportedError, match="cycles of 2 layers in this family, but the model has 3"):
        use_names(model("gpt_oss", num_hidden_layers=3), "maxtext")
    source = model("qwen3")
    with pytest.raises(UnsupportedError, match="layers that are not there: 2"):
        use_names(source.select(skip=[r"\.layers\.2\."]), "maxtext")


def test_scanned_tensor_without_an_axis_of_layers_is_refused() -> None:
    renamed = use_names(model("qwen3"), "maxtext")
    name = "decoder.layers.mlp.wo.kernel"
    for shape in ((10,), (48, 3, 64)):
        other = parameter(name, {"model": np.zeros(shape, np.float32)})
        with pytest.raises(CorruptError, match="no axis of layers"):
            use_names(replace(renamed, parameters={**renamed.parameters, name: other}), "hf")
