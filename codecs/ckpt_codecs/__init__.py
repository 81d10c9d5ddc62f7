"""Lossless and lossy codecs of tensors: pure functions between arrays and bytes. docs/codecs.md specifies the bytes.

A module is imported at the first use of its names, so that readers of other formats import no codec.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_codecs.base import Codec
    from ckpt_codecs.delta import DeltaCodec, StatePair, StepInfo
    from ckpt_codecs.errors import CodecError, NotApplicable
    from ckpt_codecs.lossless.candidates import candidate_codecs
    from ckpt_codecs.lossless.float_planes import Planes
    from ckpt_codecs.lossless.integers import Integers
    from ckpt_codecs.lossless.moments import FirstMoment, SecondMoment
    from ckpt_codecs.lossless.rounded import Rounded
    from ckpt_codecs.lossless.zstd import Zstd
    from ckpt_codecs.registry import CODECS, DELTA_CODECS, delta_from_config, find, from_config, parse, parse_delta

_NAMES = {
    "ckpt_codecs.base": ("Codec",),
    "ckpt_codecs.delta": ("DeltaCodec", "StatePair", "StepInfo"),
    "ckpt_codecs.errors": ("CodecError", "NotApplicable"),
    "ckpt_codecs.lossless.candidates": ("candidate_codecs",),
    "ckpt_codecs.lossless.float_planes": ("Planes",),
    "ckpt_codecs.lossless.integers": ("Integers",),
    "ckpt_codecs.lossless.moments": ("FirstMoment", "SecondMoment"),
    "ckpt_codecs.lossless.rounded": ("Rounded",),
    "ckpt_codecs.lossless.zstd": ("Zstd",),
    "ckpt_codecs.registry": (
        "CODECS",
        "DELTA_CODECS",
        "delta_from_config",
        "find",
        "from_config",
        "parse",
        "parse_delta",
    ),
}
"""The public names by module."""
_WHERE = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "CODECS",
    "DELTA_CODECS",
    "Codec",
    "CodecError",
    "DeltaCodec",
    "FirstMoment",
    "Integers",
    "NotApplicable",
    "Planes",
    "Rounded",
    "SecondMoment",
    "StatePair",
    "StepInfo",
    "Zstd",
    "candidate_codecs",
    "delta_from_config",
    "find",
    "from_config",
    "parse",
    "parse_delta",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ckpt_codecs' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(_WHERE[name]), name)
    return value
