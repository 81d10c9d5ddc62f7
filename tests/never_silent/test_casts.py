"""Values that change other than by rounding: a cast, an average or a merge counts them, and says which tensors have them."""
# ruff: noqa: E501 -- sentences

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckpt.combine import average, merge_lora
from ckpt.job import Job, save
from ckpt.pipeline import Execution, Result
from ckpt.pipeline.receipts import from_lines, to_line
from ckpt.pipeline.shard import Shard
from ckpt_formats.core import transfer
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin
from ckpt_formats.core.dtypes import DTYPES, is_float
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.format import Receipt
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.value_changes import ValueChange, changed_by_cast, count_kinds, totals
from ckpt_formats.engines.dcp import DCP
from ckpt_formats.engines.deepspeed import DeepSpeed
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from damage import UNSUPPORTED, ckpt
from held import array, checkpoint, parameter

F32 = np.dtype(np.float32)
FLOATS = [name for name, dtype in DTYPES.items() if is_float(dtype) and name != "float8_e8m0fnu"]


def large() -> Any:
    """Numbers of which fp16 holds 7 not at all, and 5 only as zero; a NaN, an infinity and zeros stay what they are."""
    values = np.linspace(-1, 1, 600 * 40, dtype=np.float32).reshape(600, 40)
    values[:7, 3] = [1e5, -7e4, 1e30, 65520, -1e38, 3e38, 1e6]
    values[9, :5] = [1e-9, -1e-9, 1e-30, 2e-8, -1e-44]
    values[500, :4] = [np.nan, np.inf, 0.0, -0.0]
    return values


def model(**more: Any) -> Checkpoint:
    return checkpoint([parameter("w", {"model": large()}), parameter("b", {"model": np.ones(40, np.float32)}, **more)])


def trained() -> Checkpoint:
    states = {"master": large(), "exp_avg": np.zeros((600, 40), F32), "exp_avg_sq": np.zeros((600, 40), F32)}
    return checkpoint([parameter("w", states, step=3)], groups=(Group({"lr": 0.1}, ("w",)),), origin=Origin("held"))


def counts(result: Result) -> list[tuple[str, int, int]]:
    return [(one.name, one.overflows, one.underflows) for one in result.changed]


@pytest.mark.parametrize("name", [name for name, dtype in DTYPES.items() if is_float(dtype)])
def test_count_changes_sees_the_kinds_of_numpy(name: str) -> None:
    values = array(DTYPES[name], (37, 11), 5)
    values.reshape(-1)[:3] = np.array([0, 1, 2], np.float32).astype(DTYPES[name])
    with np.errstate(invalid="ignore"):
        wide, kinds = values.astype(np.float64), count_kinds(values)
    assert (kinds.zeros, kinds.nans, kinds.infinities) == (
        (wide == 0).sum(),
        np.isnan(wide).sum(),
        np.isinf(wide).sum(),
    )
    assert kinds.nans or name == "float8_e8m0fnu"


@pytest.mark.parametrize("name", FLOATS)
def test_a_cast_counts_what_it_makes_infinite_and_what_it_makes_zero(name: str) -> None:
    before = large()
    with np.errstate(all="ignore"):
        after = before.astype(DTYPES[name])
    change = changed_by_cast("w", Box.whole(before.shape), before, after)
    wide = after.astype(np.float64)
    assert change.overflows == (np.isfinite(before) & ~np.isfinite(wide)).sum()
    assert change.underflows == ((before != 0) & (wide == 0)).sum()
    assert bool(change) == (name not in ("float32", "float64"))


@pytest.mark.parametrize("target", ["t.safetensors", "t.pt", "t.msgpack", "universal", "dcp"])
def test_every_format_counts_each_value_once(target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.Transfer.__init__, "__defaults__", (1 << 13, lambda nbytes: None))
    format = writable(target) if "." not in target and target != "universal" else None
    result = save(model().cast("fp16"), tmp_path / target, format, resources=Execution(workers=2))
    assert counts(result) == [("w", 7, 5)]
    (over, under) = result.notes
    assert str(over) == "7 values of 1 tensor are too large for float16 and became infinite or NaN: w (7)"
    assert str(under) == "5 values of 1 tensor are too small for float16 and became zero: w (5)"


@pytest.mark.parametrize("format", ["universal", "deepspeed"])
def test_a_copy_that_is_rounded_from_its_master_is_counted(format: str, tmp_path: Path) -> None:
    result = save(trained().cast("fp16"), tmp_path / "t", writable(format))
    assert counts(result) == [("w", 7, 5)]


def test_ranks_that_hold_parts_or_copies_count_each_value_once(tmp_path: Path) -> None:
    result = save(trained().cast("fp16"), tmp_path / "t", DeepSpeed(dp=3, tp=1))
    assert counts(result) == [("w", 7, 5)]


def test_convert_counts_blocks_of_several_files_once() -> None:
    def change(start: int, stop: int, count: int) -> ValueChange:
        return ValueChange("w", "float16", Box((start,), (stop,)), count)

    (total,) = totals([change(0, 10, 3), change(0, 10, 3), change(10, 20, 1), change(12, 14, 1)])
    assert total.overflows == 4


def test_average_is_silent_without_overflow(tmp_path: Path) -> None:
    result = save(model().cast("fp32"), tmp_path / "t.safetensors")
    assert result.changed == ()
    assert result.notes == ()


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_types_of_8_bits_refuse_overflow_and_leave_no_target(dtype: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"values are too large for float8.*: w \(\d+\)"):
        save(model().cast(dtype), tmp_path / "t.safetensors")
    assert list(tmp_path.iterdir()) == []
    result = save(model().cast(dtype, allow_overflow=True), tmp_path / "t.safetensors")
    assert result.changed[0].overflows >= 7
    with pytest.raises(UnsupportedError, match="too large"):
        model().cast(dtype)["w"][:]
    small = model().cast(dtype)["b"][:]
    assert small.astype(np.float32).tolist() == [1] * 40


def test_a_type_of_scales_is_no_type_of_weights() -> None:
    with pytest.raises(InvalidArgumentError, match="no sign and no zero"):
        model().cast("float8_e8m0fnu")


def test_journal_has_the_counts() -> None:
    receipt = Receipt("f", 1, (), {}, changes=(ValueChange("w", "float16", Box((0, 1), (2, 3)), 4, 5, 6, True),))
    assert list(from_lines([to_line(receipt)])) == [receipt]


def test_shards_say_their_own_counts_and_the_last_one_all(tmp_path: Path) -> None:
    values = np.ones((600, 40), np.float32)
    values[5, :3] = values[595, :4] = 1e5
    path = save(checkpoint([parameter("w", {"model": values})]), tmp_path / "source.safetensors").target
    job = Job(open_checkpoint(path).cast("fp16"), tmp_path / "t", DCP(dp=2))
    first, last = (job.run(resources=Execution(workers=1, shard=Shard(number, 2))) for number in range(2))
    assert first.status == "pending"
    assert counts(first) in ([("w", 3, 0)], [("w", 4, 0)])
    assert counts(last) == [("w", 7, 0)]


def test_an_average_says_what_is_not_finite(tmp_path: Path) -> None:
    result = save(average([model(), model()]), tmp_path / "t.safetensors")
    assert [(one.name, one.not_finite) for one in result.changed] == [("w", 2)]
    assert "2 values of 1 tensor are NaN or infinite in the result" in str(result.notes[0])


def test_a_merge_says_what_is_not_finite(tmp_path: Path) -> None:
    base = checkpoint([parameter("m.q.weight", {"model": np.ones((4, 6), np.float32)})])
    a, b = np.ones((2, 6), np.float32), np.ones((4, 2), np.float32)
    a[0, 1] = np.nan
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    lora = checkpoint(
        [
            parameter("base_model.model.m.q.lora_A.weight", {"model": a}),
            parameter("base_model.model.m.q.lora_B.weight", {"model": b}),
        ],
        extras={"hf/adapter_config.json": config},
    )
    result = save(merge_lora(base, lora), tmp_path / "t.safetensors")
    assert [(one.name, one.not_finite) for one in result.changed] == [("m.q.weight", 4)]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("casts") / "m.safetensors"
    save(model(), path)
    return path


Command = Callable[..., Any]


def test_convert_says_how_many_values_of_which_tensors_changed(written: Path, tmp_path: Path) -> None:
    ran = ckpt("convert", written, tmp_path / "t.safetensors", "--dtype", "fp16")
    assert ran.code == 0
    assert "note: 7 values of 1 tensor are too large for float16 and became infinite or NaN: w (7)" in ran.err
    ran = ckpt("convert", written, tmp_path / "u.safetensors", "--dtype", "fp16", "--json")
    out = json.loads(ran.out)
    assert out["changed_values"] == [
        {"tensor": "w", "dtype": "float16", "overflows": 7, "underflows": 5, "not_finite": 0}
    ]
    assert [note["names"] for note in out["notes"] if note["weight"] == "lost"] == [["w (7)"], ["w (5)"]]


def test_convert_to_8_bits_needs_allow_overflow(written: Path, tmp_path: Path) -> None:
    ran = ckpt("convert", written, tmp_path / "t.safetensors", "--dtype", "float8_e4m3fn")
    assert ran.code == UNSUPPORTED
    assert "--allow-overflow" in ran.err
    assert list(tmp_path.iterdir()) == []
    ran = ckpt("convert", written, tmp_path / "t.safetensors", "--dtype", "float8_e4m3fn", "--allow-overflow")
    assert ran.code == 0
    assert "7 values of 1 tensor are too large for float8_e4m3fn" in ran.err
    assert ckpt("convert", written, tmp_path / "u.safetensors", "--allow-overflow").code == 2
