"""Lossy delta codecs. A user must choose them: none is a default. `docs/lossy-codecs.md` specifies the bytes."""

from ckpt_codecs.lossy.error_stats import ErrorStats, measure
from ckpt_codecs.lossy.excp import Excp
from ckpt_codecs.lossy.lc import LcCheckpoint
from ckpt_codecs.lossy.presets import PRESETS
from ckpt_codecs.lossy.search import coarsest
from ckpt_codecs.lossy.subspace import Subspace

__all__ = ["PRESETS", "ErrorStats", "Excp", "LcCheckpoint", "Subspace", "coarsest", "measure"]
