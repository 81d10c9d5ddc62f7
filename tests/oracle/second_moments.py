"""The twin of `second_moments.c`: what words of float32, the second moments of Adam, tell of other states."""

import numpy as np

from ckpt_codecs.base import Array


def root_units(second: Array, shift: int) -> Array:
    root = (second >> np.uint32(23) & np.uint32(255)).astype(np.int32) + 127 >> 1
    units: Array = np.clip(root + shift, 1, 254).astype(np.uint8)
    return units


def growth_contexts(before: Array, after: Array, least: int, many: int) -> Array:
    contexts: Array = np.clip(((after - before).view(np.int32) >> 21) - least, 0, many - 1).astype(np.uint8)
    return contexts


def apply_drift(words: Array, rows: Array, columns: Array) -> Array:
    drift = rows.astype(np.int32)[:, None] + columns.astype(np.int32) << 19
    grown: Array = (words.reshape(drift.shape) + drift.view(np.uint32)).reshape(-1)
    return grown
