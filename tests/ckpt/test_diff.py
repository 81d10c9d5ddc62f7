"""`ckpt diff`: what it says is what NumPy says, across formats, and its exit code tells the same from the different."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt.compare import Diff, DiffSums, Histogram, Selection, TensorDiff, compare, diff_sums, pair_tensors, select_both
from ckpt.compare.result import grouped, layer_of, role_of
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import NoMatchError
from ckpt_formats.registry import writable
from damage import SAMPLES, ckpt
from held import FLOATS, SHAPES, array, checkpoint, everything, parameter

F32, BF16 = DTYPES["float32"], DTYPES["bfloat16"]
EFFORT = Execution(2, 1 << 20)


def written(source: Checkpoint, target: Path, to: str = "universal") -> Path:
    save(source, target, writable(to), resources=EFFORT)
    return target


def of(first: Checkpoint, second: Checkpoint, **options: Any) -> Diff:
    return compare(pair_tensors(first, second), EFFORT, **options)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_diff_of_a_checkpoint_with_itself_is_empty_whatever_its_bits(dtype: Any, shape: Any) -> None:
    values = array(dtype, shape)
    sums = diff_sums(values, values.copy())
    assert (sums.elements, sums.changed, sums.largest, sums.rms) == (values.size, 0, 0.0, 0.0)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40), st.integers(0, 9))
def test_diff_sums_as_numpy(numbers: list[float], seed: int) -> None:
    a = np.array(numbers, np.float32)
    b = a + np.random.default_rng(seed).choice([0, 0, 1e-3, -7], a.size).astype(np.float32)
    sums, off = diff_sums(a, b), b.astype(float) - a.astype(float)
    assert sums.changed == int((a.view(np.uint32) != b.view(np.uint32)).sum())
    assert sums.largest == abs(off).max()
    assert sums.rms == pytest.approx(np.sqrt((off**2).mean()), rel=1e-12)
    if norm := np.linalg.norm(a.astype(float)):
        assert sums.relative == pytest.approx(np.linalg.norm(off) / norm, rel=1e-9)


def test_sums_add_up_over_blocks() -> None:
    a, b = (np.random.default_rng(seed).normal(size=1000).astype(np.float32) for seed in (0, 1))
    whole, parts = diff_sums(a, b), diff_sums(a[:300], b[:300]) + diff_sums(a[300:], b[300:])
    assert (parts.elements, parts.changed, parts.largest) == (whole.elements, whole.changed, whole.largest)
    for name in ("rms", "relative", "cosine"):
        assert getattr(parts, name) == pytest.approx(getattr(whole, name), rel=1e-12)


def test_sums_do_not_depend_on_the_bits_of_other_elements() -> None:
    """More than one piece of a block, the last of them short."""
    a = np.random.default_rng(0).normal(size=20_001)
    b = a.copy()
    b[[0, 8191, 8192, 20_000]] += 2.0
    sums = diff_sums(a, b)
    assert (sums.changed, sums.rms) == (4, pytest.approx(np.sqrt(16 / a.size), rel=1e-12))
    assert sums.histogram.lowest + len(sums.histogram.counts) == 2
    assert sum(sums.histogram.counts) == 4


@given(st.lists(st.floats(-1e300, 1e300), max_size=50), st.lists(st.floats(-1e300, 1e300), max_size=50))
def test_a_histogram_counts_every_difference_by_its_power_of_two(some: list[float], others: list[float]) -> None:
    def of_these(numbers: list[float]) -> Histogram:
        return diff_sums(np.zeros(len(numbers)), np.array(numbers, float)).histogram

    joined = of_these(some) + of_these(others)
    counts = {joined.lowest + i: count for i, count in enumerate(joined.counts) if count}
    smallest = np.finfo(float).smallest_normal  # all that is below lies in one bin
    truth = Counter(int(np.frexp(max(abs(x), smallest / 2))[1]) - 1 for x in (*some, *others) if x)
    assert counts == truth
    assert joined == of_these([*others, *some])


def test_signs_of_zero_and_payloads_of_nan_are_differences() -> None:
    zeros = diff_sums(np.zeros(2, np.float32), np.array([0.0, -0.0], np.float32))
    assert (zeros.changed, zeros.largest) == (1, 0.0)
    nans = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    payloads = diff_sums(nans, nans[::-1].copy())
    assert (payloads.changed, payloads.not_finite, payloads.largest) == (2, 2, 0.0)


def test_an_overflow_of_the_difference_is_told_not_raised() -> None:
    top = np.array([np.finfo(np.float64).max])
    assert diff_sums(top, -top).largest == np.inf


def test_each_kind_of_difference_has_its_name() -> None:
    def one(name: str, shape: tuple[int, ...], dtype: Any = F32, seed: int = 0) -> Any:
        return parameter(name, {"model": array(dtype, shape, seed)})

    first = checkpoint([one("same", (3,)), one("bits", (9,)), one("shape", (3,)), one("gone", (3,))])
    second = checkpoint([one("same", (3,)), one("bits", (9,), seed=1), one("shape", (4,)), one("new", (3,))])
    kinds = {pair.name: pair.kind for pair in of(first, second).pairs}
    assert kinds == {"same": "equal", "bits": "changed", "shape": "reshaped", "gone": "missing", "new": "added"}


def test_a_master_is_compared_with_a_weight_of_its_type_and_a_copy_with_a_copy() -> None:
    master = np.array([1.0, 2.0, 1.00390625], np.float32)
    both = checkpoint([parameter("w", {"master": master, "model": master.astype(BF16)})])
    alone = checkpoint([parameter("w", {"model": master})])
    pairs = {pair.state: pair.kind for pair in of(both, alone).pairs}
    assert pairs == {"master": "equal", "model": "missing"}
    low = checkpoint([parameter("w", {"model": master.astype(BF16)})])
    (pair,) = of(alone, low).pairs
    assert (pair.kind, pair.what, pair.sums.changed) == ("retyped", "float32 -> bfloat16", 1)


def test_counters_options_and_extras_are_compared_however_they_are_kept() -> None:
    def version(step: Any, lr: float, epoch: int, steps: int) -> Checkpoint:
        states: dict[str, Any] = {"model": array(F32, (2,))}
        values = {}
        if isinstance(step, np.ndarray):
            states["step"] = step
        else:
            values["step"] = step
        one = parameter("w", states, **values)
        return checkpoint([one], (Group({"lr": lr}, ("w",)),), {"epoch": epoch}, origin=Origin("x", step=steps))

    same = of(version(3, 0.1, 1, 5), version(np.array(3.0, np.float32), 0.1, 1, 5))
    assert same.same
    compared = of(version(3, 0.1, 1, 5), version(4, 0.2, 2, 6))
    assert not compared.same
    assert not compared.same_step
    assert [str(value).partition(":")[0] for value in compared.values] == [
        "step of 1 parameters, such as `w`", "option of the optimizer for 1 parameters, lr", "extras/epoch",
    ]  # fmt: skip
    assert of(version(3, 0.1, 1, 5), version(4, 0.2, 2, 6), tensors_only=True).same


def test_other_numbers_of_a_parameter_and_schedulers_in_a_list_are_told() -> None:
    def version(decay: float, last: int) -> Checkpoint:
        one = parameter("w", {"model": array(F32, (2,))}, step=3, decay=decay)
        return checkpoint([one], extras={"schedulers": [{"last": 1, "by": [1, 2]}, {"last": last, "by": [1, 2]}]})

    found = of(version(0.1, 1), version(0.2, 2)).values
    assert [(one.kind, one.name, one.first, one.second, one.parameters) for one in found] == [
        ("counter", "decay", 0.1, 0.2, ("w",)),
        ("extra", "schedulers/1/last", 1, 2, ()),
    ]
    assert tuple(map(str, found)) == (
        "decay of 1 parameters, such as `w`: 0.1 -> 0.2",
        "extras/schedulers/1/last: 1 -> 2",
    )


def test_a_tied_name_is_compared_with_the_tensor_of_its_own() -> None:
    w = {"model": array(F32, (2,))}
    tied = checkpoint([parameter("embed", w)], aliases={"head": "embed"})
    apart = checkpoint([parameter("embed", w), parameter("head", w)])
    assert of(tied, apart).same
    assert of(*select_both(tied, apart, Selection(("head",)))).same
    assert [pair.name for pair in of(*select_both(tied, apart, Selection(("head",)))).pairs] == ["head"]


def test_a_pattern_may_match_on_one_side_only() -> None:
    a, b = parameter("a", {"model": array(F32, (2,))}), parameter("b", {"model": array(F32, (2,))})
    first, second = checkpoint([a]), checkpoint([a, b])
    assert [(p.name, p.kind) for p in of(*select_both(first, second, Selection(("b",)))).pairs] == [("b", "added")]
    with pytest.raises(NoMatchError, match="neither"):
        select_both(first, second, Selection(("neither",)))


def test_states_are_compared_alone_if_asked_for() -> None:
    source = everything()
    assert {state for _, state in pair_tensors(source, source, ["exp_avg"]).first_tensors} == {"exp_avg"}
    with pytest.raises(NoMatchError, match="momentum"):
        pair_tensors(source, source, ["momentum"])


def test_diff_reads_the_bytes_that_it_announced() -> None:
    """Each byte of both, once: histograms come out of the same pass. Of other shapes, nothing."""
    first, second = everything(1), everything(2)
    longer = {**second.parameters, "alone": parameter("alone", {"model": array(F32, (9,))})}
    both, read = pair_tensors(first, replace(second, parameters=longer)), list[int]()
    assert any(pair.sums.histogram.counts for pair in compare(both, EFFORT, read.append).pairs)
    assert sum(read) == both.nbytes


@pytest.mark.parametrize("to", ["universal", "torch"])
def test_diff_finds_no_difference_between_formats(to: str, tmp_path: Path) -> None:
    source = written(everything(), tmp_path / "a")
    other = written(everything(), tmp_path / ("b.pt" if to == "torch" else "b"), to)
    done = ckpt("diff", source, other)
    assert done.code == 0, done.out + done.err
    assert "the same: " in done.out


def test_diff_ignores_engines_and_degrees(tmp_path: Path) -> None:
    sample = next(SAMPLES.glob("deepspeed-*"))
    done = ckpt("reshard", sample, tmp_path / "other", "--dp", 3, "--zero", 3)
    assert done.code == 0, done.err
    done = ckpt("diff", sample, tmp_path / "other", "--tensors-only")
    assert done.code == 0, done.out + done.err


def test_a_zero_3_folder_is_the_same_as_the_dcp_folder_that_was_made_of_it(tmp_path: Path) -> None:
    sample = next(SAMPLES.glob("deepspeed-*-zero3-*"))
    assert ckpt("convert", sample, tmp_path / "dcp", "--to", "dcp").code == 0
    done = ckpt("diff", sample, tmp_path / "dcp", "--json")
    assert done.code == 0, done.out + done.err
    report = json.loads(done.out)
    assert report["formats"] == ["deepspeed", "dcp"]
    assert (len(report["tensors"]), report["total"]["changed"]) == (121, 0)


def test_diff_names_what_changed(tmp_path: Path) -> None:
    source = everything()
    states = {"master": np.full(4, 7, np.float32), "model": array(BF16, (4,), 2)}
    weight = parameter("layers.1.w", states, step=4)
    changed = replace(source, parameters={**source.parameters, "layers.1.w": weight})
    a, b = written(source, tmp_path / "a"), written(changed, tmp_path / "b")
    done = ckpt("diff", a, b, "--by", "layer", "--by", "role")
    assert done.code == 1
    assert "layers.1.w master" in done.out
    assert "by layer and role\n" in done.out
    assert "different: 1 of " in done.out
    report = json.loads(ckpt("diff", a, b, "--json", "--by", "state").out)
    assert [(t["name"], t["state"]) for t in report["tensors"] if t["kind"] != "equal"] == [("layers.1.w", "master")]
    assert not report["same"]
    assert {row["state"] for row in report["groups"]} >= {"model", "exp_avg"}
    assert ckpt("diff", a, b, "--skip", "layers.1").code == 0
    assert ckpt("diff", a, b, "--only", "nothing").code == 10
    assert ckpt("diff", a, tmp_path / "none").code == 10


def test_diff_sorts_and_cuts_rows(tmp_path: Path) -> None:
    values = np.arange(1, 5, dtype=np.float32)
    a = written(checkpoint([parameter(f"w{i}", {"model": values}) for i in range(4)]), tmp_path / "a")
    b = written(checkpoint([parameter(f"w{i}", {"model": values + i}) for i in range(4)]), tmp_path / "b")
    rows = ckpt("diff", a, b, "--sort", "max", "--top", 2).out.splitlines()
    assert [row.split()[-2] for row in rows[1:3]] == ["w3", "w2"]
    assert "1 more" in rows[3]
    assert [r.split()[-2] for r in ckpt("diff", a, b, "--sort", "name", "--top", 0).out.splitlines()[1:-1]] == [
        "w1", "w2", "w3",
    ]  # fmt: skip


def test_groups_have_the_norm_of_all_their_tensors() -> None:
    pairs = [TensorDiff("a.0.w", "model", "changed", "", DiffSums(1, 1, 3.0, 9.0, 16.0, 1.0, 1.0))]
    pairs.append(TensorDiff("a.0.b", "model", "changed", "", DiffSums(1, 1, 4.0, 16.0, 9.0, 1.0, 1.0)))
    ((key, total),) = grouped(pairs, ["layer"])
    assert (key, total.relative, total.largest) == (("a.0",), 1.0, 4.0)
    assert [key for key, _ in grouped(pairs, ["role", "state"])] == [("w", "model"), ("b", "model")]


@pytest.mark.parametrize(
    ("name", "layer", "role"),
    [
        ("model.layers.11.mlp.up.weight", "model.layers.11", "mlp.up.weight"),
        ("h.0.attn.1.w", "h.0", "attn.*.w"),
        ("h.0.experts.12.3", "h.0", "experts.*.*"),
        ("h.0.w1.conv2d", "h.0", "w1.conv2d"),
        ("embed.weight", "embed", "embed.weight"),
        ("head", "head", "head"),
        ("3.weight", "3", "weight"),
        ("net.3", "net.3", ""),
        ("a\n.1.b", "a\n.1", "b"),
    ],
)
def test_a_layer_is_a_name_up_to_its_first_number_and_a_role_the_rest(name: str, layer: str, role: str) -> None:
    assert (layer_of(name), role_of(name)) == (layer, role)
