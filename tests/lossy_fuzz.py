"""Damage done to lossy chunks: whatever it is, decoding ends in arrays of the right form or a `CodecError`."""

from collections.abc import Sequence

import numpy as np

from ckpt_codecs import CodecError
from ckpt_codecs.base import DType
from ckpt_codecs.delta import DeltaCodec, StatePair, States
from codec_fuzz import mutations
from lossy_states import LOSSY, changes, table, training

Seed = tuple[DeltaCodec, StatePair, bytes]


def seeds() -> list[Seed]:
    """Chunks with sections of every kind."""
    before, after = training((96, 64), 2)
    after["exp_avg_sq"][:, 3] = 0
    small = training((50,), 2)
    given = [
        StatePair(before, after),
        StatePair({}, after),
        StatePair(*small),
        StatePair(before, {**after, "fp32": before["fp32"]}),
        StatePair(before, table(before, after, 5)),
    ]
    return [(codec, change, codec.encode(change)) for codec in LOSSY for change in given]


def survives(codec: DeltaCodec, data: bytes, before: States, shape: tuple[int, ...], form: dict[str, DType]) -> bool:
    """Decode it: True if arrays came of it."""
    try:
        decoded = codec.decode(data, before, shape, form)
    except CodecError:
        return False
    assert {n: a.dtype for n, a in decoded.items()} == form
    assert all(a.shape == shape for a in decoded.values())
    return True


def of_seed(seed: Seed, data: bytes) -> bool:
    codec, change, _ = seed
    shape = next(iter(change.after.values())).shape
    return survives(codec, data, change.before, shape, {n: a.dtype for n, a in change.after.items()})


def fuzz(seed: int, count: int, given: Sequence[Seed]) -> int:
    """So many mutations of every chunk; how many of them gave arrays."""
    random = np.random.default_rng(seed)
    total = 0
    for each in given:
        source = mutations(each[2], random)
        total += sum(of_seed(each, next(source)) for _ in range(count))
    return total


def some(seed: int, count: int) -> int:
    """Whole chunks of some changes, and so many mutations."""
    for _, change in list(changes())[::5]:
        for codec in LOSSY:
            assert of_seed((codec, change, b""), codec.encode(change))
    return fuzz(seed, count, seeds())
