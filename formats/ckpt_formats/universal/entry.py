"""What the index states of one parameter: its states, and where their bytes are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from ckpt_formats.core.checkpoint import ErrorFigures, Role
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.values import Value

DIGEST = 16
"""Bytes of the XXH3-128 of one chunk of values, most significant byte first."""
ALIGNMENT = 8
"""Coded bytes are filled with zeros up to a multiple of this."""
DELTA = "delta"
"""The name of the stored bytes of a delta in the header of a pack."""


@dataclass(frozen=True, eq=False)
class CodedChunks:
    """Encoded chunks that follow one another in a pack."""

    nbytes: Array
    """The length of each chunk: (count,) uint32."""
    stored: Array
    """The XXH3-64 of the bytes of each chunk, of the last one with the filling behind it: (count,) uint64."""

    @cached_property
    def starts(self) -> Array:
        """Where each chunk begins, counted from the first: (count,) int64."""
        lengths = self.nbytes.astype(np.int64)
        return np.cumsum(lengths) - lengths

    @property
    def total_nbytes(self) -> int:
        """Bytes of all chunks with the filling."""
        total = int(self.nbytes.sum(dtype=np.int64))
        return total + -total % ALIGNMENT


@dataclass(frozen=True)
class Extent:
    """A range of bytes in a pack."""

    pack: int
    offset: int
    nbytes: int


@dataclass(frozen=True, eq=False)
class StateEntry:
    """One state: its type and shape, the checksums of its values, and how they are stored.

    Values are plain (`extent` alone), encoded (with `codec` and `chunks`), derived from the state `base` (`codec`
    without `extent`), or in the parameter's delta (none of these).
    """

    dtype: str
    shape: Shape
    digests: bytes
    """The XXH3-128 of the values of each chunk, one after another."""
    extent: Extent | None = None
    codec: Mapping[str, Any] | None = None
    base: str | None = None
    chunks: CodedChunks | None = None
    error: ErrorFigures | None = None
    """What is promised and what was measured, if the values differ from those that were to be saved; else None."""

    @property
    def nbytes(self) -> int:
        """Bytes that are stored for it alone."""
        return 0 if self.extent is None else self.extent.nbytes

    @property
    def digest(self) -> int:
        """One checksum of all values: the XXH3-128 of the chunks' checksums."""
        return int(xxhash.xxh3_128_intdigest(self.digests))


@dataclass(frozen=True, eq=False)
class DeltaEntry:
    """Several states of one parameter, encoded together against states of the parent."""

    codec: Mapping[str, Any]
    states: tuple[str, ...]
    parent_states: tuple[str, ...]
    """The states of the parent that the codec is given; empty if it needs no parent."""
    extent: Extent
    chunks: CodedChunks


@dataclass(frozen=True, eq=False)
class ParameterEntry:
    """One parameter, and its states by name."""

    name: str
    role: Role
    states: Mapping[str, StateEntry]
    values: Mapping[str, Value] = field(default_factory=dict)
    delta: DeltaEntry | None = None
