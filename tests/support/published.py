"""Published chains with chosen steps: several ranks, blocks and ranges of tensors, folds, epochs."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_formats.core.geometry import Box
from ckpt_formats.universal.boxes.table import BoxPlace
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.published.model import PublishedModel, PublishedTensor, TensorPiece
from ckpt_formats.universal.published.records import HEAD, Head, ObjectRef, RankShare, RecordRef, StepName, StepRecord
from ckpt_formats.universal.published.route import ref_of
from ckpt_formats.universal.published.share import ShareHeader, digest_of, encode_chunk, share_bytes

Weights = Mapping[str, np.ndarray[Any, Any]]
TIME = "2026-01-01T00:00:00+00:00"


def model_of(weights: Weights, ranks: int = 1, files: Mapping[str, ObjectRef] | None = None) -> PublishedModel:
    """A model whose tensors are divided among ranks: in turn by rows, and by ranges of elements."""
    tensors = tuple(PublishedTensor(name, one.dtype, one.shape) for name, one in weights.items())
    pieces: list[list[TensorPiece]] = [[] for _ in range(ranks)]
    for number, tensor in enumerate(tensors):
        whole, size = Box.whole(tensor.shape), int(np.prod(tensor.shape))
        for rank in range(ranks):
            low, high = (rank * size // ranks, (rank + 1) * size // ranks)
            rows = tensor.shape[0] if tensor.shape else 0
            if ranks == 1:
                place = BoxPlace(tensor.shape, whole, 0, tensor.shape)
            elif rows % ranks == 0 and rows and number % 2 == 0:
                first, last = rank * rows // ranks, (rank + 1) * rows // ranks
                block = Box((first, *whole.start[1:]), (last, *whole.stop[1:]))
                place = BoxPlace(tensor.shape, block, 0, block.shape)
            elif high > low:
                place = BoxPlace(tensor.shape, whole, low, (high - low,))
            else:
                continue
            pieces[rank].append(TensorPiece(number, place))
    return PublishedModel(tensors, tuple(map(tuple, pieces)), files or {}, {})


class PublishedRun:
    """Publishes states, one after another, into a folder."""

    def __init__(
        self,
        run: Path,
        weights: Weights,
        ranks: int = 1,
        key: bytes | None = None,
        files: Mapping[str, bytes] | None = None,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.run, self.key, self.epoch = run, key, 1
        side = {name: self.put(data) for name, data in (files or {}).items()}
        self.model = replace(model_of(weights, ranks, side), aliases=aliases or {})
        self.model_ref = self.put(self.model.to_bytes())
        (run / chain_file.NAME).write_bytes(chain_file.dump(chain_file.ChainIndex((), is_published=True)))
        self.states: dict[StepName, Weights] = {}
        self.refs: dict[StepName, RecordRef] = {}
        self.folds: list[tuple[int, int]] = []
        self.base: StepName | None = None
        self.last: StepName | None = None

    def put(self, data: bytes) -> ObjectRef:
        ref = ObjectRef.of(data, self.key is not None)
        self.write(ref.key, data)
        return ref

    def write(self, key: str, data: bytes) -> None:
        path = self.run / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def publish(self, step: int, weights: Weights, base: bool = False, head: bool = True) -> StepRecord:
        """Publish a state: as a delta against the last one, or as a base."""
        name = StepName(self.epoch, step)
        parent = None if base or self.last is None or self.last.epoch != self.epoch else self.last
        before = None if parent is None else self.states[parent]
        ref = None if parent is None else self.refs[parent]
        continues = self.refs[self.last] if self.last is not None and self.last.epoch != self.epoch else None
        record = StepRecord(name, ref, self.model_ref, self.shares(before, weights), TIME, continues)
        data = record.to_bytes(self.key)
        self.write(name.key, data)
        self.states[name], self.refs[name], self.last = weights, ref_of(name, data), name
        if parent is None:
            self.base, self.folds = name, []
        if head:
            self.write_head()
        return record

    def fold(self, first: int, last: int, head: bool = True) -> StepRecord:
        """Publish the steps after `first` up to `last` as one delta."""
        before, after = StepName(self.epoch, first), StepName(self.epoch, last)
        shares = self.shares(self.states[before], self.states[after])
        record = StepRecord(after, self.refs[before], self.model_ref, shares, TIME, same_as=self.refs[after])
        self.write(record.key, record.to_bytes(self.key))
        self.folds = sorted([*self.folds, (first, last)], key=lambda fold: fold[1])
        if head:
            self.write_head()
        return record

    def write_head(self) -> None:
        assert self.last is not None
        assert self.base is not None
        self.write(HEAD, Head(self.refs[self.last], self.base, tuple(self.folds)).to_bytes(self.key))

    def shares(self, before: Weights | None, after: Weights) -> tuple[RankShare, ...]:
        return tuple(self._share(rank, before, after) for rank in range(len(self.model.pieces)))

    def _share(self, rank: int, before: Weights | None, after: Weights) -> RankShare:
        chunks, digests = list[bytes](), list[bytes]()
        for piece in self.model.pieces[rank]:
            name = self.model.tensors[piece.tensor].name
            new = values_of(piece, after[name])
            old = None if before is None else values_of(piece, before[name])
            for index in range(piece.chunking.count):
                at = slice(*piece.chunking.range(index))
                chunks.append(encode_chunk(None if old is None else old[at], new[at]))
                digests.append(digest_of(new[at]))
        header = ShareHeader(np.array([len(one) for one in chunks], np.int64), b"".join(digests))
        return RankShare(self.put(share_bytes(chunks, digests)), header.state)


def values_of(piece: TensorPiece, whole: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The elements of a piece, in its order."""
    place = piece.place
    block = np.ascontiguousarray(whole[place.block.index]).reshape(-1)
    return block[place.first : place.first + place.size]
