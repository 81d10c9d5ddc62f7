"""A search for the largest quantizer step that the user's own evaluation accepts."""

from collections.abc import Callable
from math import sqrt


def coarsest(
    loss: Callable[[float], float], limit: float, min_step: float = 0.25, max_step: float = 8.0, tries: int = 6
) -> float | None:
    """The largest step from `min_step` to `max_step` that the search finds with `loss(step) <= limit`, or None.

    The search bisects the logarithm of the step. It calls `loss` at most `tries + 2` times, and always for the step
    that it returns. It assumes that the loss grows with the step.

    >>> coarsest(lambda step: step / 4, limit=1, min_step=1, max_step=16, tries=2)
    4.0
    """
    if loss(max_step) <= limit:
        return max_step
    if loss(min_step) > limit:
        return None
    for _ in range(tries):
        middle = sqrt(min_step * max_step)
        if loss(middle) <= limit:
            min_step = middle
        else:
            max_step = middle
    return min_step
