"""Codecs work in memory that is given to them and used again: for fresh pages threads wait for one another."""

import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from ckpt_codecs import Codec, CodecError, Planes, Rounded
from ckpt_codecs.scratch import MAX_FREE, acquire_buffer, release_buffer, temporary_buffer
from ckpt_formats.core.files import Reader
from ckpt_formats.core.tensor import Array
from codec_arrays import BF16, F32
from held import bits

T = TypeVar("T")
counts_faults = pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted by thread on Linux alone")


def test_a_copy_is_rounded_into_memory_that_is_given() -> None:
    master = np.random.default_rng(0).normal(0, 1, (30, 40)).astype(F32)
    for out in (np.empty(master.shape, BF16), np.empty((*master.shape, 2), BF16)[..., 1], np.empty(master.shape, "f2")):
        Rounded().decode_into(b"", out, master)
        assert bits(out.copy()) == bits(master.astype(out.dtype))
    with pytest.raises(CodecError):
        Rounded().decode_into(b"", np.empty((40, 30), BF16), master)


class Alone(Planes):
    """A codec of somebody else, who knows nothing of memory that is given."""

    encode_into = Codec.encode_into
    decode_into = Codec.decode_into

    def encode(self, array: Array, base: Array | None = None) -> bytes:
        return array.tobytes()

    def decode(self, data: object, shape: object, dtype: object, base: object = None) -> Array:
        return np.frombuffer(bytes(data), F32)  # type: ignore[call-overload, no-any-return]


def test_codec_without_own_buffers_works_in_given_memory() -> None:
    values, out = np.arange(50, dtype=F32), np.zeros(50, F32)
    Alone().decode_into(Alone().encode_into(values, None, np.empty(1000, np.uint8)), out, None)
    assert bits(out) == bits(values)
    with pytest.raises(CodecError, match="shape"):
        Alone().decode_into(values.tobytes(), np.zeros((5, 10), F32), None)


def in_a_thread(work: Callable[[], T]) -> T:
    """With no memory of its own yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def test_buffers_that_are_lent_within_one_another_are_not_the_same() -> None:
    def lent() -> None:
        with temporary_buffer(100) as first, temporary_buffer(1000) as second:
            assert (first.size, second.size) == (100, 1000)
            assert not np.shares_memory(first, second)
        with temporary_buffer(100) as again:
            assert np.shares_memory(again, first) or np.shares_memory(again, second)

    in_a_thread(lent)


def test_the_least_buffer_that_is_large_enough_is_taken_again() -> None:
    def taken() -> bool:
        rooms = [acquire_buffer(size) for size in (300_000, 200_000, 100_000)]
        for one in rooms:
            release_buffer(one)
        return acquire_buffer(150_000) is rooms[1] and acquire_buffer(150_000) is rooms[0]

    assert in_a_thread(taken)


def test_buffers_that_other_threads_acquired_do_not_accumulate() -> None:
    def given() -> int:
        tracemalloc.start()
        for _ in range(500):
            release_buffer(np.empty(1 << 20, np.uint8))
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return held

    assert in_a_thread(given) < 64 << 20


def test_a_reader_that_is_closed_gives_its_memory_back() -> None:
    def given() -> bool:
        with Reader() as reader:
            filled = reader.cached_or_filled("what", 300_000, lambda room: room.fill(7))
            assert not np.shares_memory(acquire_buffer(300_000), filled)
        return np.shares_memory(acquire_buffer(300_000), filled)

    assert in_a_thread(given)


def test_cache_of_a_reader_does_not_use_far_larger_buffers_of_the_thread() -> None:
    """Two of 8 MiB would fill the cache with 200 kB, and each would remove the other."""

    def count_fills() -> int:
        fills: list[int] = []
        for _ in range(4):
            release_buffer(np.empty(8 << 20, np.uint8))
        with Reader() as reader:
            for _ in range(3):
                for key in ("a", "b"):
                    reader.cached_or_filled(key, 100_000, lambda buffer: fills.append(buffer.size))
        return len(fills)

    assert in_a_thread(count_fills) == 2


FAULTS = """
import json, resource, threading, numpy as np, ckpt_codecs as c
from ckpt_codecs.base import encode_bound
def faults(work):
    for _ in range(3):
        work()
    begun = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    for _ in range(10):
        work()
    return (resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - begun) / 10
"""
"""How many pages the kernel had to give to a piece of work that was done before."""

CHUNKS = """
random = np.random.default_rng(0)
second = (np.exp(random.normal(0, 2, 256)) * random.chisquare(3, (1024, 256)) * 1e-8).astype("f4")
first = (np.sqrt(second) * random.normal(0, 1, second.shape)).astype("f4")
steady = (1e-8 * np.exp(random.normal(0, 0.3, second.shape))).astype("f4")
found = []
for codec, values, base in (
    (c.Planes(), first, None), (c.FirstMoment(), first, second), (c.SecondMoment(), second, None),
    (c.SecondMoment(), steady, None),
):
    out, made = np.empty(encode_bound(values.nbytes), np.uint8), np.empty_like(values)
    data = bytes(codec.encode(values, base))
    found.append([
        faults(lambda: codec.encode(values, base)), faults(lambda: codec.encode_into(values, base, out)),
        faults(lambda: codec.decode(data, values.shape, values.dtype, base)),
        faults(lambda: codec.decode_into(data, made, base)),
    ])
print(json.dumps(found))
"""


def run(code: str) -> list[list[float]]:
    """In a process where memory for every large array is mapped, as it comes to be in long ones."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", FAULTS + code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_MMAP_THRESHOLD_": "65536"},
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    peaks: list[list[float]] = json.loads(done.stdout)
    return peaks


@counts_faults
@pytest.mark.slow
def test_codecs_take_no_fresh_pages() -> None:
    """Fewer than one for each 64 KiB of it, where arrays of one's own take one for each 4 KiB."""
    for encode, encode_into, decode, decode_into in run(CHUNKS):
        assert encode > 100
        assert encode_into < 16
        assert decode > 100
        assert decode_into < 16


STATES = """
from pathlib import Path
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.files import Reader
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal.pack import write_pack
from ckpt_formats.universal.manifest import PackFiles
from ckpt_formats.universal.read_states import read_parameter
folder = Path({folder!r})
random = np.random.default_rng(0)
shape, states, at = (5000, 384), {{}}, 0
with (folder / "raw").open("wb") as out:
    for name in ("master", "exp_avg", "exp_avg_sq"):
        values = (random.normal(0, 1, shape) ** 2 * 1e-4).astype("f4")
        out.write(values.data)
        states[name] = Tensor.of(FileBlob.packed(folder / "raw", at, shape, values.dtype))
        at += values.nbytes
parameter, chunks = Parameter("w", "parameter", states), 3 * 8
def write():
    with Reader() as reader, Transfer(reader) as transfer:
        written = write_pack(folder / "packs/00000.safetensors", 0, [parameter], transfer, EncodingOptions())
        return written.pack, written.entries[0]
def read():
    with Reader() as reader, Transfer(reader) as transfer:
        return [sum(1 for _ in transfer.chunks(tensor)) for tensor in stored.values()]
(folder / "packs").mkdir()
pack, entry = write()
assert all(state.chunks is not None for state in entry.states.values())
stored = read_parameter(PackFiles(folder, (pack,)), entry).states
written, read = faults(write), faults(read)
print(json.dumps([[written / chunks, read / chunks]]))
"""


@counts_faults
@pytest.mark.slow
def test_states_are_written_and_read_without_fresh_pages_for_each_chunk(tmp_path: Path) -> None:
    [[written, read]] = run(STATES.format(folder=str(tmp_path)))
    assert written < 16
    assert read < 16


def test_release_buffer_drops_the_oldest_of_too_many() -> None:
    sizes = [5000 + i for i in range(MAX_FREE + 1)]

    def smallest() -> int:
        for size in sizes:
            release_buffer(np.empty(size, np.uint8))
        return acquire_buffer(1).size

    with ThreadPoolExecutor(1) as pool:  # a new thread has no buffers
        assert pool.submit(smallest).result() == sizes[1]
