"""Write an architecture as Megatron's arguments, as a run of the model would have them."""

from collections.abc import Mapping
from typing import Any

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.values import Global, Record, Value
from ckpt_formats.names.architecture import Architecture
from ckpt_formats.names.table import Table

_TWINS = {"norm_epsilon": "layernorm_epsilon"}
"""An argument, and its name in other versions of Megatron."""


def to_arguments(model: Architecture, table: Table, names: set[str], dtype: str | None) -> dict[str, Value]:
    """The arguments of a model; `names` are the patterns of its Megatron names.

    Raises `UnsupportedError` for a combination of biases that Megatron does not have.
    """
    experts, rotary = model.experts is not None, model.theta is not None
    biased = {kind for kind in ("linear_qkv", "linear_proj", "linear_fc1") if any(f"{kind}.bias" in n for n in names)}
    if biased not in ({"linear_qkv", "linear_proj", "linear_fc1"}, {"linear_qkv"}, set()):
        raise UnsupportedError(
            f"the model has biases only for {', '.join(sorted(biased))}: Megatron's layers have them everywhere "
            "(add_bias_linear), or only for queries, keys and values (add_qkv_bias)"
        )
    scaling = model.scaling
    theta = model.theta if model.theta is not None else 10000.0
    return {
        "num_layers": model.layers,
        "encoder_num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "group_query_attention": model.groups != model.heads,
        "num_query_groups": model.groups if model.groups != model.heads else 1,
        "kv_channels": model.head_dim,
        "max_position_embeddings": model.positions,
        "position_embedding_type": "rope" if rotary else "learned_absolute",
        "rotary_base": int(theta) if theta == int(theta) else theta,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "rotary_seq_len_interpolation_factor": scaling.factor if scaling and scaling.kind == "linear" else None,
        "use_rope_scaling": scaling is not None and scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor if scaling and scaling.kind == "llama3" else 8.0,
        "normalization": "LayerNorm" if table.layer_norm else "RMSNorm",
        "layernorm_epsilon": model.epsilon,
        "norm_epsilon": model.epsilon,
        "swiglu": table.gated,
        "bias_gelu_fusion": model.activation == "gelu_tanh",
        "openai_gelu": False,
        "add_bias_linear": "linear_fc1" in biased,
        "add_qkv_bias": "linear_qkv" in biased,
        "qk_layernorm": any("q_layernorm" in name for name in names),
        "untie_embeddings_and_output_weights": not model.tied,
        "num_experts": model.experts,
        "moe_router_topk": model.chosen if experts else 2,
        "moe_ffn_hidden_size": model.ffn if experts else None,
        "moe_router_pre_softmax": False,
        "window_size": None if model.window is None else (model.window - 1, 0),
        "hidden_dropout": model.dropout,
        "attention_dropout": model.attention_dropout,
        "init_method_std": model.std,
        "padded_vocab_size": model.vocabulary,
        **({} if dtype is None else _dtype(dtype)),
    }


def updated(record: Value, arguments: Mapping[str, Value]) -> Record:
    """The record with these arguments. Others are unchanged; without a record they are those of a run on one rank."""
    if isinstance(record, Record) and isinstance(record.state, dict):
        arguments = {name: value for name, value in arguments.items() if _TWINS.get(name) not in record.state}
        return Record(record.cls, record.args, record.kwargs, {**record.state, **arguments}, new=record.new)
    alone: dict[str, Value] = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "context_parallel_size": 1,
        "data_parallel_size": 1,
        "world_size": 1,
        "transformer_impl": "transformer_engine",
        "use_distributed_optimizer": False,
        "make_vocab_size_divisible_by": 1,
        "seq_length": arguments["max_position_embeddings"],
    }
    return Record(Global("argparse", "Namespace"), state={**alone, **arguments}, new=True)


def _dtype(name: str) -> dict[str, Any]:
    return {"params_dtype": Global("torch", name), "bf16": name == "bfloat16", "fp16": name == "float16"}
