"""Read stored values into local shards, and verify on all ranks together what they have read."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from ckpt.reading import Reading
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.tensor import Tensor
from ckpt_training import ranks
from ckpt_training.local_shards import as_array

_STAGED = 32 << 20
"""The bytes of the buffer through which values go to a device."""
_JOINED = 128
"""Ranks whose evidence one rank joins."""


@contextmanager
def changing(target: str) -> Iterator[None]:
    """Within, an error says that what is loaded into (`target`) has values of before and of the checkpoint."""
    try:
        yield
    except CkptError as error:
        again = f"The {target} now has values of both: load again."
        error.hint = f"{error.hint} {again}" if error.hint else again
        raise


def fill(reading: Reading, pairs: Iterable[tuple[Tensor, torch.Tensor]]) -> None:
    """Read tensors into memory of their shapes: on the CPU straight, on other devices through a buffer."""
    pairs = list(pairs)
    reading.fill((stored, as_array(memory)) for stored, memory in pairs if memory.device.type == "cpu")
    for stored, memory in pairs:
        if memory.device.type != "cpu":
            _fill_device(reading, stored, memory)


def _fill_device(reading: Reading, stored: Tensor, target: torch.Tensor) -> None:
    """Read a tensor into memory on a device, in blocks."""
    memory = target if target.is_contiguous() else torch.empty_like(target).contiguous()
    flat, each = memory.view(-1), max(1, _STAGED // memory.element_size())
    buffer = torch.empty(min(each, flat.numel()), dtype=memory.dtype, pin_memory=memory.device.type == "cuda")
    for low in range(0, flat.numel(), each):
        block = buffer[: min(each, flat.numel() - low)]
        reading.fill([(stored.flat[low : low + block.numel()], as_array(block))])
        flat[low : low + block.numel()].copy_(block)
    if memory is not target:
        target.copy_(memory)


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
