"""Check that a configuration describes the tensors. If not, transformers creates other or additional tensors.

Sizes are looked up by the keys that libraries use, and compared with tensors whose meaning is known from their names.
Sizes that the configuration does not state, and tensors with other names, are not checked.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.values import is_natural
from ckpt_formats.engines.hf.model_names import NameMatch

_KEYS = {
    "vocabulary": ("vocab_size",),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
}
_TABLES = (
    (r"(model\.|transformer\.|)(embed_tokens|wte|word_embeddings)\.weight", ("vocabulary", "hidden")),
    (r"lm_head\.weight", ("vocabulary", "hidden")),
)
"""The axes of tensors in models of any family."""
_LAYER = re.compile(r"(?:model\.|transformer\.|)(?:layers|h)\.(\d{1,6})\..*")
_PREDICTED = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""The numbers of additional layers, after the model's own, that predict further tokens."""


def check_fits(match: NameMatch, named: Sequence[Parameter], config: Mapping[str, Any], partial: bool) -> None:
    """Raise `UnsupportedError` if the configuration does not describe these tensors, as they will be written.

    `partial` allows missing tensors, because the user left some out.
    """
    if "quantization_config" in config:
        return
    misfits = [*_shapes(match, named, config)]
    if not misfits:
        misfits += _layers(named, config, partial)
    if not misfits and match.known and not partial:
        misfits += _names(match)
    if misfits:
        raise UnsupportedError(
            f"config.json does not describe this model: {list_names(misfits, str, separator='; ')}",
            hint="Name the model's own config.json with --config; or write only the tensors, --to safetensors.",
        )


def _shapes(match: NameMatch, named: Sequence[Parameter], config: Mapping[str, Any]) -> Iterator[str]:
    sizes, configured = _sizes(config), match.configured
    expected = {} if configured is None else configured.shapes("hf")
    for parameter in named:
        shape, name = parameter.weight.shape, parameter.name
        axes = next((axes for pattern, axes in _TABLES if re.fullmatch(pattern, name)), None)
        if axes is None:
            if configured is not None and name in expected and expected[name] != shape:
                entries = [f"{key} {config[key]!r:.40}" for key in configured.entries_of_shape(name) if key in config]
                yield (
                    f"`{printable(name)}` has the shape {list(shape)}, but the configuration gives "
                    f"{list(expected[name])} ({', '.join(entries)})"
                )
            continue
        expected_sizes = [sizes.get(axis) for axis in axes]
        if len(shape) == len(expected_sizes) and all(
            b in (None, a) for a, b in zip(shape, expected_sizes, strict=True)
        ):
            continue
        if any(size is not None for size in expected_sizes):
            stated = ", ".join(_stated_sizes(axis, config) for axis in axes)
            yield f"`{printable(name)}` has the shape {list(shape)}, but the configuration states {stated}"


def _sizes(config: Mapping[str, Any]) -> dict[str, int]:
    sizes = {}
    for axis, keys in _KEYS.items():
        value = next((config[key] for key in keys if is_natural(config.get(key), 1 << 40)), None)
        if value is not None:
            sizes[axis] = value
    if "embedding_size" in config or "word_embed_proj_dim" in config:
        sizes.pop("hidden", None)  # the tables have another width than the layers
    return sizes


def _stated_sizes(axis: str, config: Mapping[str, Any]) -> str:
    """The configuration's entries for the size of an axis, as text."""
    keys = [key for key in _KEYS[axis] if key in config] or [_KEYS[axis][0]]
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
