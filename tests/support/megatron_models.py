"""Models of all of Megatron core's families in memory, small and of odd sizes, with what a run keeps beside them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest

from ckpt_codecs import Rounded
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin, Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.values import Global, Record, TensorName, Value
from held import array, checkpoint, parameter

F32 = DTYPES["float32"]
NAMESPACE = Global("argparse", "Namespace")
BASE: dict[str, Value] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "world_size": 1,
    "data_parallel_size": 1,
    "transformer_impl": "local",
    "untie_embeddings_and_output_weights": True,
    "bf16": True,
    "use_distributed_optimizer": True,
    "rank": 0,
    "virtual_pipeline_model_parallel_size": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "pipeline_model_parallel_layout": None,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
    "num_experts": None,
}
FAMILIES = ("llama", "gpt", "moe", "shared_moe", "latent", "mamba")
EACH_FAMILY = pytest.mark.parametrize(
    "family",
    [family if family in ("gpt", "moe") else pytest.param(family, marks=pytest.mark.slow) for family in FAMILIES],
)
"""Two of them are enough for `make quick`."""


def args_of(family: str, layers: int, unit: int, experts: int = 4) -> dict[str, Value]:
    """The arguments of a run; everything that may be cut is a multiple of `unit`, and otherwise odd."""
    arguments: dict[str, Value] = {
        **BASE,
        "num_layers": layers,
        "hidden_size": 3 * unit,
        "ffn_hidden_size": 5 * unit,
        "num_attention_heads": 2 * unit,
        "num_query_groups": unit,
        "group_query_attention": True,
        "kv_channels": 3,
        "swiglu": True,
        "add_bias_linear": False,
        "padded_vocab_size": 7 * unit,
    }
    if family == "gpt":
        arguments |= {"swiglu": False, "add_bias_linear": True, "group_query_attention": False}
        arguments |= {"untie_embeddings_and_output_weights": False}
    if family in ("moe", "shared_moe"):
        arguments |= {"num_experts": experts, "moe_ffn_hidden_size": 3 * unit, "moe_grouped_gemm": False}
    if family == "shared_moe":
        arguments |= {"moe_shared_expert_intermediate_size": 3 * unit, "add_bias_linear": True}
    if family == "latent":
        arguments |= {"multi_latent_attention": True, "q_lora_rank": unit, "kv_lora_rank": 3 * unit}
        arguments |= {"qk_pos_emb_head_dim": unit, "v_head_dim": 3, "group_query_attention": False}
    if family == "mamba":
        arguments |= {"mamba_head_dim": 3, "mamba_state_dim": 5, "mamba_num_groups": unit, "mamba_num_heads": 2 * unit}
    return arguments


def shapes_of(family: str, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Shape]]:
    """Names and shapes in the order of Megatron's modules."""
    hidden, rows = arguments["hidden_size"], arguments["padded_vocab_size"]
    yield "embedding.word_embeddings.weight", (rows, hidden)
    if family == "gpt":
        yield "embedding.position_embeddings.weight", (11, hidden)
    for i in range(arguments["num_layers"]):
        layer = _mamba if family == "mamba" and i % 2 == 0 else _transformer
        for name, shape in layer(arguments, hidden):
            yield f"decoder.layers.{i}.{name}", shape
    yield ("decoder.final_norm.weight" if family == "mamba" else "decoder.final_layernorm.weight"), (hidden,)
    if family == "gpt":
        yield "decoder.final_layernorm.bias", (hidden,)
    if arguments["untie_embeddings_and_output_weights"]:
        yield "output_layer.weight", (rows, hidden)


def _mamba(arguments: Mapping[str, Any], hidden: int) -> Iterator[tuple[str, Shape]]:
    heads, state = arguments["mamba_num_heads"], arguments["mamba_num_groups"] * arguments["mamba_state_dim"]
    inner = heads * arguments["mamba_head_dim"]
    yield "mixer.dt_bias", (heads,)
    yield "mixer.A_log", (heads,)
    yield "mixer.D", (heads,)
    yield "mixer.in_proj.weight", (2 * inner + 2 * state + heads, hidden)
    yield "mixer.conv1d.weight", (inner + 2 * state, 1, 4)
    yield "mixer.conv1d.bias", (inner + 2 * state,)
    yield "mixer.norm.weight", (inner,)
    yield "mixer.out_proj.weight", (hidden, inner)
    yield "norm.weight", (hidden,)


def _transformer(arguments: Mapping[str, Any], hidden: int) -> Iterator[tuple[str, Shape]]:
    heads, dim = arguments["num_attention_heads"], arguments["kv_channels"]
    groups = arguments["num_query_groups"] if arguments["group_query_attention"] else heads
    biased, gate = arguments["add_bias_linear"], 2 if arguments["swiglu"] else 1
    shapes: list[tuple[str, Shape, Shape | None]] = [
        ("input_layernorm", (hidden,), (hidden,)),
        ("self_attention.linear_proj", (hidden, heads * dim), (hidden,)),
    ]
    if arguments.get("multi_latent_attention"):
        q, kv, rope = arguments["q_lora_rank"], arguments["kv_lora_rank"], arguments["qk_pos_emb_head_dim"]
        shapes += [
            ("self_attention.linear_q_down_proj", (q, hidden), None),
            ("self_attention.linear_q_up_proj", (heads * 5, q), None),
            ("self_attention.linear_kv_down_proj", (kv + rope, hidden), None),
            ("self_attention.linear_kv_up_proj", (heads * 7, kv), None),
            ("self_attention.q_layernorm", (q,), None),
            ("self_attention.kv_layernorm", (kv,), None),
        ]
    else:
        shapes.append(
            ("self_attention.linear_qkv", ((heads + 2 * groups) * dim, hidden), ((heads + 2 * groups) * dim,))
        )
    shapes.append(("pre_mlp_layernorm", (hidden,), (hidden,)))
    experts, ffn = arguments.get("num_experts") or 0, arguments["ffn_hidden_size"]
    if not experts:
        shapes.append(("mlp.linear_fc1", (gate * ffn, hidden), (gate * ffn,)))
        shapes.append(("mlp.linear_fc2", (hidden, ffn), (hidden,)))
    else:
        ffn = arguments["moe_ffn_hidden_size"]
        shapes.append(("mlp.router", (experts, hidden), None))
        for i in range(experts):
            shapes.append((f"mlp.experts.local_experts.{i}.linear_fc1", (gate * ffn, hidden), (gate * ffn,)))
            shapes.append((f"mlp.experts.local_experts.{i}.linear_fc2", (hidden, ffn), (hidden,)))
        if shared := arguments.get("moe_shared_expert_intermediate_size"):
            shapes.append(("mlp.shared_experts.linear_fc1", (gate * shared, hidden), (gate * shared,)))
            shapes.append(("mlp.shared_experts.linear_fc2", (hidden, shared), (hidden,)))
    for name, weight, bias in shapes:
        yield f"{name}.weight", weight
        if biased and bias is not None:
            yield f"{name}.bias", bias
        if name == "mlp.router" and biased:
            yield "mlp.router.expert_bias", (experts,)


def rounded(master: Array) -> Array:
    """What Megatron computes with: its master, rounded."""
    result: Array = Rounded().decode(b"", master.shape, DTYPES["bfloat16"], master)
    return result


def model(family: str, arguments: Mapping[str, Any], *, distributed: bool = True, seed: int = 0) -> Checkpoint:
    """A run after some steps: weights, masters, moments, groups, and what is carried along."""
    parameters: list[Parameter] = []
    low = bool(arguments["bf16"])
    for i, (name, shape) in enumerate(shapes_of(family, arguments)):
        master = np.random.default_rng([seed, i]).standard_normal(shape).astype("f4")
        if name.endswith("expert_bias"):
            parameters.append(parameter(name, {"model": master}, "buffer"))
            continue
        states = {"model": rounded(master) if low else master}
        if low or distributed:
            states["master"] = master
        states |= {state: array(F32, shape, seed + i + n) for n, state in enumerate(("exp_avg", "exp_avg_sq"), 1)}
        parameters.append(parameter(name, states, step=9))
    random = parameter("rng_state/0/torch_rng_state", {"model": array(DTYPES["uint8"], (17,), seed)}, "extra")
    extras: dict[str, Value] = {
        "args": Record(NAMESPACE, state={**arguments, "use_distributed_optimizer": distributed}),
        "checkpoint_version": 3.0,
        "iteration": 9,
        "opt_param_scheduler": {"max_lr": 1e-3, "num_steps": 72, "lr_decay_style": "cosine"},
        "rng_state": [{"torch_rng_state": TensorName(random.name), "random_rng_state": (3, (1, 2, 3), None)}],
        "num_floating_point_operations_so_far": 1e18,
        "extra_state": {
            f"{name.rpartition('.')[0]}._extra_state": None
            for name, shape in shapes_of(family, arguments)
            if "linear" in name and name.endswith("weight")
        },
    }
    tied = not arguments["untie_embeddings_and_output_weights"]
    return checkpoint(
        [*parameters, random],
        tuple(_groups([p for p in parameters if p.role == "parameter"])),
        extras,
        {"output_layer.weight": "embedding.word_embeddings.weight"} if tied else {},
        Origin("megatron", None, 9, {"container": "torch", "tp": 1, "pp": 1, "layers": [arguments["num_layers"]]}),
    )


def _groups(trained: list[Parameter]) -> Iterator[Group]:
    """As Megatron makes them: vectors and biases are not decayed."""
    plain = [len(p.weight.shape) == 1 or p.name.endswith(".bias") for p in trained]
    for decayed in (True, False):
        names = tuple(p.name for p, bare in zip(trained, plain, strict=True) if bare != decayed)
        options = {"wd_mult": float(decayed), "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
        yield Group({**options, "lr": 7e-4, "betas": (0.9, 0.95), "weight_decay": 0.1 * decayed}, names)
