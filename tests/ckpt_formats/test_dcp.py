"""PyTorch Distributed Checkpoint, against torch in one process: what it saves we read, what we write it loads."""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, _version
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from ckpt.job import save as save_checkpoint
from ckpt.pipeline import Execution
from ckpt_formats.containers.torchfile import open_item
from ckpt_formats.core.checkpoint import MODEL, Checkpoint
from ckpt_formats.core.errors import CkptError, NotFoundError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.tensor import read
from ckpt_formats.engines.dcp import DCP, items
from ckpt_formats.engines.dcp.balance import RankGrid, block_rows
from ckpt_formats.engines.dcp.items import ItemReader
from ckpt_formats.engines.dcp.metadata import ItemRange
from ckpt_formats.engines.dcp.nesting import flattened
from ckpt_formats.engines.dcp.objects import ObjectReader
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.state_dicts.keys import ACCELERATE, NESTED, STYLES, TORCHTITAN, StateKeys
from ckpt_formats.universal import Universal
from dcp_states import MESHES, NAMES, State, exact, flat, loaded, raw, save, state
from held import array, bits, checkpoint, contents, everything, folder, parameter, plain, tensor

EFFORT = Execution(2, 1 << 20)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def write(source: Checkpoint, target: Path, dp: int = 1, tp: int = 1, **goal: Any) -> Path:
    save_checkpoint(source, target, DCP(dp=dp, tp=tp, **goal), resources=EFFORT)
    return target


def assert_holds(actual: Checkpoint, nested: State) -> None:
    """The model, the optimizer and its groups, bit for bit."""
    for _, _, lazy in actual.tensors():
        assert not list(lazy.problems())
    for name, values in nested["model"].items():
        assert_equal(read(actual.parameters[name].states[MODEL]), values)
    for name, kept in nested["optim"]["state"].items():
        for key, values in kept.items():
            assert_equal(read(actual.parameters[name].states[key]), values)
    groups = [({**group.options, "params": list(group.names)}) for group in actual.groups]
    assert exact(groups) == exact(nested["optim"]["param_groups"])


def assert_equal(actual: Any, values: torch.Tensor) -> None:
    assert (actual.dtype.name, actual.shape) == (str(values.dtype)[6:], tuple(values.shape))
    assert actual.tobytes() == raw(values)


WRITERS: dict[str, dict[str, Any]] = {
    "one file": {},
    "several threads": {"thread_count": 4},
    "a file for each item": {"single_file_per_rank": False},
}


@pytest.mark.parametrize("how", WRITERS)
def test_dcp_reads_what_torch_saved_bit_for_bit(how: str, tmp_path: Path) -> None:
    saved = state()
    restored = open_checkpoint(save(saved, tmp_path / "saved", **WRITERS[how]))
    assert_holds(restored, saved)
    assert (restored.origin.engine, restored.origin.step, restored.notices) == ("dcp", 7, ())
    assert restored.extras["lr_scheduler"] == {"last_epoch": 7, "base_lrs": [0.1, 0.2]}
    assert restored.extras["misc"]["bytes"] == b"raw"
    assert restored.extras["misc"]["none"] is None
    assert_equal(read(restored.parameters[restored.extras["misc"]["tuple"][1].name].weight), torch.ones(2))


def test_dcp_reads_compressed_streams_bit_for_bit(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    saved = state(rows=4099)
    restored = open_checkpoint(save(saved, tmp_path / "saved", _extensions=[ZStandard()]))
    assert_holds(restored, saved)
    assert_equal(read(restored.parameters[restored.extras["misc"]["tuple"][1].name].weight), torch.ones(2))
    weight, values = restored.parameters["layers.0.w"].weight, saved["model"]["layers.0.w"].numpy()
    with Reader() as reader:
        for box in (Box((4000, 1), (4001, 3)), Box((0, 0), (4, 4)), Box((17, 2), (4099, 3)), Box((3, 0), (900, 4))):
            assert bits(read(weight.crop(box), reader)) == bits(np.ascontiguousarray(values[box.index]))
    # Its values lie in all of the item: compressed bytes cannot be told apart.
    (whole,), (part,) = weight.sources(), weight.crop(Box((17, 2), (18, 3))).sources()
    assert part == whole
    assert (whole.dtype, 0 < whole.shape[0] < values.nbytes) == (np.uint8, True)


def test_dcp_reads_what_torch_saved_before_2_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_version, "_derived_version", "2_3")
    saved = state()
    saved["plain"] = {"a": 1, "b": [{"c": 2}]}
    save(saved, tmp_path / "saved")
    held = FileSystemReader(tmp_path / "saved").read_metadata().state_dict_metadata
    assert isinstance(held["plain"], BytesStorageMetadata), "one item for the whole dict"
    restored = open_checkpoint(tmp_path / "saved")
    assert_holds(restored, saved)
    assert restored.extras["plain"] == saved["plain"]


def test_dcp_has_no_seals_of_an_archive_without_checksums(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        saved = state()
        save(saved, tmp_path / "saved")
    finally:
        torch.serialization.set_crc32_options(True)
    restored = open_checkpoint(tmp_path / "saved")
    assert_holds(restored, saved)
    assert len(restored.seals) == 0
    assert_holds(open_checkpoint(write(restored, tmp_path / "copy")), saved)


def test_dcp_reads_the_same_parameters_from_every_layout_of_keys(tmp_path: Path) -> None:
    nested = state()
    numbers = {name: i for i, name in enumerate(NAMES)}
    numbered = {
        "state": {numbers[name]: kept for name, kept in nested["optim"]["state"].items()},
        "param_groups": [
            {**group, "params": [numbers[name] for name in group["params"]]}
            for group in nested["optim"]["param_groups"]
        ],
    }
    layouts: dict[str, StateKeys] = {}
    save(nested, tmp_path / "nested")
    save(flat(nested), tmp_path / "flat")
    save({"model": nested["model"]}, tmp_path / "pair" / "pytorch_model_fsdp_0")
    save({"optimizer": nested["optim"]}, tmp_path / "pair" / "optimizer_0")
    save({"model": nested["model"], "optimizer": numbered}, tmp_path / "numbered")
    by_layout = {
        name: open_checkpoint(tmp_path / name, ReadOptions(order=NAMES))
        for name in ("nested", "flat", "pair", "numbered")
    }
    for one in by_layout.values():
        assert_holds(one, nested)
    layouts = {name: StateKeys(**one.origin.layout["keys"]) for name, one in by_layout.items()}
    assert layouts == {"nested": NESTED, "flat": TORCHTITAN, "pair": ACCELERATE, "numbered": ACCELERATE}
    assert by_layout["flat"].origin.engine == "torchtitan"


def test_dcp_leaves_names_flat_when_no_paths_are_saved(tmp_path: Path) -> None:
    model = {f"model.{name}": values for name, values in state()["model"].items()}
    restored = open_checkpoint(save(model, tmp_path / "saved", flatten=False))
    assert set(restored.parameters) == set(model)


@pytest.mark.quick(4)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("keys", [*(style for style in STYLES if style != "megatron-fsdp"), None], ids=str)
def test_torch_loads_a_written_dcp_as_its_own(keys: str | None, mesh: tuple[int, int], tmp_path: Path) -> None:
    nested = state()
    saved = flat(nested) if keys == "torchtitan" else nested
    if keys == "accelerate":
        saved = {("optimizer" if key == "optim" else key): value for key, value in nested.items()}
    source = open_checkpoint(save(saved, tmp_path / "saved"))
    style = None if keys is None else STYLES[keys]
    written = write(
        source, tmp_path / "written", *mesh, keys=style, rules=(Rule("head.w", axis=1), Rule(".*w", axis=0))
    )
    if keys == "accelerate":
        actual = loaded(written / "pytorch_model_fsdp_0") | loaded(written / "optimizer_0")
    else:
        actual = loaded(written)
    assert exact(actual) == exact(saved)
    assert_holds(open_checkpoint(written), nested)


def test_torch_loads_a_written_dcp_into_its_own_tensors(tmp_path: Path) -> None:
    saved = state()
    written = write(open_checkpoint(save(saved, tmp_path / "saved")), tmp_path / "written", 3)
    fresh = state(seed=1)
    dcp.load(fresh, checkpoint_id=str(written), no_dist=True)
    assert exact(fresh) == exact(saved)


def test_dcp_writes_the_metadata_that_torch_writes(tmp_path: Path) -> None:
    saved = state()
    written = write(open_checkpoint(save(saved, tmp_path / "saved")), tmp_path / "written")
    theirs, ours = (FileSystemReader(path).read_metadata() for path in (tmp_path / "saved", written))
    for metadata in (theirs, ours):
        metadata.state_dict_metadata = {
            k: v for k, v in metadata.state_dict_metadata.items() if not k.startswith("ckpt")
        }
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert {k: v for k, v in ours.planner_data.items() if k[:4] != "ckpt"} == theirs.planner_data
    assert {index for index in ours.storage_data if index.fqn[:4] != "ckpt"} == set(theirs.storage_data)
    assert (ours.version, ours.storage_meta.modules) == (theirs.version, theirs.storage_meta.modules)


def test_universal_and_back_changes_nothing(tmp_path: Path) -> None:
    saved = state()
    save(saved, tmp_path / "saved")
    save_checkpoint(open_checkpoint(tmp_path / "saved"), tmp_path / "universal", Universal(), resources=EFFORT)
    assert exact(loaded(write(open_checkpoint(tmp_path / "universal"), tmp_path / "written", 4))) == exact(saved)


def test_dcp_keeps_masters_copies_and_extras(tmp_path: Path) -> None:
    source = everything()
    for number, mesh in enumerate(MESHES):
        again = open_checkpoint(write(source, tmp_path / str(number), *mesh))
        assert contents(again) == contents(source)
        assert plain(dict(again.extras)) == plain(dict(source.extras))
        assert again.groups == source.groups
        assert again.aliases == source.aliases
        assert {n: (p.role, plain(p.values)) for n, p in again.parameters.items()} == {
            n: (p.role, plain(p.values)) for n, p in source.parameters.items()
        }


def test_dcp_returns_a_deepspeed_checkpoint_unchanged(tmp_path: Path) -> None:
    source = open_checkpoint(Path("sample_checkpoints/deepspeed-0.19-bf16opt-tp2-pp2"))
    written = write(source, tmp_path / "written", 2, 2)
    again = open_checkpoint(written)
    assert contents(again) == contents(source)
    assert plain([dict(g.options) for g in again.groups]) == plain([dict(g.options) for g in source.groups])
    assert set(again.extras) == set(source.extras)
    torch_has = loaded(written)["model"]
    assert set(torch_has) == {n for n, p in source.parameters.items() if p.role != "extra"} | set(source.aliases)


@given(st.data())
def test_dcp_returns_any_tensors_over_any_mesh(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=4))
    dp, tp = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    axis = data.draw(st.integers(0, 2))
    kinds = ("float32", "bfloat16", "int64", "float8_e5m2", "uint16")
    parameters = [
        parameter(f"p{i}.w", {"model": array(np.dtype(data.draw(st.sampled_from(kinds))), shape, i)})
        for i, shape in enumerate(shapes)
    ]
    source = checkpoint(parameters)
    with folder() as at:
        again = open_checkpoint(write(source, at / "written", dp, tp, rules=(Rule(".*", axis=axis),)))
        assert contents(again) == contents(source)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple), st.integers(1, 6), st.integers(1, 4), st.data())
def test_blocks_cover_a_tensor_once_as_torch_chunks_it(
    shape: tuple[int, ...], dp: int, tp: int, data: st.DataObject
) -> None:
    axis = data.draw(st.one_of(st.none(), st.integers(0, len(shape) - 1)))
    seen, numbers = np.zeros(shape, int), []
    for rows in block_rows(shape, RankGrid(dp, tp), axis):
        assert (rows.column is None) == (axis is None)
        for row in range(rows.count):
            box = rows.box(row)
            seen[box.index] += 1
            numbers.append(rows.first + row)
            theirs = torch.arange(seen.size).reshape(shape)
            if axis is not None:
                theirs = theirs.chunk(tp, axis)[rows.column]
            theirs = theirs.chunk(dp, 0)[row]
            assert theirs.tolist() == np.arange(seen.size).reshape(shape)[box.index].tolist()
    assert (seen == 1).all()
    assert numbers == list(range(len(numbers)))


_LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.just("tensor"))
_TREES = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.sampled_from("abc"), st.integers(0, 3)), inner, max_size=3),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "a.b"]), _TREES, max_size=3))
def test_state_dicts_are_flattened_as_torch_does_it(tree: dict[str, Any]) -> None:
    lazy = tensor(np.zeros(2))

    def with_tensors(value: Any, tensors: Any) -> Any:
        if isinstance(value, dict):
            return {key: with_tensors(item, tensors) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(with_tensors(item, tensors) for item in value)
        return tensors if value == "tensor" else value

    try:
        _, theirs = flatten_state_dict(with_tensors(tree, torch.zeros(2)))
    except ValueError:
        with pytest.raises(UnsupportedError, match="would both be called"):
            list(flattened(with_tensors(tree, lazy)))
        return
    assert {name: path for name, path, _ in flattened(with_tensors(tree, lazy))} == theirs


class Counting(Reader):
    """Counts what is read."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def read_into(self, path: Path, offset: int, out: memoryview, seal: Any = None) -> None:
        self.nbytes += len(out)
        super().read_into(path, offset, out, seal)


@pytest.mark.parametrize(
    ("box", "slack"),
    [
        (Box((0, 0), (1, 64)), 1),
        (Box((100, 0), (101, 64)), 1),
        (Box((10, 0), (20, 64)), 1),
        (Box((250, 0), (260, 64)), 1),
        (Box((0, 0), (1024, 64)), 1),
        (Box((5, 3), (6, 9)), 1),
        (Box((3, 0), (1000, 32)), 2),
        (Box((0, 0), (1024, 1)), 1024),
    ],
    ids=str,
)
def test_dcp_reads_a_block_without_the_rest(box: Box, slack: int, tmp_path: Path) -> None:
    values = array(np.dtype(np.float32), (1024, 64))
    written = write(checkpoint([parameter("w", {"model": values})]), tmp_path / "written", 4)
    weight = open_checkpoint(written).parameters["w"].weight
    assert len(weight.fragments) == 4
    with Counting() as reader:
        assert bits(read(weight.crop(box), reader)) == bits(np.ascontiguousarray(values[box.index]))
    # Nearby runs are fetched together, with what is between them.
    assert reader.nbytes <= box.size * 4 * slack


def test_opening_a_checkpoint_opens_no_items(tmp_path: Path) -> None:
    written = write(
        checkpoint([parameter("w", {"model": array(np.dtype(np.float32), (64, 8))})]), tmp_path / "written", 4
    )
    for file in written.glob("*.distcp"):
        if not file.name.startswith("__0_"):
            file.write_bytes(bytes(file.stat().st_size))
    weight = open_checkpoint(written).parameters["w"].weight
    assert weight.shape == (64, 8)
    assert len(list(weight.problems())) == 3


@pytest.mark.parametrize("at", [0, 1 << 20, 3 << 19])
def test_dcp_takes_items_for_equal_when_every_byte_is(at: int, tmp_path: Path) -> None:
    values = bytearray(os.urandom((3 << 19) + 1))
    (tmp_path / "one").write_bytes(values)
    objects, one, two = (
        ObjectReader(ItemReader(tmp_path)),
        ItemRange("one", 0, len(values)),
        ItemRange("two", 0, len(values)),
    )
    (tmp_path / "two").write_bytes(values)
    assert objects.same(one, two)
    values[at] ^= 1
    (tmp_path / "two").write_bytes(values)
    assert not objects.same(one, two)
    assert not objects.same(one, ItemRange("one", 0, at))


@pytest.mark.parametrize("value", [3, [None], [b"x"], [(1, "a")], {"a": 1}, [[1]]], ids=repr)
def test_dcp_gives_each_place_its_own_value_of_equal_items(value: Any, tmp_path: Path) -> None:
    torch.save(value, tmp_path / "one")
    item = ItemRange("one", 0, (tmp_path / "one").stat().st_size)
    objects = ObjectReader(ItemReader(tmp_path))
    first, second = objects.read("first", item).value, objects.read("second", item).value
    assert first == second == value
    # Only a value that somebody can change must be two; the others are parsed once.
    assert (first is second) == (not isinstance(value, (list, dict)))
    assert (len(objects._known) == 1) == (value not in ({"a": 1}, [[1]]))


def test_dcp_parses_items_that_differ_in_values_alone_once(tmp_path: Path, monkeypatch: Any) -> None:
    parsed: list[object] = []
    monkeypatch.setattr(items, "open_item", lambda window: parsed.append(window) or open_item(window))
    values = {f"w{i}": torch.full((4, 3), float(i)) for i in range(5)}
    restored = open_checkpoint(save({"model": values}, tmp_path))
    for name, value in values.items():
        assert_equal(read(restored.parameters[name].weight), value)
    assert len(parsed) == 1


def test_dcp_plans_as_many_bytes_for_every_rank(tmp_path: Path) -> None:
    source = checkpoint([parameter(f"w{i}", {"model": array(np.dtype(np.float32), (64, 64 + i))}) for i in range(8)])
    sizes = [part.nbytes for part in DCP(dp=4).plan(source).files]
    assert len(sizes) == 4
    assert max(sizes) < 1.1 * min(sizes)


def test_dcp_reads_the_newest_of_several_steps_with_a_note(tmp_path: Path) -> None:
    for step in (5, 10, 9):
        saved = {**state(seed=step), "train_state": {"step": step, "note": "text"}}
        save(saved, tmp_path / "run" / "checkpoint" / f"step-{step}")
    restored = open_checkpoint(tmp_path / "run")
    assert_holds(restored, state(seed=10))
    assert [str(notice) for notice in restored.notices] == [
        "step-10 is read, the newest of 3 checkpoints here",
        "other checkpoints of the folder, which are not read: checkpoint/step-5/, checkpoint/step-9/",
    ]
    (tmp_path / "run" / "checkpoint" / "step-10" / ".metadata").unlink()
    broken = open_checkpoint(tmp_path / "run" / "checkpoint")
    assert_holds(broken, state(seed=9))
    assert "newer, but the save was broken off: step-10" in map(str, broken.notices)
    shutil.move(tmp_path / "run" / "checkpoint" / "step-5", tmp_path / "run" / "checkpoint" / "best-1")
    with pytest.raises(CkptError, match=r"holds 3 checkpoints: best-1, step-9, step-10"):
        open_checkpoint(tmp_path / "run" / "checkpoint")


def test_dcp_takes_the_step_from_the_folder_when_nothing_else_states_it(tmp_path: Path) -> None:
    saved = state()
    save(saved, tmp_path / "best-99")
    save({"model": saved["model"]}, tmp_path / "step-98")
    assert open_checkpoint(tmp_path / "best-99").origin.step == 7
    assert open_checkpoint(tmp_path / "step-98").origin.step == 98


def test_notes_name_files_beside_a_checkpoint_that_are_not_read(tmp_path: Path) -> None:
    nested = state()
    save({"model": nested["model"]}, tmp_path / "pair" / "pytorch_model_fsdp_0")
    save({"optimizer": nested["optim"]}, tmp_path / "pair" / "optimizer_0")
    (tmp_path / "pair" / "scheduler.bin").write_bytes(b"x")
    (tmp_path / "pair" / "optimizer_0" / "meta.pt").write_bytes(b"x")
    shutil.copytree(tmp_path / "pair" / "optimizer_0", tmp_path / "half")
    half = open_checkpoint(tmp_path / "half")
    assert any("and not read: meta.pt" in notice for notice in half.notices)


def test_dcp_is_detected_by_its_metadata(tmp_path: Path) -> None:
    save(state(), tmp_path / "saved")
    assert detect(tmp_path / "saved").name == "dcp"
    assert not DCP().detect(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    assert not DCP().detect(tmp_path / "empty")


def test_entry_of_a_written_dcp_can_be_loaded_alone(tmp_path: Path) -> None:
    saved = state()
    written = write(open_checkpoint(save(saved, tmp_path / "saved")), tmp_path / "written", 2)
    loaded_state: State = {}
    _load_state_dict(
        loaded_state, FileSystemReader(written), planner=_EmptyStateDictLoadPlanner(keys={"train_state"}), no_dist=True
    )
    assert loaded_state == {"train_state": saved["train_state"]}
    held = FileSystemReader(written).read_metadata().state_dict_metadata
    assert isinstance(held["model.layers.0.w"], TensorStorageMetadata)


@pytest.mark.parametrize("pattern", [".metadata", "*.distcp"])
def test_file_of_a_dcp_is_not_detected_as_a_file_of_torch(pattern: str, tmp_path: Path) -> None:
    file = next(write(everything(), tmp_path / "step").glob(pattern))
    with pytest.raises(NotFoundError, match="which is a folder") as caught:
        open_checkpoint(file)
    assert str(tmp_path / "step") in str(caught.value.hint)


@pytest.mark.parametrize(
    ("value", "paths"),
    [
        ([1, [2]], [("a",)]),
        ([1, {"b": 2}], [("a", 0), ("a", 1, "b")]),
        ([[1, {"b": 2}], 3], [("a", 0, 0), ("a", 0, 1, "b"), ("a", 1)]),
        ((1, {"b": 2}), [("a",)]),
    ],
)
def test_flattened_divides_lists_with_dicts_in_them(value: Any, paths: list[tuple[str | int, ...]]) -> None:
    assert [path for _, path, _ in flattened({"a": value})] == paths
