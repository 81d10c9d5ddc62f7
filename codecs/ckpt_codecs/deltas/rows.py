"""The codec `rows`: of a table, only the rows that changed, as the codec `replay` encodes them.

Check-N-Run (Eisenman et al., NSDI 2022) and IncrCP (Lin et al., PVLDB 18(4)) store such rows of embedding tables,
which sparse gradients step. Here they are also predicted: rows that changed follow the optimizer's step, all others
do not, so that a step which is fitted to both predicts neither.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from struct import Struct
from typing import ClassVar

import numpy as np

from ckpt_codecs.base import Array, Shape
from ckpt_codecs.chunk import streams
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.chunk.streams import LEVELS
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StateTypes, StepInfo
from ckpt_codecs.deltas.format_ids import CHANGED_ROWS
from ckpt_codecs.deltas.replay import Replay
from ckpt_codecs.errors import CodecError
from ckpt_codecs.format_ids import STORED

_HEAD = Struct("<BBI")
"""The first byte, then the kind and the size of the stream that says which rows changed."""
MAX_SHARE = 0.75
"""If more rows changed, all rows are encoded: nearly nothing is to be saved."""


@dataclass(frozen=True)
class Rows(Replay):
    """Encodes the rows that changed in any state. The numbers of the step are fitted to these rows."""

    name: ClassVar[str] = "rows"

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> DeltaCodec:
        fitted = super().fit(lambda: _changed_rows(changes()), step)
        assert isinstance(fitted, Replay)
        return Rows(**asdict(fitted))

    def encode(self, change: StatePair) -> bytes:
        changed = changed_rows(change)
        if changed is None or not changed.any() or changed.mean() > MAX_SHARE:
            return super().encode(change)
        plane = changed.view(np.uint8)
        out = np.empty(plane.size + 64, np.uint8)
        kind, size = streams.encode(plane, out, 0, LEVELS["max"])
        stream = plane if kind == STORED else out[:size]
        return (
            _HEAD.pack(CHANGED_ROWS, kind, stream.size) + stream.tobytes() + super().encode(_selected(change, changed))
        )

    def decode(
        self, data: bytes, before: States, shape: Shape, dtypes: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        if data[:1] != bytes([CHANGED_ROWS]):
            return super().decode(data, before, shape, dtypes, wanted)
        changed, rest = _read_rows(data, shape)
        for name, dtype in dtypes.items():
            old = before.get(name)
            if old is None or old.dtype != dtype or old.shape != shape:
                raise CodecError(f"rows were encoded relative to another state {name}")
        numbers = np.flatnonzero(changed)
        selected = {name: before[name][numbers] for name in dtypes}
        decoded = super().decode(rest, selected, (numbers.size, shape[1]), dtypes, wanted)
        result = {}
        for name, values in decoded.items():
            result[name] = before[name].copy()
            result[name][numbers] = values
        return result


def changed_rows(change: StatePair) -> Array | None:
    """Return which rows differ in any bit of any state: (rows,) bool.

    None if the chunk has no rows, or a state has no earlier values of the same shape and dtype.
    """
    changed: Array | None = None
    for name, after in change.after.items():
        before = change.before.get(name)
        if after.ndim != 2 or before is None or before.shape != after.shape or before.dtype != after.dtype:
            return None
        rows, nbytes = after.shape[0], after.shape[1] * after.dtype.itemsize
        width = next(size for size in (8, 4, 2, 1) if nbytes % size == 0)
        words = [as_uints(values).view(f"u{width}").reshape(rows, nbytes // width) for values in (before, after)]
        differs = (words[0] != words[1]).any(axis=1)
        changed = differs if changed is None else changed | differs
    return changed


def _selected(change: StatePair, changed: Array) -> StatePair:
    numbers = np.flatnonzero(changed)
    return StatePair(
        {name: change.before[name][numbers] for name in change.after},
        {name: values[numbers] for name, values in change.after.items()},
    )


def _changed_rows(changes: Iterator[StatePair]) -> Iterator[StatePair]:
    """Yield the rows of each chunk that changed; chunks without such rows are left out."""
    for change in changes:
        changed = changed_rows(change)
        if changed is None:
            yield change
        elif changed.any():
            yield _selected(change, changed)


def _read_rows(data: bytes, shape: Shape) -> tuple[Array, bytes]:
    """Return which rows changed, (rows,) bool, and the chunk that has them. Raises CodecError."""
    if len(shape) != 2 or len(data) < _HEAD.size:
        raise CodecError("a chunk of rows has no rows, or ends in its head")
    _, kind, size = _HEAD.unpack_from(data)
    end = _HEAD.size + size
    if end > len(data):
        raise CodecError("a chunk of rows ends in its stream")
    source = np.frombuffer(data, np.uint8)
    plane = streams.decode(kind, source, _HEAD.size, end, shape[0], "changed rows")
    if plane.max(initial=0) != 1:
        raise CodecError("a chunk of rows has no rows that changed, or marks them by other numbers than 1")
    return plane.view(np.bool_).copy(), data[end:]
