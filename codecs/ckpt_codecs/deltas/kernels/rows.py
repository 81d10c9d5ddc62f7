# mypy: ignore-errors
"""Tables of bytes, in rows of which each is like the one above; docs/delta-codecs.md has the arithmetic."""

from numba import types

from ckpt_codecs.deltas.kernels.ranges import (
    MODELS_OF_A_BIT,
    all_read,
    fresh,
    get_number,
    new_reader,
    new_writer,
    put_number,
    written,
)
from ckpt_codecs.kernels.jit import BYTES, OUT, SIZE, kernel, part

I64, U8 = types.int64, types.uint8
BYTE_MODELS = 8 * MODELS_OF_A_BIT


@part
def _size(number):
    """How many bits it has."""
    size = I64(0)
    while number:
        number >>= 1
        size += 1
    return size


@part
def _like(plane, i, columns):
    """The byte above, or the last one in the first row: what the models of a byte are chosen by."""
    return _size(I64(plane[i - columns if i >= columns else max(i - 1, 0)])) if i else 0


@kernel(SIZE, BYTES, SIZE, OUT)
def write_rows(plane, columns, out):
    """Code rows of bytes that are like the rows above; how many bytes that takes."""
    models, writer = fresh(9 * BYTE_MODELS), new_writer()
    for i in range(plane.size):
        like = BYTE_MODELS * _like(plane, i, columns)
        writer = put_number(writer, models, like, 8, I64(plane[i]) + 1, out)
    return written(writer, out)


@kernel(types.boolean, BYTES, SIZE, OUT)
def read_rows(data, columns, plane):
    """Fill the plane; False if these are no bytes of one."""
    models, reader = fresh(9 * BYTE_MODELS), new_reader(data)
    for i in range(plane.size):
        number, reader = get_number(reader, models, BYTE_MODELS * _like(plane, i, columns), 8, data)
        plane[i] = U8(number - 1)
    return all_read(reader, data)
