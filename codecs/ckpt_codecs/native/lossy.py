"""The compiled kernels of lossy codecs. `lossy.h` states what each computes; `docs/lossy-codecs.md` specifies it.

Arrays are C-contiguous. Output arrays are filled in place and share no memory with inputs.

Raises:
    CodecError: An array has another dtype or shape, which is a bug in ckpt.
"""

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native.library import ADDRESS, FLOAT, INT64, address, bind, optional_address, scratch

SIGNATURES = {
    "symbols_scratch": (INT64, INT64),
    "model_symbols": (INT64, ADDRESS, INT64, INT64, INT64, ADDRESS, INT64, ADDRESS, INT64),
    "code_decisions": (INT64, ADDRESS, INT64, ADDRESS, INT64),
    "decode_symbols": (INT64, ADDRESS, INT64, INT64, INT64, ADDRESS, INT64, ADDRESS, INT64),
    "multiply": (INT64, ADDRESS, INT64, INT64, ADDRESS, INT64, ADDRESS),
    "multiply_transposed": (INT64, ADDRESS, INT64, INT64, ADDRESS, INT64, ADDRESS),
    "subtract_product_scratch": (INT64, INT64),
    "subtract_product": (INT64, ADDRESS, INT64, INT64, ADDRESS, INT64, ADDRESS, ADDRESS, INT64),
    "decompose_qr_scratch": (INT64, INT64, INT64),
    "decompose_qr": (INT64, ADDRESS, INT64, INT64, ADDRESS, ADDRESS, ADDRESS, INT64),
    "is_finite": (INT64, ADDRESS, INT64),
    "sum_rows_and_columns": (INT64, ADDRESS, INT64, INT64, ADDRESS, ADDRESS, ADDRESS),
    "sum_levels": (INT64, ADDRESS, INT64, INT64, ADDRESS, ADDRESS),
    "encode_residuals": (INT64, ADDRESS, INT64, INT64, ADDRESS, ADDRESS, INT64, ADDRESS, INT64, ADDRESS),
    "decode_levels": (INT64, ADDRESS, ADDRESS, INT64, INT64, INT64, ADDRESS, ADDRESS, ADDRESS),
    "update_direction": (INT64, ADDRESS, ADDRESS, INT64, INT64, ADDRESS, ADDRESS, ADDRESS),
    "derive_first_moment": (INT64, FLOAT, ADDRESS, ADDRESS, ADDRESS, INT64, ADDRESS),
    "fit_first_moment_scratch": (INT64, INT64),
    "fit_first_moment": (INT64, ADDRESS, ADDRESS, ADDRESS, ADDRESS, INT64, INT64, ADDRESS, ADDRESS, INT64),
    "scale_change_scratch": (INT64, INT64),
    "scale_change": (INT64, ADDRESS, ADDRESS, INT64, INT64, ADDRESS, ADDRESS, ADDRESS, ADDRESS, ADDRESS, INT64),
    "unscale_change": (INT64, ADDRESS, INT64, INT64, ADDRESS, ADDRESS, ADDRESS, ADDRESS),
    "quantize": (INT64, ADDRESS, INT64, FLOAT, FLOAT, ADDRESS, ADDRESS, ADDRESS),
    "dequantize": (INT64, ADDRESS, INT64, ADDRESS, FLOAT, ADDRESS),
}
kernels = bind(SIGNATURES)

U8, U16, U32, I32, I64 = (np.dtype(kind) for kind in (np.uint8, np.uint16, np.uint32, np.int32, np.int64))
F32, F64 = np.dtype(np.float32), np.dtype(np.float64)


def model_symbols(symbols: Array, columns: int, shift: int, decisions: Array) -> int:
    """Write the binary decisions that encode symbols, and return their count.

    `symbols`: (n,) int32, in rows of `columns`. `decisions`: uint16, with room for all.
    """
    return int(
        kernels.model_symbols(
            address(symbols, I32),
            symbols.size,
            columns,
            shift,
            address(decisions, U16, writable=True),
            decisions.size,
            *scratch(kernels.symbols_scratch(columns)),
        )
    )


def code_decisions(decisions: Array, count: int, out: Array) -> int:
    """Write the code of the first `count` decisions at the end of `out`, and return the index where it begins.

    `decisions`: uint16; `out`: (2 * count + 4,) uint8 or longer.
    """
    _require(0 <= count <= decisions.size)
    return int(kernels.code_decisions(address(decisions, U16), count, address(out, U8, writable=True), out.size))


def decode_symbols(code: Array, columns: int, shift: int, symbols: Array) -> bool:
    """Fill symbols from their code. Returns False if the code is damaged.

    `code`: uint8; `symbols`: (n,) int32, in rows of `columns`.
    """
    decoded = kernels.decode_symbols(
        address(code, U8),
        code.size,
        columns,
        shift,
        address(symbols, I32, writable=True),
        symbols.size,
        *scratch(kernels.symbols_scratch(columns)),
    )
    return bool(decoded)


def multiply(a: Array, x: Array, out: Array) -> None:
    """Compute `out = a @ x`. `a`: (n, m), `x`: (m, k), `out`: (n, k), all float32."""
    (n, m), k = a.shape, x.shape[1]
    _require(x.shape == (m, k) and out.shape == (n, k))
    kernels.multiply(address(a, F32), n, m, address(x, F32), k, address(out, F32, writable=True))


def multiply_transposed(a: Array, x: Array, out: Array) -> None:
    """Compute `out = a.T @ x`. `a`: (n, m), `x`: (n, k), `out`: (m, k), all float32."""
    (n, m), k = a.shape, x.shape[1]
    _require(x.shape == (n, k) and out.shape == (m, k))
    kernels.multiply_transposed(address(a, F32), n, m, address(x, F32), k, address(out, F32, writable=True))


def subtract_product(y: Array, a: Array, b: Array) -> None:
    """Compute `y -= a @ b`, product after product. `y`: (n, m), `a`: (n, k), `b`: (k, m), all float32."""
    (n, m), k = y.shape, a.shape[1]
    _require(a.shape == (n, k) and b.shape == (k, m))
    memory = scratch(kernels.subtract_product_scratch(k))
    kernels.subtract_product(address(y, F32, writable=True), n, m, address(a, F32), k, address(b, F32), *memory)


def decompose_qr(y: Array, w: Array, t: Array) -> None:
    """Fill `w` and `t` with the reflections `1 - w @ t @ w.T` of the QR decomposition of `y`.

    `y` and `w`: (n, k) with n >= k; `t`: (k, k); all float32.
    """
    n, k = y.shape
    _require(w.shape == (n, k) and t.shape == (k, k))
    memory = scratch(kernels.decompose_qr_scratch(n, k))
    kernels.decompose_qr(address(y, F32), n, k, address(w, F32, writable=True), address(t, F32, writable=True), *memory)


def is_finite(values: Array) -> bool:
    """Are all values finite? `values`: any shape, float32."""
    return bool(kernels.is_finite(address(values, F32), values.size))


def sum_rows_and_columns(values: Array, rows: Array, columns: Array) -> tuple[int, int]:
    """Fill in the sums of rows and columns; return the smallest and the largest value's bits, as uint32.

    `values`: (n, m) float32; `rows`: (n,) float64; `columns`: (m,) float64.
    """
    _require((rows.size, columns.size) == values.shape)
    extremes = np.empty(2, U32)
    kernels.sum_rows_and_columns(
        address(values, F32),
        *values.shape,
        address(rows, F64, writable=True),
        address(columns, F64, writable=True),
        address(extremes, U32, writable=True),
    )
    return int(extremes[0]), int(extremes[1])


def sum_levels(values: Array, rows: Array, columns: Array) -> None:
    """Fill in the sums of the levels (1/8 octave, signs ignored) of rows and columns.

    `values`: (n, m) float32; `rows`: (n,) int64; `columns`: (m,) int64.
    """
    _require((rows.size, columns.size) == values.shape)
    kernels.sum_levels(
        address(values, F32), *values.shape, address(rows, I64, writable=True), address(columns, I64, writable=True)
    )


def encode_residuals(
    values: Array, rows: Array, columns: Array, step_size: int, fine_levels: Array, residuals: Array
) -> int:
    """Fill in the residuals of values against the levels of their row and column; return the sum of their magnitudes.

    A residual is the nearest multiple of `step_size` levels; that of zero is 0. `values`: (n, m) float32, not negative;
    `rows`: (n,) int32; `columns`: (m,) int32; `fine_levels`: those of `log_levels`; `residuals`: (n, m) int32.
    """
    _require((rows.size, columns.size) == values.shape == residuals.shape)
    return int(
        kernels.encode_residuals(
            address(values, F32),
            *values.shape,
            address(rows, I32),
            address(columns, I32),
            step_size,
            address(fine_levels, I32),
            fine_levels.size,
            address(residuals, I32, writable=True),
        )
    )


def decode_levels(
    rows: Array, columns: Array, step_size: int, residuals: Array | None, zeros: Array | None, out: Array
) -> None:
    """Fill in values from the levels of their row and column, plus `step_size` levels times the residual.

    Where `zeros` is not 0, the value is 0. `rows`: (n,) int32; `columns`: (m,) int32; `residuals` and `zeros`: (n, m)
    int32; `out`: (n, m) float32.
    """
    _require((rows.size, columns.size) == out.shape)
    _require(all(array is None or array.shape == out.shape for array in (residuals, zeros)))
    kernels.decode_levels(
        address(rows, I32),
        address(columns, I32),
        *out.shape,
        step_size,
        optional_address(residuals, I32),
        optional_address(zeros, I32),
        address(out, F32, writable=True),
    )


def update_direction(first: Array, second: Array, rows: Array, columns: Array, out: Array) -> bool:
    """Fill in the first moment over the root of the second, clipped, times the scales. Is any of it not 0?

    `first`, `second` and `out`: (n, m); `rows`: (n,) scales; `columns`: (m,) scales; all float32.
    """
    _require(first.shape == second.shape == out.shape == (rows.size, columns.size))
    return bool(
        kernels.update_direction(
            address(first, F32),
            address(second, F32),
            *out.shape,
            address(rows, F32),
            address(columns, F32),
            address(out, F32, writable=True),
        )
    )


def derive_first_moment(
    factor: float | np.floating, after: Array, before: Array, second: Array | None, out: Array
) -> None:
    """Fill in `factor` times the change of the weights, times the root of the second moment if there is one.

    All arrays: (n, m) float32.
    """
    _require(after.shape == before.shape == out.shape and (second is None or second.shape == out.shape))
    kernels.derive_first_moment(
        factor,
        address(after, F32),
        address(before, F32),
        optional_address(second, F32),
        out.size,
        address(out, F32, writable=True),
    )


def fit_first_moment(after: Array, before: Array, second: Array | None, moment: Array) -> tuple[float, float]:
    """The sums for fitting the factor of `derive_first_moment`. All arrays: (n, m) float32.

    For its result with the factor 1: the sum of the squares, and the sum of the products with `moment`.
    """
    _require(after.shape == before.shape == moment.shape and (second is None or second.shape == moment.shape))
    sums = np.empty(2, F64)
    kernels.fit_first_moment(
        address(after, F32),
        address(before, F32),
        optional_address(second, F32),
        address(moment, F32),
        *moment.shape,
        address(sums, F64, writable=True),
        *scratch(kernels.fit_first_moment_scratch(moment.shape[1])),
    )
    return float(sums[0]), float(sums[1])


def scale_change(after: Array, before: Array | None, rows: Array, columns: Array, out: Array) -> float:
    """Fill in the change since `before`, if there is one, times the scales; return the sum of its squares.

    `after`, `before` and `out`: (n, m); `rows`: (n,) scales; `columns`: (m,) scales; all float32.
    """
    _require(after.shape == out.shape == (rows.size, columns.size) and (before is None or before.shape == out.shape))
    energy = np.empty(1, F64)
    kernels.scale_change(
        address(after, F32),
        optional_address(before, F32),
        *out.shape,
        address(rows, F32),
        address(columns, F32),
        address(out, F32, writable=True),
        address(energy, F64, writable=True),
        *scratch(kernels.scale_change_scratch(out.shape[1])),
    )
    return float(energy[0])


def unscale_change(values: Array, rows: Array, columns: Array, before: Array | None, out: Array) -> None:
    """Fill in values times the scales, plus `before` if there is one.

    `values`, `before` and `out`: (n, m); `rows`: (n,) scales; `columns`: (m,) scales; all float32.
    """
    _require(values.shape == out.shape == (rows.size, columns.size) and (before is None or before.shape == out.shape))
    kernels.unscale_change(
        address(values, F32),
        *out.shape,
        address(rows, F32),
        address(columns, F32),
        optional_address(before, F32),
        address(out, F32, writable=True),
    )


def quantize(
    values: Array, step_size: float | np.floating, offset: float | np.floating, codes: Array, sums: Array, counts: Array
) -> bool:
    """Fill in the codes of values: |value| / step_size + `offset`, rounded down, with the value's sign.

    Returns False, and fills in nothing, if a value is too large for the step size or not finite. `values`: any shape,
    float32; `codes`: the same shape, int32; `counts`: (4,) int64, the sum of all magnitudes, then the counts of the
    magnitudes 1, 2 and 3; `sums`: (4,) float64, the sums of the values with these magnitudes, in steps.
    """
    _require(values.shape == codes.shape and sums.size == counts.size == 4)
    return bool(
        kernels.quantize(
            address(values, F32),
            values.size,
            step_size,
            offset,
            address(codes, I32, writable=True),
            address(sums, F64, writable=True),
            address(counts, I64, writable=True),
        )
    )


def dequantize(codes: Array, small_values: Array, step_size: float | np.floating, out: Array) -> None:
    """Fill in the values of codes: for magnitudes of 0 to 3 those of `small_values`, else the multiple of the step.

    `codes`: any shape, int32; `small_values`: (4,) float32; `out`: the shape of `codes`, float32.
    """
    _require(codes.shape == out.shape and small_values.size == 4)
    kernels.dequantize(
        address(codes, I32), out.size, address(small_values, F32), step_size, address(out, F32, writable=True)
    )


def _require(fits: bool) -> None:
    if not fits:
        raise CodecError("the shapes of arrays do not fit: this is a bug in ckpt")
