"""Read and write an architecture as a config.json of transformers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from ckpt_formats.core.errors import CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import is_natural
from ckpt_formats.names.architecture import Activation, Architecture, Scaling
from ckpt_formats.names.table import Table

CONFIG = "hf/config.json"
"""The key of a model's configuration in a checkpoint's extras."""

T = TypeVar("T", int, float)

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}
_ACTIVATION_NAMES: dict[Activation, str] = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_new"}

LLAMA3: dict[str, float] = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""The parameters of Llama 3's scaling that Megatron supports. Only its factor can be chosen."""

_PLAIN: dict[str, Any] = {
    "quantization_config": None,
    "partial_rotary_factor": 1.0,
    "use_sliding_window": False,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
"""Entries that must have this value or be absent: with any other value, Megatron could not compute the model."""


def of_config(config: Mapping[str, Any], table: Table, where: Path) -> Architecture:
    """The architecture that a config.json describes.

    Raises: IncompleteError or CorruptError if an entry is missing or not valid, UnsupportedError for a model that
    Megatron cannot compute.
    """
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            raise UnsupportedError(
                f"config.json states {key} {printable(str(config[key]))[:60]}, which Megatron does not support",
                where=where,
            )

    def entry(field: str) -> Any:
        key = {**table.count, **table.sizes, **table.config}.get(field)
        return None if key is None else config.get(key, table.absent.get(key))

    def number(field: str, default: int | None = None) -> int:
        value = entry(field)
        value = default if value is None else value
        if value is None:
            raise IncompleteError(f"config.json does not state the model's {field}", where=where)
        if not is_natural(value) or not value:
            raise CorruptError(
                f"config.json states {field} {printable(str(value))[:60]}: it must be a positive integer", where=where
            )
        return cast(int, value)

    heads, hidden = number("heads"), number("hidden")
    groups, head_dim = number("groups", heads), number("head_dim", hidden // heads or None)
    if heads % groups:
        raise CorruptError(
            f"config.json states {heads} attention heads, which cannot be divided into {groups} groups", where=where
        )
    activation = _ACTIVATIONS.get(str(entry("activation")))
    if activation is None or (activation == "silu") != table.gated:
        raise UnsupportedError(
            f"config.json states the activation {printable(str(entry('activation')))[:60]}, which is not supported",
            where=where,
        )
    theta, scaling = (None, None) if table.learned_positions else _rotary(config, table, where)
    window = entry("window")
    if window is not None and (not is_natural(window) or not window):
        raise CorruptError(
            f"config.json states a sliding window of {printable(str(window))[:60]}, which is not a positive integer",
            where=where,
        )
    return Architecture(
        layers=number("layer"),
        hidden=hidden,
        ffn=number("ffn", 4 * hidden if table.learned_positions else None),
        heads=heads,
        groups=groups,
        head_dim=head_dim,
        vocabulary=number("vocabulary"),
        positions=number("positions"),
        epsilon=_real(entry("epsilon"), "epsilon", where),
        activation=activation,
        tied=table.tie(config) is not None,
        theta=theta,
        scaling=scaling,
        experts=number("expert") if "expert" in table.count else None,
        chosen=number("chosen") if "expert" in table.count else None,
        window=window,
        dropout=_real(entry("dropout"), "dropout", where, 0.0),
        attention_dropout=_real(entry("attention_dropout"), "attention_dropout", where, 0.0),
        std=_real(entry("std"), "std", where, 0.02),
    )


def to_config(model: Architecture, table: Table, flags: Mapping[str, bool], dtype: str | None) -> dict[str, Any]:
    """The config.json of a model of this family; `flags` are the entries that its names depend on.

    Raises `UnsupportedError` if transformers' models of the family cannot compute the model.
    """
    if "head_dim" not in table.config and model.head_dim * model.heads != model.hidden:
        raise UnsupportedError(f"{model.heads} heads of {model.head_dim} do not give the hidden size {model.hidden}")
    if table.sizes["groups"] == table.sizes["heads"] and model.groups != model.heads:
        raise UnsupportedError(f"the family {table.family} has no groups of heads that share keys and values")
    fields = {**table.count, **table.sizes, **table.config}
    values: dict[str, Any] = {
        "layer": model.layers,
        "expert": model.experts,
        "heads": model.heads,
        "groups": model.groups,
        "activation": _ACTIVATION_NAMES[model.activation],
    }
    entries = {key: values[field] if field in values else getattr(model, field) for field, key in fields.items()}
    if table.learned_positions:
        entries["embd_pdrop"] = model.dropout
    elif model.theta is not None:
        entries |= {"rope_theta": model.theta, "rope_scaling": _scaled(model.scaling)}
    return {
        "architectures": [table.architectures[0]],
        "model_type": table.model_types[0],
        **entries,
        **flags,
        "tie_word_embeddings": model.tied,
        # The tokenizer is not known. Without these entries, transformers would use defaults of another tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
        **({"torch_dtype": dtype} if dtype else {}),
    }


def _rotary(config: Mapping[str, Any], table: Table, where: Path) -> tuple[float, Scaling | None]:
    """The base and the scaling of rotary frequencies, from the entries of transformers 4 or 5."""
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rotary, dict):
        raise CorruptError("the rotary parameters of config.json are not a mapping", where=where)
    theta = _real(
        rotary.get("rope_theta", config.get("rope_theta", table.absent.get("rope_theta"))), "rope_theta", where
    )
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if rotary.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedError("config.json states partial_rotary_factor, which is not supported", where=where)
    if kind == "default":
        return theta, None
    if kind == "linear" or (kind == "llama3" and all(rotary.get(key) == value for key, value in LLAMA3.items())):
        return theta, Scaling(kind, _real(rotary.get("factor"), "factor of rope_scaling", where))
    raise UnsupportedError(
        f"config.json scales rotary frequencies by {printable(str(rotary))[:120]}, which Megatron does not support",
        where=where,
    )


def _scaled(scaling: Scaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {"rope_type": scaling.kind, "factor": scaling.factor, **(LLAMA3 if scaling.kind == "llama3" else {})}


def _real(value: Any, name: str, where: Path, default: float | None = None) -> float:
    value = default if value is None else value
    if value is None:
        raise IncompleteError(f"config.json does not state `{name}`", where=where)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e30:
        raise CorruptError(
            f"config.json states {name} {printable(str(value))[:60]}, which is not a valid number", where=where
        )
    return float(value)
