"""The kernel of Reed-Solomon codes, as a function of arrays. `codecs/kernels/parity.h` states what it computes.

Raises:
    CodecError: An array has another dtype or size, which is a bug in ckpt.
"""

from functools import cache

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native import library
from ckpt_codecs.native.library import ADDRESS, INT64, address, bind

SIGNATURES = {"add_products": (INT64, INT64, INT64, ADDRESS, INT64, ADDRESS, ADDRESS, INT64, INT64)}
kernels = bind(SIGNATURES)

_UINT8 = np.dtype(np.uint8)


@cache
def has_gfni() -> bool:
    """Return whether this CPU has GFNI, which multiplies bytes in half the instructions."""
    features = library.load().ckpt_features
    features.restype = INT64
    return bool(features() & 1)


def add_products(matrix: Array, inputs: Array, outputs: Array, gfni: bool | None = None) -> None:
    """Add the products of a matrix and blocks over GF(2^8) of 0x11d to other blocks, in place.

    `matrix`: (rows, columns), `inputs`: (columns, n), `outputs`: (rows, n), all uint8; rows and columns at most 255.
    `outputs` may be a part of each row of a larger array.
    `gfni`: use this instruction; None does if this CPU has it. The bytes are the same.
    """
    rows, columns = matrix.shape
    n = inputs.shape[1]
    if inputs.shape != (columns, n) or outputs.shape != (rows, n):
        raise CodecError(f"shapes {matrix.shape}, {inputs.shape}, {outputs.shape} do not fit: this is a bug in ckpt")
    # The address is that of a row, which has no gaps; rows may be apart.
    stride = outputs.strides[0] if rows > 1 else n
    kernels.add_products(
        *(rows, columns, address(matrix, _UINT8), n, address(inputs, _UINT8)),
        *(address(outputs[0], _UINT8, writable=True), stride, has_gfni() if gfni is None else gfni and has_gfni()),
    )
