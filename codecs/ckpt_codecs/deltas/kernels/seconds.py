# mypy: ignore-errors
"""What second moments tell: of the sizes of first moments, of how much has changed, of what they come to be."""

from numba import types

from ckpt_codecs.kernels.jit import OUT, OUT32, WORDS32, kernel

I32, U8, U32 = types.int32, types.uint8, types.uint32
NUMBERS8 = types.Array(types.int8, 1, "C", readonly=True)


@kernel(types.void, WORDS32, types.int32, OUT)
def root_units(second, shift, out):
    for i in range(out.size):
        root = I32(I32(I32((second[i] >> U32(23)) & U32(255)) + I32(127)) >> I32(1))
        unit = I32(root + shift)
        unit = I32(1) if unit < I32(1) else unit
        out[i] = U8(unit if unit < I32(254) else I32(254))


@kernel(types.void, WORDS32, WORDS32, types.int32, types.int32, OUT)
def growth_contexts(before, after, least, most, out):
    for i in range(out.size):
        above = I32(I32(I32(U32(after[i] - before[i])) >> I32(21)) - least)
        above = I32(0) if above < I32(0) else above
        out[i] = U8(above if above < most else most)


@kernel(types.void, WORDS32, NUMBERS8, NUMBERS8, OUT32)
def drifted(words, rows, columns, out):
    for row in range(rows.size):
        at, way = row * columns.size, I32(rows[row])
        for j in range(columns.size):
            out[at + j] = U32(words[at + j] + U32(I32(I32(way + I32(columns[j])) << I32(19))))
