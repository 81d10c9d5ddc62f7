"""The twin of `planes.c`: words to planes of bytes and back, and what is done to a plane."""

import numpy as np

from ckpt_codecs.base import Array


def split_planes(words: Array, floats: bool) -> Array:
    width, bits = words.itemsize, 8 * words.itemsize
    if not floats or width == 1:
        return np.ascontiguousarray(words.view(np.uint8).reshape(-1, width).T)
    wide = words.astype(np.uint64)
    top = wide >> np.uint64(bits - 9) & np.uint64(255)
    sign = wide >> np.uint64(bits - 1)
    rest = wide & np.uint64((1 << bits - 9) - 1) | sign << np.uint64(bits - 9)
    planes = [rest >> np.uint64(8 * i) for i in range(width - 1)]
    return np.stack([plane.astype(np.uint8) for plane in [*planes, top]])


def merge_planes(planes: list[Array], floats: bool, words: Array) -> None:
    width, bits = words.itemsize, 8 * words.itemsize
    wide = np.zeros(words.size, np.uint64)
    if not floats or width == 1:
        for i, plane in enumerate(planes):
            wide |= plane.astype(np.uint64) << np.uint64(8 * i)
    else:
        for i, plane in enumerate(planes[:-1]):
            wide |= plane.astype(np.uint64) << np.uint64(8 * i)
        sign = wide >> np.uint64(bits - 9)
        wide &= np.uint64((1 << bits - 9) - 1)
        wide |= planes[-1].astype(np.uint64) << np.uint64(bits - 9) | sign << np.uint64(bits - 1)
    words[:] = wide.astype(words.dtype)


def all_below_128(plane: Array) -> bool:
    return not plane.size or int(plane.max()) < 128


def pack7(plane: Array) -> Array:
    run = plane.size // 8
    out = np.empty(plane.size - run, np.uint8)
    last = plane[7 * run : 8 * run]
    for j in range(7):
        bits = (last >> np.uint8(j) & np.uint8(1)) << np.uint8(7)
        out[j * run : (j + 1) * run] = plane[j * run : (j + 1) * run] | bits
    out[7 * run :] = plane[8 * run :]
    return out


def unpack7(packed: Array, plane: Array) -> None:
    run = plane.size // 8
    plane[7 * run : 8 * run] = 0
    for j in range(7):
        part = packed[j * run : (j + 1) * run]
        plane[j * run : (j + 1) * run] = part & np.uint8(127)
        plane[7 * run : 8 * run] |= part >> np.uint8(7) << np.uint8(j)
    plane[8 * run :] = packed[7 * run :]
