"""Followers of a published chain: the bits of every step, by deltas, folds and bases, and nothing of a damaged one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import obstore
import pytest

from ckpt import Follower
from ckpt.following import source
from ckpt.serving.server import ChainServer
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    InvalidArgumentError,
    NoMatchError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.core.geometry import Box
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.universal.boxes.table import BoxPlace
from ckpt_formats.universal.published.model import PublishedModel, PublishedTensor, TensorPiece
from ckpt_formats.universal.published.records import HEAD, ObjectRef, StepName, StepRecord
from ckpt_formats.universal.published.route import ref_of
from followed_weights import FILES, bytes_of, bytes_of_torch, flip, objects_of, publish, weights_at
from object_stores import BUCKET, StoreServer
from published import PublishedRun


@pytest.fixture
def run(tmp_path: Path) -> PublishedRun:
    """Steps 1 to 3 of two ranks; step 1 is a base."""
    run = PublishedRun(tmp_path / "policy.chain", weights_at(1), ranks=2, files=FILES)
    publish(run, range(1, 4))
    return run


def follower_of(run: PublishedRun, **options: Any) -> Follower:
    return Follower(run.run, patience=0.0, **options)


def is_at(follower: Follower, run: PublishedRun, step: int) -> bool:
    """Whether a follower holds the bits of a step of the run's epoch, under its name and hash."""
    assert follower.step is not None
    weights, tensors = run.states[StepName(run.epoch, step)], follower.tensors()
    equal = {name: values.tobytes() for name, values in tensors.items()} == bytes_of(weights)
    return equal and (follower.step.epoch, follower.step.step) == (run.epoch, step)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_followers_hold_the_bits_of_each_step_and_epoch(tmp_path: Path, ranks: int) -> None:
    run = PublishedRun(tmp_path / "policy.chain", weights_at(1), ranks=ranks, files=FILES)
    with follower_of(run) as each, follower_of(run) as behind:
        assert each.wait(timeout=0.0) is None
        for step in range(1, 13):
            run.publish(step, weights_at(step), base=step == 8)
            if step in (5, 12):
                run.fold(step - 4, step)
            seen = each.wait(timeout=1.0)
            assert seen is not None
            assert seen.is_base is (step in (1, 8))
            assert each.update(seen) == seen
            assert is_at(each, run, step)
            assert each.wait(timeout=0.0) is None
            if step in (1, 5, 12):
                behind.update()
                assert is_at(behind, run, step)
        run.epoch += 1
        publish(run, range(6, 9), branch=1)
        seen = behind.wait(after=12, timeout=0.0)
        assert seen is not None
        assert (seen.epoch, seen.step) == (2, 8)
        for follower in (each, behind):
            follower.update()
            assert is_at(follower, run, 8)
        assert each.update(6).continues == (1, 12)
        assert is_at(each, run, 6)
        assert each.files() == FILES
    with follower_of(run) as late:
        late.update()
        assert is_at(late, run, 8)


def test_changes_are_exactly_the_values_that_differ(run: PublishedRun) -> None:
    with follower_of(run) as follower:
        weights = {one.name: one.values.copy() for one in follower.iter_changes(2) if one.is_whole}
        follower.confirm(2)
        assert bytes_of(weights) == bytes_of(run.states[StepName(1, 2)])
        changes = {one.name: one for one in follower.iter_changes(3)}
        after = run.states[StepName(1, 3)]
        assert changes.keys() == {"embed.weight", "norm.weight", "scale"}
        for name, one in changes.items():
            flat = weights[name].reshape(-1)
            assert one.indices is not None
            assert one.shape == after[name].shape
            assert (flat[one.indices] != one.values).any() or name == "norm.weight"
            flat[one.indices] = one.values
        assert changes["embed.weight"].bits.dtype == np.uint16
        assert len(changes["embed.weight"].values) <= 300
        assert bytes_of(weights) == bytes_of(after)


def test_changes_are_whole_again_after_an_iteration_that_was_not_confirmed(run: PublishedRun) -> None:
    with follower_of(run) as follower:
        list(follower.iter_changes(1))
        follower.confirm()
        first = [one.name for one in follower.iter_changes(2)]
        assert [one.name for one in follower.iter_changes(2)] == first
        assert all(one.is_whole for one in follower.iter_changes(3))
        with pytest.raises(InvalidArgumentError, match="step 2 cannot be confirmed"):
            follower.confirm(2)
        follower.confirm(3)
        assert is_at(follower, run, 3)


def test_changes_are_whole_for_a_caller_that_did_not_get_the_step_before(run: PublishedRun) -> None:
    arrays = {name: np.zeros_like(values) for name, values in weights_at(1).items()}
    with follower_of(run) as follower:
        list(follower.iter_changes(1))
        follower.confirm()
        follower.apply_to(arrays, 2)
        assert all(one.is_whole for one in follower.iter_changes(3))
        follower.confirm()
        arrays["head.weight"][0, 0] = 7
        run.publish(4, weights_at(4))
        follower.apply_to(arrays)  # these do not have step 3
        assert bytes_of(arrays) == bytes_of(weights_at(4))


def test_tensors_of_the_caller_are_brought_forward_in_place(run: PublishedRun) -> None:
    torch = pytest.importorskip("torch")
    arrays = {name: np.zeros_like(values) for name, values in weights_at(1).items()}
    tensors = {name: torch.zeros(one.shape, dtype=getattr(torch, one.dtype.name)) for name, one in arrays.items()}
    with follower_of(run) as one, follower_of(run) as other:
        for step in (1, 2, 3):
            one.apply_to(arrays, step)
            other.apply_to(tensors, step)
            expected = bytes_of(weights_at(step))
            assert bytes_of(arrays) == expected
            assert {name: bytes_of_torch(values) for name, values in tensors.items()} == expected
        # What nobody changes is not written: so it is known that only changes are.
        arrays["head.weight"][0, 0] = 7
        run.publish(4, weights_at(4))
        one.apply_to(arrays)
        assert arrays["head.weight"][0, 0] == 7
        # What a step changes is compared first.
        arrays["scale"][...] = 99
        run.publish(5, weights_at(5))
        one.apply_to(arrays)
        assert bytes_of(arrays) == bytes_of(weights_at(5))


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], type[CkptError]]] = {
    "missing": (lambda arrays: arrays.pop("scale"), NoMatchError),
    "unknown": (lambda arrays: arrays.update(other=arrays["scale"]), NoMatchError),
    "shape": (lambda arrays: arrays.update(scale=np.zeros(1)), InvalidArgumentError),
    "dtype": (lambda arrays: arrays.update(scale=np.zeros((), np.int64)), InvalidArgumentError),
    "strides": (lambda arrays: arrays.update({"head.weight": np.zeros((5, 6), np.float16).T}), InvalidArgumentError),
    "read-only": (lambda arrays: arrays["scale"].setflags(write=False), InvalidArgumentError),
    "no tensor": (lambda arrays: arrays.update(scale=0.0), InvalidArgumentError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_fit_are_refused_before_any_is_written(run: PublishedRun, case: str) -> None:
    arrays = {name: np.zeros_like(values) for name, values in weights_at(1).items()}
    change, error = REFUSED[case]
    change(arrays)
    with follower_of(run) as follower, pytest.raises(error):
        follower.apply_to(arrays)
    assert not any(np.count_nonzero(values) for values in arrays.values())


def test_tensors_on_another_device_or_in_shared_memory_are_refused(run: PublishedRun) -> None:
    torch = pytest.importorskip("torch")
    arrays: dict[str, Any] = {name: np.zeros_like(values) for name, values in weights_at(1).items()}
    with follower_of(run) as follower:
        with pytest.raises(UnsupportedError, match="on the device meta"):
            follower.apply_to({**arrays, "scale": torch.zeros((), dtype=torch.float64, device="meta")})
        run.model = PublishedModel(run.model.tensors, run.model.pieces, run.model.files, {"tied": "head.weight"})
        run.model_ref = run.put(run.model.to_bytes())
        run.publish(4, weights_at(4), base=True)
        tied = {**arrays, "tied": np.zeros((6, 5), np.float16)}
        follower.apply_to(tied)
        assert bytes_of(tied) == bytes_of({**weights_at(4), "tied": weights_at(4)["head.weight"]})
        memory = np.zeros(60, np.float16)
        with pytest.raises(InvalidArgumentError, match="shares memory"):
            follower.apply_to({**arrays, "head.weight": memory[:30].reshape(6, 5), "tied": memory[10:40].reshape(6, 5)})


def test_fold_or_base_replaces_what_is_missing(run: PublishedRun) -> None:
    with follower_of(run) as follower:
        follower.update()
        publish(run, range(4, 9))
        run.fold(3, 7)
        for path in objects_of(run, 3, 7):
            path.unlink()
        follower.update()  # step by step: the fold has no objects
        assert is_at(follower, run, 8)
        run.publish(9, weights_at(9))
        run.publish(10, weights_at(10), base=True)
        publish(run, range(11, 13))
        for path in [*objects_of(run, None, 9), *objects_of(run, None, 11)]:
            path.unlink()
        follower.update(10)
        assert is_at(follower, run, 10)
        with pytest.raises(IncompleteError, match="an object of step 11 is missing"):
            follower.update()
        assert is_at(follower, run, 10)


@pytest.mark.parametrize("place", ["magic", "digest", "chunk"])
def test_damaged_object_is_found_and_the_state_stays(run: PublishedRun, place: str) -> None:
    with follower_of(run) as follower:
        follower.update(2)
        for path in objects_of(run, None, 3):
            flip(path, {"magic": 0, "digest": 40, "chunk": -1}[place])
        with pytest.raises(CorruptError, match="it was damaged"):
            follower.update()
        assert is_at(follower, run, 2)


Fields = dict[str, Any]
FORGED: dict[str, tuple[Callable[[PublishedRun, StepRecord], Fields], type[CkptError]]] = {
    "swapped": (lambda run, good: {"shares": good.shares[::-1]}, CorruptError),
    "twice": (lambda run, good: {"shares": good.shares[:1] * 2}, CorruptError),
    "a rank is missing": (lambda run, good: {"shares": good.shares[:1]}, CorruptError),
    "large": (lambda run, good: with_object(good, nbytes=1 << 40), UnsafeError),
    "empty": (lambda run, good: with_object(good, nbytes=0), CorruptError),
    "chunk": (lambda run, good: with_object(good, **vars(run.put(damaged_chunk(run, good)))), CorruptError),
    "no model": (lambda run, good: {"model": ObjectRef("0" * 32, 10)}, IncompleteError),
    "no model of this size": (lambda run, good: {"model": ObjectRef("0" * 32, 1 << 40)}, UnsafeError),
    "a model with gaps": (lambda run, good: {"model": run.put(run.model.to_bytes()[:-2])}, CorruptError),
    "another model": (lambda run, good: {"model": run.put(run.model.with_files({}).to_bytes())}, CorruptError),
    "time": (lambda run, good: {"time": "yesterday"}, CorruptError),
}


def with_object(record: StepRecord, **fields: Any) -> Fields:
    first, *others = record.shares
    return {"shares": (replace(first, object=replace(first.object, **fields)), *others)}


def damaged_chunk(run: PublishedRun, record: StepRecord) -> bytes:
    """The object of rank 0 with a wrong bit in its last chunk, which may decode to something."""
    data = bytearray((run.run / record.shares[0].object.key).read_bytes())
    data[-1] ^= 1
    return bytes(data)


@pytest.mark.parametrize("case", FORGED)
def test_forged_record_is_refused_and_the_state_stays(run: PublishedRun, case: str) -> None:
    fields, error = FORGED[case]
    with follower_of(run) as follower, follower_of(run) as late:
        follower.update()
        good = run.publish(4, weights_at(4), head=False)
        data = replace(good, **fields(run, good)).to_bytes()
        run.write(good.key, data)
        run.refs[good.name] = ref_of(good.name, data)
        run.write_head()
        for one in (follower, late):
            with pytest.raises(error):
                one.update()
        assert late.step is None
        assert is_at(follower, run, 3)


@pytest.mark.parametrize("key", [HEAD, StepName(1, 4).key])
def test_head_or_record_that_is_no_json_is_refused_and_the_state_stays(run: PublishedRun, key: str) -> None:
    with follower_of(run) as follower:
        follower.update()
        run.publish(4, weights_at(4))
        run.write(key, b"{}")
        with pytest.raises(CorruptError):
            follower.update()
        assert is_at(follower, run, 3)


def test_steps_are_followed_from_a_bucket_and_from_a_web_server(
    run: PublishedRun, user: StoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def upload() -> None:
        for path in run.run.rglob("*"):
            if path.is_file():
                obstore.put(user.client, f"policy.chain/{path.relative_to(run.run)}", path.read_bytes())

    monkeypatch.setattr(source, "MAX_IN_MEMORY", 1000)  # objects are put into files first
    monkeypatch.setattr(source, "_BLOCK", 4096)
    server = ChainServer(run.run, NetworkAddress("127.0.0.1", 0))
    try:
        upload()
        urls = (f"s3://{BUCKET}/policy.chain", server.url)
        with Follower(urls[0], patience=0.0) as one, Follower(urls[1], patience=0.0) as other:
            for step in (3, 4, 5):
                if step > 3:
                    run.publish(step, weights_at(step))
                    upload()
                for follower in (one, other):
                    assert follower.wait(timeout=120) is not None
                    follower.update()
                    assert is_at(follower, run, step)
            run.publish(6, weights_at(6), base=True)
            for path in objects_of(run, None, 6):
                path.unlink()
            upload()
            for follower, url in ((one, urls[0]), (other, urls[1])):
                with pytest.raises(IncompleteError, match="an object of step 6 is missing") as caught:
                    follower.update()
                assert str(caught.value.where).startswith(url)
                assert is_at(follower, run, 5)
            run.write(HEAD, b"{}")
            with pytest.raises(CorruptError) as caught:
                other.update()
            assert str(caught.value.where).startswith(urls[1])
    finally:
        server.close()


def test_stale_head_has_no_effect_and_two_records_of_a_step_are_refused(run: PublishedRun) -> None:
    stale = (run.run / HEAD).read_bytes()
    with follower_of(run) as follower:
        run.publish(4, weights_at(4))
        follower.update()
        run.write(HEAD, stale)
        assert follower.wait(timeout=0.0) is None
        assert follower.update().step == 4
        run.publish(4, weights_at(5))
        with pytest.raises(CorruptError, match="two records of one step"):
            follower.update()
        assert is_at(follower, run, 4) is False  # the run's own state is the other one
        assert follower.step is not None
        assert follower.step.step == 4


def test_signed_chain_needs_its_key(tmp_path: Path) -> None:
    run = PublishedRun(tmp_path / "policy.chain", weights_at(1), ranks=2, key=b"secret", files=FILES)
    publish(run, range(1, 3))
    with follower_of(run, key=b"secret") as follower, follower_of(run, key=b"other") as stranger:
        follower.update()
        assert is_at(follower, run, 2)
        with pytest.raises(CorruptError, match="not signed with this key"):
            stranger.update()
        run.key = b"other"
        run.publish(3, weights_at(3))
        with pytest.raises(CorruptError, match="not signed with this key"):
            follower.update()
        assert follower.files() == FILES


def test_other_model_is_refused_before_any_weights(run: PublishedRun, tmp_path: Path) -> None:
    with follower_of(run) as follower, follower_of(run, accept_other_model=True) as other:
        follower.update()
        other.update()
        weights = {**weights_at(5), "scale": np.zeros(3)}
        wider = PublishedRun(tmp_path / "policy.chain", weights, files=FILES)
        wider.epoch = 2
        record = wider.publish(1, weights)
        other.update()
        assert is_at(other, wider, 1)
        (run.run / record.shares[0].object.key).unlink()
        with pytest.raises(UnsupportedError, match="publishes another model now"):
            follower.update()
        assert is_at(follower, run, 3)


def test_model_that_no_memory_can_have_is_refused(run: PublishedRun) -> None:
    tensors = (PublishedTensor("huge", np.dtype(np.uint8), (1 << 50,)),)
    pieces = ((TensorPiece(0, BoxPlace((1 << 50,), Box.whole((1 << 50,)), 0, (1 << 50,))),), ())
    run.model_ref = run.put(PublishedModel(tensors, pieces, {}, {}).to_bytes())
    run.publish(4, weights_at(4), base=True)
    with follower_of(run) as follower, pytest.raises(UnsafeError, match="this machine has"):
        follower.update()


def test_follower_says_that_nothing_is_published_or_that_it_is_closed(tmp_path: Path, run: PublishedRun) -> None:
    with Follower(tmp_path) as follower:
        with pytest.raises(NotFoundError, match="nothing is published here yet"):
            follower.update()
        with pytest.raises(InvalidArgumentError, match="cannot be confirmed"):
            follower.confirm()
    with follower_of(run) as follower, pytest.raises(NotFoundError, match="step 9 of epoch 1 is not published"):
        follower.update(9)
    with pytest.raises(InvalidArgumentError, match="closed"):
        follower.update()
