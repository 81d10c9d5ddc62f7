"""Read stored values into local shards, and verify on all ranks together what they have read."""

import json
from collections.abc import Iterable

import torch

from ckpt.reading import Reading
from ckpt_formats.core.tensor import Tensor
from ckpt_training import ranks
from ckpt_training.local_shards import LocalShard, as_array
from ckpt_training.replicas import Fill

_STAGED = 32 << 20
"""The bytes of the buffer through which values go to a device."""
_JOINED = 128
"""Ranks whose evidence one rank joins."""


def fill(reading: Reading, fills: Iterable[Fill]) -> None:
    """Read all local shards: those of the CPU straight into their memory, others through a buffer."""
    others, own = list[Fill](), []
    for shard, stored in fills:
        if shard.memory.device.type == "cpu":
            own.append((stored, as_array(shard.memory)))
        else:
            others.append((shard, stored))
    reading.fill(own)
    for shard, stored in others:
        _fill_device(reading, shard, stored)


def _fill_device(reading: Reading, shard: LocalShard, stored: Tensor) -> None:
    """Read a local shard on a device, in blocks."""
    memory = shard.memory if shard.memory.is_contiguous() else torch.empty_like(shard.memory).contiguous()
    flat, each = memory.view(-1), max(1, _STAGED // memory.element_size())
    buffer = torch.empty(min(each, flat.numel()), dtype=memory.dtype, pin_memory=memory.device.type == "cuda")
    for low in range(0, flat.numel(), each):
        block = buffer[: min(each, flat.numel() - low)]
        reading.fill([(stored.flat[low : low + block.numel()], as_array(block))])
        flat[low : low + block.numel()].copy_(block)
    if memory is not shard.memory:
        shard.memory.copy_(memory)


def verify_together(reading: Reading, group_size: int = _JOINED) -> tuple[int, tuple[str, ...]]:
    """Compare the checksums of all that the ranks have read together. Every rank must call it.

    The first of each `group_size` ranks joins the evidence of its group, and rank 0 that of these: so no rank gets the
    evidence of all.
    """
    rank, world = ranks.rank_and_world()
    first = rank - rank % group_size
    evidence = reading.evidence()
    received = ranks.sent_to(first, evidence, range(first + 1, min(first + group_size, world)))
    with ranks.together():
        if received and rank:
            evidence = reading.evidence(received)
    if rank == first:
        received += ranks.sent_to(0, evidence, range(group_size, world, group_size))
    verdict = b""
    with ranks.together():
        if rank == 0:
            verification = reading.verify(received)
            verdict = json.dumps([verification.seals, verification.unverified]).encode()
    seals, unverified = json.loads(ranks.broadcast_bytes(verdict))
    return int(seals), tuple(unverified)
