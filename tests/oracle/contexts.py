"""The twin of `contexts.c`: symbols put together by what is known of each beforehand, and back."""

import numpy as np

from ckpt_codecs.base import Array


def exponent_buckets(words: Array, mantissa: int, least: int, many: int) -> Array:
    exponent = (words & np.uint16(0x7FFF)) >> np.uint16(mantissa)
    buckets: Array = np.clip(exponent.astype(np.int32) - least, 0, many - 1).astype(np.uint8)
    return buckets


def count_contexts(contexts: Array, many: int) -> Array:
    return np.bincount(contexts, minlength=many)


def gather(contexts: Array, plane: Array, out: Array) -> None:
    out[:] = plane[np.argsort(contexts, kind="stable")]


def scatter(contexts: Array, plane: Array, out: Array) -> None:
    out[np.argsort(contexts, kind="stable")] = plane
