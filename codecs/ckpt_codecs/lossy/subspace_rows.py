"""The codec `subspace-rows`: of a table, only the rows that changed, as the codec `subspace` encodes them.

So a table of which few rows are stepped costs what these rows cost: quantised on demand, as in Check-N-Run (Eisenman
et al., NSDI 2022), but by the change and not by the values of a row.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.chunk.row_marks import decode_marks, encode_marks, states_of_rows, with_rows
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StateTypes, StepInfo, only_changed_rows
from ckpt_codecs.errors import CodecError
from ckpt_codecs.lossy.subspace import Subspace

_ALL, _SOME = bytes([0]), bytes([1])
"""The first byte of a chunk: it has all rows, or says which ones it has."""


@dataclass(frozen=True)
class SubspaceRows(Subspace):
    """Encodes the rows that changed in any state; all others are exact."""

    name: ClassVar[str] = "subspace-rows"

    def of_rows(self) -> DeltaCodec | None:
        return None

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> "SubspaceRows":
        return SubspaceRows(**asdict(super().fit(lambda: only_changed_rows(changes()), step)))

    def encode(self, change: StatePair) -> bytes:
        changed = change.few_changed_rows()
        if changed is None:
            return _ALL + super().encode(change)
        return _SOME + encode_marks(changed) + super().encode(change.rows(changed))

    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        if data[:1] == _ALL:
            return super().decode(data[1:], before, shape, form, wanted)
        if data[:1] != _SOME:
            raise CodecError("a chunk of rows begins with neither 0 nor 1")
        numbers, rest = decode_marks(data[1:], shape)
        selected = states_of_rows(before, shape, form, numbers)
        decoded = super().decode(rest, selected, (numbers.size, shape[1]), form, wanted)
        return with_rows(before, decoded, numbers)
