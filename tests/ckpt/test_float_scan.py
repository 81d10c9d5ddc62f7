"""NaN and infinity in the bytes that are read for checksums: whichever blocks these come in, however values lie."""

from pathlib import Path

import numpy as np
import pytest

from ckpt.findings.float_scan import FloatScan
from ckpt.findings.not_finite import NotFinite, can_have, count_not_finite, find_not_finite
from ckpt.findings.report import Finding, Report
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.tensor import FileBlob, Tensor
from ckpt_formats.core.value_changes import count_kinds
from held import checkpoint, parameter

FILE = Path("/held/f")
FLOATS = [name for name, dtype in DTYPES.items() if can_have(dtype)]


def seen(places: dict[str, FileBlob], content: bytes, cuts: list[int]) -> set[str]:
    """The parameters that a scan names, when it is shown the bytes of a file in blocks that end at these bytes."""
    scan = FloatScan(checkpoint(Parameter(n, "parameter", {"model": Tensor.of(b)}, {}) for n, b in places.items()))
    for start, stop in zip([0, *cuts], [*cuts, len(content)], strict=True):
        scan.note(FILE, start, memoryview(bytearray(content[start:stop])))
    return scan.names


@pytest.mark.parametrize("name", FLOATS)
def test_count_not_finite_counts_nan_and_infinity_of_each_type(name: str) -> None:
    dtype = DTYPES[name]
    bits = np.random.default_rng(0).integers(0, 1 << 8, (1 << 14) * dtype.itemsize, np.uint8)
    values = bits.view(dtype)[: 1 << 14].reshape(128, 128)
    kinds = count_kinds(values)
    assert count_not_finite(values) == (kinds.nans, kinds.infinities)
    assert kinds.nans > 0


@pytest.mark.parametrize("name", ["float16", "float32", "float64", "complex128", "float8_e5m2"])
@pytest.mark.parametrize("offset", [0, 3])
def test_float_scan_names_a_tensor_whichever_blocks_are_read(name: str, offset: int) -> None:
    dtype = DTYPES[name]
    random, width = np.random.default_rng(1), dtype.itemsize
    places = {f"w{i}": FileBlob.packed(FILE, offset + 8 * width * i, (8,), dtype) for i in range(4)}
    places["apart"] = FileBlob.packed(FILE, offset + 40 * width + 200, (8,), dtype)
    values = np.ones(4 * 8, dtype)
    for number in range(4):
        values[:] = 1
        values[number * 8 + 7] = np.nan
        values[number * 8] = -np.inf
        content = bytes(offset) + values.tobytes() + bytes(8 * width + 200) + np.ones(8, dtype).tobytes()
        for _ in range(12):
            cuts = sorted(set(random.integers(1, len(content), random.integers(0, 12)).tolist()))
            assert seen(places, content, cuts) == {f"w{number}"}, cuts
        assert seen(places, content, list(range(1, len(content)))) == {f"w{number}"}


def test_float_scan_names_all_views_of_a_storage_and_no_tensor_of_another_type() -> None:
    values = np.ones(64, np.float32)
    values[9] = np.nan
    places = {
        "whole": FileBlob.packed(FILE, 0, (8, 8), DTYPES["float32"]),
        "turned": FileBlob(FILE, 0, (8, 8), DTYPES["float32"], (4, 32)),
        "row": FileBlob.packed(FILE, 32, (8,), DTYPES["float32"]),
        "last": FileBlob.packed(FILE, 64, (8,), DTYPES["float32"]),
        "codes": FileBlob.packed(FILE, 0, (64,), DTYPES["int32"]),
        "none": FileBlob.packed(FILE, 36, (0,), DTYPES["float32"]),
        "beyond": FileBlob.packed(FILE, 1 << 70, (8,), DTYPES["float32"]),
        "half": FileBlob.packed(FILE, 36, (1,), DTYPES["float16"]),
    }
    assert seen(places, values.tobytes(), [40, 50]) == {"whole", "turned", "row"}


@pytest.mark.parametrize(("value", "counts"), [(np.nan, (1, 0)), (-np.inf, (0, 1)), (1.0, None)])
def test_find_not_finite_counts_nan_and_infinity_by_themselves(value: float, counts: tuple[int, int] | None) -> None:
    source = checkpoint([parameter("w", {"model": np.array([value, 1], np.float32)})])
    assert find_not_finite(source) == ([] if counts is None else [NotFinite("w", "model", *counts)])
    assert find_not_finite(source, only={"v"}) == []


def test_a_report_is_ok_if_it_has_no_findings() -> None:
    assert Report(()).ok
    assert not Report((Finding("checksum", "what", "where"),)).ok
