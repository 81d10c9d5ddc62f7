"""Which of the two engines does the work: compiled kernels, or NumPy and zstandard. Both read what either wrote."""

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

from ckpt_codecs.base import Array

if TYPE_CHECKING:
    from ckpt_codecs.streams import Progress


class Engine(Protocol):
    """What codecs are made of. Planes are one-dimensional arrays of bytes."""

    NAME: str

    def was_compiled(self) -> bool:
        """Did this process have to compile what no cache held?"""
        ...

    def split(self, words: Array, parts: list[Array]) -> None:
        """Words of 2 or 4 bytes into planes, the lowest first, the exponent last."""
        ...

    def merge(self, parts: list[Array], words: Array) -> None: ...

    def survey(self, plane: Array) -> float:
        """Bits a symbol, estimated from a sample."""
        ...

    def write(
        self, out: Array, sizes: Array, worths: Array, looks: Array, done: int, place: int, at: int
    ) -> "Progress":
        """Make streams of all planes but the first `done`: the next is at `place`, and goes to `at`, not above it.

        Returns these three anew, less than all done if a plane has so little information that the caller shall decide;
        then also how many bytes its code would take.
        """
        ...

    def write_planes(self, words: Array, out: Array, worth: float, look: bool) -> "Progress":
        """A chunk of planes of words of 2 or 4 bytes: `split` and `write` at once."""
        ...

    def write_residuals(
        self,
        words: Array,
        base: Array | None,
        columns: int,
        width: int,
        out: Array,
        worth: float,
        look: bool,
        worth_of_rows: float,
    ) -> "Progress | None":
        """A chunk of residuals of float32 words, of which `width` bytes are kept; None if it would gain nothing."""
        ...

    def read(self, source: Array, kinds: Array, starts: Array, sizes: Array, places: Array, room: Array) -> int:
        """The planes of all streams of the plain kinds, into their places of `room`: the number of the first that is
        damaged. Stream i is `source[starts[i]:starts[i + 1]]`. The kinds of streams that were read become `READ`."""
        ...

    def read_planes(self, source: Array, words: Array) -> bool:
        """The words of a chunk of planes at once; False, with anything in them, where `read` and `merge` must do it."""
        ...

    def read_residuals(self, source: Array, base: Array | None, columns: int, words: Array) -> bool:
        """The same of a chunk of residuals of float32: else `read` and `from_residuals`."""
        ...

    def from_residuals(
        self, residuals: Array, parts: list[Array], base: Array | None, columns: int, rows: Array, words: Array
    ) -> None:
        """The words again, from residuals and the three lower planes."""
        ...

    def to_bfloat16(self, words: Array, out: Array) -> None:
        """Round float32 words to nearest, ties to even. A NaN keeps its sign and no payload."""
        ...

    def is_bfloat16_of(self, words: Array, halves: Array) -> bool:
        """Are these the values rounded, and none of them a NaN?"""
        ...

    def pack2(self, plane: Array, symbols: Array, out: Array) -> None:
        """Two neighbours to a byte, as digits to the base of how many symbols there are."""
        ...

    def unpack2(self, packed: Array, symbols: Array, plane: Array) -> None: ...

    def gaps(self, plane: Array, common: int) -> tuple[Array, Array]:
        """How many common symbols stand before each other one (255: as many, and no symbol yet), and the others."""
        ...

    def from_gaps(self, made: Array, others: Array, common: int, out: Array) -> bool:
        """Fill `out`; False if these are no gaps of a plane of its size."""
        ...

    def tally(self, plane: Array) -> int:
        """How many bytes a plane takes entropy-coded: one if it is constant."""
        ...

    def counts(self) -> Array:
        """How often each symbol occurs in the plane that this thread has tallied last."""
        ...

    def press(self, plane: Array, out: Array, at: int) -> tuple[int, int]:
        """Entropy-code the plane that this thread has tallied last, into `out` from `at` on: its kind and size."""
        ...


_instead: ContextVar[Engine | None] = ContextVar("engine", default=None)


def engine() -> Engine:
    """The kernels; without Numba, or with `CKPT_NO_JIT=1` in the environment, what does without."""
    return _instead.get() or _default()


@contextmanager
def using(name: str) -> Iterator[Engine]:
    """Have this thread work with the engine `kernels` or `portable`, whatever it would choose."""
    before = _instead.set(_load(name))
    try:
        yield engine()
    finally:
        _instead.reset(before)


def loaded() -> Engine | None:
    """The engine, if this process has needed it already."""
    return engine() if _instead.get() or _default.cache_info().currsize else None


def warm_up() -> bool:
    """Make the engine ready: True if kernels had to be compiled, which takes a while, once for this machine."""
    return engine().was_compiled()


def is_compiling() -> bool:
    """Has this process met a kernel so far that no cache holds? For who waits for `warm_up` in another thread."""
    jit = sys.modules.get("ckpt_codecs.kernels.jit")
    return any(made.stats.cache_misses for made in getattr(jit, "COMPILED", ()))


@cache
def _default() -> Engine:
    if os.environ.get("CKPT_NO_JIT", "0") in ("", "0"):
        try:
            return _load("kernels")
        except ImportError:
            pass
    return _load("portable")


def _load(name: str) -> Engine:
    return cast(Engine, importlib.import_module(f"ckpt_codecs.{name}"))
