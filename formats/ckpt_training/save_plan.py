"""What each rank saves: decided once, by all ranks together, so that a save needs no exchange.

Tensors that several ranks have (with DDP, along the outer axis of HSDP, norms under tensor parallelism) are split among
them. States of an optimizer follow the tensors that it steps, so a run may be planned before its first step.
"""

import json
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any, Literal

import torch
import xxhash

from ckpt_formats.core.checkpoint import Role
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.universal.boxes import RankBox
from ckpt_training import ranks
from ckpt_training.composite_tensors import is_composite
from ckpt_training.engines.run import TrackedRun, as_saved, memory_of
from ckpt_training.local_shards import LocalPart, LocalShard, dtype_name, local_shard
from ckpt_training.routing import Ranges, joined_ranges, ranks_in
from ckpt_training.run_shards import masters_of, model_shards_of, states_of
from ckpt_training.shares import Piece, check_coverage, equal_shares, own_shares, piece_of

Kind = Literal["model", "optimizer"]
"""Whether the model computes with a tensor, or an optimizer steps it. Other ranks may have the one than the other."""
_HINT = (
    "Construct the Saver on all ranks that have a part of the tensor. If ranks have different tensors under one name, "
    "give each tensor of the full model a name of its own."
)


@dataclass(frozen=True)
class SavedShard:
    """Memory of this rank that a save copies: the share of this rank."""

    box: int
    """The number of its box."""
    name: str
    state: str
    memory: torch.Tensor
    """The values, on any device and with any strides, in the order of the box."""
    dtype: str | None = None
    """The NumPy name of the dtype to which the copy is cast; None: the bits are copied as they are."""

    def cloned(self) -> "SavedShard":
        """Return a copy of the values, which the run does not change."""
        return replace(self, memory=self.memory.clone())


@dataclass(frozen=True)
class SavePlan:
    """The share of this rank, and what is known of the run as a whole."""

    token: str
    """A text that all ranks of this plan have, and no other plan has."""
    ranges: Mapping[tuple[Kind, Piece], tuple[int, int]]
    """Of each piece that this rank has: the range of elements that it saves."""
    first: frozenset[tuple[Kind, Piece]]
    """The pieces of which this rank is the first that has them."""
    names: tuple[str, ...]
    """The names of all parameters and buffers of all ranks, in the order of the model."""
    group_names: tuple[tuple[str, ...], ...]
    """The names of all parameters by group, those of the first optimizer first."""
    aliases: Mapping[str, str]

    def boxes(self, run: TrackedRun) -> tuple[list[RankBox], list[SavedShard]]:
        """Return the boxes of this rank, and the memory of each state.

        Raises `UnsupportedError` if the run has other tensors than when the ranks planned.
        """
        self._check_unchanged(run)
        boxes: dict[Piece, RankBox] = {}
        shards: list[tuple[Piece, LocalShard]] = []
        for kind, shard in _shards(run):
            if is_composite(shard.memory):
                raise UnsupportedError(
                    f"`{shard.name}` ({shard.state}) consists of other tensors, and is not saved as one",
                    hint="Record the run, or save it with torch.",
                )
            start, stop = self.ranges[kind, piece_of(shard.part)]
            if start == stop and not (shard.part.size == 0 and (kind, piece_of(shard.part)) in self.first):
                continue
            own = cut_shard(shard, start, stop)
            part, key = own.part, piece_of(own.part)
            known = boxes.get(key)
            states = {**({} if known is None else known.states), own.state: dtype_name(own.memory.dtype)}
            role = own.role if known is None else known.role
            last = None if part.is_block else part.stop
            boxes[key] = RankBox(part.name, role, part.shape, part.box, states, part.start, last)
            shards.append((key, own))
        for key, shard in self._states_of_other_shapes(run):
            boxes[key] = RankBox(
                shard.name, "parameter", shard.part.shape, shard.part.box, {shard.state: dtype_name(shard.memory.dtype)}
            )
            shards.append((key, shard))
        numbers = {key: number for number, key in enumerate(boxes)}
        return list(boxes.values()), [SavedShard(numbers[key], one.name, one.state, one.memory) for key, one in shards]

    def _check_unchanged(self, run: TrackedRun) -> None:
        current = {(kind, piece_of(part)): part for kind, _, part in _parts(run)}
        for kind, piece in (*(current.keys() - self.ranges.keys()), *(self.ranges.keys() - current.keys())):
            is_new = (kind, piece) in current
            what = "another part than" if is_new else "no longer the part that it had"
            raise UnsupportedError(
                f"the {kind} has {what} of `{piece[0]}` when the Saver was made",
                hint="Make a new Saver, on all ranks.",
            )
        for number, optimizer in enumerate(run.optimizers):
            if run.groups is not None:
                continue  # the engine shows its optimizer only one group at a time
            known = {id(one.tensor) for one in run.tensors if one.optimizer == number}
            if known != {id(one) for group in optimizer.param_groups for one in group["params"]}:
                raise UnsupportedError(
                    "the optimizer steps other tensors than when the Saver was made",
                    hint="Make a new Saver, on all ranks.",
                )

    def _states_of_other_shapes(self, run: TrackedRun) -> Iterator[tuple[Piece, LocalShard]]:
        """The states of optimizers that have another shape than their tensors, such as factors of Adafactor."""
        for number, one in enumerate(run.tensors):
            for name, value in run.optimizers[one.optimizer].state.get(one.tensor, {}).items():
                if not isinstance(value, torch.Tensor) or not value.dim() or value.shape == one.tensor.shape:
                    continue
                if run.state_parts(number, str(name)) is not None:
                    continue  # it consists of parameters
                part, state = next(iter(one.all_parts), None), from_stored(str(name))
                has_all = part is not None and part.size == prod(part.shape) == one.tensor.numel()
                if part is None or not has_all or is_composite(value):
                    raise UnsupportedError(
                        f"the state {state} of `{part.name if part else one.names[0]}` has the shape "
                        f"{list(value.shape)}, not that of its tensor, which is sharded",
                        hint="Use an optimizer whose states have the shapes of their tensors, or do not shard it.",
                    )
                if ("optimizer", piece_of(part)) in self.first:
                    values, whole = local_shard(value).detach(), Box.whole(tuple(value.shape))
                    own = replace(part, shape=tuple(value.shape), box=whole, start=0, stop=whole.size, offset=0)
                    yield (f"{part.name} {state}", whole, 0, whole.size), LocalShard(own, state, "parameter", values)


def agree(run: TrackedRun) -> SavePlan:
    """Return the plan of this rank. Every rank must call it.

    Each tensor has a rank that gets the parts of it from all ranks, and tells those that share one of each other: no
    rank gets the parts of all. Raises `UnsupportedError` on all ranks if their parts do not make up full tensors, or if
    tensors that should be copies of each other differ.
    """
    rank, world = ranks.rank_and_world()
    with ranks.together():
        rows = _rows(run)
        stated = _stated(run)
    known = ranks.merged(stated, _joined)
    if known["problem"] is not None:
        raise UnsupportedError(known["problem"], hint="Make the same optimizers and groups on every rank.")
    buffers, names = set(known["buffers"]), {name: number for number, name in enumerate(known["names"])}
    received = ranks.route((text, _to_owner(name, world)) for (name, *_), (_, text) in rows.items())
    with ranks.together():
        shared = shared_parts(received)
    of_digests = {digest: _as_ranges(of) for digest, of in map(json.loads, ranks.route(shared))}
    sole: Ranges = ((rank, rank + 1),)
    keys = [(kind, piece) for piece, (kinds, _) in rows.items() for kind in kinds]
    holders = {key: of_digests.get(_digest(*key), sole) for key in keys}
    check_copies(_shards(run), {key for key, of in holders.items() if of != sole and key[1][0] not in buffers}, _HINT)
    return SavePlan(
        token=known["token"],
        ranges=_ranges(holders, names, buffers, rank),
        first=frozenset(key for key, of in holders.items() if of[0][0] == rank),
        names=tuple(names),
        group_names=tuple(tuple(name for name in group if name in names) for group in known["groups"]),
        aliases={alias: name for alias, name in known["aliases"].items() if name in names},
    )


def _stated(run: TrackedRun) -> dict[str, Any]:
    """What all ranks learn of this one: plain data, without the parts."""
    parts = list(_parts(run))
    return {
        "token": uuid.uuid4().hex[:16],
        "rank": ranks.rank_and_world()[0],
        "names": list(dict.fromkeys(part.name for _, _, part in parts)),
        "buffers": list(dict.fromkeys(part.name for _, role, part in parts if role == "buffer")),
        "groups": [list(dict.fromkeys(names)) for groups in run.group_names for names in groups],
        "aliases": dict(run.aliases),
        "problem": None,
    }


def _joined(stated: list[dict[str, Any]]) -> dict[str, Any]:
    """What is known of several ranks, in their order."""
    first, counts = stated[0], [len(one["groups"]) for one in stated]
    problem = next((one["problem"] for one in stated if one["problem"] is not None), None)
    other = next((number for number, count in enumerate(counts) if count != counts[0]), None)
    if problem is None and other is not None:
        problem = (
            f"ranks {first['rank']} and {stated[other]['rank']} have different numbers of parameter groups: "
            f"{counts[0]} and {counts[other]}"
        )
    return {
        **first,
        "names": _union(one["names"] for one in stated),
        "buffers": _union(one["buffers"] for one in stated),
        "groups": [_union(groups) for groups in zip(*(one["groups"] for one in stated), strict=False)],
        "aliases": {alias: name for one in stated for alias, name in one["aliases"].items()},
        "problem": problem,
    }


def _union(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(chain.from_iterable(lists)))


def _rows(run: TrackedRun) -> dict[Piece, tuple[Sequence[Kind], str]]:
    """The parts of this rank with their kinds, each as a text that is the same on all ranks that have it so."""
    parts: dict[Piece, tuple[LocalPart, list[Kind]]] = {}
    for kind, _, part in _parts(run):
        _, kinds = parts.setdefault(piece_of(part), (part, []))
        if kind in kinds:
            raise UnsupportedError(f"two optimizers step `{part.name}`", hint="Give each optimizer its own parameters.")
        kinds.append(kind)
    return {piece: (kinds, row_of(kinds, part)) for piece, (part, kinds) in parts.items()}


def row_of(kinds: Sequence[Kind], part: LocalPart) -> str:
    """Return a part as a text."""
    return json.dumps([kinds, part.name, part.shape, part.box.start, part.box.stop, part.start, part.stop])


def _to_owner(name: str, world: int) -> Ranges:
    """The rank that gets the parts of a tensor."""
    rank = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) % world
    return ((rank, rank + 1),)


def shared_parts(received: Mapping[str, Ranges]) -> list[tuple[str, Ranges]]:
    """Check the parts of tensors of which this rank gets all, and return what it tells the ranks that share some.

    Args:
        received: The rows of all parts of a tensor, each with its ranks.

    Returns texts, each with the ranks that get it: the digest of a piece, and its ranks.

    Raises `UnsupportedError` if parts do not make up full tensors.
    """
    holders: dict[Kind, dict[Piece, list[tuple[int, int]]]] = {"model": {}, "optimizer": {}}
    shapes: dict[str, tuple[int, ...]] = {}
    rows = json.loads(f"[{','.join(received)}]")
    for (kinds, name, shape, start, stop, first, last), of in zip(rows, received.values(), strict=True):
        if shapes.setdefault(name, tuple(shape)) != tuple(shape):
            raise UnsupportedError(f"ranks have different tensors `{name}`: {shapes[name]} and {shape}", hint=_HINT)
        piece: Piece = name, Box(tuple(start), tuple(stop)), first, last
        for kind in kinds:
            holders[kind].setdefault(piece, []).extend(of)
    check_coverage({piece: list(ranks_in(of)) for piece, of in holders["model"].items()}, shapes, _HINT)
    if holders["optimizer"].keys() != holders["model"].keys():
        check_coverage({piece: list(ranks_in(of)) for piece, of in holders["optimizer"].items()}, shapes, _HINT)
    texts = []
    for kind, of_kind in holders.items():
        for piece, ranges in of_kind.items():
            every = joined_ranges(ranges)
            if len(every) > 1 or every[0][1] - every[0][0] > 1:
                texts.append((json.dumps([_digest(kind, piece), every]), every))
    return texts


def _digest(kind: Kind, piece: Piece) -> str:
    name, box, first, last = piece
    return xxhash.xxh3_64_hexdigest(json.dumps([kind, name, box.start, box.stop, first, last]).encode())


def _as_ranges(rows: Iterable[Sequence[int]]) -> Ranges:
    return tuple((low, high) for low, high in rows)


def _parts(run: TrackedRun) -> Iterator[tuple[Kind, Role, LocalPart]]:
    for shard in model_shards_of(run):
        yield "model", shard.role, shard.part
    known = set[int]()
    for one in run.tensors:
        if id(one.tensor) not in known:
            known.add(id(one.tensor))
            for part in one.all_parts:
                yield "optimizer", "parameter", part


def _shards(run: TrackedRun) -> Iterator[tuple[Kind, LocalShard]]:
    """All memory of this rank with an element for each of a part."""
    for shard in model_shards_of(run):
        is_buffer = shard.role == "buffer"  # training may have it in another dtype than checkpoints
        yield "model", replace(shard, memory=as_saved(run, shard.name, shard.memory)) if is_buffer else shard
    for shard in masters_of(run):
        yield "optimizer", shard
    for number in range(len(run.tensors)):
        for shard in states_of(run, number):
            yield "optimizer", shard


def _ranges(
    holders: Mapping[tuple[Kind, Piece], Ranges], names: Mapping[str, int], buffers: set[str], rank: int
) -> dict[tuple[Kind, Piece], tuple[int, int]]:
    """The range of each piece that this rank saves. A buffer is that of the first rank, as in DDP.

    `names`: the number of each tensor in the model, which is the same on all ranks.
    """
    shared = dict.fromkeys((piece, of) for (_, piece), of in holders.items() if piece[0] not in buffers)
    in_order = sorted(shared, key=lambda one: (names[one[0][0]], one[0][1].start, one[0][1].stop, one[0][2:], one[1]))
    shares = dict(zip(in_order, own_shares(in_order, rank, _row_size), strict=True))
    ranges: dict[tuple[Kind, Piece], tuple[int, int]] = {}
    for (kind, piece), of in holders.items():
        is_first = of[0][0] == rank
        is_buffer = piece[0] in buffers
        ranges[kind, piece] = (piece[2], piece[3] if is_first else piece[2]) if is_buffer else shares[piece, of]
    return ranges


def ranges_by_rank(
    holders: Mapping[tuple[Kind, Piece], Sequence[int]], buffers: set[str]
) -> dict[tuple[Kind, Piece], Mapping[int, tuple[int, int]]]:
    """The range of each piece that each of its holders saves. A buffer is that of the first rank, as in DDP."""
    shared = dict.fromkeys((piece, tuple(of)) for (_, piece), of in holders.items() if piece[0] not in buffers)
    shares = dict(zip(shared, equal_shares(list(shared), _row_size), strict=True))
    ranges: dict[tuple[Kind, Piece], Mapping[int, tuple[int, int]]] = {}
    for (kind, piece), of in holders.items():
        if piece[0] in buffers:
            ranges[kind, piece] = {rank: (piece[2], piece[3] if rank == of[0] else piece[2]) for rank in of}
        else:
            ranges[kind, piece] = shares[piece, tuple(of)]
    return ranges


def _axis(box: Box) -> int:
    """The first axis along which a block can be cut into blocks."""
    return next((axis for axis, length in enumerate(box.shape) if length > 1), 0)


def _row_size(piece: Piece) -> int:
    """The number of elements between two places at which a piece can be cut: a block is cut into blocks."""
    _, box, start, stop = piece
    return prod(box.shape[_axis(box) + 1 :]) if stop - start == box.size else 1


def cut_shard(shard: LocalShard, start: int, stop: int) -> LocalShard:
    """The elements of a shard from `start` to `stop`, counted as those of its part."""
    part = shard.part
    if (start, stop) == (part.start, part.stop):
        return shard
    if not part.is_block:
        low, high = start - part.start, stop - part.start
        return replace(shard, part=replace(part, start=start, stop=stop), memory=shard.memory[low:high])
    axis, row = _axis(part.box), _row_size(piece_of(part))
    low, high = start // row, stop // row
    first = part.box.start[axis]
    box = Box(
        (*part.box.start[:axis], first + low, *part.box.start[axis + 1 :]),
        (*part.box.stop[:axis], first + high, *part.box.stop[axis + 1 :]),
    )
    memory = shard.memory.narrow(axis, low, high - low)
    return replace(shard, part=replace(part, box=box, start=0, stop=box.size), memory=memory)


def check_copies(shards: Iterable[tuple[Kind, LocalShard]], copies: set[tuple[Kind, Piece]], hint: str) -> None:
    """Raise `UnsupportedError` on all ranks if tensors that several ranks have are no copies. Every rank calls it."""
    world = ranks.rank_and_world()[1]
    if world == 1:
        return
    digests: dict[str, Ranges] = {}
    for kind, shard in shards:
        if (kind, piece_of(shard.part)) in copies:
            name, box, start, stop = piece_of(shard.part)
            digest = xxhash.xxh3_64_hexdigest(memory_of(shard.memory))
            digests[json.dumps([name, shard.state, f"{box} {start} {stop}", digest])] = _to_owner(name, world)
    received = ranks.route(digests.items())
    with ranks.together():
        first: dict[tuple[str, ...], tuple[Ranges, str]] = {}
        for text, of in received.items():
            name, state, place, digest = json.loads(text)
            other, known = first.setdefault((name, state, place), (of, digest))
            if known != digest:
                low, high = sorted((other[0][0], of[0][0]))
                raise UnsupportedError(
                    f"ranks {low} and {high} have different values of `{name}` ({state}) under the same name",
                    hint=hint,
                )
