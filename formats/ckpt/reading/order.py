"""In which order blocks are read, and by which thread.

What lies in files comes in the order of the files, in pieces of a few MiB. Copies that are derived from other values
that are read, too, are computed from these. States that are replayed come in pieces of what is computed at once, such
as a chunk of all states of a log: so each chunk is replayed once, and few are in memory.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from itertools import groupby
from math import prod
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from ckpt.pipeline.executors import batches
from ckpt.reading.blocks import Block, DerivedCopy
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.geometry import Box, flat_boxes, slab
from ckpt_formats.core.tensor import Blob, FlatRangeBlob, Fragment, Tensor, c_strides, is_c_order
from ckpt_formats.core.views import ReshapedBlob
from ckpt_formats.universal.replay import DeltaBlob, Place

Work = list[Block]
"""Blocks that one thread reads, one after another."""

_LARGE = 32 << 20
"""Bytes of a block above which threads share it."""


@dataclass(frozen=True)
class ReadingOrder:
    """Blocks in the order in which they are best read."""

    stored: list[Block]
    """What lies in files, in their order."""
    replayed: list[Block]

    @classmethod
    def of(cls, blocks: list[Block], workers: int) -> "ReadingOrder":
        """The order of `blocks`, of which threads share the large ones."""
        if any(_is_computed(block.tensor) for block in blocks):
            blocks = _with_copies([piece for block in blocks for piece in _simple(block)])
        stored = [block for block in blocks if _replayed(block.tensor) is None]
        replayed = [block for block in blocks if _replayed(block.tensor) is not None]
        stored.sort(key=_place)
        pieces = stored if workers == 1 else [piece for block in stored for piece in _shared(block)]
        return cls(pieces, sorted(replayed, key=_place))

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors, about in the order of reading."""
        return (block.tensor for block in (*self.stored, *self.replayed))

    def work(self) -> Iterator[Work]:
        """All blocks in pieces, each for one thread. Those of a replay are many, so they are made one after another."""
        yield from batches((block.tensor.nbytes, block) for block in self.stored)
        streams = (_by_place(number, block) for number, block in enumerate(self.replayed))
        for _, pieces in groupby(merge(*streams, key=itemgetter(0, 1)), itemgetter(0)):
            yield [block.part(box) for _, _, block, box in pieces]


class PlacedPiece(NamedTuple):
    """A part of one of several tensors, and the memory of its elements in an array of that tensor in C order."""

    number: int
    """The number of the tensor."""
    tensor: Tensor
    place: Place | None
    """Pieces of one place are replayed at once; None if nothing is replayed."""
    offset: int
    """The index of the first element in memory."""
    strides: tuple[int, ...]
    """In elements, one for each axis of the piece."""


def placed_pieces(tensors: Sequence[Tensor]) -> Iterator[PlacedPiece]:
    """Yield pieces that together are all elements of the tensors, each once. No data is read.

    If processes divide them so that all pieces of a place are one's own, they replay nothing twice.
    """
    for number, tensor in enumerate(tensors):
        memory = np.empty(tensor.shape, np.uint8)  # never written: only the addresses in it count
        begin, block = memory.ctypes.data, Block(tensor, memory)
        for simple in _simple(block) if _is_computed(tensor) else (block,):
            blob = _replayed(simple.tensor)
            pieces: Iterator[tuple[Place | None, Block]] = iter([(None, simple)])
            if blob is not None:
                pieces = ((place, part) for place, _, _, box in _by_place(0, simple) for part in (simple.part(box),))
            for place, one in pieces:
                yield PlacedPiece(number, one.tensor, place, one.out.ctypes.data - begin, one.out.strides)


def _by_place(number: int, block: Block) -> Iterator[tuple[Place, int, Block, Box]]:
    """The pieces of a replayed block in the order of places: each a place, `number`, and the block with its part."""
    blob = _replayed(block.tensor)
    assert blob is not None
    for place, box in blob.replay.pieces(blob.box):
        yield place, number, block, box.within(blob.box)


def _place(block: Block) -> tuple[str, int]:
    source = block.first_source()
    return ("", 0) if source is None else (str(source.path), source.offset)


def _shared(block: Block) -> Iterator[Block]:
    """A large block in pieces for several threads: whole chunks, where tensors are stored in chunks."""
    shape, nbytes = block.tensor.shape, block.tensor.nbytes
    if nbytes <= _LARGE or shape[0] == 1:
        yield block
        return
    row, chunk = prod(shape[1:]), Chunking.default(shape).chunk_size
    step = max(1, _LARGE * shape[0] // nbytes)
    if chunk % row == 0:
        step = max(1, step * row // chunk) * (chunk // row)
    for low in range(0, shape[0], step):
        yield block.part(slab(shape, 0, low, min(low + step, shape[0])))


def _with_copies(blocks: list[Block]) -> list[Block]:
    """The blocks, without those that are copies, derived from values of another one, which gets them."""
    derived = {number: one for number, block in enumerate(blocks) if (one := _derived(block.tensor)) is not None}
    if not derived:
        return blocks
    bases: dict[Hashable, int] = {}
    for number, block in enumerate(blocks):
        if number not in derived and block.out.dtype == block.tensor.dtype:
            bases.setdefault(_values_key(block.tensor), number)
    result = list(blocks)
    left_out = set[int]()
    for number, (blob, key) in derived.items():
        base = bases.get(key)
        if base is not None:
            copy = DerivedCopy(blob.codec, blob.dtype, blocks[number].out)
            result[base] = replace(result[base], copies=(*result[base].copies, copy))
            left_out.add(number)
    return [block for number, block in enumerate(result) if number not in left_out]


def _derived(blob: Blob) -> tuple[DerivedBlob, Hashable] | None:
    """What makes a copy of other values, and the key of these; None if it is no such copy."""
    blob = _single(blob)
    if isinstance(blob, FlatRangeBlob):
        inner = _derived(blob.base)
        return None if inner is None else (inner[0], (blob.start, blob.stop, inner[1]))
    return (blob, _values_key(blob.base)) if type(blob) is DerivedBlob else None


def _values_key(blob: Blob) -> Hashable:
    """A key that is equal for blobs of the same values."""
    blob = _single(blob)
    return (blob.start, blob.stop, _values_key(blob.base)) if isinstance(blob, FlatRangeBlob) else blob


def _single(blob: Blob) -> Blob:
    """The blob that a tensor consists of; any other blob itself."""
    while isinstance(blob, Tensor) and not blob.replicas and type(blob.fragments) is tuple and len(blob.fragments) == 1:
        if blob.fragments[0].box != Box.whole(blob.shape):
            break
        blob = blob.fragments[0].blob
    return blob


def _replayed(blob: Blob) -> DeltaBlob | None:
    """The block of a replay that a blob consists of, or is derived from; None if it is something else."""
    blob = _single(blob)
    if isinstance(blob, DerivedBlob):
        return _replayed(blob.base)
    return blob if isinstance(blob, DeltaBlob) else None


def _is_computed(blob: Blob) -> bool:
    """Whether some of the values are replayed, or derived from others."""
    blob = _single(blob)
    if isinstance(blob, Tensor):
        return any(_is_computed(fragment.blob) for fragment in blob.examples())
    if isinstance(blob, (FlatRangeBlob, ReshapedBlob)):
        return _is_computed(blob.base)
    return isinstance(blob, (DerivedBlob, DeltaBlob))


def _fragments(blob: Blob) -> Sequence[Fragment]:
    """The fragments of a tensor that has several and no replicas; none of any other blob."""
    is_cut = isinstance(blob, Tensor) and not blob.replicas and type(blob.fragments) is tuple
    return blob.fragments if is_cut and isinstance(blob, Tensor) else ()


def _simple(block: Block) -> Iterator[Block]:
    """A block in pieces, each of which is one blob as far as possible: so that equal blobs are known to be equal."""
    blob, out = _single(block.tensor), block.out
    if isinstance(blob, FlatRangeBlob) and (_fragments(base := _single(blob.base)) or _is_replay(base)):
        at, whole = 0, Tensor.of(base)
        for box in flat_boxes(base.shape, blob.start, blob.stop):
            yield from _simple(Block(whole.crop(box), out[at : at + box.size].reshape(box.shape)))
            at += box.size
    elif cut := _fragments(blob):
        for fragment in cut:
            yield from _simple(Block(Tensor.of(fragment.blob), out[fragment.box.index]))
    elif isinstance(blob, DerivedBlob) and (cut := _fragments(_single(blob.base))):
        for fragment in cut:
            yield from _simple(block.part(fragment.box))
    elif (vector := _as_vector(blob)) is not None and out.flags.c_contiguous:
        yield from _simple(Block(Tensor.of(vector), out.reshape(-1)))
    else:
        yield block


def _is_replay(blob: Blob) -> bool:
    return _replayed(blob) is not None


def _as_vector(blob: Blob) -> Blob | None:
    """The vector whose elements a blob has in another shape, if it is a replay or a copy of one; else None."""
    if type(blob) is DerivedBlob:
        base = _as_vector(_single(blob.base))
        return None if base is None else DerivedBlob(blob.codec, base, blob.dtype)
    if not isinstance(blob, ReshapedBlob) or not _is_replay(blob.base):
        return None
    strides = c_strides(blob.whole, 1)
    if not is_c_order(blob.shape, strides, 1):
        return None
    at = sum(i * stride for i, stride in zip(blob.box.start, strides, strict=True))
    return blob.base.crop(Box((at,), (at + blob.box.size,)))
