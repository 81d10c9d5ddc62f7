"""The library of C kernels: next to this file, loaded when the first kernel is called, bound by ctypes.

ctypes releases the GIL during each call. It does not know arrays: `address` checks what a kernel cannot check.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_codecs.base import Array, DType
from ckpt_codecs.errors import CodecError
from ckpt_codecs.native.sources import find_sources, hash_sources

ADDRESS = ctypes.c_void_p
INT = ctypes.c_int
INT64 = ctypes.c_int64
UINT32 = ctypes.c_uint32
UINT64 = ctypes.c_uint64
FLOAT = ctypes.c_float
DOUBLE = ctypes.c_double

Signatures = Mapping[str, tuple[Any, ...]]
"""The C types of each kernel by name: of its result, then of its arguments, as the C header declares them."""

_SUFFIXES = {"darwin": "dylib", "win32": "dll"}
PATH = Path(__file__).with_name(f"libckpt.{_SUFFIXES.get(sys.platform, 'so')}")
_ALIGNMENT = 64
_MIN_SCRATCH_NBYTES = 1 << 16


class LibraryError(ImportError):
    """The compiled kernels are missing, or do not belong to this version or this CPU.

    It is not a CodecError, because data that cannot be decoded for this reason is not damaged.
    """


class Kernels:
    """The functions of one table of signatures as attributes. The first use of one of them loads the library."""

    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures

    def __getattr__(self, name: str) -> Callable[..., Any]:  # only if there is no such attribute yet
        if name not in self._signatures:
            raise AttributeError(name)
        result, *arguments = self._signatures[name]
        function = getattr(load(), f"v{level()}_{name}")
        function.restype, function.argtypes = result, arguments
        if result is INT64:
            function.errcheck = _check
        setattr(self, name, function)
        return function  # type: ignore[no-any-return]


def bind(signatures: Signatures) -> Kernels:
    """Return the kernels of a table of signatures at this CPU's level.

    Calling a kernel raises CodecError if it returns a negative number: then the sizes of its arguments do not fit.
    """
    return Kernels(signatures)


@cache
def load() -> ctypes.CDLL:
    """Return the loaded library.

    Raises:
        LibraryError: It is missing, or older or newer than the C sources of this checkout.
    """
    sources = find_sources()
    repair = "run `make kernels`, or `pip install --editable .`" if sources else "install ckpt-suite again"
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        reason = f"cannot be loaded ({error})" if PATH.exists() else "is missing"
        raise LibraryError(f"the compiled kernels: {PATH} {reason}; {repair}") from error
    library.ckpt_level.restype = library.ckpt_sources.restype = INT64
    if sources and library.ckpt_sources() != hash_sources(sources):
        raise LibraryError(f"the compiled kernels: {PATH} was not built from the sources in {sources}; {repair}")
    return library


def levels() -> tuple[int, ...]:
    """Return the levels of kernels that this CPU can run, the highest last.

    Raises:
        LibraryError: It can run none.
    """
    highest = load().ckpt_level()
    if highest == 0:
        raise LibraryError("the compiled kernels need a CPU of x86-64-v2 (of 2009) or newer")
    return (1,) if highest == 1 else tuple(range(2, highest + 1))


@cache
def level() -> int:
    """Return the level that is bound: the highest one, or that of the environment variable CKPT_CPU_LEVEL.

    Raises:
        LibraryError: This CPU cannot run the level of CKPT_CPU_LEVEL.
    """
    requested = os.environ.get("CKPT_CPU_LEVEL", "")
    possible = levels()
    if not requested:
        return possible[-1]
    if requested not in map(str, possible):
        raise LibraryError(f"CKPT_CPU_LEVEL={requested}: this CPU runs {' and '.join(map(str, possible))}")
    return int(requested)


def address(array: Array, dtype: DType | type[Any], writable: bool = False) -> int:
    """Return the address of the first element of an array, of any shape and of the given dtype.

    It is valid as long as the array: the caller holds a reference until the kernel returns.

    Raises:
        CodecError: The array has gaps, another dtype, or is read-only where the kernel writes.
    """
    flags = array.flags
    if array.dtype != dtype or not flags.c_contiguous or (writable and not flags.writeable):
        wanted = f"{'writable ' if writable else ''}{np.dtype(dtype)}"
        actual = f"{array.dtype}, strides {array.strides}, {'' if flags.writeable else 'not '}writable"
        raise CodecError(f"a kernel needs {wanted} without gaps, not {actual}: this is a bug in ckpt")
    if flags.writeable and array.size:
        try:
            return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
        except ValueError:  # a dtype that NumPy does not know, like bfloat16
            pass
    # This takes five times as long.
    return int(array.__array_interface__["data"][0])


def optional_address(array: Array | None, dtype: DType | type[Any], writable: bool = False) -> int | None:
    """Return the address of an array of any shape and the given dtype; None, which is NULL in C, if there is none."""
    return None if array is None else address(array, dtype, writable)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.array: Array = np.empty(0, np.uint8)
        self.address = 0
        self.size = 0


_scratch = _Scratch()


def scratch(size: int) -> tuple[int, int]:
    """Return address and size of memory for one call of a kernel: at least `size` bytes, aligned to 64.

    All calls of a thread use the same memory: it is valid during one call.
    """
    if _scratch.size < size:
        nbytes = max(size, _MIN_SCRATCH_NBYTES)
        _scratch.array = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = address(_scratch.array, np.uint8, writable=True)
        _scratch.address, _scratch.size = start + -start % _ALIGNMENT, nbytes
    return _scratch.address, _scratch.size


def _check(result: int, function: Any, arguments: tuple[Any, ...]) -> int:
    if result < 0:
        raise CodecError(f"{function.__name__} returned {result}: sizes do not fit: this is a bug in ckpt")
    return result
