"""What lies in torch files as values: each is read right, refused, or spoken of, by all commands alike."""

import io
import json
import pickle
import struct
import time
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.containers.typed_json import same
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import Global, Record, brief
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.state_dicts.pickled_optimizer import PickledOptimizer
from ckpt_formats.universal import Universal
from damage import BROKEN, NOT_FOUND, UNSAFE, UNSUPPORTED, Ran, ckpt
from held import bits, checkpoint, parameter

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, that sparse, nested and quantised tensors may change


def saved(folder: Path, value: Any, **options: Any) -> Path:
    torch.save(value, folder / "saved.pt", **options)
    return folder / "saved.pt"


def by_all(path: Path) -> list[Ran]:
    """What the three commands say of a file."""
    return [ckpt("inspect", path), ckpt("verify", path), ckpt("convert", path, path.parent / "target")]


# A value that repeats its parts without end


def nested(wrap: Callable[[Any], Any], levels: int = 30) -> Any:
    value: Any = [1]
    for _ in range(levels):
        value = wrap(value)
    return value


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


LAUGHS: dict[str, Callable[[], Any]] = {
    "lists": lambda: nested(lambda inner: [inner] * 10),
    "tuples": lambda: nested(lambda inner: (inner,) * 10),
    "dicts": lambda: nested(lambda inner: dict.fromkeys("abcdefghij", inner)),
    "objects": lambda: nested(lambda inner: [Holder(inner), Holder(inner), Holder(inner)]),
    "ordered dicts": lambda: nested(lambda inner: torch.nn.modules.module.OrderedDict.fromkeys("abcd", inner)),
    "on a tensor": lambda: _with_attribute(nested(lambda inner: [inner] * 10)),
}


def _with_attribute(value: Any) -> torch.Tensor:
    ones = torch.ones(2)
    ones.set = value  # type: ignore[attr-defined]
    return ones


@pytest.mark.parametrize("kind", LAUGHS)
def test_a_value_that_repeats_its_parts_without_end_is_refused_by_all_commands_at_once(
    kind: str, tmp_path: Path
) -> None:
    path = saved(tmp_path, {"w": torch.ones(2), "x": LAUGHS[kind]()})
    open_checkpoint(saved(tmp_path, {"w": torch.ones(2)}))  # what is imported once is not counted
    path = saved(tmp_path, {"w": torch.ones(2), "x": LAUGHS[kind]()})
    tracemalloc.start()
    began = time.process_time()
    ran = by_all(path)
    spent, most = time.process_time() - began, tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [one.code for one in ran] == [UNSAFE] * 3
    assert all("repeats its own parts" in one.err for one in ran)
    assert spent < 3
    assert most < 100e6
    assert not (tmp_path / "target").exists()


@pytest.mark.slow
def test_open_reads_values_that_are_shared_within_reason(tmp_path: Path) -> None:
    betas, row = (0.9, 0.95), list(range(50))
    groups = [{"betas": betas, "row": row} for _ in range(20_000)]
    path = saved(tmp_path, {"w": torch.ones(2), "groups": groups})
    assert [one.code for one in by_all(path)] == [0, 0, 0]


# Pickled objects


class Net(nn.Module):
    """Tied, with a buffer that is not saved, with attributes of all kinds, one of which refers to its own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.rnn = nn.LSTM(4, 2)
        self.head = nn.Linear(3, 4)
        self.head.weight = self.first.weight
        self.register_buffer("mask", torch.arange(3.0), persistent=False)
        self.rate = 0.25
        self.anchors = torch.tensor([8.0, 16.0])
        self.blocks = [self.first]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rnn(self.norm(self.first(x)))[0].sum() + self.head(x).sum()


@pytest.fixture(scope="module")
def trained() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net(torch.randn(5, 3)).backward()
    optimizer.step()
    return net, optimizer


def weights(path: Path) -> dict[str, Any]:
    """By name, tied names too."""
    restored = open_checkpoint(path)
    named = {name: read(p.weight) for name, p in restored.parameters.items() if p.role != "extra"}
    return named | {alias: named[name] for alias, name in restored.aliases.items()}


def assert_state(path: Path, state: dict[str, torch.Tensor]) -> None:
    tensors = weights(path)
    assert tensors.keys() == state.keys()
    for name, tensor in state.items():
        assert bits(tensors[name]) == bits(tensor.detach().numpy()), name


MODULES: dict[str, Callable[[nn.Module], Any]] = {
    "alone": lambda net: net,
    "parallel": nn.DataParallel,
    "compiled": torch.compile,
    "under a key": lambda net: {"model": net, "epoch": 3},
    "as a list": lambda net: [net],
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("how", MODULES)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_pickled_module_gives_its_tensors_by_the_names_of_its_state_dict(
    how: str, zipped: bool, trained: Any, tmp_path: Path
) -> None:
    pickled = MODULES[how](trained[0])
    path = saved(tmp_path, pickled, _use_new_zipfile_serialization=zipped)
    module = pickled if isinstance(pickled, nn.Module) else trained[0]
    prefix = "0." if how == "as a list" else ""
    assert_state(path, {f"{prefix}{name}": tensor for name, tensor in module.state_dict().items()})
    for ran in by_all(path):
        assert ran.code == 0
    output = ckpt("inspect", path).err + ckpt("inspect", path).out
    assert "pickled modules" in output
    assert type(module).__name__ in output or how == "as a list"
    assert "blocks" in output
    extras = open_checkpoint(path).extras["objects"]
    assert "rate" in brief(extras, 10_000)
    assert "mask" in brief(extras, 10_000)
    assert "anchors" in brief(extras, 10_000)


OPTIMIZERS: dict[str, Callable[[Any, Any], Any]] = {
    "both pickled": lambda net, optimizer: {"model": net, "optimizer": optimizer},
    "the optimizer pickled": lambda net, optimizer: {"model": net.state_dict(), "optimizer": optimizer},
    "by its scheduler": lambda net, optimizer: {
        "model": net.state_dict(),
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3),
    },
    "of an average": lambda net, optimizer: {"ema": net, "opt": optimizer, "updates": 7},
}


@pytest.mark.parametrize("how", OPTIMIZERS)
def test_a_pickled_optimizer_finds_its_parameters_by_identity(how: str, trained: Any, tmp_path: Path) -> None:
    net, optimizer = trained
    path = saved(tmp_path, OPTIMIZERS[how](net, optimizer))
    restored = open_checkpoint(path)
    prefix = "ema." if "ema.first.weight" in restored.parameters else ""
    for name, one in net.named_parameters():
        states = restored.parameters[f"{prefix}{name}"].states
        for state, tensor in optimizer.state[one].items():
            assert bits(read(states[state])) == bits(tensor.detach().numpy()), (name, state)
    assert restored.groups[0].options["lr"] == 0.01
    assert [ran.code for ran in by_all(path)] == [0, 0, 0]
    assert "AdamW" in ckpt("inspect", path).err + ckpt("inspect", path).out


def test_pickled_optimizer_carries_all_but_its_state_dict() -> None:
    state = {"state": {}, "param_groups": [], "defaults": {"lr": 0.1}}
    record = Record(Global("torch.optim.adam", "Adam"), state=state)
    kept = PickledOptimizer(record, "optimizer").attributes
    assert (kept.cls, kept.state) == (record.cls, {"defaults": {"lr": 0.1}})


def test_open_takes_an_optimizer_alone_for_no_model(trained: Any, tmp_path: Path) -> None:
    for ran in by_all(saved(tmp_path, trained[1])):
        assert ran.code == UNSUPPORTED
        assert "no weights" in ran.err


def test_a_torchscript_program_is_refused_for_what_it_is(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "program.pt")
    for ran in by_all(tmp_path / "program.pt"):
        assert ran.code == UNSUPPORTED
        assert "TorchScript" in ran.err


# Tensors that are more than elements of a storage


def sparse(layout: torch.layout) -> torch.Tensor:
    matrix = torch.tensor([[0.0, 1.5, 0, 0], [2.5, 0, 0, 0], [0, 0, 0, 3], [0, 0, 0, 0]])
    return matrix.to_sparse(layout=layout, blocksize=(2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None)


with warnings.catch_warnings(action="ignore"):
    COO, CSR, CSC = sparse(torch.sparse_coo).coalesce(), sparse(torch.sparse_csr), sparse(torch.sparse_bsc)
    PER_TENSOR = torch.quantize_per_tensor(torch.randn(3, 2), 0.1, 2, torch.qint8)
    PER_CHANNEL = torch.quantize_per_channel(torch.randn(3, 2), torch.rand(3) + 0.1, torch.zeros(3), 0, torch.quint8)
    RAGGED = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

    PARTS: dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]] = {
        "coo": (COO, {"indices": COO.indices(), "values": COO.values(), "size": torch.tensor([4, 4])}),
        "csr": (CSR, {"crow_indices": CSR.crow_indices(), "col_indices": CSR.col_indices(), "values": CSR.values()}),
        "bsc": (CSC, {"ccol_indices": CSC.ccol_indices(), "row_indices": CSC.row_indices(), "values": CSC.values()}),
        "quantised per tensor": (
            PER_TENSOR,
            {
                "int_repr": PER_TENSOR.int_repr(),
                "scale": torch.tensor(0.1, dtype=torch.float64),
                "zero_point": torch.tensor(2),
            },
        ),
        "quantised per channel": (
            PER_CHANNEL,
            {
                "int_repr": PER_CHANNEL.int_repr(),
                "scales": PER_CHANNEL.q_per_channel_scales(),
                "axis": torch.tensor(0),
            },
        ),
        "nested": (RAGGED, {"buffer": torch.ones(5)}),
        "conjugated": (
            torch.tensor([1 + 2j]).conj(),
            {"stored": torch.tensor([1 + 2j]), "conj": torch.tensor(True)},
        ),
        "of four bits": (
            torch.tensor([7, 9], dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
            {"float4_e2m1fn_x2_as_uint8": torch.tensor([7, 9], dtype=torch.uint8)},
        ),
    }


@pytest.mark.parametrize("as_parameter", [False, True], ids=["tensor", "parameter"])
@pytest.mark.parametrize("kind", PARTS)
def test_a_tensor_of_parts_is_read_as_its_parts_by_names_that_say_so(
    kind: str, as_parameter: bool, tmp_path: Path
) -> None:
    value, parts = PARTS[kind]
    if as_parameter:
        value = nn.Parameter(value, requires_grad=False)
    path = saved(tmp_path, {"w": value, "b": torch.ones(2)})
    tensors = weights(path)
    assert "w" not in tensors
    for name, tensor in parts.items():
        assert bits(tensors[f"w.{name}"]) == bits(tensor.numpy()), name
    for ran in by_all(path):
        assert ran.code == 0
        assert "composite tensors" in ran.out + ran.err


def test_parts_of_a_tensor_never_hide_a_tensor_of_that_name(tmp_path: Path) -> None:
    for ran in by_all(saved(tmp_path, {"w": COO, "w.values": torch.ones(2)})):
        assert ran.code == BROKEN
        assert "two tensors are called `w.values`" in ran.err


class Wrapped(torch.Tensor):
    """A tensor without elements of its own, as quantised ones of torchao and quanto are."""

    @staticmethod
    def __new__(cls: Any, data: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)

    def __init__(self, data: torch.Tensor, scale: torch.Tensor) -> None:
        self.inner, self.scale, self.block = data, scale, 32

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


class Plain(torch.Tensor):
    """A subclass with elements, and something set on it."""


def test_a_wrapper_of_tensors_is_read_as_what_it_wraps(tmp_path: Path) -> None:
    inner, scale = torch.arange(6, dtype=torch.int8).reshape(2, 3), torch.tensor([0.5])
    path = saved(tmp_path, {"w": Wrapped(inner, scale), "b": torch.ones(2)})
    tensors = weights(path)
    assert bits(tensors["w.inner"]) == bits(inner.numpy())
    assert bits(tensors["w.scale"]) == bits(scale.numpy())
    assert "block: 32" in brief(open_checkpoint(path).extras["w.object"], 1000)
    assert "Wrapped" in ckpt("verify", path).err


def test_attributes_of_a_tensor_are_carried(tmp_path: Path) -> None:
    one, other = nn.Parameter(torch.ones(2)), torch.ones(3).as_subclass(Plain)
    one.tag, other.extra = "decay", {"mean": torch.tensor([7.0])}  # type: ignore[attr-defined]
    path = saved(tmp_path, {"model": {"p": one, "t": other}})
    restored = open_checkpoint(path)
    text = brief(restored.extras, 1000)
    assert "tag: decay" in text
    assert bits(weights(path)["t.extra.mean"]) == bits(np.array([7], np.float32))
    assert bits(weights(path)["t.data"]) == bits(np.ones(3, np.float32))
    assert [ran.code for ran in by_all(path)] == [0, 0, 0]


def test_notes_name_attributes_of_a_tensor_that_are_nested_too_deeply(tmp_path: Path) -> None:
    """So the file cannot be written again as it was; which is no error."""
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    restored = open_checkpoint(saved(tmp_path, {"w": _with_attribute(deep)}))
    assert bits(read(restored.parameters["w"].weight)) == bits(np.ones(2, np.float32))
    assert "nested too deeply: not carried" in " ".join(map(str, restored.notices))
    assert restored.original is not None
    assert restored.original.form is not None
    assert restored.original.form() is None


META: dict[str, Callable[[], Any]] = {
    "all": lambda: {"w": torch.empty(3, device="meta")},
    "some": lambda: {"w": torch.ones(2), "v": torch.empty(3, device="meta")},
    "parameters": lambda: {"model": nn.Linear(2, 2, device="meta").state_dict(keep_vars=True)},
    "a module": lambda: nn.Linear(2, 2, device="meta"),
    "a lazy module": lambda: nn.LazyLinear(3),
    "states": lambda: {
        "model": {"w": torch.ones(2)},
        "optimizer": {"state": {0: {"m": torch.empty(2, device="meta")}}},
    },
}


@pytest.mark.parametrize("which", META)
def test_tensors_without_data_are_refused(which: str, tmp_path: Path) -> None:
    for ran in by_all(saved(tmp_path, META[which]())):
        assert ran.code == BROKEN
        assert "has no data" in ran.err
    assert not (tmp_path / "target").exists()


def test_extra_states_of_modules_are_no_weights(tmp_path: Path) -> None:
    states = {
        "a._extra_state": torch.ones(3, dtype=torch.uint8),
        "b._extra_state": {"amax": torch.ones(2)},
        "c._extra_state": io.BytesIO(b"state"),
        "_extra_state": 5,
    }
    path = saved(tmp_path, {"model": {"w": torch.ones(2), **states}})
    assert weights(path).keys() == {"w"}
    assert states.keys() <= open_checkpoint(path).extras.keys()
    assert [ran.code for ran in by_all(path)] == [0, 0, 0]


# Values beside tensors


NUMPY: dict[str, Any] = {
    "objects": np.array([1, "a", None, {"b": 2}], dtype=object),
    "rows": np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
    "dates": np.array(["2020-01-01"], dtype="M8[D]"),
    "texts": np.array(["ab", "c"]),
    "a date": np.datetime64("2020-01-01"),
    "a row": np.zeros(1, dtype=[("a", "i4")])[0],
}


@pytest.mark.parametrize("kind", NUMPY)
@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_that_are_no_tensors_do_not_hinder_the_rest(kind: str, protocol: int, tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(2), "x": NUMPY[kind]}, pickle_protocol=protocol)
    assert [ran.code for ran in by_all(path)] == [0, 0, 0]
    assert weights(path).keys() == {"w"}
    assert "x" in open_checkpoint(path).extras
    back = open_checkpoint(tmp_path / "target")
    assert same(back.extras["x"], open_checkpoint(path).extras["x"])


def test_a_state_dict_of_arrays_alone_is_one_of_tensors(tmp_path: Path) -> None:
    arrays = {"conv.weight": np.arange(6, dtype=">f4").reshape(2, 3), "conv.bias": np.ones(2, np.float16)}
    (tmp_path / "model.pkl").write_bytes(pickle.dumps({"model": arrays, "__author__": "x"}))
    tensors = weights(tmp_path / "model.pkl")
    assert {name: bits(a) for name, a in tensors.items()} == {
        name: bits(a.astype(a.dtype.newbyteorder("="))) for name, a in arrays.items()
    }
    assert "arrays" in ckpt("verify", tmp_path / "model.pkl").err


def archive() -> bytes:
    out = io.BytesIO()
    torch.save({"w": torch.ones(2)}, out)
    return out.getvalue()


@pytest.mark.parametrize("wrap", [bytes, bytearray, io.BytesIO])
def test_the_bytes_of_a_file_inside_a_file_are_named(wrap: Callable[[bytes], Any], tmp_path: Path) -> None:
    for ran in by_all(saved(tmp_path, {"weights": wrap(archive()), "w": torch.ones(1)})):
        assert ran.code == 0
        assert "not read" in ran.out + ran.err
        assert "weights" in ran.out + ran.err
    (tmp_path / "target" / "manifest.json").unlink()
    for ran in by_all(saved(tmp_path, {"weights": wrap(archive())})):
        assert ran.code == NOT_FOUND
        assert "weights" in ran.err


@pytest.mark.parametrize("value", [3, b"abc", "text", None, {}, [], {"epoch": 3}, torch.float32], ids=str)
def test_open_refuses_a_file_without_a_tensor(value: Any, tmp_path: Path) -> None:
    for ran in by_all(saved(tmp_path, value)):
        assert ran.code == NOT_FOUND
        assert "without a tensor" in ran.err


ROOTS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "a tensor": (lambda: torch.ones(3), {"value": 3}),
    "tensors": (lambda: [torch.ones(2), torch.ones(3)], {"0": 2, "1": 3}),
    "a tuple of a state dict and a number": (lambda: ({"w": torch.ones(2)}, 7), {"0.w": 2}),
    "odd keys": (
        lambda: {None: torch.ones(1), (1, 2): torch.ones(2), 3: torch.ones(3)},
        {"None": 1, "(1, 2)": 2, "3": 3},
    ),
    "a view": (lambda: {"w": torch.arange(9.0)[2:5]}, {"w": 3}),
    "an expanded one": (lambda: {"w": torch.ones(1).expand(5)}, {"w": 5}),
    "with things torch names": (
        lambda: {"w": torch.ones(1), "d": torch.float32, "s": torch.Size([1]), "f": nn.functional.relu, "c": nn.Linear},
        {"w": 1},
    ),
    "with tensors as keys": (lambda: {"w": torch.ones(1), "x": {torch.ones(2): 1, (torch.ones(2), 3): 4}}, {"w": 1}),
    "with a set of tensors": (lambda: {"w": torch.ones(1), "x": {torch.ones(2)}}, {"w": 1}),
}


@pytest.mark.parametrize("which", ROOTS)
def test_open_reads_files_of_unusual_form(which: str, tmp_path: Path) -> None:
    make, sizes = ROOTS[which]
    path = saved(tmp_path, make())
    assert {name: array.size for name, array in weights(path).items()} == sizes
    assert [ran.code for ran in by_all(path)] == [0, 0, 0]


@pytest.mark.parametrize(
    "value",
    [
        {"model": {0: torch.ones(1), "0": torch.ones(2)}},
        {0: torch.ones(1), "0": torch.ones(2)},
        {0: torch.ones(1), "0": 5},
        {None: torch.ones(1), "None": torch.ones(2)},
        {"a.b": torch.ones(1), "a": {"b": torch.ones(2)}},
        {"model": {"a": {1: torch.ones(1), "1": torch.ones(2)}}},
    ],
    ids=range(6),
)
def test_open_refuses_two_tensors_of_one_name(value: Any, tmp_path: Path) -> None:
    for ran in by_all(saved(tmp_path, value)):
        assert ran.code == BROKEN


def test_keys_that_differ_only_in_their_type_are_both_carried(tmp_path: Path) -> None:
    path = saved(tmp_path, {"w": torch.ones(1), "x": {0: 1, "0": 2, None: 3, "None": 4, (1, 2): 5}})
    assert [ran.code for ran in by_all(path)] == [0, 0, 0]
    assert open_checkpoint(tmp_path / "target").extras["x"] == {0: 1, "0": 2, None: 3, "None": 4, (1, 2): 5}


# Element types


def test_a_type_that_safetensors_lacks_is_refused_by_the_names_of_tensor_and_state(tmp_path: Path) -> None:
    path = saved(tmp_path, {"layer.w": torch.ones(2, dtype=torch.complex128)})
    ran = ckpt("convert", path, tmp_path / "target")
    assert ran.code == UNSUPPORTED
    assert all(word in ran.err for word in ("layer.w", "model", "complex128", "--skip"))
    assert ckpt("convert", path, tmp_path / "target.pt", "--to", "torch").code == 0


def safetensors_of(path: Path, dtype: str, shape: list[int], data: bytes) -> Path:
    header = json.dumps({"layer.w": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


@pytest.mark.parametrize(
    ("dtype", "shape", "stored"),
    [("F4", [2, 6], (2, 3)), ("F4", [2, 3], (3,)), ("F6_E2M3", [1, 4], (1, 3)), ("F6_E3M2", [4], (3,))],
)
def test_elements_of_less_than_a_byte_are_read_as_their_bytes(
    dtype: str, shape: list[int], stored: tuple[int, ...], tmp_path: Path
) -> None:
    data = bytes(range(1, 1 + int(np.prod(stored))))
    path = safetensors_of(tmp_path / "model.safetensors", dtype, shape, data)
    content = weights(path)["layer.w"]
    assert (content.shape, content.dtype, content.tobytes()) == (stored, np.uint8, data)
    for ran in by_all(path):
        assert ran.code == 0
        assert "layer.w" in ran.out + ran.err
        assert "F4" in ran.out + ran.err


def test_an_unknown_element_type_is_named_with_its_tensor(tmp_path: Path) -> None:
    for ran in by_all(safetensors_of(tmp_path / "model.safetensors", "F3", [2], b"x")):
        assert ran.code == UNSUPPORTED
        assert "F3" in ran.err
        assert "layer.w" in ran.err
    for ran in by_all(safetensors_of(tmp_path / "model.safetensors", "F4", [3], b"xy")):
        assert ran.code == BROKEN


def test_a_master_that_is_not_rounded_to_its_copy_is_no_fault(tmp_path: Path) -> None:
    """8-bit floats that are scales have no place among those that are values."""
    states = {"master": np.ones(3, DTYPES["float8_e4m3fn"]), "model": np.ones(3, DTYPES["float8_e8m0fnu"])}
    save(checkpoint([parameter("w", states)]), tmp_path / "target", Universal(), resources=Execution(1, 1 << 20))
    assert ckpt("verify", tmp_path / "target").code == 0


# What lies around the pickle


def with_member(path: Path, name: str) -> Path:
    """The same archive with one member more, written as torch writes them."""
    changed = path.with_name("more.pt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(changed, "w") as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))
        new.writestr(f"saved/{name}", b"x" * 64)
    return changed


@pytest.mark.parametrize("name", ["data/99", "extra/notes.txt", ".data/other"])
def test_a_member_of_an_archive_that_nothing_refers_to_is_refused(name: str, tmp_path: Path) -> None:
    for ran in by_all(with_member(saved(tmp_path, {"w": torch.ones(2)}), name)):
        assert ran.code == UNSUPPORTED
        assert name in ran.err


def test_attributes_of_a_dict_are_carried(tmp_path: Path) -> None:
    state = nn.BatchNorm1d(2).state_dict()
    assert "attributes" not in open_checkpoint(saved(tmp_path, state)).extras
    state._metadata[""]["scale"] = 0.5  # type: ignore[attr-defined]
    for value in (state, {"model": state}):
        assert "scale: 0.5" in brief(open_checkpoint(saved(tmp_path, value)).extras["attributes"], 1000)


def test_tensors_that_are_only_attributes_of_modules_are_named(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    net.__dict__["hidden"] = nn.Linear(3, 3)
    for ran in by_all(saved(tmp_path, net)):
        assert ran.code == 0
        assert "model.hidden" in ran.out + ran.err


def test_module_attribute_that_contains_itself_is_left_out_and_named(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    endless: list[Any] = [1]
    endless.append(endless)
    net.notes, net.owners = endless, [net]  # type: ignore[assignment]
    path = saved(tmp_path, net)
    assert weights(path).keys() == {"weight", "bias"}
    for ran in by_all(path):
        assert ran.code == 0
        assert "contain themselves" in ran.out + ran.err
        assert "model.notes" in ran.out + ran.err
        assert "model.owners" in ran.out + ran.err


def test_weights_that_a_quantised_module_packs_are_read(tmp_path: Path) -> None:
    packed = (torch.quantize_per_tensor(torch.ones(2, 2), 0.5, 0, torch.qint8), torch.ones(2))
    tensors = weights(saved(tmp_path, {"0.scale": torch.tensor(1.0), "0._packed_params": packed, "b": torch.ones(1)}))
    assert {"0._packed_params.0.int_repr", "0._packed_params.0.scale", "0._packed_params.1"} <= tensors.keys()
