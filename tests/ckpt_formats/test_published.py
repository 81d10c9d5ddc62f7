"""Published chains: steps of several ranks as checkpoints, and files from strangers."""

import json
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import xxhash

from ckpt.chains.chain import Chain
from ckpt.chains.compact import Retention
from ckpt.chains.verify import verify_chain
from ckpt.copying.copy import Copy
from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.containers import sealed_json
from ckpt_formats.core.errors import CkptError, CorruptError, NotFoundError, UnsupportedError
from ckpt_formats.core.tensor import read
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.published.records import HEAD, Head, StepName, StepRecord
from ckpt_formats.universal.published.route import find_route
from ckpt_formats.universal.published.steps import read_head
from damage import SAMPLES
from page_codecs import decode_delta
from published import PublishedRun, Weights
from published_reader import PublishedReader

CONFIG = {"model_type": "unknown", "hidden_size": 8}
STEPS = range(10, 20)


def weights_at(step: int) -> Weights:
    """Weights of which each step changes a few: two chunks of bfloat16, a float32, a scalar, an empty tensor."""
    random = np.random.default_rng(0)
    large = random.normal(0, 0.02, (640, 512)).astype(ml_dtypes.bfloat16)
    for one in range(step):
        large.reshape(-1).view(np.uint16)[np.random.default_rng(one).integers(0, large.size, 300)] += 1
    return {
        "model.embed_tokens.weight": large,
        "model.norm.weight": np.float32(random.normal(size=33)) + np.float32(step),
        "scale": np.array(step, np.float32),
        "empty": np.zeros((0, 4), np.float16),
        "bias": random.normal(size=(4, 5)).astype(np.float16),
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> PublishedRun:
    """Ten steps of three ranks, with another base and two folds, then an epoch that begins at an earlier step."""
    folder = tmp_path_factory.mktemp("published") / "policy.chain"
    run = PublishedRun(
        folder, weights_at(10), ranks=3, files={"config.json": json.dumps(CONFIG).encode(), "note.txt": b"x"}
    )
    for step in STEPS:
        run.publish(step, weights_at(step), base=step == 12)
        if step in (16, 18):
            run.fold(step - 4, step)
    return run


def assert_equal(path: Path, weights: Weights) -> None:
    opened = open_checkpoint(path)
    assert list(opened) == list(weights)
    for name, values in weights.items():
        state = read(opened[name].weight)
        assert (state.dtype, state.shape) == (values.dtype, values.shape)
        assert state.tobytes() == values.tobytes()


@pytest.mark.parametrize("step", STEPS)
def test_published_steps_are_read_bit_for_bit(run: PublishedRun, step: int) -> None:
    assert_equal(Path(f"{run.run}@{step}"), weights_at(step))


def test_reader_of_the_page_has_the_same_bits(run: PublishedRun) -> None:
    reader = PublishedReader(run.run, decode_delta)
    ways = [reader.last(), reader.last(with_folds=True)]
    assert [len(way) for way in ways] == [8, 5]
    for way in ways:
        expected = {name: values.tobytes() for name, values in weights_at(19).items()}
        assert reader.tensors(way) == expected


def test_golden_published_chain_has_every_bit_by_this_program_and_by_the_page() -> None:
    expected = json.loads((SAMPLES / "published-1.expected.json").read_text())
    run = SAMPLES / "published-1.chain"
    assert list(map(str, Chain(run))) == list(expected)
    for step, hashes in expected.items():
        opened = open_checkpoint(Path(f"{run}@{step}"))
        assert hashes == {name: xxhash.xxh3_128_hexdigest(read(one.weight).tobytes()) for name, one in opened.items()}
    reader = PublishedReader(run, decode_delta)
    assert (reader.head["epoch"], reader.head["step"]) == (2, 6)
    for name, data in reader.tensors(reader.last()).items():
        assert xxhash.xxh3_128_hexdigest(data) == expected["6"][name]
    for name, data in reader.tensors(reader.way_to(1, 4, None)).items():
        assert xxhash.xxh3_128_hexdigest(data) == expected["4"][name]


def test_published_chain_opens_at_the_last_step(run: PublishedRun) -> None:
    assert_equal(run.run, weights_at(STEPS[-1]))
    assert list(Chain(run.run)) == list(STEPS)
    assert open_checkpoint(run.run).extras["hf/config.json"] == CONFIG


def test_saved_step_equals_the_weights_and_the_source_verifies(run: PublishedRun, tmp_path: Path) -> None:
    opened = open_checkpoint(Path(f"{run.run}@17"))
    assert find_problems(opened, Execution(1)) == []
    save(opened, tmp_path / "out", writable("universal"))
    assert_equal(tmp_path / "out", weights_at(17))


def test_route_takes_folds_from_where_the_follower_is(run: PublishedRun) -> None:
    head = read_head(run.run)
    assert head is not None

    def route(have: int | None, to: int) -> list[str]:
        reads: list[str] = []

        def record(key: str) -> bytes:
            reads.append(key)
            return (run.run / key).read_bytes()

        ref = None if have is None else run.refs[StepName(1, have)]
        result = find_route(head, ref, record, run.run, run.refs[StepName(1, to)])
        assert len(reads) == len(set(reads))
        names = (one.key.rpartition("/")[2].removesuffix(".json") for one in result.records)
        return [name.removeprefix("e0001-").lstrip("0") for name in names]

    assert route(18, 19) == ["19"]
    assert route(14, 19) == ["14-0000000018", "19"]
    assert route(12, 16) == ["12-0000000016"]
    assert route(13, 17) == ["14", "15", "16", "17"]
    assert route(None, 18) == ["12", "13", "14", "14-0000000018"]
    assert route(19, 19) == []
    assert route(11, 13) == ["12", "13"]  # the base comes first


def test_rewound_run_shows_the_new_epoch_and_refuses_unknown_steps(tmp_path: Path) -> None:
    run = PublishedRun(tmp_path / "r.chain", weights_at(1))
    run.publish(1, weights_at(1))
    run.publish(2, weights_at(2))
    run.epoch = 2
    record = run.publish(2, weights_at(7))
    assert record.continues == run.refs[StepName(1, 2)]
    assert_equal(Path(f"{run.run}@2"), weights_at(7))
    assert_equal(Path(f"{run.run}@1"), weights_at(1))
    with pytest.raises(NotFoundError, match="no step 3"):
        open_checkpoint(Path(f"{run.run}@3"))


def test_record_beyond_the_head_is_not_published(tmp_path: Path) -> None:
    run = PublishedRun(tmp_path / "r.chain", weights_at(1))
    run.publish(1, weights_at(1))
    run.publish(2, weights_at(2), head=False)
    assert_equal(run.run, weights_at(1))
    assert list(Chain(run.run)) == [1]


def test_chain_without_a_head_says_that_nothing_is_published(tmp_path: Path) -> None:
    run = PublishedRun(tmp_path / "r.chain", weights_at(1))
    with pytest.raises(NotFoundError, match="no step is published yet"):
        open_checkpoint(run.run)
    assert Chain(run.run).last is None


@pytest.mark.parametrize("every", [1, 7])
def test_published_chain_with_a_flipped_bit_is_refused(tmp_path: Path, every: int) -> None:
    run = PublishedRun(tmp_path / "r.chain", weights_at(1), ranks=2)
    for step in (1, 2, 3):
        run.publish(step, weights_at(step))
    expected = weights_at(3)
    for number, path in enumerate(sorted(path for path in run.run.rglob("*") if path.is_file())):
        whole = path.read_bytes()
        at = (number * 7919 * every) % len(whole)
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << number % 8]) + whole[at + 1 :])
        with pytest.raises(CkptError):
            save(open_checkpoint(run.run), tmp_path / f"out-{number}", writable("universal"))
        assert not (tmp_path / f"out-{number}").exists()
        path.write_bytes(whole)
    assert_equal(run.run, expected)


def _forged(run: PublishedRun, change: Callable[[dict[str, object]], None], key: str) -> None:
    fields = sealed_json.load(run.run / key, 1 << 20, "it")
    fields.pop("checksum")
    change(fields)
    (run.run / key).write_bytes(sealed_json.dump(fields))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda fields: fields.update(version=2), UnsupportedError, "version 2"),
        (lambda fields: fields.update(step=-1), CorruptError, "step"),
        (lambda fields: fields.update(step=10**19), CorruptError, "step"),
        (lambda fields: fields.update(base=10**6), CorruptError, "after the last step"),
        (lambda fields: fields.update(folds=[[2, 1]]), CorruptError, "folds"),
        (lambda fields: fields.update(folds=[[0, 1]] * 65), CorruptError, "folds: their number"),
        (lambda fields: fields.update(record="../../etc/passwd"), CorruptError, "not a hash"),
        (lambda fields: fields.update(record="0" * 32), CorruptError, "not the record"),
    ],
)
def test_forged_heads_are_refused(
    tmp_path: Path, change: Callable[[dict[str, object]], None], error: type[CkptError], message: str
) -> None:
    run = PublishedRun(tmp_path / "r.chain", {"w": np.zeros(4, np.float32)})
    run.publish(1, {"w": np.ones(4, np.float32)})
    _forged(run, change, HEAD)
    with pytest.raises(error, match=message):
        open_checkpoint(run.run)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda fields: fields["ranks"].pop(), "elements"),
        (lambda fields: fields["ranks"][1][0].__setitem__(2, [10**9, 4]), "within its tensor"),
        (lambda fields: fields["tensors"][0].__setitem__(2, [10**12, 10**12]), "the shape of"),
        (lambda fields: fields["tensors"][0].__setitem__(1, "float7"), "float7"),
        (lambda fields: fields["ranks"][0].append(fields["ranks"][0][0]), "elements"),
        (lambda fields: fields["files"].update({"../x": ["0" * 32, 1]}), "not the name of a file"),
        (lambda fields: fields["aliases"].update(a="b"), "aliases"),
    ],
)
def test_forged_models_are_refused(tmp_path: Path, change: Callable[[dict[str, object]], None], message: str) -> None:
    weights = {"w": np.ones((8, 4), np.float32)}
    run = PublishedRun(tmp_path / "r.chain", weights, ranks=2)
    _forged(run, change, run.model_ref.key)
    run.model_ref = run.put((run.run / run.model_ref.key).read_bytes())
    run.publish(1, weights)
    with pytest.raises(CkptError, match=message):
        open_checkpoint(run.run)


def test_signed_records_need_the_key(tmp_path: Path) -> None:
    run = PublishedRun(tmp_path / "r.chain", {"w": np.ones(4, np.float32)}, key=b"secret")
    record = run.publish(1, {"w": np.ones(4, np.float32)})
    data, where = (run.run / record.key).read_bytes(), run.run / record.key
    assert StepRecord.from_bytes(data, where, b"secret") == StepRecord.from_bytes(data, where) == record
    assert record.shares[0].object.sha256 is not None
    for wrong, key in ((data, b"other"), (record.to_bytes(), b"secret"), (data.replace(b"e", b"f", 1), b"secret")):
        with pytest.raises(CorruptError, match="not signed"):
            StepRecord.from_bytes(wrong, where, key)
    head = (run.run / HEAD).read_bytes()
    assert Head.from_bytes(head, run.run / HEAD, b"secret").record.name == record.name


def test_verify_names_the_steps_that_damage_makes_unreadable(run: PublishedRun, tmp_path: Path) -> None:
    copied = tmp_path / "copy.chain"
    Copy(run.run, copied).run()
    assert {one.relative_to(copied) for one in copied.rglob("*") if one.is_file()} == {
        one.relative_to(run.run) for one in run.run.rglob("*") if one.is_file()
    }
    result = verify_chain(copied, Execution(1))
    assert (result.findings, result.bad_steps, result.steps) == ((), (), tuple(STEPS))
    record = StepRecord.from_bytes((copied / StepName(1, 15).key).read_bytes(), copied)
    (copied / record.shares[0].object.key).unlink()
    # The fold from 14 to 18 leads past the step that is lost; 16 is reached by the fold from 12.
    assert verify_chain(copied, Execution(1)).bad_steps == (15,)
    assert_equal(Path(f"{copied}@16"), weights_at(16))
    with pytest.raises(CkptError):
        save(open_checkpoint(Path(f"{copied}@15")), tmp_path / "out", writable("universal"))


def test_append_and_compact_refuse_a_published_chain(run: PublishedRun, tmp_path: Path) -> None:
    before = {one: one.read_bytes() for one in run.run.rglob("*") if one.is_file()}
    chain = Chain(run.run)
    with pytest.raises(UnsupportedError, match="publishes its weights"):
        chain.append(chain[12], step=30)
    with pytest.raises(UnsupportedError, match="publishes its weights"):
        chain.compact(Retention(("last:1",)))
    assert before == {one: one.read_bytes() for one in run.run.rglob("*") if one.is_file() and one.name != "chain.lock"}
