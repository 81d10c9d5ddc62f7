"""Some values of one parameter, as a rule is fitted to them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.chunk.frame import as_uints
from ckpt_codecs.delta import StatePair
from ckpt_codecs.deltas.residuals.second_moments import SECOND
from ckpt_codecs.optimizers.state_names import FIRST, LARGEST, MOMENTUM, has_all, is_told, weights_of
from ckpt_codecs.optimizers.step import BETWEEN, DESCENT

SAMPLED = 1 << 14


@dataclass(frozen=True)
class Sample:
    """Weights and the states of their optimizer, before and after: flat, in float32."""

    w0: Array
    w1: Array
    before: Mapping[str, Array]
    after: Mapping[str, Array]

    def part(self, most: int) -> "Sample":
        """Fewer of the values."""
        every = slice(None, None, max(1, self.w0.size // most))

        def some(held: Mapping[str, Array]) -> dict[str, Array]:
            return {name: np.ascontiguousarray(values[every]) for name, values in held.items()}

        cut = [np.ascontiguousarray(w[every]) for w in (self.w0, self.w1)]
        return Sample(cut[0], cut[1], some(self.before), some(self.after))


def sample(changes: Iterator[StatePair]) -> Sample | None:
    """Values from chunks, laid end to end; None if they do not have what a rule works with."""
    whole = []
    for change in changes:
        weights = weights_of(change.after)
        rule = DESCENT[0] if MOMENTUM in change.after else BETWEEN
        if weights is not None and change.after[weights].size and has_all(change, rule, weights):
            whole.append((weights, change))
    if not whole:
        return None
    names = [
        name
        for name in (FIRST, SECOND, LARGEST, MOMENTUM)
        if all(is_told(change, name, weights) for weights, change in whole)
    ]
    most = SAMPLED // len(whole)

    def flat(arrays: list[Array]) -> Array:
        return np.concatenate([as_uints(array)[:: max(1, array.size // most)] for array in arrays]).view(np.float32)

    return Sample(
        flat([change.before[weights] for weights, change in whole]),
        flat([change.after[weights] for weights, change in whole]),
        {name: flat([change.before[name] for _, change in whole]) for name in names},
        {name: flat([change.after[name] for _, change in whole]) for name in names},
    )
