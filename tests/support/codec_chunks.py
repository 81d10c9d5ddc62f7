"""Chunks of every codec of the three registries, whatever its interface is, and damage that is done to them.

A codec that is added needs its chunks in `chunks()`: `test_codec_contract` tries every law on them.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from ckpt_codecs import Codec, CodecError, DeltaCodec, FirstMoment, Integers, Planes, SecondMoment, Zstd
from ckpt_codecs.base import Array, Shape
from ckpt_codecs.delta import StatePair, States, StateTypes, StepInfo
from ckpt_codecs.gradients import GRADIENT_CODECS, gradient_codec
from ckpt_codecs.registry import (
    delta_from_config,
)
from codec_arrays import BF16, CHUNKED, F32
from delta_cases import DELTAS, fitted
from delta_cases import cases as delta_cases
from gradient_arrays import HOSTILE
from lossy_states import LOSSY, table, training

AnyCodec = Codec | DeltaCodec
ARRAY = "array"
"""The name of the one state of a chunk of `Codec`; its state before is the base."""
LARGE = [0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 1 << 24, 65536, 255, 1, 0]


@dataclass(frozen=True)
class Chunk:
    """Values and the codec that encodes them, whatever its interface is."""

    name: str
    own: AnyCodec
    before: States
    after: States
    step: StepInfo | None = None
    """Where it is given, the codec is fitted to the chunk, when it is first asked for: that takes longest."""

    @cached_property
    def codec(self) -> AnyCodec:
        if self.step is None or not isinstance(self.own, DeltaCodec):
            return self.own
        return fitted(self.own, StatePair(self.before, self.after), self.step)

    @cached_property
    def data(self) -> bytes:
        return self.encoded(self.before, self.after)

    @property
    def shape(self) -> Shape:
        return next(iter(self.after.values())).shape

    @property
    def dtypes(self) -> StateTypes:
        return {name: values.dtype for name, values in self.after.items()}

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.after.values())

    def encoded(self, before: States, after: States) -> bytes:
        if isinstance(self.codec, Codec):
            return bytes(self.codec.encode(after[ARRAY], before.get(ARRAY)))
        return bytes(self.codec.encode(StatePair(before, after)))

    def decoded(
        self,
        data: bytes,
        before: States | None = None,
        shape: Shape | None = None,
        dtypes: StateTypes | None = None,
    ) -> dict[str, Array]:
        """Decode as the chunk is, or with another state before, shape and dtypes."""
        before = self.before if before is None else before
        shape = self.shape if shape is None else shape
        dtypes = self.dtypes if dtypes is None else dtypes
        if isinstance(self.codec, Codec):
            return {ARRAY: self.codec.decode(data, shape, dtypes[ARRAY], before.get(ARRAY))}
        return self.codec.decode(data, before, shape, dtypes)

    def survives(
        self,
        data: bytes,
        before: States | None = None,
        shape: Shape | None = None,
        dtypes: StateTypes | None = None,
    ) -> bool:
        """Whether arrays came of the data; they have the right form. Any error but `CodecError` is raised."""
        try:
            states = self.decoded(data, before, shape, dtypes)
        except CodecError:
            return False
        expected = self.dtypes if dtypes is None else dtypes
        assert {name: values.dtype for name, values in states.items()} == dict(expected)
        assert all(values.shape == (self.shape if shape is None else shape) for values in states.values())
        return True


def of_array(name: str, codec: Codec, values: Array, base: Array | None) -> Chunk:
    return Chunk(f"{codec.name}:{name}", codec, {} if base is None else {ARRAY: base}, {ARRAY: values})


# --- chunks


def _array_chunks() -> Iterator[Chunk]:
    """Chunks of every mode with streams of every kind."""
    random = np.random.default_rng(5)
    weights = random.normal(0, 0.02, (70, 80)).astype(F32)
    scales = np.exp(random.normal(0, 2, 80)) * np.exp(random.normal(0, 1, (70, 1)))
    second = (scales * random.chisquare(3, weights.shape) * 1e-8).astype(F32)
    first = (np.sqrt(second) * random.normal(0, 1, second.shape)).astype(F32)
    steady = (scales * np.exp(random.normal(0, 0.1, weights.shape)) * 1e-8).astype(F32)
    sparse = np.where(random.random(6000) < 0.05, weights.reshape(-1)[:1][0], 0).astype(F32)
    few = random.choice(7, 6000, p=[0.5, 0.3, 0.1, 0.04, 0.03, 0.02, 0.01]).astype(np.uint8)
    yield of_array("weights", Planes(), weights, None)
    yield of_array("bf16", Planes(), weights.astype(BF16), None)
    yield of_array("float64", Planes(), weights.astype(np.float64), None)
    yield of_array("positive", Planes(), np.abs(weights), None)
    yield of_array("sparse", Planes(), sparse, None)
    yield of_array("large", Planes(), random.normal(0, 0.02, (300, 100)).astype(F32), None)
    yield of_array("first", FirstMoment(), first, second)
    yield of_array("first-bf16", FirstMoment(), first.astype(BF16), second)
    yield of_array("second", SecondMoment(), second, None)
    yield of_array("steady", SecondMoment(), steady, None)
    yield of_array("tokens", Integers(), random.integers(0, 40000, 3000), None)
    yield of_array("steps", Integers(), np.arange(3000), None)
    yield of_array("rare", Integers(), random.random(9000) < 0.01, None)
    yield of_array("three", Integers(), random.choice(3, 6000, p=[0.7, 0.2, 0.1]).astype(np.uint8), None)
    yield of_array("few", Integers(), few, None)
    yield of_array("same", Integers(), np.zeros(100, np.int64), None)
    yield of_array("tokens", Zstd(), np.tile(random.integers(0, 40000, 500), 3), None)
    yield of_array("weights", Zstd(), weights, None)


_DELTA_CASES = (
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


def _delta_chunks() -> Iterator[Chunk]:
    """Chunks with parts of every kind."""
    for name, change, step in delta_cases(5):
        if name in _DELTA_CASES:
            for codec in DELTAS:
                yield Chunk(f"{codec.name}:{name}", codec, change.before, change.after, step)
            if name in ("copy-bfloat16", "few-changes"):
                fast = delta_from_config({"name": "difference", "speed": "fast"})
                yield Chunk(f"difference:{name}-fast", fast, change.before, change.after)


def _lossy_chunks() -> Iterator[Chunk]:
    """Chunks with sections of every kind."""
    before, after = training((96, 64), 2)
    after["exp_avg_sq"][:, 3] = 0
    small = training((50,), 2)
    changes: dict[str, tuple[States, States]] = {
        "adam": (before, after),
        "anchor": ({}, after),
        "small": (small[0], small[1]),
        "same-weights": (before, {**after, "fp32": before["fp32"]}),
        "table": (before, table(before, after, 5)),
    }
    for number, codec in enumerate(LOSSY):
        for name, (old, new) in changes.items():
            yield Chunk(f"{codec.name}{number}:{name}", codec, old, new)


def _gradient_chunks() -> Iterator[Chunk]:
    for short in GRADIENT_CODECS:
        for name, values in HOSTILE:
            yield of_array(name, gradient_codec(short), values, None)


@cache
def chunks() -> tuple[Chunk, ...]:
    """Chunks of every codec, of every form that it writes."""
    return (*_array_chunks(), *_delta_chunks(), *_lossy_chunks(), *_gradient_chunks())


def chunk_of(codec: AnyCodec) -> Chunk:
    """The first chunk of a codec."""
    return next(chunk for chunk in chunks() if chunk.codec == codec)


RULES = [
    delta_from_config({"name": "replay", "optimizer": optimizer, "grad_scale": 1e300})
    for optimizer in ("adam-apex", "sgd-nesterov", "several-steps")
]
ALL_CODECS: list[AnyCodec] = [*CHUNKED, *map(gradient_codec, GRADIENT_CODECS), *DELTAS, *RULES, *LOSSY]


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
