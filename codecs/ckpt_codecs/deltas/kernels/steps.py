# mypy: ignore-errors
"""Zigzagged differences of words, as planes of bytes and back."""

from numba import types

from ckpt_codecs.kernels.jit import BYTES, OUT, OUT16, OUT32, WORDS16, WORDS32, kernel, part

I16, I32, U8, U16, U32 = types.int16, types.int32, types.uint8, types.uint16, types.uint32


@part
def zigzag32(before, after):
    step = I32(U32(after - before))
    return U32(I32(step << I32(1)) ^ I32(step >> I32(31)))


@part
def unzigzag32(word):
    return U32(U32(word >> U32(1)) ^ U32(U32(0) - U32(word & U32(1))))


@part
def zigzag16(before, after):
    step = I16(U16(after - before))
    return U16(I16(step << I16(1)) ^ I16(step >> I16(15)))


@part
def unzigzag16(word):
    return U16(U16(word >> U16(1)) ^ U16(U16(0) - U16(word & U16(1))))


@kernel(types.uint32, WORDS32, WORDS32)
def widest32(before, after):
    every = U32(0)
    for i in range(after.size):
        every = U32(every | zigzag32(before[i], after[i]))
    return every


@kernel(types.uint16, WORDS16, WORDS16)
def widest16(before, after):
    every = U16(0)
    for i in range(after.size):
        every = U16(every | zigzag16(before[i], after[i]))
    return every


@kernel(types.void, WORDS32, WORDS32, OUT, OUT, OUT, OUT)
def apart32x4(before, after, p0, p1, p2, p3):
    for i in range(after.size):
        word = zigzag32(before[i], after[i])
        p0[i], p1[i], p2[i], p3[i] = U8(word), U8(word >> U32(8)), U8(word >> U32(16)), U8(word >> U32(24))


@kernel(types.void, WORDS32, WORDS32, OUT, OUT, OUT)
def apart32x3(before, after, p0, p1, p2):
    for i in range(after.size):
        word = zigzag32(before[i], after[i])
        p0[i], p1[i], p2[i] = U8(word), U8(word >> U32(8)), U8(word >> U32(16))


@kernel(types.void, WORDS32, WORDS32, OUT)
def apart32x1(before, after, p0):
    for i in range(after.size):
        p0[i] = U8(zigzag32(before[i], after[i]))


@kernel(types.void, WORDS16, WORDS16, OUT, OUT)
def apart16x2(before, after, p0, p1):
    for i in range(after.size):
        word = zigzag16(before[i], after[i])
        p0[i], p1[i] = U8(word), U8(word >> U16(8))


@kernel(types.void, WORDS16, WORDS16, OUT)
def apart16x1(before, after, p0):
    for i in range(after.size):
        p0[i] = U8(zigzag16(before[i], after[i]))


@kernel(types.void, WORDS32, BYTES, BYTES, BYTES, BYTES, OUT32)
def together32x4(before, p0, p1, p2, p3, out):
    for i in range(out.size):
        low, high = U32(p0[i]) | (U32(p1[i]) << U32(8)), (U32(p2[i]) << U32(16)) | (U32(p3[i]) << U32(24))
        out[i] = U32(before[i] + unzigzag32(low | high))


@kernel(types.void, WORDS32, BYTES, BYTES, BYTES, OUT32)
def together32x3(before, p0, p1, p2, out):
    for i in range(out.size):
        word = U32(p0[i]) | (U32(p1[i]) << U32(8)) | (U32(p2[i]) << U32(16))
        out[i] = U32(before[i] + unzigzag32(word))


@kernel(types.void, WORDS32, BYTES, OUT32)
def together32x1(before, p0, out):
    for i in range(out.size):
        out[i] = U32(before[i] + unzigzag32(U32(p0[i])))


@kernel(types.void, WORDS16, BYTES, BYTES, OUT16)
def together16x2(before, p0, p1, out):
    for i in range(out.size):
        out[i] = U16(before[i] + unzigzag16(U16(U16(p0[i]) | (U16(p1[i]) << U16(8)))))


@kernel(types.void, WORDS16, BYTES, OUT16)
def together16x1(before, p0, out):
    for i in range(out.size):
        out[i] = U16(before[i] + unzigzag16(U16(p0[i])))


APART = {(4, 4): apart32x4, (4, 3): apart32x3, (4, 1): apart32x1, (2, 2): apart16x2, (2, 1): apart16x1}
"""By the size of a word, and how many planes."""
TOGETHER = {
    (4, 4): together32x4,
    (4, 3): together32x3,
    (4, 1): together32x1,
    (2, 2): together16x2,
    (2, 1): together16x1,
}
