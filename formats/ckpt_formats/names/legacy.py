"""Translate between Megatron-LM's names from before Megatron core, and Megatron core's names.

Only the names differ, except for the order of rows in fused queries, keys and values of the oldest files. Checkpoint
version 0 has all queries, then all keys, then all values. Version 1 has, for each head, the query, key and value of the
first element, then those of the second, and so on. Since version 2, each head has its query, its key, its value, as in
Megatron core. Source: Megatron-LM, `fix_query_key_value_ordering`.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Record
from ckpt_formats.core.views import concatenated, group_rows, rows_of
from ckpt_formats.names.renames import TensorRename, apply_renames

VERSION = "checkpoint_version"
CURRENT = 3.0

_LAYER = r"(?P<layer>\d+)\."
_OUTER = {
    "embedding.word_embeddings": "embedding.word_embeddings",
    "embedding.position_embeddings": "embedding.position_embeddings",
    "encoder.final_layernorm": "decoder.final_layernorm",
    "encoder.final_norm": "decoder.final_layernorm",
    "output_layer": "output_layer",
}
_INNER = {
    "input_layernorm": "input_layernorm",
    "input_norm": "input_layernorm",
    "self_attention.query_key_value": "self_attention.linear_qkv",
    "self_attention.dense": "self_attention.linear_proj",
    "post_attention_layernorm": "pre_mlp_layernorm",
    "post_attention_norm": "pre_mlp_layernorm",
    "mlp.dense_h_to_4h": "mlp.linear_fc1",
    "mlp.dense_4h_to_h": "mlp.linear_fc2",
}
"""If there are several old names for one new name, the first is written."""
_PREFIX = "language_model."
_IN_LEGACY = re.compile(rf"language_model\.encoder\.layers\.{_LAYER}(?P<rest>.*)\.(?P<kind>weight|bias)")
_IN_CORE = re.compile(rf"decoder\.layers\.{_LAYER}(?P<rest>.*)\.(?P<kind>weight|bias)")
_HEADS = ("word_embeddings_for_head.weight", "word_embeddings.weight")
"""The names of the last stage's copy of a tied table. The first is written."""


def core_name(name: str) -> str | None:
    """Megatron core's name for a tensor of the older models; None if there is none.

    >>> core_name("language_model.encoder.layers.3.mlp.dense_4h_to_h.bias")
    'decoder.layers.3.mlp.linear_fc2.bias'
    """
    if name in _HEADS:
        return "output_layer.weight"
    name = name.replace("language_model.transformer.", "language_model.encoder.", 1).replace(
        ".attention.", ".self_attention.", 1
    )
    if match := _IN_LEGACY.fullmatch(name):
        rest = _INNER.get(match["rest"])
        return None if rest is None else f"decoder.layers.{match['layer']}.{rest}.{match['kind']}"
    stem, _, kind = name.removeprefix(_PREFIX).rpartition(".")
    return f"{_OUTER[stem]}.{kind}" if name.startswith(_PREFIX) and stem in _OUTER else None


def legacy_name(name: str) -> str | None:
    """The older models' name for a tensor of Megatron core's plain layers; None if there is none.

    >>> legacy_name("decoder.layers.3.mlp.linear_fc2.bias")
    'language_model.encoder.layers.3.mlp.dense_4h_to_h.bias'
    """
    if match := _IN_CORE.fullmatch(name):
        rest = next((old for old, new in _INNER.items() if new == match["rest"]), None)
        return None if rest is None else f"{_PREFIX}encoder.layers.{match['layer']}.{rest}.{match['kind']}"
    stem, _, kind = name.rpartition(".")
    return next((f"{_PREFIX}{old}.{kind}" for old, new in _OUTER.items() if new == stem), None)


def is_legacy(name: str) -> bool:
    """True if it is a name of the older models. Names of other models, such as LLaVA, may have the same prefix."""
    return name.startswith(_PREFIX) and core_name(name) is not None


def has_legacy_names(source: Checkpoint) -> bool:
    """True if tensors have names of the older models."""
    return any(map(is_legacy, _own_names(source)))


def to_core(source: Checkpoint) -> Checkpoint:
    """A checkpoint with any of Megatron's names under those of Megatron core.

    Raises `UnsupportedError` for tensors that GPT models of Megatron core do not have.
    """
    if not has_legacy_names(source):
        return source
    version = source.extras.get(VERSION, 0)
    version = float(version) if isinstance(version, (int, float)) else 0.0
    changes = []
    for name in _own_names(source):
        new = core_name(name)
        if new is None:
            raise UnsupportedError(
                f"`{printable(name)}` is not a tensor of Megatron's older GPT models",
                hint="Leave it out with --skip.",
            )
        make = partial(_reordered, version, _heads(source)) if ".linear_qkv." in new and version < 2 else tuple
        changes.append(TensorRename((name,), (new,), make))
    renamed = apply_renames(source, changes)
    aliases = {core_name(alias) or alias: core_name(name) or name for alias, name in source.aliases.items()}
    return replace(renamed, aliases=aliases, extras={**renamed.extras, VERSION: max(version, CURRENT)})


def to_legacy(source: Checkpoint) -> Checkpoint:
    """A checkpoint with any of Megatron's names under those of the older models.

    Raises `UnsupportedError` for tensors that the older models do not have.
    """
    if has_legacy_names(source):
        return source
    changes = []
    for name in _own_names(source):
        old = legacy_name(name)
        if old is None:
            raise UnsupportedError(f"`{printable(name)}` is a tensor that Megatron's older models do not have")
        changes.append(TensorRename((name,), (old,), tuple))
    renamed = apply_renames(source, changes)
    aliases = {
        _HEADS[0] if alias == "output_layer.weight" else legacy_name(alias) or alias: legacy_name(name) or name
        for alias, name in source.aliases.items()
    }
    return replace(renamed, aliases=aliases, extras={**renamed.extras, VERSION: CURRENT})


def _own_names(source: Checkpoint) -> list[str]:
    return [name for name, parameter in source.parameters.items() if parameter.role != "extra"]


def _heads(source: Checkpoint) -> int:
    args = source.extras.get("args")
    heads = args.get("num_attention_heads") if isinstance(args, Record) else None
    return heads if isinstance(heads, int) and heads > 0 else 0


def _reordered(version: float, heads: int, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Queries, keys and values in the order of version 2: (rows, ...) as in `tensors[0]`."""
    if not heads:
        raise UnsupportedError("the run's arguments do not state the number of attention heads")
    (tensor,) = tensors
    rows = tensor.shape[0] if tensor.shape else 0
    if not rows or rows % (3 * heads):
        raise UnsupportedError(f"{rows} rows are not queries, keys and values of {heads} heads")
    width, thirds = rows // (3 * heads), rows // 3
    blocks = tensor if version < 1 else concatenated([group_rows(tensor, thirds, i, i + 1) for i in range(3)])
    places = [(block * heads + head) * width for head in range(heads) for block in range(3)]
    return (rows_of(blocks, [(place, place + width) for place in places]),)
