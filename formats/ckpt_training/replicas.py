"""Ranks with the same local shards read a share each and exchange the shares, so that storage gives each byte once."""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import xxhash
from torch import distributed

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.tensor import Tensor
from ckpt_training import ranks
from ckpt_training.local_shards import LocalShard

Cooperate = Literal["auto", "on", "off"]
"""When replicas share the work: `auto` if the checkpoint is in a store, or if the ranks are on several nodes. Within a
node, reading a byte again from the page cache costs less than sending it."""
Fill = tuple[LocalShard, Tensor]
"""The memory of a local shard, and the stored values of its shape."""
_BLOCK = 32 << 20
"""The bytes that are sent at once."""


@dataclass(frozen=True)
class Replicas:
    """The ranks that have the same local shards as this one."""

    members: tuple[int, ...]
    group: Any
    """The process group of the members; None if this rank is the only one."""

    def share(self, fills: Sequence[Fill]) -> list[Fill]:
        """What this rank reads: of all elements an equal share."""
        own = self.members.index(ranks.rank_and_world()[0])
        if self.group is None:
            return list(fills)
        return [
            (_part(shard, low, high), stored if high - low == stored.size else stored.flat[low:high])
            for shard, stored, low, high in _segments(fills, own, len(self.members))
        ]

    def exchange(self, fills: Sequence[Fill]) -> None:
        """Send this rank's share to the other members, and receive theirs. Every member must call it."""
        if self.group is None:
            return
        rank = ranks.rank_and_world()[0]
        for number, member in enumerate(self.members):
            memory = [
                shard.memory.view(-1)[low:high] for shard, _, low, high in _segments(fills, number, len(self.members))
            ]
            for block in _blocks(memory):
                buffer = torch.cat([one.view(torch.uint8) for one in block]).to(ranks.exchange_device())
                distributed.broadcast(buffer, member, group=self.group)
                if member != rank:
                    at = 0
                    for one in block:
                        nbytes = one.numel() * one.element_size()
                        one.view(torch.uint8).copy_(buffer[at : at + nbytes])
                        at += nbytes


def replicas_of(fills: Sequence[Fill], source: Checkpoint, cooperate: Cooperate) -> Replicas:
    """The ranks with which this one shares the reading. Every rank must call it."""
    rank, world = ranks.rank_and_world()
    if world == 1 or cooperate == "off":
        return Replicas((rank,), None)
    is_shared = all(shard.memory.is_contiguous() for shard, _ in fills)
    own = _digest(fills) if is_shared else rank.to_bytes(8, "big")
    every = ranks.gather_bytes(own + xxhash.xxh3_64_digest(socket.gethostname().encode()))
    is_far = len({one[8:] for one in every}) > 1 or any(is_remote(file.path) for file in source.files)
    members = tuple(number for number, one in enumerate(every) if one[:8] == own)
    if len(members) == 1 or (cooperate == "auto" and not is_far):
        return Replicas((rank,), None)
    return Replicas(members, distributed.new_group(list(members), use_local_synchronization=True))


def _digest(fills: Sequence[Fill]) -> bytes:
    """A hash of which elements of which states a rank has, in which order and types."""
    digest = xxhash.xxh3_64()
    for shard, _ in fills:
        part = shard.part
        text = f"{part.name}\0{shard.state}\0{part.box}\0{part.start}\0{part.stop}\0{shard.memory.dtype}\0"
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.digest()


def _segments(fills: Sequence[Fill], number: int, count: int) -> Iterator[tuple[LocalShard, Tensor, int, int]]:
    """The elements `low` to `high` of each local shard that are in a share of all."""
    total, at = sum(stored.size for _, stored in fills), 0
    begin, end = total * number // count, total * (number + 1) // count
    for shard, stored in fills:
        low, high = max(begin - at, 0), min(end - at, stored.size)
        if low < high:
            yield shard, stored, low, high
        at += stored.size


def _part(shard: LocalShard, low: int, high: int) -> LocalShard:
    """Some elements of a local shard; all of them as it is."""
    if high - low == shard.memory.numel():
        return shard
    return LocalShard(shard.part, shard.state, shard.role, shard.memory.view(-1)[low:high])


def _blocks(memory: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Vectors in groups of at most so many bytes as are sent at once."""
    block, nbytes = list[torch.Tensor](), 0
    for vector in memory:
        each = max(1, _BLOCK // vector.element_size())
        for piece in torch.split(vector, each):
            if block and nbytes + piece.numel() * piece.element_size() > _BLOCK:
                yield block
                block, nbytes = [], 0
            block.append(piece)
            nbytes += piece.numel() * piece.element_size()
    if block:
        yield block
