"""The average of several checkpoints."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ckpt.combine.average_blob import AverageBlob
from ckpt.combine.one_model import combined
from ckpt_formats.core.arguments import Decay, Positive, checked
from ckpt_formats.core.checkpoint import Checkpoint, Edit
from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.tensor import Tensor


@checked
def ema_weights(count: Positive, decay: Decay) -> list[float]:
    """The weights that `average` needs for the exponential moving average of `count` states, the oldest first.

    The average starts at the first state; each later state changes it to `decay * average + (1 - decay) * state`.

    >>> ema_weights(3, 0.5)
    [0.25, 0.25, 0.5]
    """
    return [decay ** (count - 1), *((1 - decay) * decay ** (count - 1 - i) for i in range(1, count))]


@dataclass(frozen=True)
class Average(Edit):
    """The mean of several checkpoints: where each is, and how it came to be."""

    sources: tuple[tuple[Path, tuple[Edit, ...]], ...]
    weights: tuple[float, ...]

    def inputs(self) -> tuple[Path, ...]:
        return tuple(path for path, _ in self.sources)


@checked
def average(sources: Sequence[Checkpoint], weights: Sequence[float] | None = None) -> Checkpoint:
    """The weighted mean of the models' tensors, without optimizer. All models must have the same names and shapes.

    An element is `(w0 * x0 + w1 * x1 + ...) / sum(w)`, computed in float64 from left to right, and rounded once (to
    nearest, ties to even) to the element type of the first source. NaN and infinity follow IEEE 754; a NaN is the
    positive quiet NaN. Of float64 tensors each operation rounds, so even equal values may change in the last bit.
    Integers and booleans must be equal in all sources, which is checked when they are read, but for
    `num_batches_tracked` of batch normalization: of these counters the largest is taken.

    `weights`: one finite number for each source, with a sum above zero; None: all are 1. They need not sum to 1.
    Names that are tied in all sources stay tied. Memory: a few blocks of 64 Ki elements, for any number of sources.

    Raises `IncompleteError` if a source lacks tensors, `UnsupportedError` if shapes or kinds of elements differ,
    `InvalidArgumentError` without sources and for weights that are not finite or not as many.
    """
    if not sources:
        raise InvalidArgumentError("an average needs at least one checkpoint")
    numbers = _checked_weights(sources, weights)
    divisor = math.fsum(numbers)

    def mean(name: str, tensors: Sequence[Tensor]) -> AverageBlob:
        return AverageBlob(tuple(tensors), numbers, tensors[0].dtype, divisor)

    edit = Average(tuple((source.path, source.history) for source in sources), numbers)
    return combined(sources, edit, mean, "averaged")


def _checked_weights(sources: Sequence[Checkpoint], weights: Sequence[float] | None) -> tuple[float, ...]:
    numbers = (1.0,) * len(sources) if weights is None else tuple(map(float, weights))
    if len(numbers) != len(sources):
        raise InvalidArgumentError(f"{len(sources)} checkpoints need as many weights, not {len(numbers)}")
    if not all(map(math.isfinite, numbers)) or math.fsum(numbers) <= 0:
        raise InvalidArgumentError("the weights of an average must be finite, and their sum must be above zero")
    return numbers
