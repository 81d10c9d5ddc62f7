"""Pairs of pure functions between blocks of tensors and bytes. `docs/codecs.md` specifies the bytes."""

from ckpt_codecs.base import Codec
from ckpt_codecs.delta import Change, DeltaCodec, Step
from ckpt_codecs.errors import CodecError, NotApplicable
from ckpt_codecs.lossless.candidates import best_for
from ckpt_codecs.lossless.float_planes import Planes
from ckpt_codecs.lossless.integers import Integers
from ckpt_codecs.lossless.moments import FirstMoment, SecondMoment
from ckpt_codecs.lossless.rounded import Rounded
from ckpt_codecs.lossless.zstd import Zstd
from ckpt_codecs.registry import CODECS, DELTA_CODECS, delta_from_config, find, from_config, parse, parse_delta

__all__ = [
    "CODECS",
    "DELTA_CODECS",
    "Change",
    "Codec",
    "CodecError",
    "DeltaCodec",
    "FirstMoment",
    "Integers",
    "NotApplicable",
    "Planes",
    "Rounded",
    "SecondMoment",
    "Step",
    "Zstd",
    "best_for",
    "delta_from_config",
    "find",
    "from_config",
    "parse",
    "parse_delta",
]
