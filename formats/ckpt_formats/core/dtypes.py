"""Element types by name, in plain tables. The names are those of PyTorch and NumPy, which agree."""

import sys
from typing import Any

import ml_dtypes
import numpy as np

DType = np.dtype[Any]

_PLAIN = (
    "bool",
    *(f"{kind}{bits}" for kind in ("uint", "int") for bits in (8, 16, 32, 64)),
    *("float16", "float32", "float64", "complex64", "complex128"),
)
_SHORT_FLOATS = ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")

DTYPES: dict[str, DType] = {
    **{name: np.dtype(name) for name in _PLAIN},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _SHORT_FLOATS},
}

NAMES: dict[DType, str] = {dtype: name for name, dtype in DTYPES.items()}
"""The names by type. `dtype.name` gives the same, but takes ten times as long."""

SAFETENSORS_TAGS: dict[str, str] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}

SHORT_NAMES: dict[str, str] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "fp64": "float64",
    "float": "float32",
    "half": "float16",
    "double": "float64",
}


def is_float(dtype: DType) -> bool:
    """Whether it is an IEEE float, bfloat16 or an 8-bit float. NumPy gives the last two the kind 'V'."""
    return dtype.kind == "f" or dtype.name in _SHORT_FLOATS


def is_text(values: "np.ndarray[Any, Any]") -> bool:
    """Whether all elements of an array of NumPy's text are text: NumPy fails where one has a code beyond Unicode.

    values: of any shape, dtype `U`, C-contiguous.
    """
    if not values.size or not values.dtype.itemsize:
        return True
    codes = values.reshape(-1).view(np.dtype(np.uint32).newbyteorder(values.dtype.byteorder))
    return int(codes.max()) <= sys.maxunicode
