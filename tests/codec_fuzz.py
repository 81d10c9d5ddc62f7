"""Damage done to chunks: whatever it is, decoding ends in an array or a `CodecError`."""

import struct
from collections.abc import Iterator

import numpy as np

from ckpt_codecs import Codec, CodecError, FirstMoment, Integers, Planes, SecondMoment, Zstd
from ckpt_formats.core.tensor import Array
from codec_arrays import BF16, CHUNKED, F32, Case, cases

LARGE = [0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 1 << 24, 65536, 255, 1, 0]


def seeds() -> list[tuple[Codec, Case, bytes]]:
    """Chunks of every mode with streams of every kind."""
    random = np.random.default_rng(5)
    weights = random.normal(0, 0.02, (70, 80)).astype(F32)
    scales = np.exp(random.normal(0, 2, 80)) * np.exp(random.normal(0, 1, (70, 1)))
    second = (scales * random.chisquare(3, weights.shape) * 1e-8).astype(F32)
    first = (np.sqrt(second) * random.normal(0, 1, second.shape)).astype(F32)
    steady = (scales * np.exp(random.normal(0, 0.1, weights.shape)) * 1e-8).astype(F32)
    sparse = np.where(random.random(6000) < 0.05, weights.reshape(-1)[:1][0], 0).astype(F32)
    pairs: list[tuple[Codec, Case]] = [
        (Planes(), ("weights", weights, None)),
        (Planes(), ("bf16", weights.astype(BF16), None)),
        (Planes(), ("float64", weights.astype(np.float64), None)),
        (Planes(), ("positive", np.abs(weights), None)),
        (Planes(), ("sparse", sparse, None)),
        (Planes(), ("large", random.normal(0, 0.02, (300, 100)).astype(F32), None)),
        (FirstMoment(), ("first", first, second)),
        (FirstMoment(), ("first-bf16", first.astype(BF16), second)),
        (SecondMoment(), ("second", second, None)),
        (SecondMoment(), ("steady", steady, None)),
        (Integers(), ("tokens", random.integers(0, 40000, 3000), None)),
        (Integers(), ("steps", np.arange(3000), None)),
        (Integers(), ("rare", random.random(9000) < 0.01, None)),
        (Integers(), ("three", random.choice(3, 6000, p=[0.7, 0.2, 0.1]).astype(np.uint8), None)),
        (Integers(), ("few", random.choice(7, 6000, p=[0.5, 0.3, 0.1, 0.04, 0.03, 0.02, 0.01]).astype(np.uint8), None)),
        (Integers(), ("same", np.zeros(100, np.int64), None)),
        (Zstd(), ("tokens", np.tile(random.integers(0, 40000, 500), 3), None)),
        (Zstd(), ("weights", weights, None)),
    ]
    return [(codec, case, bytes(codec.encode(case[1], case[2]))) for codec, case in pairs]


def survives(codec: Codec, data: bytes, values: Array, base: Array | None) -> bool:
    """Decode it: True if an array came of it."""
    try:
        decoded = codec.decode(data, values.shape, values.dtype, base)
    except CodecError:
        return False
    assert decoded.shape == values.shape
    assert decoded.dtype == values.dtype
    return True


def mutations(data: bytes, random: np.random.Generator) -> Iterator[bytes]:
    """Without end: flipped bits, other bytes, other counts, cuts, repetitions; mostly where the structure is."""
    while True:
        mutated = bytearray(data)
        for _ in range(int(random.integers(1, 4))):
            near = int(random.integers(0, min(len(mutated), 60 if random.random() < 0.6 else len(mutated))))
            what = random.integers(0, 6)
            if what == 0:
                mutated[near] ^= 1 << int(random.integers(0, 8))
            elif what == 1:
                mutated[near] = int(random.integers(0, 256))
            elif what == 2:
                mutated[near : near + 4] = struct.pack("<I", LARGE[random.integers(0, len(LARGE))])
            elif what == 3:
                del mutated[near : near + int(random.integers(1, 9))]
            elif what == 4:
                mutated[near:near] = mutated[near : near + int(random.integers(1, 9))]
            else:
                mutated[near : near + 8] = random.bytes(8)
            if not mutated:
                mutated = bytearray(1)
        yield bytes(mutated)


def fuzz(seed: int, count: int) -> dict[str, int]:
    """So many mutations for every codec; how many of them gave an array."""
    random = np.random.default_rng(seed)
    given = seeds()
    arrays = dict.fromkeys((codec.name for codec in CHUNKED), 0)
    for codec in CHUNKED:
        mine = [(case, data) for owner, case, data in given if owner.name == codec.name]
        for case, data in mine:
            source = mutations(data, random)
            for _ in range(-(-count // len(mine))):
                arrays[codec.name] += survives(codec, next(source), case[1], case[2])
    return arrays


def some(seed: int, count: int) -> dict[str, int]:
    """Whole chunks of some cases, and so many mutations."""
    for _, values, base in list(cases())[::7]:
        for codec in CHUNKED:
            assert survives(codec, codec.encode(values, base), values, base)
    return fuzz(seed, count)
