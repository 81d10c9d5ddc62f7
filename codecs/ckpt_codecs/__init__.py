"""Codecs by name. To add one: write its file, add its line."""

from typing import Any

from ckpt_codecs.base import Codec
from ckpt_codecs.errors import CodecError, NotApplicable
from ckpt_codecs.rounded import Rounded

CODECS: dict[str, type[Codec]] = {codec.name: codec for codec in (Rounded,)}

__all__ = ["CODECS", "Codec", "CodecError", "NotApplicable", "Rounded", "from_config"]


def from_config(config: dict[str, Any]) -> Codec:
    """The codec that `Codec.config` described. Raises `CodecError` for one we do not have."""
    options = dict(config)
    name = options.pop("name", None)
    if name not in CODECS:
        raise CodecError(f"no codec is called {name!r}; there are: {', '.join(CODECS)}")
    try:
        return CODECS[name](**options)
    except TypeError as error:
        raise CodecError(f"codec {name}: {error}") from None
