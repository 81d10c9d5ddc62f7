"""The shapes of Megatron core's tensors, computed from a model's architecture."""

import re

from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.formula import evaluate
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.text import printable
from ckpt_formats.names.architecture import Architecture

_SHAPES = (
    (r"embedding\.word_embeddings\.weight|output_layer\.weight", ("vocabulary", "hidden")),
    (r"embedding\.position_embeddings\.weight", ("positions", "hidden")),
    (r".*\.linear_qkv\.weight", ("heads * head_dim + 2 * groups * head_dim", "hidden")),
    (r".*\.linear_qkv\.bias", ("heads * head_dim + 2 * groups * head_dim",)),
    (r".*\.linear_proj\.weight", ("hidden", "heads * head_dim")),
    (r".*\.linear_fc1\.weight", ("gates * ffn", "hidden")),
    (r".*\.linear_fc1\.bias", ("gates * ffn",)),
    (r".*\.linear_fc2\.weight", ("hidden", "ffn")),
    (r".*\.mlp\.router\.weight", ("experts", "hidden")),
    (r".*\.[qk]_layernorm\.weight", ("head_dim",)),
    (r".*\.linear_(?:proj|fc2)\.bias|.*layernorm\.(?:weight|bias)", ("hidden",)),
)
_PADDED = re.compile(_SHAPES[0][0])


def check_shape(name: str, shape: Shape, model: Architecture, *, padded: bool, source_name: str) -> None:
    """Raise `CorruptError` if a tensor does not have the shape of the model's architecture.

    `name` is its name in Megatron's plain layers, `source_name` the name for messages. `padded` allows more rows in
    tables of the vocabulary.
    """
    sizes = {
        "vocabulary": model.vocabulary,
        "hidden": model.hidden,
        "positions": model.positions,
        "heads": model.heads,
        "groups": model.groups,
        "head_dim": model.head_dim,
        "ffn": model.ffn,
        "gates": 2 if model.activation == "silu" else 1,
        "experts": model.experts or 0,
    }
    formulas = next(formulas for pattern, formulas in _SHAPES if re.fullmatch(pattern, name))
    expected = tuple(evaluate(formula, sizes, f"the shape of `{name}`") for formula in formulas)
    longer = padded and _PADDED.fullmatch(name) and shape[1:] == expected[1:] and shape[:1] > expected[:1]
    if shape != expected and not longer:
        raise CorruptError(
            f"`{printable(source_name)}` has the shape {list(shape)}, but the model's sizes give {list(expected)}",
            hint="The configuration or the arguments contradict the tensors: name the right config.json with --config.",
        )
