"""Coded states: every bit comes back, from any block, and no damaged one passes."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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
from ckpt.pipeline import Execution
from ckpt_codecs import candidate_codecs
from ckpt_formats.core import chunking
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.chunking import DEFAULT_ELEMENTS, Chunking
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.encoding import LEVELS
from ckpt_formats.core.errors import CkptError, CorruptError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import Array, FileBlob, Tensor, read
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal, manifest
from ckpt_formats.universal.chunked import ChunkedTensor, ChunkStore, EncodedBlob
from ckpt_formats.universal.encode_state import CodecChoice, write_coded
from ckpt_formats.universal.pack_file import PackFile
from damage import SAMPLES
from forged import Change, Forged, codec, forge
from held import STORABLE, array, bits, boxes, checkpoint, contents, everything, flip, folder, parameter, tensor

EFFORT = Execution(2, 1 << 22)
F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]
REAL = sorted(p for p in SAMPLES.iterdir() if p.is_dir() and p.name not in ("damaged",))


def compress(source: Checkpoint, target: Path, **encoding: Any) -> Checkpoint:
    save(source, target, Universal(**{"codec": "auto", **encoding}), resources=EFFORT)
    return Universal().read(target, ReadOptions())


def decompress(source: Checkpoint, target: Path) -> Path:
    save(source, target, Universal(), resources=EFFORT)
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
    states = {"master": master, "model": master.astype(BF16), "exp_avg": first, "exp_avg_sq": second}
    return parameter("w", states, step=3)


# Exactness


@pytest.mark.parametrize("level", LEVELS)
def test_decompress_returns_everything(level: str, tmp_path: Path) -> None:
    source = checkpoint([*everything().parameters.values(), trained()], extras={"epoch": 2})
    compressed = compress(source, tmp_path / "small", level=level)
    assert contents(compressed) == contents(source)
    assert [f.kind for f in find_problems(compressed, EFFORT) if f.kind != "copy"] == []
    save(source, tmp_path / "plain", Universal(), resources=EFFORT)
    assert files(decompress(compressed, tmp_path / "again")) == files(tmp_path / "plain")


@pytest.mark.quick(4)
@pytest.mark.parametrize("sample", REAL, ids=lambda path: path.name)
def test_decompress_returns_real_checkpoints(sample: Path, tmp_path: Path) -> None:
    source = open_checkpoint(sample)
    compressed = compress(source, tmp_path / "small")
    save(source, tmp_path / "plain", Universal(), resources=EFFORT)
    assert files(decompress(compressed, tmp_path / "again")) == files(tmp_path / "plain")
    assert (
        manifest.load(tmp_path / "small" / manifest.NAME).content
        == manifest.load(tmp_path / "plain" / manifest.NAME).content
    )


@pytest.mark.quick(5)
@pytest.mark.parametrize("dtype", STORABLE, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("shape", [(DEFAULT_ELEMENTS + 5,), (600, 700), (3, 100_003), (7, 3, 3, 9001)], ids=str)
def test_decompress_returns_tensors_of_several_chunks(dtype: Any, shape: tuple[int, ...], tmp_path: Path) -> None:
    """Random bits, which no codec makes smaller, beside values of which any codec makes something."""
    random = array(dtype, shape)
    few = np.resize(array(dtype, (7,)), shape)
    source = checkpoint([parameter("w", {"exp_avg": random, "exp_avg_sq": few, "model": few})])
    compressed = compress(source, tmp_path / "small")
    assert contents(compressed) == contents(source)
    assert isinstance(blob(compressed, "w", "model"), EncodedBlob)
    assert savings.total(savings.rows(compressed)).stored < savings.total(savings.rows(source)).raw


@pytest.mark.parametrize("level", LEVELS)
def test_compress_makes_trained_checkpoints_smaller(level: str, tmp_path: Path) -> None:
    compressed = compress(checkpoint([trained()]), tmp_path / "small", level=level)
    saved_rows = {row.state: row for row in savings.rows(compressed)}
    assert isinstance(blob(compressed, "w", "model"), DerivedBlob)
    assert saved_rows["model"].stored == 0
    assert all(saved_rows[state].ratio > 1.15 for state in ("master", "exp_avg", "exp_avg_sq"))
    assert savings.total(saved_rows.values()).ratio > 1.36


def test_a_copy_that_differs_in_one_bit_is_stored(tmp_path: Path) -> None:
    one = trained()
    values = read(one.states["model"])
    values[599, 999] = 1
    source = checkpoint([Parameter("w", "parameter", {**one.states, "model": tensor(values)})])
    compressed = compress(source, tmp_path / "small")
    assert isinstance(blob(compressed, "w", "model"), EncodedBlob)
    assert contents(compressed) == contents(source)
    assert [finding.kind for finding in find_problems(compressed, EFFORT)] == ["copy"]


def test_values_that_coding_does_not_help_are_stored_as_they_are(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, 100_000, np.uint8)
    one = np.float32(3).reshape(())
    compressed = compress(checkpoint([parameter("w", {"model": noise, "step": one})]), tmp_path / "small")
    assert isinstance(blob(compressed, "w", "model"), FileBlob)
    assert isinstance(blob(compressed, "w", "step"), FileBlob)
    assert json.loads((tmp_path / "small" / manifest.NAME).read_text())["version"] == 1


def test_the_version_is_1_with_and_without_coded_states(tmp_path: Path) -> None:
    coded = compress(checkpoint([trained()]), tmp_path / "small")
    decompress(coded, tmp_path / "plain")
    for name in ("small", "plain"):
        assert json.loads((tmp_path / name / manifest.NAME).read_text())["version"] == 1
        for path in (tmp_path / name).rglob("*.safetensors"):
            with safetensors.safe_open(path, "pt") as opened:
                assert opened.metadata()["ckpt"].startswith("universal 1")


def test_a_pack_is_safetensors_in_which_coded_states_are_bytes(tmp_path: Path) -> None:
    compressed = compress(checkpoint([trained(), *everything().parameters.values()]), tmp_path / "small")
    (pack,) = compressed.files
    expected = {}
    for name, one in compressed.parameters.items():
        for state, values in one.states.items():
            stored = values.fragments[0].blob
            if isinstance(stored, FileBlob):
                expected[f"{name}/{to_stored(state)}"] = (str(stored.dtype), stored.shape)
            elif isinstance(stored, EncodedBlob):
                expected[f"{name}/{to_stored(state)}"] = ("uint8", (stored.store.stored.nbytes,))
    with safetensors.safe_open(pack.path, "pt") as opened:
        actual = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert {name: (str(one.dtype)[6:], tuple(one.shape)) for name, one in actual.items()} == expected
    assert "uint8" in {dtype for dtype, _ in expected.values()}


def test_workers_memory_and_checks_do_not_show_in_the_files(tmp_path: Path) -> None:
    source = checkpoint([trained(), trained((300, 1000), 1)][:1] + list(everything().parameters.values()))
    for i, (effort, check) in enumerate([(Execution(1, 1 << 30), True), (Execution(3, 1), False)]):
        save(source, tmp_path / str(i), Universal(codec="auto", check=check), resources=effort)
    assert files(tmp_path / "0") == files(tmp_path / "1")


# Chunks


@given(st.lists(st.integers(0, 40_000), max_size=4).map(tuple))
def test_chunks_are_whole_rows_or_runs_and_cover_a_tensor(shape: tuple[int, ...]) -> None:
    division = Chunking.default(shape)
    chunk = division.chunk
    assert 0 < math.prod(chunk) <= DEFAULT_ELEMENTS
    size, count = math.prod(shape), division.count
    assert (count - 1) * math.prod(chunk) < size <= count * math.prod(chunk) or count == size == 0
    if len(chunk) == 2 and size:
        assert size % chunk[1] == 0
        assert any(math.prod(shape[axis:]) == chunk[1] for axis in range(1, len(shape)))


@st.composite
def coded(draw: st.DrawFn, at: Path) -> tuple[Tensor, Array]:
    """A tensor in chunks of a few elements, and its values."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple))
    dtype = draw(st.sampled_from([F32, BF16, DTYPES["int16"], DTYPES["bool"]]))
    values, base = array(dtype, shape, 1), array(dtype, shape, 2)
    one = parameter("w", {"model": values, "exp_avg_sq": base})
    codec = candidate_codecs("parameter", "model", dtype)[0]
    with Reader() as reader, PackFile(at / "pack", 0, 6) as out:
        state = write_coded(out, one, "model", CodecChoice(codec, None), True, Transfer(reader), None)
        out.write(b"behind")
    assert state.extent is not None
    assert state.chunks is not None
    store = ChunkStore(at / "pack", state.extent.offset, state.chunks, "w/model")
    return Tensor.of(EncodedBlob.whole(ChunkedTensor(store, shape, dtype, codec, state.digests))), values


@contextmanager
def small_chunks(data: st.DataObject) -> Iterator[None]:
    """Chunks of few elements, so that small tensors have several."""
    elements = data.draw(st.integers(2, 20))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunking, "DEFAULT_ELEMENTS", elements)
        patch.setattr(chunking, "_MAX_WIDTH", data.draw(st.integers(1, elements)))
        yield


@given(st.data())
def test_any_block_of_any_tensor_in_any_chunks_is_what_it_was(data: st.DataObject) -> None:
    with folder() as at, Reader() as reader, small_chunks(data):
        whole, values = data.draw(coded(at))
        for _ in range(3):
            box = data.draw(boxes(values.shape))
            assert bits(read(whole.crop(box), reader)) == bits(np.ascontiguousarray(values[box.index]))
            inner = data.draw(boxes(box.shape))
            block = read(whole.crop(box).crop(inner), reader)
            assert bits(block) == bits(np.ascontiguousarray(values[box.index][inner.index]))


class Counting(Reader):
    """A reader that counts."""

    taken = 0

    def read_into(self, path: Path, offset: int, out: memoryview, seal: Any = None) -> None:
        self.taken += len(out)
        super().read_into(path, offset, out, seal)


@given(st.data())
def test_reading_all_chunks_in_order_takes_each_stored_byte_once(data: st.DataObject) -> None:
    with folder() as at, small_chunks(data), Counting() as reader:
        whole, _ = data.draw(coded(at))
        (raw,) = whole.sources()
        for _ in Transfer(reader, 16).slabs(whole):
            pass
        assert reader.taken == raw.seal.nbytes
        assert not reader.evidence()  # each chunk was checked before it was decoded


def test_a_block_takes_the_bytes_of_its_chunks_and_no_others(tmp_path: Path) -> None:
    one = trained((2400, 1000))
    compressed = compress(checkpoint([one]), tmp_path / "small")
    values, store = read(one.states["exp_avg"]), blob(compressed, "w", "exp_avg").store
    rows = store.chunking.chunk[0]
    block = Box((4 * rows + 3, 10), (4 * rows + 5, 20))
    with Counting() as reader:
        decoded = read(compressed.parameters["w"].states["exp_avg"].crop(block), reader)
        again, first = read(compressed.parameters["w"].states["exp_avg"].crop(block), reader), reader.taken
        assert bits(decoded) == bits(again) == bits(np.ascontiguousarray(values[block.index]))
        chunk = store.chunking.chunk_size * 4
        assert first == reader.taken < 2.1 * chunk  # its own and, where it has one, that of its base
    for index in set(range(store.chunking.count)) - {4}:  # the others may be noise
        for state in ("exp_avg", "exp_avg_sq"):
            _spoil(blob(compressed, "w", state).store, index)
    assert bits(read(compressed.parameters["w"].states["exp_avg"].crop(block))) == bits(decoded)
    with pytest.raises(CorruptError, match="chunk 3"):
        read(compressed.parameters["w"].states["exp_avg"].crop(Box((4 * rows - 1, 0), (4 * rows, 1))))


def _spoil(store: ChunkedTensor, index: int) -> None:
    begin, nbytes = _chunk(store, index)
    with store.stored.path.open("r+b") as file:
        file.seek(begin)
        file.write(np.random.default_rng(index).bytes(nbytes))


def _chunk(store: ChunkedTensor, index: int) -> tuple[int, int]:
    """Where an encoded chunk is in its file: its first byte, and its length."""
    chunks = store.stored.chunks
    return store.stored.offset + int(chunks.starts[index]), int(chunks.nbytes[index])


# Damage


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three chunks a state, and a second parameter."""
    target = tmp_path_factory.mktemp("damage") / "small"
    compress(checkpoint([trained(), parameter("other", {"model": np.zeros((40, 30), F32)})]), target)
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


@pytest.mark.quick(4)
@pytest.mark.parametrize("state", ["master", "exp_avg", "exp_avg_sq"])
@pytest.mark.parametrize("place", ["first", "middle", "last", "filling"])
def test_a_flipped_bit_is_named_by_verify_and_refused_by_convert(
    state: str, place: str, broken: Path, tmp_path: Path
) -> None:
    store = blob(Universal().read(broken, ReadOptions()), "w", state).store
    path, count = store.stored.path, store.stored.count
    (begin, nbytes), last = _chunk(store, 1), sum(_chunk(store, count - 1))
    filling = last if last < store.stored.offset + store.stored.nbytes else last - 1
    places = {"first": begin, "middle": begin + nbytes // 2, "last": begin + nbytes - 1, "filling": filling}
    for bit in (0, 7):
        flip(path, places[place], bit)
        (finding,) = find_problems(Universal().read(broken, ReadOptions()), EFFORT)
        assert (finding.kind, finding.tensors) == ("checksum", ("w",))
        assert f"w/{state}" in finding.what
        assert f"chunk {count - 1 if place == 'filling' else 1}" in finding.what
        assert refused(broken, tmp_path).where == str(path)
        flip(path, places[place], bit)
    assert find_problems(Universal().read(broken, ReadOptions()), EFFORT) == []


def test_a_damaged_chunk_is_refused_before_anybody_sees_its_values(broken: Path) -> None:
    compressed = Universal().read(broken, ReadOptions())
    store = blob(compressed, "w", "master").store
    begin, nbytes = _chunk(store, 0)
    refusals = 0
    for at in range(begin, begin + nbytes, 997):
        flip(store.stored.path, at)
        with suppress(CorruptError):
            refusals += 1
            values = read(compressed.parameters["w"].states["master"].crop(Box((0, 0), (1, 1000))))
            assert bits(values) == bits(read(trained().states["master"])[:1])  # a bit that nobody needs
            refusals -= 1
        flip(store.stored.path, at)
    assert refusals > 0.9 * nbytes / 997


def test_a_truncated_file_is_refused(broken: Path, tmp_path: Path) -> None:
    path = blob(Universal().read(broken, ReadOptions()), "w", "master").store.stored.path
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1)
    assert "bytes" in refused(broken, tmp_path).what


def test_values_that_do_not_fit_their_promise_are_found_by_verify(broken: Path) -> None:
    """Everything else holds: the manifest, the index, the stored bytes."""

    def change(forged: Forged) -> None:
        forged.columns["chunk.values"][forged.chunks("w", "fp32")][1, 3] ^= 1

    forge(broken, change)
    (finding,) = find_problems(Universal().read(broken, ReadOptions()), EFFORT)
    assert (finding.kind, finding.tensors) == ("values", ("w",))
    assert "chunk 1" in finding.what


def lengths(change: Callable[[Array], object]) -> Change:
    """Change the lengths of the encoded chunks of a state."""
    return lambda forged: change(forged.columns["coded.nbytes"][forged.coded("w", "fp32")])


def chunk_sums(change: Callable[[Array], object]) -> Change:
    """Change the checksums of the encoded chunks of a state."""
    return lambda forged: change(forged.columns["coded.stored"][forged.coded("w", "fp32")])


def _move(column: Array, nbytes: int) -> None:
    """The first chunk ends later, and the second begins later."""
    column[0] += nbytes
    column[1] -= nbytes


def _swap(column: Array) -> None:
    column[[0, 1]] = column[[1, 0]]


HOSTILE: dict[str, tuple[Change, type[CkptError], str]] = {
    "a chunk too long": (
        lengths(lambda column: column.__setitem__(1, column[1] + 8)),
        CorruptError,
        "do not fit its chunks",
    ),
    "a chunk too short": (
        lengths(lambda column: column.__setitem__(1, column[1] - 8)),
        CorruptError,
        "do not fit its chunks",
    ),
    "enormous chunks": (lengths(lambda column: column.__setitem__(slice(None), 2**32 - 1)), CorruptError, "do not fit"),
    "no lengths": (lengths(lambda column: column.__setitem__(slice(None), 0)), CorruptError, "do not fit its chunks"),
    "one chunk has all bytes": (
        lengths(lambda column: _move(column, int(column[1]))),
        CorruptError,
        "too long|checksum",
    ),
    "borders that moved": (lengths(lambda column: _move(column, 8)), CorruptError, "checksum"),
    "checksums of another chunk": (chunk_sums(_swap), CorruptError, "checksum"),
    "a shape with more chunks": (
        lambda forged: forged.columns["state.dims"].__setitem__(forged.dims("w", "fp32").start, 1200),
        CorruptError,
        "length of column chunk.values",
    ),
    "an enormous shape": (
        lambda forged: forged.columns["state.dims"].__setitem__(forged.dims("w", "fp32").start, 1 << 40),
        CorruptError,
        "length of column chunk.values",
    ),
    "an unknown codec": (codec("w", "fp32", {"name": "magic"}), UnsupportedError, "magic"),
    "unknown options": (codec("w", "fp32", {"name": "planes", "colour": "red"}), UnsupportedError, "colour"),
    "options of another kind": (codec("w", "fp32", {"name": "planes", "level": {"a": []}}), UnsupportedError, "level"),
    "a base that has a base": (codec("w", "fp32", {"name": "first-moment"}, "exp_avg"), CorruptError, "base"),
    "a base that is itself": (codec("w", "fp32", {"name": "first-moment"}, "fp32"), CorruptError, "base"),
    "a base that is not there": (codec("w", "fp32", {"name": "first-moment"}, "ghost"), CorruptError, "base"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_index_is_refused_in_the_right_words(kind: str, broken: Path) -> None:
    """At the latest when a value is read; nothing else has checked the stored bytes before."""
    change, expected, words = HOSTILE[kind]
    forge(broken)
    one_value(broken)  # the change alone makes the difference
    forge(broken, change)
    with pytest.raises(expected, match=words):
        one_value(broken)


def one_value(target: Path) -> Array:
    compressed = Universal().read(target, ReadOptions())
    return read(compressed.parameters["w"].states["master"].crop(Box((0, 0), (1, 1))))


def test_a_block_of_a_damaged_base_is_refused(broken: Path) -> None:
    compressed = Universal().read(broken, ReadOptions())
    if blob(compressed, "w", "exp_avg").store.base is None:
        pytest.skip("the codec of exp_avg has no base")
    _spoil(blob(compressed, "w", "exp_avg_sq").store, 0)
    with pytest.raises(CorruptError, match="exp_avg_sq"):
        read(compressed.parameters["w"].states["exp_avg"])


def test_chunks_have_their_forms() -> None:
    assert Chunking((9, 5), (4, 5)).chunk_shape(15) == (3, 5)
    assert Chunking((27,), (20,)).chunk_shape(7) == (7,)
