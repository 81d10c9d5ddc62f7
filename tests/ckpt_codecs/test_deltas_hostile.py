"""Deltas of strangers: an error or a wrong array that a checksum finds, never a crash, never memory for the asking."""

import struct
import tracemalloc

import numpy as np
import pytest

from ckpt_codecs import CodecError, DeltaCodec
from ckpt_codecs.delta import StatePair
from ckpt_codecs.deltas import format_ids as kinds
from ckpt_codecs.native.deltas import write_rows
from ckpt_codecs.registry import delta_from_config
from codec_chunks import Chunk, chunks
from delta_cases import BF16, DELTAS, F32, decoded
from oracle.masked_steps import Coder, gap_weights, size_weights

DELTA_NAMES = {codec.name for codec in DELTAS}


def survives(codec: DeltaCodec, data: bytes, change: StatePair) -> bool:
    return Chunk("crafted", codec, change.before, change.after).survives(data)


def test_the_chunks_have_parts_of_every_kind() -> None:
    headers, forms = set(), set()
    for one in chunks():
        if one.own.name not in DELTA_NAMES:
            continue
        data = one.data
        at = 1 + 4 * len(one.after)
        for i in range(len(one.after)):
            headers.add(data[at])
            if data[at] not in (kinds.UNPREDICTED, kinds.GRADIENT, kinds.DRIFTED):
                forms.add(data[at + 1])
            at += struct.unpack_from("<I", data, 1 + 4 * i)[0]
    assert headers == set(range(8))
    assert forms >= {1, kinds.FLOAT32_GRID, kinds.SPARSE_STEPS, kinds.ANS_STEPS, kinds.MASKED_STEPS}


# --- crafted parts

SHAPE = (10, 64)
STATES = {name: np.full(SHAPE, 0.5, F32) for name in ("fp32", "exp_avg", "exp_avg_sq")}
BEFORE_PART = bytes([kinds.UNCHANGED, 0])


def chunk(**parts: bytes) -> bytes:
    whole = [
        {"exp_avg": BEFORE_PART, "exp_avg_sq": BEFORE_PART, "fp32": BEFORE_PART, **parts}[n] for n in sorted(STATES)
    ]
    return b"".join([b"\1", *(struct.pack("<I", len(part)) for part in whole), *whole])


def streams(mode: int, *planes: bytes) -> bytes:
    return bytes([mode]) + b"".join(b"\0" + struct.pack("<I", len(p)) for p in planes) + b"".join(planes)


def grid(source: int, shift: int, contexts: int, least: int, deep: int, used: int, *planes: bytes) -> bytes:
    return (
        bytes([kinds.UNCHANGED])
        + struct.pack("<BBhBbII", 16, source, shift, contexts, least, deep, used)
        + streams(16, *planes)
    )


N = 640
CRAFTED = {
    "a part of one byte": {"fp32": b"\1"},
    "a prediction that nobody knows": {"fp32": b"\x09\0"},
    "residuals that nobody knows": {"fp32": b"\1\x0f"},
    "more planes than bytes": {"fp32": b"\1\x05" + bytes(60)},
    "a codec that nobody knows": {"fp32": b"\0\x05" + bytes(60)},
    "depends on itself": {
        "exp_avg_sq": b"\2\0",
        "exp_avg": grid(2, 0, 0, 0, N, 8, bytes([127]) * N, b"\xff" * N, bytes(8)),
    },
    "a gradient without a size": {"exp_avg": b"\3\0"},
    "a gradient past the end": {"exp_avg": b"\3\xff\xff\xff\xff"},
    "a gradient of weights": {"fp32": b"\3\1\0\0\0\0\0"},
    "a drift past the end": {"exp_avg_sq": b"\6\xff\xff\xff\xff\0"},
    "a copy of itself": {"fp32": b"\7\0"},
    "no residuals after drifts": {"exp_avg_sq": b"\6" + struct.pack("<I", 85) + streams(2, bytes(10), bytes(64))},
    "a grid from nowhere": {"fp32": grid(3, 0, 0, 0, N, 8, bytes([127]) * N, b"\xff" * N, bytes(8))},
    "more depths than values": {"fp32": grid(0, 127, 0, 0, N + 1, 8, bytes([127]) * N, b"\xff" * (N + 1), bytes(8))},
    "fewer depths than it takes": {"fp32": grid(0, 127, 0, 0, N - 1, 8, bytes([127]) * N, b"\xff" * (N - 1), bytes(8))},
    "no room for the last word": {"fp32": grid(0, 127, 0, 0, N, 7, bytes([127]) * N, b"\xff" * N, bytes(7))},
    "fewer bits than it takes": {"fp32": grid(0, 127, 0, 0, N, 9, bytes([127]) * N, bytes(N), bytes(9))},
    "more bits than it takes": {"fp32": grid(0, 127, 0, 0, N, 9, bytes([127]) * N, b"\xff" * N, bytes(9))},
    "words past the end": {"fp32": grid(0, 127, 0, 0, 0, 8, bytes(N), b"", bytes(8))},
    "sparse steps of float32": {"fp32": bytes([1, kinds.SPARSE_STEPS, 0, 1]) + bytes(40)},
}


def test_a_crafted_chunk_of_depths_alone_is_whole() -> None:
    after = decoded(
        DELTAS[0],
        chunk(fp32=grid(0, 127, 0, 0, N, 8, bytes([127]) * N, b"\xff" * N, bytes(8))),
        StatePair(STATES, STATES),
    )
    assert not after["fp32"].any()


@pytest.mark.parametrize("what", CRAFTED)
def test_a_crafted_part_is_refused(what: str) -> None:
    change = StatePair(STATES, STATES)
    rule = delta_from_config({"name": "replay", "optimizer": "adam-torch", "grad_scale": 1.0})
    for codec in (DELTAS[0], rule):
        assert survives(codec, chunk(), change)
        assert not survives(codec, chunk(**CRAFTED[what]), change)


FLOAT16 = {"param": np.full(SHAPE, 0.5, BF16)}


def one_part(residuals: bytes) -> bytes:
    return b"\1" + struct.pack("<I", 1 + len(residuals)) + bytes([kinds.UNCHANGED]) + residuals


def tables(
    rows: bytes, words: int = 0, states: bytes = b"\0\0\1\0" * 16, bits: bytes = bytes(8), more: bytes = b""
) -> bytes:
    room = np.empty(9999, np.uint8)
    coded = room[: write_rows(np.frombuffer(rows, np.uint8), 109, room)].tobytes() + more
    return struct.pack("<BBBII", kinds.ANS_STEPS, 0, len(rows) // 109, len(coded), words) + coded + states + bits


ROW = bytes([0, *bytes(108)])
"""A table of one symbol: no value changes."""


def bits(*numbers: tuple[int, int]) -> bytes:
    """Numbers of so many bits each, from the lowest up, in at least eight bytes."""
    whole, at = 0, 0
    for number, count in numbers:
        whole, at = whole | number << at, at + count
    return whole.to_bytes(max((at + 7) // 8, 8), "little")


STATES_OF_ONE = Coder()
STATES_OF_ONE.put(0, 0, size_weights(15))
STATES_OF_ONE.put(0, 0, gap_weights(0))
ONE_COUNT = ((0b0111, 4), (29, 5))
ONE_STEP = (*ONE_COUNT, (0b101, 3), (0, 1), (0b01, 2), (0, 14), (0, 1))
"""The first value of the first class, which has one change, is one unit greater."""


def masked(content: bytes, least: int = 126, odd: int = 0x10000) -> bytes:
    return bytes([kinds.MASKED_STEPS, least]) + content + struct.pack("<II", STATES_OF_ONE.states[0], odd)


DAMAGED_FLOAT16 = {
    "changes without a head": one_part(bytes([kinds.SPARSE_STEPS, 0])),
    "changes without buckets": one_part(bytes([kinds.SPARSE_STEPS, 0, 0])),
    "changes in too many buckets": one_part(bytes([kinds.SPARSE_STEPS, 0, 17])),
    "changes that nobody reads": one_part(bytes([kinds.SPARSE_STEPS, 0, 1]) + b"\xff" * 4 * N),
    "masked steps without states": one_part(masked(b"")[:9]),
    "masked steps of nothing": one_part(masked(bits((0b0111, 4), (31, 5), (0, 15)))),
    "more masked steps than values": one_part(masked(bits((4095, 12), (2 * (N + 1 - 64), 30)))),
    "fewer than no masked steps": one_part(masked(bits((4095, 12), (129, 30)))),
    "a scale of gaps below 0": one_part(masked(bits(*ONE_COUNT, (0b1011, 4)))),
    "a scale of gaps that there is not": one_part(masked(bits(*ONE_COUNT, (4095, 12), (2 * 118, 30)))),
    "masked steps that change nothing of their class": one_part(masked(bits(*ONE_STEP), least=0)),
    "bits after masked steps": one_part(masked(bits(*ONE_STEP, (1, 1)))),
    "bytes after masked steps": one_part(masked(bits(*ONE_STEP) + b"\0")),
    "masked steps whose states lead elsewhere": one_part(masked(bits(*ONE_STEP), odd=0x10001)),
    "tables without a head": one_part(tables(ROW)[:10]),
    "tables without buckets": one_part(tables(b"")),
    "too many tables": one_part(tables(ROW * 17)),
    "a table that goes on": one_part(tables(ROW, more=b"\1" * 64)),
    "more words than bytes": one_part(tables(ROW, words=1 << 31)),
    "no padding": one_part(tables(ROW)[:-1]),
    "weights that are too large": one_part(tables(bytes([0, 0, 79, 79, *bytes(106)]))),
    "weights that there are not": one_part(tables(bytes([0, 0, 80, *bytes(107)]))),
    "a symbol that there is not": one_part(tables(bytes([108, *bytes(108)]))),
    "a weight for what takes the rest": one_part(tables(bytes([0, 1, *bytes(107)]))),
    "states that lead elsewhere": one_part(tables(ROW, states=b"\0\0\2\0" * 16)),
    "bits that are not there": one_part(tables(bytes([107, *bytes(108)]))),
    "bits that nobody reads": one_part(tables(ROW, bits=bytes(9))),
}


def test_a_crafted_table_is_one_but_for_the_damage() -> None:
    assert survives(DELTAS[0], one_part(tables(ROW)), StatePair(FLOAT16, FLOAT16))


def test_crafted_masked_steps_are_some_but_for_the_damage() -> None:
    after = decoded(DELTAS[0], one_part(masked(bits(*ONE_STEP))), StatePair(FLOAT16, FLOAT16))["param"].view(np.uint16)
    assert after.reshape(-1).tolist() == [0x3F01] + [0x3F00] * (N - 1)


@pytest.mark.parametrize("what", DAMAGED_FLOAT16)
def test_crafted_residuals_of_float16_are_refused(what: str) -> None:
    assert not survives(DELTAS[0], DAMAGED_FLOAT16[what], StatePair(FLOAT16, FLOAT16))


@pytest.mark.parametrize("codec", DELTAS, ids=lambda codec: codec.name)
def test_a_chunk_gets_no_memory_for_the_asking(codec: DeltaCodec) -> None:
    huge = struct.pack("<I", 0xFFFFFFF0)
    tracemalloc.start()
    for at in range(1, 40):
        data = bytearray(chunk(fp32=grid(0, 127, 0, 0, N, 8, bytes([127]) * N, b"\xff" * N, bytes(8))))
        data[at : at + 4] = huge
        survives(codec, bytes(data), StatePair(STATES, STATES))
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_error_states_what_is_wrong_with_a_chunk() -> None:
    with pytest.raises(CodecError, match="relative to another state fp32"):
        decoded(DELTAS[0], chunk(), StatePair({}, STATES))
    rule = delta_from_config({"name": "replay", "optimizer": "adam-torch"})
    with pytest.raises(CodecError, match="depends on exp_avg itself"):
        decoded(rule, chunk(**CRAFTED["depends on itself"]), StatePair(STATES, STATES))
