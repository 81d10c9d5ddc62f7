"""Check that a configuration describes the tensors. If not, transformers creates other or additional tensors.

Sizes are looked up by the keys that libraries use, and compared with tensors whose meaning is known from their names.
Sizes that the configuration does not state, and tensors with other names, are not checked.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import is_natural
from ckpt_formats.engines.hf.model_names import NameMatch

_KEYS = {
    "vocabulary": ("vocab_size",),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "inner": ("intermediate_size", "n_inner"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "heads": ("num_attention_heads", "n_head"),
    "groups": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "positions": ("n_positions", "max_position_embeddings"),
    "experts": ("num_local_experts",),
}
_TABLES = (
    (r"(model\.|transformer\.|)(embed_tokens|wte|word_embeddings)\.weight", ("vocabulary", "hidden")),
    (r"lm_head\.weight", ("vocabulary", "hidden")),
)
"""The axes of tensors in models of any family."""
_OF_FAMILIES = (
    (r".*\.self_attn\.q_proj\.weight", ("queries", "hidden")),
    (r".*\.self_attn\.[kv]_proj\.weight", ("keys", "hidden")),
    (r".*\.self_attn\.o_proj\.weight", ("hidden", "queries")),
    (r".*\.mlp\.(gate|up)_proj\.weight", ("inner", "hidden")),
    (r".*\.mlp\.down_proj\.weight", ("hidden", "inner")),
    (r".*\.experts\.\d+\.w[13]\.weight", ("inner", "hidden")),
    (r".*\.experts\.\d+\.w2\.weight", ("hidden", "inner")),
    (r".*\.block_sparse_moe\.gate\.weight", ("experts", "hidden")),
    (r"(transformer\.|)wpe\.weight", ("positions", "hidden")),
    (r".*(layernorm|\.norm|\.ln_[12f])\.weight", ("hidden",)),
)
"""The axes of tensors in models of the families that have a table of names."""
_LAYER = re.compile(r"(?:model\.|transformer\.|)(?:layers|h)\.(\d{1,6})\..*")
_PREDICTED = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""The numbers of additional layers, after the model's own, that predict further tokens."""
_MAX_NAMES = 3


def check_fits(match: NameMatch, named: Sequence[Parameter], config: Mapping[str, Any], partial: bool) -> None:
    """Raise `UnsupportedError` if the configuration does not describe these tensors, as they will be written.

    `partial` allows missing tensors, because the user left some out.
    """
    if "quantization_config" in config:
        return
    misfits = [*_shapes(match.known, named, config)]
    if not misfits:
        misfits += _layers(named, config, partial)
    if not misfits and match.known and not partial:
        misfits += _names(match)
    if misfits:
        suffix = f" (and {len(misfits) - _MAX_NAMES} more)" if len(misfits) > _MAX_NAMES else ""
        raise UnsupportedError(
            f"config.json does not describe this model: {'; '.join(misfits[:_MAX_NAMES])}{suffix}",
            hint="Name the model's own config.json with --config; or write only the tensors, --to safetensors.",
        )


def _shapes(known: bool, named: Sequence[Parameter], config: Mapping[str, Any]) -> Iterator[str]:
    sizes = _sizes(config)
    patterns = (*_TABLES, *_OF_FAMILIES) if known else _TABLES
    for parameter in named:
        shape = parameter.weight.shape
        axes_of_name = next((axes for pattern, axes in patterns if re.fullmatch(pattern, parameter.name)), None)
        if axes_of_name is None:
            continue
        expected_sizes = [sizes.get(axis) for axis in axes_of_name]
        if len(shape) == len(expected_sizes) and all(
            b in (None, a) for a, b in zip(shape, expected_sizes, strict=True)
        ):
            continue
        if any(size is not None for size in expected_sizes):
            stated = ", ".join(_stated_sizes(axis, config) for axis in axes_of_name)
            name = printable(parameter.name)
            yield f"`{name}` has the shape {list(shape)}, but the configuration states {stated}"


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    sizes = {}
    for axis, keys in _KEYS.items():
        value = next((config[key] for key in keys if is_natural(config.get(key), 1 << 40)), None)
        if value is not None:
            sizes[axis] = value
    if "embedding_size" in config or "word_embed_proj_dim" in config:
        sizes.pop("hidden", None)  # the tables have another width than the layers
    heads = sizes.get("heads")
    if heads and "hidden" in sizes:
        sizes.setdefault("head_dim", sizes["hidden"] // heads)
    if heads and "head_dim" in sizes:
        sizes["queries"] = heads * sizes["head_dim"]
        sizes["keys"] = sizes.get("groups", heads) * sizes["head_dim"]
    return sizes


def _stated_sizes(axis: str, config: Mapping[str, Any]) -> str:
    """The configuration's entries for the size of an axis, as text."""
    axes = {"queries": ("heads", "head_dim"), "keys": ("groups", "head_dim")}.get(axis, (axis,))
    keys = [key for size_name in axes for key in _KEYS[size_name] if key in config] or [_KEYS[axes[0]][0]]
    return " and ".join(f"{key} {config.get(key)!r:.40}" for key in keys)


def _layers(named: Sequence[Parameter], config: Mapping[str, Any], partial: bool) -> Iterator[str]:
    layers = _sizes(config).get("layers")
    numbers = [int(match[1]) for parameter in named if (match := _LAYER.fullmatch(parameter.name))]
    if layers is None or not numbers:
        return
    count = 1 + max(numbers)
    max_count = layers + sum(config[key] for key in _PREDICTED if is_natural(config.get(key), 1 << 20))
    if count > max_count or (count < layers and not partial):
        yield f"there are {count} layers, but the configuration states {_stated_sizes('layers', config)}"


def _names(match: NameMatch) -> Iterator[str]:
    for name in match.missing:
        tied = ", which may only be left out if tie_word_embeddings is true" if name == "lm_head.weight" else ""
        yield f"`{printable(name)}` is missing{tied}"
