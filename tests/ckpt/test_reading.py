"""`ckpt.Reading`: blocks of checkpoints of all kinds come into given memory, and what was read is verified."""

import os
import threading
import time
import tracemalloc
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt
from ckpt.reading import evidence as reading_evidence
from ckpt.reading.evidence import ReadEvidence
from ckpt.types import Tensor
from ckpt_formats.core import files
from ckpt_formats.core.evidence import Evidence
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.stores.object_store import ObjectStore
from ckpt_formats.universal.gradients import layout, replay
from ckpt_formats.universal.replay import StoredDelta
from damage import SAMPLES
from gradient_logs import small_log
from held import checkpoint, flip, parameter
from object_stores import StoreServer

Array = np.ndarray[Any, Any]

MiB = 1 << 20
TWO = ckpt.Resources(workers=2)
SOURCES = {
    "zero": SAMPLES / "deepspeed-0.19-zero3-bf16-dp4-tied-frozen",
    "dcp": SAMPLES / "dcp-2.13-fsdp2-w2-tp2-tied-frozen",
    "megatron": SAMPLES / "megatron-0.16-tp2-pp2-dist",
    "hf": SAMPLES / "transformers-5.23-trainer",
    "coded": SAMPLES / "universal-1-coded",
    "deltas": SAMPLES / "universal-1-delta",
    "log": SAMPLES / "recorded-1",
    "boxes": SAMPLES / "universal-2-boxes",
}
ZERO = SOURCES["zero"]


def fill(run: ckpt.Checkpoint, tensors: list[Tensor], resources: ckpt.Resources = TWO) -> list[Array]:
    """New arrays with the values of these tensors, read at once."""
    arrays = [np.zeros(tensor.shape, tensor.dtype) for tensor in tensors]
    with ckpt.Reading(run, resources=resources) as reading:
        reading.fill(zip(tensors, arrays, strict=True))
    return arrays


def halves(run: ckpt.Checkpoint) -> list[list[Tensor]]:
    """What each of two processes reads: its range of the elements of every state."""
    tensors = [tensor for _, _, tensor in run.tensors()]
    return [[t.flat[: t.size // 2] for t in tensors], [t.flat[t.size // 2 :] for t in tensors]]


# Values


def parts(tensor: Tensor) -> list[tuple[Tensor, Array]]:
    """Parts of a tensor, each with an array of its shape, some of them not contiguous."""
    some = [tensor, tensor.flat[tensor.size // 3 : tensor.size - tensor.size // 5]]
    if tensor.shape:
        some += [tensor.block[..., tensor.shape[-1] // 2 :], tensor.block[: tensor.shape[0] // 2 + 1]]
    pairs = [(part, np.zeros(part.shape, part.dtype)) for part in some]
    return [*pairs, (tensor, np.zeros(tensor.shape[::-1], tensor.dtype).T)]


def expected(tensor: Tensor) -> list[Array]:
    """The values of `parts`, from one read of all values."""
    values = np.asarray(tensor)
    wanted = [values, values.reshape(-1)[values.size // 3 : values.size - values.size // 5]]
    if tensor.shape:
        wanted += [values[..., tensor.shape[-1] // 2 :], values[: tensor.shape[0] // 2 + 1]]
    return [*wanted, values]


@pytest.mark.parametrize("path", SOURCES.values(), ids=SOURCES.keys())
def test_fill_reads_parts_of_all_states_into_given_memory(path: Path) -> None:
    run = ckpt.open(path)
    tensors = [tensor for _, _, tensor in run.tensors()]
    pairs = [pair for tensor in tensors for pair in parts(tensor)]
    with ckpt.Reading(run, resources=TWO) as reading:
        reading.fill(pairs)
        reading.verify()
    wanted = [values for tensor in tensors for values in expected(tensor)]
    for (part, array), values in zip(pairs, wanted, strict=True):
        assert array.tobytes() == values.tobytes(), part


def test_fill_rounds_floats_to_nearest_even_and_refuses_what_overflows() -> None:
    values = np.random.default_rng(0).standard_normal((700, 900)).astype(np.float32)
    values[0, :4] = [1 + 2**-8, 1 + 3 * 2**-8, np.inf, np.nan]
    run = checkpoint([parameter("w", {"master": values})])
    rounded, strided = np.empty(values.shape, ml_dtypes.bfloat16), np.empty(values.shape[::-1], np.float16).T
    with ckpt.Reading(run, resources=TWO) as reading:
        reading.fill([(run["w"].weight, rounded), (run["w"].weight, strided)])
        with np.errstate(invalid="ignore"):
            assert rounded.tobytes() == values.astype(ml_dtypes.bfloat16).tobytes()
            assert strided.tobytes() == values.astype(np.float16).tobytes()
        values[600, 5] = 3.4e38
        large = checkpoint([parameter("w", {"master": values})])["w"].weight
        for array in (rounded, strided):
            with pytest.raises(ckpt.UnsupportedError, match=f"1 of .* too large for {array.dtype.name}"):
                reading.fill([(large, array)])


def test_fill_writes_nothing_if_one_array_does_not_fit() -> None:
    run = ckpt.open(ZERO)
    tensor = run["head.weight"].states["exp_avg"]
    good, fixed = np.full(tensor.shape, 7, np.float32), np.zeros(tensor.shape, np.float32)
    fixed.flags.writeable = False
    wrong: list[tuple[Any, Any, str]] = [
        (tensor, np.zeros((3, 3), np.float32), "shape"),
        (tensor, fixed, "not writable"),
        (tensor, np.zeros(tensor.shape, np.int32), "float32 is not rounded to int32"),
        (run["head.weight"], good.copy(), "needs a Tensor"),
    ]
    with ckpt.Reading(run) as reading:
        for one, array, why in wrong:
            with pytest.raises(ckpt.InvalidArgumentError, match=f"block 1: .*{why}"):
                reading.fill([(tensor, good), (one, array)])
        hole = Tensor(tensor.shape, tensor.dtype, tensor.fragments[:1])
        with pytest.raises(ckpt.errors.IncompleteError, match="block 1: no file holds block"):
            reading.fill([(tensor, good), (hole, fixed.copy())])
        assert reading.nbytes == 0
    assert (good == 7).all()


def test_parts_are_indexed_by_slices_alone() -> None:
    weight = ckpt.open(ZERO)["head.weight"]
    for key in (3, np.s_[:, 1], np.s_[::2], None, "name", np.s_[:, :, :]):
        with pytest.raises(IndexError):
            weight.block[key]
    for flat in (3, np.s_[::2], np.s_[:, :], ...):
        if flat is not ...:
            with pytest.raises(IndexError):
                weight.flat[flat]  # type: ignore[index]
    assert weight.block[3:3].shape == (0, 32)
    assert weight.flat[-5:].shape == (5,)


def test_count_is_the_number_of_steps_wherever_it_is_stored() -> None:
    for name, wanted in {"zero": {5, None}, "megatron": {2}, "deltas": {16, None}}.items():  # buffers have none
        assert {one.count for one in ckpt.open(SOURCES[name]).values()} == wanted
    odd = [parameter("w", {"master": np.zeros(2, np.float32)}, step=step) for step in (-1, True, "5", float("nan"))]
    odd.append(parameter("w", {"master": np.zeros(2, np.float32), "step": np.array([np.inf], np.float32)}))
    for one in odd:
        with pytest.raises(ckpt.CorruptError, match="as its number of steps"):
            _ = one.count


def test_mapped_values_are_those_of_the_file_and_read_only(tmp_path: Path) -> None:
    values = np.arange(600, dtype=np.float32).reshape(20, 30)
    save_file({"w": values}, tmp_path / "a.safetensors")
    weight = ckpt.open(tmp_path / "a.safetensors")["w"]
    part = weight.mapped(np.s_[3:5, ::2])
    assert part is not None
    assert part.tobytes() == values[3:5, ::2].tobytes()
    assert not part.flags.writeable
    with (tmp_path / "a.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(7).tobytes())
    last = weight.mapped()
    assert last is not None
    assert last[-1, -1] == 7
    assert ckpt.open(SOURCES["coded"])["empty"].mapped() is None


@pytest.mark.parametrize("mmap", [False, True])
def test_weights_are_all_of_the_model_under_all_names(mmap: bool, tmp_path: Path) -> None:
    for path in (ZERO, SOURCES["coded"]):
        run = ckpt.open(path)
        with ckpt.Reading(run, resources=TWO) as reading:
            weights = reading.weights(mmap=mmap)
            reading.verify()
        assert weights.keys() == {*run, *run.aliases}
        for name, array in weights.items():
            assert array.tobytes() == np.asarray(run[name]).tobytes()
            assert array.flags.writeable
        assert all(weights[alias] is weights[name] for alias, name in run.aliases.items())
    path = tmp_path / "a.safetensors"
    save_file({"w": np.zeros(9, np.float32)}, path)
    run = ckpt.open(path)
    save_file({"w": np.ones(9, np.float32)}, path)
    with ckpt.Reading(run) as reading, pytest.raises(ckpt.CorruptError, match="changed or replaced"):
        reading.weights(mmap=mmap)


def test_mapping_a_large_model_reads_nothing(tmp_path: Path) -> None:
    """10 GB in 320 tensors, in 0.05 seconds of a processor at most."""
    nbytes = 1 << 25
    form = '"layers.{}":{{"dtype":"BF16","shape":[4096,4096],"data_offsets":[{},{}]}}'
    rows = [form.format(i, i * nbytes, (i + 1) * nbytes) for i in range(320)]
    header = ("{" + ",".join(rows) + "}").encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / "a.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + 320 * nbytes)
    seconds = []
    for _ in range(3):
        began = time.process_time()
        with ckpt.Reading(ckpt.open(tmp_path / "a.safetensors")) as reading:
            weights = reading.weights(mmap=True)
        seconds.append(time.process_time() - began)
        assert reading.nbytes == 0
    assert sum(array.nbytes for array in weights.values()) == 10 << 30
    assert min(seconds) < 0.05


# What is read


def test_all_ranks_read_each_byte_of_a_store_once(
    user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of whole rows and of flat ranges, from plain and from encoded values. Headers are few bytes beside these."""
    random = np.random.default_rng(0)
    weights = {f"w{i}": random.standard_normal((1024, 1024)).astype(np.float32) * 2**-i for i in range(5)}
    save_file(weights, tmp_path / "plain.safetensors")
    ckpt.save(ckpt.open(tmp_path / "plain.safetensors"), tmp_path / "coded", ckpt.Universal(codec="auto"))
    got, lock, get = list[int](), threading.Lock(), ObjectStore._range

    def counted(store: ObjectStore, key: str, offset: int, nbytes: int) -> memoryview:
        data = get(store, key, offset, nbytes)
        with lock:
            got.append(len(data))
        return data

    monkeypatch.setattr(ObjectStore, "_range", counted)
    for name in ("plain.safetensors", "coded"):
        run = ckpt.open(user.put(f"reading/{name}", tmp_path / name))
        stored = sum(file.nbytes for file in run.files)
        for rank in range(2):
            own = [run[name].block[512 * rank : 512 * (rank + 1)] for name in weights]
            own[0] = run["w0"].flat[rank << 19 : (rank + 1) << 19]
            got.clear()
            for name, array in zip(weights, fill(run, own), strict=True):
                half = weights[name].reshape(-1)[rank << 19 : (rank + 1) << 19]
                assert array.tobytes() == half.tobytes()
            assert 0.98 * stored / 2 < sum(got) < 1.02 * stored / 2, name


def test_copies_are_computed_from_masters_that_are_read(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    states = {"master": random.standard_normal((900, 700)).astype(np.float32)}
    states["model"] = states["master"].astype(ml_dtypes.bfloat16)
    source = checkpoint([parameter("w", states)])
    for name, codec in (("plain", None), ("coded", "auto")):
        ckpt.save(source, tmp_path / name, ckpt.Universal(codec=codec))
        weight = ckpt.open(tmp_path / name)["w"].states
        nbytes = []
        for wanted in (("master",), ("model", "master")):
            with ckpt.Reading(ckpt.open(tmp_path / name), resources=TWO) as reading:
                for part in (lambda one: one, lambda one: one.flat[1000:600_000]):
                    tensors = {state: part(weight[state]) for state in wanted}
                    arrays = {state: np.zeros(one.shape, one.dtype) for state, one in tensors.items()}
                    reading.fill((one, arrays[state]) for state, one in tensors.items())
                    for state, array in arrays.items():
                        assert array.tobytes() == part(weight[state])[...].tobytes()
                nbytes.append(reading.nbytes)
        assert nbytes[0] == nbytes[1]


def test_a_chunk_of_a_log_is_replayed_once_and_few_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (layout, replay):
        monkeypatch.setattr(module, "CHUNK", 1 << 14)
    monkeypatch.setattr(replay, "_MAX_CACHED", 1)  # four chunks
    monkeypatch.setattr(files, "_MAX_CACHED_BYTES", 1)  # one chunk of each thread
    log = small_log(steps=2, scale=40_000)
    log.write(tmp_path / "run.chain")
    replayed, again = Counter[tuple[int, int]](), replay.SegmentReplay._replay

    def counted(segment: Any, rank: int, index: int, reader: Any) -> Any:
        replayed[rank, index] += 1
        return again(segment, rank, index, reader)

    monkeypatch.setattr(replay.SegmentReplay, "_replay", counted)
    run = ckpt.open(f"{tmp_path}/run.chain@2")
    pairs, wanted = [], []
    for name, states in log.truth[2].items():
        for state, values in states.items():
            tensor = run[name].states[from_stored(state)]
            pairs += [(part, np.zeros(part.shape, part.dtype)) for part in (tensor, tensor.flat[1000:100_000])]
            wanted += [values, values.reshape(-1)[1000:100_000]]
            if values.ndim > 1:
                pairs.append((tensor.block[:, 1:], np.zeros_like(values[:, 1:])))
                wanted.append(values[:, 1:])
    tracemalloc.start()
    with ckpt.Reading(run, resources=TWO) as reading:
        reading.fill(pairs)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    for (_, array), values in zip(pairs, wanted, strict=True):
        assert array.tobytes() == values.tobytes()
    assert len(replayed) > 70
    assert set(replayed.values()) == {1}
    assert peak < 4 * MiB  # of 14


def test_a_chunk_of_a_delta_is_decoded_once_for_all_states_and_boxes(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, decoded = Counter[tuple[int, int]](), StoredDelta.decoded

    def counted(delta: StoredDelta, index: int, *rest: Any) -> Any:
        counts[id(delta), index] += 1
        return decoded(delta, index, *rest)

    monkeypatch.setattr(StoredDelta, "decoded", counted)
    monkeypatch.setattr(files, "_MAX_CACHED_BYTES", 1)  # one chunk
    for path in (f"{SOURCES['boxes']}@2", SOURCES["deltas"]):
        run = ckpt.open(path)
        # Flat ranges of columns are decoded once for each state where the array has further columns.
        tensors = [tensor for one, _, tensor in run.tensors() if one.name != "tp"]
        whole, parts = fill(run, tensors), fill(run, [tensor.flat[1:] for tensor in tensors if tensor.size])
        assert set(counts.values()) == {2}
        values = [np.asarray(tensor) for tensor in tensors]
        assert [one.tobytes() for one in whole] == [one.tobytes() for one in values]
        assert [one.tobytes() for one in parts] == [one.reshape(-1)[1:].tobytes() for one in values if one.size]
        counts.clear()


@pytest.mark.parametrize("kind", ["rounded", "derived", "replicas", "strided"])
def test_memory_does_not_grow_with_a_tensor(kind: str, tmp_path: Path) -> None:
    rows = 24 << 8
    header = f'{{"w":{{"dtype":"F32","shape":[{rows},4096],"data_offsets":[0,{rows << 14}]}}}}'.encode()
    for name in "ab":
        with (tmp_path / f"{name}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + (rows << 14))
    run, other = (ckpt.open(tmp_path / f"{name}.safetensors") for name in "ab")
    tensor, dtype = run["w"].weight, np.dtype(np.float32)
    if kind == "replicas":
        tensor = Tensor(tensor.shape, tensor.dtype, tensor.fragments, (other["w"].weight,))
    elif kind == "derived":
        tensor = run.cast("bf16")["w"].weight
    if kind in ("rounded", "derived"):
        dtype = np.dtype(ml_dtypes.bfloat16)
    array = np.ones(tensor.shape[::-1], dtype).T if kind == "strided" else np.ones(tensor.shape, dtype)
    tracemalloc.start()
    with ckpt.Reading(run, resources=TWO) as reading:
        reading.fill([(tensor, array)])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert not array.any()
    assert peak < 10 * MiB  # of 96


# What is verified


@pytest.mark.parametrize("name", ["zero", "dcp", "hf", "plain"])
def test_evidence_of_three_processes_finds_a_flipped_bit(name: str, tmp_path: Path) -> None:
    """In whichever part it is; no part alone has a whole range. Of `plain`, ranges are chunks with checksums."""
    path = tmp_path / "run"
    if name == "plain":
        values = np.random.default_rng(0).standard_normal((1000, 900)).astype(np.float32)
        ckpt.save(checkpoint([parameter("w", {"master": values})]), path)
    else:
        ckpt.copy(SOURCES[name], path)
    run = ckpt.open(path)
    tensor = max((one for _, _, one in run.tensors()), key=lambda one: one.size)
    owner = next(one.name for one, _, t in run.tensors() if t is tensor)
    read_in_thirds(run)
    for at in (3, tensor.size // 2, tensor.size - 3):
        (place,) = tensor.flat[at : at + 1].sources()
        flip(place.path, place.offset)
        with pytest.raises(ckpt.CorruptError, match=f"{owner}`.* do not fit") as caught:
            read_in_thirds(ckpt.open(path))
        assert caught.value.where == str(place.path)
        flip(place.path, place.offset)
    read_in_thirds(ckpt.open(path))


def read_in_thirds(run: ckpt.Checkpoint) -> None:
    """Read all states in three processes, and verify them in one, of which the second joins what the third has."""
    readings = [ckpt.Reading(run, resources=ckpt.Resources(workers=1)) for _ in range(3)]
    for number, reading in enumerate(readings):
        parts = [t.flat[t.size * number // 3 : t.size * (number + 1) // 3] for _, _, t in run.tensors()]
        with reading:
            reading.fill([(one, np.empty(one.shape, one.dtype)) for one in parts])
    first, second, third = readings
    before, evidence = first.nbytes, [second.evidence(), third.evidence()]
    joined = second.evidence(evidence[1:])
    result = first.verify(evidence)
    assert first.verify([joined]) == first.verify(iter([second.evidence([joined])])) == result
    assert result.seals > 0
    assert first.nbytes == before


def test_ranges_that_nobody_needs_stay_unread_and_are_named() -> None:
    """The embedding is one of several tensors in each rank's flat partition."""
    run = ckpt.open(ZERO)
    moment = run["head.weight"].states["exp_avg"]
    with ckpt.Reading(run) as reading:
        reading.fill([(moment, np.empty(moment.shape, moment.dtype))])
        part = reading.verify()
        assert reading.nbytes == moment.nbytes
    assert part.seals < part.seals + len(part.unverified) == reading.verify(rest=True).seals
    assert all("optim_states.pt: " in name for name in part.unverified)
    with ckpt.Reading(run, check=False) as unchecked:
        unchecked.fill([(moment, np.empty(moment.shape, moment.dtype))])
        assert unchecked.verify() == ckpt.types.Verification(0)


def test_a_file_that_was_replaced_is_noticed_here_and_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"w": np.arange(6, dtype=np.float32)}, path)
    run = ckpt.open(path)
    with ckpt.Reading(run) as reading:
        reading.fill([(run["w"].weight, np.empty(6, np.float32))])
        save_file({"w": np.arange(1, 7, dtype=np.float32)}, path)
        later = ckpt.open(path)
        with pytest.raises(ckpt.CorruptError, match="changed or replaced"):
            reading.verify()
    with ckpt.Reading(later) as other:
        other.fill([(later["w"].weight, np.empty(6, np.float32))])
        with pytest.raises(ckpt.CorruptError, match="another process read another file"):
            other.verify([reading.evidence()])


def changed(evidence: ReadEvidence, table: Array | None = None, covered: Array | None = None) -> bytes:
    checksums = evidence.checksums if table is None else Evidence(table.tobytes(), evidence.checksums.matched)
    return ReadEvidence(checksums, evidence.covered if covered is None else covered, evidence.files).to_bytes()


def test_bytes_that_are_no_evidence_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_evidence, "_MAX_NBYTES", 1 << 20)
    run = ckpt.open(ZERO)
    with ckpt.Reading(run) as reading, ckpt.Reading(run) as other:
        for one, tensors in zip((reading, other), halves(run), strict=True):
            one.fill([(part, np.empty(part.shape, part.dtype)) for part in tensors])
        good = other.evidence()
        evidence = ReadEvidence.from_bytes(good)
        assert changed(evidence) == good
        table, covered, head = evidence.checksums.table.copy(), evidence.covered.copy(), good[:12]
        table["seal"][0] ^= 1
        covered["stop"][0] = 1 << 60
        body = zlib.decompress(good[12:])
        wrong: list[Any] = [b"", None, "text", good[:50], good + b"x", body]
        wrong += [changed(evidence, table), changed(evidence, None, covered)]
        covered["start"][0] = 1 << 61
        wrong.append(changed(evidence, None, covered))
        others = (b"", body[:-1], body + b"x", b"\xff" * 8 + body[8:], bytes(1 << 21))
        wrong += [head + zlib.compress(one) for one in others]
        # But for the last bits before zlib's checksum, which mean nothing.
        wrong += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(0, len(good) - 8, 37)]
        for one in wrong:
            with pytest.raises(ckpt.InvalidArgumentError, match=r"evidence of a reading|a sequence of bytes, not"):
                reading.verify([one])
        foreign = ckpt.open(SOURCES["dcp"])
        with ckpt.Reading(foreign) as elsewhere, pytest.raises(ckpt.InvalidArgumentError, match="another checkpoint"):
            elsewhere.verify([good])
        assert reading.verify([good]).unverified == ()
