"""The codecs of gradients by their short names."""

from ckpt_codecs.errors import CodecError
from ckpt_codecs.gradients.blocks import Int8Gradients
from ckpt_codecs.gradients.chunk import GradientCodec
from ckpt_codecs.gradients.exact import ExactGradients
from ckpt_codecs.gradients.rounding import Bfloat16Gradients

GRADIENT_CODECS: dict[str, type[GradientCodec]] = {
    "exact": ExactGradients,
    "bf16": Bfloat16Gradients,
    "int8": Int8Gradients,
}
"""The codecs by their short names, as users type them."""


def gradient_codec(name: str) -> GradientCodec:
    """The codec with this short name and default options. Raises `CodecError` if there is none.

    >>> gradient_codec("bf16").config()
    {'name': 'gradients-bf16', 'level': 'default'}
    """
    if name not in GRADIENT_CODECS:
        raise CodecError(f"no gradient codec has the name {name!r}; there are: {', '.join(GRADIENT_CODECS)}")
    return GRADIENT_CODECS[name]()
