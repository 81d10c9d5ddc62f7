"""Which rank records what: each tensor is split among the ranks that hold it.

Ranks hold a tensor together if they have the same elements of it under the same name. So all ranks of DDP share each
tensor, ranks of a pipeline stage share those of the stage, and a shard that only one rank has is recorded by that rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import xxhash

from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.universal.gradients.layout import ALONE, UPDATE, OptimizerVector
from ckpt_recorder.probe import ProbeResult
from ckpt_training import ranks
from ckpt_training.composite_tensors import components
from ckpt_training.engines.run import (
    TrackedRun,
    count_of,
    frozen_tensors,
    is_local,
    last_in_memory,
    memory_of,
    persistent_buffers,
    state_names,
    state_of,
)
from ckpt_training.local_shards import LocalPart, dtype_name, local_shard
from ckpt_training.shares import Piece, check_coverage, equal_shares, piece_of

_MAX_TAIL = 64
"""More elements than a SIMD vector has."""
_HINT = (
    "If the ranks have parts of one model, give each part's tensors names of their own with `rename`, or shard them as "
    "DTensors. If they have copies of one model, start all ranks from the same weights."
)


@dataclass(frozen=True)
class RankTensors:
    """The tensors of one rank: plain data that is sent to all ranks."""

    vectors: tuple[OptimizerVector, ...]
    sizes: tuple[int, ...]
    """The number of elements of each of the optimizers' tensors on this rank."""
    dtypes: tuple[str, ...]
    """The dtype of each of the optimizers' tensors."""
    parts: tuple[tuple[int, LocalPart], ...]
    """For each part that the rank holds: the number of its vector, and the part."""
    last: Mapping[int, tuple[int, ...]]
    """Of each tensor that is not contiguous, by the number of its vector: where its last elements in memory are in C
    order."""
    groups: tuple[tuple[tuple[str, ...], ...], ...]
    """The names of parameters by optimizer and group."""
    aliases: Mapping[str, str]
    frozen: Mapping[str, str]
    """A hash of each frozen tensor that is full on the rank; "" for one that is sharded."""
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class RankPart:
    """The contribution of one rank to a layout."""

    vectors: tuple[OptimizerVector, ...]
    dtypes: tuple[str, ...]
    """The dtype of each vector."""
    parts: tuple[tuple[int, LocalPart, int], ...]
    """For each part: the number of its vector, the part, and the number of its elements in complete SIMD vectors."""
    groups: tuple[tuple[tuple[str, ...], ...], ...]
    aliases: Mapping[str, str]
    frozen: frozenset[str]
    """The names of the frozen tensors that this rank records."""
    buffers: frozenset[str]
    """The names of the buffers that this rank records."""
    copies: Mapping[Piece, tuple[int, int, int]] = field(default_factory=dict)
    """Of each piece that other ranks hold, too: the number of its vector, and its start and stop in the vector."""
    updated: frozenset[int] = frozenset()
    """The optimizers whose steps are not replayed."""

    @property
    def replayed(self) -> list[tuple[int, LocalPart, int]]:
        """The parts whose steps are replayed, in the order of the rank's vector."""
        return [row for row in self.parts if self.vectors[row[0]].optimizer not in self.updated]

    def own_parts(self, number: int) -> list[LocalPart]:
        """The parts of a tensor that this rank records, each as a whole, also if its steps are replayed in pieces."""
        merged: list[LocalPart] = []
        for part in sorted((part for vector, part, _ in self.parts if vector == number), key=lambda one: one.offset):
            last = merged[-1] if merged else None
            if last is not None and (last.name, last.box, last.stop) == (part.name, part.box, part.start):
                merged[-1] = replace(last, stop=part.stop)
            else:
                merged.append(part)
        return merged


def contributions(run: TrackedRun, probed: Sequence[ProbeResult]) -> list[RankPart]:
    """The contributions of all ranks. Every rank must call it.

    Raises `UnsupportedError` if ranks have different tensors or different weights under the same name.
    """
    tensors = ranks.gather(_rank_tensors(run))
    _check_optimizers(tensors)
    _check_shapes(tensors)
    holders: dict[Piece, list[int]] = {}
    for rank, one in enumerate(tensors):
        for _, part in one.parts:
            holders.setdefault(piece_of(part), []).append(rank)
    for (name, *_), of in holders.items():
        if len(set(of)) < len(of):
            raise UnsupportedError(
                f"two optimizers step `{name}`", hint="Give each optimizer parameters of its own, or record only one."
            )
    shapes = {part.name: part.shape for one in tensors for _, part in one.parts}
    check_coverage(holders, shapes, "Start the recorder on all ranks that have a part of the tensor.")
    copies = [
        {
            piece_of(part): (number, part.offset, part.offset + part.size)
            for number, part in one.parts
            if len(holders[piece_of(part)]) > 1
        }
        for one in tensors
    ]
    if any(copies):
        own = copies[ranks.rank_and_world()[0]]
        problem = _difference(ranks.gather(_digests(run, own, ("param",))))
        if problem is not None:
            raise UnsupportedError(problem, hint=_HINT)
    _check_frozen(tensors)
    frozen, buffers = _first_holders([one.frozen for one in tensors]), _first_holders([one.buffers for one in tensors])
    parts = _split(tensors, holders, probed)
    updated = frozenset(number for number, one in enumerate(probed) if one.method == UPDATE)
    return [
        RankPart(
            vectors=one.vectors,
            dtypes=one.dtypes,
            parts=tuple(own),
            groups=one.groups,
            aliases=one.aliases,
            frozen=frozen[rank],
            buffers=buffers[rank],
            copies=copies[rank],
            updated=updated,
        )
        for rank, (one, own) in enumerate(zip(tensors, parts, strict=True))
    ]


def differing_copy(run: TrackedRun, share: RankPart) -> str | None:
    """Why the copies of a tensor differ between ranks; None if all states are equal. Every rank must call it."""
    return _difference(ranks.gather(_digests(run, share.copies, state_names(run))))


def _rank_tensors(run: TrackedRun) -> RankTensors:
    one_rank = ranks.rank_and_world()[1] == 1
    return RankTensors(
        tuple(OptimizerVector(one.optimizer, one.group, count_of(run, n)) for n, one in enumerate(run.tensors)),
        tuple(local_shard(one.tensor).numel() for one in run.tensors),
        tuple(dtype_name(one.tensor.dtype) for one in run.tensors),
        tuple((number, part) for number, one in enumerate(run.tensors) for part in one.parts),
        {
            number: last_in_memory(local_shard(one.tensor), _MAX_TAIL)
            for number, one in enumerate(run.tensors)
            if not local_shard(one.tensor).is_contiguous()
        },
        run.group_names,
        dict(run.aliases),
        {
            name: "".join(xxhash.xxh3_64_hexdigest(memory_of(part)) for _, part in components(name, tensor))
            if is_local(tensor) and not one_rank
            else ""
            for name, tensor in frozen_tensors(run)
        },
        tuple(name for name, _ in persistent_buffers(run)),
    )


def _split_at(part: LocalPart, tail: Sequence[int]) -> Iterator[tuple[LocalPart, int]]:
    """The pieces of a part, each an element of `tail` or without any, and how many elements are not of `tail`.

    `tail`: indices in the optimizer's tensor, in C order.
    """
    inside = sorted(one - part.offset for one in tail if 0 <= one - part.offset < part.size)
    ends = sorted({0, part.size, *inside, *(one + 1 for one in inside)})
    for begin, end in pairwise(ends):
        piece = replace(part, start=part.start + begin, stop=part.start + end, offset=part.offset + begin)
        yield piece, 0 if begin in inside else end - begin


def _check_optimizers(tensors: Sequence[RankTensors]) -> None:
    for rank, one in enumerate(tensors):
        for what, counts in (
            ("optimizers", [len(other.groups) for other in (tensors[0], one)]),
            ("groups in their optimizers", [[len(groups) for groups in other.groups] for other in (tensors[0], one)]),
        ):
            if counts[0] != counts[1]:
                raise UnsupportedError(
                    f"ranks 0 and {rank} have different numbers of {what}: {counts[0]} and {counts[1]}",
                    hint="Make the same optimizers and groups on every rank; a group may be empty.",
                )


def _check_shapes(tensors: Sequence[RankTensors]) -> None:
    first: dict[str, tuple[int, LocalPart]] = {}
    for rank, one in enumerate(tensors):
        for _, part in one.parts:
            other, known = first.setdefault(part.name, (rank, part))
            if (known.shape, known.dtype) != (part.shape, part.dtype):
                shapes = " and ".join(f"{list(p.shape)} in {p.dtype}" for p in (known, part))
                raise UnsupportedError(
                    f"ranks {other} and {rank} have different tensors `{part.name}`: {shapes}", hint=_HINT
                )


def _check_frozen(tensors: Sequence[RankTensors]) -> None:
    first: dict[str, tuple[int, str]] = {}
    for rank, one in enumerate(tensors):
        for name, digest in one.frozen.items():
            other, known = first.setdefault(name, (rank, digest))
            if known != digest:
                raise UnsupportedError(f"ranks {other} and {rank} have different values of `{name}`", hint=_HINT)


def _first_holders(names: Sequence[Mapping[str, str] | Sequence[str]]) -> list[frozenset[str]]:
    """For each rank, its names that no rank before it has."""
    known = set[str]()
    first = []
    for own in names:
        first.append(frozenset(own) - known)
        known |= first[-1]
    return first


def _digests(run: TrackedRun, copies: Mapping[Piece, tuple[int, int, int]], states: Sequence[str]) -> dict[Piece, int]:
    """A hash of the states of each piece that other ranks hold, too."""
    digests = {}
    for piece, (number, start, stop) in copies.items():
        digest = xxhash.xxh3_64()
        for name in states:
            values = state_of(run, number, name)
            if values is not None:
                digest.update(memory_of(values[start:stop]))
        digests[piece] = digest.intdigest()
    return digests


def _difference(digests: Sequence[Mapping[Piece, int]]) -> str | None:
    first: dict[Piece, tuple[int, int]] = {}
    for rank, own in enumerate(digests):
        for piece, digest in own.items():
            other, known = first.setdefault(piece, (rank, digest))
            if known != digest:
                return f"ranks {other} and {rank} have different values of `{piece[0]}` under the same name"
    return None


def _split(
    tensors: Sequence[RankTensors], holders: Mapping[Piece, Sequence[int]], probed: Sequence[ProbeResult]
) -> list[list[tuple[int, LocalPart, int]]]:
    """The parts that each rank records, with the number of vectorized elements. Large parts come first."""
    whole = {
        piece_of(part)
        for one in tensors
        for number, part in one.parts
        if probed[one.vectors[number].optimizer].threads is not None
    }
    pieces = [(piece, tuple(of)) for piece, of in holders.items()]
    ranges = equal_shares(pieces, lambda piece: piece[3] - piece[2] if piece in whole else 1)
    shares = {piece: own for (piece, _), own in zip(pieces, ranges, strict=True)}
    all_parts = []
    for rank, one in enumerate(tensors):
        parts = []
        for number, part in one.parts:
            start, stop = shares[piece_of(part)][rank]
            if start < stop or (not part.size and rank == holders[piece_of(part)][0]):
                own = replace(part, start=start, stop=stop, offset=part.offset + start - part.start)
                method = probed[one.vectors[number].optimizer]
                size = one.sizes[number]
                if number in one.last and method.vector > 1:
                    tail = one.last[number][len(one.last[number]) - method.tail(size) :]
                    parts += [(number, piece, count) for piece, count in _split_at(own, tail)]
                else:
                    parts.append((number, own, method.vectorized(size, own.offset, own.offset + own.size)))
        parts.sort(key=lambda item: item[1].size < ALONE)
        all_parts.append(parts)
    return all_parts
