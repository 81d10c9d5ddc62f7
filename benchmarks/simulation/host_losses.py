"""Which share of failures the memory of peers does not survive: bursts of machines, all of them, and a second failure.

A failure takes no machine with its memory (software), one, a burst of several, or all. Of bursts, most take neighbours,
such as the machines of a rack, and the others machines anywhere. Groups of a scheme are placed with a jump.
"""

from __future__ import annotations

import math

from ckpt.planning.peers import largest_jump, uncovered_share
from ckpt_formats.parity.scheme import PeerScheme

from .settings import FIGURES, Setting

MAX_BURST = 64
"""Machines of a burst, at most: the rest of the geometric distribution, below 1e-10, is left out."""


def burst_sizes(machines: int) -> dict[int, float]:
    """The probability of each number of machines of a burst: 2 and a geometric number more, at most all machines."""
    more = FIGURES.burst_machines.value - 2
    ratio = more / (1 + more)
    sizes = range(2, min(machines, MAX_BURST) + 1)
    weights = [ratio ** (size - 2) for size in sizes]
    return {size: weight / sum(weights) for size, weight in zip(sizes, weights, strict=True)}


def burst_loss(scheme: PeerScheme, machines: int) -> float:
    """The probability that a burst is more than some group can lose."""
    jump = largest_jump(scheme, machines, int(FIGURES.peers_jump.value))
    near = FIGURES.burst_neighbours.value
    return sum(
        chance
        * (
            near * (scheme.lost_together(size, jump) > scheme.spares)
            + (1 - near) * uncovered_share(scheme, machines, size, jump)
        )
        for size, chance in burst_sizes(machines).items()
    )


def second_loss(scheme: PeerScheme, machines: int, chance: float) -> float:
    """The probability that so many further machines that hold the same fail before memory is filled again.

    `chance`: that some machine of the job fails in that time. Each further failure counts as independent of the others.
    Of copies, so many machines in a row of the circle are one too many, and a machine is in `spares + 1` such rows.
    """
    product = float(min(scheme.hosts, machines - 1)) if scheme.is_copies else 1.0
    for lost in range(1, scheme.spares + 1):
        others = scheme.spares + 1 - lost if scheme.is_copies else scheme.hosts - lost
        product *= chance * max(0, others) / max(1, machines - lost)
    return product


def loss_share(one: Setting, scheme: PeerScheme, mtbf: float, window: float) -> float:
    """The share of failures after which the state is not in the memory of peers any more.

    `window`: seconds from a failure until all memory is filled again.
    """
    machines, everything = int(one.machines.value), FIGURES.everything_share.value
    bursts = FIGURES.burst_share.value
    single = max(0.0, one.machine_share.value - bursts - everything)
    again = one.machine_share.value * -math.expm1(-window / mtbf)
    return min(1.0, everything + bursts * burst_loss(scheme, machines) + single * second_loss(scheme, machines, again))
