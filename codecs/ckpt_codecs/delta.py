"""The interface of delta codecs: a delta codec encodes the states of a parameter relative to an earlier step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np

from ckpt_codecs.base import Array, DType, Shape

MAX_ROWS = 0.75
"""If a larger share of the rows of a chunk changed, all rows are encoded: nearly nothing is to be saved."""

States = Mapping[str, Array]
"""A chunk of each state of one parameter by name (`fp32`, `param`, `exp_avg`, ...): one shape, any dtypes."""
StateTypes = Mapping[str, DType]
"""The dtype of each state of a chunk, by name."""


@dataclass(frozen=True)
class StepInfo:
    """What is known about the optimizer steps between two states of a run.

    Attributes:
        before: The number of optimizer steps at the earlier state; None if it is unknown.
        after: The same at the later state.
        options: The options of the optimizer's parameter group at the later state (`lr`, `betas`, `eps`,
            `weight_decay`, ...) that are numbers or lists of numbers.
    """

    before: int | None = None
    after: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class StatePair:
    """The same chunk of one parameter at two steps.

    `before` may lack states that `after` has. In the base of a chain it has none.
    """

    before: States
    after: States

    def changed_rows(self) -> Array | None:
        """Return which rows differ in any bit of any state: (rows,) bool, for states of any dtypes.

        None if the chunk has no rows, or a state has no earlier values of the same shape and dtype.
        """
        changed: Array | None = None
        for name, after in self.after.items():
            before = self.before.get(name)
            if after.ndim != 2 or before is None or before.shape != after.shape or before.dtype != after.dtype:
                return None
            rows, nbytes = after.shape[0], after.shape[1] * after.dtype.itemsize
            width = next(size for size in (8, 4, 2, 1) if nbytes % size == 0)
            old, new = (
                np.ascontiguousarray(values).reshape(-1).view(f"u{width}").reshape(rows, nbytes // width)
                for values in (before, after)
            )
            differs = (old != new).any(axis=1)
            changed = differs if changed is None else changed | differs
        return changed

    def few_changed_rows(self) -> Array | None:
        """Return which rows changed, (rows,) bool, if it pays to encode them alone, else None; of any dtypes."""
        changed = self.changed_rows()
        return changed if changed is not None and changed.any() and changed.mean() <= MAX_ROWS else None

    def rows(self, changed: Array) -> "StatePair":
        """Return the rows that changed, which (rows,) bool says, of all states of any dtypes."""
        numbers = np.flatnonzero(changed)
        return StatePair(
            {name: self.before[name][numbers] for name in self.after},
            {name: values[numbers] for name, values in self.after.items()},
        )


def only_changed_rows(changes: Iterator[StatePair]) -> Iterator[StatePair]:
    """Yield the rows of each chunk that changed; chunks without such rows are left out."""
    for change in changes:
        changed = change.changed_rows()
        if changed is None:
            yield change
        elif changed.any():
            yield change.rows(changed)


@dataclass(frozen=True)
class DeltaCodec(ABC):
    """Encodes a chunk of all states of a parameter relative to the same chunk of an earlier state.

    The states are encoded together because they depend on each other: Adam's new weights follow from the old weights
    and the new moments.

    Configuration: as for `Codec`. What `survey` and `fit` find is part of the configuration.

    Exactness: if `lossless`, then `decode` of `encode(change)` returns the bits of `change.after`, for any two states.

    Determinism: `decode` returns the same bits on every machine and at every level of the kernels, because a later
    delta may be encoded relative to them.

    Promises: `broken_promise` is None for everything that a lossy codec decodes from its own chunks.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool]

    def survey(self, samples: Iterable[tuple[int, StatePair]], step: StepInfo) -> "DeltaCodec":
        """Return this codec configured for the whole checkpoint. It is called once for each delta, before `fit`.

        Args:
            samples: For each parameter that the codec will encode: its number of elements, and one of its chunks.
        """
        return self

    def warning(self, step: StepInfo) -> str | None:
        """Return what the user should know about this codec in this run; None if there is nothing."""
        return None

    def fit(self, changes: Callable[[], Iterator[StatePair]], step: StepInfo) -> "DeltaCodec":
        """Return this codec configured for one parameter.

        Args:
            changes: Each call iterates over chunks of the parameter from the first one on.
        """
        return self

    def of_rows(self) -> "DeltaCodec | None":
        """Return the codec with these options that leaves out rows which did not change; None if there is none."""
        return None

    @abstractmethod
    def encode(self, change: StatePair) -> bytes:
        """Encode a chunk: the states of `change.after`, all of one shape, of any dtypes.

        Raises:
            NotApplicable: This codec cannot represent these values.
        """

    @abstractmethod
    def decode(
        self, data: bytes, before: States, shape: Shape, dtypes: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        """Decode the states of the later step: by name, arrays of this shape and of their dtypes.

        Args:
            data: Untrusted bytes. The memory that is used depends on `shape` and `dtypes` only, not on `data`.
            before: The states of the earlier step that `encode` was given, of the same shape.
            wanted: The names of the states to return, and no other work is done than these need; None: all.

        Raises:
            CodecError: `data` is not a chunk of this codec, or does not belong to these earlier states.
        """

    def promised(self, state: str, dtypes: StateTypes) -> Mapping[str, float]:
        """Return the error bounds that this codec promises for a state, by name. A manifest stores them.

        Args:
            dtypes: The dtypes of all states of the parameter.
        """
        return {}

    def broken_promise(self, change: StatePair, decoded: States) -> str | None:
        """Return which promise the decoded states of a chunk break; None if they break none."""
        return None

    def config(self) -> dict[str, Any]:
        """Return the configuration as JSON values; `delta_from_config` turns it into an equal codec."""
        return {"name": self.name, **asdict(self)}
