"""The twins of the lossy kernels, by the kernels' names."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from ckpt_codecs.native import lossy
from oracle import matrices, moments, symbol_coder, weights

TWINS: dict[str, Callable[..., Any]] = {
    name: getattr(module, name)
    for module, names in {
        symbol_coder: ("model_symbols", "code_decisions", "decode_symbols"),
        matrices: ("multiply", "multiply_transposed", "subtract_product", "decompose_qr"),
        moments: (
            "is_finite",
            "sum_rows_and_columns",
            "sum_levels",
            "encode_residuals",
            "decode_levels",
            "update_direction",
            "derive_first_moment",
            "fit_first_moment",
        ),
        weights: ("scale_change", "unscale_change", "quantize", "dequantize"),
    }.items()
    for name in names
}


@contextmanager
def twins_for_kernels() -> Iterator[None]:
    """Have lossy codecs compute with the twins until the end of the block."""
    with mock.patch.multiple(lossy, **TWINS):
        yield
