"""The library of C kernels: found beside this file, loaded when the first kernel is called, bound by ctypes.

ctypes lets go of the GIL during each call. It knows nothing of arrays: `address` checks what a kernel cannot.
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
"""Of each kernel by name: the kind of its result, then of its arguments, as the C header declares them."""

_SUFFIXES = {"darwin": "dylib", "win32": "dll"}
PATH = Path(__file__).with_name(f"libckpt.{_SUFFIXES.get(sys.platform, 'so')}")
_ALIGNMENT = 64
_LEAST_SCRATCH = 1 << 16


class LibraryError(ImportError):
    """The compiled kernels are missing, or do not belong to this version or this CPU.

    No CodecError, since data that cannot be decoded for this reason is not damaged.
    """


class Kernels:
    """The functions of one table of signatures, as attributes. The first use of any of them loads the library."""

    def __init__(self, signatures: Signatures) -> None:
        self._signatures = signatures

    def __getattr__(self, name: str) -> Callable[..., Any]:  # only where the attribute is not there yet
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
    """The kernels of a table of signatures, at this CPU's level.

    A kernel that returns a negative number was called with sizes that do not fit: that raises CodecError.
    """
    return Kernels(signatures)


@cache
def load() -> ctypes.CDLL:
    """The library.

    Raises:
        LibraryError: It is missing, or older or newer than the C sources of this checkout.
    """
    sources = find_sources()
    mend = "run `make kernels`, or `pip install --editable .`" if sources else "install ckpt-suite again"
    try:
        library = ctypes.CDLL(str(PATH))
    except OSError as error:
        reason = f"cannot be loaded ({error})" if PATH.exists() else "is missing"
        raise LibraryError(f"the compiled kernels: {PATH} {reason}; {mend}") from error
    library.ckpt_level.restype = library.ckpt_sources.restype = INT64
    if sources and library.ckpt_sources() != hash_sources(sources):
        raise LibraryError(f"the compiled kernels: {PATH} was not built from the sources in {sources}; {mend}")
    return library


def levels() -> tuple[int, ...]:
    """The levels of kernels that this CPU runs, the highest last.

    Raises:
        LibraryError: It runs none.
    """
    highest = load().ckpt_level()
    if highest == 0:
        raise LibraryError("the compiled kernels need a CPU of x86-64-v2 (of 2009) or newer")
    return (1,) if highest == 1 else tuple(range(2, highest + 1))


@cache
def level() -> int:
    """The level that is bound: the highest, or what CKPT_CPU_LEVEL says.

    Raises:
        LibraryError: This CPU does not run the level that CKPT_CPU_LEVEL says.
    """
    asked = os.environ.get("CKPT_CPU_LEVEL", "")
    possible = levels()
    if not asked:
        return possible[-1]
    if asked not in map(str, possible):
        raise LibraryError(f"CKPT_CPU_LEVEL={asked}: this CPU runs {' and '.join(map(str, possible))}")
    return int(asked)


def address(array: Array, dtype: DType | type[Any], writable: bool = False) -> int:
    """Where the elements of an array lie. The caller keeps the array until the kernel has returned.

    Raises:
        CodecError: The array has gaps, another dtype, or is read-only where the kernel writes.
    """
    flags = array.flags
    if array.dtype != dtype or not flags.c_contiguous or (writable and not flags.writeable):
        wanted = f"{'writable ' if writable else ''}{np.dtype(dtype)}"
        given = f"{array.dtype}, strides {array.strides}, {'' if flags.writeable else 'not '}writable"
        raise CodecError(f"a kernel needs {wanted} without gaps, not {given}: this is a mistake of ckpt's own")
    if flags.writeable and array.size:
        try:
            return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
        except ValueError:  # a dtype that NumPy does not know, like bfloat16
            pass
    # Five times as slow.
    return int(array.__array_interface__["data"][0])


def optional_address(array: Array | None, dtype: DType | type[Any], writable: bool = False) -> int | None:
    """The same of an array that a kernel can do without: None, which C sees as NULL, if there is none."""
    return None if array is None else address(array, dtype, writable)


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.array: Array = np.empty(0, np.uint8)
        self.address = 0
        self.size = 0


_scratch = _Scratch()


def scratch(size: int) -> tuple[int, int]:
    """Address and size of memory for one call of a kernel: at least so many bytes, aligned to 64.

    It is the same memory for all calls of a thread: nothing in it outlives the call.
    """
    if _scratch.size < size:
        whole = max(size, _LEAST_SCRATCH)
        _scratch.array = np.empty(whole + _ALIGNMENT, np.uint8)
        start = address(_scratch.array, np.uint8, writable=True)
        _scratch.address, _scratch.size = start + -start % _ALIGNMENT, whole
    return _scratch.address, _scratch.size


def _check(result: int, function: Any, arguments: tuple[Any, ...]) -> int:
    if result < 0:
        raise CodecError(f"{function.__name__} returned {result}: sizes do not fit: this is a mistake of ckpt's own")
    return result
