"""Families of models: what Megatron core cannot compute is refused by name, and optimizer states go with weights."""

from dataclasses import replace
from typing import Any

import pytest

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.names.arguments import ARGUMENTS, to_arguments
from ckpt_formats.names.config import CONFIG, checked_values, configured_model
from ckpt_formats.names.packings import stored_shape
from ckpt_formats.names.tables import family_of
from ckpt_formats.names.translate import to_hf, to_megatron
from held import HELD, ORIGIN, array, bits, checkpoint, parameter
from hf_jobs.random_models import NOT_IN_MEGATRON, RANDOM, model

F32 = DTYPES["float32"]
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "norms after attention": ("olmo2", {}, "norms_before"),
    "norms of all queries at once, and windows": ("olmo3", {}, "norms_before"),
    "a balance bias of a softmax": ("ernie4_5_moe", {}, "router_correction"),
    "biases of attention alone": ("qwen3_moe", {"attention_bias": True}, "o_bias"),
    "biases of attention alone in a dense model": ("qwen3", {"attention_bias": True}, "o_bias"),
    "no biases of attention": ("gpt_oss", {"attention_bias": False}, "qkv_bias"),
    "another sigmoid of GPT-OSS": ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha"),
    "weights of experts that do not add up to one": (
        "glm4_moe",
        {"norm_topk_prob": False, "num_experts_per_tok": 2, "n_group": 1},
        "router_sum",
    ),
    "one expert of weight one": ("glm4_moe", {"num_experts_per_tok": 1, "n_group": 1}, "router_sum"),
    "one expert of weight one by softmax": (
        "qwen3_moe",
        {"num_experts_per_tok": 1, "norm_topk_prob": True},
        "softmax_first",
    ),
    "groups scored by another number of experts": (
        "glm4_moe",
        {"n_routed_experts": 9, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 6},
        "router_group_best",
    ),
    "long rotary factors": ("phi3", {"rope_parameters": {"rope_type": "longrope", "factor": 4.0}}, "rotary"),
    "what Phi 3 takes for long rotary factors": ("phi3", {"rope_parameters": YARN}, "rotary"),
    "another scale of YaRN": ("gpt_oss", {"rope_parameters": {**YARN, "attention_factor": 2.0}}, "attention_factor"),
    "windows of Qwen 2": ("qwen2", {"use_sliding_window": True}, "use_sliding_window"),
    "groups scored by their two best experts": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 1, "num_experts_per_tok": 2},
        "router_group_best",
    ),
    "groups scored by their best expert": (
        "deepseek_v3",
        {"n_routed_experts": 9, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 2},
        "router_group_best",
    ),
    "rotary halves in latent attention": ("deepseek_v3", {"rope_interleave": False}, "rope_interleaved"),
    "biases of latent attention": ("deepseek_v3", {"attention_bias": True}, "o_bias"),
    "another router": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    "norms inside delta nets that add nothing, where others add one": ("qwen3_next", {}, "delta_norm_adds_one"),
    "no delta nets": ("qwen3_next", {"layer_types": ["full_attention"] * 3}, "mixers"),
    "a convolution of another width": ("mamba2", {"conv_kernel": 3}, "mamba_conv"),
    "a gate by another function": ("qwen3_moe", {"hidden_act": "gelu"}, "gated"),
}


def entries(family: str, **changes: Any) -> dict[str, Any]:
    return {**model(f"{family}-0"), **changes}


@pytest.mark.parametrize("kind", REFUSED)
def test_megatron_core_does_not_get_what_it_cannot_compute(kind: str) -> None:
    name, changes, named = REFUSED[kind]
    config = entries(name, **changes)
    family = family_of(config)
    assert family is not None
    with pytest.raises(UnsupportedError, match=named):
        to_arguments(checked_values(config, family, HELD), None)


@pytest.mark.parametrize("changes", [{"num_experts_per_tok": 1, "norm_topk_prob": False, "n_group": 1}, {"n_group": 1}])
def test_megatron_core_gets_a_router_that_it_computes_alike(changes: dict[str, Any]) -> None:
    config = entries("glm4_moe", **changes)
    family = family_of(config)
    assert family is not None
    arguments = to_arguments(checked_values(config, family, HELD), None)
    assert arguments["moe_router_score_function"] == "sigmoid"


def in_hf(config: dict[str, Any], **seeds: int) -> Checkpoint:
    """A model with a state of random values for each seed."""
    configured = configured_model(config)
    assert configured is not None
    tie, stored = configured.tie, configured.model.stored("hf")
    atoms: dict[object, int] = {}  # copies have the values of their tensor
    parameters = [
        parameter(
            one.names[0],
            {
                state: array(F32, stored_shape(one.packing, one.scope, configured.model.shape), 100 * seed + first)
                for state, seed in seeds.items()
            },
        )
        for one, first in ((one, atoms.setdefault(one.keys, i)) for i, one in enumerate(stored))
        if tie is None or one.names[0] != tie.alias
    ]
    aliases = {} if tie is None else {tie.alias: tie.name}
    return checkpoint(parameters, (), {CONFIG: config}, aliases, ORIGIN)


def values(source: Checkpoint, state: str) -> dict[str, object]:
    return {name: bits(read(one.states[state])) for name, one in source.parameters.items()}


@pytest.mark.parametrize("family", sorted(RANDOM.keys() - set(NOT_IN_MEGATRON)))
def test_optimizer_states_go_with_the_weights(family: str) -> None:
    config = entries(family)
    source = in_hf(config, model=1, exp_avg=2)
    there = to_megatron(source)
    assert values(there, "exp_avg") == values(to_megatron(in_hf(config, model=2)), "model")
    extras = {key: value for key, value in there.extras.items() if key != CONFIG}
    back = to_hf(replace(there, extras=extras))
    for state in ("model", "exp_avg"):
        assert values(back, state) == values(source, state)


def deepseek(**changes: Any) -> dict[str, Any]:
    return entries("deepseek_v3", **{"num_nextn_predict_layers": 1, "tie_word_embeddings": False, **changes})


@pytest.mark.parametrize("present", [True, False], ids=["present", "left out"])
def test_layers_for_multi_token_prediction_are_translated_if_the_source_has_them(present: bool) -> None:
    """transformers states them in its configurations, but leaves them out of its files."""
    config = deepseek()
    source, prefix = in_hf(config, model=1), f"model.layers.{config['num_hidden_layers']}."
    if not present:
        rest = {name: one for name, one in source.parameters.items() if not name.startswith(prefix)}
        source = replace(source, parameters=rest)
    there = to_megatron(source)
    assert any(name.startswith("mtp.layers.0.") for name in there.parameters) == present
    assert there.extras[ARGUMENTS].get("mtp_num_layers") == (1 if present else None)
    assert to_hf(there).parameters.keys() == source.parameters.keys()


def test_kimi_k2_has_the_tensors_of_deepseek_v3() -> None:
    kimi, other = (to_megatron(in_hf(deepseek(model_type=kind), model=1)) for kind in ("kimi_k2", "deepseek_v3"))
    assert values(kimi, "model") == values(other, "model")
    config = to_hf(replace(kimi, extras={ARGUMENTS: kimi.extras[ARGUMENTS]})).extras[CONFIG]
    assert config["model_type"] == "deepseek_v3"  # Megatron's arguments do not tell which


@pytest.mark.parametrize(("epsilon", "is_noted"), [(1e-6, False), (1e-5, True)])
def test_another_epsilon_inside_latent_attention_is_noted(epsilon: float, is_noted: bool) -> None:
    there = to_megatron(in_hf(deepseek(rms_norm_eps=epsilon), model=1))
    back = to_hf(replace(there, extras={ARGUMENTS: there.extras[ARGUMENTS]}))
    for one in (there, back):
        assert any("latent_epsilon" in name for notice in one.notices for name in notice.names) == is_noted


def test_the_vision_part_keeps_its_names_and_the_text_part_is_translated() -> None:
    config = entries("qwen3_vl")
    vision = parameter("model.visual.merger.norm.weight", {"model": array(F32, (3,), 5)})
    text = in_hf(config, model=1)
    source = replace(text, parameters={vision.name: vision, **text.parameters})
    there = to_megatron(source)
    assert vision.name in there.parameters
    assert there.extras[ARGUMENTS].get("position_embedding_type") == "mrope"
    assert there.extras[ARGUMENTS].get("mrope_section") == [2, 1, 1]
    with pytest.raises(UnsupportedError, match=r"model\.visual"):
        to_hf(replace(there, extras={key: value for key, value in there.extras.items() if key != CONFIG}))
    assert values(to_hf(there), "model") == values(source, "model")


def test_a_tied_head_stays_one_tensor_although_predicted_tokens_have_copies_of_it() -> None:
    config = deepseek(tie_word_embeddings=True)
    source = in_hf(config, model=1)
    there = to_megatron(source)
    assert "output_layer.weight" not in there.parameters
    assert there.aliases == {"output_layer.weight": "embedding.word_embeddings.weight"}
    assert values(to_hf(there), "model") == values(source, "model")
