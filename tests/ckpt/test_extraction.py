"""`ckpt extract`: a tensor, a state or a block of it comes out bit for bit, and nothing is overwritten."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ckpt as library
from ckpt.job.extraction import find_tensor, npy_dtype, write_npy
from ckpt.pipeline import Execution
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import InvalidArgumentError, NoMatchError
from ckpt_formats.core.tensor import read
from damage import SAMPLES, ckpt
from held import STORABLE, array, checkpoint, parameter

RUN = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"


@pytest.mark.parametrize("dtype", [*STORABLE, DTYPES["complex128"]], ids=str)
@pytest.mark.quick(24)
def test_a_npy_file_holds_every_value_of_every_type(dtype: np.dtype, tmp_path: Path) -> None:
    values = array(dtype, (300, 70))
    source = checkpoint([parameter("w", {"model": values})])
    target = tmp_path / "w.npy"
    nbytes = write_npy(source, source["w"].weight, target, Execution(1, 1 << 18))
    loaded = np.load(target)
    assert (nbytes, loaded.shape) == (target.stat().st_size, (300, 70))
    if npy_dtype(dtype) == dtype:
        assert (loaded.dtype, loaded.tobytes()) == (dtype, values.tobytes())
    else:  # back in its own type, with NaN as NaN
        assert loaded.dtype == np.float32
        with np.errstate(invalid="ignore"):
            assert np.array_equal(loaded.astype(np.float64), values.astype(np.float64), equal_nan=True)
        if dtype == ml_dtypes.bfloat16:
            assert (loaded.view(np.uint32) >> 16).astype(np.uint16).tobytes() == values.tobytes()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("head.weight", ...),
        ("head.weight[0:2]", np.s_[0:2]),
        ("head.weight[-3:, 4]", np.s_[-3:, 4]),
        ("head.weight[7]", np.s_[7]),
        ("head.weight[ ..., :5 ]", np.s_[..., :5]),
        ("head.weight[5:5]", np.s_[5:5]),
        ("head.weight[1, 2]", np.s_[1, 2]),
    ],
)
def test_blocks_are_those_of_numpy(text: str, key: object) -> None:
    run = library.open(RUN)
    for state in ("", ".exp_avg"):
        name, bracket, rest = text.partition("[")
        whole = np.asarray(run["head.weight"].states["exp_avg"] if state else run["head.weight"].weight)
        block = find_tensor(run, f"{name}{state}{bracket}{rest}").tensor
        wanted = np.asarray(whole[key])
        assert (block.shape, read(block).tobytes()) == (wanted.shape, wanted.tobytes())


def test_a_name_with_brackets_or_points_is_taken_as_it_is() -> None:
    one, two = np.float32([1]), np.float32([2])
    source = checkpoint([parameter("a[0]", {"model": one}), parameter("a", {"model": two, "x.y": one * 3})])
    assert read(find_tensor(source, "a[0]").tensor) == [1]
    assert read(find_tensor(source, "a[0:1]").tensor) == [2]
    assert read(find_tensor(source, "a.x.y").tensor) == [3]


def test_find_tensor_refuses_what_is_not_there_and_says_what_is() -> None:
    run = library.open(RUN)
    with pytest.raises(NoMatchError, match=r"no tensor is called `heat\.weight`") as similar:
        find_tensor(run, "heat.weight[0]")
    assert "`head.weight`" in str(similar.value.hint)
    with pytest.raises(NoMatchError) as state:
        find_tensor(run, "head.weight.momentum")
    assert "exp_avg_sq" in str(state.value.hint)
    for text in ("head.weight[::2]", "head.weight[0, 0, 0]", "head.weight[-]", "head.weight[999]"):
        with pytest.raises(InvalidArgumentError, match=r"head\.weight"):
            find_tensor(run, text)


def test_a_target_is_written_whole_and_never_replaced(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.numpy").load_file
    for name in ("x.npy", "x.safetensors"):
        assert ckpt("extract", RUN, "head.weight.exp_avg[0:3]", tmp_path / name).code == 0
        before = (tmp_path / name).read_bytes()
        again = ckpt("extract", RUN, "head.weight", tmp_path / name)
        assert (again.code, (tmp_path / name).read_bytes()) == (30, before)
    wanted = np.asarray(library.open(RUN)["head.weight"].states["exp_avg"])[:3]
    assert np.array_equal(np.load(tmp_path / "x.npy"), wanted)
    assert np.array_equal(load_file(tmp_path / "x.safetensors")["head.weight.exp_avg"], wanted)
    assert ckpt("extract", RUN, "head.weight", tmp_path / "no" / "x.npy").code == 30
    assert ckpt("extract", RUN, "head.weight", tmp_path / "x.csv").code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "x.safetensors"]


def test_small_tensors_are_printed_and_large_ones_refused() -> None:
    done = ckpt("extract", RUN, "head.weight[1, 2:5]", "--json")
    values = np.asarray(library.open(RUN)["head.weight"])[1, 2:5]
    assert json.loads(done.out)["values"] == values.astype(np.float32).tolist()
    assert ckpt("extract", RUN, "head.weight[1, 2:5]").out.startswith("head.weight  bfloat16 [3]\n[")
    assert (ckpt("extract", RUN, "head.weight").code, "NAME[0:10]" in ckpt("extract", RUN, "head.weight").err) == (
        2,
        True,
    )


def test_a_key_error_suggests_names() -> None:
    run = library.open(RUN)
    with pytest.raises(KeyError, match=r"no parameter is called `module\.head\.weight`; did you mean `head\.weight`"):
        run["module.head.weight"]
    assert "module.head.weight" not in run
    assert run.get("gone") is None
