"""The arithmetic of lossy codecs, compiled or not, as `ckpt_codecs.engine` chooses; both give the same bits."""

import importlib
from typing import Any, Protocol, cast

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.engine import engine

Float = float | np.floating[Any]


class Arithmetic(Protocol):
    """Symbols and levels are int32, matrices float32 of n x m, sums float64, words the bits of float32.

    A state that is not there is any matrix, and `False` beside it.
    """

    def note(self, symbols: Array, columns: int, shift: int, table: Array, records: Array) -> int: ...

    def write(self, records: Array, many: int, out: Array) -> int: ...

    def read(self, data: Array, columns: int, shift: int, table: Array, symbols: Array) -> bool: ...

    def times(self, a: Array, x: Array, out: Array) -> None: ...

    def turned_times(self, a: Array, x: Array, out: Array) -> None: ...

    def subtract(self, y: Array, p: Array, b: Array) -> None: ...

    def reflect(self, y: Array, w: Array, t: Array) -> None:
        """In float64."""
        ...

    def is_finite(self, words: Array) -> bool: ...

    def sums(self, words: Array, values: Array, rows: Array, columns: Array) -> tuple[int, int]:
        """Fill in the sums of rows and columns. The least and the largest word."""
        ...

    def level_sums(self, words: Array, rows: Array, columns: Array) -> None: ...

    def residuals(self, words: Array, rows: Array, columns: Array, table: Array, each: float, codes: Array) -> int: ...

    def from_levels(
        self,
        rows: Array,
        columns: Array,
        step: int,
        codes: Array,
        zeros: Array,
        coded: bool,
        holed: bool,
        table: Array,
        out: Array,
    ) -> None: ...

    def direction(self, first: Array, second: Array, rows: Array, columns: Array, out: Array) -> bool: ...

    def momentum(self, factor: Float, new: Array, old: Array, second: Array, rooted: bool, out: Array) -> None: ...

    def told(self, new: Array, old: Array, second: Array, rooted: bool, true: Array) -> tuple[float, float]: ...

    def forward(self, true: Array, before: Array, based: bool, rows: Array, columns: Array, out: Array) -> float: ...

    def quantise(self, values: Array, step: Float, shift: Float, codes: Array, sizes: Array, counts: Array) -> int: ...

    def from_codes(self, codes: Array, near: Array, step: Float, out: Array) -> None: ...

    def back(self, values: Array, rows: Array, columns: Array, before: Array, based: bool, out: Array) -> None: ...


def arithmetic() -> Arithmetic:
    """That of the engine which this thread works with."""
    return cast(Arithmetic, importlib.import_module(f"ckpt_codecs.lossy.{engine().NAME}"))
