"""Lossy delta codecs. A user must choose them: none is a default. `docs/lossy-codecs.md` specifies the bytes.

A module is imported at the first use of its names: readers need the figures of errors, and no codec.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckpt_codecs.lossy.error_stats import ErrorStats, measure
    from ckpt_codecs.lossy.excp import Excp
    from ckpt_codecs.lossy.lc import LcCheckpoint
    from ckpt_codecs.lossy.search import coarsest
    from ckpt_codecs.lossy.subspace import PRESETS, Subspace

_WHERE = {
    "ErrorStats": "error_stats",
    "Excp": "excp",
    "LcCheckpoint": "lc",
    "PRESETS": "subspace",
    "Subspace": "subspace",
    "coarsest": "search",
    "measure": "error_stats",
}
"""The modules of the public names."""

__all__ = ["PRESETS", "ErrorStats", "Excp", "LcCheckpoint", "Subspace", "coarsest", "measure"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ckpt_codecs.lossy' has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"ckpt_codecs.lossy.{_WHERE[name]}"), name)
    return value
