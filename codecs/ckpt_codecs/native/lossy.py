"""The compiled kernels of lossy codecs. `lossy.h` says what each computes; `docs/lossy-codecs.md` specifies it.

Matrices are n x m and C-contiguous, float32 unless another dtype is named. Outputs are written in place and share no
memory with inputs. Every function raises CodecError where arrays have other dtypes or shapes: a mistake of ckpt's own.
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
    """Fill in the binary decisions (uint16) that encode int32 symbols in rows of `columns`; how many there are."""
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
    """Code the first `count` decisions (uint16) at the end of `out` (uint8); where the code begins."""
    _require(0 <= count <= decisions.size)
    return int(kernels.code_decisions(address(decisions, U16), count, address(out, U8, writable=True), out.size))


def decode_symbols(code: Array, columns: int, shift: int, symbols: Array) -> bool:
    """Fill in int32 symbols in rows of `columns` from their code (uint8); False if it is not theirs."""
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
    """`out = a @ x`, for a of n x m, x of m x k."""
    (n, m), k = a.shape, x.shape[1]
    _require(x.shape == (m, k) and out.shape == (n, k))
    kernels.multiply(address(a, F32), n, m, address(x, F32), k, address(out, F32, writable=True))


def multiply_transposed(a: Array, x: Array, out: Array) -> None:
    """`out = a.T @ x`, for a of n x m, x of n x k."""
    (n, m), k = a.shape, x.shape[1]
    _require(x.shape == (n, k) and out.shape == (m, k))
    kernels.multiply_transposed(address(a, F32), n, m, address(x, F32), k, address(out, F32, writable=True))


def subtract_product(y: Array, a: Array, b: Array) -> None:
    """`y -= a @ b`, product after product, for y of n x m, a of n x k."""
    (n, m), k = y.shape, a.shape[1]
    _require(a.shape == (n, k) and b.shape == (k, m))
    room = scratch(kernels.subtract_product_scratch(k))
    kernels.subtract_product(address(y, F32, writable=True), n, m, address(a, F32), k, address(b, F32), *room)


def decompose_qr(y: Array, w: Array, t: Array) -> None:
    """Fill in the reflections `1 - w @ t @ w.T` of y's QR decomposition, for y and w of n x k, t of k x k; n >= k."""
    n, k = y.shape
    _require(w.shape == (n, k) and t.shape == (k, k))
    room = scratch(kernels.decompose_qr_scratch(n, k))
    kernels.decompose_qr(address(y, F32), n, k, address(w, F32, writable=True), address(t, F32, writable=True), *room)


def is_finite(values: Array) -> bool:
    """Are all of these float32 of any shape numbers?"""
    return bool(kernels.is_finite(address(values, F32), values.size))


def sum_rows_and_columns(values: Array, rows: Array, columns: Array) -> tuple[int, int]:
    """Fill in the float64 sums of n rows and m columns. The least and the largest bits of all values, as uint32."""
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
    """Fill in the int64 sums of the levels (eighths of an octave, signs ignored) of n rows and m columns."""
    _require((rows.size, columns.size) == values.shape)
    kernels.sum_levels(
        address(values, F32), *values.shape, address(rows, I64, writable=True), address(columns, I64, writable=True)
    )


def encode_residuals(
    values: Array, rows: Array, columns: Array, step: int, fine_levels: Array, residuals: Array
) -> int:
    """Fill in the int32 multiples of `step` levels nearest to what the levels of rows and columns (int32) lack.

    Values are not negative; zeros have the residual 0. `fine_levels` is `lattice.fine()`. The sum of the magnitudes.
    """
    _require((rows.size, columns.size) == values.shape == residuals.shape)
    return int(
        kernels.encode_residuals(
            address(values, F32),
            *values.shape,
            address(rows, I32),
            address(columns, I32),
            step,
            address(fine_levels, I32),
            fine_levels.size,
            address(residuals, I32, writable=True),
        )
    )


def decode_levels(
    rows: Array, columns: Array, step: int, residuals: Array | None, zeros: Array | None, out: Array
) -> None:
    """Fill in the values of the levels of rows and columns (int32), with so many steps of levels for each residual.

    `residuals` and `zeros` are int32 of n x m; where `zeros` is not 0, the value is 0.
    """
    _require((rows.size, columns.size) == out.shape)
    _require(all(array is None or array.shape == out.shape for array in (residuals, zeros)))
    kernels.decode_levels(
        address(rows, I32),
        address(columns, I32),
        *out.shape,
        step,
        optional_address(residuals, I32),
        optional_address(zeros, I32),
        address(out, F32, writable=True),
    )


def update_direction(first: Array, second: Array, rows: Array, columns: Array, out: Array) -> bool:
    """Fill in the first moment over the root of the second, clipped, times row and column. Is any of it not 0?"""
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
    """Fill in `factor` times the change of the weights, times the root of the second moment if there is one."""
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
    """Of what `derive_first_moment` computes for 1: the sums of the squares and of the products with `moment`."""
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
    """Fill in what changed since `before`, if there is one, times row and column. The sum of its squares."""
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
    """Fill in values times row and column, added to `before` if there is one."""
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
    values: Array, step: float | np.floating, offset: float | np.floating, codes: Array, sizes: Array, counts: Array
) -> bool:
    """Fill in values as multiples (int32) of a step: |value| / step + `offset`, rounded down, with the value's sign.

    `counts` (4 int64) has the sum of all magnitudes, then how often 1, 2 and 3 occur; `sizes` (4 float64) what these
    stand for in sum, in steps. False, and nothing is filled in, where a value is too large for the step or no number.
    """
    _require(values.shape == codes.shape and sizes.size == counts.size == 4)
    return bool(
        kernels.quantize(
            address(values, F32),
            values.size,
            step,
            offset,
            address(codes, I32, writable=True),
            address(sizes, F64, writable=True),
            address(counts, I64, writable=True),
        )
    )


def dequantize(codes: Array, near: Array, step: float | np.floating, out: Array) -> None:
    """Fill in the values of multiples of a step: for magnitudes of 0 to 3 the four of `near`, else so many steps."""
    _require(codes.shape == out.shape and near.size == 4)
    kernels.dequantize(address(codes, I32), out.size, address(near, F32), step, address(out, F32, writable=True))


def _require(fits: bool) -> None:
    if not fits:
        raise CodecError("the shapes of arrays do not fit: this is a mistake of ckpt's own")
