"""Pairs of pure functions between blocks of tensors and bytes. `docs/codecs.md` specifies the bytes."""

from ckpt_codecs.base import Codec
from ckpt_codecs.engine import warm_up
from ckpt_codecs.errors import CodecError, NotApplicable
from ckpt_codecs.general import Zstd
from ckpt_codecs.integers import Integers
from ckpt_codecs.moments import FirstMoment, SecondMoment
from ckpt_codecs.planes import Planes
from ckpt_codecs.registry import CODECS, best_for, find, from_config, parse
from ckpt_codecs.rounded import Rounded

__all__ = [
    "CODECS",
    "Codec",
    "CodecError",
    "FirstMoment",
    "Integers",
    "NotApplicable",
    "Planes",
    "Rounded",
    "SecondMoment",
    "Zstd",
    "best_for",
    "find",
    "from_config",
    "parse",
    "warm_up",
]
