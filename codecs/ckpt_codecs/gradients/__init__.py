"""Codecs for logged gradients of a training run, chunk by chunk. docs/codecs.md specifies the bytes.

They are not codecs of checkpoints: the registry of those does not list them.
"""

from ckpt_codecs.base import Codec
from ckpt_codecs.errors import CodecError
from ckpt_codecs.gradients.blocks import Int8Gradients
from ckpt_codecs.gradients.exact import ExactGradients
from ckpt_codecs.gradients.rounding import Bfloat16Gradients
from ckpt_codecs.gradients.scaled import encode_scaled, find_factor

GRADIENT_CODECS: dict[str, type[Codec]] = {"exact": ExactGradients, "bf16": Bfloat16Gradients, "int8": Int8Gradients}
"""The codecs by their short names, as users type them."""


def gradient_codec(name: str) -> Codec:
    """The codec with this short name and default options. Raises `CodecError` if there is none.

    >>> gradient_codec("bf16").config()
    {'name': 'gradients-bf16', 'level': 'default'}
    """
    if name not in GRADIENT_CODECS:
        raise CodecError(f"no gradient codec has the name {name!r}; there are: {', '.join(GRADIENT_CODECS)}")
    return GRADIENT_CODECS[name]()


__all__ = [
    "GRADIENT_CODECS",
    "Bfloat16Gradients",
    "ExactGradients",
    "Int8Gradients",
    "encode_scaled",
    "find_factor",
    "gradient_codec",
]
