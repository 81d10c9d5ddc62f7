"""Ranks with the same local shards read a share each and exchange the shares, so that storage gives each byte once.

What is replayed of chains and logs is replayed once, too: a share has whole chunks, with all states of each.
"""

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import xxhash
from torch import distributed

from ckpt.reading.order import PlacedPiece, placed_pieces
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.universal.replay import Place
from ckpt_training import ranks
from ckpt_training.local_shards import LocalShard

Cooperate = Literal["auto", "on", "off"]
"""When replicas share the work: `auto` if the checkpoint is in a store, if steps or deltas are replayed, or if the
ranks are on several nodes. Within a node, reading a byte again from the page cache costs less than sending it."""
Fill = tuple[LocalShard, Tensor]
"""The memory of a local shard, and the stored values of its shape."""
_BLOCK = 32 << 20
"""The bytes that are sent at once."""


@dataclass(frozen=True)
class ReadPiece:
    """Memory of this rank in any layout, and the stored values of its shape."""

    stored: Tensor
    memory: torch.Tensor


@dataclass(frozen=True)
class Replicas:
    """The ranks that have the same local shards as this one."""

    members: tuple[int, ...]
    group: Any
    """The process group of the members; None if this rank is the only one."""
    shares: tuple[Sequence[ReadPiece], ...]
    """What each member reads."""

    @property
    def share(self) -> Sequence[ReadPiece]:
        """What this rank reads."""
        return self.shares[self.members.index(ranks.rank_and_world()[0])]

    def exchange(self) -> None:
        """Send this rank's share to the other members, and receive theirs. Every member must call it."""
        if self.group is None:
            return
        rank = ranks.rank_and_world()[0]
        for member, share in zip(self.members, self.shares, strict=True):
            for block in _blocks([piece.memory for piece in share]):
                buffer = torch.cat([_bytes_of(one) for one in block]).to(ranks.exchange_device())
                distributed.broadcast(buffer, member, group=self.group)
                at = 0
                for one in block if member != rank else ():
                    nbytes = one.numel() * one.element_size()
                    # A copy, because a part of the buffer may begin at any byte.
                    one.copy_(buffer[at : at + nbytes].clone().view(one.dtype).view(one.shape))
                    at += nbytes


def replicas_of(fills: Sequence[Fill], source: Checkpoint, cooperate: Cooperate) -> Replicas:
    """The ranks with which this one shares the reading. Every rank must call it."""
    rank, world = ranks.rank_and_world()
    alone = Replicas((rank,), None, ([ReadPiece(stored, shard.memory) for shard, stored in fills],))
    if world == 1 or cooperate == "off":
        return alone
    is_shared = all(shard.memory.is_contiguous() for shard, _ in fills)
    own = _digest(fills) if is_shared else rank.to_bytes(8, "big")
    every = ranks.gather_bytes(own + xxhash.xxh3_64_digest(socket.gethostname().encode()))
    members = tuple(number for number, one in enumerate(every) if one[:8] == own)
    if len(members) == 1:
        return alone
    pieces = list(placed_pieces([stored for _, stored in fills]))
    is_far = len({one[8:] for one in every}) > 1 or any(is_remote(file.path) for file in source.files)
    if cooperate == "auto" and not is_far and all(piece.place is None for piece in pieces):
        return alone
    group = distributed.new_group(list(members), use_local_synchronization=True)
    return Replicas(members, group, _shares(fills, pieces, len(members)))


def _shares(fills: Sequence[Fill], pieces: Sequence[PlacedPiece], count: int) -> tuple[Sequence[ReadPiece], ...]:
    """An equal share of all elements for each of `count` members. What is replayed at once is in one share."""
    shares: list[list[ReadPiece]] = [[] for _ in range(count)]
    places: dict[Place, list[PlacedPiece]] = {}
    rest = list[ReadPiece]()
    for piece in pieces:
        if piece.place is None:
            rest.append(_in_memory(fills, piece))
        else:
            places.setdefault(piece.place, []).append(piece)
    sizes = {place: sum(piece.tensor.size for piece in places[place]) for place in sorted(places)}
    total, at = sum(sizes.values()), 0
    for place, size in sizes.items():
        shares[(2 * at + size) * count // (2 * total)] += [_in_memory(fills, piece) for piece in places[place]]
        at += size
    for number, share in enumerate(shares):
        share += _segments(rest, number, count)
    return tuple(shares)


def _in_memory(fills: Sequence[Fill], piece: PlacedPiece) -> ReadPiece:
    memory = fills[piece.number][0].memory
    start = memory.storage_offset() + piece.offset
    return ReadPiece(piece.tensor, memory.as_strided(piece.tensor.shape, piece.strides, start))


def _digest(fills: Sequence[Fill]) -> bytes:
    """A hash of which elements of which states a rank has, in which order and types."""
    digest = xxhash.xxh3_64()
    for shard, _ in fills:
        part = shard.part
        text = f"{part.name}\0{shard.state}\0{part.box}\0{part.start}\0{part.stop}\0{shard.memory.dtype}\0"
        digest.update(text.encode("utf-8", "surrogatepass"))
    return digest.digest()


def _segments(pieces: Sequence[ReadPiece], number: int, count: int) -> Iterator[ReadPiece]:
    """A share of all elements; of memory that is not contiguous, whole pieces."""
    total, at = sum(piece.stored.size for piece in pieces), 0
    begin, end = total * number // count, total * (number + 1) // count
    for piece in pieces:
        size = piece.stored.size
        low, high = max(begin - at, 0), min(end - at, size)
        if not piece.memory.is_contiguous():
            low, high = (0, size) if begin <= at < end else (0, 0)
        if high - low == size:
            yield piece
        elif low < high:
            yield ReadPiece(piece.stored.flat[low:high], piece.memory.view(-1)[low:high])
        at += size


def _bytes_of(memory: torch.Tensor) -> torch.Tensor:
    return memory.contiguous().view(-1).view(torch.uint8)


def _blocks(memory: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Memory in groups of at most so many bytes as are sent at once; what is not contiguous is not cut."""
    block, nbytes = list[torch.Tensor](), 0
    for one in memory:
        each = max(1, _BLOCK // one.element_size())
        for piece in torch.split(one.view(-1), each) if one.is_contiguous() else (one,):
            if block and nbytes + piece.numel() * piece.element_size() > _BLOCK:
                yield block
                block, nbytes = [], 0
            block.append(piece)
            nbytes += piece.numel() * piece.element_size()
    if block:
        yield block
