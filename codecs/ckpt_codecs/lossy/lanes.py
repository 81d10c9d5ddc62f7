# mypy: ignore-errors
"""Sixteen float32 at once, for kernels whose sums have an order: a vector that Numba keeps in registers.

Products and sums are rounded each on its own, and nothing is reordered, whatever the machine's own vectors hold. Loads
and stores check their bounds with `NUMBA_BOUNDSCHECK=1` alone, so callers prove theirs.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from ckpt_codecs.kernels.jit import part
from ckpt_codecs.kernels.memory import CHECKED

LANES = 16
_VECTOR = ir.VectorType(ir.FloatType(), LANES)


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__("lanes")


_lanes = _Lanes()


@register_model(_Lanes)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _VECTOR)


def _address(context: Any, builder: Any, kind: Any, array: Any, i: Any, j: Any) -> Any:
    made = context.make_array(kind)(context, builder, value=array)
    pointer = cgutils.get_item_pointer(context, builder, kind, made, [i, j])
    return builder.bitcast(pointer, _VECTOR.as_pointer())


@intrinsic
def _load(typing: Any, array: Any, i: Any, j: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.load(_address(context, builder, signature.args[0], *values), align=4)

    return _lanes(array, types.intp, types.intp), code


@intrinsic
def _store(typing: Any, array: Any, i: Any, j: Any, lanes: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.store(values[3], _address(context, builder, signature.args[0], *values[:3]), align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, _lanes), code


def _times(builder: Any, number: Any, lanes: Any) -> Any:
    one = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), number, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), None)
    return builder.fmul(builder.shuffle_vector(one, ir.Constant(_VECTOR, ir.Undefined), zeros), lanes)


@intrinsic
def plus(typing: Any, lanes: Any, number: Any, others: Any) -> Any:
    """`lanes + number * others`."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fadd(values[0], _times(builder, values[1], values[2]))

    return _lanes(_lanes, types.float32, _lanes), code


@intrinsic
def minus(typing: Any, lanes: Any, number: Any, others: Any) -> Any:
    """`lanes - number * others`."""

    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fsub(values[0], _times(builder, values[1], values[2]))

    return _lanes(_lanes, types.float32, _lanes), code


@intrinsic
def zero(typing: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return ir.Constant(_VECTOR, None)

    return _lanes(), code


@part
def _check(array, i, j):
    if i < 0 or i >= array.shape[0] or j < 0 or j + LANES > array.shape[1]:
        raise IndexError("beyond the matrix")


@part
def _load_checked(array, i, j):
    _check(array, i, j)
    return _load(array, i, j)


@part
def _store_checked(array, i, j, lanes):
    _check(array, i, j)
    _store(array, i, j, lanes)


load = _load_checked if CHECKED else _load
"""Of a C-ordered matrix, from (i, j) on: `0 <= j <= array.shape[1] - LANES`."""

store = _store_checked if CHECKED else _store
