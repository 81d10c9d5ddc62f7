"""The arithmetic of lossy codecs, compiled or not, as `ckpt_codecs.engine` chooses; both give the same bits."""

import importlib
from typing import Protocol, cast

from ckpt_codecs.base import Array
from ckpt_codecs.engine import engine


class Arithmetic(Protocol):
    """Symbols are int32, matrices float32."""

    def note(self, symbols: Array, columns: int, shift: int, table: Array, records: Array) -> int: ...

    def write(self, records: Array, many: int, out: Array) -> int: ...

    def read(self, data: Array, columns: int, shift: int, table: Array, symbols: Array) -> bool: ...

    def times(self, a: Array, x: Array, out: Array) -> None: ...

    def turned_times(self, a: Array, x: Array, out: Array) -> None: ...

    def subtract(self, y: Array, p: Array, b: Array) -> None: ...

    def reflect(self, y: Array, w: Array, t: Array) -> None:
        """In float64."""
        ...


def arithmetic() -> Arithmetic:
    """That of the engine which this thread works with."""
    return cast(Arithmetic, importlib.import_module(f"ckpt_codecs.lossy.{engine().NAME}"))
