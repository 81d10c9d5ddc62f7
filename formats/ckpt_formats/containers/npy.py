"""Headers of NumPy's `.npy`: the type, shape and order of one array. Nothing in them is evaluated.

\\x93NUMPY, version, length of the text, {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
"""

import re
from dataclasses import dataclass
from math import prod

from ckpt_formats.core.claims import MAX_ELEMENTS, MAX_NUMPY_AXES, MAX_NUMPY_HEADER
from ckpt_formats.core.dtypes import DTYPES, DType
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.geometry import Shape

MAGIC = b"\x93NUMPY"
_FIELD = re.compile(
    r"'(?:(?P<descr>descr)': *(?:'(?P<type>[^'\[]{1,32})'|\[.*\])|(?P<order>fortran_order)': *(?P<fortran>True|False)"
    r"|(?P<axes>shape)': *\((?P<shape>[\d, L]*)\))(?:, *|(?=\}))"
)
"""One of the three entries of a header."""
_NEEDED = {"descr", "fortran", "shape"}
_LENGTHS = {1: 2, 2: 4, 3: 4}
"""By version, the bytes of the length."""


@dataclass(frozen=True)
class NpyHeader:
    """What the header of an array states."""

    dtype: DType
    shape: Shape
    is_fortran: bool
    """Whether the first axis varies fastest."""
    begin: int
    """The first byte of the values, counted from the magic number."""


def header_nbytes(start: bytes, where: str) -> int:
    """The length of a header with all before the values, by its first 12 bytes. Raises `CorruptError`."""
    width = _LENGTHS.get(start[6]) if len(start) >= 12 and start.startswith(MAGIC) else None
    if width is None:
        raise CorruptError("is not an array of NumPy: its header is malformed", where=where)
    nbytes = 8 + width + int.from_bytes(start[8 : 8 + width], "little")
    if nbytes > MAX_NUMPY_HEADER:
        raise CorruptError(f"the header of an array has {nbytes:,} bytes", where=where)
    return nbytes


def parse_header(header: bytes, nbytes: int, where: str) -> NpyHeader:
    """What a header states of an array in `nbytes` bytes, those of the header included.

    Raises `CorruptError` if it is malformed or contradicts `nbytes`, `UnsupportedError` for values that are no plain
    numbers: Python objects, rows, dates, and those of the other byte order.
    """
    text = header[8 + _LENGTHS[header[6]] :].decode("latin-1").strip()
    fields: dict[str, str | None] = {}
    at = 1
    while (match := _FIELD.match(text, at)) is not None:
        fields |= {key: value for key, value in match.groupdict().items() if match[key] is not None}
        at = match.end()
    if not text.startswith("{") or text[at:].strip() != "}" or not fields.keys() >= _NEEDED:
        raise CorruptError("the header of an array is malformed", where=where)
    lengths = [part.rstrip("L") for part in str(fields["shape"]).replace(" ", "").split(",") if part]
    if not all(part.isdecimal() and len(part) < 20 for part in lengths):
        raise CorruptError("an array of impossible shape", where=where)
    shape = tuple(map(int, lengths))
    if len(shape) > MAX_NUMPY_AXES or prod(shape) > MAX_ELEMENTS:
        raise CorruptError("an array of impossible shape", where=where)
    dtype = _dtype(fields.get("type"), where)
    if len(header) + prod(shape) * dtype.itemsize != nbytes:
        raise CorruptError(
            f"an array of shape {list(shape)} and type {dtype.name} has {nbytes - len(header):,} bytes of values",
            where=where,
        )
    return NpyHeader(dtype, shape, fields["fortran"] == "True", len(header))


def _dtype(descr: str | None, where: str) -> DType:
    if descr is None:
        raise UnsupportedError("an array of rows (a structured type) is not read", where=where)
    if descr.lstrip("|<>=").startswith("O"):
        raise UnsupportedError(
            "an array of Python objects is a pickle inside, and is not read",
            where=where,
            hint="Save arrays of numbers.",
        )
    plain = re.fullmatch(r"[|<=]?([biufc])(\d{1,2})", descr)
    dtype = _PLAIN.get(plain[1] + str(int(plain[2]))) if plain else None
    if dtype is None:
        raise UnsupportedError(
            f"an array of type {descr!r} is not read",
            where=where,
            hint="Save arrays of numbers. NumPy has no name for bfloat16 and 8-bit floats: safetensors has.",
        )
    return dtype


_PLAIN = {f"{dtype.kind}{dtype.itemsize}": dtype for dtype in DTYPES.values() if dtype.isbuiltin == 1}
"""NumPy's own types by their codes, without the byte order."""
