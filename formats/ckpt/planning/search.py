"""The intervals whose waste is lowest."""

from collections.abc import Callable

from ckpt.planning.costs import LogCosts, RunCosts
from ckpt.planning.waste import first_order_logged, waste, waste_logged

MAX_FAILURES = 100
"""No interval between bases is longer than this number of mean times between failures: longer ones save nothing."""
_MAX_STEPS = 1 << 53
_SPAN = 64
"""The factor around a first-order interval within which the best flush interval is searched first."""


def max_steps(run: RunCosts) -> int:
    """The largest interval between bases that is considered, in steps."""
    return max(1, min(_MAX_STEPS, int(MAX_FAILURES * run.mtbf / run.step)))


def best_bases(run: RunCosts, lowest: int = 1) -> int:
    """The steps between bases with the lowest waste, at least `lowest`, without a log."""
    return lowest_at(lambda steps: waste(run, steps), lowest, max(lowest, max_steps(run)))


def best_logged(run: RunCosts, log: LogCosts, lowest: int = 1) -> tuple[int, int]:
    """The steps between bases, at least `lowest`, and between flushes, with the lowest waste.

    Bases are searched at multiples of the flush interval, since a base takes the place of a flush.
    """
    highest = max(lowest, max_steps(run))

    def bases(flush: int) -> int:
        first, last = -(-lowest // flush), max(-(-lowest // flush), highest // flush)
        return flush * lowest_at(lambda number: waste_logged(run, log, number * flush, flush), first, last)

    _, start = first_order_logged(run, log)
    limit = int(max(1, min(highest, _SPAN * max(start, 1))))
    flush = lowest_at(lambda number: waste_logged(run, log, bases(number), number), 1, limit)
    return bases(flush), flush


def lowest_at(function: Callable[[int], float], first: int, last: int) -> int:
    """The integer from `first` to `last` where a function that falls and then rises is lowest.

    Each comparison is between points a third of the range apart, so rounding cannot mislead it while it matters.
    """
    while last - first > 4:
        third = (last - first) // 3
        low, high = first + third, last - third
        if function(low) <= function(high):
            last = high
        else:
            first = low
    return min(range(first, last + 1), key=function)
