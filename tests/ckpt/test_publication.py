"""Steps that one process commits for all ranks: starts, conflicts, kills, requests."""

import errno
import itertools
import os
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ckpt.publishing.folds import FoldAnchors
from ckpt.publishing.publication import last_step, open_publication
from ckpt.publishing.published_objects import put_object
from ckpt.publishing.rank_buffers import RankBuffers
from ckpt.publishing.retention import remove_unneeded
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    InvalidArgumentError,
    LockedError,
    OutputError,
    UnsupportedError,
)
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.place import Version
from ckpt_formats.core.tensor import read
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.published.records import HEAD, Head, StepName
from ckpt_formats.universal.published.route import find_route
from killing import killed, points, spread
from published import PublishedRun, model_of
from published_ranks import RANKS, Ranks, head_of, model, publish, record_of, weights_at


def assert_step(run: Path, step: int) -> None:
    opened = open_checkpoint(run)
    assert opened.origin.step == step
    for name, values in weights_at(step).items():
        assert read(opened[name].weight).tobytes() == values.tobytes()


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


@pytest.mark.slow
def test_publication_begins_an_epoch_beside_records_that_do_not_follow(tmp_path: Path) -> None:
    run = tmp_path / "policy.chain"
    publish(run, [1])
    head = (run / HEAD).read_bytes()
    publish(run, [1, 2, 3])
    (run / HEAD).write_bytes(head)
    (run / StepName(1, 2).key).unlink()  # the record of step 3 was put, and is never published
    publish(run, [1, 3])
    assert_step(run, 3)
    assert head_of(run).record.name == StepName(2, 3)
    first = record_of(run, StepName(2, 1))
    assert first.continues is not None
    assert first.continues.name == StepName(1, 1)
    publish(run, [3, 4])
    assert head_of(run).record.name == StepName(2, 4)


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


@pytest.fixture
def lost_answers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of heads, of those that are put from now on, whose put is carried out and seems to fail."""
    put, numbers, count = FolderPlace.replace, list[int](), itertools.count()

    def replaced(place: FolderPlace, key: str, data: bytes, version: Version | None) -> Version:
        new = put(place, key, data, version)
        if key == HEAD.rpartition("/")[2] and next(count) in numbers:
            raise OSError(errno.EIO, "no answer")
        return new

    monkeypatch.setattr(FolderPlace, "replace", replaced)
    return numbers


@pytest.mark.slow
def test_base_after_a_lost_answer_is_no_delta_for_who_has_the_step_before(
    tmp_path: Path, lost_answers: list[int]
) -> None:
    run, ranks, behind = tmp_path / "policy.chain", Ranks(model()), Ranks(model())
    lost_answers.append(1)
    with open_publication(run, ranks.model) as publication:
        ranks.start(publication, 1)
        with pytest.raises(OutputError):
            ranks.publish(publication, 2)
        have = head_of(run).record
        assert have.name == StepName(1, 2)
        ranks.fill(weights_at(3))
        bases, deltas = (ranks.put(publication, is_base=one) for one in (True, False))
        publication.commit(3, None, bases, deltas)  # as far as the ranks know, the last step is the first one
    behind.fill(weights_at(2))
    behind.accept()
    for record in find_route(head_of(run), have, lambda key: (run / key).read_bytes(), run).records:
        for rank, share in enumerate(record.shares):
            data = (run / share.object.key).read_bytes()
            behind.values[rank].apply(bytearray(data), share, record.is_base, tmp_path)
    assert behind.values[0].published_piece(0).tobytes() == ranks.values[0].piece(0).tobytes()


@pytest.mark.slow
def test_fold_whose_answer_is_lost_counts_as_no_step(tmp_path: Path, lost_answers: list[int]) -> None:
    run, ranks = tmp_path / "policy.chain", Ranks(model())
    lost_answers.append(5)
    with open_publication(run, ranks.model) as publication:
        ranks.start(publication, 0)
        for step in range(1, 5):
            ranks.publish(publication, step)
        (parent,) = publication.due_folds()
        folds = [one.encoded for of_rank in ranks.folds for one in of_rank]
        for one in folds:
            put_object(publication.place, one.share.object, one.object)
        with pytest.raises(OutputError):
            publication.add_fold(parent, [one.share for one in folds])
        for step in range(5, 9):
            ranks.folds = [[] for _ in ranks.folds]
            ranks.publish(publication, step)
        assert head_of(run).folds == ((0, 4),)
        assert [one.name.step for one in publication.due_folds()] == [4]


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


def test_ranks_store_folds_that_the_next_head_names(tmp_path: Path) -> None:
    run = tmp_path / "policy.chain"
    publish(run, range(18))
    assert head_of(run).folds == ((0, 4), (4, 8), (8, 12), (0, 16), (12, 16))
    route = find_route(head_of(run), None, lambda key: (run / key).read_bytes(), run)
    assert [record.key for record in route.records[1:]] == [StepName(1, 16).fold_key(0), StepName(1, 17).key]
    assert_step(run, 17)


def test_follower_that_is_64_steps_behind_reads_eight_objects_at_most(tmp_path: Path) -> None:
    one = {"vector": np.zeros(8, np.float32)}
    run = PublishedRun(tmp_path, one)
    values = RankBuffers(run.model, 0)
    anchors = FoldAnchors(values, RankBuffers.nbytes_of(run.model, 0))
    for step in range(113):
        one = {"vector": np.full(8, step, np.float32)}
        run.publish(step, one, head=False)
        values.piece(0)[...] = one["vector"]
        values.accept()
        for fold in anchors.note_step(is_base=step == 0):
            record = run.fold(step - fold.length, step, head=False)
            assert record.shares[0].object == fold.encoded.share.object
            assert record.shares[0].state == fold.encoded.share.state
    run.write_head()

    def records(first: int, last: int) -> int:
        have, target = (run.refs[StepName(1, step)] for step in (first, last))
        route = find_route(head_of(tmp_path), have, lambda key: (tmp_path / key).read_bytes(), tmp_path, target)
        return len(route.records)

    counts = {first: records(first, first + 64) for first in range(33, 49)}
    assert counts == {first: 2 if first % 16 == 0 else 5 if first % 4 == 0 else 8 for first in counts}


def test_values_are_brought_to_a_step_by_its_object(tmp_path: Path) -> None:
    one = model_of(weights_at(0))
    ranks, resumed = Ranks(one), RankBuffers(one, 0)
    for step in (0, 1, 2):
        ranks.fill(weights_at(step))
        encoded = ranks.values[0].encode(step == 0)
        assert encoded.share.state == ranks.values[0].state()
        assert step == 0 or ranks.values[0].count_changes() == 333
        ranks.accept()
        resumed.apply(encoded.object, encoded.share, step == 0, tmp_path)
        assert resumed.published_piece(0).tobytes() == weights_at(step)["matrix"].tobytes()
    damaged = bytearray(encoded.object)
    damaged[-1] ^= 1
    with pytest.raises(CorruptError):
        resumed.apply(damaged, encoded.share, False, tmp_path)


def test_fold_that_does_not_lead_from_the_published_states_is_refused(tmp_path: Path) -> None:
    run, ranks = tmp_path / "policy.chain", Ranks(model())
    with open_publication(run, ranks.model) as publication:
        ranks.start(publication, 0)
        for step in range(1, 5):
            ranks.publish(publication, step)
        ranks.folds[1] = [replace(one, before="0" * 32) for one in ranks.folds[1]]
        assert len(ranks.folds[1]) == 1
        with pytest.raises(InvalidArgumentError, match="does not lead from the state"):
            ranks.publish(publication, 5)
        ranks.folds = [[] for _ in ranks.folds]
        ranks.publish(publication, 6)
    assert_step(run, 6)
    assert head_of(run).folds == ()


def test_leftovers_of_killed_steps_are_removed_although_all_steps_stay(tmp_path: Path) -> None:
    run, ranks = tmp_path / "policy.chain", Ranks(model())
    with open_publication(run, ranks.model) as publication:
        ranks.start(publication, 0)
        for step in (1, 2):
            ranks.publish(publication, step)
        assert remove_unneeded(publication, "last:9", grace=0.0) == 0
        files = sorted(run.rglob("*"))
        (run / "published" / "objects" / ("0" * 32)).write_bytes(b"of a step that was never published")
        assert remove_unneeded(publication, "last:9", grace=0.0) == 1
    assert sorted(run.rglob("*")) == files


@pytest.mark.slow
def test_retention_counts_steps_that_can_be_restored_in_all_epochs(tmp_path: Path) -> None:
    run = tmp_path / "policy.chain"
    for step in (1, 2, 3, 4):
        publish(run, [step])  # a base
    head = (run / HEAD).read_bytes()
    publish(run, [4, 5, 7])
    (run / HEAD).write_bytes(head)
    (run / StepName(1, 5).key).unlink()  # the record of step 7 was put, and is never published
    publish(run, [4, 6])
    assert head_of(run).record.name == StepName(2, 6)
    with open_publication(run, model()) as publication:
        assert remove_unneeded(publication, "last:3", grace=0.0) > 0
    names = {path.stem for path in (run / "published" / "steps").iterdir()}
    assert names == {str(StepName(*name)) for name in ((1, 3), (1, 4), (1, 7), (2, 4), (2, 6))}
    assert open_checkpoint(tmp_path / "policy.chain@3").origin.step == 3
    assert_step(run, 6)


def test_retention_counts_no_record_after_the_head(tmp_path: Path) -> None:
    """Readers list none, though a killed process has put all objects of the step, too."""
    run = tmp_path / "policy.chain"
    for step in (1, 2, 3):
        publish(run, [step])  # a base
    head = (run / HEAD).read_bytes()
    publish(run, [9])
    record = (run / StepName(1, 9).key).read_bytes()
    (run / StepName(1, 9).key).unlink()
    (run / HEAD).write_bytes(head)
    with open_publication(run, model()) as publication:
        (run / StepName(1, 9).key).write_bytes(record)
        remove_unneeded(publication, "last:2", grace=0.0)
    names = {path.stem for path in (run / "published" / "steps").iterdir()}
    assert names == {str(StepName(1, step)) for step in (2, 3, 9)}


@pytest.mark.slow
@pytest.mark.parametrize("grace", [0.0, 600.0])
def test_retention_follows_the_parents_of_steps_past_a_base_that_was_never_published(
    grace: float, tmp_path: Path
) -> None:
    """Also if that base is the last step that is old enough, and what the later steps need is older."""
    run, ranks = tmp_path / "policy.chain", Ranks(model())
    with open_publication(run, ranks.model) as publication:
        ranks.start(publication, 1)
        head = (run / HEAD).read_bytes()
        ranks.publish(publication, 2)
    publish(run, [3])  # a base
    record = (run / StepName(1, 3).key).read_bytes()
    (run / StepName(1, 3).key).unlink()
    (run / HEAD).write_bytes(head)
    with open_publication(run, ranks.model) as publication:  # step 2 follows the head
        ranks.start(publication, 2)
        (run / StepName(1, 3).key).write_bytes(record)  # its head was refused, and the run went on
        for path in (path for kind in ("steps", "objects") for path in (run / "published" / kind).iterdir()):
            os.utime(path, (1e9, 1e9))
        ranks.publish(publication, 4)
        remove_unneeded(publication, "last:1", grace=grace)
    assert_step(run, 4)


@pytest.mark.slow
def test_retention_ends_although_a_record_is_that_of_another_step_and_forgets_what_it_removed(tmp_path: Path) -> None:
    """With such a record, the way to a base would be a circle."""
    run, ranks = tmp_path / "policy.chain", Ranks(model())
    with open_publication(run, ranks.model) as publication:
        ranks.start(publication, 1)
        for step in (2, 3, 4):
            ranks.publish(publication, step)
    whole = (run / StepName(1, 2).key).read_bytes()
    (run / StepName(1, 2).key).write_bytes((run / StepName(1, 4).key).read_bytes())
    with open_publication(run, ranks.model) as publication:
        with pytest.raises(CorruptError, match="another step"):
            remove_unneeded(publication, "last:1", grace=0.0)
        (run / StepName(1, 2).key).write_bytes(whole)
    publish(run, [9])  # a base
    with open_publication(run, ranks.model) as publication:
        assert remove_unneeded(publication, "last:1", grace=0.0) > 0
        with pytest.raises(CorruptError, match="missing"):
            publication.record_at(StepName(1, 4).key)


def test_model_is_read_up_to_its_own_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A description may be larger than what places read unless they are told how much."""
    read, run = FolderPlace.read, tmp_path / "policy.chain"
    monkeypatch.setattr(FolderPlace, "read", lambda place, key, max_nbytes=200: read(place, key, max_nbytes))
    publish(run, [0, 1])
    publish(run, [2])
    assert_step(run, 2)
    last = last_step(run)
    assert last is not None
    assert last.record.model.nbytes > 200
