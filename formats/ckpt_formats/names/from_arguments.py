"""Read an architecture from the arguments in Megatron's checkpoints.

A missing argument has the value of a configuration, if there is one, else the default of Megatron's own parser, as when
Megatron itself loads an old checkpoint. Source: Megatron-LM, `megatron/training/arguments.py`,
`core_transformer_config_from_args`; Megatron core, `TransformerConfig`, `MLP.forward`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record, Value, is_natural
from ckpt_formats.names.architecture import Activation, Architecture, Scaling
from ckpt_formats.names.family import KNOWN
from ckpt_formats.names.table import Table

ARGUMENTS = "args"
"""The key of the arguments in a checkpoint's extras."""

_PLAIN: Mapping[str, Value] = {
    "multi_latent_attention": False,
    "is_hybrid_model": False,
    "hybrid_override_pattern": None,
    "heterogeneous_layers_config_path": None,
    "heterogeneous_layers_config_encoded_json": None,
    "linear_attention_freq": None,
    "experimental_attention_variant": None,
    "mtp_num_layers": 0,
    "apply_layernorm_1p": False,
    "layernorm_zero_centered_gamma": False,
    "apply_residual_connection_post_layernorm": False,
    "attention_output_gate": False,
    "qk_l2_norm": False,
    "softmax_type": "vanilla",
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "no_rope_freq": None,
    "window_attn_skip_freq": None,
    "squared_relu": False,
    "quick_geglu": False,
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
}
"""Arguments that must have this value or be absent: with any other value, the model is of no known family."""

_PLAIN_EXPERTS: Mapping[str, Value] = {
    "moe_layer_freq": 1,
    "moe_shared_expert_intermediate_size": 0,
    "moe_router_score_function": "softmax",
    "moe_router_enable_expert_bias": False,
    "moe_router_topk_scaling_factor": None,
    "moe_router_num_groups": None,
    "moe_router_group_topk": None,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
}
_CONFIG_HINT = "Name the model's config.json with --config."


@dataclass(frozen=True)
class _ArgumentReader:
    """Typed look-ups in the arguments. `other` gives values that the arguments do not state."""

    record: Record
    other: Architecture | None
    where: Path

    def get(self, *names: str, default: Value = None) -> Value:
        """The value of the first of these names that is set, else `default`."""
        return next((value for value in map(self.record.get, names) if value is not None), default)

    def number(self, field: str, *names: str, default: int | None = None) -> int:
        """A positive integer, else the field of `other`, else `default`. Raises `IncompleteError` or `CorruptError`."""
        value = self.get(*names)
        if value is None:
            value = getattr(self.other, field) if self.other is not None else default
        if value is None:
            raise IncompleteError(f"the arguments do not state `{names[0]}`", where=self.where, hint=_CONFIG_HINT)
        if not is_natural(value) or not value:
            raise CorruptError(
                f"the argument `{names[0]}` is {printable(str(value))[:40]}, which is not a positive integer",
                where=self.where,
            )
        return cast(int, value)

    def real(self, field: str, *names: str, default: float) -> float:
        """A number that is not negative, else the field of `other`, else `default`. Raises `CorruptError`."""
        value = self.get(*names)
        if value is None:
            value = getattr(self.other, field) if self.other is not None else default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e30:
            raise CorruptError(
                f"the argument `{names[0]}` is {printable(str(value))[:40]}, which is not a valid number",
                where=self.where,
            )
        return float(value)


def of_arguments(
    record: Record, table: Table, names: set[str], vocabulary: int, other: Architecture | None, where: Path
) -> Architecture:
    """The architecture that arguments describe, for a model with the tensors of a table.

    `names` are the patterns of its names; `other` is the architecture of its configuration, if there is one.

    Raises: UnsupportedError for a model of no known family, CorruptError or IncompleteError for arguments that are
    missing, not valid or contradict the tensors.
    """
    arguments = _ArgumentReader(record, other, where)
    _check_plain(arguments, _PLAIN)
    _check_names(arguments, table, names)
    experts = arguments.get("num_experts")
    if experts:
        _check_plain(arguments, _PLAIN_EXPERTS)
    heads, hidden = arguments.number("heads", "num_attention_heads"), arguments.number("hidden", "hidden_size")
    grouped = arguments.get("group_query_attention")
    by_config = grouped is None and other is not None
    groups = arguments.number("groups", "num_query_groups", default=heads) if grouped or by_config else heads
    chosen = arguments.number("chosen", "moe_router_topk", default=2) if experts else None
    if experts and arguments.get("moe_router_pre_softmax") and chosen != experts:
        raise UnsupportedError(
            "moe_router_pre_softmax: Mixtral's router chooses experts before the softmax", where=where
        )
    _check_norm(arguments, table)
    theta, scaling = (None, None) if _learned(arguments, table) else _rotary(arguments)
    untied = arguments.get("untie_embeddings_and_output_weights")
    return Architecture(
        layers=arguments.number("layers", "num_layers", "encoder_num_layers"),
        hidden=hidden,
        ffn=arguments.number("ffn", *(("moe_ffn_hidden_size",) if experts else ()), "ffn_hidden_size"),
        heads=heads,
        groups=groups,
        head_dim=arguments.number("head_dim", "kv_channels", default=hidden // heads or None),
        vocabulary=vocabulary,
        positions=arguments.number("positions", "max_position_embeddings", "seq_length"),
        epsilon=arguments.real("epsilon", "norm_epsilon", "layernorm_epsilon", default=1e-5),
        activation=_activation(arguments, table),
        tied=other.tied if untied is None and other is not None else not untied,
        theta=theta,
        scaling=scaling,
        experts=arguments.number("experts", "num_experts") if experts else None,
        chosen=chosen,
        window=_window(arguments),
        dropout=arguments.real("dropout", "hidden_dropout", default=0.1),
        attention_dropout=arguments.real("attention_dropout", "attention_dropout", default=0.1),
        std=arguments.real("std", "init_method_std", default=0.02),
    )


def true_vocabulary(record: Value, rows: int) -> int | None:
    """The number of a table's rows that are tokens; None if the arguments do not determine it."""
    if not isinstance(record, Record):
        return None
    padded, stated = record.get("padded_vocab_size"), record.get("vocab_size")
    if is_natural(padded) and rows < padded:
        return rows  # a rule has removed the padding
    # This tokenizer has one token more than the argument states. Other tokenizers ignore the argument, so its value
    # is not reliable then.
    if record.get("tokenizer_type") == "NullTokenizer" and is_natural(stated) and stated + 1 <= rows:
        return cast(int, stated) + 1
    return None


def _check_plain(arguments: _ArgumentReader, plain: Mapping[str, Value]) -> None:
    for name, plain_value in plain.items():
        stated = arguments.get(name)
        listed = (
            isinstance(stated, (list, tuple)) and stated and all(item == plain_value for item in stated)
        )  # for each layer
        if stated is not None and stated is not False and stated != plain_value and not listed:
            raise UnsupportedError(
                f"the run's arguments state {name} {printable(str(stated))[:60]}, which no known family of models has",
                where=arguments.where,
                hint=f"{KNOWN} Other formats keep Megatron's names.",
            )


def _check_names(arguments: _ArgumentReader, table: Table, names: set[str]) -> None:
    """Raise `UnsupportedError` if the layers do not have the tensors that the arguments state.

    The names alone are not enough, because tensors may have been left out.
    """
    linear, qkv = arguments.get("add_bias_linear"), arguments.get("add_qkv_bias")
    expected = {
        "mlp.linear_fc1.bias": linear,
        "linear_proj.bias": linear,
        "linear_qkv.bias": linear or qkv,
        "q_layernorm.weight": arguments.get("qk_layernorm"),
        "mlp.experts.": arguments.get(
            "num_experts", default=0 if arguments.record.get("num_layers") is not None else None
        ),
    }
    for part, value in expected.items():
        if value is not None and bool(value) != any(part in name for name in names):
            raise UnsupportedError(
                f"by the run's arguments the model has {'' if value else 'no '}`{part}`, but the tensors are those of "
                f"another {table.family} model",
                where=arguments.where,
                hint=_CONFIG_HINT,
            )


def _check_norm(arguments: _ArgumentReader, table: Table) -> None:
    norm = arguments.get("normalization")
    if norm is not None and str(norm).lower() != ("layernorm" if table.layer_norm else "rmsnorm"):
        raise UnsupportedError(
            f"the arguments state {printable(str(norm))[:40]}, but the family {table.family} has another norm",
            where=arguments.where,
        )


def _learned(arguments: _ArgumentReader, table: Table) -> bool:
    embedding_type = (
        "rope" if arguments.get("use_rotary_position_embeddings") else arguments.get("position_embedding_type")
    )
    if embedding_type is None and (arguments.other is not None or table.learned_positions):
        return table.learned_positions
    if embedding_type != ("learned_absolute" if table.learned_positions else "rope"):
        raise UnsupportedError(
            f"the arguments state position_embedding_type {printable(str(embedding_type))[:40]}, "
            f"but the tensors are of {table.family}",
            where=arguments.where,
            hint=_CONFIG_HINT if embedding_type is None else None,
        )
    return table.learned_positions


def _rotary(arguments: _ArgumentReader) -> tuple[float, Scaling | None]:
    theta = arguments.real("theta", "rotary_base", default=10000.0)
    linear, llama3 = arguments.get("rotary_seq_len_interpolation_factor"), arguments.get("use_rope_scaling")
    if linear is not None and llama3:
        raise UnsupportedError("the arguments state two scalings of rotary frequencies", where=arguments.where)
    if linear is not None:
        return theta, Scaling("linear", arguments.real("", "rotary_seq_len_interpolation_factor", default=1.0))
    if llama3:
        return theta, Scaling("llama3", arguments.real("", "rope_scaling_factor", default=8.0))
    return theta, arguments.other.scaling if arguments.other is not None and llama3 is None else None


def _activation(arguments: _ArgumentReader, table: Table) -> Activation:
    gated = arguments.get("swiglu")
    if gated is None:
        gated = arguments.get("glu_activation") == "swiglu" or (arguments.other is not None and table.gated)
    if bool(gated) != table.gated:
        raise UnsupportedError(
            f"the arguments state swiglu {bool(gated)}, but the tensors are of {table.family}: no known family has "
            "both",
            where=arguments.where,
        )
    if gated:
        return "silu"
    if arguments.get("bias_gelu_fusion", default=None if arguments.other else True):
        return "gelu_tanh"  # the fused kernel computes GELU by the hyperbolic tangent
    if arguments.other is not None:
        return arguments.other.activation
    if arguments.get("openai_gelu"):
        raise UnsupportedError(
            "the run's arguments state openai_gelu, which Megatron core's layers ignore, but older layers use",
            where=arguments.where,
            hint=_CONFIG_HINT,
        )
    return "gelu"


def _window(arguments: _ArgumentReader) -> int | None:
    window = arguments.get("window_size")
    if window is None:
        return None if arguments.other is None else arguments.other.window
    if isinstance(window, (tuple, list)) and len(window) == 2 and window[0] == -1:
        return None
    if not isinstance(window, (tuple, list)) or len(window) != 2 or not is_natural(window[0]) or window[1] != 0:
        raise UnsupportedError(
            f"the arguments state a sliding window of {printable(str(window))[:40]}, which is not supported",
            where=arguments.where,
        )
    return cast(int, window[0]) + 1  # Megatron counts only the previous tokens, transformers also the token itself
