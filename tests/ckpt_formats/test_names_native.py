"""Names of TorchTitan and Meta: the rows of queries and keys in rotary pairs, stacks of experts, ties."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ckpt.rename import use_names
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import IncompleteError, UnsupportedError
from ckpt_formats.core.format import Naming
from ckpt_formats.core.tensor import Array, read
from ckpt_formats.names.config import CONFIG, configured_model
from ckpt_formats.names.packings import stored_shape
from ckpt_formats.names.tables import dialect, families
from ckpt_formats.names.translate import NATIVE, naming_of
from held import array, bits, checkpoint, contents, parameter

HEADS, GROUPS, WIDTH, LAYERS = 6, 3, 4, 2
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 7,
    "intermediate_size": 5,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": WIDTH,
    "vocab_size": 11,
    "max_position_embeddings": 8,
    "rms_norm_eps": 1e-6,
}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "qwen3": {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "mistral": {"model_type": "mistral", "architectures": ["MistralForCausalLM"]},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 4,
        "norm_topk_prob": True,
    },
    "gpt_oss": {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "sliding_window": 4,
        "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4},
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 4,
        "first_k_dense_replace": 1,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "n_routed_experts": 3,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 5,
        "kv_lora_rank": 9,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 2,
        "v_head_dim": 3,
        "num_key_value_heads": HEADS,
        "num_nextn_predict_layers": 1,
    },
}


def model(family: str, **entries: Any) -> Checkpoint:
    """A model of transformers with a moment for each weight."""
    config = {**SIZES, **CONFIGS[family], "tie_word_embeddings": False, **entries}
    configured = configured_model(config)
    assert configured is not None
    known = configured.model
    parameters = []
    for i, one in enumerate(known.stored("hf")):
        if one.is_copy or (one.names[0] == "lm_head.weight" and config["tie_word_embeddings"]):
            continue
        shape = stored_shape(one.packing, one.scope, known.shape)
        states = {state: array(DTYPES["float32"], shape, 2 * i + n) for n, state in enumerate(("model", "exp_avg"))}
        parameters.append(parameter(one.names[0], states))
    return checkpoint(parameters, (), {CONFIG: config})


def permuted(weight: Array, heads: int) -> Array:
    """The inverse of `permute` in transformers' convert_llama_weights_to_hf: pairs of rows are adjacent."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    result: Array = halves.transpose(0, 2, 1, 3).reshape(weight.shape)
    return result


def values(source: Checkpoint, name: str, state: str = "model") -> Array:
    return read(source.parameters[name].states[state])


@pytest.mark.parametrize(
    ("family", "naming", "inside"),
    [
        ("llama", "torchtitan", "attention.qkv_linear"),
        ("llama", "meta", "attention"),
        ("mistral", "meta", "attention"),
    ],
)
def test_queries_and_keys_are_in_rotary_pairs_with_their_moments(family: str, naming: Naming, inside: str) -> None:
    source = model(family)
    renamed = use_names(source, naming)
    for theirs, ours, heads in (("wq", "q_proj", HEADS), ("wk", "k_proj", GROUPS)):
        for layer in range(LAYERS):
            for state in ("model", "exp_avg"):
                own = values(source, f"model.layers.{layer}.self_attn.{ours}.weight", state)
                assert bits(values(renamed, f"layers.{layer}.{inside}.{theirs}.weight", state)) == bits(
                    permuted(own, heads)
                )
    gate = values(source, "model.layers.1.mlp.gate_proj.weight")
    assert bits(values(renamed, "layers.1.feed_forward.w1.weight")) == bits(gate)
    assert naming_of(renamed) == naming
    assert contents(use_names(renamed, "hf")) == contents(source)


def test_experts_of_torchtitan_are_stacks_and_queries_of_qwen_are_not_permuted() -> None:
    source = model("qwen3_moe")
    renamed = use_names(source, "torchtitan")
    stack = values(renamed, "layers.1.moe.routed_experts.inner_experts.w2_EDF")
    own = [values(source, f"model.layers.1.mlp.experts.{i}.down_proj.weight") for i in range(3)]
    assert bits(stack) == bits(np.stack(own))
    query = values(renamed, "layers.0.attention.qkv_linear.wq.weight")
    assert bits(query) == bits(values(source, "model.layers.0.self_attn.q_proj.weight"))
    assert contents(use_names(renamed, "hf")) == contents(source)


def test_latent_attention_and_predicted_tokens_have_the_names_of_torchtitan() -> None:
    """As its adapter states them; layers for multi-token prediction are numbered apart."""
    source = model("deepseek_v3")
    renamed = use_names(source, "torchtitan")
    own = {
        "layers.0.attention.wq_a.weight": "model.layers.0.self_attn.q_a_proj.weight",
        "layers.0.attention.q_norm.weight": "model.layers.0.self_attn.q_a_layernorm.weight",
        "layers.0.attention.wkv_b.weight": "model.layers.0.self_attn.kv_b_proj.weight",
        "layers.0.feed_forward.w2.weight": "model.layers.0.mlp.down_proj.weight",
        "layers.1.moe.shared_experts.w3.weight": "model.layers.1.mlp.shared_experts.up_proj.weight",
        "layers.1.moe.expert_bias_E": "model.layers.1.mlp.gate.e_score_correction_bias",
        "mtp_layers.0.attention.wo.weight": "model.layers.2.self_attn.o_proj.weight",
        "mtp_layers.0.eh_proj.weight": "model.layers.2.eh_proj.weight",
        "mtp_layers.0.mtp_norm.weight": "model.layers.2.shared_head.norm.weight",
    }
    for theirs, ours in own.items():
        assert bits(values(renamed, theirs)) == bits(values(source, ours)), theirs
    assert contents(source).items() <= contents(use_names(renamed, "hf")).items()


@pytest.mark.parametrize("state", ["model", "exp_avg"])
def test_experts_of_gpt_oss_are_transposed_in_torchtitan_and_gate_and_up_stay_in_turn(state: str) -> None:
    """TorchTitan takes `x[..., ::2]` as the gate, and multiplies with the transposed weight of each expert."""
    source = model("gpt_oss")
    renamed = use_names(source, "torchtitan")
    for layer in range(LAYERS):
        experts, own = f"layers.{layer}.moe.routed_experts.inner_experts", f"model.layers.{layer}.mlp.experts"
        for theirs, ours in (("mlp1_weight_EGD", "gate_up_proj"), ("mlp2_weight_EDF", "down_proj")):
            matrices = values(source, f"{own}.{ours}", state).transpose(0, 2, 1)
            assert bits(values(renamed, f"{experts}.{theirs}", state)) == bits(np.ascontiguousarray(matrices))
        for theirs, ours in (("mlp1_bias_EG", "gate_up_proj_bias"), ("mlp2_bias_ED", "down_proj_bias")):
            assert bits(values(renamed, f"{experts}.{theirs}", state)) == bits(values(source, f"{own}.{ours}", state))
    same = {
        "layers.0.attention.qkv_linear.wk.bias": "model.layers.0.self_attn.k_proj.bias",
        "layers.0.attention.wo.bias": "model.layers.0.self_attn.o_proj.bias",
        "layers.1.attention.sinks": "model.layers.1.self_attn.sinks",
        "layers.1.moe.router.gate.bias": "model.layers.1.mlp.router.bias",
    }
    for theirs, ours in same.items():
        assert bits(values(renamed, theirs, state)) == bits(values(source, ours, state)), theirs
    assert contents(use_names(renamed, "hf")) == contents(source)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_earlier_names_of_torchtitan_are_read(family: str) -> None:
    source = model(family)
    titan = use_names(source, "torchtitan")
    old = {"qkv_linear.": "", "routed_experts.inner_": "", "lm_head": "output"}
    old |= {f"_{axes}": "" for axes in ("EFD", "EDF", "EGD", "EG", "ED")}
    names = {name: name for name in titan}
    for before, after in old.items():
        names = {name: new.replace(before, after) for name, new in names.items()}
    assert set(names.values()) != set(names)
    assert contents(use_names(titan.rename(names), "hf")) == contents(source)


@pytest.mark.parametrize("differs", [False, True])
def test_tied_head_that_was_saved_twice_is_compared(differs: bool) -> None:
    titan = use_names(model("llama", tie_word_embeddings=True), "torchtitan")
    table = values(titan, "tok_embeddings.weight")
    head = parameter("lm_head.weight", {"model": np.roll(table, 1) if differs else table})
    twice = replace(titan, parameters={**titan.parameters, head.name: head}, aliases={})
    renamed = use_names(twice, "hf")
    assert "lm_head.weight" not in renamed.parameters
    weight = renamed.parameters["model.embed_tokens.weight"].weight
    assert weight.replicas
    assert bits(read(weight.replicas[0])) == bits(values(twice, head.name))


@pytest.mark.parametrize("naming", NATIVE)
def test_families_that_a_library_does_not_have_are_refused(naming: Naming) -> None:
    known = dialect(naming).other["families"]
    assert known.keys() < {family.name for family in families()}
    family = {"torchtitan": "mistral", "meta": "qwen3_moe", "maxtext": "glm4_moe"}[naming]
    with pytest.raises(UnsupportedError, match="are not known"):
        use_names(model(family), naming)


def test_names_of_torchtitan_need_a_configuration() -> None:
    titan = use_names(model("llama"), "torchtitan")
    with pytest.raises(IncompleteError, match="config"):
        use_names(replace(titan, extras={}), "hf")
