"""Coded states: every bit comes back, from any block, and no damaged one passes."""

import json
import math
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st

from ckpt import sizes as savings
from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Resources
from ckpt_codecs import candidate_codecs
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.chunking import DEFAULT_ELEMENTS, Chunking
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.encoding import LEVELS
from ckpt_formats.core.errors import CkptError, Corrupt, Unsupported
from ckpt_formats.core.files import Reader, verify_seals
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import Array, DerivedBlob, FileBlob, Tensor, read
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chunked import EncodedBlob
from ckpt_formats.universal.encode_state import CodecChoice, write_coded
from damage import SAMPLES, content_id
from held import STORABLE, array, bits, boxes, checkpoint, contents, everything, flip, folder, parameter, tensor

EFFORT = Resources(2, 1 << 22)
F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]
REAL = sorted(p for p in SAMPLES.iterdir() if p.is_dir() and p.name not in ("damaged",))


def compress(source: Checkpoint, target: Path, **encoding: Any) -> Checkpoint:
    save(source, target, Universal(**{"codec": "auto", **encoding}), EFFORT)
    return Universal().read(target, ReadOptions())


def decompress(source: Checkpoint, target: Path) -> Path:
    save(source, target, Universal(), EFFORT)
    return target


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def blob(source: Checkpoint, name: str, state: str) -> Any:
    return source.parameters[name].states[state].fragments[0].blob


def trained(shape: tuple[int, ...] = (600, 1000), seed: int = 0) -> Parameter:
    """What training leaves, about: a master, its copy, and moments that go together."""
    random = np.random.default_rng(seed)
    second = (random.standard_normal(shape) * 1e-4 * np.exp(random.standard_normal(shape[-1]))).astype(F32) ** 2
    first = (np.sqrt(second) * random.standard_normal(shape)).astype(F32)
    master = (random.standard_normal(shape) * 0.02).astype(F32)
    states = {"fp32": master, "param": master.astype(BF16), "exp_avg": first, "exp_avg_sq": second}
    return parameter("w", states, step=3)


# Exactness


@pytest.mark.parametrize("level", LEVELS)
def test_everything_comes_back(level: str, tmp_path: Path) -> None:
    source = checkpoint([*everything().parameters.values(), trained()], extras={"epoch": 2})
    made = compress(source, tmp_path / "small", level=level)
    assert contents(made) == contents(source)
    assert [f.kind for f in find_problems(made, EFFORT) if f.kind != "copy"] == []
    save(source, tmp_path / "plain", Universal(), EFFORT)
    assert files(decompress(made, tmp_path / "again")) == files(tmp_path / "plain")


@pytest.mark.quick(4)
@pytest.mark.parametrize("sample", REAL, ids=lambda path: path.name)
def test_real_checkpoints_come_back(sample: Path, tmp_path: Path) -> None:
    source = open_checkpoint(sample)
    made = compress(source, tmp_path / "small")
    save(source, tmp_path / "plain", Universal(), EFFORT)
    assert files(decompress(made, tmp_path / "again")) == files(tmp_path / "plain")
    assert (
        manifest.load(tmp_path / "small" / manifest.NAME).content
        == manifest.load(tmp_path / "plain" / manifest.NAME).content
    )


@pytest.mark.quick(20)
@pytest.mark.parametrize("dtype", STORABLE, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(DEFAULT_ELEMENTS + 5,), (600, 700), (3, 100_003), (7, 3, 3, 9001)], ids=str)
def test_tensors_of_several_chunks_come_back(dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Random bits, which no codec makes smaller, beside values of which any codec makes something."""
    random = array(dtype, shape)
    few = np.resize(array(dtype, (7,)), shape)
    source = checkpoint([parameter("w", {"exp_avg": random, "exp_avg_sq": few, "param": few})])
    made = compress(source, tmp_path / "small")
    assert contents(made) == contents(source)
    assert isinstance(blob(made, "w", "param"), EncodedBlob)
    assert savings.total(savings.rows(made)).stored < savings.total(savings.rows(source)).raw


@pytest.mark.parametrize("level", LEVELS)
def test_what_training_leaves_becomes_smaller(level: str, tmp_path: Path) -> None:
    made = compress(checkpoint([trained()]), tmp_path / "small", level=level)
    found = {row.state: row for row in savings.rows(made)}
    assert isinstance(blob(made, "w", "param"), DerivedBlob)
    assert found["param"].stored == 0
    assert all(found[state].ratio > 1.15 for state in ("fp32", "exp_avg", "exp_avg_sq"))
    assert savings.total(found.values()).ratio > 1.36


def test_a_copy_that_differs_in_one_bit_is_stored(tmp_path: Path) -> None:
    one = trained()
    values = read(one.states["param"])
    values[599, 999] = 1
    source = checkpoint([Parameter("w", "parameter", {**one.states, "param": tensor(values)})])
    made = compress(source, tmp_path / "small")
    assert isinstance(blob(made, "w", "param"), EncodedBlob)
    assert contents(made) == contents(source)
    assert [finding.kind for finding in find_problems(made, EFFORT)] == ["copy"]


def test_values_that_coding_does_not_help_are_stored_as_they_are(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    one = np.float32(3).reshape(())
    made = compress(checkpoint([parameter("w", {"param": noise, "step": one})]), tmp_path / "small")
    assert isinstance(blob(made, "w", "param"), FileBlob)
    assert isinstance(blob(made, "w", "step"), FileBlob)
    assert json.loads((tmp_path / "small" / manifest.NAME).read_text())["version"] == 1


def test_the_version_is_1_with_and_without_coded_states(tmp_path: Path) -> None:
    coded = compress(checkpoint([trained()]), tmp_path / "small")
    decompress(coded, tmp_path / "plain")
    for name in ("small", "plain"):
        assert json.loads((tmp_path / name / manifest.NAME).read_text())["version"] == 1
        for path in (tmp_path / name).rglob("*.safetensors"):
            with safetensors.safe_open(path, "pt") as opened:
                assert opened.metadata()["ckpt"] == "universal 1"


def test_the_file_is_safetensors_in_which_coded_states_are_bytes(tmp_path: Path) -> None:
    made = compress(checkpoint([trained(), *everything().parameters.values()]), tmp_path / "small")
    for name, found in made.parameters.items():
        path = next(raw.path for t in found.states.values() for raw in t.sources())
        with safetensors.safe_open(path, "pt") as opened:
            assert opened.metadata()["parameter"] == name
            for state in opened.keys():  # noqa: SIM118
                one = found.states[state].fragments[0].blob
                expected = (str(one.dtype), one.shape) if isinstance(one, FileBlob) else ("uint8", (one.store.nbytes,))
                values = opened.get_tensor(state)
                assert (str(values.dtype)[6:], tuple(values.shape)) == expected


def test_workers_memory_and_checks_do_not_show_in_the_files(tmp_path: Path) -> None:
    source = checkpoint([trained(), trained((300, 1000), 1)][:1] + list(everything().parameters.values()))
    for i, (effort, check) in enumerate([(Resources(1, 1 << 30), True), (Resources(3, 1), False)]):
        save(source, tmp_path / str(i), Universal(codec="auto", check=check), effort)
    assert files(tmp_path / "0") == files(tmp_path / "1")


# Chunks


@given(st.lists(st.integers(0, 40_000), max_size=4).map(tuple))
def test_chunks_are_whole_rows_or_runs_and_cover_a_tensor(shape: tuple[int, ...]) -> None:
    chunking = Chunking.default(shape)
    chunk = chunking.chunk
    assert 0 < math.prod(chunk) <= DEFAULT_ELEMENTS
    size, count = math.prod(shape), chunking.count
    assert (count - 1) * math.prod(chunk) < size <= count * math.prod(chunk) or count == size == 0
    if len(chunk) == 2 and size:
        assert size % chunk[1] == 0
        assert any(math.prod(shape[axis:]) == chunk[1] for axis in range(1, len(shape)))


@st.composite
def coded(draw: st.DrawFn, at: Path) -> tuple[Tensor, Array]:
    """A tensor in chunks of a few elements, and what it holds."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
    dtype = draw(st.sampled_from([F32, BF16, DTYPES["int16"], DTYPES["bool"]]))
    values, base = array(dtype, shape, 1), array(dtype, shape, 2)
    width = draw(st.sampled_from([math.prod(shape[axis:]) for axis in range(len(shape) + 1)]))
    chunk = (draw(st.integers(1, 4)), width) if draw(st.booleans()) else (draw(st.integers(1, 20)),)
    one = parameter("w", {"param": values, "exp_avg_sq": base})
    codec = candidate_codecs("parameter", "param", dtype)[0]
    with Reader() as reader, (at / "states").open("wb", buffering=0) as out:
        out.write(b"before")
        state = write_coded(out, one, "param", CodecChoice(codec, chunk, None), True, Transfer(reader), None)
        out.write(b"behind")
    file = {"parameters/a.safetensors": state}
    entry = manifest.ParameterEntry("w", "parameter", next(iter(file)), 0, "", {"param": state})
    from ckpt_formats.universal import read_states as stored_states

    return stored_states.read_states(at / "states", entry)["param"], values


@given(st.data())
def test_any_block_of_any_tensor_in_any_chunks_is_what_it_was(data: st.DataObject) -> None:
    with folder() as at, Reader() as reader:
        whole, values = data.draw(coded(at))
        for _ in range(3):
            box = data.draw(boxes(values.shape))
            assert bits(read(whole.crop(box), reader)) == bits(np.ascontiguousarray(values[box.index]))
            inner = data.draw(boxes(box.shape))
            found = read(whole.crop(box).crop(inner), reader)
            assert bits(found) == bits(np.ascontiguousarray(values[box.index][inner.index]))


@given(st.data())
def test_whoever_reads_all_chunks_in_order_has_seen_every_sealed_byte(data: st.DataObject) -> None:
    with folder() as at:
        whole, values = data.draw(coded(at))
        (raw,) = whole.sources()
        with Reader() as reader:
            for _ in Transfer(reader, 16).slabs(whole):
                pass
            (evidence,) = reader.evidence()
        assert (evidence.start, evidence.stop, evidence.digest) == (0, raw.seal.nbytes, raw.seal.digest)
        assert values.size


class Counting(Reader):
    """A reader that counts."""

    taken = 0

    def read_into(self, path: Path, offset: int, out: memoryview, seal: Any = None) -> None:
        self.taken += len(out)
        super().read_into(path, offset, out, seal)


def test_a_block_takes_the_bytes_of_its_chunks_and_no_others(tmp_path: Path) -> None:
    one = trained((2400, 1000))
    made = compress(checkpoint([one]), tmp_path / "small")
    values, store = read(one.states["exp_avg"]), blob(made, "w", "exp_avg").store
    rows = store.chunk[0]
    block = Box((4 * rows + 3, 10), (4 * rows + 5, 20))
    with Counting() as reader:
        found = read(made.parameters["w"].states["exp_avg"].crop(block), reader)
        again, first = read(made.parameters["w"].states["exp_avg"].crop(block), reader), reader.taken
        assert bits(found) == bits(again) == bits(np.ascontiguousarray(values[block.index]))
        chunk = math.prod(store.chunk) * 4
        assert first == reader.taken < 2.1 * chunk  # its own and, where it has one, that of its base
    for index in set(range(store.chunking.count)) - {4}:  # the others may be noise
        for state in ("exp_avg", "exp_avg_sq"):
            _spoil(blob(made, "w", state).store, index)
    assert bits(read(made.parameters["w"].states["exp_avg"].crop(block))) == bits(found)
    with pytest.raises(Corrupt, match="chunk 3"):
        read(made.parameters["w"].states["exp_avg"].crop(Box((4 * rows - 1, 0), (4 * rows, 1))))


def _spoil(store: Any, index: int) -> None:
    begin, nbytes = _chunk(store, index)
    with store.path.open("r+b") as file:
        file.seek(begin)
        file.write(np.random.default_rng(index).bytes(nbytes))


def _chunk(store: Any, index: int) -> tuple[int, int]:
    """Where a coded chunk lies in its file."""
    data = store.path.read_bytes()[store.offset : store.offset + store.nbytes]
    directory = np.frombuffer(data[len(data) - 16 * store.chunking.count :], "<u8").reshape(-1, 2)
    return store.offset + int(directory[:index, 0].sum()), int(directory[index, 0])


# Damage


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three chunks a state, and a second parameter."""
    target = tmp_path_factory.mktemp("damage") / "small"
    compress(checkpoint([trained(), parameter("other", {"param": np.zeros((40, 30), F32)})]), target)
    return target


@pytest.fixture
def broken(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "broken"))


def refused(target: Path, tmp_path: Path) -> CkptError:
    """What a conversion says, which leaves nothing behind."""
    with pytest.raises(CkptError) as caught:
        decompress(Universal().read(target, ReadOptions()), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))
    return caught.value


@pytest.mark.quick(10)
@pytest.mark.parametrize("state", ["fp32", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("place", ["first", "middle", "last", "filling", "length", "hash"])
def test_a_flipped_bit_is_named_by_verify_and_refused_by_convert(
    state: str, place: str, broken: Path, tmp_path: Path
) -> None:
    store = blob(Universal().read(broken, ReadOptions()), "w", state).store
    end = store.offset + store.nbytes
    begin, nbytes = _chunk(store, 1)
    directory = end - 16 * store.chunking.count
    last = sum(_chunk(store, store.chunking.count - 1))
    places = {"first": begin, "middle": begin + nbytes // 2, "last": begin + nbytes - 1}
    places |= {"filling": last if last < directory else directory, "length": directory + 16, "hash": directory + 24}
    for bit in (0, 7):
        flip(store.path, places[place], bit)
        findings = find_problems(Universal().read(broken, ReadOptions()), EFFORT)
        assert [(f.kind, f.tensors) for f in findings] == [("checksum", ("w",))]
        assert state in findings[0].what
        assert refused(broken, tmp_path).where == str(store.path)
        flip(store.path, places[place], bit)
    assert find_problems(Universal().read(broken, ReadOptions()), EFFORT) == []


def test_a_damaged_chunk_is_refused_before_anybody_sees_its_values(broken: Path) -> None:
    made = Universal().read(broken, ReadOptions())
    store = blob(made, "w", "fp32").store
    begin, nbytes = _chunk(store, 0)
    refusals = 0
    for at in range(begin, begin + nbytes, 997):
        flip(store.path, at)
        with suppress(Corrupt):
            refusals += 1
            values = read(made.parameters["w"].states["fp32"].crop(Box((0, 0), (1, 1000))))
            assert bits(values) == bits(read(trained().states["fp32"])[:1])  # a bit that nobody needs
            refusals -= 1
        flip(store.path, at)
    assert refusals > 0.9 * nbytes / 997


def test_a_truncated_file_is_refused(broken: Path, tmp_path: Path) -> None:
    path = blob(Universal().read(broken, ReadOptions()), "w", "fp32").store.path
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    assert "bytes" in refused(broken, tmp_path).what


def test_values_that_do_not_fit_their_promise_are_found_by_verify(broken: Path) -> None:
    """Everything else holds: the manifest, the bytes, the chunks."""

    def edit(said: dict[str, Any]) -> None:
        _states(said)["fp32"]["values"] = "xxh3-128:" + "0" * 32

    _edit(broken, edit)
    findings = find_problems(Universal().read(broken, ReadOptions()), EFFORT)
    assert [(f.kind, f.tensors) for f in findings] == [("values", ("w",))]


def _states(said: dict[str, Any]) -> dict[str, Any]:
    return next(entry for entry in said["parameters"] if entry["name"] == "w")["states"]


def _edit(target: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and sign it again."""
    import xxhash

    path = target / manifest.NAME
    said = json.loads(path.read_text())
    del said["checksum"]
    edit(said)
    said["content"] = content_id(said)
    body = json.dumps(said, indent=1).encode().removeprefix(b"{\n") + b"\n"
    path.write_bytes(b'{"checksum":"xxh3-128:%s",\n' % xxhash.xxh3_128_hexdigest(body).encode() + body)


def put(key: str, value: Any, state: str = "fp32") -> Callable[[dict[str, Any]], object]:
    return lambda said: _states(said)[state].update({key: value})


HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], object], type[CkptError]]] = {
    **{
        f"chunk = {value!r:.40}": (put("chunk", value), Corrupt)
        for value in [
            *(None, 5, "x", {}, [], [0], [-1], [1.5], [True], [1, 0], [0, 1], [1, 1, 1], [["a"]], [1 << 23], [1 << 70]),
            *([1 << 12, 1 << 12], [262, 999], [1, 7], [1]),
        ]
    },
    "no chunk": (lambda said: _states(said)["fp32"].pop("chunk"), Unsupported),
    "version 2": (lambda said: said.update(version=2), Unsupported),
    "version 4": (lambda said: said.update(version=4), Unsupported),
    "an enormous shape": (put("shape", [1 << 40, 1000]), Corrupt),
    "a shape that the rows do not fit": (put("shape", [600_001]), Corrupt),
    "an unknown codec": (put("codec", {"name": "magic"}), Unsupported),
    "unknown options": (put("codec", {"name": "planes", "colour": "red"}), Unsupported),
    "options of another kind": (put("codec", {"name": "planes", "level": {"a": []}}), Unsupported),
    "a codec without a name": (put("codec", {}), Corrupt),
    "a base that has a base": (put("base", "exp_avg"), Corrupt),
    "a base that is itself": (put("base", "fp32"), Corrupt),
    "a base that is not there": (put("base", "ghost"), Corrupt),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_is_refused_in_the_right_words(kind: str, broken: Path) -> None:
    edit, expected = HOSTILE[kind]
    _edit(broken, lambda said: None)
    Universal().read(broken, ReadOptions())  # the edit alone makes the difference
    _edit(broken, edit)
    with pytest.raises(expected):
        Universal().read(broken, ReadOptions())


@pytest.mark.parametrize(
    "kind", ["too long", "too short", "enormous", "all in one", "nothing", "swapped", "another chunk's hash"]
)
def test_a_hostile_directory_is_refused(kind: str, broken: Path) -> None:
    """With no checksum in its way: a block is read before anybody has seen all of the file."""
    made = Universal().read(broken, ReadOptions())
    store = blob(made, "w", "fp32").store
    at = store.offset + store.nbytes - 16 * store.chunking.count
    data = bytearray(store.path.read_bytes())
    directory = np.frombuffer(data, "<u8", 2 * store.chunking.count, at).reshape(-1, 2).copy()
    if kind == "too long":
        directory[1, 0] += 8
    elif kind == "too short":
        directory[1, 0] -= 8
    elif kind == "enormous":
        directory[:, 0] = 1 << 63
    elif kind == "all in one":
        directory[0, 0], directory[1:, 0] = directory[:, 0].sum(), 0
    elif kind == "nothing":
        directory[:] = 0
    elif kind == "swapped":
        directory[[0, 1], 0] = directory[[1, 0], 0]
        directory[0, 0] += 8
        directory[1, 0] -= 8
    else:
        directory[[0, 1], 1] = directory[[1, 0], 1]
    data[at : at + directory.nbytes] = directory.tobytes()
    store.path.write_bytes(data)
    with pytest.raises(Corrupt):
        read(made.parameters["w"].states["fp32"].crop(Box((0, 0), (1, 1))))


def test_a_block_of_a_damaged_base_is_refused(broken: Path) -> None:
    made = Universal().read(broken, ReadOptions())
    if blob(made, "w", "exp_avg").store.base is None:
        pytest.skip("the codec of exp_avg has no base")
    _spoil(blob(made, "w", "exp_avg_sq").store, 0)
    with pytest.raises(Corrupt, match="exp_avg_sq"):
        read(made.parameters["w"].states["exp_avg"])


def test_settling_reads_what_nobody_has_read(broken: Path) -> None:
    """A block has been read of a file that is damaged elsewhere."""
    made = Universal().read(broken, ReadOptions())
    store = blob(made, "w", "fp32").store
    begin, _ = _chunk(store, 2)
    flip(store.path, begin)
    with Reader() as reader:
        read(made.parameters["w"].states["fp32"].crop(Box((0, 0), (1, 1))), reader)
        assert [seal.label for seal in verify_seals(reader.evidence())] == ["w/fp32"]


def test_forms_of_chunks() -> None:
    assert Chunking((9, 5), (4, 5)).chunk_shape(15) == (3, 5)
    assert Chunking((27,), (20,)).chunk_shape(7) == (7,)
