"""Blocks of one file that two workers compute: the same bytes, and nobody works without a place."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_codecs import Planes
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Parameter
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import WritableFormat
from ckpt_formats.core.spare_workers import SpareWorkers
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.engines.dcp import DCP
from ckpt_formats.engines.dcp.write import _join_small
from ckpt_formats.engines.flax import Flax
from ckpt_formats.engines.orbax import Orbax
from ckpt_formats.engines.safetensors import Safetensors
from ckpt_formats.engines.torch_save import Torch
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from ckpt_formats.universal.encode_state import CodecChoice, _ChunkSource, _encoded_chunks, _EncodedChunk
from held import checkpoint, contents, parameter

FORMATS: dict[str, WritableFormat] = {
    "torch.pt": Torch(),
    "safetensors": Safetensors(),
    "plain": Universal(),
    "coded": Universal(codec="auto"),
    "packs": Universal(codec="auto", pack_nbytes=4 << 20),
    "coded.ucp": Universal(codec="auto", single_file=True),
    "dcp": DCP(),
    "orbax": Orbax(),
    "flax.msgpack": Flax(),
}


def one_large() -> Checkpoint:
    """A parameter of five chunks and blocks, none of which equals another; small ones around it, and after it others
    that end with a small block."""
    random = np.random.default_rng(0)
    large = random.standard_normal((1100, 1000)).astype(np.float32)
    small = [parameter(f"small{i}", {"model": np.arange(i, 90, dtype=np.int64)}) for i in range(3)]
    tails = [
        parameter(f"tail{i}", {"model": random.standard_normal((1 << 18) + 5).astype(np.float32)}) for i in range(4)
    ]
    return checkpoint([*small[:2], parameter("large", {"model": large, "exp_avg": large[::-1] / 7}), small[2], *tails])


def numbers(seen: list[str], count: int = 6, bad: int | None = None) -> Iterator[int]:
    for number in range(count):
        seen.append(threading.current_thread().name)
        if number == bad:
            raise ValueError("bad")
        yield number


@pytest.mark.parametrize("name", FORMATS)
def test_spare_workers_leave_the_bytes_of_one_file_as_they_are(name: str, tmp_path: Path) -> None:
    source, written = one_large(), []
    for workers in (1, 3):
        target, threads = tmp_path / f"{workers}" / name, set[str]()
        target.parent.mkdir()
        save(
            source,
            target,
            FORMATS[name],
            resources=Execution(workers),
            progress=lambda done, total: threads.add(threading.current_thread().name),  # noqa: B023
        )
        assert any(one.startswith("ckpt-spare") for one in threads) == (workers > 1)
        files = [target] if target.is_file() else [path for path in target.rglob("*") if path.is_file()]
        written.append({path.relative_to(target.parent).as_posix(): path.read_bytes() for path in files})
    assert written[0] == written[1]
    values, expected = contents(open_checkpoint(tmp_path / "3" / name)), contents(source)
    shared = values.keys() & expected.keys()  # Orbax has a step besides
    assert {key: values[key] for key in shared} == {key: expected[key] for key in shared}
    assert {("large", "model"), ("tail3", "model")} <= shared


def test_next_item_is_computed_at_a_free_place_and_in_place_where_there_is_none() -> None:
    own = threading.current_thread().name
    with ThreadPoolExecutor(1, "other") as pool:
        working, seen = threading.Semaphore(1), list[str]()
        with SpareWorkers(working, pool).ahead(numbers(seen), lambda number: number != 3) as items:
            assert list(items) == list(range(6))
        assert seen == [own, "other_0", "other_0", "other_0", own, "other_0"]
        assert working.acquire(blocking=False), "the place is free again"
        seen.clear()
        with SpareWorkers(working, pool).ahead(numbers(seen), lambda number: True) as items:
            assert list(items) == list(range(6))
        assert seen == [own] * 6


def test_error_of_an_item_comes_in_its_turn_and_leaves_the_place_free() -> None:
    with ThreadPoolExecutor(1) as pool:
        working, taken = threading.Semaphore(1), list[int]()
        with (
            pytest.raises(ValueError, match="bad"),
            SpareWorkers(working, pool).ahead(numbers([], bad=3), lambda number: True) as items,
        ):
            taken.extend(items)
        assert working.acquire(blocking=False)
    assert taken == [0, 1, 2]


def test_block_waits_for_the_item_that_is_being_computed() -> None:
    started, ended, finished = threading.Event(), threading.Event(), list[bool]()

    def slow() -> Iterator[int]:
        yield 0
        started.set()
        ended.wait(0.1)
        finished.append(True)
        yield 1

    with ThreadPoolExecutor(1) as pool:
        with SpareWorkers(threading.Semaphore(1), pool).ahead(slow(), lambda number: True) as items:
            next(items)
            assert started.wait(120)
        assert finished == [True], "the block waits for the item that is being computed: it may use a reader"


def joined_in_threes(parts: Iterator[memoryview]) -> Iterator[bytes | memoryview]:
    """Every fourth block as it is, and the three after it as one part."""
    for part in parts:
        yield part
        yield b"".join(bytes(one) for one in islice(parts, 3))


@pytest.mark.parametrize("join", [_join_small, joined_in_threes])
def test_part_in_use_stays_as_it_is_whatever_is_read_for_the_next_one(
    join: Callable[[Iterator[memoryview]], Iterator[bytes | memoryview]],
) -> None:
    tensors = [one.weight for one in one_large().parameters.values()]
    with ThreadPoolExecutor(1) as pool, Reader(check=False) as reader:
        transfer = Transfer(reader, spare=SpareWorkers(threading.Semaphore(1), pool))
        stream = join(part for tensor in tensors for part in transfer.chunks(tensor))
        written = b""
        with transfer, transfer.ahead(stream, lambda part: len(part) > 0) as parts:
            for part in parts:
                pool.submit(int).result()  # the next part is computed now
                written += part
    assert written == b"".join(np.asarray(tensor).tobytes() for tensor in tensors)


def test_encoded_chunk_in_use_stays_as_it_is_while_its_worker_encodes_for_another_file() -> None:
    large = one_large().parameters["large"]
    other = parameter("other", {"model": -np.asarray(large.weight)})
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        spare = SpareWorkers(threading.Semaphore(1), pool)

        def chunks(of: Parameter) -> Iterator[_EncodedChunk]:
            transfer = stack.enter_context(Transfer(stack.enter_context(Reader(check=False)), spare=spare))
            choice = CodecChoice(Planes(), None)
            encoded = _encoded_chunks(_ChunkSource.of(of, MODEL, choice), choice, of, transfer, None)
            return stack.enter_context(transfer.ahead(encoded, lambda chunk: True))

        own, others = chunks(large), chunks(other)
        next(own)
        pool.submit(int).result()
        used = next(own)  # the spare worker has encoded it
        data = bytes(used.data)
        for _ in range(3):
            pool.submit(int).result()
            next(others)
        assert bytes(used.data) == data
