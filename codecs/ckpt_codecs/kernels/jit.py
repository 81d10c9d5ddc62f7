# mypy: ignore-errors
"""How kernels are compiled: ahead of the first call, once per machine, without the GIL.

Types stand in `kernel(...)`, not in annotations, hence mypy is not asked here. Numba's cache
looks at the file of a kernel alone: after a change to a `part` in another file, delete `__pycache__`.
"""

from collections.abc import Callable
from typing import Any

import numba
from numba import types

Function = Callable[..., Any]

# Bytes that came from a file are read-only, and to Numba that is a type of its own.
# Writable arrays are taken where read-only ones are promised, so each kernel compiles once.
BYTES = types.Array(types.uint8, 1, "C", readonly=True)
WORDS16 = types.Array(types.uint16, 1, "C", readonly=True)
WORDS32 = types.Array(types.uint32, 1, "C", readonly=True)
OUT = types.Array(types.uint8, 1, "C")
OUT16 = types.Array(types.uint16, 1, "C")
OUT32 = types.Array(types.uint32, 1, "C")
OUT64 = types.Array(types.uint64, 1, "C")
COUNTS = types.Array(types.uint32, 2, "C")
NUMBERS16 = types.Array(types.int16, 1, "C")
NUMBERS32 = types.Array(types.int32, 1, "C")
REALS = types.Array(types.float64, 1, "C")
TRUTHS = types.Array(types.boolean, 1, "C")
SIZES = types.Array(types.int64, 1, "C")
SIZE = types.intp

COMPILED: list[Any] = []
"""Every kernel of this process, to ask whether it came from the cache."""


def kernel(result: Any, *arguments: Any, short: bool = False) -> Callable[[Function], Function]:
    """Compile a function for these types, now, or load it from Numba's cache on the disk.

    `short`: it keeps the GIL, since taking it again may cost more than the microseconds that the function takes.
    """

    def compiled(function: Function) -> Function:
        signature = result(*arguments)
        try:
            made = numba.njit(signature, nogil=not short, cache=True)(function)
        except RuntimeError:  # no folder can be written: compile for this process alone
            made = numba.njit(signature, nogil=not short)(function)
        COMPILED.append(made)
        return made

    return compiled


def part(function: Function) -> Function:
    """A piece of kernels, compiled into each that calls it."""
    return numba.njit(function, nogil=True)
