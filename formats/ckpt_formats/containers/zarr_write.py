"""The metadata of arrays of zarr 2 and 3, and how they are cut into chunks.

Values are stored plain: a block of them is then a range of a file, and numbers of a model hardly shrink.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt, prod

from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.geometry import Box, Shape


@dataclass(frozen=True)
class ChunkGrid:
    """How arrays are cut into chunks."""

    nbytes: int
    """The most bytes of a chunk; an element may have more."""
    parts_per_axis: int = 1
    """Into how many parts each axis is cut that has a multiple of them: that many devices read only their own."""
    zarr3: bool = False

    def shape(self, shape: Shape, itemsize: int) -> Shape:
        """The shape of the chunks of an array: whole rows, if they are not longer themselves."""
        parts = self.parts_per_axis
        chunk = [n // parts if n % parts == 0 else n for n in shape]
        for axis, length in enumerate(chunk):
            if prod(chunk) * itemsize <= self.nbytes:
                break
            most = max(1, self.nbytes // (prod(chunk[axis + 1 :]) * itemsize))
            even = _largest_divisor(length, min(most, length))
            # Where parts are asked for, no chunk may reach from one into the next.
            chunk[axis] = even if 2 * even > most or length < shape[axis] else min(most, length)
        return tuple(max(1, n) for n in chunk)

    def boxes(self, shape: Shape, chunk: Shape) -> list[tuple[str, Box]]:
        """Each chunk, in order, with its key after the array's name. Those at the edge are cut off at the edge.

        `chunk`: the shape of the chunks, as of `shape`.
        """
        boxes = [("c" if self.zarr3 else "", Box((), ()))]
        separator = "/" if self.zarr3 else "."
        for n, c in zip(shape, chunk, strict=True):
            boxes = [
                (f"{key}{separator}{i}" if key else str(i), Box((*box.start, i * c), (*box.stop, min(n, (i + 1) * c))))
                for key, box in boxes
                for i in range(-(-n // c))
            ]
        return boxes if shape or self.zarr3 else [("0", Box((), ()))]

    def metadata(self, shape: Shape, dtype: DType, chunk: Shape) -> tuple[str, bytes]:
        """The key, after the array's name, and the JSON that describes an array, whose chunks have this shape."""
        return (
            ("zarr.json", _third(shape, dtype, chunk)) if self.zarr3 else (".zarray", array_json(shape, dtype, chunk))
        )


@lru_cache(1024)
def _largest_divisor(length: int, most: int) -> int:
    """The largest divisor of a length that is at most `most`, in as many steps as the root of the length.

    Of each pair of divisors, one is at most the root: large divisors are those with small quotients.
    """
    root = isqrt(length)
    for quotient in range(-(-length // most), root + 1):
        if length % quotient == 0:
            return length // quotient
    return next(n for n in range(min(most, root), 0, -1) if length % n == 0)


def array_json(shape: Shape, dtype: DType, chunk: Shape) -> bytes:
    """`.zarray` of an array: its metadata in zarr 2."""
    name = dtype.str if dtype.isbuiltin == 1 else dtype.name
    content = {
        "chunks": list(chunk),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": name,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }
    return json.dumps(content, separators=(",", ":")).encode()


def _third(shape: Shape, dtype: DType, chunk: Shape) -> bytes:
    """`zarr.json` of an array: its metadata in zarr 3."""
    zero: object = False if dtype.kind == "b" else [0, 0] if dtype.kind == "c" else 0
    little = {"name": "bytes", "configuration": {"endian": "little"}}
    content = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [little if dtype.itemsize > 1 else {"name": "bytes"}],
        "fill_value": zero,
        "attributes": {},
    }
    return json.dumps(content, separators=(",", ":")).encode()
