"""What planning costs a rank of many, simulated in one process: the part `plans` of `jobs.py`.

Each rank has a row of every tensor, as with FSDP2. The others' lists are made, not sent. Seconds are those of CPUs.
"""

from __future__ import annotations

import json
import time
from typing import Any

from ckpt_formats.core.geometry import Box
from ckpt_training.save_plan import Kind, ranges_by_rank
from ckpt_training.shares import Piece, check_coverage

COLUMNS = 32
KINDS: tuple[Kind, ...] = ("model", "optimizer")


def run(world: int, tensors: int) -> dict[str, Any]:
    """The seconds and bytes with which a rank learns what all ranks save, when a `Saver` is constructed."""
    names = [f"model.layers.{number}.self_attention.weight" for number in range(tensors)]
    own = [
        [kind, "parameter", name, [world, COLUMNS], [world - 1, 0], [world, COLUMNS], 0, COLUMNS]
        for kind in KINDS
        for name in names
    ]
    stated = json.dumps({"token": "0" * 16, "parts": own, "groups": [names], "aliases": {}}).encode()
    began = time.process_time()
    for _ in range(20):
        json.loads(stated)
    parsed = (time.process_time() - began) / 20
    shapes = dict.fromkeys(names, (world, COLUMNS))
    began = time.process_time()
    holders: dict[tuple[Kind, Piece], list[int]] = {
        (kind, (name, Box((rank, 0), (rank + 1, COLUMNS)), 0, COLUMNS)): [rank]
        for rank in range(world)
        for name in names
        for kind in KINDS
    }
    for kind in KINDS:
        check_coverage({piece: of for (one, piece), of in holders.items() if one == kind}, shapes, "")
    ranges_by_rank(holders, set())
    return {
        "ranks": world,
        "tensors": tensors,
        "bytes_of_a_rank": len(stated),
        "bytes_received_by_a_rank": len(stated) * world,
        "seconds_to_parse": parsed * world,
        "seconds_to_check_and_share": time.process_time() - began,
    }
