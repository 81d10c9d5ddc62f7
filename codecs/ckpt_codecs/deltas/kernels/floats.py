# mypy: ignore-errors
"""How kernels of floats are compiled: as IEEE 754 has it, with infinity for what is divided by zero."""

import numba
from numba import types

from ckpt_codecs.kernels.jit import COMPILED

FLOATS = types.Array(types.float32, 1, "C", readonly=True)
OUT_FLOATS = types.Array(types.float32, 1, "C")
_OPTIONS = {"nogil": True, "error_model": "numpy"}


def float_kernel(*arguments):
    """As `ckpt_codecs.kernels.jit.kernel`, of a function that returns nothing."""

    def compiled(function):
        signature = types.void(*arguments)
        try:
            made = numba.njit(signature, cache=True, **_OPTIONS)(function)
        except RuntimeError:  # no folder can be written: compile for this process alone
            made = numba.njit(signature, **_OPTIONS)(function)
        COMPILED.append(made)
        return made

    return compiled
