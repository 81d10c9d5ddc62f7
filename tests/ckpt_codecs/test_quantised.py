"""Quantised weights: values equal to those of the libraries, of any block alone; what no library writes is refused.

The golden arrays are of the libraries themselves: tests/campaigns/quantised_libraries.py compares and writes them.
"""

import zlib
from hashlib import blake2b
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckpt_codecs.errors import CodecError
from ckpt_codecs.quantised import integers, scaled
from ckpt_codecs.quantised.base import block_shape, slices
from golden_quantised import GOLDEN, read_golden

Array = np.ndarray[Any, Any]


def bits_of(values: Array) -> Array:
    """The bits of values, with one NaN: processors give others."""
    words = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").copy()
    with np.errstate(invalid="ignore"):
        words[np.isnan(values.astype(np.float32))] = 0x7FC0
    return words


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_values_are_those_of_the_library_in_any_block(path: Path) -> None:
    quantisation, parts, digest = read_golden(path)
    whole = quantisation.decode_whole(parts)
    assert blake2b(bits_of(whole).tobytes(), digest_size=16).hexdigest() == digest
    random = np.random.default_rng(zlib.crc32(path.stem.encode()))
    for _ in range(12):
        ends = [sorted(random.choice(n + 1, 2, replace=False).tolist()) for n in quantisation.shape]
        block = tuple((low, high) for low, high in ends)
        stored = [part[slices(own)] for part, own in zip(parts, quantisation.part_blocks(block), strict=True)]
        out = np.empty(block_shape(block), quantisation.dtype)
        quantisation.decode(block, stored, out)
        assert np.array_equal(bits_of(out), bits_of(whole[slices(block)])), block


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_parts_of_another_shape_or_type_are_refused(path: Path) -> None:
    quantisation, parts, _ = read_golden(path)
    forms = [(part.shape, part.dtype) for part in parts]
    quantisation.check(forms)
    for number, (shape, dtype) in enumerate(forms):
        for wrong in (((*shape, 1), dtype), ((shape[0] + 1, *shape[1:]), dtype), (shape, np.dtype(np.complex64))):
            with pytest.raises(CodecError):
                quantisation.check([*forms[:number], wrong, *forms[number + 1 :]])
    with pytest.raises(CodecError):
        quantisation.check(forms[:-1])


def test_zero_points_that_libraries_read_apart_are_refused() -> None:
    own = integers.Gptq((8, 8), 4, 1, "float16")
    parts = np.zeros((1, 8), np.int32), np.full((1, 1), -1, np.int32), np.ones((1, 8), np.float16)
    with pytest.raises(CodecError, match="read apart"):
        own.decode_whole((*parts, np.zeros(8, np.int32)))


def test_groups_that_are_not_there_are_refused() -> None:
    own = integers.Gptq((8, 8), 4, 1, "float16", stored_less_one=False)
    parts = np.zeros((1, 8), np.int32), np.zeros((1, 1), np.int32), np.ones((1, 8), np.float16)
    for group in (-1, 1, 2**31 - 1):
        with pytest.raises(CodecError, match="group"):
            own.decode_whole((*parts, np.full(8, group, np.int32)))


def test_fp8_blocks_of_fp8_blocks_are_the_same() -> None:
    random = np.random.default_rng(5)
    values = random.normal(0, 0.02, (300, 200)).astype(ml_dtypes.bfloat16).astype(np.float32)
    values[:128, :128] = 0
    scales = scaled.scales_of(values, (128, 128))
    codes = np.empty(values.shape, ml_dtypes.float8_e4m3fn)
    scaled.codes_of(values, scales, (128, 128), codes)
    assert scales.shape == (3, 2)
    assert scales[0, 0] == 1
    own = scaled.ScaledCodes(values.shape, "float8_e4m3fn", "float32", (128, 128))
    back = own.decode_whole((codes, scales))
    assert np.abs(back - values).max() <= np.abs(values).max() / 16
    again_scales = scaled.scales_of(back, (128, 128))
    again = np.empty_like(codes)
    scaled.codes_of(back, again_scales, (128, 128), again)
    assert np.array_equal(again_scales, scales)
    assert np.array_equal(again.view(np.uint8), codes.view(np.uint8))
