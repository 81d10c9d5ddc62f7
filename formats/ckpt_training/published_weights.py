"""What a live run publishes: its weights under the names and in the dtype of those that follow, each element once.

All ranks decide it together, once. Elements that several ranks have are split among them, as in a save. If the names
are those of Hugging Face, ckpt's tables say which blocks of which tensors become which; each rank then finds these
blocks in its own memory, so nothing is gathered.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch

import ckpt
from ckpt_formats.core.checkpoint import Checkpoint, Origin, Parameter
from ckpt_formats.core.dtypes import DTYPES, SHORT_NAMES, DType
from ckpt_formats.core.errors import CkptError, InvalidArgumentError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.state_names import MODEL
from ckpt_formats.core.tensor import Array, Blob, BlockBlob, Fragment, Tensor, from_fragments
from ckpt_formats.core.text import list_names
from ckpt_formats.core.views import TransposedBlob, UnstackedBlob
from ckpt_formats.engines.hf.model_names import match_names
from ckpt_formats.names.config import CONFIG
from ckpt_formats.universal.boxes.table import BoxPlace
from ckpt_formats.universal.published.model import PublishedModel, PublishedTensor, TensorPiece
from ckpt_training import ranks
from ckpt_training.engines.run import TrackedRun, as_saved
from ckpt_training.local_shards import LocalShard, dtype_name
from ckpt_training.run_shards import composite_parameters, masters_of, model_shards_of, names_with_master, ties_of
from ckpt_training.save_plan import Kind, SavedShard, check_copies, cut_shard, ranges_by_rank
from ckpt_training.shares import Piece, check_coverage, piece_of

Names = Literal["hf", "as-is"]
_FLOATS = ("float64", "float32", "float16", "bfloat16")
"""What is cast. Values of other types, such as eight-bit floats with scales, have no meaning in another one."""
_HINT = (
    "Construct the Publisher on all ranks that have a part of the tensor. If ranks have different tensors under one "
    "name, give each tensor of the full model a name of its own with `rename`."
)


@dataclass(frozen=True)
class PieceSource:
    """Where this rank has the values of a piece."""

    part: int | None
    """The number of its own part of a tensor of the run. None: the piece is empty."""
    offset: int = 0
    """The first element of the block in the part, if the part is a range of elements."""
    block: Shape | None = None
    """The shape of a block of these elements. None: the piece is all of the part."""
    box: Box | None = None
    """Which elements of the block the piece has."""
    axes: tuple[int, ...] = ()
    """The order of the block's axes in the piece; empty: their own."""
    shape: Shape = ()
    """The shape of the piece."""

    def values(self, parts: Sequence[LocalShard]) -> torch.Tensor:
        """Return the memory of the piece, without a copy."""
        if self.part is None:
            return torch.empty(self.shape)
        shard = parts[self.part]
        if self.block is None or self.box is None:
            return shard.memory
        memory = shard.memory
        if not shard.part.is_block:
            memory = memory[self.offset : self.offset + prod(self.block)].view(self.block)
        memory = memory[self.box.index]
        return (memory.permute(self.axes) if self.axes else memory).reshape(self.shape)


@dataclass(frozen=True)
class PublishedWeights:
    """What this rank publishes, and the model that all ranks publish together."""

    model: PublishedModel
    """Without files."""
    sources: tuple[PieceSource, ...]
    """Of each piece of this rank."""
    dtype: str | None
    """The NumPy name of the dtype of parameters; None: their own."""
    ranges: Mapping[Piece, tuple[int, int]]
    """Of each part that this rank has, the elements that it publishes."""

    def shards(self, run: TrackedRun) -> list[SavedShard]:
        """Return the memory of each piece of this rank, as it is now.

        Raises `UnsupportedError` if the run has other tensors than when the ranks planned.
        """
        parts = _own_parts(weights_of(run, self.dtype), self.ranges)
        shards = []
        for number, source in enumerate(self.sources):
            memory = source.values(parts)
            if not memory.numel() or source.part is None:
                continue
            part = parts[source.part]
            dtype = _published_dtype(part, self.dtype)
            cast = None if dtype == dtype_name(memory.dtype) else dtype
            shard = SavedShard(number, part.name, part.state, memory, cast)
            # Buffers change in the next forward pass, which waits for nothing.
            shards.append(shard.cloned() if part.role == "buffer" else shard)
        return shards


def weights_of(run: TrackedRun, dtype: str | None) -> Iterator[LocalShard]:
    """This rank's memory of what the model computes with; of masters, where the model has another dtype than `dtype`.

    dtype: a NumPy name; None: every tensor has its own.
    """
    shards = list(model_shards_of(run))
    with_master = frozenset[str]() if dtype is None else names_with_master(run, shards)
    rounded = {one.name for one in shards if one.name in with_master and dtype_name(one.memory.dtype) != dtype}
    for shard in shards:
        if shard.name not in rounded:
            yield replace(shard, memory=as_saved(run, shard.name, shard.memory)) if shard.role == "buffer" else shard
    if rounded:
        yield from (one for one in masters_of(run, shards) if one.name in rounded)


def agree_on_weights(
    run: TrackedRun, dtype: str | None, names: Names, config: Mapping[str, Any] | None
) -> PublishedWeights:
    """Return what this rank publishes. Every rank must call it.

    Args:
        run: The run.
        dtype: The dtype of parameters in floating point, by any of its names; None: their own.
        names: How tensors are called.
        config: The configuration of the model as transformers has it, for the names of Hugging Face; None: not known.

    Raises `UnsupportedError` on all ranks if a tensor cannot be published, `InvalidArgumentError` for the options.
    """
    with ranks.together():
        dtype = None if dtype is None else SHORT_NAMES.get(dtype, dtype)
        if dtype is not None and dtype not in _FLOATS:
            raise InvalidArgumentError(f"dtype={dtype!r:.40} is none of {', '.join(_FLOATS)}")
        if names not in ("hf", "as-is"):
            raise InvalidArgumentError(f'names={names!r:.40} is neither "hf" nor "as-is"')
        own = list(weights_of(run, dtype))
        stated = json.dumps(_stated(run, own, dtype)).encode()
    every = [json.loads(one) for one in ranks.gather_bytes(stated)]
    ranges = _ranges(every, own)
    rows = json.dumps([_row_of(one) for one in _own_parts(own, ranges)]).encode()
    parts = [[(name, _place_of(*place)) for name, *place in json.loads(one)] for one in ranks.gather_bytes(rows)]
    with ranks.together():
        source, places = _lazy_checkpoint(every, parts)
        named = source if names == "as-is" else _in_hf_names(source, config)
        pieces: list[list[tuple[TensorPiece, PieceSource]]] = [[] for _ in parts]
        for number, parameter in enumerate(named.parameters.values()):
            for rank, piece, origin in _pieces(number, parameter.weight, places):
                pieces[rank].append((piece, origin))
        tensors = (PublishedTensor(one.name, one.weight.dtype, one.weight.shape) for one in named.parameters.values())
        by_rank = tuple(tuple(piece for piece, _ in of_rank) for of_rank in pieces)
        model = PublishedModel(tuple(tensors), by_rank, {}, dict(named.aliases))
        PublishedModel.from_bytes(model.to_bytes(), Path("the model of the run"))  # has every element once
    rank, _ = ranks.rank_and_world()
    return PublishedWeights(model, tuple(one for _, one in pieces[rank]), dtype, ranges)


def _stated(run: TrackedRun, own: Sequence[LocalShard], dtype: str | None) -> dict[str, Any]:
    """What this rank tells the others: plain data. Raises `UnsupportedError`."""
    composite = next((name for name, _ in composite_parameters(run)), None) if run.model_shards is None else None
    if composite is not None:
        raise UnsupportedError(
            f"`{composite}` consists of other tensors, and cannot be published",
            hint="Publish a model whose parameters are plain tensors: without quantization.",
        )
    strange = next((one for one in own if _published_dtype(one, dtype) not in DTYPES), None)
    if strange is not None:
        raise UnsupportedError(
            f"`{strange.name}` is of type {dtype_name(strange.memory.dtype)}, of which no checkpoint has values"
        )
    aliases = dict(run.aliases)
    for name, others in ties_of(run).items():
        if name not in aliases:
            aliases |= dict.fromkeys(others, name)
    return {
        "parts": [[one.role, one.part.shape, _published_dtype(one, dtype), *_row_of(one)] for one in own],
        "aliases": aliases,
    }


def _row_of(shard: LocalShard) -> list[Any]:
    part = shard.part
    return [part.name, part.shape, part.box.start, part.box.stop, part.start, part.stop]


def _place_of(shape: Sequence[int], start: Sequence[int], stop: Sequence[int], first: int, last: int) -> BoxPlace:
    block = Box(tuple(start), tuple(stop))
    return BoxPlace(tuple(shape), block, first, block.shape if last - first == block.size else (last - first,))


def _ranges(every: Sequence[Mapping[str, Any]], own: Sequence[LocalShard]) -> dict[Piece, tuple[int, int]]:
    """The elements of each part that this rank publishes. Every rank must call it."""
    holders: dict[tuple[Kind, Piece], list[int]] = {}
    facts: dict[str, tuple[tuple[int, ...], str]] = {}
    buffers = set[str]()
    for number, stated in enumerate(every):
        for role, shape, dtype, name, _, start, stop, first, last in stated["parts"]:
            known = facts.setdefault(name, (tuple(shape), dtype))
            if known != (tuple(shape), dtype):
                raise UnsupportedError(
                    f"ranks have different tensors `{name}`: {list(known[0])} of {known[1]}, {shape} of {dtype}",
                    hint=_HINT,
                )
            of = holders.setdefault(("model", (name, Box(tuple(start), tuple(stop)), first, last)), [])
            if number not in of:
                of.append(number)
            buffers |= {name} if role == "buffer" else set()
    shapes = {name: shape for name, (shape, _) in facts.items()}
    check_coverage({piece: of for (_, piece), of in holders.items()}, shapes, _HINT)
    copies = {key for key, of in holders.items() if len(of) > 1 and key[1][0] not in buffers}
    check_copies((("model", one) for one in own), copies, _HINT)
    rank, _ = ranks.rank_and_world()
    shares = {key[1]: of[rank] for key, of in ranges_by_rank(holders, buffers).items() if rank in of}
    return {piece: share for piece, share in shares.items() if share[0] < share[1]}


def _own_parts(
    own: Iterator[LocalShard] | Sequence[LocalShard], ranges: Mapping[Piece, tuple[int, int]]
) -> list[LocalShard]:
    """The parts that this rank publishes, of what it has. Raises `UnsupportedError` if it no longer has one."""
    parts: dict[Piece, LocalShard] = {}
    for shard in own:
        piece = piece_of(shard.part)
        if piece in ranges and piece not in parts:
            parts[piece] = cut_shard(shard, *ranges[piece])
    lacking = next((name for name, *_ in ranges.keys() - parts.keys()), None)
    if lacking is not None:
        raise UnsupportedError(
            f"the run no longer has the part of `{lacking}` that it had when the Publisher was made",
            hint="Make a new Publisher, on all ranks.",
        )
    return list(parts.values())


def _published_dtype(shard: LocalShard, dtype: str | None) -> str:
    own = dtype_name(shard.memory.dtype)
    return dtype if dtype is not None and own in _FLOATS and shard.role != "buffer" else own


@dataclass(frozen=True)
class _PartBlob(BlockBlob):
    """Elements of a part that a rank has: it says where values are, and reads none."""

    rank: int
    part: int
    offset: int
    """As in `PieceSource`."""
    block: Shape
    box: Box
    dtype: DType

    def read_into(self, out: Array, reader: Reader) -> None:
        raise NotImplementedError("values of a live run are copied by its ranks")


_Places = Mapping[Sequence[Fragment], Sequence[tuple[int, int, BoxPlace]]]
"""The fragments of a tensor of the run, with the rank, the number and the place of each part of it."""


def _lazy_checkpoint(
    every: Sequence[Mapping[str, Any]], parts: Sequence[Sequence[tuple[str, BoxPlace]]]
) -> tuple[Checkpoint, _Places]:
    """The tensors of the run as a checkpoint without values, whose names can be changed as those of any other."""
    facts = {row[3]: (row[0], tuple(row[1]), DTYPES[row[2]]) for stated in every for row in stated["parts"]}
    fragments: dict[str, list[Fragment]] = {name: [] for name in facts}
    places: dict[str, list[tuple[int, int, BoxPlace]]] = {name: [] for name in facts}
    for rank, of_rank in enumerate(parts):
        for number, (name, place) in enumerate(of_rank):
            places[name].append((rank, number, place))
            offset = 0
            for box in place.boxes():
                own = Box.whole(box.shape)
                fragments[name].append(Fragment(box, _PartBlob(rank, number, offset, box.shape, own, facts[name][2])))
                offset += box.size
    tensors = {name: from_fragments(shape, fragments[name], dtype) for name, (_, shape, dtype) in facts.items()}
    aliases = {alias: name for stated in every for alias, name in stated["aliases"].items()}
    checkpoint = Checkpoint(
        path=Path("the run"),
        origin=Origin("torch"),
        parameters={name: Parameter(name, facts[name][0], {MODEL: tensor}) for name, tensor in tensors.items()},
        aliases={alias: name for alias, name in aliases.items() if name in facts and alias not in facts},
    )
    return checkpoint, {tuple(tensors[name].fragments): of for name, of in places.items() if of}


def _in_hf_names(source: Checkpoint, config: Mapping[str, Any] | None) -> Checkpoint:
    """The tensors in the names of Hugging Face. Raises `CkptError` if these are not known."""
    extras = {} if config is None else {CONFIG: dict(config)}
    try:
        named = ckpt.use_names(replace(source, extras=extras), "hf")
    except CkptError as error:
        raise type(error)(
            f"the Hugging Face names of the model's tensors are not known: {error.what}",
            hint='Pass files={"config.json": PATH} with the configuration of the model, or names="as-is".',
        ) from error
    match = match_names([*named.parameters, *named.aliases], config)
    if match.known or not (match.missing or match.surplus):
        return named
    lacks = [
        f"{verb} {list_names(names)}"
        for verb, names in (("lacks", match.missing), ("also has", match.surplus))
        if names
    ]
    raise UnsupportedError(
        f"the tensors of the run are not those of the model in config.json: the run {' and '.join(lacks)}",
        hint='Pass names="as-is", or the right config.json in `files`.',
    )


def _pieces(number: int, tensor: Tensor, places: _Places) -> Iterator[tuple[int, TensorPiece, PieceSource]]:
    """The pieces of a published tensor: the rank of each, and where that rank has it. Raises `UnsupportedError`."""
    if not tensor.size:
        whole = Box.whole(tensor.shape)
        yield (
            0,
            TensorPiece(number, BoxPlace(tensor.shape, whole, 0, tensor.shape)),
            PieceSource(None, shape=tensor.shape),
        )
        return
    unchanged = places.get(tuple(tensor.fragments))
    if unchanged is not None:
        for rank, part, place in unchanged:
            yield rank, TensorPiece(number, place), PieceSource(part)
        return
    for box, blob, axes in _leaves(tensor, Box.whole(tensor.shape), ()):
        piece = TensorPiece(number, BoxPlace(tensor.shape, box, 0, box.shape))
        yield blob.rank, piece, PieceSource(blob.part, blob.offset, blob.block, blob.box, axes, box.shape)


def _leaves(blob: Blob, box: Box, axes: tuple[int, ...]) -> Iterator[tuple[Box, _PartBlob, tuple[int, ...]]]:
    """The elements of parts of which a blob consists: where each block belongs, and the order of its axes.

    `box`: where the blob belongs. Raises `UnsupportedError` for a blob that changes more than places.
    """
    if isinstance(blob, _PartBlob):
        yield box, blob, axes
    elif isinstance(blob, Tensor):
        for fragment in blob.fragments:
            yield from _leaves(fragment.blob, fragment.box.shift(box.start), axes)
    elif isinstance(blob, TransposedBlob):
        for inner, leaf, _ in _leaves(blob.base.crop(blob.box), Box.whole(blob.box.shape), ()):
            yield Box(inner.start[::-1], inner.stop[::-1]).shift(box.start), leaf, (1, 0)
    elif isinstance(blob, UnstackedBlob):
        for inner, leaf, _ in _leaves(blob.base, Box.whole(blob.base.shape), ()):
            yield Box(inner.start[1:], inner.stop[1:]).shift(box.start), leaf, ()
    else:
        raise UnsupportedError(f"a tensor of the run would become another one by {type(blob).__name__}")
