"""Reading and writing files of torch.save, against torch itself."""

import argparse
import io
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_formats.containers import torchfile
from ckpt_formats.containers.torchfile import (
    Storage,
    StorageView,
    Template,
    TensorRef,
    emit,
    layout_file,
    load_pickle,
    open_file,
    reading_chunks,
    tensor_of,
    write_file,
)
from ckpt_formats.containers.torchfile.expanded_size import repeated_size
from ckpt_formats.containers.torchfile.numpy_arrays import dtype_of
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CorruptError, NoSpaceError, NotFoundError, OutputError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.seal_checks import seal_is_valid
from ckpt_formats.core.tensor import ArrayBlob, Tensor, read
from ckpt_formats.core.values import Global, Record, Size, StdDict, Value
from effort import examples

SAMPLES = Path(__file__).parents[3] / "shared" / "samples"
FORMATS = Path(torchfile.__file__).parents[2]


class Colour(Enum):
    RED = 1
    BLUE = 2


class Piece(NamedTuple):
    numel: int
    start: int


class Scaler:
    def __init__(self) -> None:
        self.cur_scale = 65536.0
        self.window = 1000


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, [2]


def torch_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def torch_bytes(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def assert_same_as_torch(ours: Value, theirs: Any, at: str = "root") -> None:
    """Our tree says what torch.load gives."""
    if isinstance(theirs, torch.Tensor):
        assert type(ours) is TensorRef, at
        assert ours.shape == tuple(theirs.shape), at
        assert ours.dtype == DTYPES[str(theirs.dtype).removeprefix("torch.")], at
        assert ours.strides == theirs.stride(), at
        assert ours.requires_grad == theirs.requires_grad, at
        assert ours.is_parameter == isinstance(theirs, torch.nn.Parameter), at
        assert read(tensor_of(ours)).tobytes() == torch_bytes(theirs), at
        assert (ours.attrs or {}) == {k: v for k, v in theirs.__dict__.items() if not k.startswith("_")}, at
    elif isinstance(theirs, torch.dtype):
        assert ours == Global("torch", str(theirs).removeprefix("torch.")), at
    elif isinstance(theirs, torch.device):
        assert (type(ours), ours.cls, ours.args[0]) == (Record, Global("torch", "device"), theirs.type), at
    elif isinstance(theirs, torch.Size):
        assert type(ours) is Size, at
        assert tuple(ours) == tuple(theirs), at
    elif isinstance(theirs, (OrderedDict, defaultdict, Counter)):
        assert type(ours) is StdDict, at
        assert ours.cls == Global("collections", type(theirs).__name__), at
        assert_same_as_torch(dict(ours), dict(theirs), at)
    elif isinstance(theirs, dict):
        assert type(ours) is dict, at
        assert list(map(repr, ours)) == list(map(repr, theirs)), at
        for (key, value), other in zip(ours.items(), theirs.values(), strict=True):
            assert_same_as_torch(value, other, f"{at}[{key!r}]")
    elif type(theirs) in (list, tuple):
        assert type(ours) is type(theirs), at
        assert len(ours) == len(theirs), at
        for i, (value, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_same_as_torch(value, other, f"{at}[{i}]")
    elif isinstance(theirs, np.ndarray):
        assert type(ours) is np.ndarray, at
        # Below protocol 5, NumPy itself turns foreign byte orders into its own.
        native = theirs.astype(theirs.dtype.newbyteorder("="))
        assert (ours.dtype.newbyteorder("="), ours.shape) == (native.dtype, native.shape), at
        assert ours.astype(native.dtype).tobytes() == native.tobytes(), at
    elif isinstance(theirs, argparse.Namespace):
        assert (type(ours), ours.cls) == (Record, Global("argparse", "Namespace")), at
        assert_same_as_torch(ours.state, vars(theirs), at)
    else:
        assert type(ours) is type(theirs), at
        assert ours == theirs or ours != ours, at


def assert_same(first: Value, second: Value, at: str = "root", seen: set[int] | None = None) -> None:
    """Two of our trees are the same, tensors' bytes included."""
    seen = set() if seen is None else seen
    assert type(first) is type(second), at
    if isinstance(first, (list, dict, Record)):
        if id(first) in seen:
            return
        seen.add(id(first))
    if isinstance(first, dict):
        assert len(first) == len(second), at
        for (k, v), (other_k, other_v) in zip(first.items(), second.items(), strict=True):
            assert_same(k, other_k, f"{at}.key", seen)
            assert_same(v, other_v, f"{at}[{k!r}]", seen)
        if type(first) is StdDict:
            assert (first.cls, first.factory) == (second.cls, second.factory), at
            assert_same(first.attrs, second.attrs, f"{at}.attrs", seen)
    elif isinstance(first, (list, tuple)):
        assert len(first) == len(second), at
        for i, (v, other_v) in enumerate(zip(first, second, strict=True)):
            assert_same(v, other_v, f"{at}[{i}]", seen)
    elif type(first) is Record:
        assert (first.cls, first.new) == (second.cls, second.new), at
        for name in ("args", "kwargs", "state", "items", "mapping"):
            assert_same(getattr(first, name), getattr(second, name), f"{at}.{name}", seen)
    elif type(first) is TensorRef:
        for name in ("dtype", "offset", "shape", "strides", "requires_grad", "is_parameter"):
            assert getattr(first, name) == getattr(second, name), f"{at}.{name}"
        assert_same(first.attrs, second.attrs, f"{at}.attrs", seen)
        assert read(tensor_of(first)).tobytes() == read(tensor_of(second)).tobytes(), at
    elif type(first) is np.ndarray:
        assert (first.dtype, first.shape, first.tobytes()) == (second.dtype, second.shape, second.tobytes()), at
    elif type(first) is Storage:
        assert (first.cls, first.numel, first.location) == (second.cls, second.numel, second.location), at
    else:
        assert first == second or first != first, at


def every_dtype() -> dict[str, torch.Tensor]:
    raw = torch.arange(48, dtype=torch.uint8)
    by_dtype = {name: raw.clone().view(torch_dtype(name)) for name in DTYPES if name != "bool"}
    return {**by_dtype, "bool": raw % 3 == 0}


def views() -> dict[str, torch.Tensor]:
    flat = torch.arange(120, dtype=torch.float32)
    return {
        "flat": flat,
        "block": flat[10:70].view(6, 10),
        "columns": flat.view(12, 10)[:, 3:5],
        "transposed": flat.view(12, 10).t(),
        "permuted": flat.view(2, 3, 20).permute(2, 0, 1),
        "strided": flat[::7],
        "expanded": flat[5:8].unsqueeze(1).expand(3, 4),
        "zero stride": torch.tensor(3.0).expand(5, 5),
        "window": flat.unfold(0, 10, 5),
    }


def small() -> dict[str, torch.Tensor]:
    return {
        "scalar": torch.tensor(7),
        "empty": torch.empty(0),
        "empty rows": torch.empty(0, 5),
        "empty view": torch.arange(10)[3:3],
        "one": torch.ones(1, 1, 1),
        "channels last": torch.arange(24.0).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    }


def module() -> Any:
    layers = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    return layers.state_dict()


def parameters() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.randn(3, 3))
    frozen = torch.nn.Parameter(torch.arange(4.0), requires_grad=False)
    marked = torch.ones(3)
    marked.tag = "router"  # type: ignore[attr-defined]
    marked_parameter = torch.nn.Parameter(torch.ones(2))
    marked_parameter.allreduce = False  # type: ignore[attr-defined]
    return {"weight": weight, "tied": weight, "frozen": frozen, "grad": torch.ones(2, requires_grad=True), "m": marked,
            "mp": marked_parameter}  # fmt: skip


def plain() -> dict[Any, Any]:
    return {
        "none": None,
        "bools": [True, False],
        "ints": [0, 1, -1, 255, 256, 65535, 65536, -(1 << 31), 1 << 31, 1 << 63, -(1 << 64), 1 << 300, 1 << 2100],
        "floats": [0.0, -0.0, 1e308, 5e-324, float("inf"), float("-inf"), float("nan")],
        "complex": 1 - 2j,
        "text": ["", "é", "\U0001f600", "\ud800", "a\nb\x00c", "x" * 300],
        "bytes": [b"", b"\x00\xff", bytes(range(256)), bytearray(b"abc")],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), ((), ((),))],
        "sets": [set(), {1, "a"}, frozenset({2, (3, 4)})],
        ("tuple", 1): 1,
        3: "int key",
        2.5: "float key",
        None: "none key",
        b"bytes": "bytes key",
        "long": list(range(3000)),
        "wide": {i: str(i) for i in range(2500)},
    }


def dicts() -> dict[str, Any]:
    ordered = OrderedDict(a=1, b=OrderedDict())
    ordered._metadata = {"version": 1}  # type: ignore[attr-defined]
    return {"ordered": ordered, "default": defaultdict(int, x=1), "none": defaultdict(None, y=2),
            "counter": Counter("abca"), "list": defaultdict(list, z=[1])}  # fmt: skip


def described() -> list[Any]:
    return [
        torch.Size([2, 3]),
        torch.Size([]),
        torch.float32,
        torch.bfloat16,
        torch.device("cpu"),
        torch.device("meta"),
    ]


def namespace() -> argparse.Namespace:
    return argparse.Namespace(hidden_size=64, lr=1e-4, names=["a"], params_dtype=torch.bfloat16, nested={"x": (1,)})


def arrays() -> dict[str, Any]:
    return {
        "kinds": [np.arange(6, dtype=name).reshape(2, 3) for name in ("u1", "i2", "i4", "u8", "f2", "f4", "f8", "c8")],
        "order": [
            np.arange(6.0).reshape(2, 3).T,
            np.asfortranarray(np.arange(6).reshape(2, 3)),
            np.arange(4, dtype=">i4"),
        ],
        "shapes": [np.array(5), np.empty((0, 3)), np.zeros((1, 1))],
        "text": [np.array(["a", "bcd"]), np.array([b"x", b"yz"]), np.array([True, False])],
        "scalars": [np.float32(1.5), np.int64(-3), np.bool_(True), np.float64("nan"), np.str_("hé"), np.complex64(1j)],
        "shared": [shared := np.arange(3), shared],
    }


TREES: dict[str, Callable[[], Any]] = {
    make.__name__: make
    for make in (every_dtype, views, small, module, parameters, plain, dicts, described, namespace, arrays)
}


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("container", ["zip", "legacy"])
@pytest.mark.parametrize("tree", TREES)
def test_open_file_reads_what_was_saved(tmp_path: Path, tree: str, container: str, protocol: int) -> None:
    path, given_tree = tmp_path / "file.pt", TREES[tree]()
    torch.save(given_tree, path, pickle_protocol=protocol, _use_new_zipfile_serialization=container == "zip")
    opened = open_file(path)
    assert opened.kind == container
    assert_same_as_torch(opened.root, given_tree)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("tree", ["plain", "dicts", "arrays", "namespace"])
def test_open_file_reads_plain_pickles_as_python_does(tree: str, protocol: int) -> None:
    data = pickle.dumps(TREES[tree](), protocol)
    assert_same_as_torch(load_pickle(data), pickle.loads(data))


@pytest.mark.quick(100)
@pytest.mark.parametrize("value", [{"a": 1}, [1, 2], "text", 5, None, np.arange(3), np.float32(2)], ids=repr)
def test_a_file_of_a_plain_pickle_is_read_whatever_it_holds(value: Any, tmp_path: Path) -> None:
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(value, 2))
    opened = open_file(tmp_path / "a.pkl")
    assert opened.kind == "pickle"
    assert_same_as_torch(opened.root, value)


@pytest.mark.parametrize("tree", TREES)
def test_file_written_again_reads_the_same_by_ckpt_and_torch(tmp_path: Path, tree: str) -> None:
    source, copy = tmp_path / "source.pt", tmp_path / "copy.pt"
    torch.save(TREES[tree](), source)
    opened = open_file(source)
    with Reader() as reader:
        write_file(copy, opened.root, reading_chunks(reader))
    assert_same(open_file(copy).root, opened.root)
    assert_same_as_torch(opened.root, torch.load(copy, weights_only=False))


def test_attributes_of_an_ordered_dict_survive(tmp_path: Path) -> None:
    torch.save(TREES["module"](), tmp_path / "a.pt")
    root = open_file(tmp_path / "a.pt").root
    assert root.attrs["_metadata"].cls == Global("collections", "OrderedDict")
    with Reader() as reader:
        write_file(tmp_path / "b.pt", root, reading_chunks(reader))
    again = torch.load(tmp_path / "b.pt", weights_only=False)
    assert again._metadata == TREES["module"]()._metadata


def test_objects_of_unknown_classes_are_carried_and_come_back_as_they_were(tmp_path: Path) -> None:
    stamp = datetime(2024, 5, 6, 7)
    given = {
        "scaler": Scaler(),
        "slots": Slotted(),
        "enum": [Colour.RED, Colour.BLUE],
        "piece": Piece(10, 3),
        "path": Path("/a/b"),
        "when": [stamp, timedelta(days=1)],
        "range": range(3, 9),
        "class": Scaler,
    }
    torch.save(given, tmp_path / "a.pt")
    root = open_file(tmp_path / "a.pt").root
    assert root["scaler"].get("cur_scale") == 65536.0
    assert root["slots"].get("b") == [2]
    assert root["piece"].args == (10, 3)
    by_name = (3, 11) <= sys.version_info < (3, 11, 4)  # how these versions of Python pickle enums
    assert (root["enum"][0].name if by_name else root["enum"][0].args) == ("Colour.RED" if by_name else (1,))
    assert root["class"].name == "Scaler"
    write_file(tmp_path / "b.pt", root, lambda tensor: iter(()))
    again = torch.load(tmp_path / "b.pt", weights_only=False)
    assert vars(again.pop("scaler")) == vars(given.pop("scaler"))
    assert (again["slots"].a, again.pop("slots").b) == (1, [2])
    assert given.pop("slots") is not None
    assert again == given


def test_generator_states_of_every_kind_are_carried(tmp_path: Path) -> None:
    given = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.RandomState(3).get_state(),
        "generator": np.random.default_rng(5),
        "old": np.random.RandomState(7),
    }
    torch.save(given, tmp_path / "a.pt")
    root = open_file(tmp_path / "a.pt").root
    assert_same_as_torch(root["torch"], given["torch"])
    assert root["numpy"][0] == "MT19937"
    assert root["numpy"][1].dtype == np.uint32
    with Reader() as reader:
        write_file(tmp_path / "b.pt", root, reading_chunks(reader))
    again = torch.load(tmp_path / "b.pt", weights_only=False)
    assert again["generator"].random() == np.random.default_rng(5).random()
    assert again["old"].random() == np.random.RandomState(7).random()


def test_tied_weights_and_views_share_a_storage_when_read_and_when_written(tmp_path: Path) -> None:
    weight = torch.arange(12.0)
    torch.save({"a": weight, "b": weight, "c": weight[4:8], "d": weight.clone()}, tmp_path / "a.pt")
    opened = open_file(tmp_path / "a.pt")
    a, b, c, d = opened.root.values()
    assert a is b
    assert a.storage is c.storage
    assert c.storage.key != d.storage.key
    assert len(opened.storages) == 2
    with Reader() as reader:
        write_file(tmp_path / "b.pt", opened.root, reading_chunks(reader))
    again = torch.load(tmp_path / "b.pt", weights_only=True)
    assert again["a"].data_ptr() == again["b"].data_ptr()
    assert again["c"].data_ptr() == again["a"].data_ptr() + 16
    assert (tmp_path / "b.pt").stat().st_size < (tmp_path / "a.pt").stat().st_size + 300


def test_many_views_of_one_flat_buffer_are_written_over_one_storage(tmp_path: Path) -> None:
    flat = Tensor.of(ArrayBlob(np.arange(20, dtype=np.float32)))
    root = {
        "flat": flat,
        "block": StorageView(flat, 4, (2, 3)),
        "column": StorageView(flat, 1, (5,), (4,), requires_grad=True),
        "parameter": StorageView(flat, 0, (4,), is_parameter=True, requires_grad=True, attrs={"tag": 1}),
    }
    with Reader() as reader:
        seals = write_file(tmp_path / "a.pt", root, reading_chunks(reader, max_nbytes=12))
    assert len(seals) == 1
    got = torch.load(tmp_path / "a.pt", weights_only=True)
    want = torch.arange(20.0)
    assert torch.equal(got["block"], want[4:10].view(2, 3))
    assert torch.equal(got["column"], want[1::4])
    assert got["column"].requires_grad
    assert isinstance(got["parameter"], torch.nn.Parameter)
    assert got["parameter"].tag == 1
    with pytest.raises(ValueError, match="reaches to element 20"):
        layout_file(StorageView(flat, 18, (3,)), "x")


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:ComplexHalf")
def test_a_quantised_a_sparse_and_a_conjugated_tensor_are_carried_unread(tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "conj": torch.tensor([1 + 2j]).conj(),
        "meta": torch.empty(3, device="meta"),
        "half complex": torch.zeros(2, dtype=torch.complex32),
    }
    torch.save(given, tmp_path / "a.pt")
    root = open_file(tmp_path / "a.pt").root
    assert {type(value) for value in root.values()} == {Record}
    with Reader() as reader:
        write_file(tmp_path / "b.pt", root, reading_chunks(reader))
    again = torch.load(tmp_path / "b.pt", weights_only=False)
    assert torch.equal(again["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(again["csr"].to_dense(), torch.eye(3))
    assert torch.equal(again["conj"].resolve_conj(), given["conj"].resolve_conj())
    assert again["meta"].shape == (3,)
    assert again["half complex"].dtype == torch.complex32


def test_dicts_of_their_own_class_count_where_they_are_repeated() -> None:
    value: Value = StdDict()
    for _ in range(25):
        value, inner = StdDict(), value
        value.update(a=inner, b=inner)
    assert repeated_size(value) > 1 << 24


def test_values_that_hold_themselves_are_read_and_written() -> None:
    loop: list[Any] = []
    inner = (loop,)
    loop += [inner, {"up": loop}]
    scaler = Scaler()
    scaler.me = [scaler]  # type: ignore[attr-defined]
    root = load_pickle(pickle.dumps([loop, scaler], 2))
    again = pickle.loads(emit(root))
    assert again[0][0][0] is again[0]
    assert again[0][1]["up"] is again[0]
    assert again[1].me[0] is again[1]
    record = Record(Global("a", "B"))
    record.args = (record,)
    with pytest.raises(UnsupportedError, match="argument of its own constructor"):
        emit(record)


@pytest.mark.slow
def test_lists_deeper_than_any_stack_are_read_and_written() -> None:
    deep: Value = []
    for _ in range(200_000):
        deep = [deep]
    data = emit(deep)
    read_back = load_pickle(data)
    assert emit(read_back) == data


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_filled_template_has_the_bytes_of_the_value_that_it_builds(protocol: Literal[2, 4]) -> None:
    """Also after other values, and before values that refer to a memo index beyond those of the template."""
    shared = Record(Global("torch", "device"), ("cpu",))

    def build(name: Value, parts: Value, shape: Value) -> Record:
        inner = Record(Global("a.b", "Inner"), state=("x", shared, parts), new=True)
        return Record(Global("a.b", "Outer"), state={"name": name, "inner": inner, "shape": shape}, new=True)

    template = Template(build)

    def tree(fill: Callable[..., Value]) -> Value:
        again: list[Value] = ["again"]
        gaps = [(f"name {i % 3}", [i, [again, shared]], Size((i, 2))) for i in range(300)]
        return [again, *(part for values in gaps for part in (fill(*values), f"name {values[2][0] + 1}", again))]

    assert emit(tree(template.fill), protocol=protocol) == emit(tree(build), protocol=protocol)


def test_gaps_in_another_order_than_the_arguments_are_refused() -> None:
    pair = Template(lambda first, second: [second, first])
    with pytest.raises(ValueError, match="order of the arguments"):
        emit([pair.fill("a", "b"), pair.fill("c", "d")], protocol=4)


def test_a_nested_class_is_written_so_that_python_finds_it() -> None:
    outer = Global(__name__, "Scaler")
    data = emit([Global(outer.module, "Outer.Inner"), Global(outer.module, "Outer.Inner")])
    assert load_pickle(data) == [Global(__name__, "Outer.Inner")] * 2
    assert b"getattr" in data
    assert data.count(b"Inner") == 1


def test_keyword_arguments_of_new_survive() -> None:
    record = Record(Global("fractions", "Fraction"), (1,), {"denominator": 3}, new=True)
    assert_same(load_pickle(emit(record)), record)
    assert pickle.loads(emit(record)).denominator == 3


# Samples of the engines


def sample_files() -> Iterator[Path]:
    if SAMPLES.is_dir():
        for path in sorted(SAMPLES.rglob("*")):
            if path.suffix in (".pt", ".bin") or path.name == ".metadata":
                yield path


@pytest.mark.slow  # as long as there are samples
@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the samples are not here")
def test_every_sample_opens_without_torch_being_imported() -> None:
    code = (
        "import sys\n"
        "from ckpt_formats.containers.torchfile import open_file\n"
        "files = sys.stdin.read().splitlines()\n"
        "for file in files: open_file(file).seals()\n"
        "loaded = {'torch', 'pickle', '_pickle', 'deepspeed', 'zipfile'} & set(sys.modules)\n"
        "print(len(files), loaded or 'nothing')\n"
    )
    files = list(sample_files())
    folders = os.pathsep.join([str(FORMATS), str(FORMATS.parent / "codecs")])
    result = subprocess.run(
        [sys.executable, "-c", code],
        input="\n".join(map(str, files)),
        env={**os.environ, "PYTHONPATH": folders},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{len(files)} ")
    # NumPy imports pickle itself; none of these may come from us.
    assert "torch" not in result.stdout
    assert "deepspeed" not in result.stdout
    assert len(files) > 200


@pytest.mark.slow
@pytest.mark.skipif(not SAMPLES.is_dir(), reason="the samples are not here")
def test_every_sample_comes_back_as_it_was_when_it_is_written_again(tmp_path: Path) -> None:
    for path in sample_files():
        opened = open_file(path)
        with Reader() as reader:
            write_file(tmp_path / "copy.pt", opened.root, reading_chunks(reader))
        copy = open_file(tmp_path / "copy.pt")
        assert_same(copy.root, opened.root)
        assert len(copy.storages) == len(opened.storages)


# What is read, and what is checked


class Meter:
    """Counts what `os.pread` returns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = self.calls = 0
        real = os.pread

        def pread(file: int, length: int, offset: int) -> bytes:
            data = real(file, length, offset)
            self.nbytes, self.calls = self.nbytes + len(data), self.calls + 1
            return data

        monkeypatch.setattr(os, "pread", pread)


@pytest.mark.parametrize("container", ["zip", "legacy"])
def test_opening_a_file_reads_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: str) -> None:
    path = tmp_path / "big.pt"
    tree = {f"layer.{i}": torch.zeros(1 << 18) for i in range(20)}
    torch.save(tree, path, _use_new_zipfile_serialization=container == "zip")
    meter = Meter(monkeypatch)
    opened = open_file(path)
    assert path.stat().st_size > 20 << 20
    assert meter.nbytes < 100_000
    for ref in opened.root.values():
        tensor_of(ref)
    opened.seals()
    assert meter.nbytes < 110_000


def test_a_file_of_two_gigabytes_opens_with_some_reads_of_its_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "huge.pt"
    with torch.serialization.skip_data():  # leaves holes where the tensors would be
        torch.save({f"layer.{i}.weight": torch.empty(512, 512) for i in range(2000)}, path)
    assert path.stat().st_size > 2 << 30 - 1
    meter = Meter(monkeypatch)
    opened = open_file(path)
    assert len(opened.root) == 2000
    assert meter.nbytes < 500_000
    assert meter.calls < 10


def test_a_legacy_pickle_longer_than_the_first_window_is_read_whole(tmp_path: Path) -> None:
    tree = {"text": "x" * 300_000, "list": list(range(100_000)), "t": torch.arange(5)}
    torch.save(tree, tmp_path / "a.pt", _use_new_zipfile_serialization=False)
    assert_same_as_torch(open_file(tmp_path / "a.pt").root, tree)


def test_old_storage_views_point_into_the_whole_storage(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(10.0), buffer, _use_new_zipfile_serialization=False)
    data = buffer.getvalue()
    # The sixth part of a storage's persistent id is its view; torch of today always writes None.
    view = b"(X\x01\x00\x00\x00vK\x04K\x03t"
    at = data.index(b"Nt", data.index(b"FloatStorage"))
    data = data[:at] + view + data[at + 1 :]
    head, tail = data[: data.index(b"K\x00K\x0a\x85")], data[data.index(b"K\x00K\x0a\x85") :]
    path = tmp_path / "old.pt"
    path.write_bytes(head + tail.replace(b"K\x00K\x0a\x85", b"K\x00K\x03\x85", 1))
    assert torch.equal(torch.load(path, weights_only=False), torch.arange(4.0, 7.0))
    ref = open_file(path).root
    assert (ref.offset, ref.shape) == (4, (3,))
    assert read(tensor_of(ref)).tolist() == [4.0, 5.0, 6.0]
    path.write_bytes(head + tail.replace(b"K\x00K\x0a\x85", b"K\x00K\x04\x85", 1))
    with pytest.raises(CorruptError, match="reaches to element 3"):
        open_file(path)


@pytest.mark.parametrize(("start", "numel"), [(0, 3), (4, 0)])
def test_an_old_storage_view_may_be_at_the_start_or_empty(tmp_path: Path, start: int, numel: int) -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(10.0), buffer, _use_new_zipfile_serialization=False)
    data = buffer.getvalue()
    at = data.index(b"Nt", data.index(b"FloatStorage"))
    data = data[:at] + b"(X\x01\x00\x00\x00vK%cK%ct" % (start, numel) + data[at + 1 :]
    path = tmp_path / "old.pt"
    path.write_bytes(data.replace(b"K\x00K\x0a\x85", b"K\x00K%c\x85" % numel, 1))
    assert read(tensor_of(open_file(path).root)).tolist() == list(range(start, start + numel))


@pytest.mark.parametrize("part", [2, 3, 4])
def test_a_structured_element_type_of_numpy_is_refused(part: int) -> None:
    """By each of subarray, names and fields."""
    state: list[Value] = [3, "<", None, None, None, -1, -1, 0]
    assert dtype_of(Record(Global("numpy", "dtype"), ("f4", False, True), state=tuple(state)), "x") == np.float32
    state[part] = ("a",)
    with pytest.raises(UnsupportedError, match="structured"):
        dtype_of(Record(Global("numpy", "dtype"), ("f4", False, True), state=tuple(state)), "x")


def test_a_window_of_a_file_is_opened_in_place(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"w": torch.arange(7)}, buffer)
    path = tmp_path / "many.distcp"
    path.write_bytes(b"before" + buffer.getvalue() + b"behind")
    opened = open_file(path, 6, len(buffer.getvalue()))
    assert read(tensor_of(opened.root["w"])).tolist() == list(range(7))
    with Reader() as reader:
        assert all(seal_is_valid(seal, reader) for seal in opened.seals())
    with pytest.raises(CorruptError, match="the file is cut short"):
        open_file(path, 6, len(buffer.getvalue()) + 7)


def test_a_flipped_bit_in_a_tensor_breaks_its_seal_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(100), "b": torch.arange(50)}, path)
    opened = open_file(path)
    storage = opened.root["b"].storage
    data = bytearray(path.read_bytes())
    data[storage.offset + 17] ^= 4
    path.write_bytes(data)
    again = open_file(path)
    with Reader() as reader:
        broken = [seal.label for seal in again.seals() if not seal_is_valid(seal, reader)]
    assert broken == ["a/data/1"]
    assert tensor_of(again.root["b"]).fragments[0].blob.seal.label == "a/data/1"  # type: ignore[attr-defined]


def test_a_flipped_bit_in_the_pickle_is_found_on_opening(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"name": torch.arange(100)}, path)
    data = bytearray(path.read_bytes())
    data[data.index(b"name")] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptError, match="do not match their checksum"):
        open_file(path)


def test_open_file_has_no_seals_of_an_archive_without_checksums(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    try:
        torch.serialization.set_crc32_options(False)
        torch.save({"a": torch.arange(5)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    opened = open_file(path)
    assert opened.seals() == ()
    assert opened.root["a"].storage.seal is None
    assert read(tensor_of(opened.root["a"])).tolist() == [0, 1, 2, 3, 4]


def test_a_file_of_a_big_endian_machine_is_refused_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save({"a": torch.arange(5)}, path)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "b.pt", "w") as new:
        for info in old.infolist():
            data = b"big" if info.filename.endswith("byteorder") else old.read(info)
            new.writestr(info.filename, data)
    with pytest.raises(UnsupportedError, match="big-endian"):
        open_file(tmp_path / "b.pt")


def test_open_file_refuses_what_is_no_checkpoint_with_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("global_step5\n")
    (tmp_path / "trailing").write_bytes(pickle.dumps({"a": 1}) + b"more")
    os.mkfifo(tmp_path / "fifo")
    for name in ("empty", "text", "trailing"):
        with pytest.raises(CorruptError, match=name):
            open_file(tmp_path / name)
    for name in ("absent", "fifo", "."):
        with pytest.raises(NotFoundError):
            open_file(tmp_path / name)
    with pytest.raises(NotFoundError):
        open_file("a\0b")


def test_a_torchscript_program_is_refused(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.pt") as old, zipfile.ZipFile(tmp_path / "script.pt", "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
        new.writestr("model/code/__torch__.py", "def forward(self): ...")
    with pytest.raises(UnsupportedError, match="TorchScript"):
        open_file(tmp_path / "script.pt")


# Writing


def as_ordered(content: dict[Any, Any]) -> StdDict:
    result = StdDict()
    result.update(content)
    return result


leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 1000), 1 << 1000)
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
)
keys = st.text() | st.integers(-(1 << 60), 1 << 60) | st.booleans() | st.tuples(st.text(), st.integers(0, 9))
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.sets(keys, max_size=4)
        | st.dictionaries(keys, inner, max_size=3).map(as_ordered)
    ),
    max_leaves=12,
)
shapes = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, shape = DTYPES[draw(st.sampled_from(sorted(DTYPES)))], draw(shapes)
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    data = draw(st.binary(min_size=nbytes, max_size=nbytes))
    if dtype == np.bool_:
        data = bytes(byte & 1 for byte in data)
    return Tensor.of(ArrayBlob(np.frombuffer(data, dtype).reshape(shape)))


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(trees, st.lists(tensors(), max_size=3))
def test_written_file_is_read_by_torch_safely_and_by_ckpt(
    tmp_path: Path, tree: Value, given_tensors: list[Tensor]
) -> None:
    path = tmp_path / "file.pt"
    with Reader() as reader:
        seals = write_file(path, {"tree": tree, "tensors": given_tensors}, reading_chunks(reader, max_nbytes=16))
        ours = open_file(path)
        assert set(seals) - {seal for seal in seals if not seal.nbytes} <= set(ours.seals())
        assert all(seal_is_valid(seal, reader) for seal in ours.seals())
    theirs = torch.load(path, weights_only=True)
    assert_same(ours.root["tree"], tree)
    assert_same_as_torch(ours.root, theirs)
    for ref, tensor in zip(ours.root["tensors"], given_tensors, strict=True):
        assert (ref.shape, ref.dtype) == (tensor.shape, tensor.dtype)
        assert read(tensor_of(ref)).tobytes() == read(tensor).tobytes()


def test_the_archive_is_built_as_torch_builds_it(tmp_path: Path) -> None:
    tree = {"a": torch.arange(100.0), "b": torch.arange(3, dtype=torch.int8)}
    torch.save(tree, tmp_path / "same.pt")
    theirs = (tmp_path / "same.pt").read_bytes()
    with Reader() as reader:
        write_file(tmp_path / "ours.pt", open_file(tmp_path / "same.pt").root, reading_chunks(reader), stem="same")
    ours = (tmp_path / "ours.pt").read_bytes()
    with zipfile.ZipFile(tmp_path / "same.pt") as a, zipfile.ZipFile(tmp_path / "ours.pt") as b:
        assert b.testzip() is None
        assert [i.filename for i in a.infolist()] == [i.filename for i in b.infolist()]
        for x, y in zip(a.infolist(), b.infolist(), strict=True):
            assert (x.compress_type, x.flag_bits, x.date_time) == (y.compress_type, y.flag_bits, y.date_time)
            if not x.filename.endswith(("data.pkl", "serialization_id")):
                assert a.read(x) == b.read(y)
    for storage in open_file(tmp_path / "ours.pt").storages:
        assert storage.offset % 64 == 0
    # Byte for byte the same from the second member's name on would need torch's own memo; the frame is the same.
    assert ours[:30] == theirs[:30]


def test_data_put_in_place_in_any_order_give_the_same_file_as_streaming(tmp_path: Path) -> None:
    root = {"a": Tensor.of(ArrayBlob(np.arange(50))), "b": Tensor.of(ArrayBlob(np.ones(3, np.float32))), "c": [1, "x"]}
    layout = layout_file(root, "file")
    chunks = reading_chunks(Reader())
    whole, crcs = b"".join(map(bytes, layout.stream(chunks, parts := []))), parts
    assert len(whole) == layout.nbytes
    path = tmp_path / "parallel.pt"
    with open(path, "wb") as file:
        for slot in reversed(layout.storages):
            file.seek(slot.offset)
            for chunk in chunks(slot.tensor):
                file.write(chunk)
        for offset, data in reversed(list(layout.frame(crcs))):
            file.seek(offset)
            file.write(data)
    assert path.read_bytes() == whole
    assert [seal.digest for seal in layout.seals(path, crcs)] == crcs


def test_a_storage_of_more_than_four_gigabytes_is_laid_out_in_zip64(tmp_path: Path) -> None:
    class Hole:
        shape, dtype = (5 << 30,), np.dtype("uint8")

    huge = Tensor(Hole.shape, Hole.dtype, ())
    path = tmp_path / "huge.pt"
    layout = layout_file({"huge": huge, "small": Tensor.of(ArrayBlob(np.arange(9, dtype=np.uint8)))}, "huge")
    crcs = [1, 0]
    with open(path, "wb") as file:
        slot = layout.storages[1]
        file.seek(slot.offset)
        file.write(bytes(range(9)))
        for offset, data in layout.frame(crcs):
            file.seek(offset)
            file.write(data)
    assert path.stat().st_size == layout.nbytes
    opened = open_file(path)
    assert opened.root["huge"].storage.nbytes == 5 << 30
    assert opened.root["huge"].storage.offset == layout.storages[0].offset
    assert read(tensor_of(opened.root["small"])).tolist() == list(range(9))
    got = torch.load(path, weights_only=True, mmap=True)
    assert got["huge"].shape == (5 << 30,)
    assert got["small"].tolist() == list(range(9))


def test_memory_stays_bounded_while_a_large_tensor_is_written(tmp_path: Path) -> None:
    given = []

    def chunks(tensor: Tensor) -> Iterator[memoryview]:
        buffer = bytearray(1 << 20)
        for _ in range(64):
            given.append(len(buffer))
            yield memoryview(buffer)

    (seal,) = write_file(tmp_path / "a.pt", Tensor((64 << 20,), np.dtype("uint8"), ()), chunks)
    assert sum(given) == seal.nbytes == 64 << 20
    with Reader() as reader:
        assert seal_is_valid(seal, reader)


def test_write_refuses_values_that_torch_cannot_store_before_it_begins(tmp_path: Path) -> None:
    for value in (object(), np.array([object()]), np.zeros(2, [("a", "i4")]), 1 << 9000, lambda: 1, datetime.now()):
        with pytest.raises(UnsupportedError):
            write_file(tmp_path / "a.pt", [value], lambda tensor: iter(()))
    assert not (tmp_path / "a.pt").exists()
    with pytest.raises(OutputError):
        write_file(tmp_path / "no" / "folder.pt", [1], lambda tensor: iter(()))
    with pytest.raises(ValueError, match="were given for a storage"):
        write_file(tmp_path / "b.pt", Tensor.of(ArrayBlob(np.arange(3))), lambda tensor: iter(()))


def test_write_file_reports_a_full_disk() -> None:
    with pytest.raises(NoSpaceError, match="No space left"):
        write_file(Path("/dev/full"), ["x" * 100_000], lambda tensor: iter(()))


def test_an_integer_is_written_in_as_many_bytes_as_pickle_allows() -> None:
    for bits in (7, 8, 15, 16, 31, 32, 63, 64, 2031, 2040, 8000):
        for value in (1 << bits, -(1 << bits), (1 << bits) - 1):
            assert pickle.loads(emit(value)) == value
            assert load_pickle(emit(value)) == value


def test_a_legacy_storage_that_lies_about_its_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    torch.save(torch.arange(5), path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    assert data[-48:-40] == struct.pack("<q", 5)
    path.write_bytes(data[:-48] + struct.pack("<q", 6) + data[-40:])
    with pytest.raises(CorruptError, match="should have 5 elements, but has 6"):
        open_file(path)
    path.write_bytes(data[:-1])
    with pytest.raises(CorruptError, match="truncated"):
        open_file(path)
    path.write_bytes(data + b"x")
    with pytest.raises(CorruptError, match="1 bytes follow"):
        open_file(path)
