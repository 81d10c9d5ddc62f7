"""Codecs for logged gradients of a training run, chunk by chunk. docs/codecs.md specifies the bytes.

They are not codecs of checkpoints: the registry of those does not list them. A module is imported at the first use of
its names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_codecs.gradients.blocks import Int8Gradients
    from ckpt_codecs.gradients.by_name import GRADIENT_CODECS, gradient_codec
    from ckpt_codecs.gradients.exact import ExactGradients
    from ckpt_codecs.gradients.rounding import Bfloat16Gradients
    from ckpt_codecs.gradients.scaled import encode_scaled, find_factor

_WHERE = {
    "Bfloat16Gradients": "rounding",
    "ExactGradients": "exact",
    "GRADIENT_CODECS": "by_name",
    "GradientCodec": "chunk",
    "Int8Gradients": "blocks",
    "encode_scaled": "scaled",
    "find_factor": "scaled",
    "gradient_codec": "by_name",
}
"""The modules of the public names."""

__all__ = [
    "GRADIENT_CODECS",
    "Bfloat16Gradients",
    "ExactGradients",
    "GradientCodec",
    "Int8Gradients",
    "encode_scaled",
    "find_factor",
    "gradient_codec",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ckpt_codecs.gradients' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"ckpt_codecs.gradients.{_WHERE[name]}"), name)
    return value
