"""Checkpoints that are published: equal to what `convert` writes, in folders and stores, again and again."""

import json
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import ckpt as library
from ckpt.chains.chain import Chain
from ckpt.publishing.publication import open_publication
from ckpt.publishing.retention import remove_unneeded
from ckpt.publishing.watch import publish_each
from ckpt.runs.new import SkippedCheckpoint
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.errors import LockedError, UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.stores.location import target_path
from ckpt_formats.universal.published.records import StepName
from ckpt_formats.universal.published.route import find_route, ref_of
from ckpt_formats.universal.published.steps import find_step, read_head, read_model, read_record_at
from damage import SAMPLES, ckpt
from object_stores import BUCKET, StoreServer, killing
from published_ranks import Ranks, model, publish, weights_at

TRAINER = SAMPLES / "transformers-5.23-trainer"
ZERO3 = SAMPLES / "deepspeed-0.19-zero3-bf16-dp4-tied-frozen"


def moved(checkpoint: Checkpoint, step: int) -> Checkpoint:
    """The checkpoint after so many further steps: of each, a few values of each weight change."""
    arrays = {}
    for name, parameter in checkpoint.items():
        if parameter.role != "extra" and parameter.weight.dtype.name in ("float32", "bfloat16"):
            values = read(parameter.weight).copy().reshape(-1)
            random = np.random.default_rng(step)
            values[random.integers(0, values.size, 1 + values.size // 50)] += values.dtype.type(0.25)
            arrays[name] = values.reshape(parameter.shape)
    return checkpoint.replace(arrays)


def tensors(checkpoint: Checkpoint) -> dict[str, tuple[object, ...]]:
    """All weights of a checkpoint."""
    return {
        name: (one.weight.dtype.name, one.shape, read(one.weight).tobytes())
        for name, one in checkpoint.items()
        if one.role != "extra"
    }


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of Megatron, whose tensors are fused and have other names."""
    folder = tmp_path_factory.mktemp("megatron") / "run"
    library.save(library.open(TRAINER), folder, library.Megatron(tp=2))
    return folder


@pytest.mark.parametrize("kind", ["hf", "megatron", "as-is"])
def test_published_steps_equal_what_convert_writes(kind: str, megatron: Path, tmp_path: Path) -> None:
    source = library.open({"hf": TRAINER, "megatron": megatron, "as-is": ZERO3}[kind])
    chain, names = tmp_path / "policy.chain", "as-is" if kind == "as-is" else "hf"
    for step in (10, 11, 12):
        state = source if step == 10 else moved(source, step)
        done = library.publish(state, chain, step=step, dtype="bf16", names=names)  # type: ignore[arg-type]
        assert (done.kind, done.epoch) == ("base" if step == 10 else "delta", 1)
        target = tmp_path / f"{step}"
        library.save(state.cast("bf16"), target, "safetensors" if kind == "as-is" else "hf")
        written, published = library.open(target), library.open(f"{chain}@{step}")
        assert tensors(published) == tensors(written)
        if kind != "as-is":
            followed = ckpt("follow", chain, tmp_path / "served", "--once")
            assert followed.code == 0, followed.err
            served = tmp_path / "served" / "current"
            for path in target.iterdir():
                assert (served / path.name).read_bytes() == path.read_bytes()
    assert 0 < done.changed < done.values
    with pytest.raises(UnsupportedError, match="another model"):
        library.publish(source, chain, step=13, dtype="fp16", names=names)  # type: ignore[arg-type]


def test_state_before_is_read_from_a_checkpoint_or_the_chain(tmp_path: Path) -> None:
    source, run = library.open(TRAINER), tmp_path / "a"
    first, second = moved(source, 1), moved(source, 2)
    records = []
    for name, before in (("a", None), ("b", first), ("c", source)):  # `source` has other values than step 1
        library.publish(first, tmp_path / name, step=1)
        library.publish(second, tmp_path / name, step=2, before=before)
        records.append(read_record_at(tmp_path / name, StepName(1, 2))[0].shares)
    assert records[0] == records[1] == records[2]
    objects = read_record_at(run, StepName(1, 2))[0].shares[0].object.key
    (run / objects).write_bytes(b"x" + (run / objects).read_bytes()[1:])
    third = library.publish(moved(source, 3), run, step=3)
    assert third.kind == "base"
    assert any("cannot be read" in str(notice) for notice in third.notices)
    assert tensors(library.open(run)) == tensors(moved(source, 3))


def test_publish_goes_on_after_the_ranks_of_a_live_run(tmp_path: Path) -> None:
    chain = tmp_path / "policy.chain"
    publish(chain, [1, 2])  # two ranks, each with rows or ranges of the tensors
    path = tmp_path / "state.safetensors"
    library.save(library.open(f"{chain}@2").replace(dict(weights_at(3))), path)
    done = library.publish(library.open(path), chain, step=3, names="as-is")
    assert (done.kind, done.changed) == ("delta", 333)
    assert len(read_record_at(chain, StepName(1, 3))[0].shares) == 2
    assert read(library.open(chain)["matrix"].weight).tobytes() == weights_at(3)["matrix"].tobytes()


def test_step_that_is_not_after_the_last_one(tmp_path: Path) -> None:
    source, chain = library.open(TRAINER), tmp_path / "policy.chain"
    for step in (5, 6):
        library.publish(moved(source, step), chain, step=step)
    again = library.publish(moved(source, 6), chain, step=6)
    assert (again.kind, again.stored_nbytes) == ("unchanged", 0)
    back = library.publish(moved(source, 5), chain, step=5)
    assert (back.kind, back.epoch) == ("base", 2)
    record, _ = read_record_at(chain, StepName(2, 5))
    assert record.continues is not None
    assert record.continues.name == StepName(1, 5)
    other = library.publish(moved(source, 99), chain, step=5)
    assert (other.kind, other.epoch) == ("base", 3)


def test_folds_lead_over_4_and_16_steps_and_a_delta_over_a_base(tmp_path: Path) -> None:
    chain, ranks = tmp_path / "policy.chain", Ranks(model())
    states = [weights_at(step) for step in range(18)]
    path = tmp_path / "state.safetensors"
    publish(chain, [0])
    for step in range(1, 18):
        library.save(library.open(f"{chain}@{step - 1}").replace(dict(states[step])), path)
        library.publish(library.open(path), chain, step=step, names="as-is")
        path.unlink()

    def keys(have: int | None) -> list[str]:
        """The records on the way to the last step."""
        head = read_head(chain)
        assert head is not None
        name = None if have is None else StepName(1, have)
        ref = None if name is None else ref_of(name, (chain / name.key).read_bytes())
        return [one.key for one in find_route(head, ref, lambda key: (chain / key).read_bytes(), chain).records]

    head = read_head(chain)
    assert head is not None
    assert head.folds == ((0, 4), (4, 8), (8, 12), (0, 16), (12, 16))
    assert keys(None) == [StepName(1, 0).key, StepName(1, 16).fold_key(0), StepName(1, 17).key]
    assert read(library.open(chain)["matrix"].weight).tobytes() == states[17]["matrix"].tobytes()
    matrix = np.random.default_rng(1).normal(size=(640, 512)).astype(states[0]["matrix"].dtype)
    large = {**states[17], "matrix": matrix}
    with open_publication(chain, ranks.model) as publication:
        assert publication.start(17, ranks.fill(states[17])).is_published
        ranks.accept()
        ranks.fill(large)
        ranks.commit(publication, 18)  # so large a delta that the next step is a base
        ranks.fill({**large, "vector": states[0]["vector"]})
        ranks.commit(publication, 19)
    head = read_head(chain)
    assert head is not None
    assert (head.base, head.folds[-1]) == (StepName(1, 19), (18, 19))
    assert keys(18) == [StepName(1, 19).fold_key(18)]
    assert keys(17) == keys(None) == [StepName(1, 19).key]  # the deltas take more than the base
    assert read(library.open(chain)["matrix"].weight).tobytes() == matrix.tobytes()


def test_retention_keeps_what_the_last_steps_need(tmp_path: Path) -> None:
    chain, source = tmp_path / "policy.chain", library.open(TRAINER)
    states = {step: moved(source, step % 3) for step in range(12)}  # objects of different steps are the same
    for step, state in states.items():
        library.publish(state, chain, step=step)
    assert len({read_record_at(chain, StepName(1, step))[0].shares[0].object for step in range(12)}) < 12
    leftover = chain / "published" / "objects" / ("0" * 32)
    leftover.write_bytes(b"of a step that was never published")
    before = len(list((chain / "published" / "objects").iterdir()))
    assert library.publish(states[0], chain, step=12, keep="last:3").removed == 0  # nothing is ten minutes old
    exported = read_record_at(chain, StepName(1, 12))[0].model
    with open_publication(chain, read_model(chain, exported)) as publication:
        assert remove_unneeded(publication, "last:3", grace=0.0) > 0
        assert remove_unneeded(publication, "last:3", grace=0.0) == 0
    assert not leftover.exists()
    assert len(list((chain / "published" / "objects").iterdir())) <= before
    head = read_head(chain)
    assert head is not None
    left = sorted(Chain(chain))
    assert left[-3:] == [10, 11, 12]
    assert read_record_at(chain, StepName(1, left[0]))[0].is_base
    for step in left:
        assert find_step(chain, head, step) is not None
        assert tensors(library.open(f"{chain}@{step}")) == tensors(states[step % 12])


def test_each_checkpoint_of_a_run_is_published_once_it_is_complete(tmp_path: Path) -> None:
    run, chain, stop = tmp_path / "run", tmp_path / "policy.chain", threading.Event()
    run.mkdir()
    source = library.open(TRAINER)
    library.publish(source, chain, step=2)
    for step in (2, 3):
        library.save(moved(source, step).weights_only(), run / f"checkpoint-{step}", "hf")
    published = publish_each(run, chain, every=0.1, stop=stop)
    assert _step(next(published)) == 3  # 2 was there, and is not after the last step
    library.save(moved(source, 4).weights_only(), run / "growing", "hf")
    whole = (run / "growing" / "model.safetensors").read_bytes()
    (run / "growing" / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    (run / "growing").rename(run / "checkpoint-4")
    damaged = next(published)
    assert isinstance(damaged, SkippedCheckpoint)
    assert damaged.path.name == "checkpoint-4"
    shutil.rmtree(run / "checkpoint-3")  # as a trainer that keeps few checkpoints: its values are in the chain
    (run / "checkpoint-4" / "model.safetensors").write_bytes(whole)
    assert _step(next(published)) == 4
    assert tensors(library.open(chain)) == tensors(moved(source, 4))
    library.save(moved(source, 33).weights_only(), run / "checkpoint-3", "hf")  # the run went back
    assert _step(next(published)) == 3
    head = read_head(chain)
    assert head is not None
    assert head.record.name == StepName(2, 3)
    stop.set()
    assert list(published) == []


def _step(one: object) -> int:
    assert isinstance(one, library.types.PublishedCheckpoint), one
    return one.step


def test_signed_chain_refuses_another_key(tmp_path: Path) -> None:
    chain, keys = tmp_path / "policy.chain", [tmp_path / name for name in ("a", "b")]
    for number, key in enumerate(keys):
        key.write_text(f"the secret of the tests, number {number}\n")
    arguments = ("publish", TRAINER, chain, "--step")
    assert ckpt(*arguments, 1, "--key", keys[0]).code == 0
    assert ckpt(*arguments, 2, "--key", keys[0]).code == 0
    wrong = ckpt(*arguments, 3, "--key", keys[1])
    assert wrong.code == 20
    assert "not signed with this key" in wrong.err
    (tmp_path / "short").write_text("short")
    assert ckpt(*arguments, 3, "--key", tmp_path / "short").code == 2


def test_second_publisher_ends_with_exit_code_11(tmp_path: Path) -> None:
    chain = tmp_path / "policy.chain"
    with open_publication(chain, model()):
        done = ckpt("publish", TRAINER, chain)
    assert done.code == 11
    assert "another process is publishing into this chain" in done.err


@pytest.mark.slow
def test_watch_ends_with_sigterm_after_what_it_published(tmp_path: Path) -> None:
    run, chain = tmp_path / "run", tmp_path / "policy.chain"
    run.mkdir()
    library.save(library.open(TRAINER).weights_only(), run / "checkpoint-7", "hf")
    command = [sys.executable, "-m", "ckpt_cli", "publish", run, chain, "--watch", "--every", "0.1", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["step"] == 7
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stdout.read() == b""
    assert list(Chain(chain)) == [7]


# In a store


def test_step_in_a_store_takes_a_request_of_each_rank_and_two_more(
    user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"s3://{BUCKET}/policy.chain"
    with killing(user) as killer, monkeypatch.context() as environment:
        environment.setenv("AWS_ENDPOINT_URL", killer.endpoint)
        ranks = Ranks(model())
        with open_publication(target_path(url), ranks.model) as publication:
            ranks.start(publication, 1)
            killer.expect()
            ranks.publish(publication, 2)
            seen = list(killer.seen)
            with pytest.raises(LockedError), open_publication(target_path(url), ranks.model):
                pass
    assert len(seen) == 2 + 2, seen  # the objects of two ranks, the record and the head
    assert all(one.startswith("PUT") for one in seen)
    state = library.open(f"{url}@2").replace({"vector": np.ones(33, np.float32)})
    library.save(state, tmp_path / "state.safetensors")
    done = library.publish(library.open(tmp_path / "state.safetensors"), url, step=3, names="as-is")
    assert (done.kind, done.changed) == ("delta", 33)
    assert tensors(library.open(url)) == tensors(state)
