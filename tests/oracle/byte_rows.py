"""The twin of `byte_rows.c`: rows of bytes of which each is like the one above."""

import numpy as np

from ckpt_codecs.base import Array
from oracle.range_coder import MODELS_PER_BIT, Reader, Writer

BYTE_MODELS = 8 * MODELS_PER_BIT


def write_rows(rows: Array, columns: int, out: Array) -> int:
    writer, values = Writer(9 * BYTE_MODELS), rows.tolist()
    for i, byte in enumerate(values):
        writer.number(BYTE_MODELS * bits_of_like(values, i, columns), 8, byte + 1)
    data = writer.done()
    out[: len(data)] = np.frombuffer(data, np.uint8)[: out.size]
    return len(data)


def read_rows(data: Array, columns: int, rows: Array) -> bool:
    reader, values = Reader(9 * BYTE_MODELS, data.tobytes()), [0] * rows.size
    for i in range(rows.size):
        values[i] = reader.number(BYTE_MODELS * bits_of_like(values, i, columns), 8) - 1
    rows[:] = values
    return reader.all_read


def bits_of_like(values: list[int], i: int, columns: int) -> int:
    """The bit length of the byte above, in the first row of the byte before."""
    return values[i - columns if i >= columns else max(i - 1, 0)].bit_length() if i else 0
