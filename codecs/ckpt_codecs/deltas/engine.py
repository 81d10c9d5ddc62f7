"""What delta codecs are made of, in both engines: `kernels` compiled, `portable` without a compiler."""

import importlib
from functools import cache
from typing import Protocol, cast

from ckpt_codecs.base import Array
from ckpt_codecs.engine import engine


class DeltaEngine(Protocol):
    """Words are one-dimensional arrays of unsigned integers; planes are of bytes. Both engines give the same bits."""

    def widest_step(self, before: Array, after: Array) -> int:
        """All bits that any zigzagged difference has, of words of 2 or 4 bytes."""
        ...

    def steps(self, before: Array, after: Array, parts: list[Array]) -> None:
        """The lowest bytes of the zigzagged differences, a plane each."""
        ...

    def stepped(self, before: Array, parts: list[Array], out: Array) -> None:
        """The words again."""
        ...

    def to_grid(self, foretold: Array, found: Array, units: Array) -> tuple[Array, Array, Array]:
        """Symbols, depths and bits of float32 words; the bits have eight bytes more than they take."""
        ...

    def from_grid(self, foretold: Array, units: Array, symbols: Array, depths: Array, bits: Array, out: Array) -> bool:
        """Fill `out`; False if these are no symbols, depths and bits of so many words."""
        ...

    def root_units(self, second: Array, shift: int) -> Array:
        """Exponents so many octaves from those of the roots of float32 words, from 1 to 254."""
        ...

    def growth_contexts(self, before: Array, after: Array, least: int, many: int) -> Array:
        """By how many quarter octaves float32 words have grown, more than the least, and below `many`."""
        ...

    def drifted(self, words: Array, rows: Array, columns: Array) -> Array:
        """Words of rows and columns that have grown by so many sixteenths of an octave."""
        ...

    def buckets(self, words: Array, mantissa: int, least: int, many: int) -> Array:
        """The exponents of 16-bit floats above the least, and below how many there are."""
        ...

    def count(self, contexts: Array, many: int) -> Array:
        """How often each context occurs, `many` of them at least."""
        ...

    def gather(self, contexts: Array, plane: Array, out: Array) -> None:
        """The symbols of each context together, in their order."""
        ...

    def scatter(self, contexts: Array, plane: Array, out: Array) -> None:
        """The symbols in their places again."""
        ...

    def read_seldom(self, data: Array, counts: Array, kinds: Array, plane: Array) -> bool:
        """Fill the plane, which is mostly zero; False if these are no bytes of one."""
        ...

    def find_changes(
        self, foretold: Array, found: Array, which: Array, contexts: int, many: int
    ) -> tuple[Array, Array, Array, Array, Array]:
        """Of each of the `many` changes its bucket, how many of this stood before it unchanged, and the step.

        Of each bucket how many values it has, and how many after its last change.
        """
        ...

    def write_changes(
        self, buckets: Array, gaps: Array, steps: Array, sizes: Array, tails: Array, kinds: Array, out: Array
    ) -> int:
        """How many bytes they take; if more than `out` has, it holds none that mean anything."""
        ...

    def read_changes(self, data: Array, foretold: Array, which: Array, sizes: Array, out: Array) -> bool:
        """Fill `out`; False if these are no bytes of so many words."""
        ...

    def tally_steps(self, foretold: Array, found: Array, which: Array, contexts: int) -> tuple[Array, Array, Array]:
        """Each value's bucket << 8 and symbol, how often they occur, and the bits that symbols leave."""
        ...

    def write_steps(self, told: Array, weights: Array) -> tuple[Array, Array]:
        """States and words that tell the symbols, by the weights of each bucket's."""
        ...

    def read_steps(
        self, foretold: Array, which: Array, weights: Array, states: Array, words: Array, bits: Array, out: Array
    ) -> bool:
        """Fill `out`; False if states, words and bits are not those of so many words."""
        ...

    def write_rows(self, plane: Array, columns: int, out: Array) -> int:
        """Code rows of bytes that are like those above; how many bytes that takes, as of `write_changes`."""
        ...

    def read_rows(self, data: Array, columns: int, plane: Array) -> bool: ...

    def gradients(self, m0: Array, m1: Array, gain: float, out: Array) -> None:
        """What a first moment says of the gradient. From here on, all arrays are of float32."""
        ...

    def halves(self, m0: Array, m1: Array, scale: float, kept: float, gain: float, form: int, out: Array) -> None:
        """The gradients in bfloat16, as words, before they were scaled: for an encoder, in whose choice they are."""
        ...

    def first(self, m: Array, g: Array, kept: float, gain: float, form: int, out: Array) -> None: ...

    def second(self, v: Array, g: Array, kept: float, gain: float, form: int, out: Array) -> None: ...

    def weights_torch(
        self, w: Array, m: Array, v: Array, decay: float, step: float, root: float, eps: float, out: Array
    ) -> None: ...

    def weights_divided(
        self, w: Array, m: Array, v: Array, decay: float, step: float, root: float, eps: float, out: Array
    ) -> None: ...

    def weights_cpu_adam(
        self, w: Array, m: Array, v: Array, decay: float, step: float, root: float, eps: float, out: Array
    ) -> None: ...

    def weights_apex(
        self,
        w: Array,
        m: Array,
        v: Array,
        decay: float,
        step: float,
        root: float,
        eps: float,
        correction: float,
        out: Array,
    ) -> None: ...

    def carried(
        self, w: Array, m0: Array, v0: Array, m1: Array, v1: Array, decay: float, early: float, late: float, out: Array
    ) -> None: ...

    def descended(self, w: Array, b: Array, decay: float, step: float, out: Array) -> None: ...

    def mixed(self, x: Array, y: Array, a: float, b: float, out: Array) -> None: ...

    def scaled(self, x: Array, factor: float, out: Array) -> None: ...


def delta_engine() -> DeltaEngine:
    """The one that belongs to what `ckpt_codecs.engine` has chosen."""
    return _load(engine().NAME)


@cache
def _load(name: str) -> DeltaEngine:
    return cast(DeltaEngine, importlib.import_module(f"ckpt_codecs.deltas.{name}"))
