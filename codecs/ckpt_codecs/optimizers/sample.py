"""A sample of the values of one parameter, to which a step is fitted."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.delta import StatePair
from ckpt_codecs.optimizers.state_names import FIRST, LARGEST, MOMENTUM, SECOND, has_state, has_step_states, weights_of
from ckpt_codecs.optimizers.step import DESCENT, SEVERAL_STEPS

SAMPLE_SIZE = 1 << 14


@dataclass(frozen=True)
class Sample:
    """Weights and optimizer states before and after a step: (n,) float32 each.

    Attributes:
        w0, w1: The weights before and after.
        before, after: The other states by name.
    """

    w0: Array
    w1: Array
    before: Mapping[str, Array]
    after: Mapping[str, Array]

    def subsample(self, size: int) -> "Sample":
        """Return a smaller sample of about `size` of the values."""
        stride = slice(None, None, max(1, self.w0.size // size))

        def select(states: Mapping[str, Array]) -> dict[str, Array]:
            return {name: np.ascontiguousarray(values[stride]) for name, values in states.items()}

        w0, w1 = (np.ascontiguousarray(w[stride]) for w in (self.w0, self.w1))
        return Sample(w0, w1, select(self.before), select(self.after))


def sample_chunks(changes: Iterator[StatePair]) -> Sample | None:
    """Return values of some chunks, one after another; None if no chunk has the states that a step needs."""
    usable = []
    for change in changes:
        weights = weights_of(change.after)
        optimizer = DESCENT[0] if MOMENTUM in change.after else SEVERAL_STEPS
        if weights is not None and change.after[weights].size and has_step_states(change, optimizer, weights):
            usable.append((weights, change))
    if not usable:
        return None
    names = [
        name
        for name in (FIRST, SECOND, LARGEST, MOMENTUM)
        if all(has_state(change, name, weights) for weights, change in usable)
    ]
    size = SAMPLE_SIZE // len(usable)

    def select(arrays: list[Array]) -> Array:
        return np.concatenate([as_uints(array)[:: max(1, array.size // size)] for array in arrays]).view(np.float32)

    return Sample(
        select([change.before[weights] for weights, change in usable]),
        select([change.after[weights] for weights, change in usable]),
        {name: select([change.before[name] for _, change in usable]) for name in names},
        {name: select([change.after[name] for _, change in usable]) for name in names},
    )
