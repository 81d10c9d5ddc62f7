"""The metadata of arrays of zarr 2, and how they are cut into chunks.

Values are stored plain: a block of them is then a range of a file, and numbers of a model hardly shrink.
"""

import json
from math import prod

from ckpt_formats.core.dtypes import DType
from ckpt_formats.core.geometry import Box, Shape


def chunk_shape(shape: Shape, itemsize: int, nbytes: int) -> Shape:
    """The shape of chunks of at most so many bytes: whole rows, if they are not longer themselves."""
    chunk = list(shape)
    for axis, length in enumerate(shape):
        if prod(chunk) * itemsize <= nbytes:
            break
        most = max(1, nbytes // (prod(chunk[axis + 1 :]) * itemsize))
        even = next(n for n in range(min(most, length), 0, -1) if length % n == 0)
        chunk[axis] = even if 2 * even > most else min(most, length)
    return tuple(chunk)


def chunk_boxes(shape: Shape, chunk: Shape) -> list[tuple[str, Box]]:
    """Each chunk, in order, with its key after the array's name. Those at the edge are cut off at the edge."""
    boxes = [("", Box((), ()))]
    for n, c in zip(shape, chunk, strict=True):
        boxes = [
            (f"{key}.{i}" if key else str(i), Box((*box.start, i * c), (*box.stop, min(n, (i + 1) * c))))
            for key, box in boxes
            for i in range(-(-n // c))
        ]
    return boxes if shape else [("0", Box((), ()))]


def array_json(shape: Shape, dtype: DType, chunk: Shape) -> bytes:
    """`.zarray` of an array."""
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
