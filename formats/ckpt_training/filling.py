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


def verify_together(reading: Reading) -> tuple[int, tuple[str, ...]]:
    """Compare the checksums of all that the ranks have read together. Every rank must call it.

    A rank joins the evidence of its children as it arrives, and sends all to its parent: so none gets that of all.
    """
    rank, world = ranks.rank_and_world()
    arriving, failure = map(ranks.received_bytes, ranks.children_of(rank, world)), None
    verdict = evidence = b""
    try:
        if rank == 0:
            verification = reading.verify(arriving)
            verdict = json.dumps([verification.seals, verification.unverified]).encode()
        else:
            evidence = reading.evidence(arriving)
    except Exception as error:
        failure = error
        for _ in arriving:  # they wait until somebody receives it
            pass
        evidence = reading.evidence()
    if (parent := ranks.parent_of(rank)) is not None:
        ranks.send_bytes(evidence, parent)
    ranks.raise_together(failure)
    seals, unverified = json.loads(ranks.broadcast_bytes(verdict))
    return int(seals), tuple(unverified)
