"""Checkpoints from Hugging Face's names to Megatron's and back: the laws, and what is refused."""

import json
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt.job import save
from ckpt.pipeline import check_complete
from ckpt.rename import prepare, use_names
from ckpt_cli.main import cli
from ckpt_formats.core.checkpoint import MASTER, Checkpoint, Group, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.tensor import Array, read
from ckpt_formats.core.values import Record, Value
from ckpt_formats.names.arguments import ARGUMENTS, to_arguments, updated, values_of
from ckpt_formats.names.config import CONFIG, checked_values, configured_model, to_config
from ckpt_formats.names.hyperparameters import Values
from ckpt_formats.names.legacy import to_core, to_legacy
from ckpt_formats.names.tables import Family, families, hyperparameters
from ckpt_formats.names.translate import naming_of, to_hf, to_megatron
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from effort import examples
from held import HELD, ORIGIN, array, checkpoint, contents, parameter, tensor
from megatron_files import LLAMA, whole, write

BF16, F32 = DTYPES["bfloat16"], DTYPES["float32"]
FAMILIES = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3")


# Synthetic models of transformers


def family_called(name: str) -> Family:
    return next(family for family in families() if family.name == name)


@st.composite
def models(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """The hyperparameters of models of a family, of odd sizes. Of biases, those that Megatron can have, too."""
    small, gpt2, experts = st.integers(1, 5), family == "gpt2", family == "mixtral"
    groups, head_dim, layers = draw(st.integers(1, 3)), draw(small), draw(st.integers(1, 3))
    heads = groups if gpt2 else groups * draw(st.integers(1, 3))
    is_wide = gpt2 or family == "qwen2"
    rope_type = "default" if gpt2 else draw(st.sampled_from(["default", "linear", "llama3"]))
    biased = gpt2 or (draw(st.booleans()) and family == "llama")
    chosen = draw(st.integers(2, 3)) if experts else None
    window = draw(st.none() | st.integers(1, 9)) if family in ("mistral", "mixtral") else None
    return {
        **{one.name: one.default for one in hyperparameters()},
        "layers": layers,
        "hidden": heads * head_dim if is_wide else draw(st.integers(1, 9)),
        "heads": heads,
        "groups": groups,
        "head_dim": head_dim,
        "vocabulary": draw(st.integers(1, 11)),
        "positions": draw(st.integers(1, 9)),
        "epsilon": draw(st.sampled_from([1e-5, 1e-6])),
        "experts": draw(st.integers(1, 4)) if experts else None,
        "moe_layers": [True] * layers if experts else None,
        "ffn": None if experts else draw(st.integers(1, 7)),
        "expert_ffn": draw(st.integers(1, 7)) if experts else None,
        "chosen": chosen,
        "activation": draw(st.sampled_from(["gelu", "gelu_new"])) if gpt2 else "silu",
        "tied": draw(st.booleans()),
        "theta": None if gpt2 else 10000.0,
        "rope_type": rope_type,
        "rope_factor": None if rope_type == "default" else draw(st.sampled_from([2.0, 8.5])),
        "window": window,
        "window_layers": None if window is None else [True] * layers,
        "gated": not gpt2,
        "position_type": "learned_absolute" if gpt2 else "rope",
        "window_ahead": 0,
        "norm_bias": gpt2,
        "qkv_bias": biased or family == "qwen2",
        "o_bias": biased,
        "mlp_bias": biased,
        "qk_norm": "head" if family == "qwen3" else "none",
    }


@st.composite
def configs(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Their configurations."""
    return to_config(draw(models(family)), family_called(family), "bfloat16")


def shape_of(name: str, model: SimpleNamespace) -> tuple[int, ...]:
    """The shape that transformers gives a tensor."""
    queries, keys = model.heads * model.head_dim, model.groups * model.head_dim
    rows = {
        "embed_tokens": model.vocabulary,
        "lm_head": model.vocabulary,
        "q_proj": queries,
        "k_proj": keys,
        "v_proj": keys,
        "gate_proj": model.ffn,
        "up_proj": model.ffn,
        "w1": model.expert_ffn,
        "w3": model.expert_ffn,
        "gate": model.experts,
        "q_norm": model.head_dim,
        "k_norm": model.head_dim,
        "wte": model.vocabulary,
        "wpe": model.positions,
    }
    columns = {"o_proj": queries, "down_proj": model.ffn, "w2": model.expert_ffn}
    conv1d = {
        "attn.c_attn": (model.hidden, 3 * model.hidden),
        "attn.c_proj": (model.hidden, model.hidden),
        "mlp.c_fc": (model.hidden, model.ffn),
        "mlp.c_proj": (model.ffn, model.hidden),
    }
    *_, outer, inner, kind = ("", *name.split("."))
    if f"{outer}.{inner}" in conv1d:
        shape = conv1d[f"{outer}.{inner}"]
        return shape if kind == "weight" else shape[1:]
    first = rows.get(inner, model.hidden) or 0
    vector = kind == "bias" or "norm" in inner or inner in ("ln_1", "ln_2", "ln_f")
    return (first,) if vector else (first, columns.get(inner, model.hidden))


def values_in(config: Mapping[str, Any]) -> Values:
    return checked_values(config, family_called(config["model_type"]), HELD)


def trained(config: Mapping[str, Any]) -> Checkpoint:
    """A model of this configuration in the middle of a run: masters, moments, steps, two groups."""
    configured = configured_model(config)
    assert configured is not None
    model, tie = SimpleNamespace(**values_in(config)), configured.tie
    names = [name for name in configured.names("hf") or () if tie is None or name != tie.alias]
    parameters = []
    for i, name in enumerate(names):
        shape = shape_of(name, model)
        states = {"model": array(BF16, shape, i), **{s: array(F32, shape, i) for s in ("master", "exp_avg")}}
        states["exp_avg_sq"] = array(F32, shape, i + 1000)
        parameters.append(parameter(name, states | {"count": np.array(3, np.int64)}, step=7))
    flat = [p.name for p in parameters if len(p.weight.shape) == 1]
    groups = (
        Group({"lr": 0.1, "weight_decay": 0.1}, tuple(name for name in names if name not in flat)),
        Group({"lr": 0.1, "weight_decay": 0.0}, tuple(flat)),
    )
    extras: dict[str, Value] = {CONFIG: dict(config), "note": "text", "rng": 3}
    return checkpoint(parameters, groups, extras, {tie.alias: tie.name} if tie else {})


# Laws


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=examples(10))
@given(st.data())
def test_translation_there_and_back_is_the_identity(family: str, data: st.DataObject) -> None:
    source = trained(data.draw(configs(family)))
    there = to_megatron(source)
    check_complete(there)
    assert naming_of(there) == "megatron"
    back = to_hf(there)
    check_complete(back)
    assert naming_of(back) == naming_of(source) == "hf"
    assert contents(back) == contents(source)
    assert list(back.parameters) == list(source.parameters)
    assert (back.groups, back.aliases) == (source.groups, source.aliases)
    assert {n: (p.role, p.values) for n, p in back.parameters.items()} == {
        n: (p.role, p.values) for n, p in source.parameters.items()
    }
    assert {key: back.extras[key] for key in source.extras} == source.extras


@pytest.mark.quick(2)
@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=examples(10))
@given(st.data())
def test_the_configuration_is_made_again_of_the_arguments(family: str, data: st.DataObject) -> None:
    """Without it, and from the other side: names and arguments tell the family and all of its sizes."""
    config = data.draw(configs(family))
    there = to_megatron(trained(config))
    bare = replace(there, extras={ARGUMENTS: there.extras[ARGUMENTS]})
    converted = to_hf(bare)
    configuration = converted.extras[CONFIG]
    unwindowed = family == "mistral" and config["sliding_window"] is None  # which is a Llama
    assert configuration["model_type"] == ("llama" if unwindowed else family)
    assert values_in(configuration) == values_in(config)
    assert contents(converted) == contents(trained(config))
    assert configuration["torch_dtype"] == "bfloat16"
    again = to_megatron(converted)
    assert again.extras[ARGUMENTS].state == there.extras[ARGUMENTS].state
    assert contents(again) == contents(there)


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None)
@given(st.data())
def test_hyperparameters_are_stated_by_both_libraries(family: str, data: st.DataObject) -> None:
    values = data.draw(models(family))
    config = to_config(values, family_called(family), None)
    assert json.loads(json.dumps(config)) == config
    assert values_in(config) == values
    record = updated(None, to_arguments(values, "bfloat16"))
    assert values_of(record, (), values["vocabulary"], partial=False, where=HELD) == values


@settings(deadline=None, max_examples=examples(10))
@given(st.data())
def test_older_names_are_other_names_and_no_more(data: st.DataObject) -> None:
    source = trained(data.draw(st.one_of(configs("llama"), configs("gpt2"))))
    core = to_megatron(source)
    old = to_legacy(core)
    assert naming_of(old) == "megatron-legacy"
    assert all(name.startswith("language_model.") for name in old.parameters)
    back = to_core(old)
    assert contents(back) == contents(core)
    assert (back.groups, back.aliases) == (core.groups, core.aliases)
    assert contents(to_hf(old)) == contents(source)


@pytest.mark.parametrize("version", [0, 1.0, 2.0])
def test_the_oldest_files_have_queries_keys_and_values_in_another_order(version: float) -> None:
    """[3, heads, width], then [heads, width, 3], then [heads, 3, width]."""
    heads, width = 3, 5
    straight = np.arange(heads * 3 * width * 2, dtype=np.float32).reshape(heads, 3, width, 2)
    axes = {0: (1, 0, 2, 3), 1.0: (0, 2, 1, 3), 2.0: (0, 1, 2, 3)}[version]
    name = "language_model.transformer.layers.0.attention.query_key_value"
    stored = {"weight": straight.transpose(axes), "bias": straight.transpose(axes)[..., 0]}
    parameters = []
    for kind, values in stored.items():
        rows = values.reshape(-1, *values.shape[3:])
        parameters.append(parameter(f"{name}.{kind}", {"model": rows, "exp_avg": rows}))
    arguments = updated(None, {"num_attention_heads": heads, "max_position_embeddings": 1})
    source = checkpoint(parameters, (), {ARGUMENTS: arguments, "checkpoint_version": version})
    converted = to_core(source)
    qkv = converted.parameters["decoder.layers.0.self_attention.linear_qkv.weight"]
    for one in qkv.states.values():
        assert np.array_equal(read(one), straight.reshape(-1, 2))
    bias = converted.parameters["decoder.layers.0.self_attention.linear_qkv.bias"].weight
    assert np.array_equal(read(bias), straight[..., 0].reshape(-1))
    assert converted.extras["checkpoint_version"] == 3.0


# What is refused

CONFIGURATION = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 6,
    "intermediate_size": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 3,
    "vocab_size": 7,
    "max_position_embeddings": 9,
    "rms_norm_eps": 1e-5,
}
Q = "model.layers.0.self_attn.q_proj.weight"


def configured(**changes: Any) -> Checkpoint:
    """The model, and a configuration that says something else."""
    source = trained(CONFIGURATION)
    return replace(source, extras={CONFIG: CONFIGURATION | changes})


def without(name: str) -> Checkpoint:
    source = trained(CONFIGURATION)
    return replace(source, parameters={n: p for n, p in source.parameters.items() if n != name}, groups=())


def with_changed(name: str, change: Callable[[Parameter], Parameter]) -> Checkpoint:
    source = trained(CONFIGURATION)
    return replace(source, parameters={n: change(p) if n == name else p for n, p in source.parameters.items()})


def regrouped() -> Checkpoint:
    source = trained(CONFIGURATION)
    first, second = source.groups
    return replace(source, groups=(Group({}, tuple(n for n in first.names if n != Q)), Group({}, (*second.names, Q))))


TO_MEGATRON: dict[str, tuple[Callable[[], Checkpoint], type[CkptError], str]] = {
    "no configuration": (lambda: replace(trained(CONFIGURATION), extras={}), IncompleteError, "no config.json"),
    "another family": (lambda: configured(model_type="bloom"), UnsupportedError, "type bloom"),
    "no sizes": (lambda: configured(hidden_size=None), IncompleteError, "hidden"),
    "a size that is none": (lambda: configured(intermediate_size="5"), CorruptError, "intermediate_size 5"),
    "a size of zero": (lambda: configured(head_dim=0), CorruptError, "head_dim 0.*positive"),
    "heads that do not divide": (
        lambda: configured(num_key_value_heads=3),
        UnsupportedError,
        "cannot be divided into 3 groups",
    ),
    "another width": (lambda: configured(hidden_size=8), CorruptError, r"shape \[7, 6\], but .* \[7, 8\]"),
    "another number of groups": (
        lambda: configured(num_key_value_heads=4),
        CorruptError,
        r"\[6, 6\], but .* \[12, 6\]",
    ),
    "other heads": (lambda: configured(head_dim=4), CorruptError, r"\[12, 6\], but .* \[16, 6\]"),
    "another vocabulary": (lambda: configured(vocab_size=5), CorruptError, r"\[7, 6\], but .* \[5, 6\]"),
    "more layers": (lambda: configured(num_hidden_layers=3), IncompleteError, r"layers\.2\."),
    "fewer layers": (lambda: configured(num_hidden_layers=1), UnsupportedError, r"has no `model\.layers\.1\."),
    "too many layers": (lambda: configured(num_hidden_layers=10**9), CorruptError, "at most 100,000"),
    "tied, but with a head": (lambda: configured(tie_word_embeddings=True), UnsupportedError, "lm_head"),
    "biases that Megatron has not": (
        lambda: trained(CONFIGURATION | {"attention_bias": True}),
        UnsupportedError,
        "add_bias_linear",
    ),
    "another activation": (lambda: configured(hidden_act="relu"), UnsupportedError, "relu"),
    "a stretched rotation": (
        lambda: configured(rope_scaling={"rope_type": "dynamic", "factor": 4.0}),
        UnsupportedError,
        "which Megatron does not support",
    ),
    "no rotation": (lambda: configured(rope_parameters=3), CorruptError, "rope_type"),
    "a base that is none": (lambda: configured(rope_theta="x"), CorruptError, "rope_theta"),
    "an epsilon that is none": (lambda: configured(rms_norm_eps=float("nan")), CorruptError, "epsilon"),
    "quantised": (lambda: configured(quantization_config={"bits": 4}), UnsupportedError, "quantization_config"),
    "a tensor is missing": (lambda: without(Q), IncompleteError, "missing: `model.layers.0.self_attn.q_proj.weight`"),
    "a strange tensor": (
        lambda: with_stranger(),
        UnsupportedError,
        "has no `adapter`",
    ),
    "other steps": (lambda: with_changed(Q, lambda p: replace(p, values={"step": 8})), UnsupportedError, "step 8"),
    "other states": (lambda: with_changed(Q, _without_moments), UnsupportedError, "their states or values differ"),
    "other groups": (regrouped, UnsupportedError, "optimizer group 0"),
    "factored states": (lambda: with_changed("model.norm.weight", _factored), UnsupportedError, "another shape than"),
}


def with_stranger() -> Checkpoint:
    source = trained(CONFIGURATION)
    return replace(
        source, parameters={**source.parameters, "adapter": parameter("adapter", {"model": array(F32, (2,))})}
    )


def _without_moments(one: Parameter) -> Parameter:
    return replace(one, states={"model": one.weight})


def _factored(one: Parameter) -> Parameter:
    return replace(one, states={**one.states, "exp_avg_sq_row": tensor(array(F32, (4,)))})


@pytest.mark.parametrize("kind", TO_MEGATRON)
def test_translation_refuses_models_without_names_of_megatron(kind: str) -> None:
    make, error, message = TO_MEGATRON[kind]
    with pytest.raises(error, match=message):
        to_megatron(make())


def in_megatron(**changes: Value) -> Checkpoint:
    """The model with Megatron's names, and arguments that say something else; one that is `...` is not there."""
    converted = to_megatron(trained(CONFIGURATION))
    record = converted.extras[ARGUMENTS]
    state = {key: value for key, value in {**record.state, **changes}.items() if value is not ...}
    return replace(converted, extras={ARGUMENTS: Record(record.cls, state=state, new=True)}, groups=())


def plus(**names: tuple[int, ...]) -> Checkpoint:
    converted = in_megatron()
    more = {name: parameter(name, {"model": array(F32, shape)}) for name, shape in names.items()}
    return replace(converted, parameters={**converted.parameters, **more})


def minus(pattern: str) -> Checkpoint:
    converted = in_megatron()
    return replace(converted, parameters={name: p for name, p in converted.parameters.items() if pattern not in name})


TO_HF: dict[str, tuple[Callable[[], Checkpoint], type[CkptError], str]] = {
    "no arguments": (lambda: replace(in_megatron(), extras={}), IncompleteError, "the model is not known"),
    "latent attention": (lambda: in_megatron(multi_latent_attention=True), IncompleteError, "kv_lora_rank"),
    "latent attention by its tensors": (
        lambda: plus(**{"decoder.layers.0.self_attention.linear_kv_up_proj.weight": (2, 2)}),
        UnsupportedError,
        "linear_kv_up_proj",
    ),
    "Mamba": (lambda: plus(**{"decoder.layers.0.mixer.in_proj.weight": (2, 2)}), UnsupportedError, "mixer.in_proj"),
    "biases of no family": (
        lambda: plus(**{f"decoder.layers.{i}.self_attention.linear_proj.bias": (6,) for i in range(2)}),
        UnsupportedError,
        "linear_proj.bias|linear_qkv.bias",
    ),
    "norms that add one": (lambda: in_megatron(layernorm_zero_centered_gamma=True), UnsupportedError, "zero_centered"),
    "the same, of old": (lambda: in_megatron(apply_layernorm_1p=True), UnsupportedError, "zero_centered"),
    "another norm": (lambda: in_megatron(normalization="LayerNorm"), UnsupportedError, "normalization"),
    "no gate": (lambda: in_megatron(swiglu=False), UnsupportedError, "swiglu"),
    "no word of a gate": (lambda: in_megatron(swiglu=...), UnsupportedError, "swiglu"),
    "no positions": (lambda: in_megatron(position_embedding_type="none"), UnsupportedError, "position_embedding_type"),
    "unknown positions": (
        lambda: in_megatron(position_embedding_type=...),
        UnsupportedError,
        "position_embedding_type",
    ),
    "delta nets without their tensors": (
        lambda: in_megatron(experimental_attention_variant="gated_delta_net", linear_attention_freq=2),
        UnsupportedError,
        r"also has `decoder.layers.{}.self_attention.A_log`.+linear_attention_freq",
    ),
    "another attention": (
        lambda: in_megatron(experimental_attention_variant="dsa"),
        UnsupportedError,
        "experimental_attention_variant",
    ),
    "no sizes": (lambda: in_megatron(hidden_size=...), IncompleteError, "hidden_size"),
    "a size that is none": (lambda: in_megatron(hidden_size="6"), CorruptError, "hidden_size"),
    "another width": (lambda: in_megatron(ffn_hidden_size=4), CorruptError, r"\[10, 6\], but .* \[8, 6\]"),
    "heads that do not divide": (lambda: in_megatron(num_query_groups=3), CorruptError, "linear_qkv|do not divide"),
    "more layers": (lambda: in_megatron(num_layers=3), IncompleteError, r"layers\.2\."),
    "fewer layers": (lambda: in_megatron(num_layers=1), UnsupportedError, r"layers\.1\."),
    "tied, but with a head": (
        lambda: in_megatron(untie_embeddings_and_output_weights=False),
        UnsupportedError,
        "output_layer.weight",
    ),
    "a tensor is missing everywhere": (lambda: minus("linear_proj"), UnsupportedError, "also has .*linear_proj.weight"),
    "a tensor is missing in one layer": (lambda: minus("1.mlp.linear_fc2"), IncompleteError, "layers.1.mlp.linear_fc2"),
    "one tensor under two names": (
        lambda: plus(**{"decoder.layers.0.self_attention.linear_qkv.layer_norm_weight": (6,)}),
        UnsupportedError,
        "two names",
    ),
    "some layers with windows": (
        lambda: in_megatron(window_size=(3, 0), window_attn_skip_freq=2),
        UnsupportedError,
        "window_size",
    ),
    "biases that have no tensors": (lambda: in_megatron(add_qkv_bias=True), UnsupportedError, "linear_qkv.bias"),
    "norms that have no tensors": (lambda: in_megatron(qk_layernorm=True), UnsupportedError, "q_layernorm"),
    "experts that have no tensors": (lambda: in_megatron(num_experts=4), UnsupportedError, "experts"),
    "a window on both sides": (lambda: in_megatron(window_size=(3, 3)), UnsupportedError, "window_size"),
}


@pytest.mark.parametrize("kind", TO_HF)
def test_translate_refuses_models_of_no_family(kind: str) -> None:
    make, error, message = TO_HF[kind]
    with pytest.raises(error, match=message):
        to_hf(make())


def test_arguments_may_lack_what_a_configuration_says() -> None:
    bare = {key: ... for key in in_megatron().extras[ARGUMENTS].state if key not in ("num_layers", "hidden_size")}
    converted = to_hf(in_megatron(**bare), CONFIGURATION)
    assert contents(converted) == contents(trained(CONFIGURATION))
    assert not converted.notices


@pytest.mark.parametrize("kept", ["embedding", "input_layernorm", "linear_fc2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_state_the_family_of_a_part_of_a_model(family: str, kept: str) -> None:
    """Whose tensors they are does not show in their names: all families have them."""
    kind = {"mixtral": {"num_local_experts": 2}, "mistral": {"sliding_window": 5}}.get(family, {})
    config = {**CONFIGURATION, "model_type": family, **kind}
    if family == "gpt2":
        config |= {"n_layer": 2, "n_head": 2, "n_embd": 6, "n_positions": 3, "vocab_size": 7}
    original = to_megatron(trained(config))
    some = {name: one for name, one in original.parameters.items() if kept in name}
    part = replace(original, parameters=some, groups=(), aliases={}, extras={ARGUMENTS: original.extras[ARGUMENTS]})
    converted = to_hf(part, partial=True)
    assert converted.extras[CONFIG]["model_type"] == family
    assert contents(converted).items() <= contents(trained(config)).items()


def test_a_part_that_may_be_of_several_families_is_not_guessed() -> None:
    converted = in_megatron(add_qkv_bias=..., add_bias_linear=..., qk_layernorm=...)
    part = replace(
        converted, parameters={n: p for n, p in converted.parameters.items() if "linear_fc2" in n}, aliases={}
    )
    with pytest.raises(IncompleteError, match="do not state `add_bias_linear`"):
        to_hf(part, partial=True)


def test_notes_name_what_configuration_and_arguments_state_differently() -> None:
    converted = to_hf(in_megatron(rotary_base=500000), CONFIGURATION)
    assert any("theta 10000.0 and 500000" in notice for notice in converted.notices)


# Padding of the vocabulary


def padded(rows: int, **changes: Value) -> Checkpoint:
    source = in_megatron(padded_vocab_size=rows, **changes)
    tables = ("embedding.word_embeddings.weight", "output_layer.weight")

    def longer(one: Parameter) -> Parameter:
        grown = {s: tensor(np.pad(read(t), [(0, rows - 7), (0, 0)])) if t.shape else t for s, t in one.states.items()}
        return replace(one, states=grown)

    return replace(source, parameters={n: longer(p) if n in tables else p for n, p in source.parameters.items()})


@pytest.mark.parametrize(
    ("source", "config"),
    [
        (lambda: padded(12, tokenizer_type="NullTokenizer", vocab_size=6), None),
        (lambda: padded(12, tokenizer_type="Llama2Tokenizer", vocab_size=9), CONFIGURATION),
        (lambda: in_megatron(padded_vocab_size=12), None),  # a rule has cut it
    ],
)
def test_padding_is_left_out_where_the_true_size_is_known(
    source: Callable[[], Checkpoint], config: Mapping[str, Any] | None
) -> None:
    converted = to_hf(source(), config)
    assert contents(converted) == contents(trained(CONFIGURATION))
    assert converted.extras[CONFIG]["vocab_size"] == 7


def test_padding_is_kept_and_said_where_the_true_size_is_not_known() -> None:
    converted = to_hf(padded(12, tokenizer_type="Llama2Tokenizer", vocab_size=7))
    assert converted.parameters["lm_head.weight"].weight.shape == (12, 6)
    assert converted.extras[CONFIG]["vocab_size"] == 12
    assert any("not known" in notice for notice in converted.notices)


# The command

ARGUMENTS_OF_FILES = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "rotary_base": 10000,
    "max_position_embeddings": 32,
    "norm_epsilon": 1e-5,
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "qk_layernorm": False,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 13,
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)))


def in_hf(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """What transformers calls the tensors of `megatron_files.whole`, by Megatron's own definition of their order."""
    heads, groups, width = LLAMA["num_attention_heads"], LLAMA["num_query_groups"], LLAMA["kv_channels"]
    each = heads // groups
    result = {
        "model.embed_tokens.weight": tensors["embedding.word_embeddings.weight"][:14],
        "model.norm.weight": tensors["decoder.final_layernorm.weight"],
        "lm_head.weight": tensors["output_layer.weight"][:14],
    }
    for i in range(2):
        old, new = f"decoder.layers.{i}", f"model.layers.{i}"
        by_group = tensors[f"{old}.self_attention.linear_qkv.weight"].reshape(groups, each + 2, width, 8)
        for kind, rows in {"q": slice(0, each), "k": slice(each, each + 1), "v": slice(each + 1, None)}.items():
            result[f"{new}.self_attn.{kind}_proj.weight"] = by_group[:, rows].reshape(-1, 8)
        gate, up = np.split(tensors[f"{old}.mlp.linear_fc1.weight"], 2)
        result |= {
            f"{new}.self_attn.o_proj.weight": tensors[f"{old}.self_attention.linear_proj.weight"],
            f"{new}.mlp.gate_proj.weight": gate,
            f"{new}.mlp.up_proj.weight": up,
            f"{new}.mlp.down_proj.weight": tensors[f"{old}.mlp.linear_fc2.weight"],
            f"{new}.input_layernorm.weight": tensors[f"{old}.input_layernorm.weight"],
            f"{new}.post_attention_layernorm.weight": tensors[f"{old}.pre_mlp_layernorm.weight"],
        }
    return result


@pytest.fixture
def megatron(tmp_path: Path) -> Path:
    """A Llama of Megatron's, over two tensor-parallel ranks."""
    return write(tmp_path / "megatron", whole(), 2, ARGUMENTS_OF_FILES)


@pytest.fixture
def truth(tmp_path: Path) -> Path:
    import torch

    torch.save({n: torch.from_numpy(v.copy()) for n, v in in_hf(whole()).items()}, tmp_path / "truth.pt")
    return tmp_path / "truth.pt"


def test_a_model_of_megatrons_becomes_transformers(megatron: Path, truth: Path, tmp_path: Path) -> None:
    done = run("convert", megatron, tmp_path / "out", "--to", "hf")
    assert done.exit_code == 0, done.stderr
    assert "created from the run's arguments: a llama model" in done.stderr
    compared = run("diff", tmp_path / "out", truth, "--tensors-only")
    assert compared.exit_code == 0, compared.output
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["torch_dtype"]) == (14, "float32")


def test_a_model_of_nemo_becomes_transformers(megatron: Path, truth: Path, tmp_path: Path) -> None:
    """Its archive has Megatron's names with a prefix, and no arguments of Megatron."""
    import torch

    assert run("convert", megatron, tmp_path / "described", "--to", "hf").exit_code == 0
    torch.save({f"model.{n}": torch.from_numpy(v.copy()) for n, v in whole().items()}, tmp_path / "model_weights.ckpt")
    with tarfile.open(tmp_path / "model.nemo", "w") as archive:
        archive.add(tmp_path / "model_weights.ckpt", "model_weights.ckpt")
    options = ["--to", "hf", "--strip-prefix", "model.", "--config", tmp_path / "described"]
    done = run("convert", tmp_path / "model.nemo", tmp_path / "out", *options)
    assert done.exit_code == 0, done.stderr
    assert run("diff", tmp_path / "out", truth, "--tensors-only").exit_code == 0


@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_model_of_nemo_needs_no_options_if_its_yaml_states_it(prefix: str, truth: Path, tmp_path: Path) -> None:
    import torch
    import yaml

    rows = {n: v[:14] if n.startswith(("embedding", "output_layer")) else v for n, v in whole().items()}
    torch.save({f"{prefix}{n}": torch.from_numpy(v.copy()) for n, v in rows.items()}, tmp_path / "model_weights.ckpt")
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels")
    entries = {name: LLAMA[name] for name in names} | {"mcore_gpt": True, "encoder_seq_length": 32, "bias": False}
    entries |= {"normalization": "rmsnorm", "activation": "fast-swiglu", "position_embedding_type": "rope"}
    entries |= {"share_embeddings_and_output_weights": False, "optim": {"name": "distributed_fused_adam", "lr": 1e-4}}
    (tmp_path / "model_config.yaml").write_text(yaml.safe_dump(entries))
    with tarfile.open(tmp_path / "model.nemo", "w") as archive:
        for name in ("model_weights.ckpt", "model_config.yaml"):
            archive.add(tmp_path / name, name)
    done = run("convert", tmp_path / "model.nemo", tmp_path / "out", "--to", "hf")
    assert done.exit_code == 0, done.stderr
    assert "a llama model" in done.stderr
    assert run("diff", tmp_path / "out", truth, "--tensors-only").exit_code == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["max_position_embeddings"], config["rms_norm_eps"], config["rope_theta"]) == (32, 1e-5, 10000)
    there = run("convert", tmp_path / "model.nemo", tmp_path / "there", "--to", "megatron", "--tp", "2")
    assert there.exit_code == 0, there.stderr
    again = run("convert", tmp_path / "there", tmp_path / "again", "--to", "hf")
    assert again.exit_code == 0, again.stderr
    assert run("diff", tmp_path / "again", truth, "--tensors-only").exit_code == 0


@pytest.mark.parametrize("format_name", ["universal", "dcp", "torch"])
def test_other_formats_have_the_names_that_are_asked_for(
    format_name: str, megatron: Path, truth: Path, tmp_path: Path
) -> None:
    kept, named = tmp_path / "kept", tmp_path / "named"
    assert run("convert", megatron, kept, "--to", format_name).exit_code == 0
    assert naming_of(open_checkpoint(kept)) == "megatron"
    done = run("convert", megatron, named, "--to", format_name, "--names", "hf")
    assert done.exit_code == 0, done.stderr
    assert run("diff", named, truth, "--tensors-only").exit_code == 0


def test_the_way_leads_through_the_universal_format_and_back(megatron: Path, truth: Path, tmp_path: Path) -> None:
    assert run("convert", megatron, tmp_path / "middle").exit_code == 0
    assert run("convert", tmp_path / "middle", tmp_path / "hf", "--to", "hf").exit_code == 0
    assert run("diff", tmp_path / "hf", truth, "--tensors-only").exit_code == 0
    for names in ("megatron", "megatron-legacy"):
        done = run("convert", tmp_path / "hf", tmp_path / f"{names}-again", "--names", names)
        assert done.exit_code == 0, done.stderr
        assert naming_of(open_checkpoint(tmp_path / f"{names}-again")) == names
    weights_again = {n: v for (n, _), v in contents(open_checkpoint(tmp_path / "megatron-again")).items()}
    rows = {n: v[:14] if n.startswith(("embedding", "output_layer")) else v for n, v in whole().items()}
    assert {n: v[2] for n, v in weights_again.items()} == {n: v.tobytes() for n, v in rows.items()}


def test_weights_alone_and_rounded_keep_their_configuration(megatron: Path, tmp_path: Path) -> None:
    done = run("convert", megatron, tmp_path / "out", "--to", "hf", "--model-only", "--dtype", "bf16")
    assert done.exit_code == 0, done.stderr
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_family_is_found_by_weights_alone() -> None:
    original = in_megatron()
    state = parameter("rng_state/0", {"model": array(F32, (3,))}, "extra")
    converted = to_hf(replace(original, parameters={**original.parameters, state.name: state}))
    assert converted.extras[CONFIG]["model_type"] == "llama"


def test_tensors_that_are_left_out_are_not_missed(tmp_path: Path) -> None:
    tensors = whole()
    tensors["mtp.layers.0.enorm.weight"] = np.ones(8, np.float32)
    source = write(tmp_path / "megatron", tensors, 1, ARGUMENTS_OF_FILES)
    refused = run("convert", source, tmp_path / "out", "--to", "hf")
    assert isinstance(refused.exception, UnsupportedError)
    assert "`mtp.layers.{}.enorm.weight`" in refused.exception.what
    assert "--skip" in str(refused.exception.hint)
    assert not (tmp_path / "out").exists()
    done = run("convert", source, tmp_path / "out", "--to", "hf", "--skip", "^mtp")
    assert done.exit_code == 0, done.stderr
    some = run("convert", source, tmp_path / "some", "--to", "hf", "--only", r"layers\.1\.mlp")
    assert some.exit_code == 0, some.stderr
    assert "tensors of the model are missing" in some.stderr
    assert len(open_checkpoint(tmp_path / "some").parameters) == 3


def test_error_figures_stay_with_the_values_of_approximate_states() -> None:
    """Of a piece what was said of the whole, of a whole what was said of each of its pieces."""
    source = configured()
    q, k, up, norm = (
        f"model.layers.0.{name}.weight"
        for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "input_layernorm")
    )
    lost = {(name, MASTER): {"max_abs": float(number)} for number, name in enumerate((q, k, norm), 1)}
    there = use_names(replace(source, errors=lost), "megatron")
    (qkv,) = (name for name, _ in there.errors if "linear_qkv" in name)
    assert there.errors[qkv, MASTER] == {q: {"max_abs": 1.0}, k: {"max_abs": 2.0}}
    assert [loss for (name, _), loss in there.errors.items() if name != qkv] == [{"max_abs": 3.0}]
    back = use_names(there, "hf")
    assert back.errors[q, MASTER] == back.errors[k, MASTER] == there.errors[qkv, MASTER]
    assert back.errors[norm, MASTER] == {"max_abs": 3.0}
    assert (up, MASTER) not in back.errors


def test_origin_stays() -> None:
    assert to_hf(to_megatron(trained(CONFIGURATION))).origin == ORIGIN


# Hostile input

JUNK: list[Any] = [None, -1, 0, 3, 10**30, 1e300, float("nan"), float("inf"), "x", "\x1b[2J", [], [1], {"a": 1}, True]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.slow
def test_no_configuration_makes_it_fall_over(family: str) -> None:
    """Whatever an entry says: an answer, or an error that says what is wrong."""
    kind = {"llama": {}, "mixtral": {"num_local_experts": 2}}.get(family, {})
    config = {**CONFIGURATION, "model_type": family, **kind}
    if family == "gpt2":
        config |= {"n_layer": 2, "n_head": 2, "n_embd": 6, "n_positions": 3, "vocab_size": 7}
    source = trained(config)
    settings = family_called(family).settings
    keys = {*config, *settings.defaults, *settings.write, "rope_scaling", "rope_parameters", "architectures"}
    for key in sorted(keys | {"tie_word_embeddings", "attention_bias"}):
        for value in JUNK:
            assert_answers(partial(to_megatron, replace(source, extras={CONFIG: config | {key: value}})))


@pytest.mark.slow
def test_no_argument_makes_it_fall_over() -> None:
    source = in_megatron()
    record = source.extras[ARGUMENTS]
    for key in record.state:
        for value in JUNK:
            changed = Record(record.cls, state={**record.state, key: value}, new=True)
            assert_answers(partial(to_hf, replace(source, extras={ARGUMENTS: changed})))
    for extras in ({ARGUMENTS: 3}, {ARGUMENTS: Record(record.cls, state=[1])}, {CONFIG: [1]}):
        assert_answers(partial(to_hf, replace(source, extras=extras)))
        assert_answers(partial(to_megatron, replace(source, extras=extras)))


def assert_answers(make: Callable[[], Checkpoint]) -> None:
    message = None
    try:
        check_complete(make())
    except CkptError as error:
        message = str(error)
    assert message is None or (message and "\x1b" not in message)


# Names of running models


def under(source: Checkpoint, prefix: str) -> Checkpoint:
    parameters = {f"{prefix}{n}": replace(p, name=f"{prefix}{n}") for n, p in source.parameters.items()}
    groups = tuple(replace(group, names=tuple(f"{prefix}{n}" for n in group.names)) for group in source.groups)
    return replace(source, parameters=parameters, groups=groups)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module.model."])
def test_wrappers_of_a_model_are_removed_from_the_names_of_all_states(prefix: str) -> None:
    source = trained(CONFIGURATION)
    converted = use_names(under(source, prefix), "hf")
    assert (contents(converted), converted.groups) == (contents(source), source.groups)
    there = use_names(under(source, prefix), "megatron")
    assert contents(there) == contents(to_megatron(source))
    assert prepare(under(source, prefix), Universal()).parameters.keys() == under(source, prefix).parameters.keys()


def test_model_behind_a_prefix_is_translated_without_the_others(tmp_path: Path) -> None:
    """A teacher and a student of other sizes, with all states; --strip-prefix comes before --names."""
    teacher, student = trained(CONFIGURATION), trained({**CONFIGURATION, "intermediate_size": 7})
    both = {name: under(one, name) for name, one in (("teacher.", teacher), ("student.", student))}
    source = replace(
        teacher,
        parameters={name: p for one in both.values() for name, p in one.parameters.items()},
        groups=tuple(group for one in both.values() for group in one.groups),
    )
    save(source, tmp_path / "run")
    options = ["--only", r"^teacher\.", "--strip-prefix", "teacher.", "--names", "megatron"]
    done = run("convert", tmp_path / "run", tmp_path / "out", *options)
    assert done.exit_code == 0, done.stderr
    assert contents(open_checkpoint(tmp_path / "out")) == contents(to_megatron(teacher))


def test_stacks_of_experts_go_to_megatron_with_all_states() -> None:
    """As transformers 5 holds a Mixtral while it trains: gate and up of all experts in one tensor."""
    config = {**CONFIGURATION, "model_type": "mixtral", "num_local_experts": 3, "sliding_window": None}
    apart = trained(config)
    stacks: dict[str, list[tuple[str, ...]]] = {}
    for layer in range(2):
        old, new = f"model.layers.{layer}.block_sparse_moe", f"model.layers.{layer}.mlp"
        stacks[f"{new}.experts.gate_up_proj"] = [
            (f"{old}.experts.{e}.w1.weight", f"{old}.experts.{e}.w3.weight") for e in range(3)
        ]
        stacks[f"{new}.experts.down_proj"] = [(f"{old}.experts.{e}.w2.weight",) for e in range(3)]
        stacks[f"{new}.gate.weight"] = [(f"{old}.gate.weight",)]
    gone = {name for rows in stacks.values() for row in rows for name in row}
    held = {name: one for name, one in apart.parameters.items() if name not in gone}
    for name, rows in stacks.items():
        first = apart.parameters[rows[0][0]]
        states = {}
        for state, one in first.states.items():
            pieces = [
                np.concatenate([read(apart.parameters[n].states[state]) for n in row]) for row in rows if one.shape
            ]
            states[state] = tensor((np.stack(pieces) if "experts" in name else pieces[0]) if pieces else read(one))
        held[name] = replace(first, name=name, states=states)
    running = replace(apart, parameters=held, groups=(Group({"lr": 0.1}, tuple(held)),))
    converted = use_names(running, "megatron")
    assert contents(converted) == contents(to_megatron(replace(apart, groups=())))
    assert set(converted.groups[0].names) == set(converted.parameters)


@pytest.mark.parametrize(
    ("name", "whose"),
    [
        ("decoder.layers.3.self_attention.linear_qkv.layer_norm_weight", "megatron"),
        ("decoder.layers.3.mlp.experts.linear_fc1.weight11", "megatron"),
        ("language_model.encoder.layers.3.input_norm.weight", "megatron-legacy"),
        ("language_model.model.layers.3.self_attn.q_proj.weight", None),  # LLaVA
        ("model.decoder.layers.3.self_attn.q_proj.weight", None),  # OPT
        ("gpt_neox.layers.3.attention.query_key_value.weight", None),
        ("model.layers.0.self_attn.q_proj.weight", None),  # of any model, without a configuration
    ],
)
def test_names_tell_whose_they_are(name: str, whose: str | None) -> None:
    assert naming_of(checkpoint([parameter(name, {"model": array(F32, (2, 2))})])) == whose
