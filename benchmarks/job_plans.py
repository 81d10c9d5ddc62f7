"""What planning costs a rank of many, simulated in one process: the part `plans` of `jobs.py`.

Each rank has a row of every tensor, as with FSDP2: nothing is shared. A rank sends the rows of its parts on, in as many
rounds as the number of ranks has bits; most is received by a rank that gets all parts of a tensor. Its rounds are
computed from what all ranks send to it. Seconds are those of CPUs.
"""

from __future__ import annotations

import json
import time
import zlib
from typing import Any

from ckpt_formats.core.geometry import Box
from ckpt_training.local_shards import LocalPart
from ckpt_training.routing import Ranges, route
from ckpt_training.save_plan import Kind, row_of, shared_parts
from ckpt_training.shares import own_shares

COLUMNS = 32
KINDS: tuple[Kind, ...] = ("model", "optimizer")


def run(world: int, tensors: int) -> dict[str, Any]:
    """The seconds and bytes with which a rank learns what it saves, when a `Saver` is constructed."""
    names = [f"model.layers.{number}.self_attention.weight" for number in range(tensors)]
    sizes = list[int]()
    began = time.process_time()
    own = [(row, ((number * world // tensors,) * 2,)) for number, row in enumerate(_rows(names, 1, world))]
    texts = [(row, ((low, low + 1),)) for row, ((low, _),) in own]

    def swap(distance: int, data: bytes) -> bytes:
        sizes.append(len(data))
        return data  # as much as another rank sends

    route(texts, 0, world, swap)
    seconds_of_own = time.process_time() - began
    received, seconds_of_owner, largest = _owned(names[0], world)
    began = time.process_time()
    assert shared_parts(received) == []
    pieces = [((name, Box((0, 0), (1, COLUMNS)), 0, COLUMNS), ((0, 1),)) for name in names]
    list(own_shares(pieces, 0, lambda piece: COLUMNS))
    return {
        "ranks": world,
        "tensors": tensors,
        "rounds": len(sizes),
        "bytes_of_own_parts": len(json.dumps([row for row, _ in own])),
        "bytes_received_by_most_ranks": sum(sizes),
        "bytes_received_by_an_owner": sum(sizes) + largest,
        "seconds_to_send_on": seconds_of_own,
        "seconds_of_an_owner_to_send_on": seconds_of_owner,
        "seconds_of_an_owner_to_check": time.process_time() - began,
    }


def _rows(names: list[str], rank: int, world: int) -> list[str]:
    box = Box((rank, 0), (rank + 1, COLUMNS))
    parts = [LocalPart(name, (world, COLUMNS), "float32", box, 0, COLUMNS, 0) for name in names]
    return [row_of(KINDS, part) for part in parts]


def _owned(name: str, world: int) -> tuple[dict[str, Ranges], float, int]:
    """The parts of a tensor that its rank gets; the seconds that its rounds take, and the bytes that arrive in them."""
    arriving: dict[int, list[Any]] = {1 << bit: [] for bit in range((world - 1).bit_length())}
    for rank in range(1, world):
        last = (world - rank) & -(world - rank)  # the step with which their way to rank 0 ends: its lowest bit
        arriving[last] += [(row, ((0, 1),), ((rank, rank + 1),)) for row in _rows([name], rank, world)]
    encoded = {
        step: zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1) for step, rows in arriving.items()
    }
    began = time.process_time()
    own = [(row, ((0, 1),)) for row in _rows([name], 0, world)]
    received = route(own, 0, world, lambda distance, data: encoded[distance])
    return received, time.process_time() - began, sum(map(len, encoded.values()))
