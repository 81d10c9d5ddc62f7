# mypy: ignore-errors
"""Words of memory at any byte. The one place where Numba does not check indices, so callers prove theirs.

With `NUMBA_BOUNDSCHECK=1` each byte is checked: the fuzzing tests run so.
"""

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ckpt_codecs.kernels.jit import part

CHECKED = bool(numba.config.BOUNDSCHECK)


def _address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, bits: int) -> Any:
    data = context.make_array(array_type)(context, builder, value=array).data
    start = builder.bitcast(data, ir.IntType(8).as_pointer())
    return builder.bitcast(builder.gep(start, [index]), ir.IntType(bits).as_pointer())


def _loader(word: Any) -> Any:
    def load(typing: Any, array: Any, index: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            return builder.load(_address(context, builder, signature.args[0], *values, word.bitwidth), align=1)

        return word(array, types.intp), code

    return intrinsic(load)


@intrinsic
def _store64(typing: Any, array: Any, index: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        address = _address(context, builder, signature.args[0], values[0], values[1], 64)
        builder.store(values[2], address, align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.uint64), code


@part
def _load_checked(array, index, size):
    word = types.uint64(0)
    if index < 0:
        raise IndexError("before the array")
    for i in range(size):
        word |= types.uint64(array[index + i]) << types.uint64(8 * i)
    return word


@part
def _load64_checked(array, index):
    return _load_checked(array, index, 8)


@part
def _load32_checked(array, index):
    return types.uint32(_load_checked(array, index, 4))


@part
def _store64_checked(array, index, value):
    if index < 0:
        raise IndexError("before the array")
    for i in range(8):
        array[index + i] = types.uint8((value >> types.uint64(8 * i)) & types.uint64(255))


load64 = _load64_checked if CHECKED else _loader(types.uint64)
"""The little-endian word of the 8 bytes from `index` on: `0 <= index <= array.size - 8`."""

load32 = _load32_checked if CHECKED else _loader(types.uint32)
"""The same of 4 bytes."""

store64 = _store64_checked if CHECKED else _store64
"""Put 8 bytes from `index` on: `0 <= index <= array.size - 8`."""
