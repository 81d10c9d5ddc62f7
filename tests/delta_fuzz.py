"""Damage done to chunks of deltas: whatever it is, decoding ends in arrays or a `CodecError`."""

import numpy as np

from ckpt_codecs import CodecError, DeltaCodec
from ckpt_codecs.delta import StatePair
from codec_fuzz import mutations
from delta_cases import DELTAS, cases, decoded, fitted

Seed = tuple[str, DeltaCodec, StatePair, bytes]
CHOSEN = (
    "adam-1-(600, 70)",
    "adam-10-(600, 70)",
    "adam-bf16-(600, 70)",
    "adam-1-(40, 64)",
    "anchor",
    "weights",
    "copy-float16",
    "copy-bfloat16",
    "masters-and-copy-bfloat16",
    "amsgrad",
    "rows-grow",
    "few-changes",
    "momentum",
    "foreign",
    "counters",
)


def seeds() -> list[Seed]:
    """Chunks with parts of every kind."""
    chosen = [case for case in cases(5) if case[0] in CHOSEN]
    encoded = []
    for name, change, step in chosen:
        for codec in DELTAS:
            ready = fitted(codec, change, step)
            encoded.append((f"{codec.name}-{name}", ready, change, bytes(ready.encode(change))))
    return encoded


def survives(codec: DeltaCodec, data: bytes, change: StatePair) -> bool:
    """Decode it: True if arrays came of it."""
    try:
        states = decoded(codec, data, change)
    except CodecError:
        return False
    for name, values in change.after.items():
        assert states[name].shape == values.shape
        assert states[name].dtype == values.dtype
    return True


def fuzz(seed: int, count: int) -> dict[str, int]:
    """So many mutations of every chunk; how many of them gave arrays, by codec."""
    random = np.random.default_rng(seed)
    arrays = {codec.name: 0 for codec in DELTAS}
    for _, codec, change, data in seeds():
        source = mutations(data, random)
        for _ in range(count):
            arrays[codec.name] += survives(codec, next(source), change)
    return arrays


def some(seed: int, count: int) -> dict[str, int]:
    """Whole chunks of some cases, and so many mutations."""
    for _, change, step in list(cases())[::9]:
        for codec in DELTAS:
            ready = fitted(codec, change, step)
            assert survives(ready, ready.encode(change), change)
    return fuzz(seed, count)
