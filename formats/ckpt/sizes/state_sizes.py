"""The bytes of a checkpoint's states, decoded and stored: a row for each kind of state."""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.computed_blobs import DerivedBlob
from ckpt_formats.core.distinct import distinct
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.state_table import PLAIN, ROLES, StateTable, TabulatedParameters, table_of
from ckpt_formats.core.tensor import Blob, ComputedFragments, Tensor
from ckpt_formats.registry.encoded import may_be_encoded, uses_codecs

if TYPE_CHECKING:
    from ckpt_formats.universal.entry import ParameterEntry
    from ckpt_formats.universal.replay import DeltaBlob, StoredDelta


@dataclass(frozen=True)
class StateSizes:
    """All states of one kind and element type."""

    state: str
    dtype: str
    elements: int
    raw: int
    """Bytes of the values."""
    stored: int
    codecs: tuple[str, ...]

    @property
    def ratio(self) -> float | None:
        """Raw bytes by stored bytes; None if nothing is stored, because the values are derived from others."""
        return self.raw / self.stored if self.stored else None

    @property
    def bits(self) -> float:
        """Stored bits for each element."""
        return 8 * self.stored / max(self.elements, 1)

    def to_json(self) -> dict[str, Any]:
        return {
            "state": self.state,
            "dtype": self.dtype,
            "elements": self.elements,
            "raw_nbytes": self.raw,
            "stored_nbytes": self.stored,
            "ratio": None if self.ratio is None else round(self.ratio, 4),
            "bits_per_element": round(self.bits, 3),
            "codecs": list(self.codecs),
        }


def table(checkpoint: Checkpoint) -> StateTable:
    """The states of a checkpoint as columns."""
    if isinstance(checkpoint.parameters, TabulatedParameters):
        return checkpoint.parameters.table
    return table_of(checkpoint.parameters.values(), lambda: uses_codecs(checkpoint), stored)


def rows(checkpoint: Checkpoint) -> list[StateSizes]:
    """The rows of a checkpoint as it is stored; the largest first."""
    return rows_of(table(checkpoint))


def rows_of(states: StateTable) -> list[StateSizes]:
    """The same of a table of states."""
    trained, coding = ROLES.index("parameter"), states.coding
    roles = states.role.astype(np.int64)[states.owner]
    names = np.where(roles == trained, states.state.astype(np.int64), len(states.states) + roles)
    width, count = max(len(states.dtypes), 1), max(len(coding.codecs), 1)
    kinds = (names * width + states.dtype) * count + coding.codec
    all_kinds, kinds = kinds, distinct(kinds)
    members = np.searchsorted(kinds, all_kinds)
    first = np.empty(len(kinds), np.int64)
    first[members[::-1]] = np.arange(len(members))[::-1]  # of equal indices, the last assignment stays
    labels = (*states.states, *ROLES)
    parts = []
    for kind in np.argsort(first).tolist():
        chosen, number = members == kind, int(kinds[kind])
        elements, raw, nbytes = (
            int(column[chosen].sum()) for column in (states.elements, states.nbytes, coding.nbytes)
        )
        dtype = states.dtypes[number // count % width].name
        codecs = coding.codecs[number % count]
        parts.append(StateSizes(labels[number // count // width], dtype, elements, raw, nbytes, codecs))
    return merged(parts)


def written_rows(entries: "Iterable[ParameterEntry]") -> list[StateSizes]:
    """The rows of the entries of a manifest that has no deltas."""
    return merged(
        StateSizes(
            state if entry.role == "parameter" else entry.role,
            stored_state.dtype,
            prod(stored_state.shape),
            prod(stored_state.shape) * DTYPES[stored_state.dtype].itemsize,
            stored_state.nbytes,
            (PLAIN if stored_state.codec is None else str(stored_state.codec["name"]),),
        )
        for entry in entries
        for state, stored_state in entry.states.items()
    )


def merged(parts: Iterable[StateSizes]) -> list[StateSizes]:
    """One row for all that share state and element type."""
    by_state: dict[tuple[str, str], list[StateSizes]] = {}
    for part in parts:
        by_state.setdefault((part.state, part.dtype), []).append(part)
    return sorted((_sum(*key, members) for key, members in by_state.items()), key=lambda row: -row.raw)


def total(parts: Iterable[StateSizes]) -> StateSizes:
    """All rows together."""
    return _sum("total", "", list(parts))


def row_name(parameter: Parameter, state: str) -> str:
    """What the row of a state is called: the optimizer's name for it, or what the tensor is where it is not trained."""
    return state if parameter.role == "parameter" else parameter.role


def stored(tensor: Tensor) -> tuple[int, tuple[str, ...]]:
    """The bytes that a tensor of a checkpoint takes in its file, and its codecs."""
    if isinstance(tensor.fragments, ComputedFragments) and tensor.fragments.fill(tensor.shape, tensor.dtype):
        return tensor.nbytes, (PLAIN,)
    nbytes, codecs = 0, []
    for fragment in tensor.fragments:
        blob = fragment.blob
        if isinstance(blob, DerivedBlob):
            name = blob.codec.name
        elif (encoded := _encoded(blob)) is not None:
            nbytes, name = nbytes + encoded[0], encoded[1]
        else:
            nbytes, name = nbytes + fragment.box.size * tensor.dtype.itemsize, PLAIN
        codecs.append(name)
    return nbytes, tuple(dict.fromkeys(codecs))


def _encoded(blob: Blob) -> tuple[int, str] | None:
    """The bytes and the codec of values that the universal format stores encoded; None for other values."""
    if not may_be_encoded(blob):
        return None
    from ckpt_formats.universal.chunked import EncodedBlob
    from ckpt_formats.universal.replay import DeltaBlob, stored_delta

    if isinstance(blob, EncodedBlob):
        return blob.store.stored.nbytes, blob.store.codec.name
    if isinstance(blob, DeltaBlob) and (delta := stored_delta(blob)) is not None:
        return _share(blob, delta), f"{delta.codec.name} (delta)"
    return None


def _share(blob: "DeltaBlob", delta: "StoredDelta") -> int:
    """A state's share of the bytes of a delta of several states: proportional to its bytes in their values."""
    full = sum(dtype.itemsize for dtype in delta.form.values())
    return round(delta.stored.nbytes * blob.dtype.itemsize / full)


def _sum(state: str, dtype: str, parts: list[StateSizes]) -> StateSizes:
    codecs = dict.fromkeys(name for part in parts for name in part.codecs)
    return StateSizes(
        state,
        dtype,
        sum(part.elements for part in parts),
        sum(part.raw for part in parts),
        sum(part.stored for part in parts),
        tuple(codecs),
    )
