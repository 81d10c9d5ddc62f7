"""The expected time of a run whose failures come at random, by its intervals.

Failures are exponential with mean M, and come at any time, also while a run restarts and replays; then it restarts
again. A piece of work of length L that must be repeated after each failure, after a recovery of length R, takes
M exp(R/M) (exp(L/M) - 1) seconds on average (Daly 2006, equation 13). Both formulas below are sums of such pieces, so
they are exact, but for `base_delay` with a log, which is of first order.

    t step   C stall of a base   D delay of a base   R restart   M mean time between failures   k steps between bases
    r replay of a step   d slowdown   c stall of a flush   b steps between flushes   s = t (1 + d)   n = ceil(k / b)

    bases only   E(k) = M exp((R + D)/M) (exp((k t + C)/M) - 1)
    with a log   E(k, b) = M exp((R + r D/s)/M) (A (exp((b s + c)/M) - 1) + B (exp((m s + C)/M) - 1))
                 A = sum of exp(i r b/M) for i from 0 to n - 2,   B = exp((n - 1) r b/M),   m = k - (n - 1) b

A base is durable, so it takes the place of the flush at its step.
"""

import math

from ckpt.planning.costs import LogCosts, RunCosts

_MAX_EXPONENT = 600.0
"""exp of more is not computed: the run makes no progress."""


def expected_seconds(run: RunCosts, steps: int) -> float:
    """The expected seconds of `steps` steps and one base, with bases only; `inf` if there is no progress."""
    length = (steps * run.step + run.base_stall) / run.mtbf
    recovery = (run.restart + run.base_delay) / run.mtbf
    if length + recovery > _MAX_EXPONENT:
        return math.inf
    return run.mtbf * math.exp(recovery) * math.expm1(length)


def expected_seconds_logged(run: RunCosts, log: LogCosts, steps: int, flush: int) -> float:
    """The expected seconds of `steps` steps and one base, with a flush every `flush` steps; `inf` as above."""
    flush = min(flush, steps)
    step = run.step * (1 + log.slowdown)
    count = -(-steps // flush) - 1  # flushes between two bases
    last = (steps - count * flush) * step + run.base_stall
    each = flush * step + log.flush_stall
    replay = log.replay * flush / run.mtbf
    recovery = (run.restart + log.replay * run.base_delay / step) / run.mtbf
    if recovery + count * replay + max(last, each) / run.mtbf > _MAX_EXPONENT:
        return math.inf
    flushes = count if count < 2 or replay == 0 else math.expm1(count * replay) / math.expm1(replay)
    work = flushes * math.expm1(each / run.mtbf) + math.exp(count * replay) * math.expm1(last / run.mtbf)
    return run.mtbf * math.exp(recovery) * work


def waste(run: RunCosts, steps: int) -> float:
    """The share of time that does not advance the run, with bases only: 0 to 1."""
    return 1 - steps * run.step / expected_seconds(run, steps)


def waste_logged(run: RunCosts, log: LogCosts, steps: int, flush: int) -> float:
    """The share of time that does not advance the run, with a log: 0 to 1."""
    return 1 - steps * run.step / expected_seconds_logged(run, log, steps, flush)


def young_seconds(run: RunCosts) -> float:
    """Young's interval between bases in seconds of work: sqrt(2 C M)."""
    return math.sqrt(2 * run.base_stall * run.mtbf)


def daly_seconds(run: RunCosts) -> float:
    """Daly's interval between bases in seconds of work (2006, equation 37)."""
    if run.base_stall >= 2 * run.mtbf:
        return run.mtbf
    ratio = math.sqrt(run.base_stall / (2 * run.mtbf))
    return young_seconds(run) * (1 + ratio / 3 + ratio * ratio / 9) - run.base_stall


def first_order_logged(run: RunCosts, log: LogCosts) -> tuple[float, float]:
    """Steps between bases and between flushes where the first-order waste is lowest: sqrt(2 C M / (t r)) and
    sqrt(2 c M) / t; the first is `inf` if replay takes no time."""
    work = run.step * log.replay
    bases = math.sqrt(2 * run.base_stall * run.mtbf / work) if work else math.inf
    return bases, math.sqrt(2 * log.flush_stall * run.mtbf) / run.step
