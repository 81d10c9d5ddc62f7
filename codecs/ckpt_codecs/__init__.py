"""Lossless and lossy codecs of tensors: pure functions between arrays and bytes. docs/codecs.md specifies the bytes."""

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
