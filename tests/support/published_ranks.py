"""Runs of several ranks in one process that publish states, by `ckpt.publishing`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from ckpt.publishing.folds import EncodedFold, FoldAnchors
from ckpt.publishing.publication import FoldShares, Publication, open_publication
from ckpt.publishing.published_objects import put_object
from ckpt.publishing.rank_buffers import RankBuffers
from ckpt_formats.stores.location import place_at
from ckpt_formats.universal.published.model import PublishedModel
from ckpt_formats.universal.published.records import HEAD, Head, RankShare, RecordRef, StepName, StepRecord
from published import model_of, values_of

Weights = dict[str, np.ndarray[Any, Any]]
RANKS = 2


def weights_at(step: int) -> Weights:
    """Weights of which each step changes a few: two chunks of bfloat16 in a matrix, and a vector of float32."""
    matrix = np.random.default_rng(0).normal(0, 0.02, (640, 512)).astype(ml_dtypes.bfloat16)
    for one in range(step):
        matrix.reshape(-1).view(np.uint16)[np.random.default_rng(one).integers(0, matrix.size, 300)] += 1
    return {"matrix": matrix, "vector": np.full(33, step, np.float32)}


class Ranks:
    """The ranks of a run in one process."""

    def __init__(self, model: PublishedModel) -> None:
        self.model = model
        ranks = range(len(model.pieces))
        self.values = [RankBuffers(model, rank) for rank in ranks]
        self.anchors = [FoldAnchors(self.values[rank], RankBuffers.nbytes_of(model, rank)) for rank in ranks]
        self.folds: list[list[EncodedFold]] = [[] for _ in ranks]
        """Those that end at the last step, by rank."""

    def fill(self, weights: Weights) -> list[str]:
        """Fill the next values; the states."""
        for rank, values in enumerate(self.values):
            for number, piece in enumerate(self.model.pieces[rank]):
                values.piece(number)[...] = values_of(piece, weights[self.model.tensors[piece.tensor].name])
        return [values.state() for values in self.values]

    def start(self, publication: Publication, step: int) -> None:
        """RunStart at a step, and publish it unless it is."""
        start = publication.start(step, self.fill(weights_at(step)))
        if start.is_published:
            self.accept()
        else:
            self.commit(publication, step)

    def publish(self, publication: Publication, step: int) -> RecordRef:
        self.fill(weights_at(step))
        return self.commit(publication, step)

    def commit(self, publication: Publication, step: int) -> RecordRef:
        """Publish the next values: as deltas if they can be, and as a base if there must be one."""
        is_base, parent = publication.needs_base(), publication.parent
        bases = self.put(publication, is_base=True) if is_base else None
        deltas = None if parent is None else self.put(publication, is_base=False)
        by_length: dict[int, list[EncodedFold]] = {}
        for one in (one for of_rank in self.folds for one in of_rank):
            put_object(publication.place, one.encoded.share.object, one.encoded.object)
            by_length.setdefault(one.length, []).append(one)
        folds = {
            length: FoldShares([one.encoded.share for one in of_ranks], [one.before for one in of_ranks])
            for length, of_ranks in by_length.items()
        }
        if bases is None:
            assert deltas is not None
            ref = publication.commit(step, parent, deltas, folds=folds)
        else:
            ref = publication.commit(step, None, bases, deltas, folds)
        self.accept()
        self.folds = [one.note_step(is_base) for one in self.anchors]
        return ref

    def put(self, publication: Publication, is_base: bool) -> list[RankShare]:
        """Store the next values, as bases or as deltas against the last ones that were accepted."""
        shares = [values.encode(is_base) for values in self.values]
        for one in shares:
            put_object(publication.place, one.share.object, one.object)
        return [one.share for one in shares]

    def accept(self) -> None:
        for values in self.values:
            values.accept()


def model() -> PublishedModel:
    return model_of(weights_at(0), RANKS)


def publish(run: Path, steps: Sequence[int]) -> None:
    """A process that starts at the first of these steps."""
    ranks = Ranks(model())
    with open_publication(run, ranks.model) as publication:
        ranks.start(publication, steps[0])
        for step in steps[1:]:
            ranks.publish(publication, step)


def head_of(run: Path) -> Head:
    there = place_at(run).read(HEAD)
    assert there is not None
    return Head.from_bytes(there[0], run / HEAD)


def record_of(run: Path, name: StepName) -> StepRecord:
    there = place_at(run).read(name.key)
    assert there is not None
    return StepRecord.from_bytes(there[0], run / name.key)
