"""The coarsest quantiser whose loss the user's own evaluation still accepts."""

from collections.abc import Callable
from math import sqrt


def coarsest(
    loss: Callable[[float], float], limit: float, least: float = 0.25, most: float = 8.0, tries: int = 6
) -> float | None:
    """The largest step, between `least` and `most`, at which `loss(step) <= limit`; None if there is none.

    Bisection of the steps' logarithms, so the loss is asked at most `tries + 2` times. What is returned was
    itself asked about; that the loss grows with the step is assumed.

    >>> coarsest(lambda step: step / 4, limit=1, least=1, most=16, tries=2)
    4.0
    """
    if loss(most) <= limit:
        return most
    if loss(least) > limit:
        return None
    for _ in range(tries):
        middle = sqrt(least * most)
        if loss(middle) <= limit:
            least = middle
        else:
            most = middle
    return least
