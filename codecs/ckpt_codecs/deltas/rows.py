"""The codec `rows`: of a table, only the rows that changed, as the codec `replay` encodes them.

Check-N-Run (Eisenman et al., NSDI 2022) and IncrCP (Lin et al., PVLDB 18(4)) store such rows of embedding tables,
which sparse gradients step. Here they are also predicted: rows that changed follow the optimizer's step, all others
do not, so that a step which is fitted to both predicts neither.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import ClassVar

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.chunk.row_marks import decode_marks, encode_marks, states_of_rows, with_rows
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StateTypes, StepInfo, only_changed_rows
from ckpt_codecs.deltas.format_ids import CHANGED_ROWS
from ckpt_codecs.deltas.replay import Replay


@dataclass(frozen=True)
class ReplayRows(Replay):
    """Encodes the rows that changed in any state. The numbers of the step are fitted to these rows."""

    name: ClassVar[str] = "rows"

    def of_rows(self) -> DeltaCodec | None:
        return None

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> DeltaCodec:
        """The codec fitted to the steps of the run, or to a single step, whichever makes a chunk of rows smaller.

        Of many steps of the run, sparse gradients give most rows only one. A single step is accepted if it explains
        nearly all rows; those that were not stepped follow it, too, so all rows are in that sample.
        """
        sample = next(only_changed_rows(changes()), None)
        fitted = self._fitted(lambda: only_changed_rows(changes()), step)
        if sample is None or step.before is None or step.after is None or step.after - step.before == 1:
            return fitted
        single = self._fitted(changes, replace(step, before=None, after=None))
        return min(fitted, single, key=lambda codec: len(codec.encode(sample)))

    def _fitted(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> "ReplayRows":
        fitted = super().fit(changes, step)
        assert isinstance(fitted, Replay)
        return ReplayRows(**asdict(fitted))

    def encode(self, change: StatePair) -> bytes:
        changed = change.few_changed_rows()
        if changed is None:
            return super().encode(change)
        return bytes([CHANGED_ROWS]) + encode_marks(changed) + super().encode(change.rows(changed))

    def decode(
        self, data: bytes, before: States, shape: Shape, dtypes: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        if data[:1] != bytes([CHANGED_ROWS]):
            return super().decode(data, before, shape, dtypes, wanted)
        numbers, rest = decode_marks(data[1:], shape)
        selected = states_of_rows(before, shape, dtypes, numbers)
        decoded = super().decode(rest, selected, (numbers.size, shape[1]), dtypes, wanted)
        return with_rows(before, decoded, numbers)
