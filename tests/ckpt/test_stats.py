"""`ckpt stats`: its figures are those of NumPy, the same for each number of threads, and its exit code tells of NaN."""

import csv
import io
import json
from math import fsum
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ckpt as library
from ckpt.compare.statistics import Figures
from ckpt.compare.statistics.figures import Measurement
from ckpt.compare.sums import Histogram
from ckpt.pipeline import Execution
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import NoMatchError
from ckpt_formats.core.tensor import Array
from damage import SAMPLES, ckpt
from held import STORABLE, array, checkpoint, parameter

BLOCKY = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def by_numpy(values: Array) -> dict[str, Any]:
    """What NumPy says of an array; sums are exact, rounded once."""
    parts = values.view(f"f{values.itemsize // 2}") if values.dtype.kind == "c" else values
    with np.errstate(invalid="ignore"):
        wide = parts.astype(np.float64).reshape(-1)
    finite = wide[np.isfinite(wide)]
    magnitudes = np.abs(finite[finite != 0])
    exponents = np.maximum(np.frexp(magnitudes)[1] - 1, -1023)
    return {
        "values": wide.size,
        "nans": int(np.isnan(wide).sum()),
        "infinities": int(np.isinf(wide).sum()),
        "zeros": int((wide == 0).sum()),
        "least": finite.min() if finite.size else None,
        "greatest": finite.max() if finite.size else None,
        "exponents": dict(zip(*(one.tolist() for one in np.unique(exponents, return_counts=True)), strict=True)),
        "numbers": finite,
    }


def figures_of(values: Array) -> Figures:
    measurement = Measurement(values.dtype, values.size)
    measurement.add(values)
    return measurement.figures()


def agree(figures: Figures, values: Array) -> None:
    wanted = by_numpy(values)
    numbers = wanted.pop("numbers").tolist()
    exponents = {figures.histogram.lowest + i: n for i, n in enumerate(figures.histogram.counts) if n}
    assert exponents == wanted.pop("exponents")
    assert {name: getattr(figures, name) for name in wanted} == wanted
    most = fsum(abs(number) / 2**60 for number in numbers) * 2.0**60
    if np.isfinite(most):
        assert figures.total == pytest.approx(fsum(numbers), rel=0, abs=1e-13 * most)
        assert figures.mean == (None if not numbers else figures.total / len(numbers))
    squares = fsum(min(number * number, 1e290) for number in numbers)
    if squares < 1e290:
        assert figures.squares == pytest.approx(squares, rel=1e-13, abs=5e-324)


@pytest.mark.parametrize("dtype", [*STORABLE, DTYPES["complex128"]], ids=str)
@pytest.mark.parametrize("size", [0, 1, 37, 9000])
@pytest.mark.quick(24)
def test_figures_of_random_bits_are_those_of_numpy(dtype: Any, size: int) -> None:
    """9,000 short values are counted by their bits, and fewer are widened."""
    agree(figures_of(array(dtype, (size,))), array(dtype, (size,)))


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.int16, np.int64])
def test_figures_of_usual_numbers_are_those_of_numpy(dtype: Any) -> None:
    values = (np.random.default_rng(0).normal(0, 50, 20_000)).astype(dtype)
    agree(figures_of(values.reshape(100, 200)), values)


def test_a_tensor_without_finite_values_has_no_extremes_and_no_mean() -> None:
    figures = figures_of(np.array([np.nan, np.inf, -np.inf], np.float32))
    assert (figures.least, figures.greatest, figures.mean, figures.norm) == (None, None, None, 0.0)
    assert (figures.nans, figures.infinities, figures.finite) == (1, 2, 0)


def test_zero_has_no_sign() -> None:
    figures = figures_of(np.array([-0.0], np.float32))
    assert str(figures.least) == str(figures.greatest) == "0.0"
    assert (figures.zeros, figures.histogram) == (1, Histogram())


def test_figures_have_the_same_bits_for_each_number_of_threads_and_each_memory(monkeypatch: Any) -> None:
    monkeypatch.setattr("ckpt.compare.statistics.measure.PIECE", 3000)
    rng = np.random.default_rng(1)
    source = checkpoint(
        [
            parameter(name, {"model": rng.normal(size=shape).astype(dtype)})
            for name, shape, dtype in (
                ("a", (130, 97), np.float32),
                ("b", (7, 2500), ml_dtypes.bfloat16),
                ("c", (41_000,), np.float64),
            )
        ]
    )
    measured = [
        library.stats(source, resources=Execution(workers, memory)).tensors
        for workers, memory in ((1, 1 << 16), (2, 1 << 20), (5, 1 << 28))
    ]
    assert measured[0] == measured[1] == measured[2]
    for one in measured[0]:
        agree(one.figures, np.asarray(source[one.name]))


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with NaN and infinity in two of its three tensors."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    path = tmp_path_factory.mktemp("stats") / "strange.safetensors"
    values = {f"layers.{i}.weight": np.arange(6, dtype=np.float32).reshape(2, 3) for i in range(3)}
    values["layers.1.weight"][0, 1] = np.nan
    values["layers.2.weight"][:, 0] = np.inf
    save_file(values, path)
    return path


def test_values_that_fail_on_names_end_with_exit_code_1(strange: Path) -> None:
    assert ckpt("stats", strange).code == 0
    for kinds, code in (("nan", 1), ("inf", 1), ("nan,inf", 1)):
        assert ckpt("stats", strange, "--fail-on", kinds).code == code
        assert ckpt("stats", strange, "--fail-on", kinds, "--only", r"\.0\.").code == 0
    assert ckpt("stats", strange, "--fail-on", "inf", "--only", r"\.1\.").code == 0
    wrong = ckpt("stats", strange, "--fail-on", "zero")
    assert (wrong.code, "is not nan, inf" in wrong.err) == (2, True)


def test_rows_with_nan_come_first_and_the_last_line_counts_them(strange: Path) -> None:
    lines = ckpt("stats", strange).out.splitlines()
    assert [line.split()[-2] for line in lines[1:4]] == ["layers.1.weight", "layers.2.weight", "layers.0.weight"]
    assert lines[-1].startswith("1 NaN and 2 infinite in 2 tensors, of 18 values in 3 tensors")
    assert "and 2 more" in ckpt("stats", strange, "--top", "1").out


def test_csv_and_json_have_the_same_figures(strange: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(ckpt("stats", strange, "--csv").out)))
    report = json.loads(ckpt("stats", strange, "--json").out)
    assert [row["tensor"] for row in rows] == [one["name"] for one in report["tensors"]]
    for row, one in zip(rows, report["tensors"], strict=True):
        assert {name: float(row[name]) for name in ("nan", "min", "max", "mean", "norm")} == {
            name: one[name] for name in ("nan", "min", "max", "mean", "norm")
        }
    groups = json.loads(ckpt("stats", strange, "--json", "--by", "layer").out)["groups"]
    assert [(one["layer"], one["infinite"]) for one in groups] == [("layers.0", 0), ("layers.1", 0), ("layers.2", 2)]
    assert ckpt("stats", strange, "--csv", "--json").code == 2


def test_states_of_a_run_are_measured_and_others_are_left_out() -> None:
    run = library.open(SAMPLES / "deepspeed-0.19-zero1-bf16-dp2")
    measured = library.stats(run, states=["exp_avg"], skip=["norm"])
    assert {one.state for one in measured} == {"exp_avg"}
    for one in measured:
        agree(one.figures, np.asarray(run[one.name].states["exp_avg"]))
    with pytest.raises(NoMatchError, match="no tensor has the state `momentum`"):
        library.stats(run, states=["momentum"])
    with pytest.raises(NoMatchError, match="no parameter matches"):
        library.stats(run, only=["gone"])


def test_quantised_weights_are_measured_by_value() -> None:
    codes = array(DTYPES["float8_e4m3fn"], (256, 128), 1)
    codes.view(np.uint8)[codes.view(np.uint8) & 0x7F == 0x7F] = 0
    scales = np.array([[2.0], [0.5]], np.float32)
    model = checkpoint(
        [parameter("w.weight", {"model": codes}), parameter("w.weight_scale_inv", {"model": scales})],
        extras={"hf/config.json": BLOCKY},
    )
    (one,) = library.stats(model)
    assert (one.name, one.dtype, one.scheme) == ("w.weight", "float32", "FP8 in blocks")
    agree(one.figures, (codes.astype(np.float32).reshape(2, 128, 128) * scales[:, :, None]).reshape(256, 128))


def test_stats_of_the_page_are_those_of_json(strange: Path, tmp_path: Path) -> None:
    assert ckpt("stats", strange, "--html", tmp_path / "page.html").code == 0
    text = (tmp_path / "page.html").read_text("ascii")
    facts = json.loads(text.partition('id="facts">')[2].partition("</script>")[0])
    report = json.loads(ckpt("stats", strange, "--json").out)
    assert facts["total"] == report["total"]
    assert [row["name"] for row in facts["tensors"]] == [row["name"] for row in report["tensors"]]
    assert facts["layers"] == json.loads(ckpt("stats", strange, "--json", "--by", "layer").out)["groups"]
