"""Bytes of strangers: an error or a wrong array that a checksum finds, never a crash, never memory for the asking."""

import struct
import tracemalloc

import numpy as np
import pytest

import oracle.chunks
from ckpt_codecs import Codec, CodecError, FirstMoment, Integers, Planes, SecondMoment
from ckpt_codecs.format_ids import DIGITS as DIGITS_KIND
from ckpt_codecs.format_ids import RUNS as RUNS_KIND
from ckpt_formats.core.tensor import Array
from codec_arrays import CHUNKED, F32
from codec_chunks import ARRAY, Chunk, chunk_of, chunks, of_array

CHUNKS = [chunk for chunk in chunks() if chunk.own in CHUNKED]


def survives(codec: Codec, data: bytes, values: Array, base: Array | None) -> bool:
    return of_array("crafted", codec, values, base).survives(data)


@pytest.mark.parametrize("chunk", CHUNKS, ids=lambda chunk: chunk.name)
def test_codec_survives_other_kinds_and_sizes_in_the_directory(chunk: Chunk) -> None:
    """Every stream as every kind; every size as others, which is refused unless the next one makes up for it."""
    data = chunk.data
    streams = chunk.after[ARRAY].itemsize + (3 if data[0] in (4, 5) else 0)
    for at in range(1, 1 + 5 * streams if data[0] > 2 else 0, 5):
        for kind in range(9):
            chunk.survives(data[:at] + bytes([kind]) + data[at + 1 :])
        size, next_size = struct.unpack("<IxI", data[at + 1 : at + 10])
        for change in (-size, -1, 1, 1 << 20, (1 << 31) - 1):
            damaged = data[: at + 1] + struct.pack("<I", (size + change) % (1 << 32)) + data[at + 5 :]
            assert not change or not chunk.survives(damaged)
            made_up = struct.pack("<I", (next_size - change) % (1 << 32))
            chunk.survives(damaged[: at + 6] + made_up + data[at + 10 :])


# --- crafted streams


def stream(kind: int, data: bytes) -> bytes:
    return bytes([kind]) + struct.pack("<I", len(data)) + data


def one_plane(kind: int, data: bytes) -> bytes:
    """A chunk of integers with a single plane."""
    return bytes([6]) + bytes([kind]) + struct.pack("<I", len(data)) + data


def code(first: int, lengths: list[int], sizes: list[int], streams: bytes = b"") -> bytes:
    nibbles = [*lengths, 0]
    packed = bytes(nibbles[i] | nibbles[i + 1] << 4 for i in range(0, len(lengths), 2))
    return bytes([first, first + len(lengths) - 1]) + packed + struct.pack("<8I", *sizes) + streams


ALONE = [0] * 8
DAMAGED = {
    "no code": b"",
    "half a head": b"\0",
    "one symbol": code(5, [1], ALONE),
    "last before first": b"\5\4" + bytes(40),
    "nothing used": code(0, [0, 0], ALONE),
    "too few codes": code(0, [1, 2], ALONE),
    "too many codes": code(0, [1, 1, 1], ALONE),
    "a length of 12": code(0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 12], ALONE),
    "a length of 15": code(0, [15, 1], ALONE),
    "nibbles past the end": b"\0\xff" + bytes(20),
    "empty streams": code(0, [1, 1], ALONE),
    "streams past the end": code(0, [1, 1], [1 << 31] * 8),
    "sizes that wrap around": code(0, [1, 1], [0xFFFFFFFF, 1 + 104, 0, 0, 0, 0, 0, 0], bytes(104)),
    "one stream has all": code(0, [1, 1], [104, 0, 0, 0, 0, 0, 0, 0], bytes(104)),
    "the last has all": code(0, [1, 1], [0, 0, 0, 0, 0, 0, 0, 104], bytes(104)),
    "a byte too few": code(0, [1, 1], [13] * 7 + [12], bytes(103)),
    "a byte too many": code(0, [1, 1], [14] + [13] * 7, bytes(105)),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_crafted_code_is_refused(what: str) -> None:
    values = np.zeros(8 * 104, np.uint8)
    whole = one_plane(3, code(0, [1, 1], [13] * 8, bytes(range(104))))
    assert Integers().decode(whole, values.shape, values.dtype).max() == 1
    assert not survives(Integers(), one_plane(3, DAMAGED[what]), values, None)


RUNS = {
    "no head": b"\0" * 8,
    "more gaps than values": b"\0" + struct.pack("<II", 0xFFFFFFFF, 0) + stream(1, b"\0") + stream(0, b""),
    "more others than values": b"\0" + struct.pack("<II", 0, 0xFFFFFFFF) + stream(0, b"") + stream(1, b"\0"),
    "a gap past the end": b"\0" + struct.pack("<II", 1, 1) + stream(0, b"\x65") + stream(0, b"\1"),
    "gaps without others": b"\0" + struct.pack("<II", 2, 1) + stream(0, b"\1\1") + stream(0, b"\1"),
    "others without gaps": b"\0" + struct.pack("<II", 1, 2) + stream(0, b"\1") + stream(0, b"\1\1"),
    "a long gap at the end": b"\0" + struct.pack("<II", 2, 1) + stream(0, b"\1\xff") + stream(0, b"\1"),
    "runs within runs": b"\0" + struct.pack("<II", 1, 1) + stream(RUNS_KIND, b"\1") + stream(0, b"\1"),
    "bytes left over": b"\0" + struct.pack("<II", 1, 1) + stream(0, b"\1") + stream(0, b"\1") + b"\0",
    "an inner stream past the end": b"\0" + struct.pack("<II", 1, 1) + b"\0\xff\xff\xff\xff\1",
}
DIGITS = {
    "nothing": b"",
    "base 0": b"\0" + stream(0, bytes(13)),
    "base 1": b"\1\0" + stream(0, bytes(13)),
    "base 17": bytes([17, *range(17)]) + stream(0, bytes(50)),
    "fewer symbols than the base": b"\3\1\2",
    "too few digits": b"\2\0\1" + stream(0, bytes(12)),
    "digits within digits": b"\2\0\1" + stream(DIGITS_KIND, bytes(13)),
    "bytes left over": b"\2\0\1" + stream(0, bytes(13)) + b"\0",
}


@pytest.mark.parametrize(
    ("kind", "what"), [*((RUNS_KIND, what) for what in RUNS), *((DIGITS_KIND, what) for what in DIGITS)]
)
def test_crafted_runs_and_digits_are_refused(kind: int, what: str) -> None:
    values = np.zeros(100, np.uint8)
    whole = b"\0" + struct.pack("<II", 1, 1) + stream(0, b"\x63") * 2
    assert survives(Integers(), one_plane(RUNS_KIND, whole), values, None)
    assert survives(Integers(), one_plane(DIGITS_KIND, b"\2\0\1" + stream(0, bytes(13))), values, None)
    assert not survives(Integers(), one_plane(kind, (RUNS if kind == RUNS_KIND else DIGITS)[what]), values, None)


def test_a_byte_of_digits_beyond_its_base_is_survived() -> None:
    """It counts modulo the number of pairs."""
    values = np.zeros(100, np.uint8)
    data = one_plane(DIGITS_KIND, bytes([7, *range(7)]) + stream(0, bytes(range(206, 256))))
    pairs = np.arange(206, 256) % 49
    assert (
        Integers().decode(data, values.shape, values.dtype).tobytes()
        == np.stack([pairs % 7, pairs // 7], 1).astype(np.uint8).tobytes()
    )


def test_a_frame_that_promises_terabytes_gets_no_memory() -> None:
    import zstandard

    values = np.zeros(100, np.uint8)
    huge = b"\x28\xb5\x2f\xfd\xe0" + (1 << 40).to_bytes(8, "little") + b"\1\0\0"
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    tracemalloc.start()
    for frame in (huge, unknown, b"", b"\x28\xb5\x2f\xfd", zstandard.ZstdCompressor().compress(bytes(101))):
        assert not survives(Integers(), b"\2" + frame, values, None)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_scales_and_bases_may_hold_anything() -> None:
    """Foretelling wraps nowhere, whatever the scales: every residual has an exponent."""
    random = np.random.default_rng(0)
    shape, size = (100, 64), 6400
    planes = [random.bytes(size) for _ in range(3)]
    for mode, codec in ((4, FirstMoment()), (5, SecondMoment())):
        streams = [*planes, b"\xff\x7f", random.bytes(100), random.bytes(100), random.bytes(size)]
        head = b"".join(b"\0" + struct.pack("<I", len(data)) for data in streams)
        data = bytes([mode]) + head + b"".join(streams)
        base: Array = np.frombuffer(random.bytes(4 * size), np.uint32).view(F32).reshape(shape)
        decoded, expected = codec.decode(data, shape, F32, base), np.empty(size, np.uint32)
        given = base.reshape(-1).view(np.uint32) if mode == 4 else None
        assert oracle.chunks.read_residuals(np.frombuffer(data, np.uint8), given, 64, expected)
        assert decoded.tobytes() == expected.tobytes()


def test_a_first_moment_needs_its_base() -> None:
    chunk = chunk_of(FirstMoment())
    for before in ({}, {ARRAY: np.zeros((3, 3), F32)}, {ARRAY: chunk.after[ARRAY].astype(np.float16)}):
        with pytest.raises(CodecError, match="needs its base"):
            chunk.decoded(chunk.data, before)


def test_a_mode_that_is_none_of_moments_is_not_taken_for_one() -> None:
    chunk = chunk_of(FirstMoment())
    for mode in range(6, 256):
        with pytest.raises(CodecError, match=f"of mode {mode}"):
            chunk.decoded(bytes([mode]) + chunk.data[1:])


def test_planes_refuses_kinds_of_streams_that_nobody_writes() -> None:
    values = np.zeros((70, 80), F32)
    data = bytes(Planes().encode(np.random.default_rng(0).normal(0, 1, values.shape).astype(F32), None))
    for kind in range(DIGITS_KIND + 1, 256):
        assert not survives(Planes(), data[:16] + bytes([kind]) + data[17:], values, None)
