"""The step counts that parameters have as tensors of one number: neighbours in a file are read together."""

import numpy as np

from ckpt_formats.core.dtypes import DType, is_float
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.state_table import Places, TabulatedParameters
from ckpt_formats.core.tensor import Array, read

STEP = "step"
_GAP = 1 << 12
"""Bytes between two numbers that are rather read than skipped."""
_READ = 4 << 20
"""Bytes that are read at once."""


def step_counts(parameters: TabulatedParameters) -> dict[int, float]:
    """The count of each parameter that has one as a tensor, by the number of the parameter."""
    table = parameters.table
    rows = table.rows_named(STEP)
    rows = rows[rows >= 0]
    rows = rows[table.rank[rows] == 0]
    counts: dict[int, float] = {}
    if not len(rows):
        return counts
    places = parameters.places()
    with Reader(check=False) as reader:
        for number, dtype in enumerate(table.dtypes):
            if dtype.kind in "iub" or is_float(dtype):
                own = rows[(table.dtype[rows] == number) & (places.file[rows] >= 0)]
                values = _numbers(places, own, dtype, reader)
                counts |= dict(zip(table.owner[own].tolist(), values, strict=False))
        for row in rows.tolist():
            owner = int(table.owner[row])
            if owner not in counts:
                counts[owner] = float(read(parameters[table.names[owner]].states[STEP], reader))
    return counts


def _numbers(places: Places, rows: Array, dtype: DType, reader: Reader) -> list[float]:
    """The numbers of states that lie plain in files; none if a file cannot be read."""
    order = np.lexsort((places.offset[rows], places.file[rows]))
    files, offsets, width = places.file[rows][order], places.offset[rows][order], dtype.itemsize
    values = np.zeros((len(rows), width), np.uint8)
    breaks = (np.diff(files) != 0) | (np.diff(offsets) > _GAP) | (np.diff(offsets // _READ) != 0)
    for part in np.split(np.arange(len(rows)), np.flatnonzero(breaks) + 1) if len(rows) else ():
        start, stop = int(offsets[part[0]]), int(offsets[part[-1]]) + width
        data = np.empty(stop - start, np.uint8)
        try:
            reader.read_into(places.files[files[part[0]]], start, data.data)
        except CkptError:
            return []  # to read one by one says which
        values[order[part]] = data[(offsets[part] - start)[:, None] + np.arange(width)]
    numbers: list[float] = values.view(dtype).reshape(-1).astype(np.float64).tolist()
    return numbers
