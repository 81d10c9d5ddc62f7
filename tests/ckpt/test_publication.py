"""Steps that one process commits for all ranks: starts, conflicts, kills, requests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckpt.publishing.publication import Publication, open_publication, put_object
from ckpt.publishing.rank_buffers import RankBuffers
from ckpt_formats.core.errors import CkptError, CorruptError, LockedError, OutputError, UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.stores.location import place_at
from ckpt_formats.universal.published.model import PublishedModel
from ckpt_formats.universal.published.records import HEAD, Head, RecordRef, StepName, StepRecord
from killing import killed, points, spread
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
        self.values = [RankBuffers(model, rank) for rank in range(len(model.pieces))]

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
        parent = None if publication.needs_base() else publication.parent
        shares = [values.encode(parent is None) for values in self.values]
        for one in shares:
            put_object(publication.place, one.share.object, one.object)
        ref = publication.commit(step, parent, [one.share for one in shares])
        self.accept()
        return ref

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


def assert_step(run: Path, step: int) -> None:
    opened = open_checkpoint(run)
    assert opened.origin.step == step
    for name, values in weights_at(step).items():
        assert read(opened[name].weight).tobytes() == values.tobytes()


def head_of(run: Path) -> Head:
    there = place_at(run).read(HEAD)
    assert there is not None
    return Head.from_bytes(there[0], run / HEAD)


def record_of(run: Path, name: StepName) -> StepRecord:
    there = place_at(run).read(name.key)
    assert there is not None
    return StepRecord.from_bytes(there[0], run / name.key)


def test_publication_goes_on_in_the_epoch_of_a_run_that_was_ended(tmp_path: Path) -> None:
    run = tmp_path / "policy.chain"
    publish(run, [10, 11, 12])
    assert_step(run, 12)
    assert [record_of(run, StepName(1, step)).is_base for step in (10, 11, 12)] == [True, False, False]
    publish(run, [12, 13])  # the state of step 12 is published: no base
    assert_step(run, 13)
    assert head_of(run).base == StepName(1, 10)
    publish(run, [20, 21])  # a later step: a base in the same epoch
    assert_step(run, 21)
    assert head_of(run).base == StepName(1, 20)


def test_publication_begins_an_epoch_when_a_run_goes_back(tmp_path: Path) -> None:
    run = tmp_path / "policy.chain"
    publish(run, [10, 11, 12])
    old = head_of(run).record
    publish(run, [11, 14])
    assert_step(run, 14)
    first = record_of(run, StepName(2, 11))
    assert first.is_base
    assert first.continues is not None
    assert first.continues.name == StepName(1, 11)
    ranks = Ranks(model())
    with open_publication(run, ranks.model) as publication:  # the same step with another state
        ranks.fill(weights_at(99))
        start = publication.start(14, [values.state() for values in ranks.values])
        assert (start.name, start.continues) == (StepName(3, 14), None)
    assert old.name == StepName(1, 12)


def test_publication_puts_a_base_when_the_deltas_exceed_half_of_it(tmp_path: Path) -> None:
    ranks, bases = Ranks(model()), list[bool]()
    with open_publication(tmp_path / "policy.chain", ranks.model) as publication:
        ranks.start(publication, 0)
        for step in range(1, 5):
            matrix = np.random.default_rng(step).normal(0, 0.02, (640, 512)).astype(ml_dtypes.bfloat16)
            ranks.fill({**weights_at(0), "matrix": matrix})  # all of it changes
            ranks.commit(publication, step)
            assert publication.record is not None
            bases.append(publication.record.is_base)
    assert bases == [False, True, False, True]


def test_publication_refuses_another_model_another_publisher_and_other_chains(tmp_path: Path) -> None:
    run = tmp_path / "policy.chain"
    publish(run, [1])
    other = model_of({"matrix": weights_at(0)["matrix"]}, RANKS)
    with open_publication(run, other) as publication:
        with pytest.raises(UnsupportedError, match="another model"):
            publication.start(2, ["", ""])
        with pytest.raises(LockedError), open_publication(run, model()):
            pass
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    with pytest.raises(OutputError, match="not a published chain"), open_publication(tmp_path / "full", model()):
        pass


def test_publication_stops_when_another_process_has_replaced_the_head(tmp_path: Path) -> None:
    run, ranks = tmp_path / "policy.chain", Ranks(model())
    with open_publication(run, ranks.model) as publication:
        ranks.start(publication, 1)
        (run / HEAD).write_bytes((run / HEAD).read_bytes())  # another version of the same bytes
        with pytest.raises(LockedError):
            ranks.publish(publication, 2)
        with pytest.raises(LockedError):
            ranks.publish(publication, 3)
    assert_step(run, 1)


def test_publication_that_is_killed_leaves_the_last_step_or_the_next_and_goes_on(tmp_path: Path) -> None:
    count = points(lambda: publish(tmp_path / "counted", [1, 2]), tmp_path / "counted")
    for point in spread(count, 12):
        run = tmp_path / f"{point}"
        assert killed(lambda run=run: publish(run, [1, 2]), run, point)  # type: ignore[misc]
        try:
            head: Head | None = head_of(run)
        except (AssertionError, CkptError):
            head = None
        if head is not None:
            assert_step(run, head.record.name.step)
        publish(run, [2, 3])
        assert_step(run, 3)
        assert head_of(run).record.name.epoch == 1


def test_values_are_brought_to_a_step_by_its_object(tmp_path: Path) -> None:
    one = model_of(weights_at(0))
    ranks, resumed = Ranks(one), RankBuffers(one, 0)
    for step in (0, 1, 2):
        ranks.fill(weights_at(step))
        encoded = ranks.values[0].encode(step == 0)
        assert (encoded.share.state, encoded.changed) == (ranks.values[0].state(), 0 if step == 0 else 333)
        ranks.accept()
        resumed.apply(encoded.object, encoded.share, step == 0, tmp_path)
        assert resumed.published_piece(0).tobytes() == weights_at(step)["matrix"].tobytes()
    damaged = bytearray(encoded.object)
    damaged[-1] ^= 1
    with pytest.raises(CorruptError):
        resumed.apply(damaged, encoded.share, False, tmp_path)
